"""What the tests of whole programs share."""

from pathlib import Path

import pytest

from tests.support.models import write_protocol_models


@pytest.fixture(scope="session")
def protocol_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the models that the tests of the protocol call."""
    repository = tmp_path_factory.mktemp("models")
    write_protocol_models(repository)
    return repository
