"""What shapes depend on: allocations that read a tensor for its shape alone, and shapes that depend on data."""

from __future__ import annotations

import math
from typing import Any

import torch

from rkgb.call import Call
from rkgb.tree import leaves

_BOOLEAN = (torch.bool, torch.uint8)
_READERS = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)


def without_shape_read(call: Call, result: torch.Tensor) -> Call:
    """`call`, which made `result`; where that is ``empty_like`` or ``new_empty``, a call that reads no tensor.

    Without the tensor, what the allocation holds can be made again from nothing. Where the shape depends on data, the
    call must stay what it is.
    """
    if call.function not in _READERS or result.numel() == 0 or result.layout != torch.strided or result.is_pinned():
        return call
    dense = math.prod(result.shape) == result.untyped_storage().nbytes() // result.element_size()
    if not dense:
        return call
    keywords = {"dtype": result.dtype, "device": result.device}
    return Call(torch.ops.aten.empty_strided.default, (list(result.shape), list(result.stride())), keywords)


def shape_depends_on_data(func: Any, args: Any) -> bool:
    """Whether the shape of what ``func(*args)`` gives depends on the values of `args`, not on their shapes alone."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func._schema.name == "aten::index":  # with positions it has the positions' shape
        return any(tensor.dtype in _BOOLEAN for tensor in leaves(args[1]))
    return True
