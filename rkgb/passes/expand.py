"""B graph to a finer B graph: composite operations that save tensors of their own are taken apart.

A composite operation (dropout, a batched matmul, attention on CPU) computes inner tensors, some of
which autograd saves. As one node it must be repeated whole to get one of them back; taken apart,
each inner tensor can be kept or recomputed by itself: a dropout's mask kept and its product
forgotten, a transposed copy made again without the product that reads it. One that hides what a single
other operation returns beside its result (the mean and the deviation of a layer normalisation, the
indices of a pooling) becomes that operation: to have them again, no graph is recorded a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from rkgb.devices.registry import device_of
from rkgb.ir.bgraph import BGraph, BNode
from rkgb.ir.call import Call, Ref, bind, function_name, ref_names
from rkgb.ir.dgraph import last_uses, leaf_tensors
from rkgb.ir.sample import Sample
from rkgb.passes.b_to_d import RUNNING_STATISTICS
from rkgb.passes.shape_reads import without_shape_read
from rkgb.process.uncompiled import DispatchMode
from rkgb.state.generators import is_own_generator
from rkgb.state.module_state import module_state_kept, never_unpacked
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.operations import OpOverload, is_composite
from rkgb.tree import leaves, map_leaves

# Taking an operation apart pays when what it hides is not negligible beside its output.
_WORTH = 0.125


def expand_composites(graph: BGraph, module: torch.nn.Module, sample: Sample) -> BGraph:
    """Run the trace once on the sample, and replace composite operations that hide saved tensors.

    Allocations that read a tensor for its shape become allocations of that shape.

    The inner operations are those that really ran; whether they give the same gradients is for the
    replay check to tell. The module is left as it was.
    """
    nodes: list[BNode] = []
    with module_state_kept(module, own=graph.generators):
        values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.tensors))
        given = set(values)
        with torch.enable_grad():
            for node, dropped in zip(graph.nodes, last_uses(graph.nodes, []), strict=True):
                nodes += _run(node, values)
                for name in dropped:
                    if name not in given:
                        values.pop(name, None)
    result = replace(graph, nodes=nodes)
    result.verify()
    return result


def _run(node: BNode, values: dict[str, Any]) -> list[BNode]:
    """Run `node`; return it, or what it is made of."""
    saved: dict[int, tuple[StorageWeakRef, int]] = {}  # which keep the keys of storages that are gone

    def drop(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage_key(tensor)] = StorageWeakRef(storage), storage.nbytes()

    composite = _is_composite(node.call) and not leaves((node.call.args, node.call.kwargs), is_own_generator)
    recorder = _Recorder([values[name] for name in node.call.inputs])
    hooks = torch.autograd.graph.saved_tensors_hooks(drop, never_unpacked)
    with torch.set_grad_enabled(node.grad_enabled), hooks:
        if composite:
            with recorder:
                result = node.call.evaluate(values)
        else:
            result = node.call.evaluate(values)
    known = {storage_key(tensor) for tensor in leaves([values[n] for n in node.call.inputs])}
    known |= {storage_key(tensor) for tensor in leaves(result)}
    hidden = sum(size for key, (_, size) in saved.items() if key not in known)
    size = sum(tensor.untyped_storage().nbytes() for tensor in leaves(result))
    is_one_call = len(recorder.calls) == 1  # in its place there is no operation more
    parts = None
    if composite and hidden > (0 if is_one_call else _WORTH * size) and not _takes_running_statistics(node.call):
        parts = _parts(node, recorder, values, result)
    bind(node.outputs, result, values)
    made = leaves(result)
    call = without_shape_read(node.call, made[0]) if made else node.call
    return parts or [node if call is node.call else replace(node, call=call)]


def _is_composite(call: Call) -> bool:
    function = call.function
    return isinstance(function, OpOverload) and is_composite(function)


def _takes_running_statistics(call: Call) -> bool:
    """Whether it is a normalisation that may write into its arguments without a word of it in its schema."""
    return isinstance(call.function, OpOverload) and call.function._schema.name in RUNNING_STATISTICS


@dataclass(frozen=True, slots=True)
class _Seen:
    """Stands for a tensor that operations read or made, by the number of it: the tensor itself may be gone."""

    number: int


@dataclass(frozen=True, slots=True)
class _Recorded:
    function: Any  # that ran; `call` may make the same otherwise
    call: Call  # with what stands for tensors; one that has come from outside is there itself
    result: Any
    grad_enabled: bool


class _Recorder(DispatchMode):
    """Records the operations that run below autograd. Their tensors are freed as they would be without it."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Recorded] = []
        self._seen: dict[int, tuple[TensorWeakRef, _Seen]] = {}  # the identity of one that is gone is given to others
        self._count = 0
        for tensor in given:
            self._noted(tensor)

    def standing_for(self, tensor: torch.Tensor) -> _Seen | None:
        reference, seen = self._seen.get(id(tensor), (None, None))
        return seen if reference is not None and reference() is tensor else None

    def _noted(self, tensor: torch.Tensor) -> _Seen:
        seen = self.standing_for(tensor)
        if seen is None:
            seen = _Seen(self._count)
            self._count += 1
            self._seen[id(tensor)] = TensorWeakRef(tensor), seen
        return seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = map_leaves(
            lambda tensor: self.standing_for(tensor) or _number(tensor), (tuple(args), dict(kwargs or {}))
        )
        result = func(*args, **(kwargs or {}))
        made = leaves(result)
        call = without_shape_read(Call(func, *told), made[0]) if made else Call(func, *told)
        self.calls.append(_Recorded(func, call, map_leaves(self._noted, _as_list(result)), torch.is_grad_enabled()))
        return result


def _is_seen(leaf: object) -> bool:
    return isinstance(leaf, _Seen)


def _parts(node: BNode, recorder: _Recorder, values: dict[str, Any], result: Any) -> list[BNode] | None:
    """The recorded calls as nodes, or None where they do not tell the whole story."""
    names = {recorder.standing_for(values[name]): name for name in node.call.inputs}
    outputs = {
        recorder.standing_for(tensor): ref.name
        for tensor, ref in zip(leaves(result), leaves(node.outputs, lambda leaf: isinstance(leaf, Ref)), strict=True)
    }
    if not outputs.keys().isdisjoint(names):
        return None
    calls = recorder.calls
    last = {seen: index for index, call in enumerate(calls) for seen in leaves(call.result, _is_seen)}
    parts: list[BNode] = []
    for index, call in enumerate(calls):
        produced = leaves(call.result, _is_seen)
        # A tensor that is no input and no result has come from outside: only numbers may.
        if leaves((call.call.args, call.call.kwargs)) or not produced:
            return None
        made = map_leaves(lambda seen: Ref(names[seen]), (call.call.args, call.call.kwargs), _is_seen)
        is_alone = len(calls) == 1
        stem = node.name if is_alone else f"{node.name}_{function_name(call.function).strip('_')}_{index}"
        for place, seen in enumerate(produced):
            own = stem if len(produced) == 1 else f"{stem}_{place}"
            names[seen] = outputs[seen] if seen in outputs and last[seen] == index else own
        pattern = map_leaves(lambda seen: Ref(names[seen]), call.result, _is_seen)
        grad_enabled = node.grad_enabled and call.grad_enabled
        parts.append(BNode(stem, Call(call.call.function, *made), pattern, grad_enabled, node.source))
    defined = {name for part in parts for name in part.output_names}
    return parts if set(ref_names(node.outputs)) <= defined else None


def _as_list(result: Any) -> Any:
    return list(result) if isinstance(result, tuple) else result


def _number(tensor: torch.Tensor) -> Any:
    """What Python made a tensor of, or the tensor."""
    if tensor.dim() == 0 and tensor.dtype in (torch.float64, torch.int64) and device_of(tensor.device).is_host:
        return tensor.item()
    return tensor
