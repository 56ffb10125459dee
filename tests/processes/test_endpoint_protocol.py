"""An unmodified tritonclient against the endpoint, with the same questions put to its Triton directly."""

import asyncio
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.local_endpoint import RunningEndpoint, running_endpoint
from triton_forwarder.rpc_table import RPCS

# A bound against a hang: every answer is due within a fraction of it.
SOON_S = 60
# Longer than SOON_S: a model that waits this long must have been cancelled, or the test ends first.
LONG_S = 600

OF_THE_INSIDE = ("Traceback", "ray/serve", "127.0.0.1", "site-packages")


@pytest.fixture(scope="module", params=["direct", "replica", "python"])
def endpoint(request: pytest.FixtureRequest, protocol_models: Path) -> Iterator[RunningEndpoint]:
    """One endpoint for each ingress."""
    with running_endpoint(protocol_models, ingress=request.param) as running:
        yield running


@pytest.fixture
def client(endpoint: RunningEndpoint) -> Iterator[InferenceServerClient]:
    """A client of the endpoint."""
    with InferenceServerClient(endpoint.address) as each:
        yield each


@pytest.fixture
def triton(endpoint: RunningEndpoint) -> Iterator[InferenceServerClient]:
    """A client of the endpoint's Triton, without the endpoint between."""
    with InferenceServerClient(endpoint.triton_address) as each:
        yield each


def tensor(values: NDArray[Any], dtype: str) -> InferInput:
    """Return the INPUT of a request."""
    given = InferInput("INPUT", list(values.shape), dtype)
    given.set_data_from_numpy(values)
    return given


def infer(client: InferenceServerClient, model: str, values: NDArray[Any], dtype: str, **options: Any) -> Any:
    """Return the OUTPUT of one call."""
    options = {"client_timeout": SOON_S} | options
    return client.infer(model, [tensor(values, dtype)], **options).as_numpy("OUTPUT")


def number(value: float) -> NDArray[np.float32]:
    """Return one FP32 value."""
    return np.array([value], dtype=np.float32)


def test_the_endpoint_is_live_and_ready(client: InferenceServerClient) -> None:
    """Clients ask before they send."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    assert not client.is_model_ready("unknown")


def test_server_metadata_is_triton_own_without_what_is_refused(
    client: InferenceServerClient, triton: InferenceServerClient
) -> None:
    """Some programs count on the name `triton`; those that see shared memory advertised use it, and fail."""
    expected = triton.get_server_metadata()
    offered = list(expected.extensions)
    refused = {
        "model_repository(unload_dependents)",
        "system_shared_memory",
        "cuda_shared_memory",
        "trace",
        "logging",
    }
    assert refused < set(offered)
    del expected.extensions[:]
    expected.extensions.extend(name for name in offered if name not in refused)
    assert client.get_server_metadata() == expected
    assert expected.name == "triton"


Question = Callable[[InferenceServerClient], Any]

QUESTIONS: dict[str, Question] = {
    "model metadata": lambda c: c.get_model_metadata("identity_fp32"),
    "model metadata of a version": lambda c: c.get_model_metadata("identity_fp32", "1"),
    "model metadata of an unknown model": lambda c: c.get_model_metadata("unknown"),
    "model metadata of an unknown version": lambda c: c.get_model_metadata("identity_fp32", "9"),
    "model config": lambda c: c.get_model_config("countdown"),
    "model config of an unknown model": lambda c: c.get_model_config("unknown"),
    "statistics of all models": lambda c: c.get_inference_statistics(),
    "statistics of a model": lambda c: c.get_inference_statistics("identity_fp32", "1"),
    "statistics of an unknown model": lambda c: c.get_inference_statistics("unknown"),
    "repository index": lambda c: c.get_model_repository_index(),
    "infer, unknown model": lambda c: infer(c, "unknown", number(1), "FP32"),
    "infer, unknown version": lambda c: infer(c, "identity_fp32", number(1), "FP32", model_version="9"),
    "infer, version that is no number": lambda c: infer(c, "identity_fp32", number(1), "FP32", model_version="x"),
    "infer, other type": lambda c: infer(c, "identity_fp32", np.array([1], np.int32), "INT32"),
    "infer, other shape": lambda c: infer(c, "patient", np.zeros(2, np.float32), "FP32"),
    "infer, no input": lambda c: c.infer("identity_fp32", []),
    "infer, with an id": lambda c: c.infer("unknown", [tensor(number(1), "FP32")], request_id="an-id"),
    "infer, model that raises": lambda c: infer(c, "raises", number(1), "FP32"),
    "infer, decoupled model": lambda c: infer(c, "countdown", np.array([1], np.int32), "INT32"),
}

STATUS = {
    "infer, unknown model": "StatusCode.NOT_FOUND",
    "infer, other type": "StatusCode.INVALID_ARGUMENT",
    "infer, other shape": "StatusCode.INVALID_ARGUMENT",
    "infer, model that raises": "StatusCode.INTERNAL",
    "infer, decoupled model": "StatusCode.UNIMPLEMENTED",
}


def answer(ask: Question, client: InferenceServerClient) -> Any:
    """Return what a client learns: a message, or a status and its words."""
    try:
        return ask(client)
    except InferenceServerException as error:
        # HAProxy drops blanks at the end of the words.
        return error.status(), error.message().rstrip()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_endpoint_answers_as_triton_does(
    question: str, client: InferenceServerClient, triton: InferenceServerClient
) -> None:
    """Client programs were written for Triton, down to the words of its errors."""
    expected = answer(QUESTIONS[question], triton)
    assert answer(QUESTIONS[question], client) == expected
    if question in STATUS:
        assert expected[0] == STATUS[question]


@pytest.mark.parametrize(
    ("model", "values", "dtype"),
    [
        ("identity_fp32", np.array([1.5, -0.0, np.inf, 1e-42], np.float32), "FP32"),
        ("identity_fp16", np.array([1.5, -2.25, 65504], np.float16), "FP16"),
        ("identity_string", np.array([b"sidewalk", b"", b"\xff\x00", "naïve".encode()], object), "BYTES"),
        ("identity_fp32", np.zeros(0, np.float32), "FP32"),
        ("identity_string", np.zeros(0, object), "BYTES"),
    ],
    ids=["FP32", "FP16", "BYTES", "empty FP32", "empty BYTES"],
)
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tensors_come_back_bit_for_bit(
    client: InferenceServerClient, model: str, values: NDArray[Any], dtype: str, compression: str | None
) -> None:
    """A model must see the very values that the client sent."""
    output = infer(client, model, values, dtype, compression_algorithm=compression)
    assert output.shape == values.shape
    assert output.tobytes() == values.tobytes() if dtype != "BYTES" else output.tolist() == values.tolist()


def test_the_response_echoes_id_and_version(client: InferenceServerClient) -> None:
    """Clients match answers to requests by the id."""
    response = client.infer("identity_fp32", [tensor(number(3), "FP32")], request_id="tile-7").get_response()
    assert (response.id, response.model_name, response.model_version) == ("tile-7", "identity_fp32", "1")


def test_64_mib_pass_in_one_request(client: InferenceServerClient) -> None:
    """A full batch of images is that large; gRPC's own limit is 4 MiB, in four places on the way."""
    values = np.random.default_rng(0).random(2**24, np.float32)
    assert np.array_equal(infer(client, "identity_fp32", values, "FP32"), values)


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc.allowed_by], ids=lambda rpc: rpc.name)
def test_a_control_rpc_is_refused_with_the_setting_that_allows_it(endpoint: RunningEndpoint, rpc: Any) -> None:
    """Whoever reaches the endpoint could otherwise unload models; whoever may, must learn how."""
    method = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[rpc.name]
    request = getattr(service_pb2, method.input_type.name)()
    with grpc.insecure_channel(endpoint.address) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), rpc.name)
        with pytest.raises(grpc.RpcError) as error:
            call(request, timeout=SOON_S)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert rpc.name in error.value.details()
    assert rpc.allowed_by in error.value.details()
    assert not any(word in error.value.details() for word in OF_THE_INSIDE)


class Stream:
    """The one stream of a client, with what comes back."""

    def __init__(self, client: InferenceServerClient) -> None:
        self._client = client
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._results.put((result, error)))

    def send(self, model: str, values: NDArray[Any], dtype: str, request_id: str = "") -> None:
        """Send one request."""
        self._client.async_stream_infer(model, [tensor(values, dtype)], request_id=request_id)

    def receive(self, count: int) -> list[tuple[str, float] | str]:
        """Return the next answers: (request id, OUTPUT), or an error's words."""
        received: list[tuple[str, float] | str] = []
        for _ in range(count):
            result, error = self._results.get(timeout=SOON_S)
            if error:
                received.append(error.message())
            else:
                received.append((result.get_response().id, float(result.as_numpy("OUTPUT")[0])))
        return received

    def ended_without_more(self) -> bool:
        """Close the stream, and tell whether no answer came that nobody expected."""
        self._client.stop_stream()
        return self._results.empty()


def countdown(start: int) -> NDArray[np.int32]:
    """Return the INPUT of the countdown model."""
    return np.array([start], np.int32)


def test_a_decoupled_model_streams_all_its_answers(client: InferenceServerClient) -> None:
    """A model may answer once, many times, or never; two requests share a stream."""
    stream = Stream(client)
    stream.send("countdown", countdown(50), "INT32", "many")
    assert stream.receive(50) == [("many", float(left)) for left in range(50, 0, -1)]
    stream.send("countdown", countdown(0), "INT32", "none")
    stream.send("countdown", countdown(1), "INT32", "one")
    stream.send("countdown", countdown(2), "INT32", "two")
    assert sorted(stream.receive(3)) == [("one", 1.0), ("two", 1.0), ("two", 2.0)]
    stream.send("identity_fp32", number(7), "FP32", "not decoupled")
    assert stream.receive(1) == [("not decoupled", 7.0)]
    assert stream.ended_without_more()


def test_an_error_inside_a_stream_does_not_end_it(client: InferenceServerClient, triton: InferenceServerClient) -> None:
    """Triton reports a failed request within the stream, and goes on with the others."""
    received = []
    for each in (triton, client):
        stream = Stream(each)
        stream.send("countdown", countdown(-2), "INT32", "fails")
        first = stream.receive(3)
        stream.send("unknown", number(1), "FP32")
        second = stream.receive(1)
        stream.send("countdown", countdown(1), "INT32", "after")
        received.append([first, second, stream.receive(1)])
        assert stream.ended_without_more()
    assert received[0] == received[1]
    assert received[1][0][:2] == [("fails", 2.0), ("fails", 1.0)]
    assert "the countdown went below 0" in str(received[1][0][2])
    assert "'unknown' is not found" in str(received[1][1])
    assert received[1][2] == [("after", 1.0)]


@pytest.fixture
def patient(endpoint: RunningEndpoint) -> "Patient":
    """The model that waits until its caller has gone."""
    return Patient(endpoint.log_of_triton(endpoint.triton_address))


class Patient:
    """What the `patient` model has said in Triton's log since this object was made."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = len(log.read_text())

    def wait_until_it_says(self, words: str) -> None:
        """Return when the model has said so; fail when it takes too long."""
        deadline = time.monotonic() + SOON_S
        while f"patient: {words}" not in self._log.read_text()[self._start :]:
            assert time.monotonic() < deadline, f"the model has not said {words!r}"
            time.sleep(0.05)


def test_a_deadline_frees_triton(client: InferenceServerClient, patient: Patient) -> None:
    """The model has one instance: a call that is not cancelled at Triton keeps all others waiting."""
    with pytest.raises(InferenceServerException) as error:
        infer(client, "patient", number(LONG_S), "FP32", client_timeout=2)
    assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    patient.wait_until_it_says("the caller has gone")
    assert infer(client, "patient", number(0), "FP32") == number(0)


def test_a_cancelled_call_frees_triton(client: InferenceServerClient, patient: Patient) -> None:
    """As above, for a client that changes its mind."""
    errors: queue.Queue[Any] = queue.Queue()
    call = client.async_infer(
        "patient", [tensor(number(LONG_S), "FP32")], callback=lambda result, error: errors.put(error or result)
    )
    patient.wait_until_it_says("waits")
    call.cancel()
    assert errors.get(timeout=SOON_S).status() == "StatusCode.CANCELLED"
    patient.wait_until_it_says("the caller has gone")
    assert infer(client, "patient", number(0), "FP32") == number(0)


def test_a_cancelled_stream_frees_triton(client: InferenceServerClient, patient: Patient) -> None:
    """As above, for a client that leaves a stream."""
    stream = Stream(client)
    stream.send("patient", number(LONG_S), "FP32")
    patient.wait_until_it_says("waits")
    client.stop_stream(cancel_requests=True)
    patient.wait_until_it_says("the caller has gone")
    assert infer(client, "patient", number(0), "FP32") == number(0)


def test_the_asyncio_client_gets_the_same(endpoint: RunningEndpoint) -> None:
    """The centerlines job uses it, with many requests in flight on one connection."""

    async def scenario() -> None:
        async with tritonclient.grpc.aio.InferenceServerClient(endpoint.address) as client:
            assert await client.is_server_ready()
            assert (await client.get_server_metadata()).name == "triton"

            async def one(value: int) -> float:
                response = await client.infer("identity_fp32", [tensor(number(value), "FP32")], client_timeout=SOON_S)
                return float(response.as_numpy("OUTPUT")[0])

            assert await asyncio.gather(*map(one, range(32))) == [float(value) for value in range(32)]

            async def requests() -> Any:
                yield {"model_name": "countdown", "inputs": [tensor(countdown(3), "INT32")]}

            answers = [
                (int(result.as_numpy("OUTPUT")[0]), error)
                async for result, error in client.stream_infer(requests(), stream_timeout=SOON_S)
            ]
            assert answers == [(3, None), (2, None), (1, None)]
            with pytest.raises(InferenceServerException, match="'unknown' is not found"):
                await client.infer("unknown", [tensor(number(1), "FP32")], client_timeout=SOON_S)

    asyncio.run(scenario())


def test_many_clients_at_once_get_their_own_answers(endpoint: RunningEndpoint) -> None:
    """32 clients, each with a connection of its own."""
    answers: dict[int, Any] = {}

    def one(value: int) -> None:
        with InferenceServerClient(endpoint.address) as client:
            values = np.full(1000 + value, value, np.float32)
            answers[value] = np.array_equal(infer(client, "identity_fp32", values, "FP32"), values)

    threads = [threading.Thread(target=one, args=(value,)) for value in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert answers == dict.fromkeys(range(32), True)


def metric(endpoint: RunningEndpoint, name: str, **labels: str) -> float:
    """Return one sample of what HAProxy has counted; 0 where there is none yet."""
    url = endpoint.wait_for_line("metrics:").split()[-1]
    with urllib.request.urlopen(url, timeout=SOON_S) as response:  # noqa: S310  an address of our own
        lines = response.read().decode().splitlines()
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    found = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name}{{{wanted}}} ")]
    return float(found[0]) if found else 0.0


def test_each_rpc_is_counted_and_timed(endpoint: RunningEndpoint, client: InferenceServerClient) -> None:
    """On the straight path no Python sees a request, and operators need to."""
    if endpoint.ingress == "python":
        pytest.skip("there is no HAProxy; Serve's own metrics have all requests")
    counted = "triton_ingress_requests_total"
    histogram = "triton_ingress_first_byte_seconds"
    before = {
        name: metric(endpoint, name, **labels)
        for name, labels in (
            (counted, {"rpc": "ModelInfer"}),
            (f"{histogram}_count", {"rpc": "ModelInfer"}),
            ("triton_ingress_received_bytes_total", {"rpc": "ModelInfer"}),
        )
    }
    refused = metric(endpoint, "triton_ingress_failures_total", rpc="ModelInfer", status="NOT_FOUND")
    for _ in range(3):
        infer(client, "identity_fp32", np.zeros(1000, np.float32), "FP32")
    with pytest.raises(InferenceServerException):
        infer(client, "unknown", number(1), "FP32")
    assert metric(endpoint, counted, rpc="ModelInfer") == before[counted] + 4
    assert metric(endpoint, f"{histogram}_count", rpc="ModelInfer") == before[f"{histogram}_count"] + 4
    assert metric(endpoint, f"{histogram}_bucket", rpc="ModelInfer", le="60.0") >= 4
    received = metric(endpoint, "triton_ingress_received_bytes_total", rpc="ModelInfer")
    assert received >= before["triton_ingress_received_bytes_total"] + 3 * 4000
    # The forwarder's server writes a status behind the answer, where HAProxy does not look; Ray counts it there.
    seen = 1 if endpoint.ingress == "direct" else 0
    assert metric(endpoint, "triton_ingress_failures_total", rpc="ModelInfer", status="NOT_FOUND") == refused + seen
    assert metric(endpoint, "triton_ingress_in_flight", rpc="ModelInfer") == 0


def test_large_tensors_on_shared_connections_do_not_block_each_other(endpoint: RunningEndpoint) -> None:
    """HAProxy 2.8 stops for good when uploads and answers of several requests share its connections to a server."""
    values = np.random.default_rng(0).random(3_000_000, np.float32)
    answers: list[bool] = []

    def calls(client: InferenceServerClient) -> None:
        answers.extend(np.array_equal(infer(client, "identity_fp32", values, "FP32"), values) for _ in range(3))

    # Connections of their own, which those of the other tests are not.
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    own += [("grpc.max_receive_message_length", -1)]
    clients = [InferenceServerClient(endpoint.address, channel_args=own) for _ in range(2)]
    threads = [threading.Thread(target=calls, args=(clients[index % 2],)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON_S)
    for client in clients:
        client.close()
    assert answers == [True] * 24


def test_a_client_that_pings_every_second_is_not_cut_off(endpoint: RunningEndpoint) -> None:
    """A lone Triton ends such a connection after five seconds, and its silent streams with it."""
    if endpoint.ingress == "python":
        pytest.skip("Serve's Python proxy is a gRPC server with limits of its own")
    pings = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    with InferenceServerClient(endpoint.address, channel_args=pings) as client:
        stream = Stream(client)
        stream.send("identity_fp32", number(1), "FP32", "before")
        assert stream.receive(1) == [("before", 1.0)]
        time.sleep(8)
        stream.send("identity_fp32", number(2), "FP32", "after")
        assert stream.receive(1) == [("after", 2.0)]
        assert stream.ended_without_more()


def test_large_tensors_go_both_ways_on_one_stream(client: InferenceServerClient) -> None:
    """All requests are sent before the first answer is read; their answers must not stand in the way."""
    values = np.random.default_rng(0).random(1_000_000, np.float32)
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    for _ in range(12):
        client.async_stream_infer("identity_fp32", [tensor(values, "FP32")])
    for _ in range(12):
        result, error = results.get(timeout=SOON_S)
        assert error is None
        assert np.array_equal(result.as_numpy("OUTPUT"), values)
    client.stop_stream()
