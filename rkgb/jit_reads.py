"""What Python reads out of tensors while ``torch.jit.trace`` runs: of their shapes, or of their data?

That tracer bakes both into the graph. Shapes are the sample's in every call; data are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rkgb.errors import TraceError
from rkgb.source import python_location
from rkgb.tree import leaves

_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ equal allclose is_nonzero".split()
)
_OF_SHAPE = frozenset({"aten::size", "aten::dim", "aten::numel", "prim::device", "prim::dtype", "aten::len"})
_RANDOM = ("aten::rand", "aten::bernoulli", "aten::normal", "aten::multinomial", "aten::dropout", "aten::poisson")
_VARIABLE_SHAPE = frozenset(
    "nonzero nonzero_numpy argwhere masked_select unique unique2 _unique2 unique_dim unique_consecutive "
    "repeat_interleave bincount".split()
)


class JitReads(TorchFunctionMode):
    """Notes the first read of data while a trace is made; hooks on tensors are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None  # what was read, and where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "register_hook" and args[0].grad_fn is not None:
            refuse_hook(python_location())
        reads = name in _READS or name in _VARIABLE_SHAPE or (name == "__getitem__" and _by_mask(args[1]))
        if reads and self.first is None and torch._C._is_tracing():
            if any(self._depends_on_data(tensor) for tensor in leaves((args, kwargs))):
                self.first = f"{name} at {python_location()}"
        return func(*args, **(kwargs or {}))

    def _depends_on_data(self, tensor: torch.Tensor) -> bool:
        try:
            value = torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]
        except RuntimeError:  # a tensor from elsewhere, which the trace cannot even hold as a constant
            return True
        return self._comes_from_data(value)

    def _comes_from_data(self, value: Any) -> bool:
        pending, seen = [value], set()
        while pending:
            value = pending.pop()
            name = value.debugName()
            if name in seen:
                continue
            seen.add(name)
            node = value.node()
            kind = node.kind()
            if kind in ("prim::Param", "prim::GetAttr", "prim::TracedAttr"):
                if value.type().kind() == "TensorType":
                    return True
            elif kind.startswith(_RANDOM):
                return True
            elif kind not in _OF_SHAPE:
                pending += list(node.inputs())
        return False


def refuse_hook(place: str) -> None:
    """Raise the error for a hook on a tensor."""
    raise TraceError(
        f"at {place} forward registers a hook on a tensor: the graph would run without it. Put what it does to the "
        "gradient into a torch.autograd.Function."
    )


def _by_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) and tensor.dim() > 0 for tensor in leaves(index))
