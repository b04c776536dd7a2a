"""Fixtures of the tests of planned modules."""

import pytest

from rockmate import Rockmate
from tests.module.models import Layers, built, rows
from tests.module.steps import recomputing


@pytest.fixture
def layers() -> Rockmate:
    """A planned `Layers` that recomputes all it may."""
    return recomputing(built(Layers), rows())


@pytest.fixture(autouse=True)
def planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a second size are planned by themselves, as those of no family are; tests/families has the others."""
    monkeypatch.setattr("rockmate.calls.by_size.siblings", lambda *_: [])
