"""The backends of an application: Ray's, and what is made from it."""

import re
from dataclasses import dataclass

from triton_ingress import known, sequences
from triton_ingress.answers import Protocol
from triton_ingress.sections import Section, UnknownConfigurationError
from triton_ingress.settings import Settings

_SERVER = re.compile(
    r"server (?P<name>\S+) (?P<host>\S+):(?P<port>\d+)(?P<proto> proto h2)? check"
    r"(?P<observe> observe layer4 error-limit \d+ on-error mark-down)?(?P<backup> backup)?"
)
# A peer that has vanished without a word must not hold a request until somebody's deadline.
_KEEPALIVE = ["option srvtcpka", "srvtcpka-idle 10s", "srvtcpka-intvl 5s", "srvtcpka-cnt 3"]

# Serve would read a large body into memory, to see early whether the client leaves; the forwarder sees it.
_NOT_BUFFERED = "http-request set-header x-request-disconnect-disabled ?1"


@dataclass(frozen=True)
class Server:
    """One `server` line in the backend of an application."""

    name: str
    host: str
    port: int
    """Of the forwarder replica, or of Serve's proxy on the head."""
    proto: str
    observe: str
    backup: str

    @classmethod
    def parse(cls, line: str) -> "Server | None":
        """Return the server of a line, None if it is none of Ray's."""
        if not (found := _SERVER.fullmatch(line)):
            return None
        each = {name: value or "" for name, value in found.groupdict().items()}
        return cls(**(each | {"port": int(each["port"])}))  # type: ignore[arg-type]

    def at(self, port: int | None) -> str:
        """Return the beginning of a line that sends requests to a port, or where Ray does; a backup always there."""
        return f"server {self.name} {self.host}:{self.port if self.backup or not port else port}{self.proto}"

    def check(self, port: int | None) -> str:
        """Return the words that ask for its health, where `at` sends requests to this port.

        Health is always the replica's word, who asks Triton for his.
        """
        return f"check port {self.port}" if port and not self.backup else "check"


@dataclass(frozen=True)
class Backend:
    """An application's backend for one protocol, as Ray wrote it."""

    name: str
    protocol: Protocol
    lines: list[str]
    """All but those of the servers."""
    servers: list[Server]

    @classmethod
    def parse(cls, section: Section, protocol: Protocol) -> "Backend":
        """Take a section apart.

        Raises:
            UnknownConfigurationError: a line is not known.
        """
        servers = [server for line in section.lines if (server := Server.parse(line))]
        lines = [line for line in section.lines if not line.startswith("server ")]
        if len(servers) + len(lines) != len(section.lines):
            raise UnknownConfigurationError(f"{section.title}: a server line of another form")
        Section(section.kind, section.name, lines).check(known.BACKEND)
        return cls(section.name, protocol, lines, servers)

    @property
    def has_several(self) -> bool:
        """Whether there is more than one replica."""
        return sum(not server.backup for server in self.servers) > 1

    def sections(self, settings: Settings, errors: list[str], *, alone: bool) -> list[Section]:
        """Return the section to put in its place, and those that go with it.

        Args:
            settings: what the operator wants.
            errors: the lines that name the error files.
            alone: there is no other application; only then it is known to be Triton's.
        """
        own = [line for line in self.lines if line != "log global"] + _KEEPALIVE + errors
        unchecked = [line for line in own if not known.HEALTH_CHECK.fullmatch(line)]
        straight = settings.straight and alone
        port = _triton_port(settings, self.protocol) if straight else None
        limit = f"maxconn {settings.max_ongoing_requests}"
        to_replicas = [_NOT_BUFFERED] if self.protocol is Protocol.HTTP else []
        checked = [f"{each.at(port)} {each.check(port)} {limit}{each.observe}{each.backup}" for each in self.servers]
        result = [Section("backend", self.name, [*own, *([] if straight else to_replicas), *checked])]
        if straight:
            servers = [f"{each.at(None)} {self._tracking(each)}" for each in self.servers]
            result.append(Section("backend", f"{self.name}-forwarders", [*unchecked, *to_replicas, *servers]))
        if alone and self.has_several:
            hashed = ["balance hash var(txn.sequence)", "hash-type consistent"]
            if not straight:
                hashed += [*to_replicas, f"http-request set-header {sequences.HEADER} pinned"]
            ids = sequences.server_ids(server.name for server in self.servers)
            servers = [
                # The weight is the number of places on the hash's ring, by which the sequences are shared out.
                f"{each.at(port)} {self._tracking(each)} id {ids[each.name]} weight 100 {limit}"
                for each in self.servers
            ]
            result.append(Section("backend", f"{self.name}-sequences", [*unchecked, *hashed, *servers]))
        return result

    def _tracking(self, server: Server) -> str:
        return f"track {self.name}/{server.name}{server.backup}"


def _triton_port(settings: Settings, protocol: Protocol) -> int:
    return settings.triton_grpc_port if protocol is Protocol.GRPC else settings.triton_http_port
