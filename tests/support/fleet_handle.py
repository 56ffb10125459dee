"""The fleet as a replica sees it in Serve, without Serve."""

import pickle
from typing import Any

from triton_forwarder.fleet import Fleet


class FleetHandle:
    """In the place of Serve's handle of the deployment; `fleet` may be exchanged, as when Serve starts it again."""

    def __init__(self, fleet: Fleet | Any) -> None:
        self.fleet = fleet

    def __getattr__(self, method: str) -> "_Method":
        return _Method(self, method)


class _Method:
    def __init__(self, handle: FleetHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the fleet with copies, as from process to process."""
        args, kwargs = _copy((args, kwargs))
        return _copy(await getattr(self._handle.fleet, self._name)(*args, **kwargs))


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301  its own
