"""Tests of the CPU, run on the device: what they make with `built`, `rows` or `placed` is there (tests/where.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import pytest

_FIXTURE = type(pytest.fixture(lambda: None))


def shared_from(source: ModuleType, *names: str, but: Mapping[str, str] | None = None) -> dict[str, object]:
    """What a file of tests here takes over from another one: its fixtures, and its tests, or those of these names.

    `but` says why a test is left out. Use it as in ``globals().update(shared_from(test_faults))``. Marks of the whole
    file are not taken over.
    """
    fixtures = {name: value for name, value in vars(source).items() if isinstance(value, _FIXTURE)}
    tests = {name: value for name, value in vars(source).items() if name.startswith("test_")}
    for name in (*names, *(but or ())):
        assert name in tests, f"{source.__name__} has no {name}"
    return fixtures | {name: tests[name] for name in names or tests if name not in (but or ())}
