"""One run of a block by itself, forward and backward, told to an observer step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rkgb.ir.blocks import Block
from rkgb.ir.call import bind
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.dgraph import DGraph, DNode, last_uses
from rkgb.torch_private.operations import OpOverload


class FreshGradients(torch.autograd.Function):
    """Stands for the rest of the model: consumes the block's outputs, hands back new gradients."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        # Only the layouts are kept: holding an output here would keep its bytes alive.
        ctx.layouts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)  # real, for complex outputs too

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradients = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1e-3)
            for shape, stride, dtype, device in ctx.layouts
        ]
        return tuple(gradients)


class _Entrance(torch.autograd.Function):
    """Stands for the blocks before: their values pass, and their gradients gather until the block is done."""

    @staticmethod
    def forward(ctx: Any, observer: Observer, *values: torch.Tensor) -> Any:
        ctx.observer = observer
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.observer.gathered(gradients)
        return (None,) * (len(gradients) + 1)


class Observer:
    """Told of each operation and of each autograd node that a run of a block goes through."""

    def given(self, leaves: dict[str, torch.Tensor]) -> None: ...

    def before_op(self, op: DNode) -> None: ...

    def after_op(self, op: DNode, values: dict[str, Any]) -> None: ...

    def before_node(self, op: DNode) -> None: ...

    def gathered(self, gradients: Sequence[torch.Tensor | None]) -> None: ...

    def finished(self) -> None: ...


class Around(Observer):
    """Two observers of one run: what the outer one does is not within what the inner one times."""

    def __init__(self, outer: Observer, inner: Observer) -> None:
        self._outer = outer
        self._inner = inner

    def given(self, leaves: dict[str, torch.Tensor]) -> None:
        self._outer.given(leaves)
        self._inner.given(leaves)

    def before_op(self, op: DNode) -> None:
        self._outer.before_op(op)
        self._inner.before_op(op)

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        self._inner.after_op(op, values)
        self._outer.after_op(op, values)

    def before_node(self, op: DNode) -> None:
        self._outer.before_node(op)
        self._inner.before_node(op)

    def gathered(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._inner.gathered(gradients)
        self._outer.gathered(gradients)

    def finished(self) -> None:
        self._inner.finished()
        self._outer.finished()


def run_block(
    graph: DGraph, block: Block, leaves: dict[str, torch.Tensor], observer: Observer, forward_only: bool = False
) -> None:
    """Forward and backward of `block` on `leaves`, which `stand_ins` gives; gradients are in their ``.grad``."""
    observer.given(leaves)
    values: dict[str, Any] = dict(leaves)
    entering = [name for name in block.inputs if leaves[name].requires_grad]
    if entering:
        given_in = _Entrance.apply(observer, *(leaves[name] for name in entering))  # type: ignore[no-untyped-call]
        values.update(zip(entering, given_in, strict=True))
        del given_in
    nodes = _NodeFinder(observer)
    with torch.enable_grad():
        for op, dropped in zip(block.ops, last_uses(block.ops, [*block.outputs, *block.inputs]), strict=True):
            observer.before_op(op)
            with torch.set_grad_enabled(op.grad_enabled):
                bind(op.outputs, op.call.evaluate(values), values)
            observer.after_op(op, values)
            nodes.attribute(op, [values[name] for name in op.output_names])
            for name in dropped:
                values.pop(name, None)
        # The gradients of shared inputs are there before the block's backward adds to them.
        alive = [name for name in (*block.outputs, *block.shared_inputs) if name not in block.dead_outputs]
        outputs = [values[name] for name in alive if values[name].requires_grad and not forward_only]
        total = FreshGradients.apply(*outputs) if outputs else None  # type: ignore[no-untyped-call]
    values.clear()
    del outputs
    if total is not None:
        total.backward()
    observer.finished()


def stand_ins(graph: DGraph, block: Block, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the block reads, by name: leaves of an autograd graph of its own.

    A custom function, also within an opaque submodule, may run the module that holds its parameters in its backward,
    and ask for their gradients, as checkpoints of people's own do: these parameters are themselves, without a gradient.
    """
    own = {name for op in block.ops if _is_custom(op) for name in op.inputs}
    found: dict[str, torch.Tensor] = {}
    for name in (*block.leaves, *block.inputs):
        tensor = given[name]
        if name in own and isinstance(tensor, torch.nn.Parameter) and not _is_written(graph, block, name):
            tensor.grad = None
            found[name] = tensor
        else:
            found[name] = _stand_in(graph, block, name, tensor)
    return found


def _is_custom(op: DNode) -> bool:
    return not isinstance(op.call.function, OpOverload | CompiledCall)


def forget_gradients(block: Block, given: dict[str, Any]) -> None:
    """Let go of what runs of `block` have left in the parameters that it reads."""
    for name in block.leaves:
        if isinstance(given[name], torch.nn.Parameter):
            given[name].grad = None


def _is_written(graph: DGraph, block: Block, name: str) -> bool:
    return graph.owner(name) in {graph.owner(target) for op in block.ops for target in op.written}


def _stand_in(graph: DGraph, block: Block, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the storage of `tensor`, or a copy where the block writes into it."""
    detached = tensor.detach()
    if _is_written(graph, block, name):
        detached = detached.clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(detached, graph.values[name].requires_grad)  # compiled code looks at the class
    return detached.requires_grad_(graph.values[name].requires_grad)


class _NodeFinder:
    """Attributes every autograd node to the operation that created it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._known: set[Any] = set()

    def attribute(self, op: DNode, outputs: list[torch.Tensor]) -> None:
        # A hook that knew this object would make a cycle with the nodes, which no collector sees.
        observer = self._observer
        pending = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        while pending:
            node = pending.pop()
            # Accumulation of parameter gradients belongs to the node that feeds it.
            if node is None or node in self._known or node.name().endswith(("AccumulateGrad", "_EntranceBackward")):
                continue
            self._known.add(node)
            node.register_prehook(lambda _, op=op: observer.before_node(op))
            pending += [parent for parent, _ in node.next_functions]
