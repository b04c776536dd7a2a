"""The engine of autograd: hooks on what is saved, the backward that runs, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.function

_C: Any = torch._C
_Hook = Callable[..., Any]

# ---- hooks on saved tensors ---------------------------------------------------------------------------------
# `torch.autograd.graph.saved_tensors_hooks` puts some there. Nothing public tells which are there, or takes them away
# for a while, or allows them where `disable_saved_tensors_hooks` has forbidden them.

push_saved_hooks: Callable[[_Hook, _Hook], None] = _C._autograd._push_saved_tensors_default_hooks
"""Put two functions there: what is saved is what the first returns, and the second gets it back in the backward."""

pop_saved_hooks: Callable[[], None] = _C._autograd._pop_saved_tensors_default_hooks
"""Take away the last two that were put there."""

top_saved_hooks: Callable[[bool], tuple[_Hook, _Hook] | None] = _C._autograd._top_saved_tensors_default_hooks
"""The last two that were put there; None where there are none. Given True, also while a compiler traces them."""

saved_hooks_are_allowed: Callable[[], bool] = _C._autograd._saved_tensors_hooks_is_enabled
"""Whether nobody has forbidden them. Where somebody has, to put some there raises."""

saved_hooks_refusal: Callable[[], str | None] = _C._autograd._saved_tensors_hooks_get_disabled_error_message
"""The message with which they were forbidden; None where they are allowed."""

allow_saved_hooks: Callable[[], None] = _C._autograd._saved_tensors_hooks_enable
"""Allow them, whoever has forbidden them."""

forbid_saved_hooks: Callable[[str], None] = _C._autograd._saved_tensors_hooks_disable
"""Forbid them with this message."""

# ---- versions ------------------------------------------------------------------------------------------------
# Each write into a tensor counts one up, and a backward refuses what was saved of another version.

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = _C._autograd._unsafe_set_version_counter
"""Let tensors have these versions: for who has put back what they held then. Public is nothing that does."""

# ---- the backward that runs ----------------------------------------------------------------------------------

running_backward: Callable[[], int] = _C._current_graph_task_id
"""The number of the backward that this thread is in; -1 where it is in none."""

graph_is_kept: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that this thread is in runs with `retain_graph` or `create_graph`. True outside of any."""

# ---- custom functions ------------------------------------------------------------------------------------------

FunctionBase: Any = _C._FunctionBase
"""The class of C++ behind `torch.autograd.Function`, and behind the nodes of its graphs."""

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""The class between these two. Up to PyTorch 2.13, `torch.autograd.Function.apply` calls the `apply` of this one."""


_OF_OPERATORS = "torch._library.autograd"


def is_of_an_operator(cls: Any) -> bool:
    """Whether a custom function is the derivative of an operator, as `torch.library.register_autograd` makes it.

    It is applied within a call of the operator, with how the dispatcher came there, and goes on from there.
    """
    return getattr(cls, "__module__", "") == _OF_OPERATORS


def sequence_number(node: Any) -> int:
    """In which order the nodes of a thread were made."""
    return int(node._sequence_nr())


next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""That of the next node that this thread makes."""


def running_node() -> Any:
    """The node of the autograd graph whose backward runs in this thread, or has just run; None where none does."""
    return torch._C._current_autograd_node()
