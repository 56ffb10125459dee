"""What the tests of the ingress program share."""

from pathlib import Path

import pytest

from tests.ingress.certificates import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    """A certificate authority."""
    return Authority("the tests' CA")


@pytest.fixture(scope="session")
def certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a server's certificate and its key."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(authority.issue("127.0.0.1"))
    return file
