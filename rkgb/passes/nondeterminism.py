"""Which of PyTorch's operations must not be repeated, as they may give something else: one table of facts.

Random operations are not among them: their generator's state is put back before they run again. Neither are
convolutions and matrix products. A library's algorithm for given shapes mostly repeats itself to the bit
(``torch.backends.cudnn.deterministic`` sees to it), and they are most of what there is to recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from rkgb.devices.registry import device_of
from rkgb.ir.call import is_ref
from rkgb.ir.dgraph import DNode
from rkgb.ir.values import ValueInfo
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import leaves

Values = Mapping[str, ValueInfo]
COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
_MASKS = (torch.bool, torch.uint8)


def reason_against_repetition(op: DNode, values: Values) -> str:
    """Why running `op` again on the same values may not give the same, or disturbs others; empty where it does not.

    `values` are the facts of the graph's values: what is arbitrary on an accelerator is often fixed on the CPU.
    """
    function = op.call.function
    if not isinstance(function, OpOverload):
        return ""
    if function.namespace in COLLECTIVES:
        return f"{op.name} takes part in a collective, which other processes would not repeat"
    if getattr(torch.Tag, "nondeterministic_bitwise", None) in function.tags:
        return f"{op.name} is declared not to repeat its bits"
    if function.namespace != "aten":
        return ""
    kind = op.call.op_name.strip("_")
    devices = [device_of(values[name].device) for name in (*op.inputs, *op.output_names) if name in values]
    if kind in _WRITES_IN_PARALLEL and _may_write_twice(op, values):
        return f"{op.name} may write several values to one place, in an order that is not fixed"
    place = "/".join(sorted({device.kind for device in devices if not device.is_orderly}))
    if not place:
        return ""
    for table, what in (
        (_BREAKS_TIES, "may order equal elements in another way"),
        (_IN_NO_ORDER, "adds or writes in an order that is not fixed"),
    ):
        if kind in table and table[kind](op, values):
            return f"{op.name} {what} each time on {place}"
    return ""


# ---- conditions ----------------------------------------------------------------------------------------


def _always(op: DNode, values: Values) -> bool:
    return True


def _gives_positions(op: DNode, values: Values) -> bool:
    """The value of a median is unique, its position is not."""
    return len(op.output_names) > 1


def _is_unstable(op: DNode, values: Values) -> bool:
    return op.call.kwargs.get("stable") is not True


def _is_floating(op: DNode, values: Values) -> bool:
    """Whole numbers have the same sum in every order."""
    return any(values[name].dtype.is_floating_point or values[name].dtype.is_complex for name in op.output_names)


def _scatters_several_values(op: DNode, values: Values) -> bool:
    function = op.call.function
    return isinstance(function, OpOverload) and not function._overloadname.startswith("value")


def _is_weighted(op: DNode, values: Values) -> bool:
    return len(leaves(op.call.args, is_ref)) + len(leaves(op.call.kwargs, is_ref)) > 1


def _may_write_twice(op: DNode, values: Values) -> bool:
    """Positions may repeat where a mask cannot; one value for all of them is the same in every order."""
    _, positions, given = op.call.args[:3]  # their schemas name these three before all that has a default
    several = any(math.prod(values[ref.name].shape) > 1 for ref in leaves(given, is_ref))
    return several and any(values[ref.name].dtype not in _MASKS for ref in leaves(positions, is_ref))


# ---- the table: operations by name, without underscores at the ends, and the condition ---------------------

# On orderly devices, too: seen on the CPU with several threads, and told by `torch.use_deterministic_algorithms`.
_WRITES_IN_PARALLEL = frozenset({"index_put", "index_put_impl", "unsafe_index_put", "put"})

# Nothing promises which of equal elements comes first, and another choice sends a token to another expert.
_BREAKS_TIES: Mapping[str, Callable[[DNode, Values], bool]] = {
    "topk": _always,
    "kthvalue": _always,
    "mode": _always,
    "median": _gives_positions,
    "nanmedian": _gives_positions,
    "sort": _is_unstable,
    "argsort": _is_unstable,
    "msort": _always,  # it returns values alone, but its gradient goes by positions
    "unique": _always,
    "unique2": _always,
    "unique_dim": _always,
}

# Told by `torch.use_deterministic_algorithms`: of their forwards, for nothing else is repeated.
_IN_NO_ORDER: Mapping[str, Callable[[DNode, Values], bool]] = {
    "scatter": _scatters_several_values,
    "scatter_add": _always,
    "scatter_reduce": _always,
    "index_add": _always,
    "index_copy": _always,
    "index_reduce": _always,
    "bincount": _is_weighted,
    "histc": _always,
    "cumsum": _is_floating,
    "cumprod": _is_floating,  # the same parallel scan as a sum's
    "logcumsumexp": _is_floating,
    "max_unpool2d": _always,
    "max_unpool3d": _always,
    "nll_loss2d": _always,
    "nll_loss2d_forward": _always,
    "nll_loss_nd": _always,
}
