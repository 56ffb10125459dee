"""What the Serve configuration may set under the application's `args`."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Of all replicas alike. The ports are Triton's, on the address of the replica's own node."""

    triton_grpc_port: int = 8001
    """Where Triton speaks gRPC."""
    triton_http_port: int = 8100
    """Where Triton speaks HTTP."""
    triton_metrics_port: int = 8002
    """Where Triton has its metrics, which tell Serve's autoscaler its load."""
    min_replicas: int = 1
    """Replicas, and so Tritons, without load; 0 starts the first one with the first request."""
    max_replicas: int = 1
    """Replicas under full load."""
    target_ongoing_requests: float = 2.0
    """Requests in flight on one Triton that Serve scales for; scripts/target-ongoing-requests finds it."""
    upscale_delay_s: float = 30.0
    """How long the load must be above the target before a replica is added."""
    downscale_delay_s: float = 600.0
    """How long the load must be below the target before a replica is removed."""
    max_ongoing_requests: int = 1000
    """Requests in flight through one replica, above which callers get RESOURCE_EXHAUSTED."""
    startup_timeout_s: float = 600.0
    """How long a replica waits at its start for Triton to be ready."""
    health_timeout_s: float = 5.0
    """How long a health check waits for Triton's answer."""
    drain_timeout_s: float = 60.0
    """How long a replica that is to end waits for the requests that its Triton still works on."""
    allow_model_control: bool = False
    """Let clients load and unload models; each call reaches every Triton, and is repeated on each new one."""
    allow_trace_and_log_settings: bool = False
    """Let clients read and write Triton's trace and log settings; a write reaches every Triton."""
    allow_shared_memory: bool = False
    """Let clients register shared memory; useful only when they run in Triton's own pod."""

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> "Settings":
        """Check the application's `args`.

        Raises:
            ValueError: an unknown key, or a value of the wrong type or range; the message names it.
        """
        types = {field.name: type(field.default) for field in fields(cls)}
        kinds = {int: "a whole number", float: "a number", bool: "true or false"}
        for name, value in args.items():
            if name not in types:
                raise ValueError(f"unknown forwarder setting {name!r}; known are {', '.join(types)}")
            number = types[name] is float and isinstance(value, int | float) and not isinstance(value, bool)
            if not (number or type(value) is types[name]):
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be {kinds[types[name]]}")
            if number and not 0 < value < float("inf"):
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be a finite number above 0")
            if name.endswith("_port") and not 0 < value < 65536:
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be a port, 1 to 65535")
            if name == "max_ongoing_requests" and value < 1:
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be at least 1")
        settings = cls(**args)
        if not 0 <= settings.min_replicas <= settings.max_replicas or settings.max_replicas == 0:
            raise ValueError(
                f"forwarder settings min_replicas and max_replicas are {settings.min_replicas} and "
                f"{settings.max_replicas}, but must be 0 <= min_replicas <= max_replicas, and max_replicas at least 1"
            )
        return settings
