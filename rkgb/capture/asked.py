"""What Python makes of sizes under ``torch.jit.trace``: there they are tensors, and each conversion is seen.

The tracer follows arithmetic with sizes, and takes for fixed whatever Python converts to a number of its own: by
``if length > 512``, by ``range(length)``. Such a conversion is put into the trace as a call of `Asked`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ASKING_FILE = __file__
_CONVERSIONS = frozenset(
    "__bool__ __int__ __index__ __float__ __complex__ __contains__ __format__ __repr__ __array__ item tolist numpy "
    "equal is_nonzero".split()
)


class Asked(torch.autograd.Function):
    """What the tracer sees of a conversion: the tensor that is converted."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor) -> torch.Tensor:
        return number.clone()


class Asking(TorchFunctionMode):
    """Puts each conversion of a tensor that may hold a size into the trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _CONVERSIONS:
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and not tensor.dim() and not tensor.requires_grad:
                    Asked.apply(tensor)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
