"""What one Triton alone cannot answer for all: statistics, readiness, the index of models, and settings that all share.

One actor on Ray's head. It knows of a replica by what that replica tells it every few seconds (see `membership`), and
forgets those that are silent. What it has to remember beyond their lives, each replica holds a copy of, so that it can
be started again. What is lost then is what a Triton had counted that ended in the same moment; and all, when there was
no replica.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import grpc

from triton_forwarder import fleet_messages, wishes
from triton_forwarder.channel import UNREACHABLE, TritonChannel, is_unreachable
from triton_forwarder.fleet_messages import Counters, encode
from triton_forwarder.wishes import CHANGES, SETTINGS, UNLOAD, Wish

logger = logging.getLogger("ray.serve")

# A replica tells that it is there this often, and is gone when it has been silent for so long.
HEARTBEAT_S = 2.0
SILENCE_S = 15.0
# How long one Triton has for an answer that all must give, and for what takes as long as a model needs to load.
ANSWER_S = 5.0
CONTROL_S = 600.0
# Statistics of a Triton that nobody asks for, so that little is lost when it dies.
STATISTICS_S = 10.0
# Tritons without a replica whose figures are kept apart, for the day when a replica comes back to one of them.
GONE = 100

T = TypeVar("T")


class Answer(NamedTuple):
    """What a caller gets: a message, or a status and its words."""

    message: bytes = b""
    code: int = 0
    """Number of a grpc.StatusCode; 0 is OK."""
    details: str = ""
    silent: bool = False
    """Whether the words are not Triton's own, because it has not answered."""


def _failure(code: grpc.StatusCode, details: str) -> Answer:
    return Answer(code=code.value[0], details=details)


NOBODY = _failure(grpc.StatusCode.UNAVAILABLE, "no replica is known yet, try again")


@dataclass(frozen=True)
class Memory:
    """What the fleet remembers beyond the life of a replica, and of this actor."""

    changes: int = 1
    """Number of its last change: of two, the one with the higher is the newer. 0 is that of a replica at its start."""
    retired: bytes = b""
    """ModelStatisticsResponse: what Tritons have counted in lives that are over."""
    gone: Mapping[str, bytes] = field(default_factory=dict)
    """Address of a Triton -> its last ModelStatisticsResponse, of those that have no replica."""
    wishes: tuple[Wish, ...] = ()
    """In the order in which a new Triton is to get them."""

    def missed(self, taken: int) -> list[Wish]:
        """Return the wishes that a Triton has not got whose last is of the change `taken`."""
        return [wish for wish in self.wishes if wish.number > taken]


class Told(NamedTuple):
    """What a replica learns when it tells that it is there."""

    changes: int
    """Of the memory; below what the replica knows of, the fleet was started again, and wants the replica's copy."""
    replicas: int = 0
    """How many there are."""
    memory: Memory | None = None
    """If it is newer than that of the replica."""
    tritons: tuple[str, ...] = ()
    """host:port of all Tritons, also that of the replica."""


@dataclass
class Member:
    """One replica, and the Triton beside it."""

    name: str
    triton: TritonChannel
    heard: float
    """When the replica, and so its Triton, was last known to be there."""
    taken: int = 0
    """Number of the change up to which its Triton has got all wishes."""
    counters: Counters = field(default_factory=Counters)
    counted: float = float("-inf")
    """When `counters` was asked for."""
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: int = 0
    """Number of the last question for it."""


class Fleet:
    """All replicas of the deployment; see the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By address: a replica may be replaced by another one while its Triton goes on.
        self._members: dict[str, Member] = {}
        self._memory = Memory()
        self._control = asyncio.Lock()
        self._questions = itertools.count(1)
        self._started = clock()
        # When all have told who were members of an actor before this one; 0 if there was none.
        self._complete_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def join(
        self, name: str, address: str, taken: int, *, restarted: bool = False, memory: Memory | None = None
    ) -> Told:
        """Take note of a replica, at its start and then every HEARTBEAT_S; see that its Triton has got all wishes.

        Args:
            name: of the replica.
            address: host:port of its Triton.
            taken: `changes` of what it was told last; 0 at its start.
            restarted: its Triton has been started again since.
            memory: the replica's copy, if the last answer asked for it.

        Raises:
            RuntimeError: the new Triton does not take what all others have.
        """
        if memory and memory.changes > self._memory.changes:
            self._memory = memory
        if taken > self._memory.changes:
            return Told(self._memory.changes)
        self._forget_silent()
        member = self._members.get(address)
        if taken and not member and address not in self._memory.gone and not self._complete_at:
            # One that was a member before this actor was started; the others will tell in the same time.
            self._complete_at = self._clock() + 2 * HEARTBEAT_S
        if member:
            await self._look_after(member, restarted=restarted)
        got = 0 if restarted else max(taken, member.taken if member and member.name == name else 0)
        if not got or self._memory.missed(got):
            await self._repeat_wishes(name, address, got)
        # From here on without a pause: what happens in one would be missed.
        if member and not self._is_there(member):
            # It has left meanwhile. One that was only slow tells again.
            return Told(taken, len(self._members))
        member = self._members.get(address) or self._take_in(address)
        member.name, member.taken, member.heard = name, self._memory.changes, self._clock()
        # As long as not all are known, there may be several.
        least = 2 if self._clock() < self._complete_at else 0
        return Told(
            self._memory.changes,
            max(least, len(self._members)),
            self._memory if self._memory.changes > taken else None,
            tuple(self._members),
        )

    async def leave(self, name: str, address: str) -> None:
        """Take note that a replica ends, and close the connection to its Triton."""
        member = self._members.get(address)
        if member and member.name == name:
            await self._count(member)
            self._dismiss(member)

    async def count_last(self, address: str, statistics: bytes) -> None:
        """Take note of a Triton's ModelStatisticsResponse from after its replica has left."""
        # Unless another replica has come to it.
        if address in self._memory.gone:
            counters = Counters(last=self._memory.gone[address]).seen(statistics)
            self._remember_gone(address, self._without_ended_lives(counters))

    async def call(self, rpc: str, request: bytes) -> Answer:
        """Answer an RPC for all replicas."""
        if not self._members:
            # Calls come by way of replicas: this actor was started again, and they will tell.
            await asyncio.sleep(max(0.0, self._started + 2 * HEARTBEAT_S - self._clock()))
        await asyncio.sleep(max(0.0, self._complete_at - self._clock()))
        self._forget_silent()
        if not self._members:
            return NOBODY
        try:
            if rpc in CHANGES:
                wish = Wish(0, rpc, wishes.about(rpc, request), request)
                only_reads = wishes.only_reads(wish)
            else:
                model, version = fleet_messages.model_request(request)
        except ValueError:
            # To the letter what Triton says.
            return _failure(grpc.StatusCode.INTERNAL, "Unable to parse request")
        if rpc == "ModelStatistics":
            return await self._statistics(request, model, version)
        if rpc == "ModelReady":
            return await self._ready(request)
        if rpc == "RepositoryIndex":
            return await self._index(*fleet_messages.index_request(request))
        return await (self._ask_any(rpc, request) if only_reads else self._change(wish))

    # --- the members

    def _take_in(self, address: str) -> Member:
        counters = Counters()
        if address in self._memory.gone:
            counters = Counters(last=self._memory.gone[address])
            self._remember(gone={each: last for each, last in self._memory.gone.items() if each != address})
        member = Member("", TritonChannel(address), self._clock(), counters=counters)
        self._members[address] = member
        return member

    async def _look_after(self, member: Member, *, restarted: bool) -> None:
        if restarted and member.counted < member.heard:
            # Figures of the Triton that has ended. Those that were asked for later may be of either.
            self._set_counters(member, member.counters.ended())
        member.heard = self._clock()
        if self._clock() - member.counted > STATISTICS_S:
            await self._count(member)

    def _forget_silent(self) -> None:
        for member in list(self._members.values()):
            if self._clock() - member.heard > SILENCE_S:
                logger.warning("Replica %s has been silent for %.0f s, it is gone", member.name, SILENCE_S)
                self._dismiss(member)

    def _dismiss(self, member: Member) -> None:
        if self._is_there(member):
            del self._members[member.triton.address]
            self._remember_gone(member.triton.address, member.counters.last)
            # Not at once: somebody may wait for an answer over this connection.
            self._go_on_with(member.triton.close(grace_s=ANSWER_S))

    def _go_on_with(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        # The event loop alone would not keep it.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_there(self, member: Member) -> bool:
        return self._members.get(member.triton.address) is member

    # --- what they have counted

    async def _count(self, member: Member) -> None:
        """Get a Triton's statistics, as they are after this call."""
        after = next(self._questions)
        # One at a time: of two answers nobody knows which is the older. Who comes meanwhile shares the next one.
        async with member.counting:
            if member.asked > after:
                return
            member.asked, asked_at = next(self._questions), self._clock()
            answer = await self._put(member.triton, "ModelStatistics", b"", timeout=ANSWER_S)
            if answer.code or not self._is_there(member):
                return
            try:
                self._set_counters(member, member.counters.seen(answer.message))
            except ValueError:
                logger.exception("The statistics of the Triton of replica %s cannot be read", member.name)
            member.counted = asked_at

    def _set_counters(self, member: Member, counters: Counters) -> None:
        member.counters = Counters(last=self._without_ended_lives(counters))

    def _without_ended_lives(self, counters: Counters) -> bytes:
        """Return the figures of the lives that go on; the others are remembered."""
        if counters.retired:
            self._remember(retired=fleet_messages.sum_statistics([self._memory.retired, counters.retired]))
        return counters.last

    def _remember_gone(self, address: str, statistics: bytes) -> None:
        gone = {each: known for each, known in self._memory.gone.items() if each != address} | {address: statistics}
        ended = [gone.pop(next(iter(gone))) for _ in range(len(gone) - GONE)]
        retired = [Counters(last=each).ended().retired for each in ended]
        self._remember(gone=gone, retired=fleet_messages.sum_statistics([self._memory.retired, *retired]))

    def _remember(self, **changes: Any) -> None:
        self._memory = replace(self._memory, changes=self._memory.changes + 1, **changes)

    # --- questions

    async def _put(self, triton: TritonChannel, rpc: str, request: bytes, *, timeout: float) -> Answer:
        """Put a question to one Triton."""
        words = UNREACHABLE
        try:
            return Answer(await triton.unary(rpc, request, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                words = f"Triton has not answered within {timeout:g} s"
            elif not is_unreachable(error):
                return _failure(error.code(), error.details() or "")
        except grpc.aio.UsageError:
            pass  # Its replica has left, and the connection was closed.
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # As above, while the answer was on its way.
        return _failure(grpc.StatusCode.UNAVAILABLE, words)._replace(silent=True)

    async def _ask_all(self, rpc: str, request: bytes) -> list[Answer]:
        asked = [self._put(member.triton, rpc, request, timeout=ANSWER_S) for member in self._members.values()]
        return await asyncio.gather(*asked)

    async def _ask_any(self, rpc: str, request: bytes) -> Answer:
        answer = NOBODY
        for member in list(self._members.values()):
            answer = await self._put(member.triton, rpc, request, timeout=ANSWER_S)
            if not answer.silent:
                break
        return answer

    async def _statistics(self, request: bytes, model: str, version: str) -> Answer:
        await asyncio.gather(*(self._count(member) for member in self._members.values()))
        total = fleet_messages.fleet_statistics(
            [
                *(member.counters for member in self._members.values()),
                *(Counters(last=each).ended() for each in self._memory.gone.values()),
                Counters(retired=self._memory.retired),
            ]
        )
        selected = fleet_messages.select(total, model, version)
        if model and not selected:
            # What none has is refused in Triton's own words.
            return await self._ask_any("ModelStatistics", request)
        return Answer(selected)

    async def _ready(self, request: bytes) -> Answer:
        answers = await self._ask_all("ModelReady", request)
        # No request goes to one that cannot be reached; to one that hangs, some do until Serve ends its replica.
        answers = [answer for answer in answers if answer.details != UNREACHABLE] or answers
        return _refused(answers) or Answer(fleet_messages.all_true(answer.message for answer in answers))

    async def _index(self, repository: str, ready_only: bool) -> Answer:
        # Without `ready`: whether it is ready everywhere, Triton alone cannot tell.
        answers = await self._ask_all("RepositoryIndex", encode(1, repository) if repository else b"")
        return _refused(answers) or Answer(
            fleet_messages.union_index(
                [answer.message for answer in answers if not answer.silent], ready_only=ready_only
            )
        )

    # --- changes

    async def _change(self, wish: Wish) -> Answer:
        await self._control.acquire()
        # A Triton goes on when the caller leaves, and what came of it must be known.
        change = self._go_on_with(self._change_all(wish))
        change.add_done_callback(lambda _: self._control.release())
        return await asyncio.shield(change)

    async def _change_all(self, wish: Wish) -> Answer:
        members = list(self._members.values())
        in_step = [member for member in members if not self._memory.missed(member.taken)]
        answers = await asyncio.gather(
            *(self._put(member.triton, wish.rpc, wish.request, timeout=CONTROL_S) for member in members)
        )
        if not (done := [answer for answer in answers if not answer.code]):
            return _refused(answers) or NOBODY
        index = await self._ask_any("RepositoryIndex", b"") if wish.rpc == UNLOAD else NOBODY
        self._remember(wishes=self._with(wish, done[0].message, index))
        for member, answer in zip(members, answers, strict=True):
            # One that was silent gets it when its replica is next heard of.
            if member in in_step and not answer.silent:
                member.taken = self._memory.changes
        failed = [
            f"{each.name}: {answer.details}" for each, answer in zip(members, answers, strict=True) if answer.code
        ]
        if not failed:
            return done[0]
        return _failure(
            grpc.StatusCode.INTERNAL,
            f"{wish.rpc} succeeded on {len(done)} of {len(members)} replicas, not on {'; '.join(failed)}",
        )

    def _with(self, wish: Wish, response: bytes, index: Answer) -> tuple[Wish, ...]:
        wish = wish._replace(number=self._memory.changes + 1)
        if wish.rpc in SETTINGS:
            return wishes.with_settings(self._memory.wishes, wish, response)
        if wish.rpc == UNLOAD and not index.code:
            return wishes.with_unload(self._memory.wishes, wish, index.message)
        return wishes.with_control(self._memory.wishes, wish)

    async def _repeat_wishes(self, name: str, address: str, got: int) -> None:
        """See that a Triton has got all wishes, and that none is added before the caller goes on."""
        while True:
            # Not in here, where several new Tritons would have to load their models one after the other.
            async with self._control:
                if not (missed := self._memory.missed(got)):
                    return
            triton = TritonChannel(address)
            try:
                for wish in missed:
                    await self._repeat(wish, name, triton, serves=got > 0)
            finally:
                await triton.close()
            got = max(wish.number for wish in missed)

    async def _repeat(self, wish: Wish, name: str, triton: TritonChannel, *, serves: bool) -> None:
        what = f"{wish.rpc} of {wish.about or 'the server'}"
        logger.info("%s is repeated on replica %s", what, name)
        answer = await self._put(triton, wish.rpc, wish.request, timeout=CONTROL_S)
        if not answer.code:
            return
        # Without any replica, nobody could take the wish back.
        alone = not self._members.keys() - {triton.address}
        if answer.silent or not (serves or alone or wish.rpc in SETTINGS):
            raise RuntimeError(f"{what}: {answer.details}")
        logger.error("%s failed on replica %s: %s", what, name, answer.details)


def _refused(answers: Sequence[Answer]) -> Answer | None:
    """Return what one Triton refuses, or that none has answered."""
    given = [answer for answer in answers if not answer.silent]
    return next((answer for answer in given or answers if answer.code), None)
