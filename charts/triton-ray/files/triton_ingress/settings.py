"""What the operator may set about the ingress, read from one environment variable as JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

VARIABLE = "TRITON_INGRESS"

# Those that need nothing secret to be verified.
JWT_ALGORITHMS = tuple(f"{kind}{bits}" for kind in ("RS", "ES", "PS") for bits in (256, 384, 512))

_FILES = ("tls_certificate", "client_ca", "token_file", "jwt_public_key")
# Nothing that HAProxy's configuration would read as more than a part of a word.
_FILE = re.compile(r"/[A-Za-z0-9._/-]+")
_HOST = re.compile(r"[A-Za-z0-9.-]+|\[?[0-9a-fA-F:]+\]?")
_WORD = re.compile(r"[!#-&(-\[\]-~]+")


# Twice of it is still a number to HAProxy.
_LARGEST = 10**9


@dataclass(frozen=True)
class Settings:
    """One HAProxy's part of the endpoint; the same on every pod."""

    straight: bool = True
    """Send inference straight to Triton (`ingress: direct`), not through the forwarder (`ingress: replica`)."""
    triton_grpc_port: int = 8001
    """Triton's gRPC port, on the address of the replica beside it."""
    triton_http_port: int = 8100
    """Triton's HTTP port, on the same address."""
    max_ongoing_requests: int = 1000
    """Inference requests of each protocol in flight on one Triton, above which callers get RESOURCE_EXHAUSTED."""

    bind_host: str = ""
    """Address on which HAProxy listens, its statistics and metrics included; empty: as Ray Serve has it."""

    # What follows guards the ports for clients, and is off until it is set; see access.py for what it can do.
    tls_certificate: str = ""
    """PEM file with the server's certificate, the chain to its CA, and its key: the gRPC port speaks TLS only."""
    client_ca: str = ""
    """PEM file with CA certificates: a client must have a certificate of one of them."""
    tls_http_port: int = 0
    """Port for HTTP with TLS; without one, `tls_certificate` leaves nothing but the health check of HTTP."""
    token_file: str = ""
    """File with one token a line: a client must send one of them (authorization: Bearer TOKEN)."""
    jwt_public_key: str = ""
    """PEM file with a public key: a client must send a JWT (authorization: Bearer JWT) signed with its private key."""
    jwt_algorithm: str = ""
    """The JWT's algorithm, as RS256 or ES256."""
    jwt_issuer: str = ""
    """The JWT must have this `iss`."""
    jwt_audience: str = ""
    """The JWT must have this `aud`, or have it among the first ten of a list."""
    max_unary_request_bytes: int = 0
    """Size of an HTTP request's body, and of a unary gRPC request's message as it is sent; streams have no limit."""
    requests_per_second_per_client: int = 0
    """Requests a second from one address, on all its connections; a stream is one request."""
    connections_per_client: int = 0
    """Connections from one address, above which requests on further ones get RESOURCE_EXHAUSTED."""

    @property
    def restricts(self) -> bool:
        """Whether the ports must not be open without this program's rules."""
        return bool(
            self.tls_certificate
            or self.token_file
            or self.jwt_public_key
            or self.max_unary_request_bytes
            or self.requests_per_second_per_client
            or self.connections_per_client
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Read the settings.

        Raises:
            ValueError: no JSON object, an unknown key, or a value that cannot be; the message names it.
        """
        text = environment.get(VARIABLE, "{}")
        try:
            given: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{VARIABLE} is {text!r}, but must be a JSON object: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(  # noqa: TRY004  it was text
                f"{VARIABLE} is {text!r}, but must be a JSON object"
            )
        types = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in types:
                raise ValueError(f"{VARIABLE}: unknown setting {name!r}; known are {', '.join(types)}")
            if type(value) is not types[name]:
                raise ValueError(f"{VARIABLE}: {name} is {value!r}, but must be a {types[name].__name__}")
        settings = cls(**given)
        for name in given:
            if fault := settings._fault(name):
                raise ValueError(f"{VARIABLE}: {name} is {getattr(settings, name)!r}, {fault}")
        return settings

    def _fault(self, name: str) -> str:
        """Return what is wrong with one setting, if anything is."""
        value = getattr(self, name)
        if name.endswith("_port") and not (0 if name == "tls_http_port" else 1) <= value <= 65535:
            return "but must be a port"
        if name == "max_ongoing_requests" and value < 1:
            return "but must be at least 1"
        if type(value) is int and value < 0:
            return "but must not be below 0, which is off"
        if type(value) is int and value > _LARGEST:
            return f"but must not be above {_LARGEST}"
        if not value:
            return ""
        if name == "bind_host" and not _HOST.fullmatch(value):
            return "but must be an IP address or a host's name"
        if name in _FILES and not _FILE.fullmatch(value):
            return "but must be an absolute path of letters, digits and ._-/"
        if name in _FILES and not Path(value).is_file():
            return "but there is no such file"
        if name in ("client_ca", "tls_http_port") and not self.tls_certificate:
            return "but needs tls_certificate"
        if name == "jwt_public_key" and self.token_file:
            return "but there is a token_file too, and a request has only one authorization"
        if name == "jwt_public_key" and not self.jwt_algorithm:
            return "but needs jwt_algorithm"
        if name in ("jwt_algorithm", "jwt_issuer", "jwt_audience") and not self.jwt_public_key:
            return "but needs jwt_public_key"
        if name == "jwt_algorithm" and value not in JWT_ALGORITHMS:
            return f"but must be one of {', '.join(JWT_ALGORITHMS)}"
        if name in ("jwt_issuer", "jwt_audience") and not _WORD.fullmatch(value):
            return "but must be of visible ASCII characters without quotes and backslashes"
        return ""
