"""The ingress program with a real HAProxy behind it, and servers that stand in for Tritons and replicas."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc

from local_endpoint import processes
from tests.ingress.rendered import Application, Replica, Shape, render

PROGRAM = Path(__file__).parents[2] / "charts/triton-ray/files/triton_ingress/haproxy"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
METADATA = "/inference.GRPCInferenceService/ServerMetadata"

_HEALTHZ = "/ray.serve.RayServeAPIService/Healthz"
# Ends the program with this process. Done in between, not between fork and exec: after a true fork, gRPC's threads of
# this process would stand in the way.
_WITH_US = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
# HealthzResponse(message="success")
_HEALTHY = b"\x0a\x07success"


@dataclass(frozen=True)
class Seen:
    """A request that has reached a server."""

    server: str
    """triton or replica, and its host."""
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Ports:
    """Of an endpoint whose pods have addresses of their own; the first three are HAProxy's."""

    grpc: int
    http: int
    metrics: int
    tls_http: int
    triton_grpc: int
    triton_http: int
    replica_grpc: int
    replica_http: int
    statistics: int

    @classmethod
    def free(cls) -> "Ports":
        """Return ports that nobody has."""
        names = list(cls.__dataclass_fields__)
        first = processes.free_port_range(len(names))
        return cls(*range(first, first + len(names)))


@dataclass
class Ingress:
    """A started ingress program."""

    ports: Ports
    folder: Path
    shape: Shape
    environment: Mapping[str, str]
    seen: list[Seen] = field(default_factory=list)
    """What has reached the servers, health checks left out."""
    released: Event = field(default_factory=Event)
    """Until it is set, unary requests of gRPC with the body `wait` are not answered."""
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def grpc(self) -> str:
        """host:port of the gRPC port."""
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def http(self) -> str:
        """URL of the HTTP port."""
        return f"http://127.0.0.1:{self.ports.http}"

    def output(self) -> str:
        """Return all that the program, and then HAProxy, has printed."""
        return (self.folder / "output").read_text()

    def metrics(self) -> str:
        """Return HAProxy's metrics for Prometheus."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.metrics}/metrics", timeout=10) as response:
            return str(response.read().decode())

    def set(self, **settings: Any) -> None:
        """Change settings; they hold from the next start on."""
        changed = json.loads(self.environment["TRITON_INGRESS"]) | settings
        self.environment = {**self.environment, "TRITON_INGRESS": json.dumps(changed)}

    def reload(self, shape: Shape) -> None:
        """Let Ray write its configuration anew, and start a HAProxy that takes over, as Ray does."""
        self.shape = shape
        old = self.process
        self.start(*(["-sf", str(old.pid), "-x", str(self.folder / "admin.sock")] if old else []))
        if old:
            old.wait(30)

    def start(self, *arguments: str) -> None:
        """Start the program on a configuration that Ray has just written."""
        file = render(self.shape, self.folder, grpc_port=self.ports.grpc, http_port=self.ports.http)
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WITH_US, str(PROGRAM), "-db", "-f", str(file), "-dR", *arguments],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        pid = f"Pid: {self.process.pid}"
        deadline = time.monotonic() + 30
        while pid not in self._command("show info"):
            assert self.process.poll() is None, f"HAProxy has ended: {self.output()}"
            assert time.monotonic() < deadline, f"HAProxy has not started within 30 s: {self.output()}"
            time.sleep(0.02)

    def _command(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            try:
                admin.connect(str(self.folder / "admin.sock"))
            except OSError:
                return ""
            admin.sendall(f"{command}\n".encode())
            return admin.makefile().read()


def ingress_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment for the program."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return os.environ | {
        "PATH": path,
        "TRITON_INGRESS": json.dumps(settings),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(PROGRAM),
    }


def shape_of(ports: Ports, hosts: Sequence[str], **options: Any) -> Shape:
    """Return what Ray knows of an endpoint with a replica on each of these hosts."""
    return Shape(
        [
            Application(
                [
                    Replica(host, ports.replica_grpc, ports.replica_http, f"SERVE_REPLICA::triton#Forwarder#{host}")
                    for host in hosts
                ]
            )
        ],
        fallback=False,
        options={"metrics_port": ports.metrics, "stats_port": ports.statistics, "nbthread": 2, **options},
    )


@contextmanager
def running_ingress(folder: Path, *, pods: int = 1, **settings: Any) -> Iterator[Ingress]:
    """Run pods with a Triton and a replica, and the program with a HAProxy in front of them.

    Args:
        folder: for HAProxy's files.
        pods: their number; the first has the address 127.0.0.1.
        settings: of the ingress program.
    """
    ports = Ports.free()
    hosts = [f"127.0.0.{number}" for number in range(1, pods + 1)]
    given = {"triton_grpc_port": ports.triton_grpc, "triton_http_port": ports.triton_http} | settings
    ingress = Ingress(ports, folder, shape_of(ports, hosts), ingress_environment(given))
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(_grpc_server(f"triton {host}", host, ports.triton_grpc, ingress))
            stack.enter_context(_grpc_server(f"replica {host}", host, ports.replica_grpc, ingress))
            stack.enter_context(_http_server(f"triton {host}", host, ports.triton_http, ingress.seen))
            stack.enter_context(_http_server(f"replica {host}", host, ports.replica_http, ingress.seen))
        try:
            ingress.start()
            yield ingress
        finally:
            ingress.released.set()
            if ingress.process:
                processes.stop(ingress.process, within_s=10)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each request, and each message of a stream, with the server's name."""

    def __init__(self, name: str, ingress: Ingress) -> None:
        self._name, self._seen, self._released = name, ingress.seen, ingress.released

    def service(self, details: Any) -> Any:
        path = details.method
        headers = {key: str(value) for key, value in details.invocation_metadata}

        def unary(request: bytes, _: Any) -> bytes:
            if path == _HEALTHZ:
                return _HEALTHY
            self._seen.append(Seen(self._name, path, headers, request))
            if request == b"wait":
                self._released.wait(60)
            return self._name.encode()

        def stream(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
            for request in requests:
                self._seen.append(Seen(self._name, path, headers, request))
                yield self._name.encode()

        if path == STREAM:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@contextmanager
def _grpc_server(name: str, host: str, port: int, ingress: Ingress) -> Iterator[None]:
    server = grpc.server(futures.ThreadPoolExecutor(20), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((_Handler(name, ingress),))
    server.add_insecure_port(f"{host}:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(grace=None).wait()


@contextmanager
def _http_server(name: str, host: str, port: int, seen: list[Seen]) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path != "/-/healthz":
                seen.append(Seen(name, self.path, {key.lower(): value for key, value in self.headers.items()}, b""))
            self._answer()

        def do_POST(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            body = b""
            if "content-length" in headers:
                body = self.rfile.read(int(headers["content-length"]))
            else:
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size + 2)[:-2]
                self.rfile.readline()
            seen.append(Seen(name, self.path, headers, body))
            self._answer()

        def _answer(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            # HAProxy ends a connection whenever it likes.
            pass

    with Server((host, port), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def channel(address: str, credentials: Any = None, **options: Any) -> Iterator[grpc.Channel]:
    """Open a channel with a connection of its own."""
    settings = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1), *options.items()]
    settings += [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    opened = (
        grpc.secure_channel(address, credentials, settings) if credentials else grpc.insecure_channel(address, settings)
    )
    with opened:
        yield opened


def call(connection: grpc.Channel, path: str, request: bytes = b"", **options: Any) -> Any:
    """Make a unary call; return the answer as text, or the number of the status and its words."""
    try:
        answer = connection.unary_unary(path)(request, timeout=30, **options)
    except grpc.RpcError as error:
        return error.code().value[0], error.details()
    # HAProxy's own answer to Serve's health check is OK without a message.
    return (answer or b"").decode()


@dataclass(frozen=True)
class Response:
    """Of HTTP."""

    status: int
    headers: Mapping[str, str]
    body: str


def request(url: str, body: bytes | None = None, *, context: Any = None, **headers: str) -> Response:
    """Make an HTTP request, POST if there is a body; an underscore in a header's name stands for a hyphen."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        response = opener.open(urllib.request.Request(url, body, sent), timeout=30)  # noqa: S310  of the tests
    except urllib.error.HTTPError as error:
        response = error
    with response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Response(response.status, headers, response.read().decode())


def wait_for_port(port: int) -> None:
    """Wait until a program listens on a port of the loopback address."""
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nobody listens on port {port}"
        time.sleep(0.02)
