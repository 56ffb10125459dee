"""All requests of a sequence to one replica, although each comes by itself and to any HAProxy of the endpoint.

With several replicas the id that a request carries is hashed onto them. Every HAProxy finds the same replica by it, no
table has to be shared, and when a replica comes or goes, only the sequences that belong to it move: their models then
say that they do not know the sequence. A stream needs none of this, it stays where it began.

The id stands in the request's body. HAProxy waits for its beginning, and looks for parameters where they stand in it;
only when there are any, `sequence.lua` reads them. What HAProxy cannot read (compressed, or the parameters are further
back than its buffer) goes to the forwarder, which can. A message whose parameters come after its tensors is not found
out: protobuf allows it, no library writes it.
"""

import zlib
from collections.abc import Iterable
from pathlib import Path

from triton_ingress.answers import Protocol

LUA = Path(__file__).with_name("sequence.lua")

# Told to the forwarder, which refuses a sequence that nobody has given a replica.
HEADER = "triton-ingress-sequence"

_UNARY = "/inference.GRPCInferenceService/ModelInfer"
# The first frame of an ordinary client's message.
_BEGINNING = 16384
# HAProxy's consistent hash looks at the lowest 20 bits of a server's id.
_IDS = 2**20


def rules(protocol: Protocol) -> list[str]:
    """Return the lines that set txn.sequence: to `+` and the id, to `?` if it cannot be read, or not at all.

    For HTTP they need an ACL `infer`.
    """
    if protocol is Protocol.HTTP:
        return [
            "http-request wait-for-body time 30s if METH_POST infer",
            "http-request lua.http_sequence if METH_POST infer",
        ]
    message = "req.body,bytes(5),protobuf"
    return [
        f"acl unary path {_UNARY}",
        f"http-request wait-for-body time 30s at-least {_BEGINNING} if unary",
        "acl compressed req.body,bytes(0,1) -m bin 01",
        f"acl has_parameters {message}(4) -m found",
        # Inputs come after the parameters: where the first one is seen, there are none.
        f"acl has_inputs {message}(5) -m found",
        f"acl is_long req.body_len ge {_BEGINNING}",
        "http-request lua.grpc_sequence if unary compressed || unary has_parameters || unary is_long !has_inputs",
    ]


def routes(backend: str, unread: str, condition: str = "") -> list[str]:
    """Return the `use_backend` lines for what has been read, and for what could not be."""
    return [
        f"use_backend {backend}-sequences if {condition}{{ var(txn.sequence) -m beg + }}",
        *([f"use_backend {unread} if {condition}{{ var(txn.sequence) -m found }}"] if unread != backend else []),
    ]


def server_ids(names: Iterable[str]) -> dict[str, int]:
    """Return a number for each server that depends on its name, and not on who its neighbours are."""
    ids: dict[str, int] = {}
    for name in sorted(names):
        number = zlib.crc32(name.encode()) % _IDS
        while not number or number in ids.values():
            number = (number + 1) % _IDS
        ids[name] = number
    return ids
