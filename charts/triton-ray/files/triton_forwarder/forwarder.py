"""The Serve deployment that carries Triton's RPCs to the Triton in its own pod.

Requests and responses stay bytes on the whole way: Serve would have to pickle protobuf messages, which fails for those
of a stock tritonclient, and the Ray image needs no Triton stubs. Only the standard library, `ray` and `grpc` are
imported, for the same reason.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import grpc
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from triton_forwarder.rpc_table import RPCS, SERVICE, Rpc

logger = logging.getLogger("ray.serve")

CHANNEL_OPTIONS = (
    # gRPC's own limit of 4 MiB is less than one batch of images.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Triton is in the same pod: never by way of a proxy that the pod's environment names.
    ("grpc.enable_http_proxy", 0),
    # A Triton that comes back after a crash is found within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# An extension that ServerMetadata may name -> the setting without which the endpoint refuses its RPCs.
EXTENSIONS = {
    "model_repository(unload_dependents)": "allow_model_control",
    "system_shared_memory": "allow_shared_memory",
    "cuda_shared_memory": "allow_shared_memory",
    "trace": "allow_trace_and_log_settings",
    "logging": "allow_trace_and_log_settings",
}

# Metadata of one connection that must not go over to the next; content-type, te and user-agent gRPC itself replaces.
HOP_METADATA = (":", "grpc-")

# How gRPC's own words about a failed connection name the other side.
LOCAL_ADDRESS = re.compile(r"\b(ipv4:|ipv6:|unix:|dns:|resolving )")


@dataclass(frozen=True)
class Settings:
    """What the Serve configuration may set under `args`."""

    triton_address: str = "127.0.0.1:8001"
    """host:port of Triton's gRPC."""
    startup_timeout_s: float = 600.0
    """How long a replica waits at its start for Triton to be ready."""
    health_timeout_s: float = 5.0
    """How long a health check waits for Triton's answer."""
    allow_model_control: bool = False
    """Let clients load and unload models."""
    allow_trace_and_log_settings: bool = False
    """Let clients read and write Triton's trace and log settings."""
    allow_shared_memory: bool = False
    """Let clients register shared memory; useful only when they run in Triton's own pod."""

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> "Settings":
        """Check the application's `args`.

        Raises:
            ValueError: an unknown key, or a value of the wrong type or range; the message names it.
        """
        types = {field.name: type(field.default) for field in fields(cls)}
        for name, value in args.items():
            if name not in types:
                raise ValueError(f"unknown forwarder setting {name!r}; known are {', '.join(types)}")
            number = types[name] is float and isinstance(value, int | float) and not isinstance(value, bool)
            if not (number or isinstance(value, types[name])):
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be a {types[name].__name__}")
            if number and not 0 < value < float("inf"):
                raise ValueError(f"forwarder setting {name} is {value!r}, but must be a number of seconds above 0")
        settings = cls(**args)
        host, _, port = settings.triton_address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"forwarder setting triton_address is {settings.triton_address!r}, but must be host:port")
        return settings


class _Message:
    """Bytes in the shape of a protobuf message, as Serve wants a response."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802  protobuf's name
        return self._data


class RpcError(Exception):
    """Ends a call whose status already stands in its context; Serve shows this text and nothing else."""


def _fail(context: RayServegRPCContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.set_code(code)
    context.set_details(details)
    raise RpcError(details) from None


def _fail_as_triton(context: RayServegRPCContext, error: grpc.aio.AioRpcError) -> NoReturn:
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and LOCAL_ADDRESS.search(details):
        # Not Triton's words but those of the connection to it, with addresses of the pod in them.
        logger.warning("Triton cannot be reached: %s", details)
        details = "Triton is not reachable, it may be restarting"
    context.set_trailing_metadata(list(error.trailing_metadata() or ()))
    # Serve fills an empty text with one of its own.
    _fail(context, error.code(), details or error.code().name)


def _fail_as_bug(context: RayServegRPCContext, rpc: Rpc) -> NoReturn:
    # Only called while an exception is handled.
    logger.exception("%s failed in the forwarder, request %s", rpc.name, context.request_id())  # noqa: LOG004
    _fail(context, grpc.StatusCode.INTERNAL, f"{rpc.name} failed in the endpoint; its log has the reason")


def _client_metadata(context: RayServegRPCContext) -> list[tuple[str, str]]:
    return [(key, value) for key, value in context.invocation_metadata() if not key.startswith(HOP_METADATA)]


def _unary(rpc: Rpc) -> Callable[..., Any]:
    async def method(self: "Forwarder", request: bytes, grpc_context: RayServegRPCContext) -> _Message:
        try:
            call = self.stubs[rpc.name](request, metadata=_client_metadata(grpc_context))
            response: bytes = await call
            grpc_context.set_trailing_metadata(list(await call.trailing_metadata() or ()))
            if rpc.name == "ServerMetadata":
                response = self.hide_refused_extensions(response)
        except grpc.aio.AioRpcError as error:
            _fail_as_triton(grpc_context, error)
        except Exception:  # A bug here must not show its stack trace to the client.
            _fail_as_bug(grpc_context, rpc)
        return _Message(response)

    return method


def _stream(rpc: Rpc) -> Callable[..., Any]:
    async def method(
        self: "Forwarder", requests: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[_Message]:
        call = None
        try:
            call = self.stubs[rpc.name](requests, metadata=_client_metadata(grpc_context))
            async for response in call:
                yield _Message(response)
            grpc_context.set_trailing_metadata(list(await call.trailing_metadata() or ()))
        except grpc.aio.AioRpcError as error:
            _fail_as_triton(grpc_context, error)
        except Exception:  # As above.
            _fail_as_bug(grpc_context, rpc)
        finally:
            if call is not None:
                call.cancel()  # Of no effect on a finished call; frees Triton when the client has gone.

    return method


def _refusal(rpc: Rpc) -> Callable[..., Any]:
    async def method(self: "Forwarder", request: bytes, grpc_context: RayServegRPCContext) -> NoReturn:  # noqa: ARG001
        _fail(
            grpc_context,
            grpc.StatusCode.PERMISSION_DENIED,
            f"{rpc.name} is refused by this endpoint; its operator can allow it with the setting {rpc.allowed_by}",
        )

    return method


class Forwarder:
    """One replica: an RPC method for each row of the table, and the health of the Triton beside it."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it on the user's loop
        self._settings = settings
        channel = grpc.aio.insecure_channel(settings.triton_address, options=CHANNEL_OPTIONS)
        self.stubs = {rpc.name: getattr(channel, rpc.kind)(f"/{SERVICE}/{rpc.name}") for rpc in RPCS}
        for rpc in RPCS:
            if rpc.allowed_by and not getattr(settings, rpc.allowed_by):
                setattr(self, rpc.name, _refusal(rpc).__get__(self))
        await self._wait_until_ready()

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._settings.startup_timeout_s
        state, told = "", 0.0
        while True:
            try:
                # ServerReadyResponse is `bool ready = 1`: two bytes when true, none when false.
                ready = await self.stubs["ServerReady"](b"", timeout=self._settings.health_timeout_s)
                state = "Triton is loading its models, or one of them failed to load"
            except grpc.aio.AioRpcError as error:
                ready = b""
                state = f"Triton does not answer ({error.code().name})"
            if ready == b"\x08\x01":
                logger.info("Triton at %s is ready", self._settings.triton_address)
                return
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(
                    f"Triton at {self._settings.triton_address} was not ready within "
                    f"{self._settings.startup_timeout_s:g} s: {state}; see Triton's log, or raise startup_timeout_s"
                )
            if now - told > 10:
                address = self._settings.triton_address
                logger.info("Waiting for ServerReady of %s, %.0f s left: %s", address, deadline - now, state)
                told = now
            await asyncio.sleep(0.2)

    async def check_health(self) -> None:
        """Fail when Triton is dead or hung. A live Triton with a failed model still serves the others."""
        await self.stubs["ServerLive"](b"", timeout=self._settings.health_timeout_s)

    def hide_refused_extensions(self, response: bytes) -> bytes:
        """Return a ServerMetadataResponse without the extensions whose RPCs are refused."""
        return b"".join(
            field
            for number, value, field in _length_delimited_fields(response)
            if not (number == 3 and not getattr(self._settings, EXTENSIONS.get(value.decode(), ""), True))
        )


for _rpc in RPCS:
    setattr(Forwarder, _rpc.name, _unary(_rpc) if _rpc.kind == "unary_unary" else _stream(_rpc))


def _length_delimited_fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (field number, value, whole field) of a protobuf message that has only strings and messages in it.

    Wire format: https://protobuf.dev/programming-guides/encoding
    """

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    position = 0
    while position < len(message):
        tag, at = varint(position)
        length, at = varint(at)
        yield tag >> 3, message[at : at + length], message[position : at + length]
        position = at + length


def add_servicer_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Register the service on Serve's gRPC server, without (de)serializers, so that messages arrive as bytes."""
    handlers = {rpc.name: getattr(grpc, f"{rpc.kind}_rpc_method_handler")(getattr(servicer, rpc.name)) for rpc in RPCS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def build_app(args: dict[str, Any]) -> serve.Application:
    """Build the Serve application; `args` are those of the Serve configuration, see `Settings`."""
    deployment = serve.deployment(
        # Whatever the cluster, one replica belongs to one Triton.
        ray_actor_options={"num_cpus": 0, "resources": {"triton": 1}},
        # Triton has the queue; Serve's default of 5 would hold back its dynamic batcher.
        max_ongoing_requests=1000,
        health_check_period_s=5,
        # Two log lines for a call cost half of what carrying it does.
        logging_config={"enable_access_log": False},
    )(Forwarder)
    return deployment.bind(Settings.from_args(args))
