"""Fixtures of the solvers' tests."""

import contextlib
from unittest import mock

import pytest

from rk_solvers.intervals import solver as intervals
from rk_solvers.side_process import SideProcess


@pytest.fixture(scope="module")
def one_process():
    """One process for all searches by `Intervals` of a file: its start takes longer than a small problem does."""
    with SideProcess() as process:
        kept = contextlib.nullcontext(process)
        with mock.patch.object(intervals, "SideProcess", return_value=kept):
            yield
