"""Open connections, against the kernel's own table with real sockets."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_forwarder.connections import connections_to

# Of an IPv4 socket, of one that takes both kinds, as gRPC's do, and of an IPv6 one.
FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1"), (socket.AF_INET6, "::")]


@contextlib.contextmanager
def listening(family: socket.AddressFamily, host: str, port: int = 0) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((host, port))
        server.listen()
        yield server


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_connections_count_as_long_as_they_are_open(family: socket.AddressFamily, host: str) -> None:
    """A replica that ends too early takes requests along, one that ends too late a GPU that is paid for."""
    with listening(family, host) as server:
        port = server.getsockname()[1]
        assert connections_to("127.0.0.1", [port]) == 0
        with socket.create_connection(("127.0.0.1", port)) as first:
            with socket.create_connection(("127.0.0.1", port)):
                accepted = [server.accept()[0], server.accept()[0]]
                assert connections_to("127.0.0.1", [port]) == 2
                assert connections_to("127.0.0.1", [1, port]) == 2
                assert connections_to("127.0.0.1", [port + 1]) == 0
            # Its client has gone; there is no one to answer.
            assert connections_to("127.0.0.1", [port]) == 1
            first.sendall(b"x")
            assert connections_to("127.0.0.1", [port]) == 1
        assert connections_to("127.0.0.1", [port]) == 0
        for connection in accepted:
            connection.close()


def test_only_connections_to_the_own_triton_count() -> None:
    """On one machine several Tritons have the same port, each on an address of its own."""
    with listening(socket.AF_INET, "127.0.0.2") as server:
        port = server.getsockname()[1]
        with listening(socket.AF_INET, "127.0.0.3", port) as other:
            with socket.create_connection(("127.0.0.3", port)), socket.create_connection(("127.0.0.2", port)):
                accepted = [server.accept()[0], other.accept()[0]]
                assert connections_to("127.0.0.2", [port]) == 1
                assert connections_to("127.0.0.4", [port]) == 0
            for connection in accepted:
                connection.close()


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def test_a_machine_without_ipv6_has_no_such_table(tmp_path: Path) -> None:
    """Its kernel was started without; the drain must not fail there."""
    # 10.1.2.3:8001, listening and with a connection; and one that is closing.
    (tmp_path / "tcp").write_text(
        HEADER
        + "   0: 0302010A:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0\n"
        + "   1: 0302010A:1F41 0502010A:D431 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4\n"
        + "   2: 0302010A:1F41 0502010A:D432 06 00000000:00000000 00:00000000 00000000     0        0 0 3 0\n"
    )
    assert connections_to("10.1.2.3", [8001], tables=tmp_path) == 1
