"""Triton's HTTP protocol at Serve's HTTP port: each request goes on to the Triton in the replica's own pod.

An ASGI application. Bodies stream both ways, and nothing is compressed or decompressed here. It needs aiohttp, which
comes with `ray[serve]`.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any

import aiohttp
from yarl import URL

from triton_forwarder.channel import UNREACHABLE

logger = logging.getLogger("ray.serve")

# The paths of Triton's HTTP server, by the RPC that does the same. Triton compares the path as it was sent, without
# decoding it, and so does this: another spelling is another path, and one that is not here never reaches Triton.
_MODEL = "/v2/models/[^/]+"
_VERSION = f"{_MODEL}(?:/versions/[0-9]+)?"
_REPOSITORY = "/v2/repository(?:/[^/]+)?"
_SYSTEM_MEMORY, _CUDA_MEMORY = (f"/v2/{kind}sharedmemory(?:/region/[^/]+)?" for kind in ("system", "cuda"))
PATHS = {
    "ServerMetadata": "/v2",
    "ServerLive": "/v2/health/live",
    "ServerReady": "/v2/health/ready",
    "ModelStatistics": f"/v2/models/stats|{_VERSION}/stats",
    "ModelMetadata": _VERSION,
    "ModelReady": f"{_VERSION}/ready",
    "ModelConfig": f"{_VERSION}/config",
    "ModelInfer": f"{_VERSION}/(?:infer|generate|generate_stream)",
    "RepositoryIndex": f"{_REPOSITORY}/index",
    "RepositoryModelLoad": f"{_REPOSITORY}/models/[^/]+/load",
    "RepositoryModelUnload": f"{_REPOSITORY}/models/[^/]+/unload",
    "SystemSharedMemoryStatus": f"{_SYSTEM_MEMORY}/status",
    "SystemSharedMemoryRegister": f"{_SYSTEM_MEMORY}/register",
    "SystemSharedMemoryUnregister": f"{_SYSTEM_MEMORY}/unregister",
    "CudaSharedMemoryStatus": f"{_CUDA_MEMORY}/status",
    "CudaSharedMemoryRegister": f"{_CUDA_MEMORY}/register",
    "CudaSharedMemoryUnregister": f"{_CUDA_MEMORY}/unregister",
    "TraceSetting": f"/v2/trace/setting|{_MODEL}/trace/setting",
    "LogSettings": "/v2/logging",
}
_ANY_PATH = re.compile("|".join(f"(?P<{rpc}>{paths})" for rpc, paths in PATHS.items()))

# Of one connection, not of the request; and Expect, which the server on this side has answered already.
_HOP_HEADERS = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)

# What HAProxy adds to requests, of gRPC too, that it sends to the same replica as all others of their sequence. Only
# HAProxy knows: it cannot read compressed requests, and those that come through Serve's proxies go to any replica.
PINNED = "triton-ingress-sequence"
SPLIT = (
    "this request is one of a sequence, and nothing sees to it that all of them reach the same of {replicas} replicas: "
    "use a stream of gRPC, or an endpoint whose ingress is direct or replica"
)
_SEQUENCE = re.compile(rb'"sequence_id"\s*:\s*("[^"]|-?[1-9])')
_HEAD = 16384

_Headers = list[tuple[bytes, bytes]]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class _ClientGoneError(Exception):
    """Ends the call at Triton of a client that waits no more."""


class _Client:
    """Who sent a request: its body, a piece at a time, and then whether it still waits for the answer."""

    def __init__(self, scope: _Message, receive: _Receive) -> None:
        self.has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        self._receive = receive
        self._peeked: list[_Message] = []
        self._body_is_read = asyncio.Event()
        if not self.has_body:
            self._body_is_read.set()

    async def peek(self, size: int) -> bytes:
        """Return the beginning of the body, at least so much of it unless it ends; `body` yields it again."""
        beginning = b""
        while self.has_body and len(beginning) < size:
            message = await self._receive()
            self._peeked.append(message)
            beginning += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return beginning

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        more = True
        while more:
            message = self._peeked.pop(0) if self._peeked else await self._receive()
            if message["type"] == "http.disconnect":
                self._body_is_read.set()
                # Until `watch` ends it all: Triton would take an end for that of the body.
                await asyncio.Future[None]()
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._body_is_read.set()

    async def watch(self) -> None:
        """Raise when the client leaves."""
        await self._body_is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise _ClientGoneError


class HttpForwarder:
    """One replica's ASGI application."""

    def __init__(
        self,
        triton: str,
        *,
        refusals: Mapping[str, str] | None = None,
        hidden_extensions: Collection[str] = (),
        replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        """Take the running event loop for its own; no connection is opened yet.

        Args:
            triton: host:port of Triton's HTTP.
            refusals: what a client is told, for each RPC that is refused.
            hidden_extensions: those that the server's metadata shall not name.
            replicas: how many there are; with several, a sequence that HAProxy has not given one is refused.
        """
        self._triton = triton
        self._refusals = refusals or {}
        self._hidden_extensions = frozenset(hidden_extensions)
        self._replicas = replicas
        self._session = aiohttp.ClientSession(
            # Triton has the queue, and its clients have their own patience.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
        )

    async def close(self) -> None:
        """Close the connections to Triton."""
        await self._session.close()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Do what ASGI asks of an application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif (known := _ANY_PATH.fullmatch(scope["raw_path"].decode("latin-1"))) is None:
            # To the letter what Triton says.
            await _answer(send, 404, "Not Found", content_type=b"text/plain")
        elif (rpc := str(known.lastgroup)) in self._refusals:
            await _answer(send, 403, self._refusals[rpc])
        elif scope["method"] == "HEAD":
            # Triton's answer too, but Triton sends a body with it, on which every HTTP client breaks.
            await _answer(send, 405, "Method Not Allowed")
        else:
            await self._pass_on(rpc, scope, receive, send)

    async def _live(self, receive: _Receive, send: _Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, rpc: str, scope: _Message, receive: _Receive, send: _Send) -> None:
        client = _Client(scope, receive)
        unpinned = rpc == "ModelInfer" and self._replicas() > 1 and PINNED.encode() not in dict(scope["headers"])
        # The parameters stand at the head of the JSON, before the tensors.
        if unpinned and _SEQUENCE.search(await client.peek(_HEAD)):
            await _answer(send, 400, SPLIT.format(replicas=self._replicas()))
            return
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(client.watch())
                await self._exchange(rpc, scope, client, send)
                watch.cancel()
        except* _ClientGoneError:
            logger.debug("a client has left during %s", rpc)

    async def _exchange(self, rpc: str, scope: _Message, client: _Client, send: _Send) -> None:
        try:
            response = await self._session.request(
                scope["method"],
                URL.build(
                    scheme="http",
                    authority=self._triton,
                    path=scope["raw_path"].decode("latin-1"),
                    query_string=scope["query_string"].decode("latin-1"),
                    encoded=True,  # Or it would be tidied up, and perhaps name something else.
                ),
                headers=_request_headers(scope),
                data=client.body() if client.has_body else None,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectionError as error:
            logger.warning("Triton cannot be reached: %s", error)
            await _answer(send, 503, UNREACHABLE)
            return
        async with response:
            headers = _end_to_end(response.raw_headers)
            if rpc == "ServerMetadata" and response.status == 200 and self._hidden_extensions:
                metadata = self._without_hidden_extensions(await response.read())
                await _send_whole(send, response.status, headers, metadata)
                return
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for piece in response.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})

    def _without_hidden_extensions(self, metadata: bytes) -> bytes:
        answer = json.loads(metadata)
        answer["extensions"] = [name for name in answer["extensions"] if name not in self._hidden_extensions]
        return _json(answer)


def _request_headers(scope: _Message) -> list[tuple[str, str]]:
    headers = _end_to_end(scope["headers"])
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        # One of the two: with both, it would be for Triton to say where the next request begins.
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    return [(name.decode("latin-1"), value.decode(errors="replace")) for name, value in headers]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> _Headers:
    headers = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_HEADERS | named]


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def _answer(send: _Send, status: int, error: str, *, content_type: bytes = b"application/json") -> None:
    await _send_whole(send, status, [(b"content-type", content_type)], _json({"error": error}))


async def _send_whole(send: _Send, status: int, headers: _Headers, body: bytes) -> None:
    headers = [(name, value) for name, value in headers if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
