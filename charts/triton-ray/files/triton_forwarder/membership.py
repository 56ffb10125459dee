"""What a replica does to be one of the fleet: it tells that it is there, and keeps a copy of the memory of all."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import grpc
from ray.serve.handle import DeploymentHandle

from triton_forwarder.channel import TRUE, TritonChannel
from triton_forwarder.fleet import ANSWER_S, HEARTBEAT_S, Fleet, Memory, Told

logger = logging.getLogger("ray.serve")

# As long as a Triton that was started again has not got what it needs, it is looked at so often.
URGENT_S = 0.2
# What a call through the channel to another's Triton may still take when that leaves.
CLOSE_S = 1.0


class Membership:
    """Of one replica, and the Triton beside it."""

    def __init__(self, fleet: DeploymentHandle[Fleet], name: str, triton: TritonChannel, *, timeout_s: float) -> None:
        self.replicas = 1
        """How many there are, as far as is known."""
        self.others: dict[str, TritonChannel] = {}
        """Channels to the Tritons of the other replicas; they connect with their first call."""
        self._fleet = fleet
        self._name = name
        self._triton = triton
        self._timeout_s = timeout_s
        self._memory = Memory(changes=0)
        self._restarts = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_behind(self) -> bool:
        """Whether Triton was started again, and may lack what clients have loaded and set."""
        return self._restarts != self._triton.restarts and bool(self._memory.wishes)

    async def start(self) -> None:
        """Return when the fleet knows of this replica, and Triton, which is ready, has got all wishes."""
        self._tasks.append(asyncio.create_task(self._triton.watch()))
        await self._tell(restarted=False)
        self._tasks.append(asyncio.create_task(self._stay()))

    async def end(self) -> None:
        """Tell no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.others:
            await self.others.popitem()[1].close()

    async def leave(self) -> None:
        """Tell that this replica ends."""
        await self._try(self._fleet.leave.remote(self._name, self._triton.address))

    async def count_last(self, statistics: bytes) -> None:
        """Tell what Triton has counted in the end."""
        await self._try(self._fleet.count_last.remote(self._triton.address, statistics))

    async def _try(self, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                await call
        except Exception:  # The head may be away; then the fleet finds out for itself.
            logger.warning("The fleet does not answer", exc_info=True)

    async def _stay(self) -> None:
        urgent = False
        while True:
            await asyncio.sleep(URGENT_S if urgent else HEARTBEAT_S)
            restarts = self._triton.restarts
            try:
                # Not ServerReady: that is false for good after a model that could not be loaded.
                alive = await self._triton.unary("ServerLive", b"", timeout=self._timeout_s) == TRUE
            except grpc.aio.AioRpcError:
                alive = False
            urgent = self.is_behind and not alive
            if alive:
                try:
                    await self._tell(restarted=restarts != self._restarts)
                    self._restarts = restarts
                except Exception:  # The head may be away; the next beat tries again.
                    logger.warning("The fleet does not answer", exc_info=True)

    async def _tell(self, *, restarted: bool) -> None:
        told = await self._call(restarted=restarted)
        if told.changes < self._memory.changes:
            told = await self._call(restarted=restarted, memory=self._memory)
        self.replicas = told.replicas
        others = set(told.tritons) - {self._triton.address}
        for address in others - self.others.keys():
            self.others[address] = TritonChannel(address)
        for address in self.others.keys() - others:
            # A Triton that leaves waits until nobody is connected.
            await self.others.pop(address).close(grace_s=CLOSE_S)
        self._memory = told.memory or self._memory

    async def _call(self, **more: Any) -> Told:
        told: Told = await self._fleet.join.remote(self._name, self._triton.address, self._memory.changes, **more)
        return told
