"""Who may use the ports: each restriction with the real HAProxy and real clients."""

import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.ingress.certificates import Authority, Signer
from tests.ingress.running import (
    INFER,
    METADATA,
    STREAM,
    Ingress,
    Response,
    call,
    channel,
    request,
    running_ingress,
    shape_of,
)

TRITON, REPLICA = "triton 127.0.0.1", "replica 127.0.0.1"
HEALTH = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
HEALTHZ = "/ray.serve.RayServeAPIService/Healthz"
V2 = "/v2/models/m/infer"

UNAUTHENTICATED, RESOURCE_EXHAUSTED, UNAVAILABLE = 16, 8, 14
NO_TOKEN = "this endpoint needs a token, sent as authorization: Bearer TOKEN"  # noqa: S105  no secret
BAD_TOKEN = "the token is not valid for this endpoint, or not any more"  # noqa: S105


def error(response: Response) -> tuple[int, str]:
    """Return status and words of a refusal in Triton's form."""
    assert response.headers["content-type"] == "application/json"
    (key,) = body = json.loads(response.body)
    assert key == "error"
    return response.status, body["error"]


def assert_health_is_open(ingress: Ingress, connection: grpc.Channel) -> None:
    """Fail when a prober without credentials would take the endpoint for dead."""
    for path in HEALTH:
        assert call(connection, path) == REPLICA
    assert call(connection, HEALTHZ) == ""
    assert request(f"{ingress.http}/-/healthz").body == "success"


# --- TLS


@pytest.fixture
def tls(authority: Authority, certificate: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings with a certificate and a CA for clients."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.pem)
    return {"tls_certificate": str(certificate), "client_ca": str(ca)}


def split(pem: bytes) -> tuple[bytes, bytes]:
    """Return the key and the certificate of one PEM text."""
    certificate, marker, key = pem.partition(b"-----BEGIN PRIVATE KEY-----")
    return marker + key, certificate


def test_with_a_certificate_the_grpc_port_speaks_tls_only(
    authority: Authority, certificate: Path, tmp_path: Path
) -> None:
    """Whoever listens on the way must not see tensors, and a client must know whom it talks to."""
    with running_ingress(tmp_path, tls_certificate=str(certificate)) as ingress:
        trusting = grpc.ssl_channel_credentials(authority.pem)
        with channel(ingress.grpc, trusting) as connection:
            assert call(connection, INFER) == TRITON
            assert call(connection, METADATA) == REPLICA
            assert list(connection.stream_stream(STREAM)(iter([b"1", b"2"]), timeout=30)) == [TRITON.encode()] * 2
        with channel(ingress.grpc, grpc.ssl_channel_credentials(Authority("another").pem)) as connection:
            assert call(connection, INFER)[0] == UNAVAILABLE
        with channel(ingress.grpc) as connection:
            assert call(connection, INFER)[0] == UNAVAILABLE
        assert len([seen for seen in ingress.seen if seen.path == INFER]) == 1


def test_an_unmodified_triton_client_speaks_tls_with_it(
    authority: Authority, certificate: Path, tmp_path: Path
) -> None:
    """It has options of its own for certificates."""
    ca = tmp_path / "root.pem"
    ca.write_bytes(authority.pem)
    with running_ingress(tmp_path, tls_certificate=str(certificate)) as ingress:
        client = InferenceServerClient(ingress.grpc, ssl=True, root_certificates=str(ca))
        # What the server behind it answers is no message of Triton's.
        with pytest.raises(InferenceServerException, match="deserializing"):
            client.get_server_metadata()
        client.close()
        assert [(seen.server, seen.path) for seen in ingress.seen] == [(REPLICA, METADATA)]


def test_a_client_without_a_certificate_of_the_ca_is_shut_out(
    tls: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    """The certificate is the client's password."""
    with running_ingress(tmp_path, **tls) as ingress:
        own = authority.issue("127.0.0.1")
        with channel(ingress.grpc, grpc.ssl_channel_credentials(authority.pem, *split(own))) as connection:
            assert call(connection, INFER) == TRITON
        foreign = Authority("another").issue("127.0.0.1")
        for credentials in ((), split(foreign)):
            with channel(ingress.grpc, grpc.ssl_channel_credentials(authority.pem, *credentials)) as connection:
                assert call(connection, INFER)[0] == UNAVAILABLE
        assert len(ingress.seen) == 1


@pytest.mark.parametrize(
    ("version", "accepted"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_tls_is_of_version_1_2_or_later_and_offers_http2(
    version: ssl.TLSVersion, accepted: bool, certificate: Path, tmp_path: Path
) -> None:
    """Older versions are broken; and gRPC's clients give up where HTTP/2 is not agreed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # What a client of that time allows.
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with (
        running_ingress(tmp_path, tls_certificate=str(certificate)) as ingress,
        socket.create_connection(("127.0.0.1", ingress.ports.grpc), timeout=10) as plain,
    ):
        if accepted:
            with context.wrap_socket(plain) as wrapped:
                assert wrapped.selected_alpn_protocol() == "h2"
        else:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(plain)


def test_http_with_tls_has_a_port_of_its_own_and_the_plain_one_keeps_the_health_check(
    tls: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    """KubeRay asks for /-/healthz without TLS: were that refused, no pod would ever be ready."""
    with running_ingress(tmp_path, **tls) as ingress:
        port = ingress.ports.tls_http
        assert request(f"{ingress.http}/-/healthz").body == "success"
        for path in (V2, "/v2/health/ready", "/-/routes", "/", "/-/healthz/../../v2"):
            status, words = error(request(ingress.http + path))
            assert (status, words) == (403, "this port is for health checks only, the endpoint's HTTP is with TLS")
        assert not ingress.seen

        ingress.set(tls_http_port=port)
        ingress.reload(ingress.shape)
        context = ssl.create_default_context(cadata=authority.pem.decode())
        with pytest.raises(OSError, match=r"certificate required|EOF|reset"):
            request(f"https://127.0.0.1:{port}{V2}", b"{}", context=context)
        own = tmp_path / "own.pem"
        own.write_bytes(authority.issue("127.0.0.1"))
        context.load_cert_chain(own)
        assert request(f"https://127.0.0.1:{port}{V2}", b"{}", context=context).body == TRITON
        assert error(request(ingress.http + V2, b"{}"))[0] == 403
        assert request(f"{ingress.http}/-/healthz").body == "success"


# --- Tokens

BAD_AUTHORIZATIONS = [
    ("", NO_TOKEN),
    ("Basic c2VjcmV0OjE=", NO_TOKEN),
    ("secret-1", NO_TOKEN),
    ("Bearer", NO_TOKEN),
    ("Bearer secret", BAD_TOKEN),
    ("Bearer SECRET-1", BAD_TOKEN),
    ("Bearer secret-1x", BAD_TOKEN),
    ("Bearer secret-1 secret-1", BAD_TOKEN),
    ("Bearer # not a token", BAD_TOKEN),
    ("Bearer " + "A" * 4000, BAD_TOKEN),
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    """An endpoint with two tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "tokens"
    file.write_text("secret-1\n\n  c2Vj.cmV0~_+/==  \n")
    with running_ingress(folder, token_file=str(file)) as ingress:
        yield ingress


@pytest.mark.parametrize("authorization", ["Bearer secret-1", "bearer secret-1", "Bearer c2Vj.cmV0~_+/=="])
def test_a_known_token_lets_a_request_in_and_goes_no_further(authorization: str, guarded: Ingress) -> None:
    """Behind the port nobody needs it, and logs there must not have it."""
    guarded.seen.clear()
    with channel(guarded.grpc) as connection:
        metadata = [("authorization", authorization), ("other", "x")]
        assert call(connection, INFER, metadata=metadata) == TRITON
        assert call(connection, METADATA, metadata=metadata) == REPLICA
        stream = connection.stream_stream(STREAM)(iter([b"1"]), timeout=30, metadata=metadata)
        assert list(stream) == [TRITON.encode()]
    assert request(guarded.http + V2, b"{}", Authorization=authorization, Other="x").body == TRITON
    assert len(guarded.seen) == 4
    for seen in guarded.seen:
        if seen.path != STREAM:
            assert seen.headers["other"] == "x"
        assert "authorization" not in seen.headers


@pytest.mark.parametrize(("authorization", "words"), BAD_AUTHORIZATIONS, ids=lambda each: each[:30])
def test_without_a_known_token_no_request_reaches_a_server(authorization: str, words: str, guarded: Ingress) -> None:
    """Not even one that only asks for the server's name."""
    guarded.seen.clear()
    metadata = [("authorization", authorization)] if authorization else []
    with channel(guarded.grpc) as connection:
        for path in (INFER, METADATA, "/ray.serve.RayServeAPIService/ListApplications", "/no/such"):
            assert call(connection, path, b"x" * 100, metadata=metadata) == (UNAUTHENTICATED, words)
        # A client must see the refusal although it has not sent all yet.
        assert call(connection, INFER, b"x" * 5_000_000, metadata=metadata) == (UNAUTHENTICATED, words)
        stream = connection.stream_stream(STREAM)(iter([b"1"] * 100), timeout=30, metadata=metadata)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, words)
    for path in (V2, "/v2", "/-/routes", "/-/healthz/", "//-/healthz"):
        headers = {"Authorization": authorization} if authorization else {}
        response = request(guarded.http + path, None, **headers)
        assert error(response) == (401, words)
        assert response.headers["www-authenticate"] == "Bearer"
    assert not guarded.seen


def test_the_health_checks_need_no_token(guarded: Ingress) -> None:
    """Kubernetes' probes have none."""
    with channel(guarded.grpc) as connection:
        assert_health_is_open(guarded, connection)


def test_a_token_that_was_taken_out_of_the_file_is_refused_after_a_reload(tmp_path: Path) -> None:
    """The file is read when HAProxy starts, and Ray starts one whenever the replicas change."""
    file = tmp_path / "tokens"
    file.write_text("old\n")
    with running_ingress(tmp_path, token_file=str(file)) as ingress:
        file.write_text("new\n")
        ingress.reload(ingress.shape)
        with channel(ingress.grpc) as connection:
            assert call(connection, INFER, metadata=[("authorization", "Bearer old")]) == (UNAUTHENTICATED, BAD_TOKEN)
            assert call(connection, INFER, metadata=[("authorization", "Bearer new")]) == TRITON


@pytest.mark.parametrize(
    ("text", "words"), [("\n \n", "has no token in it"), ("a\nb c\n", "token 2 of .* has other characters than")]
)
def test_a_file_of_tokens_that_cannot_be_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """Or nobody would get in, and nobody would know why. The line does not show the token."""
    (tmp_path / "tokens").write_text(text)
    with (
        pytest.raises(AssertionError, match=words) as caught,
        running_ingress(tmp_path, token_file=str(tmp_path / "tokens")),
    ):
        pass
    assert "b c" not in str(caught.value)


# --- JWT

NOW = int(time.time())
CLAIMS = {"exp": NOW + 3600, "iss": "https://issuer/a?b=c", "aud": "triton"}


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512", "PS256"])
def test_a_signed_token_lets_a_request_in(algorithm: str, tmp_path: Path) -> None:
    """Each algorithm that can be set has to work."""
    signer, other = Signer(algorithm), Signer(algorithm)
    key = signer.write_public_key(tmp_path / "key.pem")
    with (
        running_ingress(tmp_path, jwt_public_key=str(key), jwt_algorithm=algorithm) as ingress,
        channel(ingress.grpc) as connection,
    ):
        for token, expected in ((signer.token(CLAIMS), TRITON), (other.token(CLAIMS), (UNAUTHENTICATED, BAD_TOKEN))):
            assert call(connection, INFER, metadata=[("authorization", f"Bearer {token}")]) == expected
        assert_health_is_open(ingress, connection)


@pytest.mark.parametrize(("algorithm", "other", "kind"), [("RS256", "ES256", "RSA"), ("ES256", "RS256", "EC")])
def test_a_key_of_another_kind_than_the_algorithm_is_refused(
    algorithm: str, other: str, kind: str, tmp_path: Path
) -> None:
    """HAProxy would start, and find no token good enough."""
    key = Signer(other).write_public_key(tmp_path / "key.pem")
    words = f"{key} has no {kind} key for {algorithm} in it"
    with (
        pytest.raises(AssertionError, match=re.escape(words)),
        running_ingress(tmp_path, jwt_public_key=str(key), jwt_algorithm=algorithm),
    ):
        pass


@pytest.fixture(scope="module")
def signer() -> Signer:
    """Whoever signs the tokens of `signed`."""
    return Signer("RS256")


@pytest.fixture(scope="module")
def signed(signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    """An endpoint that asks for JWTs with an issuer and an audience."""
    folder = tmp_path_factory.mktemp("signed")
    key = signer.write_public_key(folder / "key.pem")
    with running_ingress(
        folder,
        jwt_public_key=str(key),
        jwt_algorithm="RS256",
        jwt_issuer=CLAIMS["iss"],
        jwt_audience=CLAIMS["aud"],
    ) as ingress:
        yield ingress


@pytest.mark.parametrize(
    "claims",
    [
        CLAIMS,
        CLAIMS | {"exp": NOW + 3600.5, "nbf": NOW - 10, "sub": "somebody"},
        CLAIMS | {"aud": ["triton"]},
        CLAIMS | {"aud": [*"abcdefghi", "triton"]},
    ],
)
def test_a_token_with_the_right_claims_is_taken(claims: dict[str, Any], signed: Ingress, signer: Signer) -> None:
    """`aud` is text or a list of texts."""
    signed.seen.clear()
    authorization = f"Bearer {signer.token(claims)}"
    with channel(signed.grpc) as connection:
        assert call(connection, INFER, metadata=[("authorization", authorization)]) == TRITON
    assert request(signed.http + V2, b"{}", Authorization=authorization).body == TRITON
    assert all("authorization" not in seen.headers for seen in signed.seen)


def without(claim: str) -> dict[str, Any]:
    """Return the claims but for one."""
    return {name: value for name, value in CLAIMS.items() if name != claim}


@pytest.mark.parametrize(
    "claims",
    [
        CLAIMS | {"exp": NOW - 1},
        CLAIMS | {"exp": 0},
        CLAIMS | {"exp": "soon"},
        CLAIMS | {"exp": None},
        CLAIMS | {"nbf": NOW + 3600},
        CLAIMS | {"iss": "https://issuer/a?b=c2"},
        CLAIMS | {"iss": ["https://issuer/a?b=c"]},
        CLAIMS | {"aud": "tritons"},
        CLAIMS | {"aud": []},
        CLAIMS | {"aud": ["other", ["triton"]]},
        CLAIMS | {"aud": {"triton": "triton"}},
        CLAIMS | {"aud": [*"abcdefghij", "triton"]},
        without("exp"),
        without("iss"),
        without("aud"),
        {},
        [],
        "text",
    ],
    ids=str,
)
def test_a_token_with_other_claims_is_refused(claims: Any, signed: Ingress, signer: Signer) -> None:
    """The signature is right in all of them: the same issuer's tokens for other services, and old ones."""
    signed.seen.clear()
    authorization = f"Bearer {signer.token(claims)}"
    with channel(signed.grpc) as connection:
        answer = call(connection, INFER, metadata=[("authorization", authorization)])
    assert answer == (UNAUTHENTICATED, BAD_TOKEN)
    assert error(request(signed.http + V2, b"{}", Authorization=authorization)) == (401, BAD_TOKEN)
    assert not signed.seen


def test_a_token_that_is_not_signed_as_it_should_be_is_refused(signed: Ingress, signer: Signer) -> None:
    """The header is the sender's to write: it must not choose how it is verified."""
    signed.seen.clear()
    good = signer.token(CLAIMS)
    head, payload, signature = good.split(".")
    tokens = [
        signer.token(CLAIMS, algorithm="none"),
        signer.token(CLAIMS, algorithm="HS256"),
        signer.token(CLAIMS, algorithm="RS512"),
        Signer("RS256").token(CLAIMS),
        Signer("ES256").token(CLAIMS, algorithm="RS256"),
        f"{head}.{payload}.",
        f"{head}.{payload}",
        f"{head}..{signature}",
        f"{head}.{payload}.{signature[:-8]}",
        f"{head}.{signer.token(CLAIMS | {'exp': NOW + 7200}).split('.')[1]}.{signature}",
        f"{good}.x",
        "a.b.c",
        "x",
    ]
    with channel(signed.grpc) as connection:
        for token in tokens:
            metadata = [("authorization", f"Bearer {token}")]
            assert call(connection, INFER, metadata=metadata) == (UNAUTHENTICATED, BAD_TOKEN), token
        assert call(connection, INFER) == (UNAUTHENTICATED, NO_TOKEN)
        assert_health_is_open(signed, connection)
    assert error(request(signed.http + V2, b"{}")) == (401, NO_TOKEN)
    assert not [seen for seen in signed.seen if "health" not in seen.path]


# --- Sizes

LIMIT = 100_000


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    """An endpoint with a limit of LIMIT bytes."""
    with running_ingress(tmp_path_factory.mktemp("limited"), max_unary_request_bytes=LIMIT) as ingress:
        yield ingress


TOO_LARGE = f"the request is larger than the limit of {LIMIT} bytes"


def test_a_unary_message_may_be_as_large_as_the_limit(limited: Ingress) -> None:
    """And one byte more is refused, wherever it would go, before a server sees it."""
    limited.seen.clear()
    with channel(limited.grpc) as connection:
        for path, server in ((INFER, TRITON), (METADATA, REPLICA)):
            for size in (0, 1, LIMIT - 1, LIMIT):
                assert call(connection, path, b"x" * size) == server
            for size in (LIMIT + 1, 20_000_000):
                assert call(connection, path, b"x" * size) == (RESOURCE_EXHAUSTED, TOO_LARGE)
        assert_health_is_open(limited, connection)
    assert max(len(seen.body) for seen in limited.seen) == LIMIT


def test_a_compressed_message_counts_as_it_is_sent(limited: Ingress) -> None:
    """What it unpacks to, HAProxy cannot know."""
    with channel(limited.grpc) as connection:
        assert call(connection, INFER, b"x" * 10 * LIMIT, compression=grpc.Compression.Gzip) == TRITON


def test_the_messages_of_a_stream_have_no_limit(limited: Ingress) -> None:
    """As the setting says: who needs one must not be told that there is."""
    with channel(limited.grpc) as connection:
        messages = [b"", b"x" * (LIMIT + 1), b"x"] * 3
        assert list(connection.stream_stream(STREAM)(iter(messages), timeout=60)) == [TRITON.encode()] * 9


def test_an_http_request_may_be_as_large_as_the_limit(limited: Ingress) -> None:
    """As a message of gRPC."""
    limited.seen.clear()
    for path, server in ((V2, TRITON), ("/v2/other", REPLICA)):
        for size in (0, 1, LIMIT):
            assert request(limited.http + path, b"x" * size).body == server
        assert error(request(limited.http + path, b"x" * (LIMIT + 1))) == (413, TOO_LARGE)
    assert request(f"{limited.http}/v2/other").body == REPLICA
    assert max(len(seen.body) for seen in limited.seen) == LIMIT


NO_LENGTH = "this endpoint limits the size of requests and needs a content-length"


@pytest.mark.parametrize("method", ["POST", "GET", "PUT"])
@pytest.mark.parametrize("headers", [[], ["--header", "content-length: 2"]], ids=["chunked", "chunked and a length"])
@pytest.mark.parametrize("size", [1, LIMIT + 1])
def test_an_http_request_that_does_not_tell_its_length_is_refused(
    method: str, headers: list[str], size: int, limited: Ingress, tmp_path: Path
) -> None:
    """Or it would go on without an end; and one that tells two lengths has only one of them right."""
    limited.seen.clear()
    body = tmp_path / "body"
    body.write_bytes(b"x" * size)
    command = ["curl", "--silent", "--noproxy", "*", "--request", method, "--data-binary", f"@{body}", *headers]
    command += ["--header", "transfer-encoding: chunked", "--header", "expect:", "--write-out", "\n%{http_code}"]
    done = subprocess.run([*command, limited.http + V2], capture_output=True, text=True, check=False, timeout=60)
    text, _, status = done.stdout.rpartition("\n")
    assert (status, json.loads(text)) == ("411", {"error": NO_LENGTH})
    assert not limited.seen


@pytest.mark.parametrize("size", [1, LIMIT + 1, 20 * LIMIT])
def test_a_request_of_http2_that_does_not_tell_its_length_is_refused(size: int, limited: Ingress) -> None:
    """HTTP/2 needs no header for it: a client of gRPC sends none, here to the HTTP port."""
    limited.seen.clear()
    with channel(limited.http.removeprefix("http://")) as connection:
        assert "status: 411" in call(connection, V2, b"x" * size)[1]
    assert not limited.seen


# --- Rates and connections


def test_a_client_with_too_many_requests_a_second_is_told_so(tmp_path: Path) -> None:
    """All of its connections and both protocols together; health checks are answered all the same."""
    most = 5
    words = f"more than {most} requests a second from this address, try again later"
    with running_ingress(tmp_path, requests_per_second_per_client=most) as ingress, ExitStack() as stack:
        connections = [stack.enter_context(channel(ingress.grpc)) for _ in range(2)]
        answers, by_http = [], Response(200, {}, "")
        deadline = time.monotonic() + 60
        while by_http.status == 200:
            assert time.monotonic() < deadline, "nothing is refused"
            answers += [call(connection, INFER) for connection in connections for _ in range(most)]
            by_http = request(ingress.http + V2, b"{}")
        assert error(by_http) == (429, words)
        assert_health_is_open(ingress, connections[0])
        assert set(answers) == {TRITON, (RESOURCE_EXHAUSTED, words)}
        assert answers[:most] == [TRITON] * most
        assert [seen.path for seen in ingress.seen].count(INFER) == answers.count(TRITON)
        while call(connections[0], INFER) != TRITON:
            assert time.monotonic() < deadline, "the client is never let in again"
            time.sleep(1.5)


def test_a_client_with_too_many_connections_is_told_so_and_let_in_when_others_have_gone(tmp_path: Path) -> None:
    """A program that opens a channel for each request would take all of HAProxy's connections."""
    words = "more than 2 connections from this address, one is enough for many requests"
    with running_ingress(tmp_path, connections_per_client=2) as ingress, ExitStack() as last:
        with ExitStack() as first:
            early = [first.enter_context(channel(ingress.grpc)) for _ in range(2)]
            for connection in early:
                assert call(connection, INFER) == TRITON
            late = [last.enter_context(channel(ingress.grpc)) for _ in range(2)]
            for connection in late:
                assert call(connection, INFER) == (RESOURCE_EXHAUSTED, words)
                assert call(connection, "/grpc.health.v1.Health/Check") == REPLICA
            # Those who were there first do not suffer.
            for connection in early:
                assert call(connection, INFER) == TRITON
            # Twice as many, and no more.
            with pytest.raises(OSError, match=r"reset|closed|refused"):
                request(ingress.http + V2, b"{}")
        deadline = time.monotonic() + 30
        while [call(connection, INFER) for connection in late] != [TRITON, TRITON]:
            assert time.monotonic() < deadline, "the connections that are left are never let in"
            time.sleep(0.1)
        assert len([seen for seen in ingress.seen if seen.path == INFER]) >= 6


def test_all_restrictions_hold_together_and_after_a_reload(
    tls: dict[str, Any], authority: Authority, tmp_path: Path
) -> None:
    """Each adds its rules to the same place."""
    (tmp_path / "tokens").write_text("secret\n")
    limits = {"max_unary_request_bytes": 1000, "requests_per_second_per_client": 1000, "connections_per_client": 10}
    with running_ingress(tmp_path, pods=2, token_file=str(tmp_path / "tokens"), **tls, **limits) as ingress:
        credentials = grpc.ssl_channel_credentials(authority.pem, *split(authority.issue("127.0.0.1")))
        metadata = [("authorization", "Bearer secret")]
        for _ in range(2):
            with channel(ingress.grpc, credentials) as connection:
                assert call(connection, INFER, metadata=metadata).startswith("triton ")
                assert call(connection, INFER) == (UNAUTHENTICATED, NO_TOKEN)
                assert call(connection, INFER, b"x" * 1001, metadata=metadata)[0] == RESOURCE_EXHAUSTED
                for path in HEALTH:
                    assert call(connection, path).startswith("replica ")
            ingress.reload(shape_of(ingress.ports, ["127.0.0.1", "127.0.0.2"]))
