"""Fixtures of the tests of trainers."""

import pytest

from rockmate import Rockmate
from tests.module.models import Layers, built, rows
from tests.module.steps import recomputing


@pytest.fixture
def layers() -> Rockmate:
    """A planned `Layers` that recomputes all it may."""
    return recomputing(built(Layers), rows())
