"""Steady load on an endpoint, with every request counted."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass(frozen=True)
class Failure:
    """One request that failed."""

    at: float
    """time.monotonic() when it had failed."""
    code: grpc.StatusCode
    details: str


@dataclass
class Load:
    """What the callers have seen so far."""

    succeeded: int = 0
    failures: list[Failure] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait_for_more(self, count: int, *, within_s: float = 60) -> None:
        """Return when `count` more requests have succeeded."""
        wanted, deadline = self.succeeded + count, time.monotonic() + within_s
        while self.succeeded < wanted:
            assert time.monotonic() < deadline, f"no {count} requests succeeded within {within_s} s: {self.failures}"
            time.sleep(0.05)


def _request(model: str) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    return request


@contextmanager
def steady_load(address: str, *, unary: int, streams: int, model: str = "identity_fp32") -> Iterator[Load]:
    """Send requests one after the other until the end of the block.

    Args:
        address: host:port.
        unary: callers of ModelInfer, each on a channel of its own.
        streams: callers that open a ModelStreamInfer for each three messages.
        model: with an INPUT and an OUTPUT of one FP32.
    """
    load, lock, request = Load(), threading.Lock(), _request(model)

    def once(stub: service_pb2_grpc.GRPCInferenceServiceStub, streaming: bool) -> None:
        if streaming:
            answers = list(stub.ModelStreamInfer(iter([request] * 3), timeout=30))
            assert len(answers) == 3
            assert not any(answer.error_message for answer in answers), answers
        else:
            stub.ModelInfer(request, timeout=30)

    def call(index: int) -> None:
        streaming = index >= unary
        # The callers' own subchannels, as those of different programs.
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not load.ended.is_set():
                try:
                    once(stub, streaming)
                except grpc.RpcError as error:
                    with lock:
                        load.failures.append(Failure(time.monotonic(), error.code(), error.details()))
                    time.sleep(0.02)
                else:
                    with lock:
                        load.succeeded += 1

    callers = [threading.Thread(target=call, args=(index,)) for index in range(unary + streams)]
    for caller in callers:
        caller.start()
    try:
        load.wait_for_more(20 * len(callers))
        yield load
    finally:
        load.ended.set()
        for caller in callers:
            caller.join(60)
