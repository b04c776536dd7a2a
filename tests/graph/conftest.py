"""Fixtures of the tests of graphs."""

import pytest


@pytest.fixture
def without_graphviz(monkeypatch, tmp_path):
    """An empty PATH: each test that wants a program brings its own."""
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
