"""Triton's answers merged for a fleet, against protobuf's own classes and a real Triton.

The states and reasons of repository indexes are those of a real Triton 2.51 in explicit mode.
"""

import contextlib
import random
import shutil
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.support import models
from tests.support.local_endpoint import running_triton
from triton_forwarder.fleet_messages import (
    LENGTH,
    VARINT,
    Counters,
    all_true,
    encode,
    fields,
    fleet_statistics,
    index_request,
    model_request,
    select,
    sequence_id,
    sum_statistics,
    union_index,
    went_back,
)

# A tritonclient older than the server has no response_stats, and a newer one not this; both are in these classes.
NEWER_FIELD = 60


def _messages_of_a_newer_triton() -> Callable[[str], Any]:
    file = descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(file)
    messages = {message.name: message for message in file.message_type}
    statistics = messages["ModelStatistics"]
    text, nested = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    one, many = (
        descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
    )
    if "InferResponseStatistics" not in messages:
        durations = file.message_type.add(name="InferResponseStatistics")
        names = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
        for number, name in enumerate(names, 1):
            type_name = ".inference.StatisticDuration"
            durations.field.add(name=name, number=number, type=nested, type_name=type_name, label=one)
        entry = statistics.nested_type.add(name="ResponseStatsEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=text, label=one)
        entry.field.add(name="value", number=2, type=nested, type_name=".inference.InferResponseStatistics", label=one)
        type_name = ".inference.ModelStatistics.ResponseStatsEntry"
        statistics.field.add(name="response_stats", number=9, type=nested, type_name=type_name, label=many)
    statistics.field.add(name="newer", number=NEWER_FIELD, type=text, label=many)
    messages["ModelStatisticsRequest"].field.add(name="newer", number=NEWER_FIELD, type=text, label=one)
    pool = descriptor_pool.DescriptorPool()
    config = descriptor_pb2.FileDescriptorProto()
    model_config_pb2.DESCRIPTOR.CopyToProto(config)
    pool.Add(config)
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))


_newer = _messages_of_a_newer_triton()
Statistics = _newer("ModelStatisticsResponse")
SEEDS = range(30)


# Random answers


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  no secret


def random_number(rng: random.Random) -> int:
    return rng.choice([0, 1, 127, 128, rng.randrange(2**20), rng.randrange(2**56)])


def randomize_durations(rng: random.Random, message: Any) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.name == "StatisticDuration" and rng.random() < 0.9:
            duration = getattr(message, field.name)
            duration.SetInParent()
            duration.count, duration.ns = random_number(rng), random_number(rng)


def random_statistics(rng: random.Random) -> Any:
    """Return a ModelStatisticsResponse of some of a few model versions, with everything Triton may say of them."""
    response = Statistics()
    versions = [(name, version) for name in ("a", "naïve", "") for version in ("1", "2", "10")]
    for name, version in rng.sample(versions, rng.randrange(len(versions))):
        model = response.model_stats.add(name=name, version=version)
        model.last_inference = random_number(rng)
        model.inference_count, model.execution_count = random_number(rng), random_number(rng)
        randomize_durations(rng, model.inference_stats)
        for size in rng.sample([0, 1, 2, 200], rng.randrange(4)):
            randomize_durations(rng, model.batch_stats.add(batch_size=size))
        for kind, device in rng.sample([("GPU", 0), ("GPU", 1), ("CPU", 0), ("GPU", -1)], rng.randrange(4)):
            model.memory_usage.add(type=kind, id=device, byte_size=random_number(rng))
        for key in rng.sample(["", "0", "1", "final"], rng.randrange(4)):
            randomize_durations(rng, model.response_stats[key])
    return response


def entry_for(entries: Any, like: Any, *names: str) -> Any:
    key = {name: getattr(like, name) for name in names}
    for entry in entries:
        if all(getattr(entry, name) == value for name, value in key.items()):
            return entry
    return entries.add(**key)


def add_durations(into: Any, more: Any) -> None:
    for field, duration in more.ListFields():
        if field.message_type is not None:
            total = getattr(into, field.name)
            total.SetInParent()
            total.count += duration.count
            total.ns += duration.ns


def expected_sum(responses: Iterable[Any]) -> Any:
    total = Statistics()
    for response in responses:
        for model in response.model_stats:
            into = entry_for(total.model_stats, model, "name", "version")
            into.last_inference = max(into.last_inference, model.last_inference)
            into.inference_count += model.inference_count
            into.execution_count += model.execution_count
            into.inference_stats.SetInParent()
            add_durations(into.inference_stats, model.inference_stats)
            for batch in model.batch_stats:
                add_durations(entry_for(into.batch_stats, batch, "batch_size"), batch)
            for memory in model.memory_usage:
                entry_for(into.memory_usage, memory, "type", "id").byte_size += memory.byte_size
            for key, stats in model.response_stats.items():
                add_durations(into.response_stats[key], stats)
    return total


def serialized(messages: Iterable[Any]) -> list[bytes]:
    return [message.SerializeToString(deterministic=True) for message in messages]


# The codec


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_taken_apart_and_put_together_is_the_same(seed: int) -> None:
    """What the forwarder does not change must reach the client as Triton wrote it."""
    message = random_statistics(seeded(seed)).SerializeToString()
    assert b"".join(field.raw for field in fields(message)) == message
    for entry in (field.payload for field in fields(message)):
        assert all(field.wire_type in (VARINT, LENGTH) for field in fields(entry))
        again = [encode(f.number, f.varint if f.wire_type == VARINT else f.payload) for f in fields(entry)]
        assert b"".join(again) == entry


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_numbers_are_those_of_protobuf(value: int) -> None:
    """A figure of a Triton that has run for months needs all 64 bits."""
    written = service_pb2.InferParameter(uint64_param=value).SerializeToString()
    assert encode(5, value) == written
    assert [field.varint for field in fields(written)] == [value]
    beyond = written[:1] + b"\xff" * 9 + b"\x7f"
    assert [field.varint for field in fields(beyond)] == [service_pb2.InferParameter.FromString(beyond).uint64_param]


def test_fields_of_fixed_size_are_stepped_over() -> None:
    """A parameter of a request may be a floating-point number."""
    written = service_pb2.InferParameter(double_param=1.5).SerializeToString() + b"\x3d\x01\x02\x03\x04" + encode(1, 1)
    assert [(field.number, len(field.payload)) for field in fields(written)] == [(4, 8), (7, 4), (1, 1)]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (b"\x0a", "ends within a number at byte 1"),
        (b"\x08\x80", "ends within a number at byte 2"),
        (b"\x0a\x05ab", "field 1 at byte 0 is cut off"),
        (b"\x08\x01\x11\x00", "field 2 at byte 2 is cut off"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "field 1 at byte 0 is cut off"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "a number of more than 10 bytes"),
        (b"\x00\x01", "field number 0 at byte 0"),
        (b"\xff\xff\xff\xff\xff\x01", "wire type 7"),
        (b"\xf8\xff\xff\xff\x7f\x00", "field number 4294967295"),
        (b"\x0b\x0c", "wire type 3 at byte 0"),
    ],
)
def test_bytes_that_are_no_message_are_refused_in_one_line(message: bytes, fault: str) -> None:
    """They come from a client: no endless loop, no stack trace of an index."""
    with pytest.raises(ValueError, match=f"not a protobuf message: .*{fault}") as error:
        list(fields(message))
    assert "\n" not in str(error.value)


def _damaged(rng: random.Random, message: bytes) -> Iterator[bytes]:
    for _ in range(40):
        damaged = bytearray(message[: rng.randrange(len(message) + 1)])
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield bytes(damaged)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_bytes_are_read_or_refused_and_nothing_else(seed: int) -> None:
    """Any other error would be a bug's stack trace in the operator's log, at a client's will."""
    rng = seeded(seed)
    index = service_pb2.RepositoryIndexResponse()
    index.models.add(name="a", version="1", state="READY")
    index.models.add(name="b", version="2", state="UNAVAILABLE", reason="unloaded")
    request = service_pb2.ModelInferRequest(model_name="a", raw_input_contents=[b"1234"])
    request.parameters["sequence_id"].string_param = "first"
    statistics = random_statistics(rng).SerializeToString()
    calls: list[tuple[Callable[[bytes], Any], bytes]] = [
        (lambda damaged: sum_statistics([statistics, damaged]), statistics),
        (lambda damaged: went_back(statistics, damaged), statistics),
        (lambda damaged: fleet_statistics([Counters().seen(statistics).seen(damaged)]), statistics),
        (lambda damaged: select(damaged, "a", "1"), statistics),
        (lambda damaged: union_index([index.SerializeToString(), damaged]), index.SerializeToString()),
        (lambda damaged: all_true([damaged]), b"\x08\x01"),
        (model_request, service_pb2.ModelStatisticsRequest(name="naïve", version="1").SerializeToString()),
        (index_request, service_pb2.RepositoryIndexRequest(repository_name="a", ready=True).SerializeToString()),
        (sequence_id, request.SerializeToString()),
    ]
    for call, message in calls:
        for damaged in _damaged(rng, message):
            with contextlib.suppress(ValueError):
                call(damaged)


# Sums


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fleet_has_counted_what_its_servers_have(seed: int) -> None:
    """A client that subtracts two readings would see the load of one server, and a different one each time."""
    rng = seeded(seed)
    responses = [random_statistics(rng) for _ in range(rng.randrange(5))]
    merged = sum_statistics(serialized(responses))
    assert Statistics.FromString(merged) == expected_sum(responses)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_of_a_single_server_is_left_as_it_is(seed: int) -> None:
    """One replica is to answer as a lone Triton, to the byte."""
    (response,) = serialized([random_statistics(seeded(seed))])
    assert sum_statistics([response]) == response
    assert sum_statistics([b"", response]) == response


def test_what_a_newer_triton_says_is_kept_once() -> None:
    """Two values of unknown meaning must be neither added up nor lost, nor fill the answer."""
    old, first, second = Statistics(), Statistics(), Statistics()
    for response, newer in ((old, []), (first, ["x", "y"]), (second, ["z"])):
        response.model_stats.add(name="a", version="1", inference_count=2, newer=newer)
    merged = Statistics.FromString(sum_statistics(serialized([old, first, second])))
    (model,) = merged.model_stats
    assert (model.inference_count, list(model.newer)) == (6, ["x", "y"])


@pytest.mark.parametrize("changed", [encode(4, "2"), encode(6, 2), encode(6, encode(1, 2))])
def test_a_field_of_another_type_than_ever_is_kept_as_it_came(changed: bytes) -> None:
    """It would be read as a figure that nobody wrote."""
    response = encode(1, encode(1, "a") + encode(2, "1") + changed)
    assert sum_statistics([response]) == response
    assert not went_back(response, response)


def test_a_key_may_be_written_or_left_out_when_it_is_empty() -> None:
    """Protobuf libraries differ in this for maps; the same entry must not appear twice."""
    value = encode(2, encode(3, encode(1, 1)))
    entries = [encode(1, encode(9, encode(1, b"") + value)), encode(1, encode(9, value))]
    (model,) = Statistics.FromString(sum_statistics(entries)).model_stats
    assert {key: stats.success.count for key, stats in model.response_stats.items()} == {"": 2}


# Restarts


def counted(counts: dict[str, int]) -> bytes:
    """Return the answer of a server whose models have done so many inferences; those with None are not loaded."""
    response = Statistics()
    for name, count in counts.items():
        model = response.model_stats.add(name=name, version="1", inference_count=count, execution_count=count)
        model.memory_usage.add(type="GPU", id=0, byte_size=1000)
        for duration in (
            model.inference_stats.success,
            model.inference_stats.cache_miss,
            model.batch_stats.add(batch_size=1).compute_infer,
            model.batch_stats.add(batch_size=8).compute_output,
            model.response_stats["0"].success,
        ):
            duration.count = duration.ns = count
    return bytes(response.SerializeToString())


def counters_of(model: Any) -> list[tuple[Any, str]]:
    durations = [
        duration
        for message in (model.inference_stats, *model.batch_stats, *model.response_stats.values())
        for field, duration in message.ListFields()
        if field.message_type is not None
    ]
    numbers = [(duration, name) for duration in durations for name in ("count", "ns")]
    return [(model, "inference_count"), (model, "execution_count"), *numbers]


@pytest.mark.parametrize("at", range(12))
def test_a_single_smaller_counter_shows_a_restart(at: int) -> None:
    """A Triton that was restarted may have caught up in all figures but one by the next look."""
    before, now = counted({"a": 10}), Statistics.FromString(counted({"a": 11}))
    counters = counters_of(now.model_stats[0])
    assert len(counters) == 12
    assert not went_back(before, now.SerializeToString())
    setattr(*counters[at], 9)
    assert went_back(before, now.SerializeToString())


def test_only_counters_go_back() -> None:
    """Memory that was freed, a clock that was set, and models that come and go unused are no restart."""
    before = Statistics.FromString(counted({"a": 10}))
    before.model_stats[0].last_inference = 1000
    now = Statistics.FromString(before.SerializeToString())
    now.model_stats[0].last_inference = 900
    now.model_stats[0].memory_usage[0].byte_size = 1
    assert not went_back(*serialized([before, now]))
    assert not went_back(b"", counted({"a": 10}))
    assert not went_back(counted({"a": 0, "b": 10}), counted({"b": 10}))
    assert went_back(counted({"a": 1, "b": 10}), counted({"b": 10}))
    assert went_back(counted({"a": 1}), b"")


def test_a_model_that_is_loaded_again_retires_its_own_figures_alone() -> None:
    """With all or nothing, one reload would count every other model twice."""
    counters = Counters().seen(counted({"a": 10, "b": 20})).seen(counted({"a": 3, "b": 21})).seen(counted({"a": 4}))
    assert figures(counters.total()) == {"a": {14}, "b": {21}}
    assert figures(counters.seen(counted({"a": 4, "b": 1})).total()) == {"a": {14}, "b": {22}}


def test_an_end_that_is_told_counts_though_no_figure_is_smaller() -> None:
    """A Triton that was restarted and at once busier than before would lose all that it did before."""
    counters = Counters().seen(counted({"a": 10}))
    assert figures(counters.seen(counted({"a": 20})).total()) == {"a": {20}}
    assert figures(counters.ended().seen(counted({"a": 20})).total()) == {"a": {30}}
    assert figures(counters.ended().ended().total()) == {"a": {10}}


def test_memory_of_a_life_that_is_over_is_not_counted() -> None:
    """The sum would otherwise grow with each restart beyond what the fleet has."""
    counters = Counters().seen(counted({"a": 10})).seen(counted({"a": 1}))
    (model,) = Statistics.FromString(counters.total()).model_stats
    assert [memory.byte_size for memory in model.memory_usage] == [1000]
    (model,) = Statistics.FromString(counters.ended().total()).model_stats
    assert not model.memory_usage


def test_the_fleet_lists_what_is_loaded_somewhere_in_the_order_of_triton() -> None:
    """A lone Triton lists neither an unloaded model nor version 10 before version 9; the figures are not forgotten."""
    first, second, gone = Statistics(), Statistics(), Statistics()
    for response, loaded in ((first, "10 9"), (second, "2 9"), (gone, "9 7")):
        for version in loaded.split():
            response.model_stats.add(name="a", version=version, inference_count=1)
    second.model_stats.add(name="B", version="1", inference_count=1)
    servers = [Counters().seen(message) for message in serialized([first, second, gone])]
    answer = Statistics.FromString(fleet_statistics([servers[0], servers[1], servers[2].ended()]))
    listed = [(model.name, model.version, model.inference_count) for model in answer.model_stats]
    assert listed == [("B", "1", 1), ("a", "2", 1), ("a", "9", 3), ("a", "10", 1)]
    assert fleet_statistics([server.ended() for server in servers]) == fleet_statistics([]) == b""


def figures(response: bytes) -> dict[str, set[int]]:
    """Return the different figures of each model: one, where nothing was lost or counted twice."""
    found = {}
    for model in Statistics.FromString(response).model_stats:
        found[model.name] = {getattr(message, name) for message, name in counters_of(model)}
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("watched", [True, False], ids=["each end is seen", "ends are seen by chance"])
def test_sums_never_go_back_whatever_ends(seed: int, watched: bool) -> None:
    """Clients subtract two readings: a sum that went back is a negative rate, one too large a load that never was."""
    rng = seeded(seed)
    tritons: list[dict[str, int]] = [{}, {}, {}]
    servers = [Counters() for _ in tritons]
    truth: Counter[str] = Counter()
    reached: dict[str, int] = {}

    def look(at: int) -> None:
        servers[at] = servers[at].seen(counted(tritons[at]))
        for model, found in figures(fleet_statistics(servers)).items():
            (figure,) = found
            assert reached.get(model, 0) <= figure <= truth[model]
            reached[model] = figure

    for _ in range(60):
        at, model = rng.randrange(len(tritons)), rng.choice("ab")
        event = rng.choice(["infer", "infer", "infer", "load", "unload", "restart", "look"])
        end = event in ("unload", "restart")
        if event == "look" or (end and watched):
            look(at)
        if event == "infer" and model in tritons[at]:
            more = rng.randrange(5)
            tritons[at][model] += more
            truth[model] += more
        elif event == "load":
            tritons[at].setdefault(model, 0)
        elif event == "unload":
            tritons[at].pop(model, None)
        elif event == "restart":
            tritons[at] = dict.fromkeys(tritons[at], 0)
        if end and watched:
            look(at)
    if watched:
        for at in range(len(tritons)):
            look(at)
        assert figures(fleet_statistics(servers)) == {
            model: {truth[model]} for triton in tritons for model in sorted(triton)
        }


# Indexes


def index(*models: tuple[str, str, str, str]) -> bytes:
    """Return a RepositoryIndexResponse of (name, version, state, reason)."""
    response = service_pb2.RepositoryIndexResponse()
    for name, version, state, reason in models:
        response.models.add(name=name, version=version, state=state, reason=reason)
    return bytes(response.SerializeToString())


def listed(response: bytes) -> list[tuple[str, str, str, str]]:
    parsed = service_pb2.RepositoryIndexResponse.FromString(response)
    return [(model.name, model.version, model.state, model.reason) for model in parsed.models]


READY = ("a", "1", "READY", "")
LOADING = ("a", "1", "LOADING", "")
UNLOADING = ("a", "1", "UNLOADING", "")
UNLOADED = ("a", "1", "UNAVAILABLE", "unloaded")
BROKEN = ("a", "1", "UNAVAILABLE", "Internal: ValueError: no weights")
NEVER_LOADED = ("a", "", "", "")
NEW_STATE = ("a", "1", "PAUSED", "by hand")


@pytest.mark.parametrize(
    ("replicas", "merged"),
    [
        ([[READY]], READY),
        ([[READY], [READY], [READY]], READY),
        ([[READY], [LOADING], [READY]], ("a", "1", "LOADING", "READY on 2 of 3 replicas")),
        ([[LOADING], [READY]], ("a", "1", "LOADING", "READY on 1 of 2 replicas")),
        ([[READY], [LOADING], [UNLOADING]], ("a", "1", "UNLOADING", "READY on 1 of 3 replicas")),
        ([[READY], [UNLOADED]], ("a", "1", "UNAVAILABLE", "READY on 1 of 2 replicas: unloaded")),
        (
            [[LOADING], [BROKEN]],
            ("a", "1", "UNAVAILABLE", "READY on 0 of 2 replicas: Internal: ValueError: no weights"),
        ),
        ([[READY], [NEVER_LOADED], []], ("a", "1", "UNAVAILABLE", "READY on 1 of 3 replicas")),
        ([[READY], [], [UNLOADED]], ("a", "1", "UNAVAILABLE", "READY on 1 of 3 replicas: unloaded")),
        ([[NEVER_LOADED], [UNLOADED]], UNLOADED),
        ([[UNLOADED], [BROKEN]], UNLOADED),
        ([[NEVER_LOADED], [NEVER_LOADED]], NEVER_LOADED),
        ([[], [NEVER_LOADED]], NEVER_LOADED),
        ([[NEW_STATE], [NEW_STATE]], NEW_STATE),
        ([[READY], [NEW_STATE], [UNLOADED]], ("a", "1", "PAUSED", "READY on 1 of 3 replicas: by hand")),
    ],
)
def test_a_model_is_ready_when_it_is_on_all_replicas(
    replicas: list[list[tuple[str, str, str, str]]], merged: tuple[str, str, str, str]
) -> None:
    """A client that starts when the index says READY would otherwise have a part of its requests refused."""
    answers = [index(*replica) for replica in replicas]
    assert listed(union_index(answers)) == [merged]
    assert listed(union_index(answers, ready_only=True)) == ([merged] if merged[2] == "READY" else [])


def test_the_index_has_what_any_replica_lists_in_the_order_of_triton() -> None:
    """CMSSW takes the models' names from the index at its start."""
    first = index(("Z", "2", "READY", ""), ("Z", "10", "READY", ""), ("a", "1", "READY", ""), ("é", "", "", ""))
    second = index(("B", "1", "READY", ""), ("Z", "9", "READY", ""), ("a", "", "", ""), ("~", "", "", ""))
    names = [(name, version) for name, version, _, _ in listed(union_index([first, second]))]
    assert names == [("B", "1"), ("Z", "2"), ("Z", "9"), ("Z", "10"), ("a", "1"), ("~", ""), ("é", "")]
    assert union_index([]) == union_index([b"", b""]) == b""


def test_what_a_newer_triton_says_in_an_index_is_kept() -> None:
    """A client of that version would miss it, whether replicas agree or not."""
    newer = encode(60, "x")
    ready = encode(1, index(READY)[2:] + newer)
    assert union_index([ready, index(READY)]) == ready
    (entry,) = (field.payload for field in fields(union_index([ready, index(LOADING)])))
    assert newer in entry
    assert listed(encode(1, entry)) == [("a", "1", "LOADING", "READY on 1 of 2 replicas")]


# Small answers and requests


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([True], True),
        ([True, True], True),
        ([True, False], False),
        ([False, True], False),
        ([False], False),
        ([], False),
    ],
)
def test_the_fleet_is_ready_when_all_are(answers: list[bool], expected: bool) -> None:
    """A model that one replica would refuse is not ready, nor is a fleet without replicas."""
    responses = serialized(service_pb2.ModelReadyResponse(ready=answer) for answer in answers)
    assert service_pb2.ModelReadyResponse.FromString(all_true(responses)).ready == expected


@pytest.mark.parametrize(("name", "version"), [("a", "1"), ("naïve", ""), ("", "2"), ("", ""), ("x" * 300, "10")])
def test_name_and_version_of_a_request_are_found(name: str, version: str) -> None:
    """The figures of another model would be answered."""
    request = _newer("ModelStatisticsRequest")(name=name, version=version, newer="x")
    assert model_request(request.SerializeToString()) == (name, version)
    # As protobuf has it, the last one counts.
    assert model_request(encode(2, "7") + encode(1, "b") + request.SerializeToString()) == (name or "b", version or "7")


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("repository", ["", "/models"])
def test_a_request_for_an_index_is_understood(repository: str, ready: bool) -> None:
    """The models that are not ready would be listed, or the others left out."""
    request = service_pb2.RepositoryIndexRequest(repository_name=repository, ready=ready)
    assert index_request(request.SerializeToString()) == (repository, ready)


def infer_request(**parameters: Any) -> Any:
    """Return a ModelInferRequest with parameters given as (name of the type, value)."""
    request = service_pb2.ModelInferRequest(model_name="sequence", id="sequence_id")
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1])
    request.raw_input_contents.append(b"\0\0\0\0")
    for key, (kind, value) in parameters.items():
        setattr(request.parameters[key], kind, value)
    return request


# (the parameter's type, its value, the sequence's id or None)
SEQUENCE_IDS = [
    ("int64_param", 5, "5"),
    ("int64_param", -1, "18446744073709551615"),
    ("int64_param", 0, None),
    ("string_param", "frame-7", "frame-7"),
    ("string_param", "0", "0"),
    ("string_param", "x" * 128, "x" * 128),
    ("string_param", "naïve", "naïve"),
    ("string_param", "", None),
    ("string_param", "frame\0-7", "frame"),
    ("string_param", "\0", None),
]


@pytest.mark.parametrize(
    ("kind", "value", "expected"), [*SEQUENCE_IDS, ("uint64_param", 7, "7"), ("bool_param", True, None)]
)
def test_the_id_of_a_sequence_is_found_among_the_parameters(kind: str, value: Any, expected: str | None) -> None:
    """The requests of one sequence would go to several replicas, which do not know it."""
    start = ("bool_param", True)
    request = infer_request(
        sequence_start=start, sequence_id=(kind, value), sequence_end=start, a=("string_param", "b")
    )
    assert sequence_id(request.SerializeToString()) == expected
    # Long enough for the other way to look.
    request.raw_input_contents.append(bytes(100_000))
    assert sequence_id(request.SerializeToString()) == expected


def test_a_request_without_the_parameter_belongs_to_no_sequence() -> None:
    """A name, an id or a tensor with these letters would tie requests to one replica."""
    request = infer_request(a=("string_param", "sequence_id"))
    request.inputs[0].parameters["sequence_id"].string_param = "no"
    request.raw_input_contents.append(b"sequence_id" + encode(4, encode(1, "sequence_id") + encode(2, encode(3, "no"))))
    assert sequence_id(request.SerializeToString()) is None
    assert sequence_id(b"") is None


def test_the_id_is_found_wherever_its_parameter_stands() -> None:
    """Protobuf sets no order of fields; the last of two parameters with one name counts."""
    tensors = infer_request(sequence_id=("string_param", "first")).SerializeToString()
    last = service_pb2.ModelInferRequest()
    last.parameters["sequence_id"].int64_param = 2
    swapped = encode(4, encode(2, encode(1, 1) + encode(3, "swapped")) + encode(1, "sequence_id"))
    for more, expected in ((last.SerializeToString(), "2"), (swapped, "swapped"), (b"", "first")):
        parsed = service_pb2.ModelInferRequest.FromString(tensors + more).parameters["sequence_id"]
        assert str(getattr(parsed, parsed.WhichOneof("parameter_choice"))) == expected
        assert sequence_id(tensors + more) == expected


def test_tensors_are_not_copied_in_search_of_a_sequence() -> None:
    """Every request passes here: one more copy of its tensors would cost more than all the rest."""
    request = infer_request(sequence_id=("int64_param", 5))
    request.raw_input_contents.append(bytes(16_000_000))
    message = request.SerializeToString()
    tracemalloc.start()
    try:
        assert sequence_id(message) == "5"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# A real Triton


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    models.write_protocol_models(folder)
    shutil.copytree(folder / "identity_fp32", folder / "sequence")
    for version in ("2", "10"):
        shutil.copytree(folder / "sequence/1", folder / "sequence" / version)
    with (folder / "sequence/config.pbtxt").open("a") as config:
        config.write("sequence_batching { }\nversion_policy: { all { } }\n")
    return folder


def figures_of_requests(response: bytes) -> dict[str, set[int]]:
    """Return the different counts of a real Triton's requests for each model."""
    return {
        model.name: {
            model.inference_count,
            model.execution_count,
            model.inference_stats.success.count,
            *(batch.compute_infer.count for batch in model.batch_stats),
        }
        for model in Statistics.FromString(response).model_stats
    }


class RefusedError(Exception):
    """What Triton says of a request that is at fault."""


class Triton:
    """Calls to one that runs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, rpc: str, request: Any) -> bytes:
        """Return the answer as bytes.

        Raises:
            RefusedError: Triton says that the request is at fault, with its words.
        """
        method = self._channel.unary_unary(f"/inference.GRPCInferenceService/{rpc}")
        try:
            answer: bytes = method(request.SerializeToString(), timeout=60)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            raise RefusedError(error.details()) from None
        return answer

    def infer(self, model: str, times: int) -> None:
        """Let a model answer so many requests."""
        for _ in range(times):
            request = infer_request()
            request.model_name = model
            self.call("ModelInfer", request)

    def statistics(self, model: str, count: int) -> bytes:
        """Return the statistics of all models, when the last of so many requests is counted: after its answer."""
        deadline = time.monotonic() + 60
        while True:
            answer = self.call("ModelStatistics", service_pb2.ModelStatisticsRequest())
            if figures_of_requests(answer)[model] == {count}:
                return answer
            assert time.monotonic() < deadline, f"{model} has not counted {count}"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Triton]:
    with running_triton(repository) as running, grpc.insecure_channel(running.address) as channel:
        yield Triton(channel)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *[("", ""), ("", "2"), ("sequence", ""), ("patient", ""), ("patient", "1")],
        *[("sequence", version) for version in ("1", "2", "10", "02", " 2", "+2", "2x", "0", "3", "0x2")],
        *[("sequence", version) for version in ("x", "-1", "- 1", "२", "9" * 20)],
        *[("nobody", ""), ("nobody", "1"), ("Patient", "")],
    ],
)
def test_the_choice_of_models_is_that_of_the_real_triton(triton: Triton, name: str, version: str) -> None:
    """perf_analyzer stops when a named version has not exactly one entry."""
    everything = triton.call("ModelStatistics", service_pb2.ModelStatisticsRequest())
    try:
        expected = triton.call("ModelStatistics", service_pb2.ModelStatisticsRequest(name=name, version=version))
    except RefusedError:
        expected = b""
    assert select(everything, name, version) == expected


def test_the_answers_of_equal_tritons_are_that_of_one(triton: Triton) -> None:
    """What a client sees must not change with the number of replicas, but for the sums."""
    triton.infer("patient", 3)
    statistics = triton.statistics("patient", 3)
    assert sum_statistics([statistics]) == fleet_statistics([Counters().seen(statistics)]) == statistics
    twice = Statistics.FromString(sum_statistics([statistics, statistics]))
    assert twice == expected_sum([Statistics.FromString(statistics)] * 2)
    assert figures_of_requests(twice.SerializeToString())["patient"] == {6}
    for ready in (False, True):
        answer = triton.call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=ready))
        assert ("sequence", "10", "READY", "") in listed(answer)
        assert union_index([answer] * 3, ready_only=ready) == answer
    answer = triton.call("ModelReady", service_pb2.ModelReadyRequest(name="sequence"))
    assert all_true([answer] * 3) == answer
    not_ready = triton.call("ModelReady", service_pb2.ModelReadyRequest(name="nobody"))
    assert all_true([answer, not_ready]) == not_ready


@pytest.mark.parametrize(("kind", "value", "expected"), [(None, None, None), *SEQUENCE_IDS])
def test_the_real_triton_sees_a_sequence_where_the_fleet_does(
    triton: Triton, kind: str | None, value: Any, expected: str | None
) -> None:
    """A request that Triton takes for one of a sequence must be bound to a replica, and no other."""
    start_and_end = {"sequence_start": ("bool_param", True), "sequence_end": ("bool_param", True)}
    request = infer_request(**start_and_end, **({"sequence_id": (kind, value)} if kind else {}))
    if expected is None:
        with pytest.raises(RefusedError, match="must specify a non-zero or non-empty correlation ID"):
            triton.call("ModelInfer", request)
    else:
        triton.call("ModelInfer", request)
    assert sequence_id(request.SerializeToString()) == expected


def test_text_ends_at_a_nul_for_the_real_triton_too(triton: Triton) -> None:
    """Two texts that are one sequence to Triton must go to the same replica."""
    ids = [("string_param", "tile"), ("string_param", "tile\0-7")]
    start, end = ("bool_param", True), ("bool_param", True)
    requests = [
        infer_request(sequence_start=start, sequence_id=ids[0]),
        infer_request(sequence_end=end, sequence_id=ids[1]),
    ]
    for request in requests:
        # Without a START of its own the second would be refused if it were another sequence.
        triton.call("ModelInfer", request)
    assert {sequence_id(request.SerializeToString()) for request in requests} == {"tile"}


def test_the_figures_of_a_real_triton_outlive_its_restart(repository: Path, tmp_path: Path) -> None:
    """A worker whose Triton crashed would take its past load out of the fleet's sum."""
    for model in ("busy", "other"):
        shutil.copytree(repository / "identity_fp32", tmp_path / model)
    counters = Counters()
    for times in (4, 2):
        with running_triton(tmp_path) as running, grpc.insecure_channel(running.address) as channel:
            triton = Triton(channel)
            for model in ("other", "busy"):
                triton.infer(model, times)
                counters = counters.seen(triton.statistics(model, times))
    assert figures_of_requests(fleet_statistics([counters])) == {"busy": {6}, "other": {6}}
