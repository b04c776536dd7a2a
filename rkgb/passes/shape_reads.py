"""What shapes depend on: operations that read a tensor for its shape or type alone, and shapes that depend on data."""

from __future__ import annotations

import math
from typing import Any

import torch

from rkgb.ir.call import Call
from rkgb.tree import leaves

_BOOLEAN = (torch.bool, torch.uint8)
_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty_like.default, _aten.new_empty.default)
# What looks at its first argument as at a tensor of the second one's shape: the same, given the shape.
_SHAPED_AS = {
    _aten.expand_as.default: _aten.expand.default,
    _aten.view_as.default: _aten.view.default,
    _aten.reshape_as.default: _aten.reshape.default,
}


def without_shape_read(call: Call, result: torch.Tensor) -> Call:
    """`call`, which made `result`; where that reads a tensor for its shape or type alone, a call that does not.

    Without the tensor, what an allocation holds can be made again from nothing, and a view of a parameter from the
    parameter. Where the shape depends on data, the call must stay what it is.
    """
    if result.layout != torch.strided:
        return call
    if call.function in _ALLOCATIONS:
        return _allocation(call, result)
    if call.function in _SHAPED_AS:
        return Call(_SHAPED_AS[call.function], (call.args[0], list(result.shape)))
    if call.function in (_aten.type_as.default, _aten.to.other):
        names = ("non_blocking", "copy", "memory_format")
        options = {"dtype": result.dtype, "layout": result.layout, "device": result.device}
        options |= dict(zip(names, call.args[2:], strict=False)) | call.kwargs
        return Call(_aten.to.dtype_layout, (call.args[0],), options)
    return call


def _allocation(call: Call, result: torch.Tensor) -> Call:
    """`call`, or one that allocates such a `result`, whose numbers nobody has read, from numbers alone."""
    if result.numel() == 0 or result.is_pinned():
        return call
    dense = math.prod(result.shape) == result.untyped_storage().nbytes() // result.element_size()
    if not dense:
        return call
    keywords = {"dtype": result.dtype, "device": result.device}
    return Call(_aten.empty_strided.default, (list(result.shape), list(result.stride())), keywords)


def shape_depends_on_data(func: Any, args: Any) -> bool:
    """Whether the shape of what ``func(*args)`` gives depends on the values of `args`, not on their shapes alone."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._schema.name == "aten::index":  # with positions it has the positions' shape
        return any(tensor.dtype in _BOOLEAN for tensor in leaves(args[1]))
    return True
