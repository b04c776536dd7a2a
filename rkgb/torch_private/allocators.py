"""Caching allocators: their settings, what they hold, and the history that they record.

`memory` is the module that PyTorch has for the allocator of one kind of device. Its documentation tells of these
functions under their private names, and there are no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def settings_in_force() -> str | None:
    """The text of the settings; None where this PyTorch cannot be asked, such as 2.9."""
    ask: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if ask is None else str(ask())


def set_settings(memory: Any, settings: str) -> None:
    """Put these settings in force, and PyTorch's own for what they do not tell. Raises what PyTorch raises."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:  # PyTorch 2.9 has no function for all kinds of devices
        setter = memory._set_allocator_settings
    setter(settings)


def snapshot(memory: Any, *device: int | None) -> dict[str, Any]:
    """Blocks, settings and the history so far, of one device or of all."""
    return memory._snapshot(*device)


def keeps_history(memory: Any) -> bool:
    """Whether it can. That of XPU could not in PyTorch 2.9."""
    return hasattr(memory, "_record_memory_history")


def start_history(memory: Any, most_events: int) -> None:
    """Record what is allocated and freed from now on, up to so many events of each device."""
    # "python": nothing of C++'s stack is to be looked up, not even once.
    memory._record_memory_history("all", context=None, stacks="python", max_entries=most_events)


def stop_history(memory: Any) -> None:
    """End that, and forget what was recorded."""
    memory._record_memory_history(None)


def cuda_history_is_recorded() -> bool:
    """Whether CUDA's is recorded for anybody. PyTorch that is built without CUDA has no such function."""
    return bool(torch._C._cuda_isHistoryEnabled())
