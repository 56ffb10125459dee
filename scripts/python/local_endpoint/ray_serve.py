"""Ray and Ray Serve with the forwarder, as one program: `python -m local_endpoint.ray_serve PORTS TEMP_FOLDER`.

It runs until SIGTERM. The parent learns from its files in TEMP_FOLDER how far it is (see `State`).
"""

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ingress = Literal["replica", "python"]

# Where Ray Serve listens for replicas that HAProxy calls; it takes the next one for each replica.
REPLICA_PORTS = 20


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


def environment(ports: Ports, *, ingress: Ingress, folder: Path, forwarder: Path) -> dict[str, str]:
    """Return the environment of Ray's processes."""
    one_gigabyte = str(2**30)
    haproxy = folder / "h"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(forwarder), str(Path(__file__).parents[1])]),
        # Both, or a replica answers every request above 4 MiB with RESOURCE_EXHAUSTED.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": one_gigabyte,
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": one_gigabyte,
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if ingress == "replica" else "0",
        # Room for tensors: with the defaults of 16 KiB and 64 KiB, large bodies take twice as long.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
        "RAY_SERVE_HAPROXY_H2_MAX_FRAME_SIZE": "65536",
        "RAY_SERVE_HAPROXY_H2_FE_INITIAL_WINDOW_SIZE": "1048576",
        "RAY_SERVE_HAPROXY_H2_BE_INITIAL_WINDOW_SIZE": "1048576",
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        # By default the 101st stream of a channel waits for another to end.
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "10000",
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": "10000",
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
        # No load balancer has to take the replica off its list first; the default keeps it for 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


class State:
    """What the parent may read: the pids of Ray's own processes, and whether the application runs."""

    def __init__(self, folder: Path) -> None:
        self._pids = folder / "ray-processes.json"
        self._running = folder / "serve-running"

    def set_processes(self, pids: dict[str, int]) -> None:
        """Record Ray's processes by name."""
        partial = self._pids.with_suffix(".partial")
        partial.write_text(json.dumps(pids))
        partial.rename(self._pids)

    def processes(self) -> dict[str, int]:
        """Return Ray's processes by name; none before Ray has started."""
        pids: dict[str, int] = json.loads(self._pids.read_text()) if self._pids.exists() else {}
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


def serve_until_terminated(ports: Ports, folder: Path) -> None:
    """Start Ray and the application, and run them until SIGTERM or SIGINT."""
    stopping = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopping.set())

    import ray
    from ray import serve

    from triton_forwarder import build_app

    state = State(folder)
    ray.init(
        address="local",
        num_cpus=2,
        resources={"triton": 1},
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )
    # Ray puts handlers of its own in place of ours.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopping.set())
    state.set_processes(_ray_processes())
    serve.start(
        http_options={"host": "127.0.0.1", "port": ports.http},
        grpc_options={
            "port": ports.grpc,
            "grpc_servicer_functions": ["triton_forwarder:add_servicer_to_server"],
            # Triton has none, and this one could not describe the messages.
            "enable_reflection": False,
        },
    )
    serve.run(build_app({"triton_address": f"127.0.0.1:{ports.triton_grpc}"}), name="triton", route_prefix="/")
    state.set_running()
    stopping.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    serve_until_terminated(Ports(**json.loads(sys.argv[1])), Path(sys.argv[2]))
