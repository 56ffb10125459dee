"""One replica without Serve: the forwarder between a context of Serve and a stand-in for Triton."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from ray.serve.grpc_util import RayServegRPCContext
from tritonclient.grpc import service_pb2

from local_endpoint.processes import free_port
from tests.support.fleet_handle import FleetHandle
from tests.support.stand_in_triton import stand_in_triton
from triton_forwarder.channel import TritonChannel
from triton_forwarder.fleet import Answer, Fleet, Told
from triton_forwarder.forwarder import EXTENSIONS, Forwarder, RpcError
from triton_forwarder.http import PINNED
from triton_forwarder.rpc_table import RPCS
from triton_forwarder.settings import Settings
from triton_ingress import sequences

READY: bytes = service_pb2.ServerReadyResponse(ready=True).SerializeToString()
ALLOWING = ("allow_model_control", "allow_trace_and_log_settings", "allow_shared_memory")


async def ready(_request: bytes, _context: Any) -> bytes:
    return READY


ALIVE: dict[str, Any] = {"ServerReady": ready, "ServerLive": ready}


async def no_statistics(_request: bytes, _context: Any) -> bytes:
    return b""


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


class _Forwarder(Forwarder):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve, not Python, calls the one of Forwarder."""


async def start_forwarder(address: str, *, fleet: Any = None, **settings: Any) -> Forwarder:
    host, _, port = address.partition(":")
    forwarder = object.__new__(_Forwarder)
    await Forwarder.__init__(
        forwarder,
        Settings.from_args({"triton_grpc_port": int(port)} | settings),
        fleet or FleetHandle(Fleet()),  # type: ignore[arg-type]  # what it has of Serve's handle is enough
        host=host,
        name=f"replica of {address}",
    )
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
        async with stand_in_triton(**ALIVE, ModelInfer=answer) as address:
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
        async with stand_in_triton(**ALIVE, ServerMetadata=metadata) as address:
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
        answers: dict[str, Any] = {**ALIVE, rpc.name: answer}
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
    async with stand_in_triton(**ALIVE, **answers) as first:
        forwarder = await start_forwarder(first)
        forwarder.triton = TritonChannel(address)
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
        async with stand_in_triton(**ALIVE, ModelInfer=answer) as address:
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
        async with stand_in_triton(**ALIVE, ModelInfer=answer) as address:
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
        async with stand_in_triton(**ALIVE, ServerMetadata=metadata) as address:
            forwarder = await start_forwarder(address)
            calls: dict[str, Callable[[RayServegRPCContext], Awaitable[Any]]] = {}
            if break_it == "call":
                forwarder.triton.stubs = {}
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

        async with stand_in_triton(**ALIVE, ModelInfer=infer, ModelStreamInfer=stream) as address:
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


@pytest.mark.parametrize(("allowed", "starts"), [(False, False), (True, True)])
def test_a_model_that_clients_loaded_in_vain_does_not_keep_a_replica_from_starting(allowed: bool, starts: bool) -> None:
    """ServerReady is false for good then; with the next update of the application, nothing would start any more."""

    async def not_ready(_request: bytes, _context: Any) -> bytes:
        return b""

    async def scenario() -> None:
        async with stand_in_triton(ServerReady=not_ready, ServerLive=ready) as address:
            await start_forwarder(address, allow_model_control=allowed, startup_timeout_s=0.3)

    with nullcontext() if starts else pytest.raises(TimeoutError):
        asyncio.run(scenario())


class Answering:
    """A fleet that gives, or fails with, one answer."""

    def __init__(self, answer: Answer | Exception | None) -> None:
        self._answer = answer
        self.asked: list[tuple[str, bytes]] = []

    async def join(self, *_args: Any, **_more: Any) -> Told:
        """Take everybody."""
        return Told(1, replicas=1)

    async def call(self, rpc: str, request: bytes) -> Answer:
        """Answer what it was made for."""
        self.asked.append((rpc, request))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer or await hang(b"", None)


@pytest.mark.parametrize("rpc", [rpc.name for rpc in RPCS if rpc.scope == "fleet"])
def test_what_is_about_all_replicas_is_answered_by_the_fleet(rpc: str) -> None:
    """One Triton would answer for itself, and another one the next time."""

    async def scenario() -> None:
        async with stand_in_triton(**ALIVE) as address:
            fleet = Answering(Answer(b"of all"))
            forwarder = await start_forwarder(address, fleet=FleetHandle(fleet), **dict.fromkeys(ALLOWING, True))
            response = await getattr(forwarder, rpc)(b"about x", serve_context())
            assert response.SerializeToString() == b"of all"
            assert fleet.asked == [(rpc, b"about x")]

            fleet = Answering(Answer(code=grpc.StatusCode.NOT_FOUND.value[0], details="no x"))
            forwarder = await start_forwarder(address, fleet=FleetHandle(fleet), **dict.fromkeys(ALLOWING, True))
            context = serve_context()
            assert await fails(getattr(forwarder, rpc)(b"", context), context) == (grpc.StatusCode.NOT_FOUND, "no x")

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [ValueError("a secret of the inside"), None])
def test_a_fleet_that_does_not_answer_is_told_in_time(
    answer: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's head may be away: callers without a deadline would wait for ever, and pile up."""
    monkeypatch.setattr("triton_forwarder.forwarder.ANSWER_S", 0.05)

    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with stand_in_triton(**ALIVE) as address:
            forwarder = await start_forwarder(address, fleet=FleetHandle(Answering(answer)))
            context = serve_context()
            return await asyncio.wait_for(fails(forwarder.ModelReady(b"", context), context), 10)  # type: ignore[attr-defined]

    code, details = asyncio.run(scenario())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details == "ModelReady is about all replicas, and what knows them is not reachable, try again"
    assert "Traceback" in caplog.text


def infer_request(**parameters: Any) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0" * 20_000])
    for name, value in parameters.items():
        if isinstance(value, str):
            request.parameters[name].string_param = value
        else:
            request.parameters[name].int64_param = value
    return bytes(request.SerializeToString())


@pytest.mark.parametrize(
    ("replicas", "request_", "metadata", "passes"),
    [
        (2, infer_request(sequence_id="a-uuid"), [], False),
        (2, infer_request(sequence_id=7), [("traceparent", "00-1")], False),
        (1, infer_request(sequence_id=7), [], True),
        (2, infer_request(sequence_id=7), [(PINNED, "1")], True),
        (2, infer_request(), [], True),
        (2, infer_request(sequence_id=0, sequence_start=1), [], True),
        (2, infer_request(note="my sequence_id is 7"), [], True),
        # Whatever these are, it is for Triton to say.
        (2, b"\x22\x05sequence_id", [], True),
    ],
)
def test_a_sequence_that_nobody_keeps_together_is_refused(
    replicas: int, request_: bytes, metadata: list[tuple[str, Any]], passes: bool
) -> None:
    """Its requests would be split over the Tritons: errors at best, a wrong state unnoticed at worst."""
    seen: list[tuple[str, Any]] = []

    async def infer(request: bytes, context: Any) -> bytes:
        seen.extend(context.invocation_metadata())
        return request

    async def scenario() -> None:
        fleet = FleetHandle(Fleet())
        async with AsyncExitStack() as tritons:
            for _ in range(replicas):
                address = await tritons.enter_async_context(stand_in_triton(**ALIVE, ModelInfer=infer))
                forwarder = await start_forwarder(address, fleet=fleet)
            context = serve_context(metadata)
            call = forwarder.ModelInfer(request_, context)  # type: ignore[attr-defined]
            if passes:
                assert (await call).SerializeToString() == request_
                assert PINNED not in dict(seen)
            else:
                code, details = await fails(call, context)
                assert code is grpc.StatusCode.UNIMPLEMENTED
                assert re.search(r"sequence '(a-uuid|7)', .* of 2 replicas: .*ModelStreamInfer.*ingress is", details)
                assert not seen

    asyncio.run(scenario())


def test_haproxy_and_the_forwarder_mean_the_same_mark() -> None:
    """Otherwise every sequence would be refused with several replicas, although HAProxy keeps it together."""
    assert sequences.HEADER == PINNED


def test_a_replica_learns_of_another_one_without_asking_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It started alone, and would go on to take requests of sequences."""
    monkeypatch.setattr("triton_forwarder.membership.HEARTBEAT_S", 0.05)

    async def scenario() -> None:
        fleet = FleetHandle(Fleet())
        answers: dict[str, Any] = {**ALIVE, "ModelStatistics": no_statistics}
        async with stand_in_triton(**answers) as one, stand_in_triton(**answers) as other:
            first = await start_forwarder(one, fleet=fleet)
            assert first.membership.replicas == 1
            await start_forwarder(other, fleet=fleet)
            async with asyncio.timeout(10):
                while first.membership.replicas < 2:  # noqa: ASYNC110  a heartbeat, not an event
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_message_of_a_stream_may_belong_to_a_sequence() -> None:
    """A stream stays with one Triton: it is the way out that the refusal names."""

    async def stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def scenario() -> None:
        async with stand_in_triton(**ALIVE, ModelStreamInfer=stream) as address:
            forwarder = await start_forwarder(address)
            forwarder.membership.replicas = 3
            sent = infer_request(sequence_id=7)
            responses = forwarder.ModelStreamInfer(_requests(sent, sent), serve_context())  # type: ignore[attr-defined]
            assert [response.SerializeToString() async for response in responses] == [sent, sent]

    asyncio.run(scenario())


def test_the_health_check_fails_until_a_restarted_triton_has_its_models_again() -> None:
    """Requests for a model that clients have loaded would go to a Triton that has forgotten it."""

    async def scenario() -> None:
        async with stand_in_triton(**ALIVE) as address:
            forwarder = await start_forwarder(address)
            await forwarder.check_health()
            forwarder.membership = SimpleNamespace(is_behind=True)  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="lacks what clients have loaded"):
                await forwarder.check_health()

    asyncio.run(scenario())


def _counted(inferences: int) -> bytes:
    response = service_pb2.ModelStatisticsResponse()
    response.model_stats.add(name="m", version="1", inference_count=inferences)
    return bytes(response.SerializeToString())


def test_a_replica_that_ends_waits_for_what_triton_works_on_and_takes_its_figures_along() -> None:
    """On the straight path Serve sees none of these requests: they would be lost with the pod, or not be counted."""
    arrived, may_answer = asyncio.Event(), asyncio.Event()

    async def infer(request: bytes, _context: Any) -> bytes:
        arrived.set()
        await may_answer.wait()
        return request

    async def statistics(_request: bytes, _context: Any) -> bytes:
        return _counted(4 if may_answer.is_set() else 3)

    async def statistics_of_another(_request: bytes, _context: Any) -> bytes:
        return _counted(10)

    async def scenario() -> None:
        fleet = Fleet()
        async with stand_in_triton(**ALIVE, ModelInfer=infer, ModelStatistics=statistics) as address:
            forwarder = await start_forwarder(address, fleet=FleetHandle(fleet))
            haproxy = TritonChannel(address)
            request = asyncio.ensure_future(haproxy.unary("ModelInfer", b"x", timeout=10))
            await arrived.wait()
            ending = asyncio.create_task(Forwarder.__del__(forwarder))
            await asyncio.sleep(1)
            assert not ending.done()
            # Nobody else asks this Triton any more.
            assert (await fleet.call("RepositoryIndex", b"")).details.startswith("no replica is known")
            may_answer.set()
            assert await request == b"x"
            # As HAProxy does, once the server is off its list and has answered.
            await haproxy.close()
            await asyncio.wait_for(ending, 10)
        async with stand_in_triton(**ALIVE, ModelStatistics=statistics_of_another) as address:
            await start_forwarder(address, fleet=FleetHandle(fleet))
            assert (await fleet.call("ModelStatistics", b"")).message == _counted(14)

    asyncio.run(scenario())


@pytest.mark.parametrize("drain_timeout_s", [0.3])
def test_a_replica_does_not_wait_for_ever_for_a_client_that_stays(
    drain_timeout_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection past HAProxy would keep the pod alive until Kubernetes kills it, with all that it has in hand."""

    async def scenario() -> None:
        async with stand_in_triton(**ALIVE, ModelStatistics=no_statistics) as address:
            forwarder = await start_forwarder(address, drain_timeout_s=drain_timeout_s)
            client = TritonChannel(address)
            await client.unary("ServerLive", b"", timeout=5)
            await asyncio.wait_for(Forwarder.__del__(forwarder), 10)
            await client.close()

    asyncio.run(scenario())
    assert "1 connections to Triton are left after 0.3 s" in caplog.text


def test_a_replica_whose_triton_and_fleet_have_gone_ends_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a whole node must not be held up by its parts."""
    monkeypatch.setattr("triton_forwarder.membership.ANSWER_S", 0.1)

    async def scenario() -> None:
        handle = FleetHandle(Fleet())
        async with stand_in_triton(**ALIVE) as address:
            forwarder = await start_forwarder(address, fleet=handle, health_timeout_s=1)
        handle.fleet = SimpleNamespace(leave=hang)
        await asyncio.wait_for(Forwarder.__del__(forwarder), 10)

    asyncio.run(scenario())
    assert "The fleet does not answer" in caplog.text
    assert "Triton has ended before its last statistics were known" in caplog.text


def test_a_replica_that_never_was_ready_has_nothing_to_end() -> None:
    """Serve awaits the end of every replica, and shows its error in place of the reason."""
    asyncio.run(Forwarder.__del__(object.__new__(_Forwarder)))


def test_unit_tests_cannot_start_ray() -> None:
    """The fixture in tests/conftest.py holds: no unit test depends on processes of its own."""
    import ray

    with pytest.raises(RuntimeError, match="must not start Ray"):
        ray.init()
