"""Each call of a table, made to a lone Triton and to the endpoint: a client must see the same of both.

What may differ is the table "What differs from Triton alone" in the chart's README; `CHANGES` has what each of its rows
makes of Triton's answer, to the byte. A difference that is not listed is red, and so is one that does not occur.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from local_endpoint.ray_serve import Ingress
from tests.support.differential import (
    Call,
    Metadata,
    Observation,
    Peer,
    answer_is_compressed,
    connected,
    differences,
    wait_until,
)
from tests.support.local_endpoint import running_endpoint, running_triton
from tests.support.models import COUNTED, DTYPES, ENSEMBLE, write_differential_models, write_explicit_models
from triton_forwarder.rpc_table import RPCS

README = Path(__file__).parents[2] / "charts/triton-ray/README.md"

SEVERAL = 3

# Ingress, and number of replicas.
ENDPOINTS: list[tuple[Ingress, int]] = [
    (ingress, replicas) for replicas in (1, SEVERAL) for ingress in get_args(Ingress)
]
# A second lone Triton: what differs there is not of the endpoint's making.
ALONE = ("none", 1)

Run = Callable[[Peer, Path], Sequence[Observation]]
"""Makes calls to a server and returns what it saw; the folder is its own, for the model `held`."""

CALLS: dict[str, Run] = {}
# To Tritons with the arguments and the models of `half_loaded`.
CALLS_TO_HALF_LOADED: dict[str, Run] = {}


def add(name: str, *, table: dict[str, Run] = CALLS) -> Callable[[Run], Run]:
    """Put calls into a table."""

    def put(run: Run) -> Run:
        assert name not in CALLS.keys() | CALLS_TO_HALF_LOADED.keys(), f"two calls named {name!r}"
        table[name] = run
        return run

    return put


def wire(message: Any) -> bytes:
    """Return a message as it goes over the wire."""
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def unary(name: str, method: str, message: Any, *, table: dict[str, Run] = CALLS, **options: Any) -> None:
    """Put one unary call into a table."""
    add(name, table=table)(lambda peer, _: [peer.ask(method, wire(message), **options)])


def infer(name: str, message: Any, **options: Any) -> None:
    """Put one ModelInfer into the table."""
    unary(name, "ModelInfer", message, **options)


def stream(name: str, *messages: Any, **options: Any) -> None:
    """Put one ModelStreamInfer into the table, with all its requests sent at once."""
    add(name)(lambda peer, _: [peer.stream("ModelStreamInfer", *map(wire, messages), **options)])


Tensor = tuple[str, str, Sequence[int], bytes | None]
"""Name, datatype, shape, and raw contents unless they are none or elsewhere."""


def request(
    model: str, *inputs: Tensor, outputs: Iterable[str] = (), parameters: Mapping[str, Any] | None = None, **more: str
) -> Any:
    """Return a ModelInferRequest."""
    message = pb.ModelInferRequest(model_name=model, **more)
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw is not None:
            message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        set_parameter(message, name, value)
    return message


def set_parameter(message: Any, name: str, value: Any) -> None:
    """Set a parameter of a request, or of an input or output."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    setattr(message.parameters[name], kinds[type(value)], value)


def int32(name: str, *values: int) -> Tensor:
    """Return one INT32 tensor of one dimension."""
    return name, "INT32", [len(values)], np.array(values, "<i4").tobytes()


def texts(*values: str | bytes) -> bytes:
    """Return the raw contents of a BYTES tensor."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def text(name: str, *values: str | bytes) -> Tensor:
    """Return one BYTES tensor of one dimension."""
    return name, "BYTES", [len(values)], texts(*values)


def sum_request(model: str = "sum", **more: Any) -> Any:
    """Return a request that the model `sum` answers."""
    return request(model, int32("A", 1, 2, 3, 4), int32("B", 10, 20, 30, 40), **more)


def echo(**more: Any) -> Any:
    """Return a request to the model that answers with what it was told."""
    return request("echo", ("INPUT", "FP32", [1], b"\0\0\0\0"), **more)


def countdown(start: int, **more: Any) -> Any:
    """Return a request to the decoupled model: `start` answers, and an error after them below 0."""
    return request("countdown", int32("INPUT", start), **more)


def total(value: int, **parameters: Any) -> Any:
    """Return a request of a sequence."""
    return request("total", ("INPUT", "INT32", [1, 1], struct.pack("<i", value)), parameters=parameters)


def fails(words: str, status: str) -> Any:
    """Return a request to the model that fails as it is told to."""
    return request("fails", text("WORDS", words), text("STATUS", status))


def held(folder: Path, **more: Any) -> bytes:
    """Return a request to the model that waits until `release` is in the folder."""
    return wire(request("held", ("FOLDER", "BYTES", [1, 1], texts(str(folder))), **more))


# Every RPC, with an empty request and a typical one.

TYPICAL = {
    "ServerLive": pb.ServerLiveRequest(),
    "ServerReady": pb.ServerReadyRequest(),
    "ModelReady": pb.ModelReadyRequest(name="sum"),
    "ServerMetadata": pb.ServerMetadataRequest(),
    "ModelMetadata": pb.ModelMetadataRequest(name="scores"),
    "ModelInfer": sum_request(id="tile-7"),
    "ModelStreamInfer": countdown(2, id="tile-7"),
    "ModelConfig": pb.ModelConfigRequest(name="echo"),
    "ModelStatistics": pb.ModelStatisticsRequest(name="versions"),
    "RepositoryIndex": pb.RepositoryIndexRequest(ready=True),
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="sum"),
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="sum"),
    "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(name="region"),
    "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="region", key="/none", byte_size=64),
    "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(name="region"),
    "CudaSharedMemoryStatus": pb.CudaSharedMemoryStatusRequest(name="region"),
    "CudaSharedMemoryRegister": pb.CudaSharedMemoryRegisterRequest(name="region", raw_handle=b"x" * 64, byte_size=64),
    "CudaSharedMemoryUnregister": pb.CudaSharedMemoryUnregisterRequest(name="region"),
    "TraceSetting": pb.TraceSettingRequest(model_name="sum"),
    "LogSettings": pb.LogSettingsRequest(settings={"log_info": {"bool_param": True}}),
}

for rpc in RPCS:
    for kind, message in {"empty": b"", "typical": TYPICAL[rpc.name]}.items():
        if rpc.kind == "unary_unary":
            unary(f"{rpc.name}, {kind}", rpc.name, message)
        else:
            stream(f"{rpc.name}, {kind}", message)

# What is asked about models.

QUESTIONS = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
for name in ("sum", "versions", "countdown", ENSEMBLE, "none", "nöne %41", "blanks  "):
    for version in ("", "1", "3", "9", "x") if name in {"sum", "versions", ENSEMBLE, "none"} else ("", "9"):
        which = f"{name}, version {version or 'by default'}"
        for question in QUESTIONS:
            unary(f"{question} of {which}", question, getattr(pb, f"{question}Request")(name=name, version=version))
        infer(f"ModelInfer of {which}", sum_request(name, model_version=version))
unary("RepositoryIndex of a repository", "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="none"))


@add("ModelStatistics after calls")
def _statistics(peer: Peer, _: Path) -> list[Observation]:
    counted = request(COUNTED, int32("INPUT_0", 1, 2, 3, 4))
    answers = [peer.ask("ModelInfer", wire(counted)) for _ in range(4)]
    answers.append(peer.ask("ModelInfer", wire(request(COUNTED, int32("INPUT_0", 1)))))
    question = wire(pb.ModelStatisticsRequest(name=COUNTED))

    def counted_all() -> bool:
        # Triton counts a request after it has answered it.
        (response,) = peer.ask("ModelStatistics", question).responses
        return bool(pb.ModelStatisticsResponse.FromString(response).model_stats[0].inference_count == 4)

    wait_until(counted_all, "four inferences counted")
    return [*answers, peer.ask("ModelStatistics", question)]


# What is wrong with a request.

infer("a model without a name", request("", int32("A", 1)))
infer("no inputs", request("sum"))
infer("no inputs, with an id", request("sum", id="tile-7"))
infer("an input missing", request("sum", int32("A", 1, 2, 3, 4)))
infer("an input too many", request("sum", *(int32(each, 1, 2, 3, 4) for each in "ABC")))
infer("an input of another name", request("sum", *(int32(each, 1, 2, 3, 4) for each in "AC")))
infer("an input twice", request("sum", *(int32(each, 1, 2, 3, 4) for each in "AA")))
infer("an input of another type", request("sum", int32("A", 1, 2, 3, 4), ("B", "FP32", [4], b"\0" * 16)))
infer("an input of no type", request("sum", int32("A", 1, 2, 3, 4), ("B", "NONE", [4], b"\0" * 16)))
infer("an input of another shape", request("sum", int32("A", 1, 2, 3, 4), int32("B", 1, 2)))
infer("an input of more dimensions", request("sum", int32("A", 1, 2, 3, 4), ("B", "INT32", [2, 2], b"\0" * 16)))
infer("an input of negative shape", request("sum", int32("A", 1, 2, 3, 4), ("B", "INT32", [-1], b"\0" * 16)))
infer("an input with too few bytes", request("sum", int32("A", 1, 2, 3, 4), ("B", "INT32", [4], b"\0" * 15)))
infer("an input with too many bytes", request("sum", int32("A", 1, 2, 3, 4), ("B", "INT32", [4], b"\0" * 17)))
infer("an input without data", request("sum", int32("A", 1, 2, 3, 4), ("B", "INT32", [4], None)))
infer("more data than inputs", pb.ModelInferRequest.FromString(wire(sum_request()) + b"\x3a\x01x"))
infer("BYTES that end early", request("every_dtype", ("BYTES", "BYTES", [1], b"\x09\0\0\0abc")))
infer("BYTES with a cut length", request("every_dtype", ("BYTES", "BYTES", [1], b"\x09\0")))
infer("BYTES with too few elements", request("every_dtype", ("BYTES", "BYTES", [2], b"\x03\0\0\0abc")))
infer("a batch too large", request("scores", ("INPUT", "FP32", [5, 3], b"\0" * 60)))
infer("a batch of none", request("scores", ("INPUT", "FP32", [0, 3], b"")))
infer("no batch dimension", request("scores", ("INPUT", "FP32", [3], b"\0" * 12)))
infer("an unknown output", sum_request(outputs=["NONE"]))
infer("an output twice", sum_request(outputs=["SUM", "SUM"]))
infer("a unary call of a decoupled model", countdown(1))
infer("a parameter of Triton's own", sum_request(parameters={"triton_other": True}))
infer("a sequence id that is a truth", total(1, sequence_id=True))
infer("a priority that is text", sum_request(parameters={"priority": "high"}))
infer("a timeout that is text", sum_request(parameters={"timeout": "soon"}))

for name, value in {"region": "none", "byte_size": 16}.items():
    in_memory = sum_request()
    set_parameter(in_memory.inputs[0], f"shared_memory_{name}", value)
    infer(f"an input in shared memory, with nothing but the {name}", in_memory)
in_memory = sum_request()
del in_memory.raw_input_contents[0]
for name, value in {"region": "none", "byte_size": 16}.items():
    set_parameter(in_memory.inputs[0], f"shared_memory_{name}", value)
infer("an input in shared memory", in_memory)
in_memory = sum_request(outputs=["SUM"])
for name, value in {"region": "none", "byte_size": 16}.items():
    set_parameter(in_memory.outputs[0], f"shared_memory_{name}", value)
infer("an output in shared memory", in_memory)

# What models say when they fail.

for status in (
    *("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"),
    "exception",
):
    infer(f"a model that fails with {status}", fails("no sidewalk here", status))
    stream(f"a model that fails with {status}, in a stream", fails("no sidewalk here", status))
for what, words in {
    "of no words": "",
    "of other alphabets": "Fußweg 人行道 \N{PEDESTRIAN}",
    "with what gRPC escapes": "100% %41 \x01\x7f\n\t\r.",
    "with blanks around it": "  blanks  ",
    "of blanks": "   ",
    "that ends in a line feed": "line\n",
    "of 4,096 characters": "x" * 4096,
    "of 4,097 characters": "x" * 4097,
    "of 7,000 bytes": "x" * 7000,
    "of 3,000 characters and 9,000 bytes": "行" * 3000,
}.items():
    infer(f"a message {what}", fails(words, "INTERNAL"))
    stream(f"a message {what}, in a stream", fails(words, "INTERNAL"))

# Tensors.

NUMPY = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?"}
VALUES = {
    "BF16": b"\x80\x3f\x00\x80\xc0\x7f",
    "BYTES": texts("sidewalk", b"", b"\xff\x00", "naïve"),
    "BOOL": b"\0\1\1",
}
CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def values(dtype: str) -> tuple[int, bytes]:
    """Return how many values there are, and their raw contents: the least, the greatest and odd ones."""
    if dtype in VALUES:
        return 4 if dtype == "BYTES" else 3, VALUES[dtype]
    if dtype.startswith("FP"):
        kind = np.dtype(NUMPY[dtype])
        return 5, np.array([1.5, -0.0, np.inf, np.nan, np.finfo(kind).smallest_subnormal], kind).tobytes()
    kind = np.dtype(dtype.lower()).newbyteorder("<")
    return 3, np.array([np.iinfo(kind).min, np.iinfo(kind).max, 7], kind).tobytes()


def typed(dtype: str, field: str, elements: Sequence[Any]) -> Any:
    """Return a request whose input is not raw."""
    message = request("every_dtype", (dtype, dtype, [len(elements)], None))
    getattr(message.inputs[0].contents, field).extend(elements)
    return message


for dtype in DTYPES:
    count, raw = values(dtype)
    infer(f"{dtype}, raw", request("every_dtype", (dtype, dtype, [count], raw)))
    infer(f"{dtype}, raw, none", request("every_dtype", (dtype, dtype, [0], b"")))
    stream(f"{dtype}, raw, in a stream", request("every_dtype", (dtype, dtype, [count], raw)))
    field = CONTENTS.get(dtype, "fp32_contents")
    elements = [b"side", b"", b"\xff\0"] if dtype == "BYTES" else [0, 1, 1]
    infer(f"{dtype}, typed", typed(dtype, field, elements))
    infer(f"{dtype}, typed, none", typed(dtype, field, []))
    other = "int_contents" if field != "int_contents" else "fp32_contents"
    infer(f"{dtype}, typed as another", typed(dtype, other, [0, 1, 1]))
infer("typed contents out of range", typed("INT8", "int_contents", [1000, -1000]))
infer(
    "every type at once", request("every_dtype", *((each, each, [values(each)[0]], values(each)[1]) for each in DTYPES))
)
beside = sum_request()
beside.inputs[0].contents.int_contents.extend([1, 2, 3, 4])
infer("typed contents beside raw ones", beside)
mixed = typed("INT32", "int_contents", [1, 2, 3])
mixed.inputs.add(name="FP32", datatype="FP32", shape=[1])
mixed.raw_input_contents.append(b"\0\0\0\0")
infer("one input typed, another raw", mixed)
infer("no optional input", request("every_dtype"))
wide = [int32(f"INPUT_{index}", index, 0, 1, 2) for index in range(100)]
infer("100 inputs", request("wide_sum", *wide))
infer("100 inputs in another order", request("wide_sum", *reversed(wide)))
infer("99 of 100 inputs", request("wide_sum", *wide[:50], *wide[51:]))


@add("256 MiB there and back")
def _large(peer: Peer, _: Path) -> list[Observation]:
    # Not from the start on: its bytes would stay for the whole run.
    contents = np.arange(2**26, dtype="<i4").tobytes()
    return [peer.ask("ModelInfer", wire(request("every_dtype", ("INT32", "INT32", [2**26], contents))))]


@add("5 MiB there and back, in a stream, three times")
def _large_stream(peer: Peer, _: Path) -> list[Observation]:
    message = wire(request("every_dtype", ("UINT8", "UINT8", [5 * 2**20], bytes(range(256)) * 20480)))
    return [peer.stream("ModelStreamInfer", message, message, message)]


# Outputs.

scores = ("INPUT", "FP32", [2, 3], struct.pack("<6f", 0.25, 0.5, 0.125, -1, 3, 2))
infer("all outputs", request("scores", scores))
infer("one output of two", request("scores", scores, outputs=["ORDER"]))
infer("both outputs, the other first", request("scores", scores, outputs=["ORDER", "SCORES"]))
for classes in (0, 1, 2, 3, 9, -1):
    message = request("scores", scores, outputs=["SCORES", "ORDER"])
    set_parameter(message.outputs[0], "classification", classes)
    infer(f"{classes} classes", message)
    stream(f"{classes} classes, in a stream", message)
for name, value in {"classification": "two", "binary_data": False, "other": 7}.items():
    message = request("scores", scores, outputs=["SCORES"])
    set_parameter(message.outputs[0], name, value)
    infer(f"an output with the parameter {name} {value}", message)
# No classes of text: asked for those, Triton 2.51 dies.
infer("an ensemble", request(ENSEMBLE, int32("LEFT", 1, 2, 3, 4), int32("RIGHT", 1, 1, 1, 1), id="tile-7"))
infer("an ensemble, with an input missing", request(ENSEMBLE, int32("LEFT", 1, 2, 3, 4)))
for version in ("", "1", "3"):
    infer(
        f"version {version or 'by default'} of 1 and 3", request("versions", int32("INPUT", 10), model_version=version)
    )

# Compression.

COMPRESSED = ("compressed", "1 MiB compressed")
for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
    infer(f"compressed, {algorithm.name}", sum_request(), compression=algorithm)
    infer(f"an error to a compressed request, {algorithm.name}", request("none"), compression=algorithm)
    stream(f"a stream compressed, {algorithm.name}", countdown(2), compression=algorithm)
    unary(f"a question compressed, {algorithm.name}", "ModelConfig", TYPICAL["ModelConfig"], compression=algorithm)
    infer(
        f"1 MiB compressed, {algorithm.name}",
        request("every_dtype", ("UINT8", "UINT8", [2**20], bytes(range(256)) * 4096)),
        compression=algorithm,
    )

# Parameters.

for what, value in {"a truth": True, "an integer": -7, "text": "Straße", "a fraction": 0.5}.items():
    infer(f"a parameter that is {what}", echo(parameters={"own": value}))
    stream(f"a parameter that is {what}, in a stream", echo(parameters={"own": value}))
unsigned = echo()
unsigned.parameters["own"].uint64_param = 2**63
infer("a parameter that is an unsigned integer", unsigned)
without = echo()
without.parameters["own"].SetInParent()
infer("a parameter without a value", without)
infer("many parameters", echo(parameters={f"own_{index}": index for index in range(200)}))
infer("a large parameter", echo(parameters={"own": "x" * 2**20}))
for name in ("priority", "timeout"):
    infer(f"the parameter {name}", echo(parameters={name: 2}))
infer("a start and an end outside of sequences", echo(parameters={"sequence_start": True, "sequence_end": True}))
infer("a request id of other alphabets", echo(id="Straße %41 "))
for final in (True, False):
    parameters = {"triton_enable_empty_final_response": final}
    infer(f"an empty final response {final}, unary", echo(parameters=parameters))
    for start in (2, 0):
        stream(f"an empty final response {final}, after {start} answers", countdown(start, parameters=parameters))

# Sequences.

# The id of the sequence of each request, by calls that are made one by one; empty for none.
SEQUENCE_IDS: dict[str, list[str]] = {}


def sequence(name: str, *messages: Any, compression: grpc.Compression | None = None) -> None:
    """Put the requests of sequences into the table, one by one, as unary calls and as a stream."""
    SEQUENCE_IDS[name] = [id_of_sequence(message) for message in messages]

    def one_by_one(peer: Peer, _: Path) -> list[Observation]:
        return [peer.ask("ModelInfer", wire(message), compression=compression) for message in messages]

    def in_a_stream(peer: Peer, _: Path) -> list[Observation]:
        return [converse(peer, *messages, compression=compression)]

    add(name)(one_by_one)
    add(f"{name}, in a stream")(in_a_stream)


def id_of_sequence(message: Any) -> str:
    """Return the id, as text."""
    parameter = message.parameters.get("sequence_id", pb.InferParameter())
    return parameter.string_param or str(parameter.int64_param or "")


def converse(peer: Peer, *messages: Any, **options: Any) -> Observation:
    """Send each message when the one before is answered, and then half-close."""
    talk = peer.open("ModelStreamInfer", **options)
    for count, message in enumerate(messages, start=1):
        talk.send(wire(message))
        talk.wait_for_responses(count)
    talk.close()
    return talk.observation()


for what, key in {"a number": 7, "text": "a-uuid"}.items():
    sequence(
        f"a sequence whose id is {what}",
        total(1, sequence_id=key, sequence_start=True),
        total(10, sequence_id=key),
        total(100, sequence_id=key, sequence_end=True),
        total(1000, sequence_id=key),
    )
sequence(
    "two sequences side by side",
    total(1, sequence_id=1, sequence_start=True),
    total(2, sequence_id=2, sequence_start=True),
    total(10, sequence_id=1, sequence_end=True),
    total(20, sequence_id=2, sequence_end=True),
)
sequence("a sequence without a start", total(1, sequence_id=3))
sequence("a sequence without an id", total(1, sequence_start=True))
sequence("a sequence that the model does not know of", echo(parameters={"sequence_id": 2}))
sequence("a sequence with an id of none", echo(parameters={"sequence_id": 0}), echo(parameters={"sequence_id": ""}))
sequence(
    "a sequence, compressed",
    # gRPC sends what does not get smaller as it is.
    total(1, sequence_id=5, sequence_start=True, own="x" * 1000),
    total(10, sequence_id=5, sequence_end=True, own="x" * 1000),
    compression=grpc.Compression.Gzip,
)
sequence("a sequence of one", total(5, sequence_id=4, sequence_start=True, sequence_end=True))

# Streams.

for start in (100, 1, 0, -1, -3):
    stream(f"a decoupled model asked for {start}", countdown(start, id="tile-7"))
stream("an error in a stream", request("none", id="tile-7"))
stream("an error in a stream, asked for as a status", request("none"), metadata=[("triton_grpc_error", "true")])
# Triton 2.51 dies when the client or a decoupled model goes on after that.
stream(
    "a model's error, asked for as a status", fails("  blanks  ", "NOT_FOUND"), metadata=[("triton_grpc_error", "true")]
)
stream("an answer where errors are asked for as a status", countdown(2), metadata=[("triton_grpc_error", "true")])
stream("a stream without a request")
stream("a stream with a malformed request", b"\xff\xff")


@add("a stream whose requests follow the answers")
def _conversation(peer: Peer, _: Path) -> list[Observation]:
    return [converse(peer, countdown(1), sum_request(), request("none"), countdown(1), echo(), sum_request())]


@add("a malformed request after a good one")
def _malformed(peer: Peer, _: Path) -> list[Observation]:
    return [converse(peer, countdown(1), b"\xff\xff", countdown(1))]


@add("a stream that Triton ends first, over a malformed request")
def _ended_first_as_malformed(peer: Peer, _: Path) -> list[Observation]:
    return [peer.open("ModelStreamInfer", b"\xff\xff").observation()]


@add("a stream that is half-closed while the model works")
def _half_closed(peer: Peer, folder: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer", held(folder))
    talk.close()
    wait_until((folder / "started").exists, "the model has started")
    (folder / "release").touch()
    return [talk.observation()]


# Clients that change their mind, and deadlines.


def never_released(folder: Path) -> None:
    """Fail unless the model has noticed that its caller has gone; its one instance is free then."""
    wait_until((folder / "cancelled").exists, "the model has seen that its caller is gone")


@add("a call cancelled at once")
def _cancelled_before(peer: Peer, folder: Path) -> list[Observation]:
    call = peer.start("ModelInfer", held(folder))
    call.cancel()
    seen = call.observation()
    (folder / "release").touch()  # It may have started all the same.
    return [seen]


@add("a call cancelled while the model works")
def _cancelled_during(peer: Peer, folder: Path) -> list[Observation]:
    call = peer.start("ModelInfer", held(folder))
    wait_until((folder / "started").exists, "the model has started")
    call.cancel()
    never_released(folder)
    return [call.observation()]


@add("a call cancelled after its answer")
def _cancelled_after(peer: Peer, _: Path) -> list[Observation]:
    call = peer.start("ModelInfer", wire(sum_request()))
    wait_until(call.done, "the answer")
    call.cancel()
    return [call.observation()]


@add("a stream cancelled while the model works")
def _stream_cancelled_during(peer: Peer, folder: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer", wire(countdown(1)))
    talk.wait_for_responses(1)
    talk.send(held(folder))
    wait_until((folder / "started").exists, "the model has started")
    talk.cancel()
    never_released(folder)
    return [talk.observation()]


@add("a stream cancelled between requests")
def _stream_cancelled_after(peer: Peer, _: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer", wire(countdown(3)))
    talk.wait_for_responses(3)
    talk.cancel()
    return [talk.observation()]


@add("a stream cancelled before a request")
def _stream_cancelled_before(peer: Peer, _: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer")
    talk.cancel()
    return [talk.observation()]


@add("a connection that breaks while the model works")
def _disconnected(peer: Peer, folder: Path) -> list[Observation]:
    with connected(peer.address) as other:
        call = other.start("ModelInfer", held(folder))
        wait_until((folder / "started").exists, "the model has started")
        other.disconnect()
        never_released(folder)
        return [call.observation()]


@add("a stream whose connection breaks while the model works")
def _stream_disconnected(peer: Peer, folder: Path) -> list[Observation]:
    with connected(peer.address) as other:
        talk = other.open("ModelStreamInfer", held(folder))
        wait_until((folder / "started").exists, "the model has started")
        other.disconnect()
        never_released(folder)
        return [talk.observation()]


@add("a deadline before the call")
def _deadline_before(peer: Peer, folder: Path) -> list[Observation]:
    seen = [peer.ask("ModelInfer", held(folder), timeout=0), peer.ask("ModelInfer", held(folder), timeout=0.001)]
    (folder / "release").touch()  # It may have started all the same.
    return seen


@add("a deadline while the model works")
def _deadline_during(peer: Peer, folder: Path) -> list[Observation]:
    call = peer.start("ModelInfer", held(folder), timeout=2)
    never_released(folder)
    return [call.observation()]


@add("a deadline of a stream while the model works")
def _stream_deadline_during(peer: Peer, folder: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer", wire(countdown(2)), timeout=2)
    talk.wait_for_responses(2)
    talk.send(held(folder))
    never_released(folder)
    return [talk.observation()]


@add("a deadline of an idle stream")
def _stream_deadline_after(peer: Peer, _: Path) -> list[Observation]:
    talk = peer.open("ModelStreamInfer", wire(countdown(2)), timeout=2)
    return [talk.observation()]


def crowd(peer: Peer, folder: Path) -> list[Observation]:
    """Send so many requests that one works, some wait and some are turned away, at each of several replicas as at one.

    Those that wait do so for longer than they may.
    """
    message = held(folder, id="tile-7", parameters={"timeout": 1_000_000})
    calls = [peer.start("ModelInfer", message) for _ in range(16)]
    wait_until((folder / "started").exists, "the model has started")
    wait_until(lambda: any(call.done() for call in calls), "a request was turned away")
    time.sleep(1.1)
    (folder / "release").touch()
    return [call.observation() for call in calls]


@add("a full queue")
def _full_queue(peer: Peer, folder: Path) -> list[Observation]:
    return [next(seen for seen in crowd(peer, folder) if "Exceeds" in seen.message)]


@add("a request whose own time is over")
def _expired(peer: Peer, folder: Path) -> list[Observation]:
    return [next(seen for seen in crowd(peer, folder) if "expired" in seen.message)]


# What clients send along.

METADATA: dict[str, Metadata] = {
    "of their own": [("x-tenant", "city"), ("x-tenant", "county"), ("x-empty", "")],
    "of bytes": [("x-bytes-bin", bytes(range(256)))],
    "of 4 kB": [("x-large", "x" * 4096)],
    "of 7 kB": [("x-large", "x" * 7168)],
    "of 20 kB": [("x-large", "x" * 20480)],
    "of 50 keys": [(f"x-{index}", "x") for index in range(50)],
    "of 150 keys": [(f"x-{index}", "x") for index in range(150)],
    "traceparent": [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
    "authorization": [("authorization", "Bearer abc")],
    "request_id": [("request_id", "tile-7")],
    "application, ours": [("application", "triton")],
    "application, another": [("application", "another")],
    "multiplexed_model_id": [("multiplexed_model_id", "sum")],
    "session_id": [("session_id", "7")],
}

for what, metadata in METADATA.items():
    infer(f"metadata {what}", sum_request(), metadata=metadata)
    stream(f"metadata {what}, in a stream", countdown(1), metadata=metadata)
    unary(f"metadata {what}, with a question", "ModelReady", TYPICAL["ModelReady"], metadata=metadata)

# What is not Triton's service.

for what, service in {"all": "", "Triton's": "inference.GRPCInferenceService", "an unknown one": "none"}.items():
    message = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    unary(f"health of {what}", "/grpc.health.v1.Health/Check", message)
    unary(f"watched health of {what}", "/grpc.health.v1.Health/Watch", message)
unary("an unknown method", "NoSuchMethod", b"")
unary("an unknown service", "/no.such.Service/Method", b"")
unary("a method of no service", "/ModelInfer", b"")
for version in ("v1", "v1alpha"):
    unary(f"reflection {version}", f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo", b"\x3a\0")
unary("a malformed question", "ModelReady", b"\xff\xff")
infer("a malformed request", b"\xff\xff")
infer("a request with unknown fields", wire(sum_request()) + b"\xfa\x3f\x03abc")
unary("a stream of one, called as unary", "ModelStreamInfer", sum_request())
add("a unary call as a stream of one")(lambda peer, _: [peer.stream("ModelInfer", wire(sum_request()))])


# What a client sees of a Triton that is told which models to load, that shows its models the metadata of their callers,
# and that compresses its answers.

HALF_LOADED = (
    "--model-control-mode=explicit",
    "--load-model=echo",
    "--grpc-header-forward-pattern=.*",
    "--grpc-infer-response-compression-level=high",
)

for name in ("echo", "unloaded", "broken", "slow_to_load"):
    for version in ("", "1"):
        which = f"{name}, version {version or 'by default'}, with models half loaded"
        for question in QUESTIONS:
            message = getattr(pb, f"{question}Request")(name=name, version=version)
            unary(f"{question} of {which}", question, message, table=CALLS_TO_HALF_LOADED)
        message = request(name, ("INPUT", "FP32", [1], b"\0\0\0\0"), model_version=version)
        unary(f"ModelInfer of {which}", "ModelInfer", message, table=CALLS_TO_HALF_LOADED)
for question in ("ServerLive", "ServerReady", "RepositoryIndex", "/grpc.health.v1.Health/Check"):
    unary(f"{question}, with models half loaded", question, b"", table=CALLS_TO_HALF_LOADED)
unary("RepositoryModelLoad where it is allowed", "RepositoryModelLoad", b"", table=CALLS_TO_HALF_LOADED)
unary("RepositoryModelUnload where it is allowed", "RepositoryModelUnload", b"", table=CALLS_TO_HALF_LOADED)
for what, metadata in METADATA.items():
    unary(f"metadata {what}, for the model", "ModelInfer", echo(), metadata=metadata, table=CALLS_TO_HALF_LOADED)


@add("an answer that Triton compresses", table=CALLS_TO_HALF_LOADED)
def _compressed(peer: Peer, _: Path) -> list[Observation]:
    asked = wire(echo(parameters={"own": "x" * 8192}))
    how = b"compressed" if answer_is_compressed(peer.address, "ModelInfer", asked) else b"as it is"
    seen = peer.ask("ModelInfer", asked)
    return [replace(seen, responses=(*seen.responses, how))]


# What Triton says to these calls, so that it is known what they are about.

HALF = "with models half loaded"
SAID = {
    "ModelInfer of none, version by default": "NOT_FOUND: Request for unknown model: 'none' is not found",
    "ModelMetadata of none, version by default": "NOT_FOUND: Request for unknown model: 'none' is not found",
    "ModelConfig of none, version by default": "NOT_FOUND: Request for unknown model: 'none' is not found",
    "ModelStatistics of none, version by default": "INVALID_ARGUMENT: requested model 'none' is not available",
    "ModelReady of none, version by default": "OK: ",
    "ModelInfer of sum, version 9": "NOT_FOUND: Request for unknown model: 'sum' version 9 is not found",
    "ModelInfer of sum, version x": "INVALID_ARGUMENT: failed to get model version",
    f"ModelInfer of unloaded, version by default, {HALF}": "NOT_FOUND: Request for unknown model: 'unloaded' is not",
    f"ModelInfer of broken, version by default, {HALF}": "NOT_FOUND: Request for unknown model: 'broken' has no avail",
    f"ModelInfer of slow_to_load, version 1, {HALF}": "UNAVAILABLE: Request for unknown model: 'slow_to_load' versi",
    "an input missing": "INVALID_ARGUMENT: [request id: <id_unknown>] expected 2 inputs but got 1 inputs",
    "an input too many": "INVALID_ARGUMENT: [request id: <id_unknown>] expected 2 inputs but got 3 inputs",
    "an input of another name": "INVALID_ARGUMENT: unexpected inference input 'C' for model 'sum'",
    "an unknown output": "INVALID_ARGUMENT: unexpected inference output 'NONE' for model 'sum'",
    "an input of another type": "INVALID_ARGUMENT: [request id: <id_unknown>] inference input 'B' data-type is 'FP32'",
    "an input of another shape": "INVALID_ARGUMENT: [request id: <id_unknown>] unexpected shape for input 'B'",
    "an input with too few bytes": "INVALID_ARGUMENT: [request id: <id_unknown>] input byte size mismatch",
    "BYTES that end early": "INVALID_ARGUMENT: incomplete string data",
    "a batch too large": "INVALID_ARGUMENT: [request id: <id_unknown>] inference request batch-size must be <= 4",
    "a full queue": "UNAVAILABLE: [request id: tile-7] Exceeds maximum queue size",
    "a request whose own time is over": "UNAVAILABLE: Request timeout expired",
    "a call cancelled while the model works": "CANCELLED: ",
    "a deadline while the model works": "DEADLINE_EXCEEDED: ",
    "a model that fails with exception": "INTERNAL: Failed to process the request(s) for model",
    "a unary call of a decoupled model": "UNIMPLEMENTED: ModelInfer RPC doesn't support models with decoupled",
    "RepositoryModelLoad, typical": "UNAVAILABLE: explicit model load / unload is not allowed",
    "RepositoryModelLoad where it is allowed": "INTERNAL: failed to load",
    "typed contents beside raw ones": "INVALID_ARGUMENT: ",
    "256 MiB there and back": "OK: ",
    "BF16, raw": "OK: ",
    "an ensemble": "OK: ",
}


def said(answers: Sequence[Observation]) -> str:
    """Return the status of a row's last call."""
    return f"{answers[-1].code}: {answers[-1].message}"


# What the endpoint makes of Triton's answers.

Change = Callable[[str, Sequence[Observation]], Sequence[Observation]]
"""Makes of a row's name, and of what a client sees of its calls at Triton, what it sees at the endpoint."""

ChangeOfOne = Callable[[str, Observation], Observation]
"""The same of one of the calls."""


def each(change: ChangeOfOne) -> Change:
    """Return the change that does this to each call."""
    return lambda call, answers: [change(call, seen) for seen in answers]


def but_inference(change: ChangeOfOne) -> ChangeOfOne:
    """Leave alone what does not go through a forwarder."""
    return lambda call, seen: seen if seen.method in {"ModelInfer", "ModelStreamInfer"} else change(call, seen)


def refused(setting: str) -> ChangeOfOne:
    """Refuse the RPCs of a setting."""

    def change(_: str, seen: Observation) -> Observation:
        if not any(rpc.name == seen.method and rpc.allowed_by == setting for rpc in RPCS):
            return seen
        words = f"{seen.method} is refused by this endpoint; its operator can allow it with the setting {setting}"
        return replace(seen, code="PERMISSION_DENIED", message=words, responses=())

    return change


def without_refused_extensions(_: str, seen: Observation) -> Observation:
    """Leave out of ServerMetadata what nobody can use."""
    if seen.method != "ServerMetadata":
        return seen
    answer = pb.ServerMetadataResponse.FromString(seen.responses[0])
    refused = ("model_repository(", "system_shared_memory", "cuda_shared_memory", "trace", "logging")
    left = [extension for extension in answer.extensions if not extension.startswith(refused)]
    answer.ClearField("extensions")
    answer.extensions.extend(left)
    return replace(seen, responses=(wire(answer),))


def to_another_application(call: str, seen: Observation) -> Observation:
    """Take the metadata key for an application of Serve."""
    if not call.startswith("metadata application, another"):
        return seen
    where = "Ping /ray.serve.RayServeAPIService/ListApplications for available applications."
    return replace(seen, code="NOT_FOUND", message=f"Application 'another' not found. {where}", responses=())


def too_many_keys(call: str, seen: Observation) -> Observation:
    """Break off a call with more than 100 keys of metadata."""
    if not call.startswith("metadata of 150 keys"):
        return seen
    words = "Stream removed (RST_STREAM (Received RST_STREAM with error code 1))"
    return replace(seen, code="INTERNAL", message=words, responses=())


def too_much_metadata(call: str, seen: Observation) -> Observation:
    """Take Triton for broken where it ends a call before it has read its request."""
    if not call.startswith("metadata of 20 kB") or seen.method not in {"ModelInfer", "ModelStreamInfer"}:
        return seen
    return replace(seen, code="UNAVAILABLE", message="Triton is not reachable, it may be restarting")


def malformed(call: str, seen: Observation) -> Observation:
    """The same, where Triton cannot read the request."""
    if call != "a malformed request":
        return seen
    return replace(seen, code="UNAVAILABLE", message="Triton is not reachable, it may be restarting")


def unknown_method(_: str, seen: Observation) -> Observation:
    """Name the error, for which Triton has no words."""
    unknown = seen.code == "UNIMPLEMENTED" and not seen.message and not seen.method.startswith("/grpc.health.")
    return replace(seen, message="Method not found!") if unknown else seen


def without_words(_: str, seen: Observation) -> Observation:
    """Say the code where a model says nothing."""
    return replace(seen, message=seen.code) if seen.code != "OK" and not seen.message else seen


def cut(_: str, seen: Observation) -> Observation:
    """Cut long words."""
    end = "... [truncated]"
    return replace(seen, message=seen.message[: 4096 - len(end)] + end) if len(seen.message) > 4096 else seen


def without_blanks(_: str, seen: Observation) -> Observation:
    """Leave blanks out where words start and end."""
    return replace(seen, message=seen.message.strip(" "))


def with_request_id(call: str, seen: Observation) -> Observation:
    """Add Serve's id of the request."""
    request_id = "tile-7" if call.startswith("metadata request_id") else "a UUID"
    return replace(seen, trailing=(("request_id", request_id),)) if seen.code == "OK" else seen


def with_request_id_of_answers(call: str, seen: Observation) -> Observation:
    """The same, but for streams that end without an answer."""
    return with_request_id(call, seen) if seen.responses else seen


def with_own_user_agent(_: str, seen: Observation) -> Observation:
    """Let models see the forwarder's user agent for that of the client."""

    def change(response: bytes) -> bytes:
        if b'"user-agent": "grpc-python/' not in response:
            return response
        message = pb.ModelInferResponse.FromString(response)
        told = message.raw_output_contents[0][4:].replace(b"grpc-python/", b"grpc-python-asyncio/")
        message.raw_output_contents[0] = texts(told)
        return wire(message)

    return replace(seen, responses=tuple(map(change, seen.responses)))


def unknown_replica(call: str, answers: Sequence[Observation]) -> Sequence[Observation]:
    """Refuse requests of a sequence that may go to any replica."""
    words = (
        "this request is one of the sequence {!r}, and nothing sees to it that all of them reach the same of "
        f"{SEVERAL} replicas: send them in one stream (ModelStreamInfer), or uncompressed to an endpoint whose ingress "
        "is direct or replica"
    )
    return [
        replace(seen, code="UNIMPLEMENTED", message=words.format(sequence), responses=(), trailing=())
        if sequence
        else seen
        for seen, sequence in zip(answers, SEQUENCE_IDS.get(call, [""] * len(answers)), strict=True)
    ]


def unknown_replica_if_compressed(call: str, answers: Sequence[Observation]) -> Sequence[Observation]:
    """The same, where the request cannot be read on its way."""
    return unknown_replica(call, answers) if "compressed" in call else answers


def by_way_of_a_forwarder(call: str, seen: Observation) -> Observation:
    """Send to a forwarder what cannot be read on its way."""
    hidden = {"a large parameter", *(f"{what}, {how}" for what in COMPRESSED for how in ("Gzip", "Deflate"))}
    return with_request_id(call, seen) if call in hidden else seen


def not_compressed(call: str, seen: Observation) -> Observation:
    """Send answers as they are."""
    if call != "an answer that Triton compresses":
        return seen
    return replace(seen, responses=(*seen.responses[:-1], b"as it is"))


BUT_INFERENCE = "any but `ModelInfer` and `ModelStreamInfer`"

CHANGES: dict[str, tuple[Change, str]] = {
    "`RepositoryModelLoad`, `RepositoryModelUnload`": (
        each(refused("allow_model_control")),
        "RepositoryModelLoad, typical",
    ),
    "`SystemSharedMemory*`, `CudaSharedMemory*`": (
        each(refused("allow_shared_memory")),
        "SystemSharedMemoryStatus, empty",
    ),
    "`TraceSetting`, `LogSettings`": (each(refused("allow_trace_and_log_settings")), "LogSettings, empty"),
    "`ServerMetadata`": (each(without_refused_extensions), "ServerMetadata, typical"),
    "`ModelInfer`, with a message that is none": (each(malformed), "a malformed request"),
    "`ModelInfer`, `ModelStreamInfer`, with more than 16 kB of metadata": (
        each(too_much_metadata),
        "metadata of 20 kB",
    ),
    "any, with more than 100 keys of metadata": (each(too_many_keys), "metadata of 150 keys"),
    "any, with the metadata key `application`": (each(to_another_application), "metadata application, another"),
    f"{BUT_INFERENCE}, with the metadata key `application`": (
        each(but_inference(to_another_application)),
        "metadata application, another, with a question",
    ),
    "an RPC or a service that Triton does not have": (each(unknown_method), "an unknown method"),
    "any that fails without a message": (each(without_words), "a message of no words"),
    f"{BUT_INFERENCE} that fails without a message": (each(but_inference(without_words)), "watched health of all"),
    "any that fails with more than 4,096 characters": (each(cut), "a message of 7,000 bytes"),
    "any that fails with blanks at the start or end of its message": (
        each(without_blanks),
        "a message with blanks around it",
    ),
    "any that ends with OK": (each(with_request_id), "a stream without a request"),
    f"{BUT_INFERENCE} that ends with OK": (each(but_inference(with_request_id)), "ServerLive, typical"),
    "any that ends with OK and has an answer": (each(with_request_id_of_answers), "ModelInfer, typical"),
    "`ModelInfer`, `ModelStreamInfer` with `--grpc-header-forward-pattern`": (
        each(with_own_user_agent),
        "metadata of their own, for the model",
    ),
    "`ModelInfer`, `ModelStreamInfer` with `--grpc-infer-response-compression-level`": (
        each(not_compressed),
        "an answer that Triton compresses",
    ),
    "`ModelInfer` with a `sequence_id`": (unknown_replica, "a sequence of one"),
    "`ModelInfer` with a `sequence_id`, compressed": (unknown_replica_if_compressed, "a sequence, compressed"),
    "`ModelInfer`, compressed or with more than 16 kB of parameters": (
        each(by_way_of_a_forwarder),
        "a large parameter",
    ),
}
"""For each row of the README's table, in the order in which they take effect: what it does, and a call as example."""

INGRESSES = {each + more for each in get_args(Ingress) for more in ("", " (several replicas)")}


def readme_rows() -> dict[str, frozenset[str]]:
    """Return the calls of the README's table, each with the ingress kinds that its row names."""
    section = README.read_text().partition("## What differs from Triton alone\n")[2].partition("\n## ")[0]
    header, _, *rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header] == ["Call", "Through the endpoint", "Reason", "Ingress"]
    return {row[0].strip(): frozenset(each.strip() for each in row[3].split(",")) for row in rows}


def through(target: "Target", call: str, answers: Sequence[Observation]) -> Sequence[Observation]:
    """Return what a client of the endpoint sees, where Triton gives these answers."""
    rows = readme_rows()
    kinds = {target.ingress} | ({f"{target.ingress} (several replicas)"} if target.replicas > 1 else set())
    for row, (change, example) in CHANGES.items():
        if kinds & rows[row]:
            changed = change(call, answers)
            assert call != example or changed != answers, f"listed, but no difference: {row}"
            answers = changed
    return answers


@dataclass(frozen=True)
class Target:
    """A server to compare with a lone Triton."""

    ingress: str
    replicas: int
    address: str


@contextmanager
def running_target(
    *models: Path, ingress: Ingress | Literal["none"], replicas: int, triton_args: Sequence[str] = ()
) -> Iterator[tuple[Target, Sequence[str]]]:
    """Run a server to compare with; yield it, and where its Tritons listen."""
    if ingress == "none":
        with running_triton(*models, arguments=triton_args) as alone:
            yield Target(ingress, 1, alone.address), [alone.address]
    else:
        with running_endpoint(*models, ingress=ingress, replicas=replicas, triton_args=triton_args) as endpoint:
            yield Target(ingress, replicas, endpoint.address), endpoint.triton_addresses


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two model repositories."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    write_differential_models(first, second)
    return first, second


def observed(run: Run, address: str, folder: Path) -> Sequence[Observation]:
    """Make the calls of a row."""
    with connected(address) as peer:
        try:
            return run(peer, folder)
        finally:
            # Whatever has become of them, the model `held` is for the next.
            (folder / "release").touch()


Ask = Callable[[str], Sequence[Observation]]


@pytest.fixture(scope="module")
def triton(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """What a lone Triton answers; it is asked once for each call."""
    answers: dict[str, Sequence[Observation]] = {}

    with running_triton(*models) as running:

        def ask(call: str) -> Sequence[Observation]:
            if call not in answers:
                answers[call] = observed(CALLS[call], running.address, tmp_path_factory.mktemp("call"))
                assert running.process.poll() is None, f"Triton has ended:\n{running.log()}"
            return answers[call]

        yield ask


Pair = tuple[str, Target]


def name_of(param: tuple[str, int]) -> str:
    """Return the name of an endpoint in those of the tests."""
    return f"{param[0]}-{param[1]}"


@pytest.fixture(scope="module", params=[ALONE, *ENDPOINTS], ids=name_of)
def target(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Target]:
    """The server to compare with."""
    ingress, replicas = request.param
    with running_target(*models, ingress=ingress, replicas=replicas) as (running, _):
        yield running


@pytest.fixture(scope="module", params=[ALONE, *(each for each in ENDPOINTS if each[1] == 1)], ids=name_of)
def half_loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Target]]:
    """A lone Triton's address, and the server to compare with.

    At each Triton one model was not asked for, one has failed to load, and one is being loaded all the time.
    """
    ingress, replicas = request.param
    models = tmp_path_factory.mktemp("models")
    write_explicit_models(models)
    with (
        running_triton(models, arguments=HALF_LOADED) as alone,
        running_target(models, ingress=ingress, replicas=replicas, triton_args=HALF_LOADED) as (running, tritons),
        ExitStack() as stack,
    ):
        # To the Tritons themselves: the endpoint refuses.
        peers = [stack.enter_context(connected(address)) for address in (alone.address, *tritons)]
        loads = [start_loads(peer) for peer in peers]
        yield alone.address, running
        (models / "slow_to_load/go").touch()
        assert [load.observation().code for load in loads] == ["OK"] * len(peers)


def start_loads(peer: Peer) -> Call:
    """Let a Triton fail to load one model, and start to load another; return that call."""
    failed = peer.ask("RepositoryModelLoad", wire(pb.RepositoryModelLoadRequest(model_name="broken")))
    assert "this model is broken" in failed.message
    load = peer.start("RepositoryModelLoad", wire(pb.RepositoryModelLoadRequest(model_name="slow_to_load")))
    wait_until(lambda: b"LOADING" in peer.ask("RepositoryIndex", b"").responses[0], "the model is being loaded")
    return load


def test_the_readme_lists_what_these_tests_allow() -> None:
    """A client author reads the table in the README; what is missing there is found out the hard way."""
    rows = readme_rows()
    assert list(rows) == list(CHANGES)
    for row, ingresses in rows.items():
        assert ingresses <= INGRESSES, f"{row}: {', '.join(ingresses)} must be of {', '.join(INGRESSES)}"
    calls = CALLS.keys() | CALLS_TO_HALF_LOADED.keys()
    assert {example for _, example in CHANGES.values()} | SAID.keys() <= calls


@pytest.mark.parametrize("call", CALLS)
def test_the_answer_is_that_of_a_lone_triton(call: str, triton: Ask, target: Target, tmp_path: Path) -> None:
    """Client programs were written for Triton: what differs, and nobody has said so, breaks one of them."""
    answers = triton(call)
    assert said(answers).startswith(SAID.get(call, ""))
    expected = through(target, call, answers)
    seen = observed(CALLS[call], target.address, tmp_path)
    assert not (different := differences(expected, seen)), different


@pytest.mark.parametrize("call", CALLS_TO_HALF_LOADED)
def test_the_answer_is_that_of_a_lone_triton_with_these_arguments(call: str, half_loaded: Pair, tmp_path: Path) -> None:
    """Clients must learn that a model is not there yet; models, what their callers have sent along."""
    alone, target = half_loaded
    run = CALLS_TO_HALF_LOADED[call]
    answers = observed(run, alone, tmp_path)
    assert said(answers).startswith(SAID.get(call, ""))
    expected = through(target, call, answers)
    seen = observed(run, target.address, tmp_path)
    assert not (different := differences(expected, seen)), different
