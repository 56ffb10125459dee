"""Callers of Triton's gRPC that cost as little as can be: bytes in several processes, no messages.

A process holds a share of the callers as coroutines. It obeys the parent by a pipe: start a load, tell when every
caller has had an answer, note what ends within the given window, and hand that over.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import grpc

from bench.cases import Rpc
from bench.errors import BenchError

_SERVICE = "/inference.GRPCInferenceService"
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # By default channels of one process to one address share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
# Enough that they are not what limits the load, and not so many that they take the cores from the servers.
CLIENT_PROCESSES = max(2, (os.cpu_count() or 1) // 2)
# A guard against a hang, far above what the slowest answer takes.
ANSWER_WITHIN_S = 120


@dataclass(frozen=True)
class Load:
    """What callers do until they are stopped."""

    address: str
    """host:port of a Triton or an endpoint."""
    rpc: Rpc
    request: bytes
    answer_ends_with: bytes
    """How an answer is known to be the right one."""
    callers: int


class ClientPool:
    """Context manager of the client processes."""

    def __init__(self, processes: int) -> None:
        # A fork would carry over threads and sockets of gRPC in a state of their own.
        self._context = multiprocessing.get_context("spawn")
        self._clients: list[tuple[Any, Connection]] = []
        self._busy: list[Connection] = []
        for _ in range(processes):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_obey, args=(theirs,), daemon=True)
            self._clients.append((process, ours))
            process.start()
            theirs.close()

    @property
    def pids(self) -> list[int]:
        """The pids of the processes."""
        return [process.pid for process, _ in self._clients]

    def __enter__(self) -> "ClientPool":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        for process, _ in self._clients:
            process.kill()
        for process, _ in self._clients:
            process.join()

    def start(self, load: Load) -> None:
        """Start the load; return when every caller has had an answer."""
        number = min(load.callers, len(self._clients))
        self._busy = [pipe for _, pipe in self._clients[:number]]
        for index, pipe in enumerate(self._busy):
            pipe.send(replace(load, callers=len(range(index, load.callers, number))))
        self._receive()

    def note(self, begin: float, end: float) -> None:
        """Have the answers noted that come from `begin` to `end`, by time.monotonic(); then the load ends."""
        for pipe in self._busy:
            pipe.send((begin, end))

    def latencies(self) -> list[float]:
        """Return the seconds that each noted answer took, when the last call has ended."""
        return [latency for part in self._receive() for latency in part]

    def _receive(self) -> list[list[float]]:
        answers: list[list[float]] = []
        for pipe in self._busy:
            if not pipe.poll(ANSWER_WITHIN_S):
                raise BenchError(f"a call had no answer within {ANSWER_WITHIN_S} s")
            try:
                answer = pipe.recv()
            except EOFError:
                raise BenchError("a client process has died") from None
            if isinstance(answer, str):
                raise BenchError(answer)
            answers.append(answer)
        return answers


def _obey(pipe: Connection) -> None:
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            load = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(asyncio.run(_Callers(load, pipe).run()))
        except grpc.aio.AioRpcError as error:
            details = " ".join((error.details() or "").split())
            pipe.send(f"{load.rpc} at {load.address} failed: {error.code().name}: {details}")
        except BenchError as error:
            pipe.send(str(error))


class _Callers:
    """The callers of one process, under one load."""

    def __init__(self, load: Load, pipe: Connection) -> None:
        self._load = load
        self._pipe = pipe
        self._stopping = False
        self._without_answer = load.callers
        self._all_answered = asyncio.Event()
        self._answers: list[tuple[float, float]] = []

    async def run(self) -> list[float]:
        """Call until the window that the parent gives is over; return the latencies in it."""
        async with grpc.aio.insecure_channel(self._load.address, options=_CHANNEL_OPTIONS) as channel:
            path = f"{_SERVICE}/{self._load.rpc}"
            if self._load.rpc == "ModelInfer":
                kind: Callable[[Any], Coroutine[None, None, None]] = self._request_again_and_again
                call = channel.unary_unary(path)
            else:
                kind, call = self._send_again_and_again, channel.stream_stream(path)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._load.callers):
                        group.create_task(kind(call))
                    begin, end = await self._window()
                    await asyncio.sleep(max(0.0, end - time.monotonic()))
                    self._stopping = True
            except ExceptionGroup as errors:
                # One reason is enough; the other callers mostly fail for the same.
                raise errors.exceptions[0] from None
        return [ended - began for began, ended in self._answers if begin <= ended < end]

    async def _window(self) -> tuple[float, float]:
        await self._all_answered.wait()
        self._pipe.send([])
        window: tuple[float, float] = await asyncio.to_thread(self._pipe.recv)
        return window

    async def _request_again_and_again(self, call: Any) -> None:
        request = self._load.request
        began = time.monotonic()
        self._note_first(began, await call(request))
        while not self._stopping:
            began = time.monotonic()
            self._note(began, await call(request))

    async def _send_again_and_again(self, call: Any) -> None:
        request, stream = self._load.request, call()
        began = time.monotonic()
        await stream.write(request)
        self._note_first(began, await stream.read())
        while not self._stopping:
            began = time.monotonic()
            await stream.write(request)
            self._note(began, await stream.read())
        await stream.done_writing()
        if await stream.read() is not grpc.aio.EOF:
            raise BenchError(f"{self._load.rpc} at {self._load.address} answered more than was asked")

    def _note_first(self, began: float, answer: Any) -> None:
        self._note(began, answer)
        self._without_answer -= 1
        if not self._without_answer:
            self._all_answered.set()

    def _note(self, began: float, answer: Any) -> None:
        ended = time.monotonic()
        if answer is grpc.aio.EOF or not answer.endswith(self._load.answer_ends_with):
            shown = "the end of the stream" if answer is grpc.aio.EOF else repr(answer[:100])
            raise BenchError(f"{self._load.rpc} at {self._load.address} was not answered with its tensor: {shown}")
        self._answers.append((began, ended))
