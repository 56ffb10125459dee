"""The settings of the ingress program: what is taken, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from triton_ingress.settings import Settings


def read(text: str) -> Settings:
    """Read the settings as the program does."""
    return Settings.from_environment({"TRITON_INGRESS": text})


def test_nothing_set_is_the_straight_path_without_restrictions() -> None:
    """The defaults are those of Triton's own ports."""
    for environment in ({}, {"TRITON_INGRESS": "{}"}):
        settings = Settings.from_environment(environment)
        assert settings == Settings()
        assert settings.straight
        assert (settings.triton_grpc_port, settings.triton_http_port) == (8001, 8100)
        assert not settings.restricts


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"'])
def test_what_is_no_json_object_is_shown(text: str) -> None:
    """It comes from a template, so the text that came out of it is what the operator has to see."""
    with pytest.raises(ValueError, match=r"^TRITON_INGRESS is .*, but must be a JSON object") as caught:
        read(text)
    assert repr(text) in str(caught.value)


def test_an_unknown_setting_is_named_with_those_that_there_are() -> None:
    """A misspelt restriction would be none."""
    with pytest.raises(ValueError, match=r"unknown setting 'client_cas'; known are straight, .*client_ca, "):
        read('{"client_cas": "x"}')


FILE = str(Path(__file__).resolve())
TLS = {"tls_certificate": FILE}
JWT = {"jwt_public_key": FILE, "jwt_algorithm": "ES256"}

# Settings, what is wrong with them, and the nearest that are right.
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"straight": 1}, "straight is 1, but must be a bool", {"straight": True}),
    ({"triton_grpc_port": True}, "triton_grpc_port is True, but must be a int", {"triton_grpc_port": 1}),
    ({"triton_grpc_port": 0}, "triton_grpc_port is 0, but must be a port", {"triton_grpc_port": 1}),
    ({"triton_http_port": 65536}, "triton_http_port is 65536, but must be a port", {"triton_http_port": 65535}),
    ({"max_ongoing_requests": 0}, "max_ongoing_requests is 0, but must be at least 1", {"max_ongoing_requests": 1}),
    ({"tls_certificate": "x.pem"}, "but must be an absolute path of letters, digits and ._-/", TLS),
    ({"tls_certificate": "/x y"}, "but must be an absolute path of letters, digits and ._-/", TLS),
    ({"tls_certificate": "/etc"}, "tls_certificate is '/etc', but there is no such file", TLS),
    ({"client_ca": FILE}, "but needs tls_certificate", TLS | {"client_ca": FILE}),
    ({"tls_http_port": 8443}, "tls_http_port is 8443, but needs tls_certificate", TLS | {"tls_http_port": 8443}),
    (TLS | {"tls_http_port": -1}, "tls_http_port is -1, but must be a port", TLS | {"tls_http_port": 0}),
    ({"token_file": "/none"}, "token_file is '/none', but there is no such file", {"token_file": FILE}),
    (JWT | {"token_file": FILE}, "but there is a token_file too, and a request has only one authorization", JWT),
    ({"jwt_public_key": FILE}, "but needs jwt_algorithm", JWT),
    ({"jwt_algorithm": "ES256"}, "jwt_algorithm is 'ES256', but needs jwt_public_key", JWT),
    ({"jwt_issuer": "x"}, "jwt_issuer is 'x', but needs jwt_public_key", JWT | {"jwt_issuer": "x"}),
    (JWT | {"jwt_algorithm": "HS256"}, "jwt_algorithm is 'HS256', but must be one of RS256, ", JWT),
    (JWT | {"jwt_algorithm": "none"}, "jwt_algorithm is 'none', but must be one of RS256, ", JWT),
    (JWT | {"jwt_issuer": "a b"}, "but must be of visible ASCII characters", JWT | {"jwt_issuer": "https://a/b?c=d"}),
    (JWT | {"jwt_audience": "a'b"}, "but must be of visible ASCII characters", JWT | {"jwt_audience": "a.b:c,d"}),
    (
        {"max_unary_request_bytes": -1},
        "max_unary_request_bytes is -1, but must not be below 0, which is off",
        {"max_unary_request_bytes": 0},
    ),
    (
        {"max_unary_request_bytes": 1.5},
        "max_unary_request_bytes is 1.5, but must be a int",
        {"max_unary_request_bytes": 1},
    ),
    (
        {"requests_per_second_per_client": -1},
        "requests_per_second_per_client is -1, but must not be below 0",
        {"requests_per_second_per_client": 1},
    ),
    (
        {"connections_per_client": 2**31},
        "connections_per_client is 2147483648, but must not be above 1000000000",
        {"connections_per_client": 10**9},
    ),
]


@pytest.mark.parametrize(("wrong", "words", "right"), CASES, ids=lambda each: str(each)[:60])
def test_a_wrong_setting_is_refused_in_one_line_and_its_neighbour_is_taken(
    wrong: dict[str, Any], words: str, right: dict[str, Any]
) -> None:
    """The line is all that the operator gets to see of an endpoint that does not start."""
    with pytest.raises(ValueError, match=r"^TRITON_INGRESS: [^\n]+$") as caught:
        read(json.dumps(wrong))
    assert words in str(caught.value)
    assert read(json.dumps(right)) == Settings(**right)
