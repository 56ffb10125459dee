"""What holds for every test."""

from pathlib import Path

import pytest
import ray

PROCESS_TESTS = Path(__file__).parent / "processes"


@pytest.fixture(autouse=True)
def _no_ray_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep unit tests fast and independent: only those under tests/processes may start Ray."""
    if PROCESS_TESTS in request.path.parents:
        return

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("a unit test must not start Ray; move it to tests/processes")

    monkeypatch.setattr(ray, "init", refuse)
