"""What clients see of several Tritons when one of them goes, in order or not, and when there is too much to do."""

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.load import steady_load
from tests.support.local_endpoint import RunningEndpoint, running_endpoint

CALLERS, STREAMS = 6, 2
# A bound against a hang.
SOON_S = 90


@pytest.fixture(scope="module", params=["direct", "replica", "python"])
def endpoint(request: pytest.FixtureRequest, protocol_models: Path) -> Iterator[RunningEndpoint]:
    """Three Tritons behind each kind of ingress, for all tests of this module: each must leave it whole."""
    with running_endpoint(protocol_models, ingress=request.param, replicas=3) as running:
        yield running
        wait_until_whole(running)


def ray_node_of(endpoint: RunningEndpoint, address: str) -> psutil.Process:
    """Return the program of the Ray node on the address of a Triton."""
    wanted = f"--node-ip-address={address.partition(':')[0]}"
    (node,) = (
        each
        for each in endpoint.started.processes()
        if wanted in each.cmdline() and "ray.scripts.scripts" in each.cmdline()
    )
    return node


def replicas_of(endpoint: RunningEndpoint, address: str) -> list[psutil.Process]:
    """Return the forwarder replicas on the node of a Triton."""
    node = ray_node_of(endpoint, address)
    return [
        each for each in node.children(recursive=True) if "ServeReplica:triton:Forwarder" in " ".join(each.cmdline())
    ]


def statistics(address: str) -> int:
    """Return how many requests a Triton, or an endpoint, has answered for the model of the load."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name="identity_fp32"), timeout=SOON_S)
    return int(answer.model_stats[0].inference_stats.success.count)


def wait_until_whole(endpoint: RunningEndpoint) -> None:
    """Return when each Triton gets requests again."""
    deadline = time.monotonic() + SOON_S
    for address in endpoint.triton_addresses:
        while not (_answers(address) and replicas_of(endpoint, address)):
            assert time.monotonic() < deadline, f"no replica and Triton at {address}"
            time.sleep(0.5)
    with steady_load(endpoint.address, unary=CALLERS, streams=0):
        for address in endpoint.triton_addresses:
            before = statistics(address)
            while statistics(address) == before:
                assert time.monotonic() < deadline, f"no request reaches the Triton at {address}"
                time.sleep(0.2)


def _answers(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            return bool(
                service_pb2_grpc.GRPCInferenceServiceStub(channel)
                .ServerReady(service_pb2.ServerReadyRequest(), timeout=2)
                .ready
            )
        except grpc.RpcError:
            return False


def test_a_node_that_leaves_in_order_costs_no_request(endpoint: RunningEndpoint) -> None:
    """A pod that is deleted, or a deployment that scales down, must not be seen by anyone."""
    leaving = endpoint.triton_addresses[-1]
    node = ray_node_of(endpoint, leaving)
    with steady_load(endpoint.address, unary=CALLERS, streams=STREAMS) as load:
        before = statistics(endpoint.address)
        started = time.monotonic()
        node.send_signal(signal.SIGTERM)
        node.wait(SOON_S)
        # The whole of a minute: the replica that takes its place comes in it too.
        load.ended.wait(max(0.0, 60 - (time.monotonic() - started)))
        succeeded = load.succeeded
        assert statistics(endpoint.address) >= before
    assert load.failures == []
    assert succeeded > 1000
    wait_until_whole(endpoint)


@pytest.mark.parametrize("part", ["Triton", "replica"])
def test_a_part_that_is_killed_costs_what_was_in_flight(endpoint: RunningEndpoint, part: str) -> None:
    """The callers whose requests it held may try again; all others must not notice."""
    wait_until_whole(endpoint)
    address = endpoint.triton_addresses[0]
    with steady_load(endpoint.address, unary=CALLERS, streams=STREAMS) as load:
        victims = (
            [endpoint.pid_of_triton(address)] if part == "Triton" else [r.pid for r in replicas_of(endpoint, address)]
        )
        killed = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        load.wait_for_more(2000)
    # Serve's Python proxy has a status and words of its own for a replica that has died.
    own = endpoint.ingress == "python" and part == "replica"
    expected = {grpc.StatusCode.INTERNAL if own else grpc.StatusCode.UNAVAILABLE}
    assert {failure.code for failure in load.failures} <= expected, load.failures
    assert len(load.failures) <= CALLERS + STREAMS, load.failures
    assert all(failure.at - killed < 1 for failure in load.failures), load.failures
    assert own or not any("127.0.0" in failure.details for failure in load.failures), load.failures
    wait_until_whole(endpoint)


def pending(endpoint: RunningEndpoint) -> float:
    """Return the requests that wait or run in all Tritons, by their own count."""
    total = 0.0
    for address in endpoint.triton_addresses:
        pid = endpoint.pid_of_triton(address)
        (port,) = (a.partition("=")[2] for a in psutil.Process(pid).cmdline() if a.startswith("--metrics-port="))
        with urllib.request.urlopen(f"http://{address.partition(':')[0]}:{port}/metrics", timeout=SOON_S) as response:
            lines = response.read().decode().splitlines()
        total += sum(float(line.split()[-1]) for line in lines if line.startswith("nv_inference_pending_request_count"))
    return total


def patient_request(seconds: float) -> service_pb2.ModelInferRequest:
    """Return a request to the model that takes so long."""
    request = service_pb2.ModelInferRequest(model_name="patient")
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.full(1, seconds, np.float32).tobytes())
    return request


def test_a_thousand_cancelled_requests_leave_nothing_behind(endpoint: RunningEndpoint) -> None:
    """A slot that a client no longer waits for must serve the next."""
    if endpoint.ingress == "python":
        pytest.skip("Serve's Python proxy loses cancels of requests that it has not yet given to a replica")
    with grpc.insecure_channel(endpoint.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(10):
            calls = [stub.ModelInfer.future(patient_request(600)) for _ in range(90)]
            expired = [stub.ModelInfer.future(patient_request(600), timeout=0.5) for _ in range(10)]
            time.sleep(0.2)
            for call in calls:
                call.cancel()
            for call in expired:
                assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        deadline = time.monotonic() + SOON_S
        while pending(endpoint) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert pending(endpoint) == 0
        # One for each Triton and more: none of them may be held by somebody who has gone.
        answers = [stub.ModelInfer.future(patient_request(0), timeout=SOON_S) for _ in range(30)]
        assert all(answer.result().outputs for answer in answers)


@pytest.mark.parametrize("ingress", ["direct", "replica", "python"])
def test_beyond_the_limit_callers_are_refused_at_once(ingress: str, protocol_models: Path) -> None:
    """A queue without end makes everybody wait for answers that nobody awaits any more."""
    limit = 8
    settings = {"max_ongoing_requests": limit}
    with (
        running_endpoint(protocol_models, ingress=ingress, settings=settings) as endpoint,  # type: ignore[arg-type]
        grpc.insecure_channel(endpoint.address) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(patient_request(600)) for _ in range(5 * limit)]
        deadline = time.monotonic() + SOON_S
        while sum(call.done() for call in calls) < 3 * limit:
            assert time.monotonic() < deadline, [call.done() for call in calls]
            time.sleep(0.05)
        refused = [call for call in calls if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert not any("Traceback" in call.details() for call in refused)
        for call in calls:
            call.cancel()
        # What was refused is gone, and the next is served.
        with steady_load(endpoint.address, unary=1, streams=0) as again:
            again.wait_for_more(10)
        assert not again.failures
