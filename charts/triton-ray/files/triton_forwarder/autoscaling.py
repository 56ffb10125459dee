"""Scaling on what Triton does, for on the straight path Serve sees none of the requests."""

import asyncio
import math
import time
import urllib.request
from typing import Any

from ray.serve.config import AutoscalingContext

LOAD = "triton_load"

_BUSY_US = "nv_inference_request_duration_us"
_PENDING = "nv_inference_pending_request_count"


class TritonLoad:
    """The load of one Triton, from its metrics: how many requests it has in flight."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._url = f"http://{address}/metrics"
        self._timeout_s = timeout_s
        self._last: tuple[float, float] | None = None
        # Never by way of a proxy that the pod's environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def read(self) -> float:
        """Return the mean number of requests in flight since the last call, or those that wait, if they are more.

        The mean is the time that all requests took together over the time that has passed (Little's law,
        https://doi.org/10.1287/opre.9.3.383); a request counts when it has ended.

        Raises:
            OSError: Triton does not answer.
        """
        text = await asyncio.to_thread(self._fetch)
        now = time.monotonic()
        sums = sum_metrics(text, (_BUSY_US, _PENDING))
        last, self._last = self._last, (now, sums[_BUSY_US])
        # Counters that went back are those of a Triton that was restarted.
        mean = max(0.0, sums[_BUSY_US] - last[1]) / 1e6 / (now - last[0]) if last and now > last[0] else 0.0
        return max(mean, sums[_PENDING])

    def _fetch(self) -> str:
        with self._opener.open(self._url, timeout=self._timeout_s) as response:
            return str(response.read().decode())


def sum_metrics(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Return the sum over all labels of each metric, of a text in Prometheus' exposition format."""
    sums = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in sums:
            sums[name] += float(rest.rpartition("}")[2].split()[0])
    return sums


def policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the load of all Tritons asks for; Serve applies bounds and delays.

    Serve's own count stands for what waits for a first replica, and for requests that Triton has not begun.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    in_flight = max(sum(loads.values()), context.total_num_requests)
    config: Any = context.config
    return math.ceil(in_flight / config.get_target_ongoing_requests()), {}
