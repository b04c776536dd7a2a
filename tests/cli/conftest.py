"""What every test of the command line shares."""

import sys

import pytest


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in which a command finds the user's code are its process' own; here, one process runs many."""
    monkeypatch.setattr(sys, "path", [*sys.path])
