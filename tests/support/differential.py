"""What a client sees of one call, in bytes, so that the same call to two servers can be compared.

What differs from one call to the next even at a lone Triton is settled in one place, the functions at the end.
"""

import hashlib
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.support.models import COUNTED
from triton_forwarder.rpc_table import RPCS, SERVICE

__all__ = [
    "Call",
    "Metadata",
    "Observation",
    "Peer",
    "Stream",
    "answer_is_compressed",
    "connected",
    "differences",
    "wait_until",
]

# A bound against a hang: every answer is due within a fraction of it.
SOON_S = 60

# Of a longer response, its digest stands for it, so that a difference can be read.
READABLE = 16384

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Metadata = Sequence[tuple[str, str | bytes]]

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # As for two clients on two machines: a connection that one call breaks is not that of the next.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Observation:
    """What a client sees of one call."""

    method: str
    """What was called."""
    code: str
    """The status code's name."""
    message: str
    """The status's words."""
    responses: tuple[bytes, ...]
    """The bytes of each response, in the order of arrival."""
    initial: tuple[tuple[str, str | bytes], ...]
    """Initial metadata, sorted."""
    trailing: tuple[tuple[str, str | bytes], ...]
    """Trailing metadata, sorted."""


def differences(expected: Sequence[Observation], seen: Sequence[Observation]) -> str:
    """Return what differs, a line for each side; nothing when nothing does."""
    if len(expected) != len(seen):
        return f"{len(expected)} calls expected, {len(seen)} seen"
    names = [field.name for field in fields(Observation)]
    pairs = [(one, other, name) for one, other in zip(expected, seen, strict=True) for name in names]
    return "\n".join(
        f"{one.method}, {name}\n  expected {getattr(one, name)!r}\n  seen     {getattr(other, name)!r}"
        for one, other, name in pairs
        if getattr(one, name) != getattr(other, name)
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds.

    Raises:
        AssertionError: it does not within SOON_S.
    """
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SOON_S} s: {what}"
        time.sleep(0.01)


class Call:
    """A call under way."""

    def __init__(self, method: str, call: Any, responses: Iterable[bytes] | None = None) -> None:
        self._method = method
        self._call = call
        self._arrived: list[bytes] = []
        self._reader = threading.Thread(target=self._read, args=(responses,), daemon=True)
        self._reader.start()

    def _read(self, responses: Iterable[bytes] | None) -> None:
        try:
            for response in [self._call.result()] if responses is None else responses:
                self._arrived.append(response)
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass  # The call itself has the status.

    def wait_for_responses(self, count: int) -> None:
        """Return when so many have arrived, or the call has ended."""
        wait_until(lambda: self.done() or len(self._arrived) >= count, f"{count} responses of {self._method}")

    def cancel(self) -> None:
        """Let the client change its mind."""
        self._call.cancel()

    def done(self) -> bool:
        """Tell whether it has ended."""
        return not self._reader.is_alive()

    def observation(self) -> Observation:
        """Wait until it ends, and return what was seen of it."""
        wait_until(self.done, f"the end of {self._method}, after {len(self._arrived)} responses")
        return _settle_reset(
            Observation(
                self._method,
                self._call.code().name,
                _settle_words(self._call.details() or ""),
                tuple(_settle(self._method, response) for response in self._arrived),
                _settle_metadata(self._call.initial_metadata()),
                _settle_metadata(self._call.trailing_metadata()),
            )
        )


class Stream(Call):
    """A bidirectional call under way: the client has not said its last word."""

    def __init__(self, method: str, stub: Callable[..., Any], requests: Iterable[bytes], **options: Any) -> None:
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        for request in requests:
            self.send(request)
        call = stub(iter(self._requests.get, None), **options)
        super().__init__(method, call, call)

    def send(self, request: bytes) -> None:
        """Send one more request."""
        self._requests.put(request)

    def close(self) -> None:
        """Half-close: no request follows."""
        self._requests.put(None)

    def observation(self) -> Observation:
        """Wait until it ends, for which most servers wait for `close`, and return what was seen of it."""
        try:
            return super().observation()
        finally:
            self.close()


class Peer:
    """A server, as its client has it: bytes go out as they are, and come in as they are."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address = address
        self._channel = channel

    def disconnect(self) -> None:
        """Break the connection, whatever is under way."""
        self._channel.close()

    def start(self, method: str, request: bytes, **options: Any) -> Call:
        """Start a unary call; arguments are those of `open`."""
        stub = self._channel.unary_unary(_path(method))
        return Call(method, stub.future(request, **({"timeout": SOON_S} | options)))

    def open(self, method: str, *requests: bytes, **options: Any) -> Stream:
        """Start a bidirectional call.

        Args:
            method: of Triton's service; with a slash in it, of any service.
            requests: the first ones.
            options: gRPC's own: metadata, timeout, compression.
        """
        return Stream(method, self._channel.stream_stream(_path(method)), requests, **({"timeout": SOON_S} | options))

    def ask(self, method: str, request: bytes, **options: Any) -> Observation:
        """Make a unary call, and return what was seen of it."""
        return self.start(method, request, **options).observation()

    def stream(self, method: str, *requests: bytes, **options: Any) -> Observation:
        """Make a bidirectional call with all its requests at once, and return what was seen of it."""
        stream = self.open(method, *requests, **options)
        stream.close()
        return stream.observation()


def _path(method: str) -> str:
    return method if "/" in method else f"/{SERVICE}/{method}"


@contextmanager
def connected(address: str) -> Iterator[Peer]:
    """Connect to a server at host:port."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        yield Peer(address, channel)


def answer_is_compressed(address: str, method: str, request: bytes) -> bool:
    """Make a unary call as a client that takes gzip, and tell whether the answer came compressed.

    gRPC's own clients do not say; the first byte of a message does. The answer must fit into one frame of 16 KiB.
    """
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _path(method),
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "gzip",
    }
    # Without Huffman code and without the table of fields: https://www.rfc-editor.org/rfc/rfc7541#section-6.2.2
    block = b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in each) for each in headers.items())
    data_frame, headers_frame, settings_frame, end_stream, end_headers = 0, 1, 4, 1, 4

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload

    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=SOON_S) as connection,
        connection.makefile("rb") as answers,
    ):
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(settings_frame, 0, 0, b"")
            + frame(headers_frame, end_headers, 1, block)
            + frame(data_frame, end_stream, 1, struct.pack(">BI", 0, len(request)) + request)
        )
        while header := answers.read(9):
            size, kind, flags, _ = struct.unpack(">IBBI", b"\0" + header)
            payload = answers.read(size)
            if kind == data_frame and payload:
                return payload[0] == 1
            assert not (kind == headers_frame and flags & end_stream), "an error instead of an answer"
    raise AssertionError("no answer before the connection was closed")


_RESPONSES = {
    rpc.name: getattr(
        service_pb2,
        service_pb2.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods_by_name[rpc.name].output_type.name,
    )
    for rpc in RPCS
}


def _settle(method: str, response: bytes) -> bytes:
    if len(response) > READABLE:
        return f"{len(response)} bytes, sha256 {hashlib.sha256(response).hexdigest()}".encode()
    if method not in _RESPONSES:
        return response
    message = _RESPONSES[method].FromString(response)
    if method == "ModelStatistics":
        _settle_statistics(message)
        return bytes(message.SerializeToString(deterministic=True))
    # A map has no order on the wire, and Triton writes it in any: the same bytes in another order are the same.
    in_order: bytes = message.SerializeToString(deterministic=True)
    return in_order if sorted(in_order) == sorted(response) else response


def _settle_words(message: str) -> str:
    # The client's own gRPC says what it noticed first, when its time was over.
    if "(Deadline Exceeded)" in message:
        return message.removeprefix("Stream removed (").removesuffix(")")
    # The server's own gRPC says how large all headers were, those of the connection among them.
    too_large = "received metadata size exceeds hard limit"
    return too_large if message.startswith(too_large) else message


def _settle_reset(seen: Observation) -> Observation:
    # When HAProxy ends a call, its reset may overtake its words.
    resets = (
        "Triton is not reachable, it may be restarting",
        "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))",
    )
    return replace(seen, message=resets[0], trailing=()) if seen.message in resets else seen


def _settle_statistics(message: Any) -> None:
    for model in message.model_stats:
        if model.name != COUNTED:
            # Its counters are those of all tests so far, of which some have cancelled their calls.
            model.CopyFrom(type(model)(name=model.name, version=model.version))
        # No server takes the same time twice.
        model.last_inference = int(model.last_inference > 0)
        each = model.inference_stats
        durations = [getattr(each, field.name) for field in each.DESCRIPTOR.fields]
        for batch in model.batch_stats:
            durations += [batch.compute_input, batch.compute_infer, batch.compute_output]
        for duration in durations:
            duration.ns = 0


def _settle_metadata(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(sorted((item.key, _settle_value(item.value)) for item in metadata or ()))


def _settle_value(value: str | bytes) -> str | bytes:
    # Drawn anew for each call.
    return "a UUID" if isinstance(value, str) and _UUID.fullmatch(value) else value
