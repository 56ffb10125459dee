"""Triton's answers of several servers, merged into the answer of one fleet.

Messages are bytes, as everywhere in the forwarder, and a table says of each field that is merged what it means; a
field that a table does not know, of a newer Triton, is kept as it came. Whatever is no protobuf message is a
ValueError. Wire format: https://protobuf.dev/programming-guides/encoding
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

__all__ = [
    "Counters",
    "Field",
    "all_true",
    "encode",
    "fields",
    "fleet_statistics",
    "index_request",
    "model_request",
    "select",
    "sequence_id",
    "sum_statistics",
    "union_index",
    "went_back",
]

# Wire types; the two that begin and end a group are of protobuf's past and not read here.
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
_UINT64 = 2**64 - 1


class Field(NamedTuple):
    """One field of a message, by its place: nothing of a tensor is copied until it is asked for."""

    number: int
    wire_type: int
    varint: int
    """Its value, if the wire type is VARINT; a negative one as 2^64 less, as it is on the wire."""
    message: bytes
    start: int
    payload_start: int
    end: int

    @property
    def payload(self) -> bytes:
        """What it carries: of LENGTH the string, bytes or message."""
        return self.message[self.payload_start : self.end]

    @property
    def raw(self) -> bytes:
        """The whole field, to be written again as it is."""
        return self.message[self.start : self.end]


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a protobuf message in the order in which they come.

    Raises:
        ValueError: the bytes are not a message; raised when the fault is reached.
    """
    start = 0
    while start < len(message):
        tag, at = _read_varint(message, start)
        number, wire_type, varint = tag >> 3, tag & 7, 0
        if wire_type == VARINT:
            varint, end = _read_varint(message, at)
        elif wire_type == LENGTH:
            length, at = _read_varint(message, at)
            end = at + length
        elif wire_type in _FIXED_SIZES:
            end = at + _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"not a protobuf message: wire type {wire_type} at byte {start}")
        if not 0 < number < 2**29:
            raise ValueError(f"not a protobuf message: field number {number} at byte {start}")
        if end > len(message):
            raise ValueError(f"not a protobuf message: field {number} at byte {start} is cut off")
        yield Field(number, wire_type, varint, message, start, at, end)
        start = end


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at == len(message):
            raise ValueError(f"not a protobuf message: it ends within a number at byte {at}")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, at
    raise ValueError(f"not a protobuf message: a number of more than 10 bytes before byte {at}")


def encode(number: int, value: int | bytes | str) -> bytes:
    """Return one field: an integer as VARINT (modulo 2^64), text and bytes as LENGTH."""
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value & _UINT64)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | LENGTH) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _texts(message: bytes, *numbers: int) -> list[str]:
    found = {field.number: field for field in fields(message) if field.number in numbers and field.wire_type == LENGTH}
    return [found[number].payload.decode() if number in found else "" for number in numbers]


def _name_and_version(message: bytes) -> tuple[str, str]:
    # Fields 1 and 2 in all of Triton's messages that have them, but for ModelInfer.
    name, version = _texts(message, 1, 2)
    return name, version


def _triton_order(model: tuple[str, str]) -> tuple[bytes, int]:
    # Triton lists models by the bytes of their names, and 10 after 9; one that was never loaded has no version.
    name, version = model
    return name.encode(), int(version or 0)


class _Kind(Enum):
    KEY = auto()
    """Tells entries of a list or map apart."""
    COUNTER = auto()
    """Grows as long as the server lives; the fleet has the sum."""
    GAUGE = auto()
    """Of the moment; the fleet has the sum."""
    LATEST = auto()
    """A time; the fleet has the latest."""


_Schema: TypeAlias = "dict[int, _Kind | _Schema]"

# ModelStatisticsResponse of Triton's grpc_service.proto. A message without a key is there once.
_DURATION: _Schema = {1: _Kind.COUNTER, 2: _Kind.COUNTER}
_MODEL: _Schema = {
    1: _Kind.KEY,
    2: _Kind.KEY,
    3: _Kind.LATEST,
    4: _Kind.COUNTER,
    5: _Kind.COUNTER,
    # inference_stats
    6: dict.fromkeys(range(1, 9), _DURATION),
    # batch_stats
    7: {1: _Kind.KEY} | dict.fromkeys(range(2, 5), _DURATION),
    # memory_usage
    8: {1: _Kind.KEY, 2: _Kind.KEY, 3: _Kind.GAUGE},
    # response_stats
    9: {1: _Kind.KEY, 2: dict.fromkeys(range(1, 7), _DURATION)},
}
_MEMORY_USAGE = 8


def _meaning(schema: _Schema, field: Field) -> "_Kind | _Schema | None":
    meaning = schema.get(field.number)
    expected = LENGTH if isinstance(meaning, dict) else VARINT
    return meaning if meaning is _Kind.KEY or field.wire_type == expected else None


def _key(schema: _Schema, message: bytes) -> frozenset[tuple[int, int | bytes]]:
    keys = [field for field in fields(message) if schema.get(field.number) is _Kind.KEY]
    values = [(field.number, field.varint if field.wire_type == VARINT else field.payload) for field in keys]
    # Left out is as good as zero or empty.
    return frozenset((number, value) for number, value in values if value)


def _merge(schema: _Schema, messages: Iterable[bytes]) -> bytes:
    numbers: dict[int, int] = {}
    entries: dict[int, tuple[_Schema, dict[object, list[bytes]]]] = {}
    kept: dict[int, bytes] = {}
    first: dict[int, int] = {}
    for index, message in enumerate(messages):
        for field in fields(message):
            number, meaning = field.number, _meaning(schema, field)
            if isinstance(meaning, dict):
                _, by_key = entries.setdefault(number, (meaning, {}))
                by_key.setdefault(_key(meaning, field.payload), []).append(field.payload)
            elif meaning is _Kind.LATEST:
                numbers[number] = max(numbers.get(number, 0), field.varint)
            elif meaning in (_Kind.COUNTER, _Kind.GAUGE):
                numbers[number] = numbers.get(number, 0) + field.varint
            elif first.setdefault(number, index) == index:
                # A key, the same in all of them, or unknown: two such values cannot be made into one.
                kept[number] = kept.get(number, b"") + field.raw
    written = {number: encode(number, value) for number, value in numbers.items() if value}
    for number, (schema_of_entry, by_key) in entries.items():
        written[number] = b"".join(encode(number, _merge(schema_of_entry, same)) for same in by_key.values())
    # In the order of protobuf itself, so that one server's answer stays what it is to the byte.
    return b"".join(data for _, data in sorted((kept | written).items()))


def sum_statistics(responses: Iterable[bytes]) -> bytes:
    """Return the ModelStatisticsResponse of all servers: sums for each model version, in order of first appearance.

    The time of the last inference is the latest. A field that is not known here is that of the first server that has
    it.
    """
    return _merge({1: _MODEL}, responses)


def _statistics_by_model(response: bytes) -> dict[tuple[str, str], bytes]:
    return {_name_and_version(field.payload): field.payload for field in fields(response) if field.number == 1}


def _counters(schema: _Schema, message: bytes, *path: object) -> Iterator[tuple[tuple[object, ...], int]]:
    for field in fields(message):
        meaning = _meaning(schema, field)
        if isinstance(meaning, dict):
            yield from _counters(meaning, field.payload, *path, field.number, _key(meaning, field.payload))
        elif meaning is _Kind.COUNTER:
            yield (*path, field.number), field.varint


def _ended_lives(before: bytes, now: bytes) -> list[bytes]:
    """Return the entries of `before` whose counters began again at 0."""
    present = _statistics_by_model(now)
    ended = []
    for model, entry in _statistics_by_model(before).items():
        counters = dict(_counters(_MODEL, present.get(model, b"")))
        if any(counters.get(path, 0) < count for path, count in _counters(_MODEL, entry)):
            ended.append(entry)
    return ended


def went_back(before: bytes, now: bytes) -> bool:
    """Tell whether counters of one server began again at 0 between two of its ModelStatisticsResponses.

    They do when Triton is restarted or the model is unloaded: a counter is smaller, or a model version that had
    counted something is gone.
    """
    return bool(_ended_lives(before, now))


@dataclass(frozen=True)
class Counters:
    """What one server has counted over all its lives, so that a fleet's sums never go back.

    A life is that of one model version in one Triton. One that ends unseen, and whose successor has counted more by
    the next look, cannot be told from one that went on: its figures are lost then, but no sum goes back. Whoever knows
    that a Triton has ended says so with `ended`. Answers must come in the order in which Triton gave them: an older one
    would look like the start of a new life, and be counted twice.
    """

    retired: bytes = b""
    """ModelStatisticsResponse: sums of the lives that are over."""
    last: bytes = b""
    """The server's last ModelStatisticsResponse about all its models; empty when it has gone."""

    def seen(self, response: bytes) -> "Counters":
        """Return the counters after the server has answered with this ModelStatisticsResponse about all models."""
        over = [
            # Memory was given back when the life ended.
            encode(1, b"".join(field.raw for field in fields(entry) if field.number != _MEMORY_USAGE))
            for entry in _ended_lives(self.last, response)
        ]
        return Counters(sum_statistics([self.retired, *over]) if over else self.retired, response)

    def ended(self) -> "Counters":
        """Return the counters after the server has gone, or was restarted."""
        return self.seen(b"")

    def total(self) -> bytes:
        """Return the ModelStatisticsResponse over all lives, with the models that are no longer loaded."""
        return sum_statistics([self.last, self.retired])


def fleet_statistics(servers: Iterable[Counters]) -> bytes:
    """Return the fleet's ModelStatisticsResponse about all models, from its servers of today and of the past.

    As one Triton does, it lists only what is loaded, by name and version: what at least one server has listed last.
    """
    servers = list(servers)
    loaded = {model for server in servers for model in _statistics_by_model(server.last)}
    total = _statistics_by_model(
        sum_statistics([server.last for server in servers] + [server.retired for server in servers])
    )
    return b"".join(encode(1, total[model]) for model in sorted(loaded, key=_triton_order))


def select(response: bytes, name: str, version: str) -> bytes:
    """Return what a ModelStatisticsRequest with this name and version asks for; empty is all.

    Nothing, where Triton refuses a name or a version: its own words come only from a Triton. It reads a version as C
    does, "01" is 1, and ignores one without a name.
    """
    if not name:
        return response
    asked = re.match(r"\s*\+?0*(\d+)", version, re.ASCII)
    return b"".join(
        encode(1, entry)
        for model, entry in _statistics_by_model(response).items()
        if model[0] == name and (not version or (asked and asked[1] == model[1]))
    )


# The states of Triton's repository index, from least to most ready.
_STATES = ("UNKNOWN", "UNAVAILABLE", "UNLOADING", "LOADING", "READY")


def union_index(responses: Iterable[bytes], *, ready_only: bool = False) -> bytes:
    """Return the RepositoryIndexResponse of a fleet: what any of its replicas lists, in Triton's order.

    A model version is READY when it is on all replicas. Where they differ it has the state of the least ready one, and
    the reason says on how many it is READY.

    Args:
        responses: one of each replica.
        ready_only: leave out what is not READY, as Triton does for a request with `ready`.
    """
    replicas = [
        {_name_and_version(field.payload): field.payload for field in fields(response) if field.number == 1}
        for response in responses
    ]
    # A Triton lists a model that it has never loaded without versions and state. Of no interest where others have.
    with_versions = {name for replica in replicas for name, version in replica if version}
    models = {model for replica in replicas for model in replica if model[1] or model[0] not in with_versions}
    merged = []
    for model in sorted(models, key=_triton_order):
        listed = [replica[model] for replica in replicas if model in replica]
        states = [_state(entry) for entry in listed]
        if model[1] and len(listed) < len(replicas):
            states.append(("UNAVAILABLE", ""))
        state, reason = min(states, key=_readiness)
        entry = listed[0]
        if any(other != state for other, _ in states):
            ready = sum(other == "READY" for other, _ in states)
            reason = f"READY on {ready} of {len(replicas)} replicas" + (f": {reason}" if reason else "")
            others = b"".join(field.raw for field in fields(entry) if field.number not in (3, 4))
            entry = others + encode(3, state) + encode(4, reason)
        if state == "READY" or not ready_only:
            merged.append(encode(1, entry))
    return b"".join(merged)


def _state(entry: bytes) -> tuple[str, str]:
    state, reason = _texts(entry, 3, 4)
    return state, reason


def _readiness(state: tuple[str, str]) -> int:
    return _STATES.index(state[0]) if state[0] in _STATES else -1


def all_true(responses: Iterable[bytes]) -> bytes:
    """Return a response with `bool ready = 1`, or `live`: true if there are any and it is true in all of them."""
    answers = [{field.number: field.varint for field in fields(response)}.get(1) for response in responses]
    return encode(1, True) if answers and all(answers) else b""


def model_request(request: bytes) -> tuple[str, str]:
    """Return name and version of a ModelStatisticsRequest or ModelReadyRequest; empty is not given."""
    return _name_and_version(request)


def index_request(request: bytes) -> tuple[str, bool]:
    """Return repository_name and ready of a RepositoryIndexRequest."""
    (repository,) = _texts(request, 1)
    return repository, bool({field.number: field.varint for field in fields(request)}.get(2))


def sequence_id(request: bytes) -> str | None:
    """Return the `sequence_id` parameter of a ModelInferRequest as text, None if it belongs to no sequence.

    To Triton 0 and "" are no sequence, and text ends at a NUL; 5 and "5" are two sequences with the same text here.
    """
    # Above some size the way over the fields, past the tensors, is shorter than the search through them.
    if len(request) < 10_000 and b"sequence_id" not in request:
        return None
    found = ""
    for parameter in fields(request):
        if parameter.number == 4 and parameter.wire_type == LENGTH:
            key, value = b"", ""
            for part in fields(parameter.payload):
                if part.number == 1:
                    key = part.payload
                elif part.number == 2 and part.wire_type == LENGTH:
                    value = _sequence(part.payload)
            found = value if key == b"sequence_id" else found
    return found or None


def _sequence(parameter: bytes) -> str:
    """Return the id in an InferParameter; empty for none and for a type that Triton refuses."""
    found = ""
    for choice in fields(parameter):
        if choice.number in (2, 5):
            found = str(choice.varint or "")
        else:
            found = choice.payload.decode().partition("\0")[0] if choice.number == 3 else ""
    return found
