"""What every test of the command line shares."""

import importlib.util
import sys

import pytest


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in which a command finds the user's code are its process' own; here, one process runs many."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed, whether it is or not."""
    found = importlib.util.find_spec

    def found_unless(name, *more):
        return None if name == "ortools" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", found_unless)
