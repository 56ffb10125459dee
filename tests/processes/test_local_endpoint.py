"""scripts/local-endpoint as a program: what it prints, and what it leaves behind when it, or a part of it, ends."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from local_endpoint.processes import free_port
from local_endpoint.triton import SHARED_MEMORY, shared_memory_prefix
from tests.support.local_endpoint import (
    RunningEndpoint,
    running_endpoint,
    running_triton,
    started_endpoint,
)
from tests.support.models import write_model
from tests.support.started import describe


def answers(address: str) -> bool:
    """Tell whether a client at this address gets its tensor back."""
    values = np.arange(3, dtype=np.float32)
    given = InferInput("INPUT", [3], "FP32")
    given.set_data_from_numpy(values)
    with InferenceServerClient(address) as client:
        output = client.infer("identity_fp32", [given], client_timeout=60).as_numpy("OUTPUT")
    return bool(np.array_equal(output, values))


def shared_memory(endpoint: RunningEndpoint) -> list[str]:
    """Return the shared memory of the endpoint's Triton, which has its port in its name."""
    host, _, port = endpoint.triton_address.partition(":")
    prefix = shared_memory_prefix(host, int(port))
    return [path.name for path in SHARED_MEMORY.glob(f"{prefix}*")]


def test_two_endpoints_run_side_by_side_and_end_apart(protocol_models: Path) -> None:
    """Ctrl-C on one must stop all of it, and nothing of the other; so must the death of the program itself."""
    with (
        running_endpoint(protocol_models) as first,
        running_endpoint(protocol_models, exit_code=-signal.SIGKILL) as second,
    ):
        assert answers(first.address)
        assert answers(second.address)
        first.process.send_signal(signal.SIGINT)
        assert first.wait_for_exit() == 0
        assert "stopping (SIGINT)" in first.output()
        first.assert_nothing_is_left()
        assert not first.folder.exists()
        assert answers(second.address)

        second.process.kill()
        # A node drains for half a minute, and its agents look after it once in a while.
        left = second.started.wait_for_none(within_s=150)
        assert not left, describe(left)


PARTS: dict[str, tuple[Callable[[RunningEndpoint], list[int]], str]] = {
    "Triton": (lambda endpoint: [endpoint.triton_pid], "tritonserver was killed by signal 9"),
    "Ray Serve": (lambda endpoint: [endpoint.ray_pid], "the Ray Serve process was killed by signal 9"),
    "HAProxy": (lambda endpoint: endpoint.pids_of("haproxy"), "HAProxy has ended"),
    "raylet": (lambda endpoint: endpoint.pids_of("raylet"), "Ray's raylet has ended"),
    "GCS": (lambda endpoint: endpoint.pids_of("gcs_server"), "Ray's gcs_server has ended"),
}


@pytest.fixture(scope="module")
def port() -> int:
    """One port for several endpoints, one after the other: each must leave it free for the next."""
    return free_port()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_dies_is_named_and_takes_the_rest_with_it(protocol_models: Path, port: int, part: str) -> None:
    """Half an endpoint would leave the user with errors at the client, and processes in the background."""
    pids, words = PARTS[part]
    with running_endpoint(protocol_models, grpc_port=port, exit_code=1) as endpoint:
        assert endpoint.address == f"127.0.0.1:{port}"
        assert answers(endpoint.address)
        held = shared_memory(endpoint)
        assert held
        for pid in pids(endpoint):
            os.kill(pid, signal.SIGKILL)
        assert endpoint.wait_for_exit() == 1
        assert f"local-endpoint: {words}; the end of " in endpoint.output()
        assert "Traceback" not in endpoint.output().partition("the end of")[0]
        endpoint.assert_nothing_is_left()
        assert endpoint.folder.exists(), "the logs are what the user needs now"
        assert not [name for name in held if (SHARED_MEMORY / name).exists()]


@pytest.mark.parametrize("last_started", ["tritonserver", "gcs_server", "raylet"])
def test_sigterm_during_the_start_stops_what_has_started(protocol_models: Path, last_started: str) -> None:
    """An impatient user must not end up with half an endpoint in the background."""
    with started_endpoint("--models", protocol_models, "--grpc-port", "0") as program:
        program.wait_for_line("logs:")
        deadline = time.monotonic() + 60
        while last_started not in {process.name() for process in program.started.processes()}:
            assert time.monotonic() < deadline, program.output()
            time.sleep(0.1)
    # The end of the block has sent SIGTERM, and looked for what is left.


def test_a_model_that_cannot_be_loaded_is_shown_in_triton_own_words(tmp_path: Path) -> None:
    """The author of the model needs the reason, not a time-out."""
    write_model(tmp_path, "broken", "this is no Python", dtype="FP32", dims="[ 1 ]")
    with started_endpoint("--models", tmp_path, "--grpc-port", "0", exit_code=1) as program:
        assert program.wait_for_exit() == 1
        output = program.output()
    assert "local-endpoint: tritonserver has ended with exit code 1; the end of " in output
    assert "failed to load 'broken'" in output
    assert "SyntaxError" in output


def test_bad_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """One clear line at once, instead of an error from deep inside after half a minute."""
    (tmp_path / "empty").mkdir()
    refused: list[tuple[list[str | Path], int, str]] = [
        (["--models", tmp_path / "missing"], 2, f"--models {tmp_path}/missing: no such folder"),
        (["--models", tmp_path / "empty"], 2, f"--models {tmp_path}/empty: no MODEL/config.pbtxt in it"),
        (["--grpc-port", "65536"], 2, "--grpc-port 65536: must be 0 (any free port) to 65535"),
        (["--grpc-port", "-1"], 2, "--grpc-port -1: must be"),
        (["--ingress", "none"], 2, "invalid choice: 'none'"),
    ]
    for arguments, code, words in refused:
        with started_endpoint(*arguments, exit_code=code) as program:
            program.wait_for_exit()
            last_line = program.output().splitlines()[-1]
            assert program.folder_of_logs() is None
        assert words in last_line


def test_a_port_that_is_taken_is_named(protocol_models: Path) -> None:
    """The default port is a popular one; the way out is another."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started_endpoint("--models", protocol_models, "--grpc-port", str(port), exit_code=1) as program:
            program.wait_for_exit()
            assert program.output().splitlines() == [
                f"local-endpoint: port {port} is in use; stop what listens there, or give another --grpc-port (0: any)"
            ]


def test_triton_alone_can_be_killed_and_started_again_on_its_port(protocol_models: Path) -> None:
    """The tests of the centerlines job do this in the middle of a run."""
    with running_triton(protocol_models) as triton:
        assert answers(triton.address)
        triton.process.kill()
        triton.process.wait()
    with running_triton(protocol_models, grpc_port=int(triton.address.rpartition(":")[2])) as again:
        assert again.address == triton.address
        assert answers(again.address)
