"""Who is still connected to Triton, as the kernel knows it."""

import socket
from collections.abc import Collection
from pathlib import Path

_ESTABLISHED = "01"


def connections_to(host: str, ports: Collection[int], *, tables: Path = Path("/proc/net")) -> int:
    """Return the number of open TCP connections to these ports, on `host` or 127.0.0.1.

    Triton has no figure for the requests that it works on. But HAProxy, once a server is off its list, keeps
    connections to it for just as long as requests are in flight on them.
    """
    own = {host, "127.0.0.1"}
    count = 0
    for table in ("tcp", "tcp6"):
        path = tables / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            local, _, state = line.split()[1:4]
            address, _, port = local.partition(":")
            if state == _ESTABLISHED and int(port, 16) in ports and _ipv4(address) in own:
                count += 1
    return count


def _ipv4(address: str) -> str:
    # Words of the machine's byte order; of an IPv6 address the last one, where one of IPv4 is mapped into it.
    return socket.inet_ntoa(bytes.fromhex(address[-8:])[::-1])
