"""Profilers: whether one is at work, and the one that watches a single thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _profiler
from torch.autograd import profiler

_autograd: Any = torch._C._autograd

is_profiled: Callable[[], bool] = _autograd._profiler_enabled
"""Whether a profiler watches this thread. Nothing public tells."""

record_operations: Callable[[bool], None] = _autograd._enable_record_function
"""Whether operations of this thread are told to profilers, from now on."""

ALLOCATION: Any = _profiler._EventType.Allocation
"""The kind of the events of `experimental_event_tree` that memory is taken and freed by."""


def a_profiler_runs() -> bool:
    """Whether a profiler of `torch.profiler` runs in any thread: it exists once in a process."""
    return profiler._is_profiler_enabled


def counting_steps() -> Iterable[str]:
    """Names of those that count steps: "ProfilerStep" is the one of profilers with a schedule."""
    return profiler.KinetoStepTracker._step_dict.keys()


# ---- the legacy profiler --------------------------------------------------------------------------------------
# It watches one thread, beside whatever watches others, and tells of memory without addresses.

_enable_legacy: Any = getattr(_autograd, "_enable_profiler_legacy", None)
_disable_legacy: Any = getattr(_autograd, "_disable_profiler_legacy", None)


def has_legacy_profiler() -> bool:
    """Whether this PyTorch has it."""
    return _enable_legacy is not None


def start_legacy_profiler() -> None:
    """Start to note what memory of the CPU this thread takes and frees."""
    plain = _profiler._ExperimentalConfig()
    _enable_legacy(_profiler.ProfilerConfig(_profiler.ProfilerState.CPU, False, True, False, False, False, plain))


def stop_legacy_profiler() -> list[list[Any]]:
    """What was noted since, by thread."""
    return _disable_legacy()
