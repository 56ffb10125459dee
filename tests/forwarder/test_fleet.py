"""The fleet, with stand-ins for Triton that misbehave, and with three real ones."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2

from tests.support import models
from tests.support.local_endpoint import RunningTriton, running_triton
from tests.support.stand_in_triton import stand_in_triton
from triton_forwarder.fleet import SILENCE_S, STATISTICS_S, Answer, Fleet, Memory, Told
from triton_forwarder.rpc_table import SERVICE

UNREACHABLE = "Triton is not reachable, it may be restarting"
NOBODY = (grpc.StatusCode.UNAVAILABLE, "no replica is known yet, try again")

TRACE_NAMES = ("trace_rate", "trace_level")
LOG_NAMES = ("log_info", "log_verbose_level")


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Do as time.monotonic."""
        return self.now


class StandIn:
    """What one stand-in for Triton has, what it has been asked, and how it misbehaves."""

    def __init__(self, *loaded: str, repository: tuple[str, ...] = ("a", "b")) -> None:
        self.address = ""
        self.repository = repository
        self.counts = dict.fromkeys(loaded or ("a",), 0)
        """Inferences of each model that is loaded."""
        self.asked: list[tuple[str, bytes]] = []
        self.under_way = 0
        self.most_under_way = 0
        self.hangs_at: set[str] = set()
        self.fails_at: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.waits_at: dict[str, Callable[[], Awaitable[None]]] = {}

    def handlers(self) -> dict[str, Any]:
        """Return what `stand_in_triton` wants."""
        return {rpc: self._handler(rpc) for rpc in _ANSWERS}

    def asked_for(self, rpc: str) -> list[bytes]:
        """Return the requests of one RPC."""
        return [request for name, request in self.asked if name == rpc]

    def restart(self, *loaded: str) -> None:
        """Forget everything."""
        self.counts = dict.fromkeys(loaded, 0)

    def _handler(self, rpc: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(request: bytes, context: Any) -> bytes:
            self.asked.append((rpc, request))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                # As they are now; what waits for the network is an older answer.
                answer = _ANSWERS[rpc](self, request)
                if rpc in self.hangs_at:
                    await asyncio.sleep(3600)
                if rpc in self.waits_at:
                    await self.waits_at[rpc]()
                if rpc in self.fails_at:
                    await context.abort(*self.fails_at[rpc])
                return answer
            finally:
                self.under_way -= 1

        return handle

    def _statistics(self, request: bytes) -> bytes:
        wanted = service_pb2.ModelStatisticsRequest.FromString(request).name
        response = service_pb2.ModelStatisticsResponse()
        for name, count in self.counts.items():
            if wanted in ("", name):
                entry = response.model_stats.add(name=name, version="1", inference_count=count)
                entry.inference_stats.success.count = count
        return bytes(response.SerializeToString())

    def _ready(self, request: bytes) -> bytes:
        ready = service_pb2.ModelReadyRequest.FromString(request).name in self.counts
        return bytes(service_pb2.ModelReadyResponse(ready=ready).SerializeToString())

    def _index(self, _request: bytes) -> bytes:
        response = service_pb2.RepositoryIndexResponse()
        for name in self.repository:
            state = {"version": "1", "state": "READY"} if name in self.counts else {}
            response.models.add(name=name, **state)
        return bytes(response.SerializeToString())

    def _load(self, request: bytes) -> bytes:
        if "RepositoryModelLoad" not in self.fails_at:
            self.counts.setdefault(service_pb2.RepositoryModelLoadRequest.FromString(request).model_name, 0)
        return b""

    def _unload(self, request: bytes) -> bytes:
        self.counts.pop(service_pb2.RepositoryModelUnloadRequest.FromString(request).model_name, None)
        return b""

    def _trace(self, _request: bytes) -> bytes:
        return bytes(service_pb2.TraceSettingResponse(settings={name: {} for name in TRACE_NAMES}).SerializeToString())

    def _log(self, _request: bytes) -> bytes:
        return bytes(service_pb2.LogSettingsResponse(settings={name: {} for name in LOG_NAMES}).SerializeToString())


_ANSWERS: dict[str, Callable[[StandIn, bytes], bytes]] = {
    "ModelStatistics": StandIn._statistics,
    "ModelReady": StandIn._ready,
    "RepositoryIndex": StandIn._index,
    "RepositoryModelLoad": StandIn._load,
    "RepositoryModelUnload": StandIn._unload,
    "TraceSetting": StandIn._trace,
    "LogSettings": StandIn._log,
}


@asynccontextmanager
async def served(*stand_ins: StandIn) -> AsyncIterator[None]:
    """Let the stand-ins answer."""
    async with AsyncExitStack() as stack:
        for stand_in in stand_ins:
            stand_in.address = await stack.enter_async_context(stand_in_triton(**stand_in.handlers()))
        yield


async def join(fleet: Fleet, *stand_ins: StandIn, taken: int = 0, **more: Any) -> Told:
    """Join for each, by the name of its place."""
    told = Told(0)
    for number, stand_in in enumerate(stand_ins):
        told = await fleet.join(f"replica-{number}", stand_in.address, taken, **more)
    return told


async def inferences(fleet: Fleet, model: str = "a") -> int:
    answer = await fleet.call("ModelStatistics", service_pb2.ModelStatisticsRequest(name=model).SerializeToString())
    assert not answer.code, answer
    (entry,) = service_pb2.ModelStatisticsResponse.FromString(answer.message).model_stats
    assert entry.inference_stats.success.count == entry.inference_count
    return int(entry.inference_count)


def status(answer: Answer) -> tuple[grpc.StatusCode, str]:
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return codes[answer.code], answer.details


def about(model: str) -> bytes:
    """Return a ModelReadyRequest, or a ModelStatisticsRequest."""
    return bytes(service_pb2.ModelReadyRequest(name=model).SerializeToString())


def load(model: str, **parameters: str) -> tuple[str, bytes]:
    request = service_pb2.RepositoryModelLoadRequest(model_name=model)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return "RepositoryModelLoad", request.SerializeToString()


def unload(model: str) -> tuple[str, bytes]:
    return "RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name=model).SerializeToString()


def trace(model: str = "", /, **settings: str) -> tuple[str, bytes]:
    request = service_pb2.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        request.settings[name].value.append(value)
    return "TraceSetting", request.SerializeToString()


def log(**settings: int) -> tuple[str, bytes]:
    request = service_pb2.LogSettingsRequest()
    for name, value in settings.items():
        request.settings[name].uint32_param = value
    return "LogSettings", request.SerializeToString()


def listed(answer: Answer) -> list[tuple[str, str, str]]:
    assert not answer.code, answer
    index = service_pb2.RepositoryIndexResponse.FromString(answer.message)
    return [(model.name, model.state, model.reason) for model in index.models]


# Statistics


def test_statistics_are_the_sum_over_all_tritons() -> None:
    """A client that measures load reads the figures of a third of it, a different third each time."""

    async def scenario() -> None:
        one, other = StandIn("a", "b"), StandIn("a")
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            one.counts.update(a=100, b=7)
            other.counts.update(a=20)
            assert await inferences(fleet, "a") == 120
            assert await inferences(fleet, "b") == 7
            everything = service_pb2.ModelStatisticsResponse.FromString(
                (await fleet.call("ModelStatistics", b"")).message
            )
            assert [(each.name, each.inference_count) for each in everything.model_stats] == [("a", 120), ("b", 7)]

    asyncio.run(scenario())


def test_sums_do_not_go_back_when_a_replica_leaves_or_is_silent() -> None:
    """Clients subtract two readings: one that is smaller gives a load of less than nothing."""

    async def scenario() -> None:
        clock = Clock()
        leaves, dies, stays = StandIn(), StandIn(), StandIn()
        async with served(leaves, dies, stays):
            fleet = Fleet(clock)
            await join(fleet, leaves, dies, stays)
            leaves.counts["a"], dies.counts["a"], stays.counts["a"] = 100, 20, 3
            await fleet.leave("replica-0", leaves.address)
            assert await inferences(fleet) == 123
            clock.now += SILENCE_S - 1
            await fleet.join("replica-2", stays.address, 1)
            clock.now += 2
            # Nothing of what `dies` counts from here on is known any more.
            assert await inferences(fleet) == 123
            dies.counts["a"] = 999
            assert await inferences(fleet) == 123
            assert (await fleet.join("replica-2", stays.address, 1)).replicas == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("after", [0, 5, 500])
def test_a_restarted_triton_goes_on_from_where_it_was(told: bool, after: int) -> None:
    """It counts from 0 again, and may have counted more than before until somebody looks."""

    async def scenario() -> None:
        clock, stand_in = Clock(), StandIn()
        async with served(stand_in):
            fleet = Fleet(clock)
            await join(fleet, stand_in)
            stand_in.counts["a"] = 100
            clock.now += STATISTICS_S + 1
            await join(fleet, stand_in, taken=1)
            clock.now += 2
            await join(fleet, stand_in, taken=1)
            stand_in.restart("a")
            stand_in.counts["a"] = after
            if told:
                await join(fleet, stand_in, taken=1, restarted=True)
            # What nobody has told, and cannot be seen from the figures, is lost. But they never go back.
            assert await inferences(fleet) == (500 if after == 500 and not told else 100 + after)
            stand_in.counts["a"] += 1
            assert await inferences(fleet) == (501 if after == 500 and not told else 101 + after)

    asyncio.run(scenario())


def test_figures_of_a_restarted_triton_that_were_seen_before_it_was_told_count_once() -> None:
    """A client that asks just after the restart would otherwise find them twice in the sum, for ever."""

    async def scenario() -> None:
        clock, stand_in = Clock(), StandIn()
        async with served(stand_in):
            fleet = Fleet(clock)
            await join(fleet, stand_in)
            stand_in.counts["a"] = 100
            assert await inferences(fleet) == 100
            clock.now += 2
            await join(fleet, stand_in, taken=1)
            stand_in.restart("a")
            stand_in.counts["a"] = 5
            clock.now += 1
            assert await inferences(fleet) == 105
            clock.now += 1
            await join(fleet, stand_in, taken=1, restarted=True)
            assert await inferences(fleet) == 105

    asyncio.run(scenario())


def test_a_triton_that_comes_back_is_not_counted_twice() -> None:
    """A replica that is silent for a while, or is replaced while its Triton goes on, would double its figures."""

    async def scenario() -> None:
        clock, stand_in, other = Clock(), StandIn(), StandIn()
        async with served(stand_in, other):
            fleet = Fleet(clock)
            await join(fleet, stand_in, other)
            stand_in.counts["a"] = 100
            assert await inferences(fleet) == 100
            # Silent, and back.
            clock.now += SILENCE_S + 1
            await fleet.join("replica-1", other.address, 1)
            assert await inferences(fleet) == 100
            await fleet.join("replica-0", stand_in.address, 1)
            assert await inferences(fleet) == 100
            # An update of the application.
            await fleet.leave("replica-0", stand_in.address)
            stand_in.counts["a"] = 110
            await fleet.join("replica-3", stand_in.address, 0)
            assert await inferences(fleet) == 110
            # A replica that crashed, and one that comes in its place before anybody misses it.
            await fleet.join("replica-4", stand_in.address, 0)
            # The old one leaves late; it is no longer its Triton.
            await fleet.leave("replica-3", stand_in.address)
            assert await inferences(fleet) == 110
            assert (await fleet.join("replica-4", stand_in.address, 1)).replicas == 2
            # And a pod that is new, at the address of an old one.
            await fleet.leave("replica-4", stand_in.address)
            stand_in.restart("a")
            stand_in.counts["a"] = 7
            await fleet.join("replica-5", stand_in.address, 0)
            assert await inferences(fleet) == 117

    asyncio.run(scenario())


def test_what_a_triton_counts_after_its_replica_has_left_is_added_once() -> None:
    """On the straight path it still has requests then; the sum would lack them."""

    async def scenario() -> None:
        stand_in, other = StandIn(), StandIn()
        async with served(stand_in, other):
            fleet = Fleet()
            await join(fleet, stand_in, other)
            stand_in.counts["a"] = 100
            await fleet.leave("replica-0", stand_in.address)
            stand_in.counts["a"] = 103
            await fleet.count_last(stand_in.address, stand_in._statistics(b""))
            assert await inferences(fleet) == 103
            # Another replica has come to this Triton before the old one had said its last word.
            await fleet.join("replica-2", stand_in.address, 0)
            stand_in.counts["a"] = 110
            assert await inferences(fleet) == 110
            stand_in.counts["a"] = 104
            await fleet.count_last(stand_in.address, stand_in._statistics(b""))
            stand_in.counts["a"] = 111
            assert await inferences(fleet) == 111

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_overtake_each_other_are_not_taken_for_a_restart(seed: int) -> None:
    """Ten clients that ask at once would make the sum grow by all that was ever counted, each time."""
    rng = random.Random(seed)  # noqa: S311  no secret

    async def scenario() -> None:
        stand_in = StandIn()

        async def network() -> None:
            await asyncio.sleep(rng.random() / 20)

        stand_in.waits_at["ModelStatistics"] = network
        async with served(stand_in):
            fleet = Fleet()
            await join(fleet, stand_in)
            stand_in.counts["a"] = 1000
            assert await inferences(fleet) == 1000

            async def ask() -> None:
                for _ in range(10):
                    stand_in.counts["a"] += 1
                    before = stand_in.counts["a"]
                    # All that had happened before the question is in the answer.
                    assert before <= await inferences(fleet) <= stand_in.counts["a"]

            await asyncio.gather(*(ask() for _ in range(10)))
            assert await inferences(fleet) == 1100
            # Those who ask at the same time share the answers.
            assert len(stand_in.asked_for("ModelStatistics")) < 80

    asyncio.run(scenario())


def test_a_replica_that_leaves_while_it_is_missed_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to the same end must not both add its figures."""
    monkeypatch.setattr("triton_forwarder.fleet.ANSWER_S", 0.3)

    async def scenario() -> None:
        clock, stand_in, other = Clock(), StandIn(), StandIn()
        async with served(stand_in, other):
            fleet = Fleet(clock)
            await join(fleet, stand_in, other)
            stand_in.counts["a"] = 100
            assert await inferences(fleet) == 100
            stand_in.hangs_at.add("ModelStatistics")
            leaving = asyncio.create_task(fleet.leave("replica-0", stand_in.address))
            await asyncio.sleep(0.1)
            clock.now += SILENCE_S + 1
            await fleet.join("replica-1", other.address, 1)
            await leaving
            assert await inferences(fleet) == 100

    asyncio.run(scenario())


def test_figures_of_tritons_that_are_long_gone_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that grows and shrinks for a year has had thousands, each with an address of its own."""
    monkeypatch.setattr("triton_forwarder.fleet.GONE", 2)

    async def scenario() -> None:
        stays, *others = (StandIn() for _ in range(6))
        async with served(stays, *others):
            fleet = Fleet()
            await fleet.join("stays", stays.address, 0)
            for stand_in in others:
                await join(fleet, stand_in)
                stand_in.counts["a"] = 10
                await fleet.leave("replica-0", stand_in.address)
            assert await inferences(fleet) == 50
            told = await fleet.join("stays", stays.address, 0)
            assert told.memory
            assert len(told.memory.gone) == 2
            # One of the two comes back.
            await join(fleet, others[-1])
            assert await inferences(fleet) == 50

    asyncio.run(scenario())


def test_a_model_that_no_triton_has_is_refused_in_tritons_words() -> None:
    """perf_analyzer takes an empty answer for a model without statistics."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("b")
        words = (grpc.StatusCode.INVALID_ARGUMENT, "requested model 'c' is not available")
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            assert await inferences(fleet, "b") == 0
            one.fails_at["ModelStatistics"] = other.fails_at["ModelStatistics"] = words
            assert status(await fleet.call("ModelStatistics", about("c"))) == words

    asyncio.run(scenario())


# Readiness, and the index


def test_a_model_is_ready_when_it_is_on_all() -> None:
    """A client waits for the model it has loaded, and then one of three requests fails."""

    async def scenario() -> None:
        one, other = StandIn("a", "b"), StandIn("a")
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            assert await fleet.call("ModelReady", about("a")) == Answer(b"\x08\x01")
            assert await fleet.call("ModelReady", about("b")) == Answer()
            assert await fleet.call("ModelReady", about("c")) == Answer()
            words = (grpc.StatusCode.INVALID_ARGUMENT, "failed to get model version from specified version string 'x'")
            one.fails_at["ModelReady"] = other.fails_at["ModelReady"] = words
            assert status(await fleet.call("ModelReady", about("a"))) == words

    asyncio.run(scenario())


def test_the_index_is_the_union_of_all() -> None:
    """A client that takes the names at its start would not know of a model, or find it missing later."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a", "c", repository=("a", "b", "c"))
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            assert listed(await fleet.call("RepositoryIndex", b"")) == [
                ("a", "READY", ""),
                ("b", "", ""),
                ("c", "UNAVAILABLE", "READY on 1 of 2 replicas"),
            ]
            ready = service_pb2.RepositoryIndexRequest(ready=True).SerializeToString()
            assert listed(await fleet.call("RepositoryIndex", ready)) == [("a", "READY", "")]
            assert one.asked_for("RepositoryIndex") == [b"", b""]

    asyncio.run(scenario())


def test_a_triton_that_hangs_costs_the_others_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and never answers; Serve needs a while to end its replica."""
    monkeypatch.setattr("triton_forwarder.fleet.ANSWER_S", 0.3)

    async def scenario() -> None:
        clock = Clock()
        hung, well = StandIn("a"), StandIn("a")
        async with served(hung, well):
            fleet = Fleet(clock)
            await join(fleet, hung, well)
            hung.hangs_at = set(_ANSWERS)
            hung.counts["a"], well.counts["a"] = 100, 20
            started = time.monotonic()
            calls = ("RepositoryIndex", b""), ("ModelReady", about("a")), ("ModelStatistics", about("a"))
            answers = await asyncio.gather(*(fleet.call(*call) for call in calls), fleet.call(*trace()))
            assert listed(answers[0])[0] == ("a", "READY", "")
            # Requests still go to it.
            assert answers[1] == Answer()
            assert (
                service_pb2.ModelStatisticsResponse.FromString(answers[2].message).model_stats[0].inference_count == 20
            )
            assert not answers[3].code
            assert time.monotonic() - started < 3
            # The heartbeats of the others do not wait at all, not even when it is given up.
            monkeypatch.setattr("triton_forwarder.fleet.ANSWER_S", 60)
            asking = asyncio.create_task(fleet.call("ModelReady", about("a")))
            await asyncio.sleep(0.1)
            for _ in range(3):
                clock.now += SILENCE_S - 1
                told = await asyncio.wait_for(fleet.join("replica-1", well.address, 1), 3)
            assert told.replicas == 1
            assert await asyncio.wait_for(fleet.call("ModelReady", about("a")), 3) == Answer(b"\x08\x01")
            asking.cancel()

    asyncio.run(scenario())


def test_a_triton_that_cannot_be_reached_is_left_out() -> None:
    """HAProxy sends nothing to it either; the model is ready where requests go."""

    async def scenario() -> None:
        gone, well = StandIn("b"), StandIn("a")
        async with served(well):
            async with served(gone):
                fleet = Fleet()
                await join(fleet, gone, well)
                gone.counts["a"] = 5
                await inferences(fleet)
            assert await fleet.call("ModelReady", about("a")) == Answer(b"\x08\x01")
            assert listed(await fleet.call("RepositoryIndex", b"")) == [("a", "READY", ""), ("b", "", "")]
            assert not (await fleet.call(*trace())).code
            assert await inferences(fleet) == 5
        for call in (("ModelReady", about("a")), ("RepositoryIndex", b""), trace(), load("a"), log(log_info=1)):
            assert status(await fleet.call(*call)) == (grpc.StatusCode.UNAVAILABLE, UNREACHABLE)
        # What is known of the past is no lie.
        assert await inferences(fleet) == 5

    asyncio.run(scenario())


def test_without_replicas_the_caller_is_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty index would tell a client that there are no models."""
    monkeypatch.setattr("triton_forwarder.fleet.HEARTBEAT_S", 0.01)

    async def scenario() -> None:
        fleet = Fleet()
        for rpc in _ANSWERS:
            assert status(await fleet.call(rpc, b"")) == NOBODY

    asyncio.run(scenario())


def test_a_connection_that_is_closed_under_a_question_ends_that_question_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one replica would be a cancelled call for every client that asks at this moment."""
    monkeypatch.setattr("triton_forwarder.fleet.ANSWER_S", 0.3)

    async def scenario() -> None:
        leaves, stays = StandIn("a"), StandIn("a")
        async with served(leaves, stays):
            fleet = Fleet()
            await join(fleet, leaves, stays)
            leaves.hangs_at.add("RepositoryModelLoad")
            loading = asyncio.create_task(fleet.call(*load("b")))
            await asyncio.sleep(0.1)
            await fleet.leave("replica-0", leaves.address)
            code, details = status(await asyncio.wait_for(loading, 10))
            assert code is grpc.StatusCode.INTERNAL
            assert details == f"RepositoryModelLoad succeeded on 1 of 2 replicas, not on replica-0: {UNREACHABLE}"

    asyncio.run(scenario())


# Changes


def test_a_change_reaches_all_and_each_new_triton_before_it_serves() -> None:
    """A model that a client has loaded would be unknown to the replica that the load has started."""

    async def scenario() -> None:
        one, other, new = StandIn("a"), StandIn("a"), StandIn("a")
        async with served(one, other, new):
            fleet = Fleet()
            await join(fleet, one, other)
            changes = [load("b", config="{}"), trace("b", trace_rate="5"), log(log_info=1), unload("a")]
            for change in changes:
                assert not (await fleet.call(*change)).code
                assert one.asked.count(change) == other.asked.count(change) == 1
            assert set(one.counts) == set(other.counts) == {"b"}
            told = await fleet.join("new", new.address, 0)
            assert set(new.counts) == {"b"}
            assert new.asked == [changes[0], changes[3], changes[1], changes[2]]
            assert told.memory
            assert [wish.request for wish in told.memory.wishes] == [request for _, request in new.asked]
            # Once.
            assert (await fleet.join("new", new.address, told.changes)).memory is None
            assert new.asked_for("RepositoryModelLoad") == [changes[0][1]]

    asyncio.run(scenario())


def test_settings_are_read_from_one_and_written_to_all() -> None:
    """Each Triton answers the same; the question must not cost as much as a change."""

    async def scenario() -> None:
        one, other = StandIn(), StandIn()
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            for read, write in ((trace("a"), trace("a", trace_rate="5")), (log(), log(log_verbose_level=1))):
                one.asked.clear()
                assert (await fleet.call(*read)).message == _ANSWERS[read[0]](one, b"")
                assert one.asked == [read]
                assert other.asked == []
                await fleet.call(*write)
                assert one.asked == [read, write]
                assert other.asked == [write]
                other.asked.clear()

    asyncio.run(scenario())


def test_a_change_that_all_refuse_is_refused_in_tritons_words_and_forgotten() -> None:
    """The next replica could not start."""

    async def scenario() -> None:
        one, other, new = StandIn(), StandIn(), StandIn()
        words = (grpc.StatusCode.INTERNAL, "failed to load 'b', failed to poll from model repository")
        async with served(one, other, new):
            fleet = Fleet()
            await join(fleet, one, other)
            one.fails_at["RepositoryModelLoad"] = other.fails_at["RepositoryModelLoad"] = words
            assert status(await fleet.call(*load("b"))) == words
            await join(fleet, new)
            assert new.asked == []

    asyncio.run(scenario())


def test_a_change_that_some_refuse_names_them() -> None:
    """The operator has to know where to look; all others have what the client wanted, and so will new ones."""

    async def scenario() -> None:
        one, refuses, gone, new = StandIn(), StandIn(), StandIn(), StandIn()
        async with served(one, refuses, new):
            fleet = Fleet()
            async with served(gone):
                await join(fleet, one, refuses, gone)
            refuses.fails_at["RepositoryModelLoad"] = (grpc.StatusCode.INTERNAL, "no memory left")
            code, details = status(await fleet.call(*load("b")))
            assert code is grpc.StatusCode.INTERNAL
            assert details == (
                "RepositoryModelLoad succeeded on 1 of 3 replicas, not on "
                f"replica-1: no memory left; replica-2: {UNREACHABLE}"
            )
            await fleet.join("new", new.address, 0)
            assert "b" in new.counts
            # One that has refused is not asked again and again.
            refuses.asked.clear()
            await fleet.join("replica-1", refuses.address, 1)
            assert refuses.asked_for("RepositoryModelLoad") == []

    asyncio.run(scenario())


def test_a_triton_that_was_not_reached_gets_the_change_when_it_is_back() -> None:
    """A blip of the network would leave it different from all others, until its pod ends."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a")
        clock = Clock()
        async with served(one):
            fleet = Fleet(clock)
            async with served(other):
                await join(fleet, one, other)
                address = other.address
            assert (await fleet.call(*load("b"))).code
            assert (await fleet.call(*trace(trace_rate="1"))).code
            port, other_again = int(address.rpartition(":")[2]), StandIn("a")
            async with stand_in_triton(port=port, **other_again.handlers()):
                told = await fleet.join("replica-1", address, 1)
                assert other_again.asked_for("RepositoryModelLoad") == [load("b")[1]]
                assert "b" in other_again.counts
                assert len(other_again.asked_for("TraceSetting")) == 1
                # And one that had been given up for a while, what has come since.
                clock.now += SILENCE_S + 1
                await fleet.join("replica-0", one.address, told.changes)
                assert not (await fleet.call(*unload("a"))).code
                await fleet.join("replica-1", address, told.changes)
                assert set(other_again.counts) == {"b"}
                assert len(other_again.asked_for("RepositoryModelLoad")) == 1

    asyncio.run(scenario())


def test_a_restarted_triton_gets_everything_again() -> None:
    """It has forgotten all that clients have loaded and set, and its replica serves on."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a")
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            await fleet.call(*load("b"))
            told = await join(fleet, one, other, taken=1)
            one.restart("a")
            one.asked.clear()
            await fleet.join("replica-0", one.address, told.changes, restarted=True)
            assert one.asked_for("RepositoryModelLoad") == [load("b")[1]]

    asyncio.run(scenario())


@pytest.mark.parametrize("alone", [True, False])
def test_a_new_triton_that_refuses_a_model_serves_only_if_there_is_no_other(
    alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third request would fail. But without any replica nobody could unload a model that is gone for good."""

    async def scenario() -> None:
        one, new = StandIn("a"), StandIn("a")
        async with served(one, new):
            fleet = Fleet()
            await join(fleet, one)
            await fleet.call(*load("b"))
            if alone:
                await fleet.leave("replica-0", one.address)
            new.fails_at["RepositoryModelLoad"] = (grpc.StatusCode.INTERNAL, "failed to load 'b'")
            if not alone:
                with pytest.raises(RuntimeError, match=r"^RepositoryModelLoad of b: failed to load 'b'$"):
                    await fleet.join("new", new.address, 0)
                assert (await fleet.join("replica-0", one.address, 1)).replicas == 1
                return
            await fleet.join("new", new.address, 0)
            assert "RepositoryModelLoad of b failed on replica new: failed to load 'b'" in caplog.text
            assert not (await fleet.call(*unload("b"))).code

    asyncio.run(scenario())


def test_a_setting_that_a_new_triton_refuses_does_not_keep_it_from_serving(caplog: pytest.LogCaptureFixture) -> None:
    """Those of a model that is not loaded at the moment are refused, and no replica would start any more."""

    async def scenario() -> None:
        one, new = StandIn(), StandIn()
        async with served(one, new):
            fleet = Fleet()
            await join(fleet, one)
            await fleet.call(*trace("a", trace_rate="5"))
            new.fails_at["TraceSetting"] = (grpc.StatusCode.INVALID_ARGUMENT, "Request for unknown model : a")
            assert (await fleet.join("new", new.address, 0)).replicas == 2
            assert "TraceSetting of a failed on replica new: Request for unknown model : a" in caplog.text

    asyncio.run(scenario())


def test_two_changes_at_once_come_one_after_the_other() -> None:
    """A load and an unload at the same time could end differently on each Triton."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a")

        async def network() -> None:
            await asyncio.sleep(0.02)

        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            for stand_in in (one, other):
                stand_in.most_under_way = 0
                stand_in.waits_at.update(RepositoryModelLoad=network, RepositoryModelUnload=network)
            await asyncio.gather(*(fleet.call(*change) for _ in range(5) for change in (load("b"), unload("b"))))
            assert one.most_under_way == other.most_under_way == 1
            assert one.asked_for("RepositoryModelLoad") == [load("b")[1]] * 5
            assert [rpc for rpc, _ in one.asked if "Model" in rpc and "Statistics" not in rpc] == [
                rpc for rpc, _ in other.asked if "Model" in rpc and "Statistics" not in rpc
            ]

    asyncio.run(scenario())


def test_a_change_whose_caller_leaves_is_made_and_remembered() -> None:
    """A client with a deadline of 30 s loads a model that needs 40: Triton goes on, and so must the fleet."""

    async def scenario() -> None:
        one, other, new = StandIn("a"), StandIn("a"), StandIn("a")
        may_answer = asyncio.Event()
        one.waits_at["RepositoryModelLoad"] = other.waits_at["RepositoryModelLoad"] = may_answer_of(may_answer)
        async with served(one, other, new):
            fleet = Fleet()
            await join(fleet, one, other)
            loading = asyncio.create_task(fleet.call(*load("b")))
            while not other.asked_for("RepositoryModelLoad"):  # noqa: ASYNC110  in a stand-in
                await asyncio.sleep(0.01)
            # Those who wait for their turn may leave without a trace.
            waiting = asyncio.create_task(fleet.call(*unload("a")))
            await asyncio.sleep(0.05)
            for task in (loading, waiting):
                task.cancel()
            await asyncio.gather(loading, waiting, return_exceptions=True)
            assert loading.cancelled()
            assert waiting.cancelled()
            # A replica that starts in this moment waits for what comes of it.
            joining = asyncio.create_task(fleet.join("new", new.address, 0))
            await asyncio.sleep(0.05)
            assert not joining.done()
            may_answer.set()
            await asyncio.wait_for(joining, 10)
            assert set(new.counts) == {"a", "b"}
            assert not (await asyncio.wait_for(fleet.call(*unload("b")), 10)).code

    asyncio.run(scenario())


def may_answer_of(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await event.wait()

    return wait


def test_new_tritons_load_their_models_at_the_same_time() -> None:
    """Ten replicas for a burst of load would start one after the other, each after the minutes of a large model."""

    async def scenario() -> None:
        one, *new = (StandIn("a") for _ in range(4))
        async with served(one, *new):
            fleet = Fleet()
            await join(fleet, one)
            await fleet.call(*load("b"))
            all_load = asyncio.Barrier(3)

            async def wait() -> None:
                await all_load.wait()

            for stand_in in new:
                stand_in.waits_at["RepositoryModelLoad"] = wait
            joins = [fleet.join(f"new-{number}", stand_in.address, 0) for number, stand_in in enumerate(new)]
            await asyncio.wait_for(asyncio.gather(*joins), 10)

    asyncio.run(scenario())


def test_a_triton_that_starts_while_a_change_is_made_has_it_when_it_serves() -> None:
    """It would be in nobody's list: not yet in that of the change, no longer in that of what is repeated."""

    async def scenario() -> None:
        one, new = StandIn("a"), StandIn("a")
        async with served(one, new):
            fleet = Fleet()
            await join(fleet, one)
            await fleet.call(*load("b"))
            loads, may_load = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                loads.set()
                await may_load.wait()

            new.waits_at["RepositoryModelLoad"] = wait
            joining = asyncio.create_task(fleet.join("new", new.address, 0))
            await loads.wait()
            await asyncio.wait_for(fleet.call(*unload("a")), 10)
            may_load.set()
            await asyncio.wait_for(joining, 10)
            assert set(new.counts) == {"b"}

    asyncio.run(scenario())


def test_bytes_that_are_no_request_are_refused_as_triton_does() -> None:
    """They come from a client: the same words as from Triton, and nothing of it to the other replicas."""

    async def scenario() -> None:
        stand_in = StandIn()
        async with served(stand_in):
            fleet = Fleet()
            await join(fleet, stand_in)
            for rpc in _ANSWERS:
                for message in (b"\xff", b"\x0a\x05ab", b"\x12\x03ab", b"\x0a\x02\x0a\x7f"):
                    expected = (grpc.StatusCode.INTERNAL, "Unable to parse request")
                    if rpc in ("TraceSetting", "LogSettings") or message != b"\x0a\x02\x0a\x7f":
                        assert status(await fleet.call(rpc, message)) == expected, (rpc, message)
            assert stand_in.asked_for("LogSettings") == []

    asyncio.run(scenario())


# The fleet itself is started again


def test_a_fleet_that_was_started_again_learns_everything_from_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may move it at any time; figures would go back, and new replicas lack what clients have loaded."""
    monkeypatch.setattr("triton_forwarder.fleet.HEARTBEAT_S", 0.2)

    async def scenario() -> None:
        gone, one, other, new = (StandIn("a") for _ in range(4))
        async with served(gone, one, other, new):
            fleet = Fleet()
            await join(fleet, gone, one, other)
            gone.counts["a"], one.counts["a"], other.counts["a"] = 1000, 200, 30
            await fleet.leave("replica-0", gone.address)
            await fleet.call(*load("b"))
            assert await inferences(fleet) == 1230
            one.restart("a", "b")
            one.counts["a"] = 4
            assert await inferences(fleet) == 1234
            told = await fleet.join("replica-1", one.address, 0)
            assert told.memory

            fleet = Fleet()
            # Somebody asks before any replica has told.
            early = asyncio.create_task(inferences(fleet))
            await asyncio.sleep(0.05)
            first = await fleet.join("replica-1", one.address, told.changes)
            assert first.changes < told.changes
            assert first.memory is None
            one.asked.clear()
            await fleet.join("replica-1", one.address, told.changes, memory=told.memory)
            assert one.asked == []
            # The others have not told yet. Their figures would be missing, and the model would not be loaded there.
            asking = asyncio.create_task(inferences(fleet))
            await asyncio.sleep(0.1)
            assert (await fleet.join("replica-1", one.address, told.changes)).replicas == 2
            assert not asking.done()
            await fleet.join("replica-2", other.address, told.changes)
            assert await asyncio.wait_for(asking, 10) == await early == 1234
            await fleet.join("new", new.address, 0)
            assert "b" in new.counts
            assert (await fleet.join("replica-1", one.address, told.changes)).replicas == 3

    asyncio.run(scenario())


def test_of_two_copies_the_newer_one_counts() -> None:
    """A replica that was slow to hear of the last change must not undo it."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a")
        async with served(one, other):
            fleet = Fleet()
            await join(fleet, one, other)
            await fleet.call(*load("b"))
            old = await fleet.join("replica-0", one.address, 0)
            await fleet.call(*load("c"))
            new = await fleet.join("replica-1", other.address, 0)
            assert old.memory
            assert new.memory

            for order in ((old, new), (new, old)):
                fleet = Fleet()
                for name, stand_in, told in zip("ab", (one, other), order, strict=True):
                    await fleet.join(name, stand_in.address, told.changes, memory=told.memory)
                latest = await fleet.join("a", one.address, 1)
                assert latest.memory
                assert [wish.about for wish in latest.memory.wishes] == ["b", "c"]

    asyncio.run(scenario())


def test_the_copy_goes_to_a_replica_only_when_it_has_changed() -> None:
    """A model may come with files of a hundred megabytes, and every replica tells every two seconds."""

    async def scenario() -> None:
        one, other = StandIn("a"), StandIn("a")
        async with served(one, other):
            fleet = Fleet()
            told = await join(fleet, one, other)
            assert told.memory == Memory()
            assert (await fleet.join("replica-0", one.address, told.changes)).memory is None
            await fleet.call(*load("b"))
            for number, stand_in in enumerate((one, other)):
                changed = await fleet.join(f"replica-{number}", stand_in.address, told.changes)
                assert changed.memory
                again = await fleet.join(f"replica-{number}", stand_in.address, changed.changes)
                assert again.memory is None

    asyncio.run(scenario())


def test_the_number_of_replicas_is_known_to_each() -> None:
    """Whether a sequence may be split is decided without asking for it."""

    async def scenario() -> None:
        clock = Clock()
        one, other = StandIn("a"), StandIn("a")
        async with served(one, other):
            fleet = Fleet(clock)
            assert (await join(fleet, one)).replicas == 1
            assert (await join(fleet, one, other)).replicas == 2
            # Two of one name are two: they have two Tritons. And one that moves is two, until the old place is silent.
            assert (await fleet.join("replica-0", other.address, 1)).replicas == 2
            clock.now += SILENCE_S + 1
            assert (await fleet.join("replica-0", one.address, 1)).replicas == 1

    asyncio.run(scenario())


def test_a_heartbeat_that_comes_after_the_end_brings_nobody_back() -> None:
    """The fleet's connection to a Triton that ends would make its replica wait until the heartbeat is missed."""

    async def scenario() -> None:
        stand_in, other = StandIn("a"), StandIn("a")
        clock = Clock()
        may_answer = asyncio.Event()
        async with served(stand_in, other):
            fleet = Fleet(clock)
            await join(fleet, stand_in, other)
            stand_in.waits_at["ModelStatistics"] = may_answer_of(may_answer)
            clock.now += STATISTICS_S + 1
            beat = asyncio.create_task(fleet.join("replica-0", stand_in.address, 1))
            leaving = asyncio.create_task(fleet.leave("replica-0", stand_in.address))
            await asyncio.sleep(0.1)
            may_answer.set()
            await asyncio.gather(beat, leaving)
            assert (await fleet.join("replica-1", other.address, 1)).replicas == 1

    asyncio.run(scenario())


# Three real Tritons


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that can be loaded, and one that cannot."""
    folder = tmp_path_factory.mktemp("models")
    models.write_explicit_models(folder)
    models.write_protocol_models(folder)
    return folder


@contextmanager
def explicit_triton(repository: Path, *, grpc_port: int = 0) -> Iterator[RunningTriton]:
    """Run a Triton that loads what clients ask for."""
    arguments = ("--model-control-mode=explicit", "--load-model=countdown")
    with running_triton(repository, grpc_port=grpc_port, arguments=arguments) as triton:
        yield triton


@pytest.fixture
def tritons(repository: Path) -> Iterator[list[RunningTriton]]:
    """Three of them, which have the model countdown."""
    with ExitStack() as stack:
        yield [stack.enter_context(explicit_triton(repository)) for _ in range(3)]


def infer(triton: RunningTriton, times: int, model: str = "identity_fp32") -> None:
    with InferenceServerClient(triton.address) as client:
        for _ in range(times):
            given = InferInput("INPUT", [1], "FP32")
            given.set_data_from_numpy(np.ones(1, np.float32))
            client.infer(model, [given])


def ask(triton: RunningTriton, rpc: str, request: bytes) -> Answer:
    """Ask one Triton alone."""
    with grpc.insecure_channel(triton.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return Answer(channel.unary_unary(f"/{SERVICE}/{rpc}")(request, timeout=60))
        except grpc.RpcError as error:
            return Answer(code=error.code().value[0], details=error.details())


async def join_all(fleet: Fleet, tritons: list[RunningTriton]) -> None:
    for number, triton in enumerate(tritons):
        await fleet.join(f"replica-{number}", triton.address, 0)


def test_three_real_tritons_answer_as_one(tritons: list[RunningTriton]) -> None:
    """Clients must not notice how many there are; what differs between them is said, and never smoothed over."""

    async def scenario() -> None:
        fleet = Fleet()
        await join_all(fleet, tritons[:2])
        assert not (await fleet.call(*load("identity_fp32"))).code
        # The third starts now, and has the model when it serves.
        assert ask(tritons[2], "ModelReady", about("identity_fp32")) == Answer()
        await fleet.join("replica-2", tritons[2].address, 0)
        assert ask(tritons[2], "ModelReady", about("identity_fp32")) == Answer(b"\x08\x01")
        assert await fleet.call("ModelReady", about("identity_fp32")) == Answer(b"\x08\x01")

        for times, triton in enumerate(tritons, 1):
            await asyncio.to_thread(infer, triton, times)
        await until(lambda: inferences(fleet, "identity_fp32"), 6)
        # A lone Triton's answer is made of the same models, in the same order.
        alone = service_pb2.ModelStatisticsResponse.FromString(ask(tritons[0], "ModelStatistics", b"").message)
        together = service_pb2.ModelStatisticsResponse.FromString((await fleet.call("ModelStatistics", b"")).message)
        assert [model.name for model in together.model_stats] == [model.name for model in alone.model_stats]
        assert [model.name for model in alone.model_stats] == ["countdown", "identity_fp32"]
        named = service_pb2.ModelStatisticsRequest(name="identity_fp32", version="1").SerializeToString()
        assert (await fleet.call("ModelStatistics", named)).message
        for unknown in (
            about("nobody"),
            service_pb2.ModelStatisticsRequest(name="countdown", version="9").SerializeToString(),
        ):
            assert await fleet.call("ModelStatistics", unknown) == ask(tritons[0], "ModelStatistics", unknown)

        index = await fleet.call("RepositoryIndex", b"")
        assert index == ask(tritons[0], "RepositoryIndex", b"")
        ask(tritons[1], *unload("identity_fp32"))
        assert await fleet.call("ModelReady", about("identity_fp32")) == Answer()

        async def loaded() -> list[tuple[str, str, str]]:
            return [each for each in listed(await fleet.call("RepositoryIndex", b"")) if each[1]]

        reason = "READY on 2 of 3 replicas: unloaded"
        await until(loaded, [("countdown", "READY", ""), ("identity_fp32", "UNAVAILABLE", reason)])
        assert await inferences(fleet, "identity_fp32") == 6
        await fleet.leave("replica-2", tritons[2].address)
        assert await inferences(fleet, "identity_fp32") == 6

    asyncio.run(scenario())


async def until(value: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Wait for a value; a real Triton counts a moment after it has answered."""
    async with asyncio.timeout(20):
        while await value() != expected:  # noqa: ASYNC110  Triton's, not an event of ours
            await asyncio.sleep(0.05)


def test_changes_reach_three_real_tritons_and_one_that_starts_again(
    tritons: list[RunningTriton], repository: Path
) -> None:
    """What clients have loaded, unloaded and set is the same on all, whenever they have started."""
    changes = [
        load("identity_fp32"),
        unload("countdown"),
        unload("made up"),
        trace("identity_fp32", trace_rate="7", made_up="1"),
        trace(trace_rate="9"),
        log(log_verbose_level=1),
    ]
    same = [("RepositoryIndex", b""), trace("identity_fp32"), trace(), ("LogSettings", b"")]

    async def scenario() -> None:
        fleet = Fleet()
        await join_all(fleet, tritons[:2])
        for change in changes:
            alone = ask(tritons[2], *change)
            answer = await fleet.call(*change)
            assert (answer.code, len(answer.message)) == (alone.code, len(alone.message))
        # One is killed while it loads; the others go on.
        slow = load("slow_to_load")
        loading = asyncio.create_task(fleet.call(*slow))
        await until(lambda: asyncio.to_thread(lambda: "loading: slow_to_load" in tritons[1].log()), True)
        tritons[1].process.send_signal(signal.SIGKILL)
        await asyncio.to_thread((repository / "slow_to_load/go").touch)
        answer = await asyncio.wait_for(loading, 60)
        assert status(answer)[0] is grpc.StatusCode.INTERNAL
        assert answer.details.startswith("RepositoryModelLoad succeeded on 1 of 2 replicas, not on replica-1: ")
        assert "127.0.0.1" not in answer.details
        tritons[1].process.wait()
        port = int(tritons[1].address.rpartition(":")[2])
        ask(tritons[2], *slow)
        with explicit_triton(repository, grpc_port=port) as again:
            await fleet.join("replica-1", again.address, 1, restarted=True)
            for question in same:
                # The map of settings comes in any order.
                alone, first, second = (ask(triton, *question) for triton in (tritons[2], tritons[0], again))
                assert not alone.code
                assert sorted(first.message) == sorted(second.message) == sorted(alone.message), question

    asyncio.run(scenario())


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x12\x03ab", b"\x0d\x01"])
def test_bytes_that_are_no_request_get_the_words_of_a_real_triton(triton: RunningTriton, message: bytes) -> None:
    """A broken client must not find out by its own errors what is behind the address."""

    async def scenario() -> None:
        fleet = Fleet()
        await fleet.join("replica", triton.address, 0)
        for rpc in _ANSWERS:
            assert (await fleet.call(rpc, message))[:3] == ask(triton, rpc, message)[:3], rpc

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[RunningTriton]:
    """One real Triton."""
    with explicit_triton(repository) as running:
        yield running
