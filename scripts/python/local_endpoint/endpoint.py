"""Starts the parts of the endpoint, watches them, and stops them."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import grpc

from local_endpoint import processes, ray_serve, triton

FORWARDER = Path(__file__).parents[3] / "charts/triton-ray/files"
START_TIMEOUT_S = 300


class PartFailedError(Exception):
    """A part of the endpoint could not start, or has ended by itself."""


@dataclass(frozen=True)
class Options:
    """What to serve, and how."""

    models: tuple[Path, ...]
    """Triton model repositories."""
    ingress: ray_serve.Ingress
    grpc_port: int
    """Port for clients; 0 for any free one."""


def _choose_ports(options: Options) -> ray_serve.Ports:
    if options.grpc_port and not processes.is_free(options.grpc_port):
        raise PartFailedError(
            f"port {options.grpc_port} is in use; stop what listens there, or give another --grpc-port (0: any)"
        )
    single = [
        name for name in ray_serve.Ports.__dataclass_fields__ if name not in {"grpc", "replica_grpc", "replica_http"}
    ]
    # Out of one range, so that no two are the same.
    first = processes.free_port_range(1 + len(single) + 2 * ray_serve.REPLICA_PORTS)
    replicas = first + 1 + len(single)
    return ray_serve.Ports(
        grpc=options.grpc_port or first,
        replica_grpc=replicas,
        replica_http=replicas + ray_serve.REPLICA_PORTS,
        **{name: first + 1 + index for index, name in enumerate(single)},
    )


class LocalEndpoint:
    """Context manager of a running endpoint. Ends with every process stopped that it started."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ports = _choose_ports(options)
        # Not TMPDIR: HAProxy allows its sockets, 70 characters further down, a path of 97.
        self.folder = Path(tempfile.mkdtemp(prefix="triton-ray-", dir="/tmp"))
        self.state = ray_serve.State(self.folder)
        self._haproxy = 0
        self._failed = False

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.ports.grpc}"

    def __enter__(self) -> "LocalEndpoint":
        processes.adopt_orphans()
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self) -> None:
        self.triton_log, self.ray_log = self.folder / "triton.log", self.folder / "ray-serve.log"
        self.triton = triton.start(
            self.options.models,
            grpc_port=self.ports.triton_grpc,
            http_port=self.ports.triton_http,
            metrics_port=self.ports.triton_metrics,
            log=self.triton_log,
        )
        self.ray = processes.start(
            [sys.executable, "-m", "local_endpoint.ray_serve", json.dumps(asdict(self.ports)), str(self.folder)],
            env=ray_serve.environment(
                self.ports, ingress=self.options.ingress, folder=self.folder, forwarder=FORWARDER
            ),
            log=self.ray_log,
        )

    def wait_until_ready(self) -> None:
        """Return when a client's request would succeed.

        Raises:
            PartFailedError: a part has ended, or it took longer than START_TIMEOUT_S.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.state.is_running() and self._answers()):
            self.check()
            if time.monotonic() > deadline:
                self._fail(f"the endpoint was not ready within {START_TIMEOUT_S} s", self.ray_log)
            time.sleep(0.2)

    def _answers(self) -> bool:
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                # ServerReadyResponse with `bool ready = 1` true.
                ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=2)
            except grpc.RpcError:
                return False
            return bool(ready == b"\x08\x01")

    def check(self) -> None:
        """Raise PartFailedError, naming the part, when one has ended."""
        if (code := self.triton.poll()) is not None:
            self._fail(f"tritonserver {_ended(code)}", self.triton_log, only=("E1", "error:", "failed", "Fail"))
        for name, pid in self.state.processes().items():
            # Ray's processes also end when the program that started them does; then that one is to be named.
            if not processes.is_alive(pid) and _outlives(self.ray, seconds=3):
                self._fail(f"Ray's {name} has ended", self.ray_log)
        if (code := self.ray.poll()) is not None:
            self._fail(f"the Ray Serve process {_ended(code)}", self.ray_log)
        if self.options.ingress == "replica" and self.state.is_running() and not processes.is_alive(self._haproxy):
            # A reload replaces the process, and the new one is there before the old one ends.
            self._haproxy = processes.find_descendant("haproxy")
            if not self._haproxy:
                self._fail("HAProxy has ended", self.ray_log)

    def _fail(self, what: str, log: Path, *, only: tuple[str, ...] = ()) -> None:
        self._failed = True
        raise PartFailedError(f"{what}; the end of {log}:\n{processes.log_tail(log, only=only)}")

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # Ray in the middle of its start does not listen, and without one of its parts it waits for that in vain; what
        # it has started is stopped below.
        patience = {"ray": 20 if self.state.is_running() and not self._failed else 0, "triton": 20}
        for part, seconds in patience.items():
            if hasattr(self, part):
                processes.stop(getattr(self, part), within_s=seconds)
        # After an orderly end there are none; Ray's own would drain for half a minute.
        processes.stop_descendants(within_s=3)
        triton.remove_shared_memory(grpc_port=self.ports.triton_grpc)
        if not self._failed:
            shutil.rmtree(self.folder, ignore_errors=True)


def _outlives(process: subprocess.Popen[bytes], *, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
