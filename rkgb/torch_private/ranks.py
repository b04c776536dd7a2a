"""Processes that train together."""

from __future__ import annotations

from typing import Any

import torch


def default_store() -> Any:
    """Where the ranks of the default group met: texts by name, which any of them may wait for.

    Publicly only who makes the group by a store of its own has it.
    """
    return torch.distributed.distributed_c10d._get_default_store()
