"""Who may use the two ports for clients, and how much: TLS, tokens, sizes and rates. All of it is off by default.

Health checks stay open to everybody: `/-/healthz` on the HTTP port, and on the gRPC port `grpc.health.v1.Health` and
Serve's own `Healthz`. KubeRay asks for the first one without TLS, in the readiness probe that it gives its pods and in
the operator, which by the answer tells the pods that shall get requests. So with `tls_certificate` the plain HTTP port
stays, and answers nothing else; HTTP with TLS is on a port of its own.

What it cannot do:

- The pods' other ports stay as they are (replicas, Triton, Ray, HAProxy's statistics); what closes them is a
  NetworkPolicy.
- Limits are each HAProxy's own, there is one in each pod, and they begin anew when it is reloaded.
- A client is an address: all behind one gateway, or one Service with `externalTrafficPolicy: Cluster`, are one client.
- Certificates, keys and tokens are read when HAProxy starts, and that is when the replicas change; a new one is sure to
  take effect with a new pod.
- The size of a compressed message is that on the way; Triton unpacks it.
- The messages of a stream have no limit: HAProxy passes them on without looking at them. (A filter in Lua could count
  them, but that of HAProxy 2.8 cannot read a body that comes in several pieces.)
"""

import base64
import hashlib
import re
from pathlib import Path

from triton_ingress.answers import Answer, Files, Protocol
from triton_ingress.sections import Section
from triton_ingress.settings import Settings

CLIENTS = "triton-ingress-clients"

_OPEN = {
    Protocol.GRPC: "/ray.serve.RayServeAPIService/Healthz /grpc.health.v1.Health/Check /grpc.health.v1.Health/Watch",
    Protocol.HTTP: "/-/healthz",
}
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

# https://www.rfc-editor.org/rfc/rfc6750#section-2.1
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

# The object identifiers in keys, https://www.rfc-editor.org/rfc/rfc3279#section-2.3
_RSA, _EC = ("RSA", bytes.fromhex("06092a864886f70d010101")), ("EC", bytes.fromhex("06072a8648ce3d0201"))
_KEYS = {"RS": _RSA, "PS": _RSA, "ES": _EC}

_NEEDS_TLS = Answer("needs-tls", 7, 403, "this port is for health checks only, the endpoint's HTTP is with TLS")
_NO_TOKEN = Answer("no-token", 16, 401, "this endpoint needs a token, sent as authorization: Bearer TOKEN")
_BAD_TOKEN = Answer("bad-token", 16, 401, "the token is not valid for this endpoint, or not any more")
_NO_LENGTH = Answer("no-length", 3, 411, "this endpoint limits the size of requests and needs a content-length")


def binds(line: str, settings: Settings, protocol: Protocol) -> list[str]:
    """Return the `bind` lines in the place of one of Ray's."""
    if not settings.tls_certificate:
        return [line]
    tls = f"ssl crt {settings.tls_certificate} ssl-min-ver TLSv1.2"
    if settings.client_ca:
        tls += f" ca-file {settings.client_ca} verify required"
    if protocol is Protocol.GRPC:
        return [f"{line} {tls} alpn h2"]
    address = line.rpartition(":")[0]
    return [line, *([f"{address}:{settings.tls_http_port} {tls} alpn h2,http/1.1"] if settings.tls_http_port else [])]


def rules(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    """Return the lines that stand before all rules of Ray in the frontend.

    Args:
        settings: what is to be enforced.
        protocol: of the frontend.
        files: where to put what the lines name.

    Raises:
        OSError, ValueError: the file with the tokens, or with the key of JWTs, cannot be used.
    """
    if not settings.restricts:
        return []
    return [
        f"acl open path {_OPEN[protocol]}",
        *_connections(settings, protocol, files),
        *_rate(settings, protocol, files),
        *_tls(settings, protocol, files),
        *_tokens(settings, protocol, files),
        *_jwt(settings, protocol, files),
        *_size(settings, protocol, files),
    ]


def sections(settings: Settings) -> list[Section]:
    """Return the sections that these rules need."""
    if not (settings.connections_per_client or settings.requests_per_second_per_client):
        return []
    return [Section("backend", CLIENTS, ["stick-table type ipv6 size 100k expire 1m store http_req_rate(1s),conn_cur"])]


def _connections(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    most = settings.connections_per_client
    lines = []
    if most or settings.requests_per_second_per_client:
        lines.append(f"tcp-request connection track-sc1 src table {CLIENTS}")
    if most:
        refusal = Answer(
            "connections", 8, 429, f"more than {most} connections from this address, one is enough for many requests"
        )
        lines += [
            # Refused with words; but what is refused must not pile up.
            f"tcp-request connection reject if {{ sc1_conn_cur gt {2 * most} }}",
            f"tcp-request connection set-var(sess.admitted) bool(true) if {{ sc1_conn_cur le {most} }}",
            f"http-request set-var(sess.admitted) bool(true) if {{ sc1_conn_cur le {most} }}",
            f"{files.answer(refusal, protocol)} if !open !{{ var(sess.admitted) -m bool }}",
        ]
    return lines


def _rate(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    most = settings.requests_per_second_per_client
    refusal = Answer("rate", 8, 429, f"more than {most} requests a second from this address, try again later")
    return [f"{files.answer(refusal, protocol)} if !open {{ sc1_http_req_rate gt {most} }}"] if most else []


def _tls(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    if not settings.tls_certificate or protocol is Protocol.GRPC:
        return []
    return [f"{files.answer(_NEEDS_TLS, protocol)} if !open !{{ ssl_fc }}"]


def _tokens(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    if not settings.token_file:
        return []
    hashes = files.add("token-hashes", "".join(f"{each}\n" for each in _hashes(Path(settings.token_file))).encode())
    return [
        f"{files.answer(_NO_TOKEN, protocol)} if !open !{{ http_auth_bearer -m found }}",
        # Of hashes: the time that this takes tells a client nothing, and no token is in the configuration.
        f"acl known_token http_auth_bearer,sha2(256),hex -m str -f {hashes}",
        f"{files.answer(_BAD_TOKEN, protocol)} if !open !known_token",
        # It is the endpoint's, nobody behind needs it.
        "http-request del-header authorization",
    ]


def _jwt(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    if not settings.jwt_public_key:
        return []
    _check_public_key(Path(settings.jwt_public_key), settings.jwt_algorithm)

    def claim(path: str, kind: str = "") -> str:
        return f"var(txn.jwt),jwt_payload_query('{path}'{kind})"

    algorithm = settings.jwt_algorithm
    needed = {
        "jwt_algorithm": [f"var(txn.jwt),jwt_header_query('$.alg') -m str {algorithm}"],
        "jwt_signature": [f"var(txn.jwt),jwt_verify({algorithm},{settings.jwt_public_key}) -m int 1"],
        "jwt_not_expired": [claim("$.exp", ",'int'") + ",sub(txn.now) -m int gt 0"],
    }
    if settings.jwt_issuer:
        needed["jwt_issuer"] = [f"{claim('$.iss')} -m str -- '{settings.jwt_issuer}'"]
    if settings.jwt_audience:
        places = ["$.aud", *(f"$.aud[{place}]" for place in range(10))]
        needed["jwt_audience"] = [f"{claim(place)} -m str -- '{settings.jwt_audience}'" for place in places]
    return [
        f"{files.answer(_NO_TOKEN, protocol)} if !open !{{ http_auth_bearer -m found }}",
        "http-request set-var(txn.jwt) http_auth_bearer if !open",
        "http-request set-var(txn.now) date() if !open",
        *(f"acl {name} {test}" for name, tests in needed.items() for test in tests),
        f"acl jwt_too_early {claim('$.nbf', ',' + repr('int'))},sub(txn.now) -m int gt 0",
        f"{files.answer(_BAD_TOKEN, protocol)} if "
        + " || ".join(f"!open {test}" for test in ("jwt_too_early", *(f"!{name}" for name in needed))),
        "http-request del-header authorization",
    ]


def _check_public_key(file: Path, algorithm: str) -> None:
    # HAProxy takes any file, and with a wrong one it would refuse everybody.
    found = re.search(r"-----BEGIN PUBLIC KEY-----([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----", file.read_text())
    kind, identifier = _KEYS[algorithm[:2]]
    if not found or identifier not in base64.b64decode(found[1]):
        raise ValueError(f"{file} has no {kind} key for {algorithm} in it, as PEM text from BEGIN PUBLIC KEY on")


def _size(settings: Settings, protocol: Protocol, files: Files) -> list[str]:
    limit = settings.max_unary_request_bytes
    if not limit:
        return []
    too_large = Answer("too-large", 8, 413, f"the request is larger than the limit of {limit} bytes")
    if protocol is Protocol.HTTP:
        return [
            "acl has_length req.hdr(content-length) -m found",
            f"{files.answer(too_large, protocol)} if has_length {{ req.body_size gt {limit} }}",
            "http-request wait-for-body time 30s if !has_length",
            f"{files.answer(_NO_LENGTH, protocol)} if !has_length {{ req.body_len gt 0 }}",
        ]
    return [
        # Of a unary request the server reads one message, and its length stands before it.
        f"acl stream path {_STREAM}",
        "http-request wait-for-body time 30s at-least 5 if !stream",
        f"{files.answer(too_large, protocol)} if !stream {{ req.body,bytes(1,4),be2dec(,4) -m int gt {limit} }}",
    ]


def _hashes(file: Path) -> list[str]:
    tokens = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if not tokens:
        raise ValueError(f"{file} has no token in it")
    for number, token in enumerate(tokens, start=1):
        if not _TOKEN.fullmatch(token):
            # Not shown: it is a secret all the same.
            raise ValueError(f"token {number} of {file} has other characters than A-Z a-z 0-9 -._~+/ and =")
    # As HAProxy writes them.
    return [hashlib.sha256(token.encode()).hexdigest().upper() for token in tokens]
