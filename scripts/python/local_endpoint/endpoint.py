"""Starts the parts of the endpoint, watches them, and stops them."""

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from local_endpoint import processes, ray_serve, triton

CHART_FILES = Path(__file__).parents[3] / "charts/triton-ray/files"
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
    http_port: int = 0
    """As above, for HTTP."""
    replicas: int = 1
    """Tritons, each with a replica and a Ray node of its own."""
    forwarders: int = 1
    """Replicas for each Triton."""
    min_replicas: int = 1
    """Serve scales between this and `replicas`."""
    triton_arguments: tuple[str, ...] = ()
    """Further arguments of tritonserver."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the forwarder."""


def _choose_ports(options: Options) -> ray_serve.Ports:
    for name, port in (("grpc", options.grpc_port), ("http", options.http_port)):
        if port and not processes.is_free(port):
            raise PartFailedError(
                f"port {port} is in use; stop what listens there, or give another --{name}-port (0: any)"
            )
    single = [name for name in ray_serve.Ports.__dataclass_fields__ if not name.startswith("replica_")]
    # Out of one range, so that no two are the same.
    first = processes.free_port_range(len(single) + 2 * ray_serve.REPLICA_PORTS)
    replicas = first + len(single)
    free = {name: first + index for index, name in enumerate(single)}
    given = {name: port for name, port in (("grpc", options.grpc_port), ("http", options.http_port)) if port}
    return ray_serve.Ports(replica_grpc=replicas, replica_http=replicas + ray_serve.REPLICA_PORTS, **free | given)


@dataclass
class Worker:
    """A Ray node without a work of its own but one replica, and the Triton beside it: a pod, on one machine."""

    host: str
    """An address of the loopback interface, for both."""
    triton: subprocess.Popen[bytes]
    triton_log: Path
    node_log: Path
    node: subprocess.Popen[bytes] | None = None
    """None until Ray's head has started."""


class LocalEndpoint:
    """Context manager of a running endpoint. Ends with every process stopped that it started."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ports = _choose_ports(options)
        # Not TMPDIR: HAProxy allows its sockets, 70 characters further down, a path of 97.
        self.folder = Path(tempfile.mkdtemp(prefix="triton-ray-", dir="/tmp"))
        self.state = ray_serve.State(self.folder)
        self.workers: list[Worker] = []
        self._haproxy = 0
        self._failed = False

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def http_address(self) -> str:
        """host:port for clients of Triton's HTTP protocol."""
        return f"127.0.0.1:{self.ports.http}"

    def __enter__(self) -> "LocalEndpoint":
        processes.adopt_orphans()
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self) -> None:
        self.ray_log = self.folder / "ray-serve.log"
        # 127.0.0.1 is the head's; the others are Triton's.
        hosts = [f"127.0.0.{2 + index}" for index in range(self.options.replicas)]
        for host in hosts:
            log = self.folder / f"triton-{host}.log"
            self.workers.append(Worker(host, self._start_triton(host, log), log, self.folder / f"ray-{host}.log"))
        plan = ray_serve.Plan(
            self.ports,
            ingress=self.options.ingress,
            replicas=self.options.replicas * self.options.forwarders,
            min_replicas=self.options.min_replicas * self.options.forwarders,
            settings=self.options.settings,
        )
        self._environment = ray_serve.environment(plan, folder=self.folder, chart_files=CHART_FILES)
        self.ray = processes.start(
            [sys.executable, "-m", "local_endpoint.ray_serve", plan.to_json(), str(self.folder)],
            env=self._environment,
            log=self.ray_log,
        )

    def _start_triton(self, host: str, log: Path) -> subprocess.Popen[bytes]:
        return triton.start(
            self.options.models,
            grpc_port=self.ports.triton_grpc,
            http_port=self.ports.triton_http,
            metrics_port=self.ports.triton_metrics,
            log=log,
            host=host,
            arguments=self.options.triton_arguments,
        )

    def _start_next_node(self) -> None:
        address = self.state.address()
        waiting = [worker for worker in self.workers if worker.node is None]
        # Two nodes that start at once take the same name for their sockets.
        sockets = len(list((self.folder / "session_latest/sockets").glob("raylet*")))
        if address and waiting and sockets > len(self.workers) - len(waiting):
            worker = waiting[0]
            worker.node = self._start_node(worker.host, address, worker.node_log)

    def _start_node(self, host: str, address: str, log: Path) -> subprocess.Popen[bytes]:
        return processes.start(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                f"--address={address}",
                f"--node-ip-address={host}",
                "--num-cpus=0",
                f'--resources={{"triton": {self.options.forwarders}}}',
                f"--object-store-memory={ray_serve.OBJECT_STORE}",
                "--disable-usage-stats",
            ],
            env=self._environment,
            log=log,
        )

    def wait_until_ready(self) -> None:
        """Return when a client's request would succeed.

        Raises:
            PartFailedError: a part has ended, or it took longer than START_TIMEOUT_S.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.state.is_running() and self._answers()):
            self._start_next_node()
            self.check()
            if time.monotonic() > deadline:
                self._fail(f"the endpoint was not ready within {START_TIMEOUT_S} s", self.ray_log)
            time.sleep(0.1)

    def _answers(self) -> bool:
        # Without a replica, the question would start one.
        if self.options.min_replicas == 0:
            return True
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                # ServerReadyResponse with `bool ready = 1` true.
                ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=2)
            except grpc.RpcError:
                return False
            return bool(ready == b"\x08\x01")

    def check(self) -> None:
        """Raise PartFailedError, naming the part, when one has ended.

        Of several Tritons and nodes, one that has ended is started again, as a pod would be.
        """
        for worker in self.workers:
            if (code := worker.triton.poll()) is not None:
                if len(self.workers) == 1:
                    failed = ("E1", "error:", "failed", "Fail")
                    self._fail(f"tritonserver {_ended(code)}", worker.triton_log, only=failed)
                print(f"tritonserver on {worker.host} {_ended(code)}, starting it again", flush=True)
                triton.remove_shared_memory(host=worker.host, grpc_port=self.ports.triton_grpc)
                worker.triton = self._start_triton(worker.host, worker.triton_log)
        for name, pid in self.state.processes().items():
            # Ray's processes also end when the program that started them does; then that one is to be named.
            if not processes.is_alive(pid) and _outlives(self.ray, seconds=3):
                self._fail(f"Ray's {name} has ended", self.ray_log)
        for worker in self.workers:
            if worker.node and (code := worker.node.poll()) is not None and _outlives(self.ray, seconds=3):
                if len(self.workers) == 1:
                    self._fail(f"Ray's node on {worker.host} {_ended(code)}", worker.node_log)
                print(f"Ray's node on {worker.host} {_ended(code)}, starting it again", flush=True)
                worker.node = self._start_node(worker.host, self.state.address(), worker.node_log)
        if (code := self.ray.poll()) is not None:
            self._fail(f"the Ray Serve process {_ended(code)}", self.ray_log)
        if self.options.ingress != "python" and self.state.is_running() and not processes.is_alive(self._haproxy):
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
        orderly = self.state.is_running() and not self._failed
        if hasattr(self, "ray"):
            processes.stop(self.ray, within_s=20 if orderly else 0)
        for worker in self.workers:
            if worker.node:
                # A node that is asked to end drains for half a minute, for requests that nobody waits for any more.
                processes.stop(worker.node, within_s=0)
        processes.stop_all([worker.triton for worker in self.workers], within_s=20)
        # After an orderly end there are none but those of the nodes.
        processes.stop_descendants(within_s=3)
        for worker in self.workers:
            triton.remove_shared_memory(host=worker.host, grpc_port=self.ports.triton_grpc)
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
