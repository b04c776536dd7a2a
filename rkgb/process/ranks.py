"""Other processes that train with this one."""

from __future__ import annotations

from torch import distributed


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks: what one decides by its own clock or sizes, others may not."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
