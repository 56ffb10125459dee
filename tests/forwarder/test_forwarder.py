"""One replica without Serve: the forwarder between a context of Serve and a stand-in for Triton."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from ray.serve.grpc_util import RayServegRPCContext
from tritonclient.grpc import service_pb2

from local_endpoint.processes import free_port
from tests.support.stand_in_triton import stand_in_triton
from triton_forwarder.forwarder import EXTENSIONS, Forwarder, RpcError, Settings
from triton_forwarder.rpc_table import RPCS

READY: bytes = service_pb2.ServerReadyResponse(ready=True).SerializeToString()
ALLOWING = ("allow_model_control", "allow_trace_and_log_settings", "allow_shared_memory")


async def ready(_request: bytes, _context: Any) -> bytes:
    return READY


async def hang(_request: bytes, _context: Any) -> NoReturn:
    await asyncio.sleep(3600)
    raise AssertionError("the caller should have gone")


def serve_context(metadata: list[tuple[str, Any]] | None = None) -> RayServegRPCContext:
    """Return what Serve hands to a replica's method, for a call with this metadata."""
    call = {
        "auth_context": {},
        "code": 0,
        "details": "",
        "invocation_metadata": metadata or [],
        "peer": "",
        "peer_identities": None,
        "peer_identity_key": None,
        "trailing_metadata": [],
    }
    return RayServegRPCContext(SimpleNamespace(**{name: lambda value=value: value for name, value in call.items()}))


async def start_forwarder(address: str, **settings: Any) -> Forwarder:
    forwarder = object.__new__(Forwarder)
    await Forwarder.__init__(forwarder, Settings.from_args({"triton_address": address} | settings))
    return forwarder


async def fails(call: Awaitable[Any], context: RayServegRPCContext) -> tuple[grpc.StatusCode, str]:
    """Await a call that must fail as Serve can show it; return the status it leaves."""
    with pytest.raises(RpcError) as error:
        await call
    assert str(error.value) == context.details()
    assert error.value.__suppress_context__
    return context.code(), context.details()


def test_a_replica_is_ready_only_when_its_triton_is(caplog: pytest.LogCaptureFixture) -> None:
    """Serve would otherwise send requests to a Triton that still loads its models."""

    async def scenario() -> None:
        answers = iter([b"", b"", READY])

        async def loading(_request: bytes, _context: Any) -> bytes:
            return next(answers)

        port = free_port()
        starting = asyncio.create_task(start_forwarder(f"127.0.0.1:{port}"))
        await asyncio.sleep(0.3)  # Triton's port is not open yet.
        async with stand_in_triton(port=port, ServerReady=loading):
            await starting
        assert next(answers, None) is None

    with caplog.at_level("INFO", logger="ray.serve"):
        asyncio.run(scenario())
    assert re.search(
        r"Waiting for ServerReady of 127.0.0.1:\d+, .* Triton does not answer \(UNAVAILABLE\)", caplog.text
    )
    assert "is ready" in caplog.text


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, r"Triton does not answer \(UNAVAILABLE\)"),
        (hang, r"Triton does not answer \(DEADLINE_EXCEEDED\)"),
        ("not ready", "one of them failed to load"),
    ],
)
def test_a_replica_gives_up_on_a_triton_that_never_gets_ready(answer: Any, reason: str) -> None:
    """The operator reads in the replica's error what it waited for, and which setting is the way out."""

    async def not_ready(_request: bytes, _context: Any) -> bytes:
        return b""

    async def scenario() -> None:
        answers: dict[str, Any] = {}
        if answer is not None:
            answers["ServerReady"] = not_ready if answer == "not ready" else answer
        async with stand_in_triton(**answers) as address:
            if answer is None:
                address = f"127.0.0.1:{free_port()}"
            with pytest.raises(TimeoutError, match=rf"not ready within 0.5 s: .*{reason}.*startup_timeout_s"):
                await start_forwarder(address, startup_timeout_s=0.5, health_timeout_s=0.2)

    asyncio.run(scenario())


def test_a_hung_triton_fails_the_health_check_within_the_bound() -> None:
    """Serve would otherwise go on sending requests to a replica whose Triton answers no more."""

    async def scenario() -> None:
        async def live(_request: bytes, _context: Any) -> bytes:
            return b"\x08\x01"

        async with stand_in_triton(ServerReady=ready, ServerLive=live) as address:
            await (await start_forwarder(address)).check_health()
        async with stand_in_triton(ServerReady=ready, ServerLive=hang) as address:
            forwarder = await start_forwarder(address, health_timeout_s=0.2)
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await asyncio.wait_for(forwarder.check_health(), 10)

    asyncio.run(scenario())


def test_metadata_of_the_client_reaches_triton_except_that_of_the_connection() -> None:
    """Triton's tracing and authentication read headers; those that belong to a hop would break the next one."""
    sent: list[tuple[str, Any]] = [
        ("traceparent", "00-1-2-01"),
        ("tenant", "a"),  # Begins like the hop's "te".
        ("test-id", "b"),
        ("authorization", "Bearer x"),
        ("content-type-of-tile", "tiff"),
        ("token-bin", b"\x00\xff"),
    ]
    hop: list[tuple[str, Any]] = [
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-c++/9"),
        ("grpc-timeout", "1S"),
        ("grpc-accept-encoding", "gzip"),
        (":path", "/x"),
    ]
    seen: list[tuple[str, Any]] = []

    async def answer(request: bytes, context: Any) -> bytes:
        seen.extend(context.invocation_metadata())
        context.set_trailing_metadata([("from-triton", "yes")])
        return request[::-1]

    async def scenario() -> None:
        async with stand_in_triton(ServerReady=ready, ModelInfer=answer) as address:
            forwarder = await start_forwarder(address)
            context = serve_context(sent + hop)
            assert (await forwarder.ModelInfer(b"\x01\x02", context)).SerializeToString() == b"\x02\x01"  # type: ignore[attr-defined]
            assert ("from-triton", "yes") in context.trailing_metadata()

    asyncio.run(scenario())
    # gRPC itself adds the user-agent of this hop.
    assert [(key, value) for key, value in seen if key != "user-agent"] == sent
    assert not set(hop) & set(seen)


@pytest.mark.parametrize("allowed", [c for n in range(4) for c in itertools.combinations(ALLOWING, n)], ids="+".join)
def test_server_metadata_names_no_extension_that_is_refused(allowed: tuple[str, ...]) -> None:
    """Clients that see shared memory advertised use it, and fail."""
    extensions = ["classification", "sequence", "naïve", "", *EXTENSIONS, "statistics"]
    response = service_pb2.ServerMetadataResponse(name="triton", version="2." * 200, extensions=extensions)

    async def metadata(_request: bytes, _context: Any) -> bytes:
        return bytes(response.SerializeToString())

    async def scenario() -> bytes:
        async with stand_in_triton(ServerReady=ready, ServerMetadata=metadata) as address:
            forwarder = await start_forwarder(address, **dict.fromkeys(allowed, True))
            return bytes((await forwarder.ServerMetadata(b"", serve_context())).SerializeToString())  # type: ignore[attr-defined]

    expected = service_pb2.ServerMetadataResponse(
        name="triton",
        version="2." * 200,
        extensions=[name for name in extensions if name not in EXTENSIONS or EXTENSIONS[name] in allowed],
    )
    assert asyncio.run(scenario()) == expected.SerializeToString()


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc.allowed_by], ids=lambda rpc: rpc.name)
def test_a_control_rpc_passes_only_with_its_setting(rpc: Any) -> None:
    """The refusal tells the operator which setting to change, and that setting does it."""

    async def answer(_request: bytes, _context: Any) -> bytes:
        return b"done"

    async def scenario() -> None:
        answers: dict[str, Any] = {"ServerReady": ready, rpc.name: answer}
        async with stand_in_triton(**answers) as address:
            others = {name: True for name in ALLOWING if name != rpc.allowed_by}
            context = serve_context()
            refusing = await start_forwarder(address, **others)
            code, details = await fails(getattr(refusing, rpc.name)(b"", context), context)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert rpc.name in details
            assert details.endswith(f"the setting {rpc.allowed_by}")
            allowing = await start_forwarder(address, **{rpc.allowed_by: True})
            assert (await getattr(allowing, rpc.name)(b"", serve_context())).SerializeToString() == b"done"

    asyncio.run(scenario())


@asynccontextmanager
async def broken_connection(address: str, **answers: Any) -> AsyncIterator[Forwarder]:
    """A forwarder that was ready once, and whose Triton is now at `address`."""
    async with stand_in_triton(ServerReady=ready, **answers) as first:
        forwarder = await start_forwarder(first)
        channel = grpc.aio.insecure_channel(address)
        forwarder.stubs = {rpc.name: getattr(channel, rpc.kind)(f"/x/{rpc.name}") for rpc in RPCS}
        yield forwarder


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/none", "none.invalid:1"])
def test_an_unreachable_triton_is_told_without_its_address(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client's error must not show the inside of the pod; the operator finds it in the log."""

    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with broken_connection(address) as forwarder:
            context = serve_context()
            return await fails(forwarder.ModelInfer(b"", context), context)  # type: ignore[attr-defined]

    expected = (grpc.StatusCode.UNAVAILABLE, "Triton is not reachable, it may be restarting")
    assert asyncio.run(scenario()) == expected
    assert "Triton cannot be reached: " in caplog.text


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'x' is not found"),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"),
        # A model's own words, though they look like those of a connection.
        (grpc.StatusCode.INTERNAL, "ValueError: cannot read unix:/run/labels"),
    ],
)
def test_triton_own_status_words_and_trailing_metadata_are_kept(code: grpc.StatusCode, details: str) -> None:
    """Clients count on the exact answers of Triton."""

    async def answer(_request: bytes, context: Any) -> bytes:
        await context.abort(code, details, trailing_metadata=(("from-triton", "yes"),))
        raise AssertionError("abort raises")

    async def scenario() -> None:
        async with stand_in_triton(ServerReady=ready, ModelInfer=answer) as address:
            forwarder = await start_forwarder(address)
            context = serve_context()
            assert await fails(forwarder.ModelInfer(b"", context), context) == (code, details)  # type: ignore[attr-defined]
            assert ("from-triton", "yes") in context.trailing_metadata()

    asyncio.run(scenario())


def test_a_status_without_words_gets_its_name() -> None:
    """Serve would fill the empty place with words of its own."""

    async def answer(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "")
        raise AssertionError("abort raises")

    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with stand_in_triton(ServerReady=ready, ModelInfer=answer) as address:
            forwarder = await start_forwarder(address)
            context = serve_context()
            return await fails(forwarder.ModelInfer(b"", context), context)  # type: ignore[attr-defined]

    assert asyncio.run(scenario()) == (grpc.StatusCode.ABORTED, "ABORTED")


async def _requests(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


@pytest.mark.parametrize("break_it", ["call", "response"])
def test_a_bug_in_the_forwarder_shows_no_stack_trace(break_it: str, caplog: pytest.LogCaptureFixture) -> None:
    """Serve sends an escaped exception's stack trace, with paths, to the client."""

    async def metadata(_request: bytes, _context: Any) -> bytes:
        return b"\x1a\xff"  # An extension whose length is cut off.

    async def scenario() -> None:
        async with stand_in_triton(ServerReady=ready, ServerMetadata=metadata) as address:
            forwarder = await start_forwarder(address)
            calls: dict[str, Callable[[RayServegRPCContext], Awaitable[Any]]] = {}
            if break_it == "call":
                forwarder.stubs = {}
                calls["ModelStreamInfer"] = lambda context: anext(
                    forwarder.ModelStreamInfer(_requests(), context)  # type: ignore[attr-defined]
                )
            calls["ServerMetadata"] = lambda context: forwarder.ServerMetadata(b"", context)  # type: ignore[attr-defined]
            for name, call in calls.items():
                context = serve_context()
                code, details = await fails(call(context), context)
                assert code is grpc.StatusCode.INTERNAL
                assert details == f"{name} failed in the endpoint; its log has the reason"

    asyncio.run(scenario())
    assert "Traceback" in caplog.text


def test_a_client_that_leaves_cancels_its_call_at_triton() -> None:
    """Triton would otherwise work on for nobody."""

    async def scenario() -> None:
        arrived, cancelled = asyncio.Semaphore(0), asyncio.Semaphore(0)

        async def infer(_request: bytes, _context: Any) -> bytes:
            arrived.release()
            try:
                return await hang(b"", None)
            finally:
                cancelled.release()

        async def stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request
                try:
                    await hang(b"", None)
                finally:
                    cancelled.release()

        async with stand_in_triton(ServerReady=ready, ModelInfer=infer, ModelStreamInfer=stream) as address:
            forwarder = await start_forwarder(address)
            call = asyncio.create_task(forwarder.ModelInfer(b"", serve_context()))  # type: ignore[attr-defined]
            await arrived.acquire()
            call.cancel()
            await asyncio.wait_for(cancelled.acquire(), 10)
            responses = forwarder.ModelStreamInfer(_requests(b"a", b"b"), serve_context())  # type: ignore[attr-defined]
            assert (await anext(responses)).SerializeToString() == b"a"
            await responses.aclose()  # What Serve does when the client has gone.
            await asyncio.wait_for(cancelled.acquire(), 10)

    asyncio.run(scenario())


def test_unit_tests_cannot_start_ray() -> None:
    """The fixture in tests/conftest.py holds: no unit test depends on processes of its own."""
    import ray

    with pytest.raises(RuntimeError, match="must not start Ray"):
        ray.init()
