"""What is kept of the changes that clients make, against the requests of tritonclient."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from triton_forwarder.wishes import (
    LOAD,
    UNLOAD,
    Wish,
    about,
    only_reads,
    with_control,
    with_settings,
    with_unload,
)

TRACE, LOG = "TraceSetting", "LogSettings"


def control(number: int, rpc: str, model: str, **parameters: str) -> Wish:
    kind = {LOAD: service_pb2.RepositoryModelLoadRequest, UNLOAD: service_pb2.RepositoryModelUnloadRequest}[rpc]
    request = kind(model_name=model)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return Wish(number, rpc, model, request.SerializeToString())


def trace(number: int, model: str = "", /, **settings: list[str]) -> Wish:
    request = service_pb2.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        request.settings[name].value.extend(value)
        request.settings[name].SetInParent()
    return Wish(number, TRACE, model, request.SerializeToString())


def trace_response(*names: str) -> bytes:
    response = service_pb2.TraceSettingResponse()
    for name in names:
        response.settings[name].value.append("x")
    return bytes(response.SerializeToString())


KNOWN = trace_response("trace_rate", "trace_level")


def index(*models: str) -> bytes:
    response = service_pb2.RepositoryIndexResponse()
    for name in models:
        response.models.add(name=name)
    return bytes(response.SerializeToString())


def told(wishes: tuple[Wish, ...]) -> list[tuple[str, str]]:
    return [(wish.rpc, wish.about) for wish in wishes]


def trace_settings(wish: Wish) -> dict[str, list[str]]:
    request = service_pb2.TraceSettingRequest.FromString(wish.request)
    return {name: list(value.value) for name, value in request.settings.items()}


@pytest.mark.parametrize(
    ("rpc", "request_", "expected"),
    [
        (LOAD, service_pb2.RepositoryModelLoadRequest(repository_name="r", model_name="naïve"), "naïve"),
        (UNLOAD, service_pb2.RepositoryModelUnloadRequest(model_name="m"), "m"),
        (TRACE, service_pb2.TraceSettingRequest(model_name="m"), "m"),
        (TRACE, service_pb2.TraceSettingRequest(), ""),
        (LOG, service_pb2.LogSettingsRequest(), ""),
    ],
)
def test_what_a_change_is_about_is_read_from_its_own_field(rpc: str, request_: Any, expected: str) -> None:
    """Load and unload have the name of the repository before that of the model."""
    assert about(rpc, request_.SerializeToString()) == expected


def test_only_a_request_without_settings_reads() -> None:
    """A read that is taken for a write would be sent to all, and be repeated for ever; a write for a read, to one."""
    verbose = service_pb2.LogSettingsRequest()
    verbose.settings["log_verbose_level"].uint32_param = 1
    assert only_reads(trace(1, "m"))
    assert only_reads(Wish(1, LOG, "", b""))
    assert not only_reads(trace(1, trace_rate=["1"]))
    # Without a value, it sets the setting back.
    assert not only_reads(trace(1, "m", trace_rate=[]))
    assert not only_reads(Wish(1, LOG, "", verbose.SerializeToString()))
    assert not only_reads(control(1, LOAD, "m"))


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x12\x02\xff\xfe", b"\x0a\x02\x0a\x7f"])
def test_bytes_that_are_no_request_are_told_before_anything_is_changed(message: bytes) -> None:
    """A change that is made and then cannot be remembered is lost with the next replica."""
    with pytest.raises(ValueError, match=r"protobuf|codec"):
        assert only_reads(Wish(1, TRACE, about(TRACE, message), message))


def test_of_one_model_only_the_last_load_or_unload_is_kept() -> None:
    """A client that loads a model every minute would make the start of a replica longer and longer."""
    wishes: tuple[Wish, ...] = ()
    for number in range(0, 100, 2):
        wishes = with_control(wishes, control(number, LOAD, "a", config=str(number)))
        wishes = with_control(wishes, control(number + 1, LOAD, "b"))
    assert [(wish.number, wish.about) for wish in wishes] == [(98, "a"), (99, "b")]
    assert (
        service_pb2.RepositoryModelLoadRequest.FromString(wishes[0].request).parameters["config"].string_param == "98"
    )
    wishes = with_unload(wishes, control(100, UNLOAD, "a"), index("a", "b"))
    assert told(wishes) == [(LOAD, "b"), (UNLOAD, "a")]
    assert told(with_control(wishes, control(101, LOAD, "a"))) == [(LOAD, "b"), (LOAD, "a")]


def test_nothing_is_kept_of_a_name_that_is_in_no_repository() -> None:
    """Triton unloads what it does not know without a word: whoever may unload could fill the memory of all replicas."""
    wishes = with_control((), control(1, LOAD, "b"))
    for number in range(2, 50):
        wishes = with_unload(wishes, control(number, UNLOAD, f"made up {number}"), index("a", "b"))
    assert told(wishes) == [(LOAD, "b")]
    # Nor of a model that had come with its load, as a file.
    wishes = with_control(wishes, control(50, LOAD, "made"))
    wishes = with_settings(wishes, trace(51, "made", trace_rate=["1"]), KNOWN)
    assert told(with_unload(wishes, control(52, UNLOAD, "made"), index("a", "b"))) == [(LOAD, "b")]


def test_settings_are_merged_by_their_names() -> None:
    """Each client sets another one: a new Triton must get them all, and the last value of each."""
    wishes = with_settings((), trace(1, trace_rate=["1"]), KNOWN)
    wishes = with_settings(wishes, trace(2, "m", trace_rate=["5"]), KNOWN)
    wishes = with_settings(wishes, trace(3, trace_level=["TENSORS", "TIMESTAMPS"], trace_rate=["2"]), KNOWN)
    wishes = with_settings(wishes, trace(4, trace_rate=[]), KNOWN)
    assert [(wish.number, wish.about) for wish in wishes] == [(2, "m"), (4, "")]
    assert trace_settings(wishes[0]) == {"trace_rate": ["5"]}
    assert service_pb2.TraceSettingRequest.FromString(wishes[0].request).model_name == "m"
    assert trace_settings(wishes[1]) == {"trace_level": ["TENSORS", "TIMESTAMPS"], "trace_rate": []}


def test_only_settings_that_triton_knows_are_kept() -> None:
    """Triton takes any name: whoever may set one could fill the memory of all replicas."""
    wishes = with_settings((), trace(1, trace_rate=["1"]), KNOWN)
    for number in range(2, 50):
        wishes = with_settings(wishes, trace(number, **{f"made up {number}": ["x"]}), KNOWN)
    assert [trace_settings(wish) for wish in wishes] == [{"trace_rate": ["1"]}]
    assert with_settings((), trace(1, nonsense=["x"]), KNOWN) == ()


def test_settings_come_after_what_they_are_about() -> None:
    """Triton refuses those of a model that it has not loaded."""
    wishes = with_control((), control(1, LOAD, "m"))
    wishes = with_settings(wishes, trace(2, "m", trace_rate=["5"]), KNOWN)
    wishes = with_control(wishes, control(3, LOAD, "m"))
    wishes = with_control(wishes, control(4, LOAD, "n"))
    assert told(wishes) == [(LOAD, "m"), (LOAD, "n"), (TRACE, "m")]
    # They outlive the unload, as in Triton.
    wishes = with_unload(wishes, control(5, UNLOAD, "m"), index("m", "n"))
    assert told(wishes) == [(LOAD, "n"), (UNLOAD, "m"), (TRACE, "m")]


@pytest.mark.parametrize("seed", range(10))
def test_a_new_triton_comes_to_the_state_of_the_old_ones(seed: int) -> None:
    """Whatever was done in whatever order: what was left out must have been of no effect any more."""
    rng = random.Random(seed)  # noqa: S311  no secret
    old = _State()
    wishes: tuple[Wish, ...] = ()
    for number in range(1, 60):
        model = rng.choice("abc")
        change: Callable[[], Wish] = rng.choice(
            [
                lambda: control(number, LOAD, model, config=str(number)),  # noqa: B023  called at once
                lambda: control(number, UNLOAD, model),  # noqa: B023
                lambda: trace(number, "", **{rng.choice(["trace_rate", "trace_level"]): [str(number)]}),  # noqa: B023
            ]
        )
        wish = change()
        old.take(wish)
        if wish.rpc == TRACE:
            wishes = with_settings(wishes, wish, KNOWN)
        elif wish.rpc == UNLOAD:
            wishes = with_unload(wishes, wish, index("a", "b", "c"))
        else:
            wishes = with_control(wishes, wish)
    new = _State()
    for wish in wishes:
        new.take(wish)
    assert (new.loaded, new.settings) == (old.loaded, old.settings)
    assert len(wishes) <= 4


class _State:
    def __init__(self) -> None:
        self.loaded: dict[str, bytes] = {}
        self.settings: dict[str, list[str]] = {}

    def take(self, wish: Wish) -> None:
        """Do as a Triton would."""
        if wish.rpc == LOAD:
            self.loaded[wish.about] = wish.request
        elif wish.rpc == UNLOAD:
            self.loaded.pop(wish.about, None)
        else:
            self.settings |= trace_settings(wish)
