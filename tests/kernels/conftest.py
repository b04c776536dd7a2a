"""Kernels that are said to be faster, wherever they are right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rkgb.kernels.products import is_there
from rockmate.kernels import choose, trial
from rockmate.kernels.option import KernelTrial

if not is_there():
    collect_ignore_glob = ["test_*.py"]  # this PyTorch has no oneDNN


@contextlib.contextmanager
def onednn_off() -> Iterator[None]:
    """As `torch.backends.mkldnn.flags` has it, which warns of a flag for other devices that it sets, too."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was tried before, and nothing is left of it."""
    choose._TRIED.clear()
    yield
    choose._TRIED.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more of them PyTorch has oneDNN for all convolutions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch, fresh: None, one_thread: None) -> list[KernelTrial]:
    """What is tried takes half of the time, in words; the list is of what was tried."""
    seen: list[KernelTrial] = []

    def tried(*given: Any) -> KernelTrial:
        seen.append(replace(trial.tried(*given), given_ms=1.0, other_ms=0.5))
        return seen[-1]

    monkeypatch.setattr(choose, "tried", tried)
    return seen


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch, quicker: list[KernelTrial]) -> list[KernelTrial]:
    """Attention written out is said to be quick, and may save as much as it does."""
    monkeypatch.setattr(trial, "_NOTES", 1e9)
    return quicker
