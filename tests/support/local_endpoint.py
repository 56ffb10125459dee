"""scripts/local-endpoint, or its Triton alone, for the time of a `with` block."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from local_endpoint import processes, triton
from local_endpoint.ray_serve import Ingress
from tests.support.started import Started, describe, wait_for_exit

PROGRAM = Path(__file__).parents[2] / "scripts/local-endpoint"

# Bounds against a hang, far above what is ever needed.
START_S = 240
STOP_S = 60


@dataclass(frozen=True)
class EndpointProgram:
    """A started scripts/local-endpoint, ready or not."""

    process: subprocess.Popen[bytes]
    started: Started
    output_file: Path

    def output(self) -> str:
        """Return all that it has printed."""
        return self.output_file.read_text()

    def wait_for_line(self, start: str) -> str:
        """Return the rest of the first line that begins with `start`.

        Raises:
            AssertionError: the program ended, or took too long, without it.
        """
        deadline = time.monotonic() + START_S
        while True:
            ended = self.process.poll() is not None
            if found := re.search(rf"^{re.escape(start)}(.*)\n", self.output(), re.MULTILINE):
                return found[1].strip()
            assert not ended, f"local-endpoint ended with exit code {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"local-endpoint took more than {START_S} s:\n{self.output()}"
            time.sleep(0.1)

    def folder_of_logs(self) -> Path | None:
        """Return the folder that it has for the time it runs, if it has said which."""
        found = re.search(r"^logs: +(.*)\n", self.output(), re.MULTILINE)
        return Path(found[1]) if found else None

    def wait_for_exit(self, *, within_s: float = STOP_S) -> int:
        """Return its exit code."""
        return wait_for_exit(self.process, within_s=within_s, what=f"local-endpoint (it printed {self.output()!r})")

    def assert_nothing_is_left(self, *, within_s: float = 5) -> None:
        """Fail when a process that it started still lives,."""
        left = describe(self.started.wait_for_none(within_s=within_s))
        assert not left, f"local-endpoint left processes behind:\n{left}"


@dataclass(frozen=True)
class RunningEndpoint(EndpointProgram):
    """An endpoint that answers requests."""

    ingress: Ingress
    address: str
    """host:port for clients."""
    http_address: str
    """host:port for clients of the HTTP protocol."""
    triton_addresses: tuple[str, ...]
    """host:port of the gRPC of each Triton, which clients have no need to know."""
    ray_pid: int
    """Of the program that starts Ray and Serve."""
    folder: Path
    """Where its logs and sockets are while it runs."""

    @property
    def triton_address(self) -> str:
        """That of the first, or only, Triton."""
        return self.triton_addresses[0]

    @property
    def triton_pid(self) -> int:
        """That of the first, or only, Triton."""
        return self.pid_of_triton(self.triton_address)

    def pid_of_triton(self, address: str) -> int:
        """Return the pid of the Triton that listens there now."""
        host, _, port = address.partition(":")
        wanted = {f"--grpc-address={host}", f"--grpc-port={port}"}
        (pid,) = (int(each.pid) for each in self.started.processes() if wanted <= set(each.cmdline()))
        return pid

    def log_of_triton(self, address: str) -> Path:
        """Return the file with what the Triton there prints."""
        return self.folder / f"triton-{address.partition(':')[0]}.log"

    def pids_of(self, name: str) -> list[int]:
        """Return the pids of the endpoint's processes that have this name; of HAProxy, some that end after a reload."""
        pids = [int(each.pid) for each in self.started.processes() if each.name() == name]
        assert pids, f"no {name} among the processes of the endpoint"
        return pids


@contextmanager
def started_endpoint(*arguments: str | Path, exit_code: int | None = 0) -> Iterator[EndpointProgram]:
    """Start scripts/local-endpoint; at the end stop it by SIGTERM, if it has not ended, and look for what it left.

    Args:
        arguments: of the command line.
        exit_code: the one expected; None for any.
    """
    started = Started()
    with tempfile.TemporaryDirectory(prefix="endpoint-test-") as folder:
        output = Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [PROGRAM, *arguments],
                env=os.environ | started.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the tests alone, which then stop the endpoint.
                start_new_session=True,
            )
        program = EndpointProgram(process, started, output)
        try:
            yield program
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = program.wait_for_exit()
            assert exit_code in {None, code}, f"exit code {code}:\n{program.output()}"
            program.assert_nothing_is_left()
            if code == 0 and (logs := program.folder_of_logs()):
                assert not logs.exists(), f"local-endpoint left its folder behind: {logs}"
        finally:
            # After a failure in between: as clean an end as can be had, and then any end.
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                started.wait_for_none(within_s=STOP_S)
            started.kill()
            process.wait()
            if logs := program.folder_of_logs():
                shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def running_endpoint(
    *models: Path,
    ingress: Ingress = "direct",
    grpc_port: int = 0,
    replicas: int | str = 1,
    triton_args: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    exit_code: int | None = 0,
) -> Iterator[RunningEndpoint]:
    """Run scripts/local-endpoint with model repositories until the end of the block.

    Args:
        models: model repositories.
        ingress: as for the program.
        grpc_port: as for the program; 0 for any free one.
        replicas: as for the program.
        triton_args: further arguments of tritonserver.
        settings: of the forwarder.
        exit_code: the one expected; None for any.
    """
    with started_endpoint(
        *(f"--models={folder}" for folder in models),
        *(f"--triton-arg={argument}" for argument in triton_args),
        *(f"--setting={name}={json.dumps(value)}" for name, value in (settings or {}).items()),
        f"--ingress={ingress}",
        f"--grpc-port={grpc_port}",
        f"--replicas={replicas}",
        exit_code=exit_code,
    ) as program:
        address = program.wait_for_line("endpoint: ")
        tritons = re.findall(r"^triton: .* at (\S+:\d+)  \(pid \d+\)$", program.output(), re.MULTILINE)
        ray_pid = int(re.sub(r".*\(pid (\d+)\)", r"\1", program.wait_for_line("ray:")))
        program.started.processes()  # Now that all have been seen, none can hide.
        yield RunningEndpoint(
            **vars(program),
            ingress=ingress,
            address=address,
            http_address=program.wait_for_line("http:"),
            triton_addresses=tuple(tritons),
            ray_pid=ray_pid,
            folder=Path(program.wait_for_line("logs:")),
        )


@dataclass(frozen=True)
class RunningTriton:
    """A Triton with nothing in front of it."""

    process: subprocess.Popen[bytes]
    address: str
    """host:port of its gRPC."""
    http_address: str
    """host:port of its HTTP."""
    metrics_address: str
    """host:port of its metrics."""
    log_file: Path

    def log(self) -> str:
        """Return all that it has printed."""
        return self.log_file.read_text()


@contextmanager
def running_triton(*models: Path, grpc_port: int = 0, arguments: Sequence[str] = ()) -> Iterator[RunningTriton]:
    """Run the real Triton alone until the end of the block.

    Args:
        models: model repositories.
        grpc_port: of its own choice if 0.
        arguments: further ones of tritonserver.
    """
    free = processes.free_port_range(3)
    port = grpc_port or free
    with tempfile.TemporaryDirectory(prefix="triton-test-") as folder:
        log = Path(folder) / "triton.log"
        process = triton.start(
            models, grpc_port=port, http_port=free + 1, metrics_port=free + 2, log=log, arguments=arguments
        )
        grpc_address, http_address, metrics_address = (f"127.0.0.1:{each}" for each in (port, free + 1, free + 2))
        running = RunningTriton(process, grpc_address, http_address, metrics_address, log)
        try:
            _wait_until_ready(running)
            yield running
        finally:
            children = _descendants(process.pid)
            processes.stop(process, within_s=30)
            for child in psutil.wait_procs(children, timeout=10)[1]:
                child.kill()
            triton.remove_shared_memory(grpc_port=port)


def _descendants(pid: int) -> list[psutil.Process]:
    # By session: those of a Triton that was killed are no longer its children.
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.pid != pid:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def _wait_until_ready(running: RunningTriton) -> None:
    deadline = time.monotonic() + START_S
    with grpc.insecure_channel(running.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        while True:
            assert running.process.poll() is None, f"Triton has ended:\n{running.log()}"
            try:
                if ready(b"", timeout=5) == b"\x08\x01":
                    return
            except grpc.RpcError:
                pass
            assert time.monotonic() < deadline, f"Triton was not ready within {START_S} s:\n{running.log()}"
            time.sleep(0.1)
