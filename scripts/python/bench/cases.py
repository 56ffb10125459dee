"""What is measured: the ways to Triton, and the loads."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeVar

Rpc = Literal["ModelInfer", "ModelStreamInfer"]
INGRESSES = ("direct", "replica", "python")

_UNITS = {"": 1, "k": 10**3, "m": 10**6}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Way:
    """One kind of endpoint in front of a Triton."""

    ingress: str
    forwarders: int
    """Forwarder replicas for one Triton."""

    def __str__(self) -> str:
        return self.ingress if self.forwarders == 1 else f"{self.ingress}, {self.forwarders} forwarders"


@dataclass(frozen=True)
class Case:
    """One load."""

    rpc: Rpc
    size: int
    """Bytes of the tensor that goes there and comes back."""
    callers: int
    """Closed loops: each sends its next request when it has the answer to the last one."""

    def __str__(self) -> str:
        return f"{self.rpc}, {size_name(self.size)}, {plural(self.callers, self.caller)}"

    @property
    def caller(self) -> str:
        """What one closed loop is called."""
        return "stream" if self.rpc == "ModelStreamInfer" else "caller"


def all_ways(ingresses: Sequence[str], forwarders: Sequence[int]) -> list[Way]:
    """Return every way once. The direct one does not lead through a forwarder, so their number is no matter there."""
    ways = [Way(ingress, 1 if ingress == "direct" else number) for ingress, number in product(ingresses, forwarders)]
    return list(dict.fromkeys(ways))


def all_cases(sizes: Sequence[int], callers: Sequence[int]) -> list[Case]:
    """Return the loads: requests of every size, and streams of the smallest."""
    requests = [Case("ModelInfer", size, number) for size, number in product(sizes, callers)]
    return requests + [Case("ModelStreamInfer", min(sizes), number) for number in callers]


def size_name(size: int) -> str:
    """Return the size in the largest unit that leaves it at 1 or above: `12.6 MB`."""
    for unit, name in ((10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def plural(number: int, noun: str) -> str:
    """Return `1 caller`, `8 callers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_list(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a parser of a comma-separated option; an entry named twice is an error."""

    def parse_all(text: str) -> list[_T]:
        values = [parse(part.strip()) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text}: an entry stands there twice")
        return values

    return parse_all


def parse_ingress(text: str) -> str:
    """Return the ingress."""
    if text not in INGRESSES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(INGRESSES)}")
    return text


def parse_count(text: str) -> int:
    """Return a whole number from 1 to 1024."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1024")
    return int(text)


def parse_size(text: str) -> int:
    """Return bytes: `16`, `100k` (1,000 each), `12.6m`."""
    number = text.rstrip("kmKM")
    try:
        size = float(number) * _UNITS[text[len(number) :].lower()]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16, 100k or 12.6m") from None
    # Triton's messages end at 2 GiB.
    if not (1 <= size <= 2 * 10**9 and size == round(size)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes from 1 to 2000m")
    return round(size)


def parse_positive(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
