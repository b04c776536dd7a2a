"""Calls of opaque submodules under ``torch.jit.trace``: each is a custom function that hands on what the call gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rkgb.errors import TraceError
from rkgb.ir.call import Call, Ref, is_ref
from rkgb.ir.opaque import OpaqueCall, held_by
from rkgb.ir.sample import Sample
from rkgb.recording.untraced import untraced
from rkgb.torch_private.tracers import unseen_by_jit
from rkgb.tree import is_tensor, leaves, map_leaves


class Mark:
    """Stands for one call in the traced graph."""

    def __init__(self, function: OpaqueCall, arguments: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        self.function = function
        self.outputs = outputs  # until they have been handed on: a traced graph lives long
        self._arguments = map_leaves(lambda _: Ref(""), arguments)

    def call(self, refs: Iterable[Ref]) -> Call:
        """The operation, on the values of these names."""
        given = iter(refs)
        return Call(self.function, map_leaves(lambda _: next(given), self._arguments, is_ref))


class HandOn(torch.autograd.Function):
    """What ``torch.jit.trace`` sees of an opaque call: what it reads, and what it gives."""

    @staticmethod
    def forward(ctx: Any, mark: Mark, *tensors: torch.Tensor) -> Any:
        # The tracer wants tensors whose making it has seen: empty ones, which then take the storages of the outputs.
        given = [torch.empty(0, dtype=output.dtype, device=output.device) for output in mark.outputs]
        with unseen_by_jit():
            for mine, output in zip(given, mark.outputs, strict=True):
                mine.set_(output.detach())  # type: ignore[call-overload]
        ctx.mark_non_differentiable(
            *(mine for mine, output in zip(given, mark.outputs, strict=True) if not output.requires_grad)
        )
        return given[0] if len(given) == 1 else tuple(given)


class JitCalls:
    """Makes the opaque calls of one ``torch.jit.trace``, in the order in which they were recorded before."""

    def __init__(self, recorded: Iterable[OpaqueCall]) -> None:
        self._recorded: Iterator[OpaqueCall] = iter(recorded)

    def __call__(self, path: str, submodule: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the submodule unseen, and let the tracer see `HandOn` in its place."""
        function = next(self._recorded, None)
        arguments, held = (args, kwargs), held_by(submodule)
        flags = tuple(tensor.requires_grad for tensor in leaves(arguments))
        if function is None or (function.path, function.gradients) != (path, flags) or not function.grad_enabled:
            raise TraceError(f"torch.jit.trace comes to submodule {path!r} on another way than when it was recorded.")
        tensors = leaves((*arguments, held))
        with untraced():
            output = function.apart((args, kwargs), Sample(args, kwargs).call(submodule))
            outputs = leaves(function.parts(output))
        if not outputs:
            raise TraceError(f"submodule {path!r} gives no tensor: torch.jit.trace has no place for its call.")
        mark = Mark(function, (*arguments, held), outputs)
        seen = HandOn.apply(mark, *tensors)  # type: ignore[no-untyped-call]
        mark.outputs = []
        remaining = iter([seen] if is_tensor(seen) else seen)
        return map_leaves(lambda _: next(remaining), output)
