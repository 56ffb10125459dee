"""Calls of Triton's gRPC service with bytes for messages."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from triton_forwarder.rpc_table import RPCS, SERVICE, Rpc

# Triton serves the standard health protocol too: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
HEALTH_SERVICE = "grpc.health.v1.Health"
HEALTH_RPCS = (Rpc("Check", "unary_unary", "replica"), Rpc("Watch", "unary_stream", "replica"))
SERVICES: dict[str, tuple[Rpc, ...]] = {SERVICE: RPCS, HEALTH_SERVICE: HEALTH_RPCS}

CHANNEL_OPTIONS = (
    # gRPC's own limit of 4 MiB is less than one batch of images.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Triton is in the same cluster: never by way of a proxy that the pod's environment names.
    ("grpc.enable_http_proxy", 0),
    # A Triton that comes back after a crash is found within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A new connection does not wait for what another one to the same Triton waits for.
    ("grpc.use_local_subchannel_pool", 1),
)

UNREACHABLE = "Triton is not reachable, it may be restarting"

# ServerReadyResponse and its like with `bool ready = 1`; false is no byte at all.
TRUE = b"\x08\x01"

# How gRPC's own words about a failed connection name the other side.
_LOCAL_ADDRESS = re.compile(r"\b(ipv4:|ipv6:|unix:|dns:|resolving )")


class TritonChannel:
    """A connection to one Triton, with a stub for each of its RPCs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.restarts = 0
        """How often Triton was seen to be gone, while `watch` runs."""
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stubs: dict[str, Callable[..., Any]] = {
            rpc.name: getattr(self._channel, rpc.kind)(f"/{service}/{rpc.name}")
            for service, rpcs in SERVICES.items()
            for rpc in rpcs
        }

    @property
    def is_down(self) -> bool:
        """Whether the last attempt to connect has failed, and no other has succeeded since."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    def unary(self, rpc: str, request: bytes, *, timeout: float) -> Awaitable[bytes]:
        """Call a unary RPC; fails with grpc.aio.AioRpcError."""
        answer: Awaitable[bytes] = self.stubs[rpc](request, timeout=timeout)
        return answer

    async def watch(self) -> None:
        """Keep the connection up, and count in `restarts`; runs until it is cancelled.

        A Triton that ends refuses connections for a second at least. One that only closes a connection, as it does
        when that has become too old, takes the next.
        """
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self.restarts += 1
            await self._channel.wait_for_state_change(state)

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close the connection, after `grace_s` even if calls are under way; those are cancelled."""
        await self._channel.close(grace_s)


def is_unreachable(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether the words are not Triton's but those of the connection to it, with addresses of the pod in them."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and bool(_LOCAL_ADDRESS.search(error.details() or ""))
