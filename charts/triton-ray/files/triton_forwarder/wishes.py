"""The changes that clients have made to all Tritons, kept so that a new Triton gets them too.

They stay few: of what later changes make of no effect, nothing is kept. What an ensemble has brought with it, and has
left behind when it was unloaded, is not known here.
"""

from collections.abc import Iterable
from typing import NamedTuple

from triton_forwarder.fleet_messages import LENGTH, fields

LOAD, UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"
SETTINGS = ("TraceSetting", "LogSettings")
CHANGES = (LOAD, UNLOAD, *SETTINGS)


class Wish(NamedTuple):
    """One change."""

    number: int
    """Of the change; a later one has a higher number."""
    rpc: str
    about: str
    """Name of a model; empty for the whole server."""
    request: bytes


def about(rpc: str, request: bytes) -> str:
    """Return the name of the model that a request to change something is about.

    Raises:
        ValueError: the bytes are not such a request.
    """
    # Field 2 in the three that have it.
    names = [field.payload for field in fields(request) if field.number == 2 and rpc != "LogSettings"]
    return names[-1].decode() if names else ""


def only_reads(wish: Wish) -> bool:
    """Tell whether a request leaves everything as it is: one about settings without any.

    Raises:
        ValueError: the bytes are not such a request.
    """
    return wish.rpc in SETTINGS and not _by_key(wish.request)


def with_control(wishes: tuple[Wish, ...], wish: Wish) -> tuple[Wish, ...]:
    """Return the wishes after a model was loaded or unloaded."""
    others = [each for each in wishes if each.rpc not in (LOAD, UNLOAD) or each.about != wish.about]
    return _in_order([*others, wish])


def with_unload(wishes: tuple[Wish, ...], wish: Wish, index: bytes) -> tuple[Wish, ...]:
    """Return the wishes after a model was unloaded; `index` is a RepositoryIndexResponse from after it.

    Triton takes any name. Of one that is not in the repository, nothing has to be undone on a new Triton.
    """
    known = {part.payload for model in fields(index) for part in fields(model.payload) if part.number == 1}
    if wish.about.encode() not in known:
        return tuple(each for each in wishes if each.about != wish.about)
    return with_control(wishes, wish)


def with_settings(wishes: tuple[Wish, ...], wish: Wish, response: bytes) -> tuple[Wish, ...]:
    """Return the wishes after settings were written; `response` is Triton's.

    Triton takes any key; in the response are those that it knows.
    """
    same = [each for each in wishes if (each.rpc, each.about) == (wish.rpc, wish.about)]
    known = _by_key(response)
    merged: dict[bytes, bytes] = {}
    for each in [*same, wish]:
        merged |= {key: raw for key, raw in _by_key(each.request).items() if key in known}
    others = [each for each in wishes if each not in same]
    if not merged:
        return _in_order(others)
    rest = b"".join(field.raw for field in fields(wish.request) if field.number != 1)
    return _in_order([*others, wish._replace(request=b"".join(merged.values()) + rest)])


def _in_order(wishes: Iterable[Wish]) -> tuple[Wish, ...]:
    # Settings of a model are refused until it is loaded.
    return tuple(sorted(wishes, key=lambda each: (each.rpc in SETTINGS, each.number)))


def _by_key(message: bytes) -> dict[bytes, bytes]:
    # Requests and responses alike have the map of settings as field 1.
    entries = [field for field in fields(message) if field.number == 1 and field.wire_type == LENGTH]
    return {_key(entry.payload): entry.raw for entry in entries}


def _key(entry: bytes) -> bytes:
    return b"".join(field.payload for field in fields(entry) if field.number == 1)
