"""The Triton client against a real gRPC server in this process, which answers as each test needs it."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from centerlines.errors import EndpointError, RequestRefusedError, UsageError
from centerlines.triton import Model, ModelClient, connect

FP32 = model_config_pb2.TYPE_FP32
FP16 = model_config_pb2.TYPE_FP16
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "the server is\n  starting")
EXHAUSTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape\n[1,2] for input 'image'")
Tensors = list[tuple[str, int, list[int]]]


def config(
    *,
    inputs: Tensors | None = None,
    outputs: Tensors | None = None,
    max_batch_size: int = 200,
    **parameters: str,
) -> Any:
    """A model's configuration as Triton tells it; left out, it is one that the pipeline can use."""
    message = model_config_pb2.ModelConfig(name="segment", max_batch_size=max_batch_size)
    for name, dtype, dims in [("image", FP32, [3, -1, -1])] if inputs is None else inputs:
        message.input.add(name=name, data_type=dtype, dims=dims)
    for name, dtype, dims in [("sem_seg", FP32, [2, -1, -1])] if outputs is None else outputs:
        message.output.add(name=name, data_type=dtype, dims=dims)
    for name, value in parameters.items():
        message.parameters[name].string_value = value
    return message


def _halves(chips: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the stand-in's model answers: twice each chip's first channel, and half of it."""
    return np.stack([2 * chips[:, 0], chips[:, 0] / 2], axis=1)


@dataclass
class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers ModelConfig and ModelInfer, after as many failures as it was given."""

    config: Any = field(default_factory=config)
    failures: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)
    """What the next calls fail with; the last one for ever if `for_ever`."""
    for_ever: bool = False
    answer: Callable[[NDArray[np.float32]], NDArray[np.float32]] = _halves
    output: str = "sem_seg"
    datatype: str = "FP32"
    cut_bytes: int = 0
    calls: int = 0
    requests: list[Any] = field(default_factory=list)

    async def _fail(self, context: Any) -> None:
        self.calls += 1
        if self.failures:
            code, message = self.failures[0] if self.for_ever else self.failures.pop(0)
            await context.abort(code, message)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802  the protocol's name
        """Describe the model."""
        await self._fail(context)
        self.requests.append(request)
        return service_pb2.ModelConfigResponse(config=self.config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  the protocol's name
        """Answer with logits."""
        await self._fail(context)
        self.requests.append(request)
        chips = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(request.inputs[0].shape)
        logits = self.answer(chips)
        raw = logits.tobytes()[self.cut_bytes :]
        response = service_pb2.ModelInferResponse(model_name=request.model_name, raw_output_contents=[raw])
        response.outputs.add(name=self.output, datatype=self.datatype, shape=logits.shape)
        return response


@asynccontextmanager
async def _serving(triton: Triton) -> AsyncIterator[str]:
    # Without these, a gRPC server takes no message of more than 4 MiB; Triton takes any.
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def look_up(triton: Triton, *, version: str = "", patience_s: float = 0) -> Model:
    """Connect to it and return what was found out about its model."""

    async def run() -> Model:
        async with (
            _serving(triton) as address,
            connect(address, model_name="segment", model_version=version, patience_s=patience_s) as client,
        ):
            return client.model

    return asyncio.run(run())


def infer(triton: Triton, chips: NDArray[np.float32], *, patience_s: float = 20) -> NDArray[np.float32]:
    """Connect to it, with what fails failing afterwards, and ask for the logits of the chips."""

    async def run() -> NDArray[np.float32]:
        failures, triton.failures = triton.failures, []
        async with (
            _serving(triton) as address,
            connect(address, model_name="segment", model_version="", patience_s=patience_s) as client,
        ):
            triton.failures, triton.calls = failures, 0
            return await client.infer(chips)

    return asyncio.run(run())


def chips_of(*shape: int) -> NDArray[np.float32]:
    """Chips of random values."""
    return np.random.default_rng(1).random(shape, dtype=np.float32)


def refusal(triton: Triton, **options: Any) -> str:
    """The message of the refusal of its model, which is one line."""
    with pytest.raises(UsageError) as caught:
        look_up(triton, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_model_is_described_by_its_configuration() -> None:
    """The pipeline sends what the configuration says, so nobody has to repeat it."""
    triton = Triton(config(mean="0.485, 0.456,0.406", std="0.229,0.224,0.225", max_batch_size=64))
    assert look_up(triton, version="7") == Model(
        name="segment",
        version="7",
        input_name="image",
        output_name="sem_seg",
        size=(-1, -1),
        max_batch_size=64,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    assert (triton.requests[0].name, triton.requests[0].version) == ("segment", "7")


@pytest.mark.parametrize(
    ("dims", "accepted"), [([3, -1, -1], {256, 512}), ([3, 512, 512], {512}), ([3, -1, 256], {256})]
)
def test_a_model_of_one_size_takes_chips_of_that_size_only(dims: list[int], accepted: set[int]) -> None:
    """Otherwise every batch of a long run would be refused, one by one."""
    model = look_up(Triton(config(inputs=[("image", FP32, dims)])))
    for size in (256, 512):
        if size in accepted:
            model.check_chip_size(size)
        else:
            with pytest.raises(UsageError, match=f"^--chip-size {size}: model segment takes .* pixels only$"):
                model.check_chip_size(size)


def test_without_mean_and_std_values_stay_as_they_are() -> None:
    """A model that normalises by itself needs no parameters."""
    model = look_up(Triton(config(unrelated="x")))
    assert (model.mean, model.std) == ((0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize("dims", [[3, -1, -1], [3, 256, 256], [3, 512, -1]])
def test_fixed_and_free_sizes_are_accepted(dims: list[int]) -> None:
    """Models are exported either way."""
    assert look_up(Triton(config(inputs=[("x", FP32, dims)]))).input_name == "x"


def test_the_mask_is_found_among_other_outputs() -> None:
    """Many segmentation models also give features or instances."""
    outputs: Tensors = [("features", FP32, [64, -1, -1]), ("mask", FP32, [2, -1, -1]), ("score", FP32, [2])]
    assert look_up(Triton(config(outputs=outputs))).output_name == "mask"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"inputs": [("image", FP32, [4, -1, -1])]},
            ["one FP32 input of [3, rows, columns]", "image FP32 [4, -1, -1]"],
        ),
        ({"inputs": [("image", FP32, [-1, -1, 3])]}, ["image FP32 [-1, -1, 3]"]),
        ({"inputs": [("image", FP32, [-1])]}, ["image FP32 [-1]"]),
        ({"inputs": [("image", FP16, [3, -1, -1])]}, ["image FP16 [3, -1, -1]"]),
        ({"inputs": []}, ["takes none"]),
        ({"inputs": [("a", FP32, [3, -1, -1]), ("b", FP32, [3, -1, -1])]}, ["a FP32", "b FP32"]),
        ({"max_batch_size": 0}, ["in batches", "max_batch_size 0"]),
        ({"outputs": [("sem_seg", FP32, [1, -1, -1])]}, ["one FP32 output of [2, rows, columns]", "sem_seg FP32 [1"]),
        ({"outputs": [("sem_seg", FP16, [2, -1, -1])]}, ["sem_seg FP16 [2, -1, -1]"]),
        ({"outputs": []}, ["gives none"]),
        ({"outputs": [("a", FP32, [2, -1, -1]), ("b", FP32, [2, -1, -1])]}, ["a FP32", "b FP32"]),
        ({"mean": "0.5"}, ["mean '0.5'", "3 comma-separated numbers"]),
        ({"mean": ""}, ["mean ''"]),
        ({"mean": "0,0,zero"}, ["mean '0,0,zero'"]),
        ({"mean": "0,0,nan"}, ["mean '0,0,nan'"]),
        ({"mean": "0,0,0,0"}, ["mean '0,0,0,0'"]),
        ({"std": "1,1,0"}, ["std '1,1,0'", "3 comma-separated numbers above 0"]),
        ({"std": "1,1,-1"}, ["std '1,1,-1'"]),
        ({"std": "1,1,inf"}, ["std '1,1,inf'"]),
    ],
)
def test_a_model_of_another_kind_is_refused_with_what_it_has(settings: dict[str, Any], words: list[str]) -> None:
    """Wrong results would come out of it, or an error for every tile."""
    message = refusal(Triton(config(**settings)))
    assert message.startswith("--model segment: ")
    for word in words:
        assert word in message


def test_the_smallest_std_and_batch_are_accepted() -> None:
    """The nearest neighbours of what is refused."""
    model = look_up(Triton(config(std="1e-6,1,1", mean="-1,0,2", max_batch_size=1)))
    assert (model.std[0], model.mean, model.max_batch_size) == (1e-6, (-1, 0, 2), 1)


def test_an_unknown_model_is_told_at_once() -> None:
    """Waiting does not make it known; the server's own words name it."""
    triton = Triton(failures=[(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'segment' is not found")])
    message = refusal(triton, patience_s=60)
    assert message.startswith("--model segment: the endpoint 127.0.0.1:")
    assert "NOT_FOUND: Request for unknown model: 'segment' is not found" in message
    assert triton.calls == 1


def test_another_refusal_names_endpoint_and_status() -> None:
    """A gRPC server of another kind says UNIMPLEMENTED."""
    triton = Triton(failures=[(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")])
    message = refusal(triton, patience_s=60)
    assert message.startswith("--endpoint 127.0.0.1:")
    assert "UNIMPLEMENTED: Method not found!" in message


def test_a_server_that_starts_is_waited_for() -> None:
    """Endpoint and job are often started together."""
    triton = Triton(failures=[UNAVAILABLE, EXHAUSTED])
    assert look_up(triton, patience_s=20).name == "segment"
    assert triton.calls == 3


def test_a_server_that_does_not_get_ready_is_given_up() -> None:
    """A run that waits for ever looks like one that works."""
    triton = Triton(failures=[UNAVAILABLE], for_ever=True)
    message = refusal(triton, patience_s=0.5)
    assert "nothing answers there as Triton (UNAVAILABLE: the server is starting)" in message
    assert triton.calls > 2


def test_an_address_where_nothing_listens_is_told() -> None:
    """The most common mistake: a wrong port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

        async def run() -> None:
            async with connect(address, model_name="segment", model_version="", patience_s=0.3):
                pass

        with pytest.raises(UsageError, match=f"^--endpoint {address}: nothing answers there.*check host and port$"):
            asyncio.run(run())


def test_logits_belong_to_their_chips() -> None:
    """Chips and answers are matched by position alone."""
    triton, chips = Triton(), chips_of(5, 3, 16, 24)
    logits = infer(triton, chips)
    np.testing.assert_array_equal(logits, _halves(chips))
    assert logits.dtype == np.float32
    request = triton.requests[-1]
    assert (request.model_name, request.model_version) == ("segment", "")
    assert [output.name for output in request.outputs] == ["sem_seg"]


def test_forty_megabytes_pass_both_ways() -> None:
    """A full batch is larger than gRPC's usual limit of 4 MiB."""
    chips = chips_of(54, 3, 256, 256)
    assert chips.nbytes > 40e6
    np.testing.assert_array_equal(infer(Triton(), chips), _halves(chips))


@pytest.mark.parametrize("failures", [[UNAVAILABLE, UNAVAILABLE], [EXHAUSTED, UNAVAILABLE]])
def test_what_passes_by_itself_is_tried_again(failures: list[tuple[grpc.StatusCode, str]]) -> None:
    """A restart of one server must not cost a tile."""
    triton, chips = Triton(failures=list(failures)), chips_of(1, 3, 8, 8)
    np.testing.assert_array_equal(infer(triton, chips), _halves(chips))
    assert triton.calls == 3


@pytest.mark.parametrize("failure", [UNAVAILABLE, EXHAUSTED])
def test_an_endpoint_that_stays_away_ends_the_run(failure: tuple[grpc.StatusCode, str]) -> None:
    """After the patience it is better to say so than to wait on."""
    triton = Triton(failures=[failure], for_ever=True)
    started = time.monotonic()
    with pytest.raises(EndpointError, match=r"^the endpoint was unavailable for 0.6 s: [A-Z_]+: the .*$") as caught:
        infer(triton, chips_of(1, 3, 8, 8), patience_s=0.6)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started >= 0.6
    assert triton.calls > 2


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_refusal_is_never_tried_again(code: grpc.StatusCode) -> None:
    """The same request would be refused again, and would keep the endpoint busy."""
    triton = Triton(failures=[(code, INVALID[1])], for_ever=True)
    with pytest.raises(RequestRefusedError) as caught:
        infer(triton, chips_of(1, 3, 8, 8))
    message = "the endpoint refused a batch of chips: {}: unexpected shape [1,2] for input 'image'"
    assert str(caught.value) == message.format(code.name)
    assert triton.calls == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda chips: _halves(chips)[:1], r"FP32 \[1, 2, 8, 8\] of sem_seg, not FP32 \[2, 2, 8, 8\]"),
        (lambda chips: _halves(chips)[:, :1], r"FP32 \[2, 1, 8, 8\]"),
        (lambda chips: _halves(chips)[:, :, :4], r"FP32 \[2, 2, 4, 8\]"),
    ],
)
def test_an_answer_of_another_shape_is_no_answer(
    answer: Callable[[NDArray[np.float32]], NDArray[np.float32]], words: str
) -> None:
    """A model with a fixed or halved output would be drawn in the wrong place."""
    with pytest.raises(EndpointError, match=f"^model segment answered with {words}"):
        infer(Triton(answer=answer), chips_of(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("answering", "words"),
    [
        ({"datatype": "INT32"}, r"INT32 \[1, 2, 8, 8\] of sem_seg, not FP32 \[1, 2, 8, 8\]"),
        ({"cut_bytes": 4}, "other bytes than its shape needs of sem_seg"),
        ({"cut_bytes": 3}, "other bytes than its shape needs of sem_seg"),
    ],
)
def test_an_answer_of_another_type_or_length_is_no_answer(answering: dict[str, Any], words: str) -> None:
    """Integers read as logits are an empty map that looks like success."""
    with pytest.raises(EndpointError, match=f"^model segment answered with {words}"):
        infer(Triton(**answering), chips_of(1, 3, 8, 8))


def test_a_request_without_an_answer_ends_the_run() -> None:
    """A hung server must not cost each tile three time-outs, nor the tile the blame."""
    triton = Triton(failures=[(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")], for_ever=True)
    with pytest.raises(EndpointError, match=r"^the endpoint did not answer a request within 60 s$"):
        infer(triton, chips_of(1, 3, 8, 8))
    assert triton.calls == 1


def test_an_answer_without_the_output_is_no_answer() -> None:
    """It must be an error of the endpoint, not of the pipeline."""
    with pytest.raises(EndpointError, match=r"^model segment answered with nothing of sem_seg, not"):
        infer(Triton(output="other"), chips_of(1, 3, 8, 8))


def test_several_requests_are_under_way_at_once() -> None:
    """Triton fills its batches, and the network is idle less, only when it has several."""

    async def run() -> int:
        arrived, release, most = 0, asyncio.Event(), 4

        class Waiting(Triton):
            async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  the protocol's name
                nonlocal arrived
                arrived += 1
                if arrived == most:
                    release.set()
                await asyncio.wait_for(release.wait(), 20)
                return await super().ModelInfer(request, context)

        async with (
            _serving(Waiting()) as address,
            connect(address, model_name="segment", model_version="", patience_s=0) as client,
        ):
            assert isinstance(client, ModelClient)
            await asyncio.gather(*(client.infer(chips_of(1, 3, 8, 8)) for _ in range(most)))
        return arrived

    assert asyncio.run(run()) == 4
