"""Triton's HTTP through the forwarder, compared with the real Triton; and a stand-in where Triton has to misbehave."""

import asyncio
import functools
import gc
import gzip
import http.client
import itertools
import json
import re
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from tritonclient.http import InferenceServerClient as StockClient
from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

import cpu_triton
from tests.support.local_endpoint import RunningTriton, running_triton
from tests.support.models import write_model, write_protocol_models
from triton_forwarder.forwarder import EXTENSIONS
from triton_forwarder.http import PATHS, PINNED, HttpForwarder
from triton_forwarder.rpc_table import RPCS

REFUSALS = {rpc.name: f"{rpc.name} is refused here" for rpc in RPCS if rpc.allowed_by}

PATIENCE_S = 30
"""A bound against a hang, far above what is ever needed."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def forwarding(triton: str, **options: Any) -> Iterator[str]:
    """Serve the forwarder with the server that Ray Serve has; yield its host:port."""
    config = uvicorn.Config(
        lambda: HttpForwarder(triton, **options),
        factory=True,
        port=0,
        lifespan="on",
        timeout_keep_alive=90,
        timeout_graceful_shutdown=5,
        log_config=None,
        access_log=False,
        # Or every answer would have headers that are not Triton's.
        server_header=False,
        date_header=False,
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.listens.wait(PATIENCE_S)
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Request:
    """What a client sends."""

    path: str
    method: str = "GET"
    body: bytes | list[bytes] | None = None
    """A list is sent in chunks."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


def ask(address: str, request: Request) -> Answer:
    """Send a request with no header but those of its own."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        return ask_again(connection, request)
    finally:
        connection.close()


def ask_again(connection: http.client.HTTPConnection, request: Request) -> Answer:
    """Send a request on a connection that is open."""
    connection.putrequest(request.method, request.path, skip_accept_encoding=True)
    for name, value in request.headers.items():
        connection.putheader(name, value)
    if isinstance(request.body, list):
        connection.putheader("Transfer-Encoding", "chunked")
    elif request.body is not None:
        connection.putheader("Content-Length", str(len(request.body)))
    connection.endheaders(request.body, encode_chunked=isinstance(request.body, list))
    response = connection.getresponse()
    headers = sorted((name.lower(), value) for name, value in response.getheaders())
    # evhtp has words of its own for 405, and ASGI carries none.
    reason = response.reason.replace("Method Not Allowed", "Not Allowed")
    return Answer(response.status, reason, headers, response.read())


_TICKS = '''
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Decoupled: answers once, and again when the file INPUT is there."""

    def execute(self, requests):
        for request in requests:
            path = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", path)]))
            file = Path(path.flat[0].decode())
            # Without its folder its test has ended.
            while file.parent.exists() and not file.exists():
                time.sleep(0.01)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", path)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    models = tmp_path_factory.mktemp("models")
    write_protocol_models(models)
    write_model(models, "ticks", _TICKS, dtype="STRING", dims="[ 1 ]", decoupled=True)
    with running_triton(models) as running:
        yield running


@pytest.fixture(scope="module")
def forwarder(triton: RunningTriton) -> Iterator[str]:
    with forwarding(triton.http_address, refusals=REFUSALS) as address:
        yield address


def infer_body(data: list[Any], *, dtype: str = "FP32") -> bytes:
    tensor = {"name": "INPUT", "datatype": dtype, "shape": [len(data)], "data": data}
    return json.dumps({"id": "7", "inputs": [tensor]}).encode()


def binary_infer(
    values: list[float], headers: dict[str, str] | None = None, *, encoded: Callable[[bytes], bytes] = bytes
) -> Request:
    data = struct.pack(f"<{len(values)}f", *values)
    parameters = {"binary_data_size": len(data)}
    document = {
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [len(values)], "parameters": parameters}],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}],
    }
    head = json.dumps(document).encode()
    return post(
        "/v2/models/identity_fp32/infer",
        encoded(head + data),
        {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        | (headers or {}),
    )


def post(path: str, body: bytes | list[bytes] | None = b"", headers: dict[str, str] | None = None) -> Request:
    return Request(path, "POST", body, headers or {})


def _pieces(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


IDENTITY = "/v2/models/identity_fp32"
METHODS = ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND")
CALLS = {
    "server metadata": Request("/v2"),
    "live": Request("/v2/health/live"),
    "ready": Request("/v2/health/ready"),
    "query": Request("/v2/health/ready?a=%41&b=c+d&&e"),
    "model ready": Request(f"{IDENTITY}/ready"),
    "version ready": Request(f"{IDENTITY}/versions/1/ready"),
    "unknown version ready": Request(f"{IDENTITY}/versions/9/ready"),
    "unknown model ready": Request("/v2/models/unknown/ready"),
    "model metadata": Request(IDENTITY),
    "version metadata": Request(f"{IDENTITY}/versions/1"),
    "unknown version metadata": Request(f"{IDENTITY}/versions/9"),
    "no version": Request(f"{IDENTITY}/versions/x"),
    "model config": Request(f"{IDENTITY}/versions/1/config"),
    "unknown model config": Request("/v2/models/unknown/config"),
    "statistics": Request("/v2/models/stats"),
    "model statistics": Request(f"{IDENTITY}/stats"),
    "unknown model statistics": Request("/v2/models/unknown/stats"),
    "model named as a verb": Request("/v2/models/infer/config"),
    "model with escapes": Request("/v2/models/identity%5Ffp32/config"),
    "model with special characters": Request("/v2/models/a:b;c=d@e,f!g$h&i'j(k)*l+m~n/config"),
    "index": post("/v2/repository/index"),
    "index of ready models": post("/v2/repository/index", b'{"ready": true}'),
    "index of a repository": post("/v2/repository/r/index"),
    "index by GET": Request("/v2/repository/index"),
    "metrics": Request("/metrics"),
    "root": Request("/"),
    "unknown": Request("/v2/unknown?a=b"),
    "unknown, with a body": post("/v2/unknown", b"x" * 300_000),
    "infer": post(f"{IDENTITY}/infer", infer_body([1, -2.5])),
    "infer with a version": post(f"{IDENTITY}/versions/1/infer", infer_body([3])),
    "infer by GET": Request(f"{IDENTITY}/infer"),
    "infer without a body": post(f"{IDENTITY}/infer", None),
    "infer with an empty body": post(f"{IDENTITY}/infer"),
    "infer nothing": post(f"{IDENTITY}/infer", infer_body([])),
    "infer in chunks": post(f"{IDENTITY}/infer", _pieces(infer_body([1, 2]), 11)),
    "infer strings": post("/v2/models/identity_string/infer", infer_body(["", "é", 'a"b'], dtype="BYTES")),
    "infer binary": binary_infer([1, 2, 3]),
    "infer a megabyte": binary_infer([0.5] * 250_000),
    "request in gzip": binary_infer(
        [1] * 1000, {"Content-Encoding": "gzip"}, encoded=functools.partial(gzip.compress, mtime=0)
    ),
    "request in deflate": binary_infer([1] * 1000, {"Content-Encoding": "deflate"}, encoded=zlib.compress),
    "request not in the gzip it says": binary_infer([1], {"Content-Encoding": "gzip"}),
    "request in an unknown coding": binary_infer([1], {"Content-Encoding": "br"}),
    "answer in gzip": binary_infer([1] * 1000, {"Accept-Encoding": "gzip"}),
    "answer in deflate": binary_infer([1] * 1000, {"Accept-Encoding": "deflate"}),
    "answer in any": binary_infer([1] * 1000, {"Accept-Encoding": "deflate;q=0.5, gzip;q=0.2, *;q=0"}),
    "wrong header length": binary_infer([1], {"Inference-Header-Content-Length": "3"}),
    "no JSON": post(f"{IDENTITY}/infer", b"{"),
    "unknown model": post("/v2/models/unknown/infer", infer_body([1])),
    "wrong dtype": post(f"{IDENTITY}/infer", infer_body([1], dtype="INT32")),
    "wrong shape": post("/v2/models/raises/infer", infer_body([1, 2])),
    "a model that raises": post("/v2/models/raises/infer", infer_body([1])),
    "decoupled infer": post("/v2/models/countdown/infer", infer_body([3], dtype="INT32")),
    "generate": post("/v2/models/countdown/generate", b'{"INPUT": 1}'),
    "generate with more answers": post("/v2/models/countdown/generate", b'{"INPUT": 3}'),
    "generate stream": post("/v2/models/countdown/versions/1/generate_stream", b'{"INPUT": 3}'),
    "generate stream that fails": post("/v2/models/countdown/generate_stream", b'{"INPUT": -2}'),
    "generate without input": post("/v2/models/countdown/generate_stream", b"{}"),
    **{
        f"{method} {path}": Request(path, method)
        for method, path in itertools.product(METHODS, ("/v2", f"{IDENTITY}/infer", "/v2/health/live", "/unknown"))
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_triton_own(triton: RunningTriton, forwarder: str, name: str) -> None:
    """Client authors must not notice that there is something in between."""
    assert ask(forwarder, CALLS[name]) == ask(triton.http_address, CALLS[name])


def test_the_forwarder_knows_every_path_of_triton() -> None:
    """A new version of Triton with a new path would otherwise be answered with 404, or a new control be overlooked."""
    program = cpu_triton.find().program.read_bytes()
    found = {path.decode() for path in re.findall(rb"\0(/v2(?:[/(][^\0]*)?)(?=\0)", program)}
    version = "(?:/versions/([0-9]+))?"
    assert found == {
        "/v2",
        "/v2(?:/health/(live|ready))?",
        "/v2/logging",
        "/v2/models/stats",
        "/v2/trace/setting",
        f"/v2/models/([^/]+){version}(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?",
        "/v2/repository(?:/([^/]+))?/(index|models/([^/]+)/(load|unload))",
        "/v2/systemsharedmemory(?:/region/([^/]+))?/(status|register|unregister)",
        "/v2/cudasharedmemory(?:/region/([^/]+))?/(status|register|unregister)",
    }
    assert set(PATHS) == {rpc.name for rpc in RPCS if rpc.kind == "unary_unary"}


CONTROL = {
    "RepositoryModelLoad": ("/v2/repository/models/m/load", "/v2/repository/r/models/m/load"),
    "RepositoryModelUnload": ("/v2/repository/models/m/unload", "/v2/repository/r/models/m/unload"),
    "SystemSharedMemoryStatus": ("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/r/status"),
    "SystemSharedMemoryRegister": ("/v2/systemsharedmemory/region/r/register", "/v2/systemsharedmemory/register"),
    "SystemSharedMemoryUnregister": ("/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/r/unregister"),
    "CudaSharedMemoryStatus": ("/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/r/status"),
    "CudaSharedMemoryRegister": ("/v2/cudasharedmemory/region/r/register", "/v2/cudasharedmemory/register"),
    "CudaSharedMemoryUnregister": ("/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/r/unregister"),
    "TraceSetting": ("/v2/trace/setting", "/v2/models/identity_fp32/trace/setting"),
    "LogSettings": ("/v2/logging",),
}


@pytest.mark.parametrize(("rpc", "path"), [(rpc, path) for rpc, paths in CONTROL.items() for path in paths])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_control_call_passes_only_when_it_is_allowed(
    triton: RunningTriton, forwarder: str, rpc: str, path: str, method: str
) -> None:
    """Whoever reaches the port could otherwise unload models; and the operator who wants that must be able to."""
    request = Request(path, method, b"{}" if method == "POST" else None)
    refused = ask(forwarder, request)
    assert (refused.status, json.loads(refused.body)) == (403, {"error": REFUSALS[rpc]})
    assert ("content-type", "application/json") in refused.headers
    others = {name: words for name, words in REFUSALS.items() if name != rpc}
    with forwarding(triton.http_address, refusals=others) as allowing:
        assert ask(allowing, request) == ask(triton.http_address, request)


def test_the_controls_above_are_all_there_are() -> None:
    """A refused RPC without a path among them would not be tested."""
    assert set(CONTROL) == set(REFUSALS)


def _other_spellings(path: str) -> set[str]:
    parts = path.split("/")[1:]
    spellings = {
        f"http://other{path}",
        f"http://other/{path}",
        f"{path}?x",
        f"{path}?/v2",
        f"{path}/",
        f"{path}//",
        f"{path}/.",
        f"{path}/x/..",
        f"{path};x",
        f"{path}#x",
        f"{path}%00",
        f"{path}%20",
        f"{path}%0a",
        f"{path}%3f",
        f"{path}%23",
        path.upper(),
        path.title(),
        path.replace("/", "//"),
        path.replace("/", "/./"),
        path.replace("/", "\\").replace("\\", "/", 1),
        f"/v2/health/..{path.removeprefix('/v2')}",
        f"/x/..{path}",
        f"/..{path}",
        f"/v2/models/x/..%2f..{path.removeprefix('/v2')}",
        f"/v2/models/..{path.removeprefix('/v2')}",
        f"/v2/models/..%2f{path.removeprefix('/v2/').replace('/', '%2f')}/config",
        f"/v2/models/x/..%2f..%2f..{path}%3f/infer",
        f"{path}/infer",
        f"/v2/models/x{path}/infer",
    }
    for at, part in enumerate(parts):
        before, after = "/" + "/".join([*parts[:at], ""]), "/".join(["", *parts[at + 1 :]]).rstrip("/")
        spellings |= {
            f"{before}%{ord(part[0]):02x}{part[1:]}{after}",
            f"{before}%25{ord(part[0]):02x}{part[1:]}{after}",
            f"{before}%2f{part}{after}",
            f"{before}{part}%2F{after}",
            f"{before}/{part}{after}",
            f"{before}{part}.{after}",
            f"{before}{part};x=y{after}",
            f"{before}x/../{part}{after}",
            f"{before}.%2e/{part}{after}",
        }
    return spellings - {path}


@pytest.mark.parametrize("path", [path for paths in CONTROL.values() for path in paths])
def test_no_other_spelling_of_a_control_call_gets_through(triton: RunningTriton, forwarder: str, path: str) -> None:
    """A refusal would be worth nothing if a second slash or an escape went around it."""
    for spelling in sorted(_other_spellings(path)):
        request = Request(spelling)
        alone = ask(triton.http_address, request)
        through = ask(forwarder, request)
        if through.status == 403:
            continue
        assert through == alone, spelling
        assert alone.status in {404, 405}, spelling
        # Either Triton knows no such path, or it takes it for that of a model.
        assert re.search(rb"^{\"error\":\"(Not Found|Method Not Allowed|Request for unknown model.*)\"}$", alone.body)


@pytest.mark.parametrize("path", ["/v2/systemsharedmemory/status", "/v2/logging", "/v2/trace/setting"])
def test_the_spelling_that_triton_understands_is_the_one_refused(
    triton: RunningTriton, forwarder: str, path: str
) -> None:
    """The test above would see nothing if Triton answered every one of its spellings with an error."""
    for request in (Request(path), Request(f"{path}?x"), Request(f"http://other{path}")):
        assert ask(triton.http_address, request).status == 200
        assert ask(forwarder, request).status == 403


def test_server_metadata_names_no_extension_that_is_refused(triton: RunningTriton) -> None:
    """Clients that see shared memory advertised use it, and fail."""
    alone = json.loads(ask(triton.http_address, Request("/v2")).body)
    with forwarding(triton.http_address, hidden_extensions=EXTENSIONS) as address:
        answer = ask(address, Request("/v2"))
    left = [name for name in alone["extensions"] if name not in EXTENSIONS]
    assert left
    assert left != alone["extensions"]
    assert json.loads(answer.body) == alone | {"extensions": left}
    assert ("content-length", str(len(answer.body))) in answer.headers
    assert answer.status == 200


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", f"{IDENTITY}/infer", "/unknown"])
def test_head_is_answered_without_a_body(triton: RunningTriton, forwarder: str, path: str) -> None:
    """Triton sends one, and the next caller on that connection would get it as the beginning of his answer."""
    connection = http.client.HTTPConnection(forwarder, timeout=PATIENCE_S)
    for _ in range(3):
        through, alone = ask_again(connection, Request(path, "HEAD")), ask(triton.http_address, Request(path, "HEAD"))
        assert (through.status, through.body) == (alone.status, alone.body)
        assert set(through.headers) - set(alone.headers) <= {("content-type", "application/json")}
        assert ask_again(connection, Request("/v2/health/live")).status == 200
    connection.close()


def test_a_streamed_answer_arrives_as_it_is_made(forwarder: str, tmp_path: Path) -> None:
    """The first word of a language model would otherwise come with its last."""
    go = tmp_path / "go"
    connection = http.client.HTTPConnection(forwarder, timeout=PATIENCE_S)
    connection.request("POST", "/v2/models/ticks/generate_stream", json.dumps({"INPUT": str(go)}))
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    event = f'data: {{"OUTPUT":"{go}","model_name":"ticks","model_version":"1"}}\n'.encode()
    assert response.readline() == event
    go.touch()
    assert response.read() == b"\n" + event + b"\n"
    connection.close()


# --- A stock client ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_clients(triton: RunningTriton, forwarder: str) -> Iterator[dict[str, StockClient]]:
    """One through the forwarder, and one of Triton alone."""
    clients = {"through": StockClient(forwarder), "alone": StockClient(triton.http_address)}
    yield clients
    while clients:
        clients.popitem()[1].close()
    # It fails when another thread than its own throws it away.
    gc.collect()


def _stock_infer(client: StockClient, model: str, values: Any, **options: Any) -> Any:
    binary = options.pop("binary", True)
    tensor = InferInput("INPUT", values.shape, "BYTES" if values.dtype == object else "FP32")
    tensor.set_data_from_numpy(values, binary_data=binary)
    output = InferRequestedOutput("OUTPUT", binary_data=binary)
    result = client.infer(model, [tensor], outputs=[output], request_id="5", **options)
    return result.get_response(), result.as_numpy("OUTPUT").tolist()


@pytest.mark.parametrize("size", [0, 1, 20_000])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_coding", [None, "gzip", "deflate"])
def test_a_stock_client_infers(
    stock_clients: dict[str, StockClient],
    size: int,
    binary: bool,
    request_coding: str | None,
    response_coding: str | None,
) -> None:
    """`tritonclient.http` is what people have."""
    options = {
        "binary": binary,
        "request_compression_algorithm": request_coding,
        "response_compression_algorithm": response_coding,
    }
    floats = np.arange(size, dtype=np.float32)
    strings = np.array([b"", "é".encode(), b"x" * size], dtype=object)
    for model, values in (("identity_fp32", floats), ("identity_string", strings)):
        through, alone = (_stock_infer(stock_clients[way], model, values, **options) for way in ("through", "alone"))
        assert through == alone
        assert len(through[1]) == len(values)


def test_a_stock_client_gets_triton_words(stock_clients: dict[str, StockClient]) -> None:
    """Programs look into the message of an error; those of this endpoint must reach it too."""
    calls: dict[str, Callable[[StockClient], Any]] = {
        "unknown model": lambda client: _stock_infer(client, "unknown", np.zeros(1, np.float32)),
        "raises": lambda client: _stock_infer(client, "raises", np.zeros(1, np.float32)),
        "wrong dtype": lambda client: _stock_infer(client, "identity_string", np.zeros(1, np.float32)),
        "unknown config": lambda client: client.get_model_config("unknown"),
    }

    def words(way: str, call: Callable[[StockClient], Any]) -> tuple[Any, ...]:
        with pytest.raises(InferenceServerException) as error:
            call(stock_clients[way])
        return error.value.status(), error.value.message()

    for name, call in calls.items():
        assert words("through", call) == words("alone", call), name
    assert words("through", lambda client: client.load_model("m")) == ("403", REFUSALS["RepositoryModelLoad"])


def test_a_stock_client_asks_for_everything_else(stock_clients: dict[str, StockClient]) -> None:
    """All that is not inference, by the client's own methods."""
    calls: list[Callable[[StockClient], Any]] = [
        lambda client: client.is_server_live(),
        lambda client: client.is_server_ready(),
        lambda client: client.is_model_ready("identity_fp32", "1"),
        lambda client: client.get_server_metadata(),
        lambda client: client.get_model_metadata("identity_fp32"),
        lambda client: client.get_model_config("identity_fp32"),
        lambda client: client.get_model_repository_index(),
        lambda client: client.get_inference_statistics(),
        lambda client: client.get_inference_statistics("identity_fp32"),
    ]
    for call in calls:
        assert call(stock_clients["through"]) == call(stock_clients["alone"])


# --- A stand-in for Triton --------------------------------------------------------------------------------------------

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def stand_in(handle: Handler) -> AsyncIterator[str]:
    """A server that does with each connection what the test says."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


def through_the_forwarder(handle: Handler, client: Callable[[str], Any], **options: Any) -> Any:
    """Let a client, in a thread, talk through the forwarder to a stand-in."""

    async def scenario() -> Any:
        async with stand_in(handle) as address:

            def talk() -> Any:
                with forwarding(address, **options) as forwarder:
                    return client(forwarder)

            return await asyncio.to_thread(talk)

    return asyncio.run(scenario())


def raw_request(address: str, data: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(data)
    return connection


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def test_a_request_reaches_triton_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's tracing and authentication read headers; and nothing may be added to them, or sent by way of a proxy."""
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    sent = [
        *("host: triton.example", "content-length: 3", "content-encoding: gzip", "accept-encoding: br, gzip;q=0.5"),
        *("inference-header-content-length: 2", "authorization: Bearer x", "traceparent: 00-1-2-01", "te-st: 1"),
        *("cookie: a=b; c", "twice: 1", "twice: 2", "name: Straße"),
    ]
    hop = [
        *("connection: keep-alive, x-of-this-hop", "keep-alive: timeout=5", "te: trailers", "proxy-connection: x"),
        *("x-of-this-hop: 1", "expect: 100-continue", "proxy-authorization: x", "trailer: x"),
    ]
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(3))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nSet-Cookie: from=server\r\n\r\n")
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)
        await writer.drain()

    def client(address: str) -> None:
        head = "POST /v2/models/a%2fb%C3/infer?c=%41&&d HTTP/1.1\r\n" + "\r\n".join([*sent, *hop]) + "\r\n\r\n"
        with raw_request(address, head.encode() + b"xyz") as connection, connection.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert answer.readline() == b"\r\n"
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        assert ask(address, Request("/v2")).status == 200

    through_the_forwarder(handle, client)
    lines = seen[0].decode().split("\r\n")
    assert lines[0] == "POST /v2/models/a%2fb%C3/infer?c=%41&&d HTTP/1.1"
    assert sorted(line.lower() for line in lines[1:-2]) == sorted(line.lower() for line in sent)
    assert lines[-1] == "xyz"
    # A cookie of one client's answer is not for the next client's request.
    assert [line.partition(":")[0].lower() for line in seen[1].decode().split("\r\n")[1:-2]] == ["host"]


def test_an_answer_reaches_the_client_as_triton_gave_it() -> None:
    """No redirect is followed, nothing unpacked, no header joined or lost but those of the connection."""
    body = gzip.compress(b"x" * 1000)
    headers = [
        "location: /v2",
        "content-encoding: gzip",
        f"content-length: {len(body)}",
        "set-cookie: a",
        "set-cookie: b",
    ]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        hop = ["connection: close, of-this-hop", "of-this-hop: 1", "keep-alive: timeout=1", "upgrade: h2c"]
        writer.write("\r\n".join(["HTTP/1.1 307 x", *headers, *hop, "", ""]).encode() + body)
        await writer.drain()

    answer = through_the_forwarder(handle, lambda address: ask(address, Request("/v2/models/m")))
    assert (answer.status, answer.body) == (307, body)
    assert answer.headers == sorted(tuple(line.split(": ")) for line in headers)


LARGE = 256 * 2**20
IN_SOCKETS = 64 * 2**20
"""More than the system holds for the two connections between a client and Triton."""


def _until_blocked(send: Callable[[bytes], int]) -> int:
    """Send as much as is taken; it blocks when nobody reads."""
    count = 0
    while count < LARGE:
        try:
            count += send(bytes(min(2**20, LARGE - count)))
        except TimeoutError:
            return count
    return count


def test_a_request_body_waits_for_triton_and_not_in_memory() -> None:
    """One large tensor, sent faster than Triton reads, would otherwise take the replica's memory."""
    blocked = threading.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.to_thread(blocked.wait, PATIENCE_S)
        left = LARGE
        while left:
            left -= len(await reader.read(2**20))
        writer.write(OK)
        await writer.drain()

    def client(address: str) -> int:
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n\r\n"
        with raw_request(address, head.encode()) as connection:
            connection.settimeout(1)
            held = _until_blocked(connection.send)
            blocked.set()
            connection.settimeout(PATIENCE_S)
            connection.sendall(bytes(LARGE - held))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        return held

    assert through_the_forwarder(handle, client) < IN_SOCKETS


def test_a_response_body_waits_for_the_client_and_not_in_memory() -> None:
    """A client on a slow line would otherwise cost the replica the memory of its whole answer."""
    held: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE)
        await writer.drain()
        sent = 0
        try:
            while sent < LARGE:
                writer.write(bytes(2**20))
                await asyncio.wait_for(writer.drain(), 1)
                sent += 2**20
        except TimeoutError:
            held.append(sent)
            writer.write(bytes(LARGE - sent - 2**20))
            await writer.drain()

    def client(address: str) -> int:
        with raw_request(
            address, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        ) as connection:
            while not held:
                threading.Event().wait(0.1)
            with connection.makefile("rb") as answer:
                while answer.readline() != b"\r\n":
                    pass
                return len(answer.read(LARGE))

    assert through_the_forwarder(handle, client) == LARGE
    assert held[0] < IN_SOCKETS


@pytest.mark.parametrize("leaves", ["in its body", "before the answer", "in the answer"])
def test_a_client_that_leaves_ends_its_call_at_triton(leaves: str) -> None:
    """Its connection, and its place among the ongoing requests, would otherwise be held for nobody."""
    arrived, gone = threading.Event(), threading.Event()
    length = 100 if leaves == "in its body" else 3

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(3)
        if leaves == "in the answer":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
            await writer.drain()
        arrived.set()
        if await reader.read() == b"":
            gone.set()

    def client(address: str) -> bool:
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nxyz"
        with raw_request(address, head.encode()) as connection:
            assert arrived.wait(PATIENCE_S)
            if leaves == "in the answer":
                assert connection.recv(1)
        return gone.wait(PATIENCE_S)

    assert through_the_forwarder(handle, client)


UNREACHABLE = b'{"error":"Triton is not reachable, it may be restarting"}'


def test_an_unreachable_triton_is_told_without_its_address(caplog: pytest.LogCaptureFixture) -> None:
    """A client's error must not show the inside of the pod; the operator finds it in the log."""
    for address in ("127.0.0.1:1", "[::1]:1", "none.invalid:1"):
        with forwarding(address) as forwarder:
            for request in (Request("/v2"), post("/v2/models/m/infer", b"x" * 100_000)):
                answer = ask(forwarder, request)
                assert (answer.status, answer.body) == (503, UNREACHABLE)
                assert ("content-type", "application/json") in answer.headers
    assert "Triton cannot be reached: " in caplog.text


def test_a_triton_that_ends_before_its_answer_is_told_as_unreachable() -> None:
    """The client may try again."""

    async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    answer = through_the_forwarder(handle, lambda address: ask(address, post("/v2/models/m/infer", b"x")))
    assert (answer.status, answer.body) == (503, UNREACHABLE)


@pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_a_triton_that_ends_in_its_answer_leaves_it_unfinished(framing: str) -> None:
    """Half an answer must not look like a whole one."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n1\r\nx\r\n".encode()[: None if "chunked" in framing else -4])
        await writer.drain()

    def client(address: str) -> None:
        with pytest.raises(http.client.IncompleteRead):
            ask(address, Request("/v2/models/m"))

    through_the_forwarder(handle, client)


def test_a_websocket_is_refused(forwarder: str) -> None:
    """Triton has none; the server in front of the forwarder would show a stack trace in its log for each."""
    key = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    request = Request("/v2", headers=key | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert ask(forwarder, request).status == 403


def sequence_body(sequence_id: Any, *, size: int = 1) -> bytes:
    """Return a request of a sequence, in Triton's JSON."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [size], "data": [1.0] * size}
    return json.dumps({"id": "x", "parameters": {"sequence_id": sequence_id}, "inputs": [tensor]}).encode()


@pytest.mark.parametrize(
    ("replicas", "sequence_id", "headers", "status"),
    [
        (2, 7, {}, 400),
        (2, "seven", {}, 400),
        (2, 0, {}, 200),
        (2, "", {}, 200),
        (2, 7, {PINNED: "1"}, 200),
        (1, 7, {}, 200),
    ],
)
def test_a_sequence_that_nobody_keeps_together_is_refused(
    triton: RunningTriton, replicas: int, sequence_id: Any, headers: dict[str, str], status: int
) -> None:
    """Its requests would reach Tritons that know nothing of the others, and be answered all the same."""
    with forwarding(triton.http_address, replicas=lambda: replicas) as address:
        for body in (sequence_body(sequence_id), _pieces(sequence_body(sequence_id, size=20_000), 7000)):
            answer = ask(address, post("/v2/models/identity_fp32/infer", body, headers))
            assert answer.status == status, answer
            assert (b"use a stream of gRPC" in answer.body) == (status == 400)
