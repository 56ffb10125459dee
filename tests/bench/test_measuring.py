"""Measuring a real Triton, and the two programs' own words when they cannot."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc

from bench.cases import Rpc
from bench.client import ClientPool, Load
from bench.errors import BenchError
from bench.measure import measure
from bench.messages import MODEL, identity_request, write_identity_model
from bench.triton import server_version
from tests.support.local_endpoint import running_triton
from tests.support.models import write_protocol_models

SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZE = 16


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Triton with the benchmark's model and those of the protocol's tests."""
    repository = tmp_path_factory.mktemp("models")
    write_identity_model(repository)
    write_protocol_models(repository)
    with running_triton(repository) as running:
        yield running.address


@pytest.fixture(scope="module")
def clients() -> Iterator[ClientPool]:
    """Two client processes."""
    with ClientPool(2) as pool:
        yield pool


def _answered(triton: str) -> int:
    with triton_grpc.InferenceServerClient(triton) as client:
        return int(client.get_inference_statistics(MODEL).model_stats[0].inference_count)


def _run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / program), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("callers", [1, 5])
def test_the_answers_counted_are_answers_of_triton(triton: str, clients: ClientPool, rpc: Rpc, callers: int) -> None:
    """A client that counts what Triton never answered measures itself."""
    request, answer = identity_request(SIZE)
    before = _answered(triton)
    figures = measure(clients, Load(triton, rpc, request, answer_ends_with=answer, callers=callers), seconds=0.5)
    counted = figures.rate * 0.5
    # Warm-up and last calls of each caller are not counted.
    assert callers < counted < _answered(triton) - before
    # Closed loops: callers / latency is their rate; the median is no mean, so by a wide margin.
    assert 0 < figures.latency_ms[50] <= figures.latency_ms[95] <= figures.latency_ms[99]
    assert figures.latency_ms[50] * counted < 2000 * callers


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
def test_an_answer_without_the_tensor_ends_the_measurement(triton: str, clients: ClientPool, rpc: Rpc) -> None:
    """An endpoint that answers with errors quickly would look fast; on a stream they come with status OK."""
    request, _ = identity_request(SIZE)
    with pytest.raises(BenchError, match=rf"{rpc} at {triton} was not answered with its tensor: b'.*"):
        measure(clients, Load(triton, rpc, request, answer_ends_with=b"another", callers=3), seconds=0.1)


def test_a_call_that_fails_is_told_with_its_status(triton: str, clients: ClientPool) -> None:
    """`client process died` would tell nobody what to mend."""
    request, _ = identity_request(SIZE)
    load = Load(triton, "ModelInfer", request.replace(MODEL.encode(), b"identitx"), b"", callers=3)
    with pytest.raises(BenchError, match=r"ModelInfer at .* failed: NOT_FOUND: Request for unknown model: 'identitx'"):
        measure(clients, load, seconds=0.1)
    assert measure(clients, Load(triton, "ModelInfer", request, b"", callers=1), seconds=0.1).rate > 0


def test_the_version_of_the_server_is_its_own(triton: str) -> None:
    """The page names the version that was measured, not the one that should be installed."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", server_version(triton))


def test_a_model_and_a_goal_give_a_value_to_use(triton: str) -> None:
    """The operator is to paste it."""
    options = ("--model", "identity_fp32", "--shape", "INPUT:4", "--p95-ms", "1000", "--seconds", "0.1")
    ended = _run("target-ongoing-requests", "--triton", triton, *options)
    assert ended.stderr == ""
    assert re.fullmatch(r"target_ongoing_requests: [1-9]\d*", ended.stdout.splitlines()[-1])
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("program", "arguments", "code", "message"),
    [
        ("bench", ["--sizes", "16,big"], 2, "'big' is not a size such as 16, 100k or 12.6m"),
        ("bench", ["--ingress", "nginx"], 2, "'nginx' is none of direct, replica, python"),
        ("bench", ["--output", "/proc/nowhere"], 1, "No such file or directory: '/proc/nowhere'"),
        ("target-ongoing-requests", ["--model", "m", "--p95-ms", "0"], 2, "'0' is not a number above 0"),
        ("target-ongoing-requests", ["--model", "m", "--p95-ms", "9", "--shape", "3,4"], 2, "is not INPUT:D1,D2..."),
        (
            "target-ongoing-requests",
            ["--model", "m", "--p95-ms", "9", "--triton", "127.0.0.1:1"],
            1,
            "ModelConfig at 127.0.0.1:1 failed: UNAVAILABLE",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    program: str, arguments: list[str], code: int, message: str
) -> None:
    """A stack trace tells a user nothing."""
    ended = _run(program, *arguments)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"{program}: ")
    assert message in last
    assert "Traceback" not in ended.stderr
    assert ended.returncode == code


def test_without_triton_the_way_to_install_it_is_told(tmp_path: Path) -> None:
    """As above, on a machine where nothing has been set up."""
    ended = _run("bench", "--output", str(tmp_path / "docs"), TRITON_ON_RAY_CACHE=str(tmp_path))
    assert re.fullmatch(r"bench: no Triton in .*: run scripts/setup\n", ended.stderr)
    assert ended.returncode == 1
    assert not (tmp_path / "docs").exists()
