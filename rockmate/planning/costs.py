"""From measured graphs to the solvers' plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Problem
from rkgb import AllGraphs, KComp, KGraph
from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rkgb.ir.kgraph import held_storages
from rkgb.ir.restoration import Restoration
from rkgb.process.autocast import without_autocast
from rkgb.restore import ways_back
from rkgb.tree import leaves, map_leaves
from rockmate.errors import LossError

LOSS = "loss"
_TIMED_RUNS = 5
_TIMED_RUNS_MS = 500.0  # a loss that takes longer than this in all is timed fewer times
LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossCost:
    """What the user's loss takes between the model's forward and its backward."""

    time_ms: float
    peak_bytes: int  # above the model's outputs, their gradients included
    written: tuple[int, ...] = ()  # places of the outputs that it writes into
    is_seen: bool = False  # in a step, as none was given


def assumed_loss_cost(graph: KGraph) -> LossCost:
    """Without a loss to measure: as much as a cross-entropy, which saves one tensor of the outputs' size
    and holds two gradients of that size at once."""
    return LossCost(0.0, 3 * graph.gradient_bytes)


def measure_loss(loss: LossFunction, output: Any) -> LossCost:
    """Run `loss` on what the model gave, as leaves of autograd, and back, a few times; tell what it took."""
    device = leaves(output)[0].device
    written = _written_by(loss, output)
    give = _as_computed if written else _as_it_is
    at = device_of(device)
    at.warm_up(lambda: _loss_and_back(loss, give(output)))
    for leaf in leaves(output):
        leaf.grad = None  # of the runs before: the gradients are the loss's to allocate
    peak_bytes = at.unwatched(lambda: _peak_bytes(loss, give(output), device))
    times_ms = [_timed_ms(loss, output, give, device)]
    while len(times_ms) < _TIMED_RUNS and sum(times_ms) < _TIMED_RUNS_MS:
        times_ms.append(_timed_ms(loss, output, give, device))
    return LossCost(min(times_ms), peak_bytes, written)  # what else the machine does only adds to a time


def _peak_bytes(loss: LossFunction, given: Any, device: torch.device) -> int:
    with AllocationLog(device) as log:
        _loss_and_back(loss, given)
    return log.peak_bytes


def _as_it_is(output: Any) -> Any:
    return output


def _as_computed(output: Any) -> Any:
    """Copies that autograd knows the origin of: what a loss may write into."""
    copies = {id(tensor): tensor.clone() for tensor in leaves(output)}
    return map_leaves(lambda tensor: copies[id(tensor)], output)


def _written_by(loss: LossFunction, output: Any) -> tuple[int, ...]:
    """Which of the distinct tensors in `output` the loss writes into; those that take gradients are as they were."""
    try:
        return _written_in_one_run(loss, output)
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
    return _written_in_one_run(loss, _as_computed(output))


def _written_in_one_run(loss: LossFunction, output: Any) -> tuple[int, ...]:
    given = list({id(tensor): tensor for tensor in leaves(output)}.values())
    versions = [tensor._version for tensor in given]
    loss(output)
    return tuple(place for place, tensor in enumerate(given) if tensor._version != versions[place])


def _timed_ms(loss: LossFunction, output: Any, give: Callable[[Any], Any], device: torch.device) -> float:
    for leaf in leaves(output):
        leaf.grad = None
    return device_of(device).time_ms(partial(_loss_and_back, loss, give(output)))


def _loss_and_back(loss: LossFunction, output: Any) -> None:
    value = evaluate_loss(loss, output)
    with without_autocast():  # where training calls it
        value.backward()


def evaluate_loss(loss: LossFunction, output: Any) -> torch.Tensor:
    """``loss(output)``; raises `LossError` unless it is one number that a backward can start from."""
    value: Any = loss(output)
    if not isinstance(value, torch.Tensor):
        found = f"returned a {type(value).__name__}"
    elif value.numel() != 1:
        found = f"returned a tensor of shape {list(value.shape)}"
    elif not value.requires_grad:
        found = "returned a tensor that does not require a gradient"
    else:
        return value
    raise LossError(
        f"the loss {found}: a scalar tensor computed from the model's output is needed, as loss(output).backward() "
        "would need it. Leave `loss` out to assume what a cross-entropy takes."
    )


def build_problem(graphs: AllGraphs, loss: LossCost) -> tuple[Problem, Chain]:
    """The whole training step as the solvers see it, and its partition into blocks."""
    graph = graphs.K_graph
    index_of = {data.name: index for index, data in enumerate(_stored(graph))}
    held = frozenset(index_of[name] for name in held_storages(graph) if name in index_of)
    producer = {data: place for place, comp in enumerate(graph.forward) for data in comp.outputs}
    data = tuple(Data(d.name, d.size_bytes, producer[d], d.kind) for d in _stored(graph))
    ways = ways_back(graph)
    forward = tuple(_forward_op(graph, comp, index_of, ways[comp.node]) for comp in graph.forward)
    backward = (
        BackwardOp(LOSS, loss.time_ms, tuple(sorted(held)), 0, loss.peak_bytes),
        *(_backward_op(comp, index_of) for comp in graph.backward),
    )
    problem = Problem(data, forward, backward, held)
    return problem, _chain(graphs, len(graph.backward))


def _stored(graph: KGraph) -> list[Any]:
    return [data for comp in graph.forward for data in comp.outputs]


def _forward_op(graph: KGraph, comp: KComp, index_of: dict[str, int], ways: tuple[Restoration, ...]) -> ForwardOp:
    sizes_bytes = {data.name: data.size_bytes for data in comp.outputs}
    return ForwardOp(
        comp.name,
        comp.time_ms,
        tuple(index_of[data.name] for data in comp.deps),
        tuple(index_of[data.name] for data in comp.outputs),
        comp.workspace_bytes,
        all(way.comes_back for way in ways),
        sum(way.kept_bytes(graph.sgraph.dgraph, comp.node, sizes_bytes) for way in ways),
        comp.repeat_ms,
    )


def _backward_op(comp: KComp, index_of: dict[str, int]) -> BackwardOp:
    needs = tuple(sorted(index_of[data.name] for data in comp.deps if data.kind != "grad"))
    return BackwardOp(comp.name, comp.time_ms, needs, comp.resident_bytes, comp.peak_bytes, comp.op)


def _chain(graphs: AllGraphs, stages: int) -> Chain:
    ranges, start = [], 0
    for block in graphs.blocks:
        ranges.append(range(start, start + len(block.nodes)))
        start += len(block.nodes)
    backward = graphs.K_graph.backward
    return Chain(tuple(ranges), (len(ranges), *(backward[stage].block for stage in range(stages))))
