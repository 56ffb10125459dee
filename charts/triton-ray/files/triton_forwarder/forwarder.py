"""The Serve deployment that carries Triton's RPCs to the Triton in its own pod.

Requests and responses stay bytes on the whole way: Serve would have to pickle protobuf messages, which fails for those
of a stock tritonclient, and the Ray image needs no Triton stubs. Only the standard library, `ray` and what it needs
itself are imported, for the same reason.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import ray
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream
from ray.serve.handle import DeploymentHandle

from triton_forwarder.autoscaling import LOAD, TritonLoad
from triton_forwarder.channel import SERVICES, TRUE, UNREACHABLE, TritonChannel, is_unreachable
from triton_forwarder.connections import connections_to
from triton_forwarder.fleet import ANSWER_S, CONTROL_S, Answer, Fleet
from triton_forwarder.fleet_messages import fields, sequence_id
from triton_forwarder.http import PINNED, HttpForwarder
from triton_forwarder.membership import Membership
from triton_forwarder.rpc_table import RPCS, Rpc
from triton_forwarder.settings import Settings

logger = logging.getLogger("ray.serve")

# An extension that ServerMetadata may name -> the setting without which the endpoint refuses its RPCs.
EXTENSIONS = {
    "model_repository(unload_dependents)": "allow_model_control",
    "system_shared_memory": "allow_shared_memory",
    "cuda_shared_memory": "allow_shared_memory",
    "trace": "allow_trace_and_log_settings",
    "logging": "allow_trace_and_log_settings",
}

# Metadata of one connection that must not go over to the next; content-type, te and user-agent gRPC itself replaces.
HOP_METADATA = (":", "grpc-", PINNED)

CODES = {code.value[0]: code for code in grpc.StatusCode}


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
    if is_unreachable(error):
        logger.warning("Triton cannot be reached: %s", details)
        details = UNREACHABLE
    context.set_trailing_metadata(list(error.trailing_metadata() or ()))
    # Serve fills an empty text with one of its own.
    _fail(context, error.code(), details or error.code().name)


def _fail_as_bug(context: RayServegRPCContext, rpc: Rpc) -> NoReturn:
    # Only called while an exception is handled.
    logger.exception("%s failed in the forwarder, request %s", rpc.name, context.request_id())  # noqa: LOG004
    _fail(context, grpc.StatusCode.INTERNAL, f"{rpc.name} failed in the endpoint; its log has the reason")


def _client_metadata(context: RayServegRPCContext) -> list[tuple[str, str]]:
    return [(key, value) for key, value in context.invocation_metadata() if not key.startswith(HOP_METADATA)]


def _refuse_split_sequence(request: bytes, context: RayServegRPCContext, *, replicas: int) -> None:
    if replicas < 2 or any(key == PINNED for key, _ in context.invocation_metadata()):
        return
    try:
        sequence = sequence_id(request)
    except ValueError:
        return  # Triton refuses it.
    if sequence is not None:
        _fail(
            context,
            grpc.StatusCode.UNIMPLEMENTED,
            f"this request is one of the sequence {sequence[:64]!r}, and nothing sees to it that all of them reach the "
            f"same of {replicas} replicas: send them in one stream (ModelStreamInfer), or uncompressed to an endpoint "
            "whose ingress is direct or replica",
        )


def _unary(rpc: Rpc) -> Callable[..., Any]:
    async def method(self: "Forwarder", request: bytes, grpc_context: RayServegRPCContext) -> _Message:
        try:
            if rpc.name == "ModelInfer":
                _refuse_split_sequence(request, grpc_context, replicas=self.membership.replicas)
            call = await self._answered(rpc, request, grpc_context)
            response: bytes = await call
            grpc_context.set_trailing_metadata(list(await call.trailing_metadata() or ()))
            if rpc.name == "ServerMetadata":
                response = self.hide_refused_extensions(response)
        except RpcError:
            raise
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
            triton = self._tritons(rpc, grpc_context)[0]
            call = triton.stubs[rpc.name](requests, metadata=_client_metadata(grpc_context))
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


def _for_the_fleet(rpc: Rpc) -> Callable[..., Any]:
    async def method(self: "Forwarder", request: bytes, grpc_context: RayServegRPCContext) -> _Message:
        try:
            # A change may have to wait for another one.
            async with asyncio.timeout(2 * CONTROL_S if rpc.allowed_by else 4 * ANSWER_S):
                answer: Answer = await self.fleet.call.remote(rpc.name, request)
        except Exception:  # The fleet's actor is on the head, which may be away for a while.
            logger.warning("%s: the fleet does not answer", rpc.name, exc_info=True)
            answer = Answer(
                code=grpc.StatusCode.UNAVAILABLE.value[0],
                details=f"{rpc.name} is about all replicas, and what knows them is not reachable, try again",
            )
        if answer.code:
            _fail(grpc_context, CODES[answer.code], answer.details)
        return _Message(answer.message)

    return method


def refusals(settings: Settings) -> dict[str, str]:
    """Return what a caller is told, for each RPC that the settings do not allow."""
    return {
        rpc.name: f"{rpc.name} is refused by this endpoint; its operator can allow it with the setting {rpc.allowed_by}"
        for rpc in RPCS
        if rpc.allowed_by and not getattr(settings, rpc.allowed_by)
    }


def http_refusals(settings: Settings) -> dict[str, str]:
    """Return the same for HTTP, where a request reaches one Triton alone."""
    of_all = {rpc.name for rpc in RPCS if rpc.allowed_by and rpc.scope == "fleet" and settings.max_replicas > 1}
    return {rpc: f"{rpc} by HTTP reaches one Triton of several, and is refused; use gRPC" for rpc in of_all} | refusals(
        settings
    )


def _refusal(words: str) -> Callable[..., Any]:
    async def method(self: "Forwarder", request: bytes, grpc_context: RayServegRPCContext) -> NoReturn:  # noqa: ARG001
        _fail(grpc_context, grpc.StatusCode.PERMISSION_DENIED, words)

    return method


class Forwarder:
    """One replica: an RPC method for each row of the table, and the health of the Triton beside it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it on the user's loop
        self, settings: Settings, fleet: DeploymentHandle[Fleet], *, host: str = "", name: str = ""
    ) -> None:
        """Wait for Triton, and join the fleet.

        Args:
            settings: of all replicas.
            fleet: handle of the deployment `Fleet`.
            host: where Triton listens; by default the address of this node.
            name: of this replica; by default the one that Serve gave it.
        """
        self._settings = settings
        self._host = host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.fleet = fleet
        self.triton = TritonChannel(f"{self._host}:{settings.triton_grpc_port}")
        self._load = TritonLoad(f"{self._host}:{settings.triton_metrics_port}", timeout_s=settings.health_timeout_s)
        for rpc, words in refusals(settings).items():
            setattr(self, rpc, _refusal(words).__get__(self))
        try:
            await self._wait_until_ready()
        except TimeoutError:
            await self.triton.close()
            raise
        name = name or serve.get_replica_context().replica_tag
        self.membership = Membership(fleet, name, self.triton, timeout_s=settings.health_timeout_s)
        await self.membership.start()

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._settings.startup_timeout_s
        state, told = "", 0.0
        # Of a Triton that gets its models from clients, ServerReady is false for good after one that does not load.
        rpc = "ServerLive" if self._settings.allow_model_control else "ServerReady"
        while True:
            try:
                ready = await self.triton.unary(rpc, b"", timeout=self._settings.health_timeout_s)
                state = "Triton is loading its models, or one of them failed to load"
            except grpc.aio.AioRpcError as error:
                ready = b""
                state = f"Triton does not answer ({error.code().name})"
            if ready == TRUE:
                logger.info("Triton at %s is ready", self.triton.address)
                return
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(
                    f"Triton at {self.triton.address} was not ready within "
                    f"{self._settings.startup_timeout_s:g} s: {state}; see Triton's log, or raise startup_timeout_s"
                )
            if now - told > 10:
                address = self.triton.address
                logger.info("Waiting for %s of %s, %.0f s left: %s", rpc, address, deadline - now, state)
                told = now
            await asyncio.sleep(0.2)

    def _tritons(self, rpc: Rpc, context: RayServegRPCContext) -> list[TritonChannel]:
        """Return the Tritons that may answer: this replica's, and while that is away those of the others.

        A replica that refuses at once is the one that looks idle: without the others, it would draw all requests.
        """
        if rpc.allowed_by or any(key == PINNED for key, _ in context.invocation_metadata()):
            return [self.triton]
        others = list(self.membership.others.values())
        random.shuffle(others)
        if not self.triton.is_down:
            return [self.triton, *others]
        return [*others, self.triton]

    async def _answered(self, rpc: Rpc, request: bytes, context: RayServegRPCContext) -> Any:
        """Return the call of the first Triton that can be reached; what no Triton was sent can be sent to the next."""
        metadata = _client_metadata(context)
        tritons = self._tritons(rpc, context)
        for triton in tritons:
            call = triton.stubs[rpc.name](request, metadata=metadata)
            try:
                await call
            except grpc.aio.AioRpcError as error:
                if triton is tritons[-1] or not is_unreachable(error):
                    raise
            else:
                return call
        raise AssertionError("a loop over no Triton")

    def __serve_build_asgi_app__(self) -> HttpForwarder:
        """Return what answers on Serve's HTTP port; the hook of `serve.ingress`, which ends it too."""
        return HttpForwarder(
            f"{self._host}:{self._settings.triton_http_port}",
            refusals=http_refusals(self._settings),
            hidden_extensions=[name for name, setting in EXTENSIONS.items() if not getattr(self._settings, setting)],
            replicas=lambda: self.membership.replicas,
        )

    async def check_health(self) -> None:
        """Fail when Triton is dead or hung. A live Triton with a failed model still serves the others."""
        await self.triton.unary("ServerLive", b"", timeout=self._settings.health_timeout_s)
        if self.membership.is_behind:
            raise RuntimeError("Triton was started again, and lacks what clients have loaded and set")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return Triton's load, for `autoscaling.policy`."""
        return {LOAD: await self._load.read()}

    async def __del__(self) -> None:
        """End with the last request: Serve has taken this replica off HAProxy's list, and awaits this."""
        if not hasattr(self, "membership"):
            return
        # First all own connections to Triton, and those of the fleet, which are none to wait for.
        await self.membership.end()
        await self.triton.close()
        await self.membership.leave()
        deadline = time.monotonic() + self._settings.drain_timeout_s
        ports = (self._settings.triton_grpc_port, self._settings.triton_http_port)
        while (left := connections_to(self._host, ports)) and time.monotonic() < deadline:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.2)
        if left:
            logger.warning("%d connections to Triton are left after %g s", left, self._settings.drain_timeout_s)
        triton = TritonChannel(self.triton.address)
        try:
            statistics = await triton.unary("ModelStatistics", b"", timeout=self._settings.health_timeout_s)
            await self.membership.count_last(statistics)
        except grpc.aio.AioRpcError:
            logger.warning("Triton has ended before its last statistics were known")
        finally:
            await triton.close()

    def hide_refused_extensions(self, response: bytes) -> bytes:
        """Return a ServerMetadataResponse without the extensions whose RPCs are refused."""
        return b"".join(
            field.raw
            for field in fields(response)
            if not (field.number == 3 and not getattr(self._settings, EXTENSIONS.get(field.payload.decode(), ""), True))
        )


for _rpc in (rpc for rpcs in SERVICES.values() for rpc in rpcs):
    _method = _for_the_fleet if _rpc.scope == "fleet" else _unary if _rpc.kind == "unary_unary" else _stream
    setattr(Forwarder, _rpc.name, _method(_rpc))


def add_servicer_to_server(servicer: Any, server: grpc.aio.Server) -> None:
    """Register the services on Serve's gRPC server, without (de)serializers, so that messages arrive as bytes."""
    for service, rpcs in SERVICES.items():
        handlers = {
            rpc.name: getattr(grpc, f"{rpc.kind}_rpc_method_handler")(getattr(servicer, rpc.name)) for rpc in rpcs
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
