"""A replica's part in the fleet, with the real fleet in the same process and stand-ins for Triton."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from local_endpoint.processes import free_port
from tests.support.fleet_handle import FleetHandle
from tests.support.stand_in_triton import stand_in_triton
from triton_forwarder.channel import TRUE, TritonChannel
from triton_forwarder.fleet import Fleet, Told
from triton_forwarder.membership import Membership
from triton_forwarder.rpc_table import SERVICE

LOAD = service_pb2.RepositoryModelLoadRequest(model_name="m").SerializeToString()


@pytest.fixture(autouse=True)
def _fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_forwarder.membership.HEARTBEAT_S", 0.05)


async def live(_request: bytes, _context: Any) -> bytes:
    return TRUE


async def nothing(_request: bytes, _context: Any) -> bytes:
    return b""


ALIVE: dict[str, Any] = {"ServerLive": live, "ServerReady": nothing, "ModelStatistics": nothing}


@asynccontextmanager
async def member(address: str, fleet: Any) -> AsyncIterator[Membership]:
    """Join, and stay until the end of the block."""
    triton = TritonChannel(address)
    membership = Membership(fleet, f"replica of {address}", triton, timeout_s=0.5)
    try:
        await membership.start()
        yield membership
    finally:
        await membership.end()
        await triton.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  a heartbeat, not an event
            await asyncio.sleep(0.01)


class Recording:
    """A fleet that notes what it is told, and answers with what it was given."""

    def __init__(self, answer: Callable[[], Awaitable[Told]] | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self._answer = answer

    async def join(self, name: str, address: str, taken: int, **more: Any) -> Told:
        """Note it."""
        self.told.append({"name": name, "address": address, "taken": taken} | more)
        return await self._answer() if self._answer else Told(1, replicas=7)


def test_a_replica_tells_again_and_again_that_it_is_there() -> None:
    """The fleet forgets who is silent. A model that cannot be loaded makes ServerReady false, and silences nobody."""

    async def scenario() -> None:
        fleet = Recording()
        async with stand_in_triton(**ALIVE) as address, member(address, FleetHandle(fleet)) as membership:
            await until(lambda: len(fleet.told) > 3)
            assert membership.replicas == 7
            expected = {"name": f"replica of {address}", "address": address, "taken": 0, "restarted": False}
            assert fleet.told[:3] == [expected] * 3
        count = len(fleet.told)
        await asyncio.sleep(0.2)
        assert len(fleet.told) == count

    asyncio.run(scenario())


def test_a_replica_whose_triton_hangs_or_is_gone_is_silent() -> None:
    """Questions to all would go on to wait for it."""
    hangs = asyncio.Event()

    async def live_or_hung(_request: bytes, _context: Any) -> bytes:
        if hangs.is_set():
            await asyncio.sleep(3600)
        return TRUE

    async def scenario() -> None:
        fleet = Recording()
        async with (
            stand_in_triton(**ALIVE | {"ServerLive": live_or_hung}) as address,
            member(address, FleetHandle(fleet)) as membership,
        ):
            await until(lambda: len(fleet.told) > 1)
            hangs.set()
            await asyncio.sleep(0.2)
            count = len(fleet.told)
            await asyncio.sleep(0.5)
            assert len(fleet.told) == count
            # Nothing has been forgotten by it.
            assert not membership.is_behind

    asyncio.run(scenario())


def test_a_triton_that_was_away_between_two_heartbeats_gets_its_models_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that crashes is back after a second, without what clients have loaded, and nobody else would notice."""
    monkeypatch.setattr("triton_forwarder.membership.HEARTBEAT_S", 3)
    monkeypatch.setattr("triton_forwarder.membership.URGENT_S", 0.05)
    loads: list[bytes] = []
    may_load = asyncio.Event()

    async def load(request: bytes, _context: Any) -> bytes:
        loads.append(request)
        await may_load.wait()
        return b""

    async def scenario() -> None:
        port, fleet = free_port(), Fleet()
        may_load.set()
        async with stand_in_triton(port=port, **ALIVE, RepositoryModelLoad=load) as address:
            joined = member(address, FleetHandle(fleet))
            membership = await joined.__aenter__()
            await fleet.call("RepositoryModelLoad", LOAD)
            # The replica has heard of it.
            await membership._tell(restarted=False)
        assert loads == [LOAD]
        may_load.clear()
        await asyncio.sleep(0.5)
        async with stand_in_triton(port=port, **ALIVE, RepositoryModelLoad=load):
            assert membership.is_behind
            await until(lambda: len(loads) == 2)
            # Triton answers, but not for this model yet.
            assert membership.is_behind
            may_load.set()
            await until(lambda: not membership.is_behind)
            await asyncio.sleep(0.2)
            assert loads == [LOAD, LOAD]
            await joined.__aexit__(None, None, None)

    asyncio.run(scenario())


def test_a_connection_that_triton_closes_is_no_restart() -> None:
    """With --grpc-max-connection-age it closes each one after a while; models would be loaded again, over and over."""

    async def scenario() -> None:
        server = grpc.aio.server(
            options=[("grpc.max_connection_age_ms", 100), ("grpc.max_connection_age_grace_ms", 50)]
        )
        peers: set[str] = set()

        async def live_of(_request: bytes, context: Any) -> bytes:
            peers.add(context.peer())
            return TRUE

        handlers = {"ServerLive": grpc.unary_unary_rpc_method_handler(live_of)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        fleet = Recording()
        async with member(f"127.0.0.1:{port}", FleetHandle(fleet)):
            await until(lambda: len(peers) > 4)
            assert not any(told["restarted"] for told in fleet.told)
        await server.stop(None)

    asyncio.run(scenario())


def test_a_restart_that_the_fleet_could_not_be_told_is_told_later(caplog: pytest.LogCaptureFixture) -> None:
    """Ray's head is away while a Triton crashes: the models would be missing when it is back."""
    down = [False]

    async def answer() -> Told:
        if down[0]:
            raise ConnectionError("the head is away")
        return Told(1, replicas=1)

    async def scenario() -> None:
        port, fleet = free_port(), Recording(answer)
        async with stand_in_triton(port=port, **ALIVE) as address:
            joined = member(address, FleetHandle(fleet))
            await joined.__aenter__()
        down[0] = True
        await asyncio.sleep(0.5)
        async with stand_in_triton(port=port, **ALIVE):
            await until(lambda: sum(told["restarted"] for told in fleet.told) > 2)
            down[0] = False
            await until(lambda: not fleet.told[-1]["restarted"])
            # Until it was heard, and then no more.
            assert [told for told, _ in groupby(told["restarted"] for told in fleet.told)] == [False, True, False]
            await joined.__aexit__(None, None, None)

    asyncio.run(scenario())
    assert "The fleet does not answer" in caplog.text


def test_a_fleet_that_was_started_again_gets_the_copy_it_wants() -> None:
    """It knows nothing; whatever clients have loaded would be missing on the next replica."""

    async def scenario() -> None:
        handle = FleetHandle(Fleet())
        async with (
            stand_in_triton(**ALIVE, RepositoryModelLoad=nothing) as address,
            member(address, handle) as membership,
        ):
            await handle.fleet.call("RepositoryModelLoad", LOAD)
            await until(lambda: membership._memory.wishes)
            handle.fleet = Fleet()
            await until(lambda: handle.fleet._memory.wishes)
            assert membership._memory.wishes == handle.fleet._memory.wishes

    asyncio.run(scenario())


def test_a_triton_that_does_not_take_what_all_others_have_keeps_its_replica_from_starting() -> None:
    """Serve tells the operator why, and sends no requests there."""

    async def refuse(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INTERNAL, "failed to load 'm'")
        raise AssertionError("abort raises")

    async def scenario() -> None:
        handle = FleetHandle(Fleet())
        async with (
            stand_in_triton(**ALIVE, RepositoryModelLoad=nothing) as one,
            stand_in_triton(**ALIVE, RepositoryModelLoad=refuse) as other,
            member(one, handle),
        ):
            await handle.fleet.call("RepositoryModelLoad", LOAD)
            with pytest.raises(RuntimeError, match="RepositoryModelLoad of m: failed to load 'm'"):
                async with member(other, handle):
                    pass

    asyncio.run(scenario())
