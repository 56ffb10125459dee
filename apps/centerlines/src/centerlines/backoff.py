"""When to try again."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Exponential waits with full jitter, as many as fit into a time.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    patience_s: float
    """How long after the first failure the last try begins."""
    first_s: float = 0.25
    """Longest wait before the second try; each further one may be twice as long."""
    longest_s: float = 10.0
    """Longest wait of all."""

    def waits(
        self, *, clock: Callable[[], float], jitter: Callable[[float, float], float] = random.uniform
    ) -> Iterator[float]:
        """Yield the seconds to wait before the second try, the third and so on, until the patience has ended.

        The patience begins when the first number is asked for; the last wait ends together with it.

        Args:
            clock: the time in seconds.
            jitter: draws a number between two.
        """
        start = clock()
        ceiling = self.first_s
        while True:
            # Half of the wait is sure, or many tries may fall into the first second of an outage.
            wait = ceiling / 2 + jitter(0, ceiling / 2)
            left = self.patience_s - (clock() - start)
            if left <= 0:
                return
            yield min(wait, left)
            ceiling = min(2 * ceiling, self.longest_s)
