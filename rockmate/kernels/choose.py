"""From a traced graph to one whose operations run by the kernels that are measured to be fastest."""

from __future__ import annotations

from dataclasses import replace

import torch

from rkgb import DGraph, DNode
from rkgb.process.autocast import without_autocast
from rockmate.errors import KernelsError
from rockmate.kernels.alternatives import Alternative, alternative_of
from rockmate.kernels.option import ChosenKernels, KernelTrial, KnownKernels
from rockmate.kernels.trial import class_of, tried
from rockmate.progress import ProgressCallback
from rockmate.regions.choose import reason_of

_TRIED: dict[str, KernelTrial] = {}  # in this process: each class is tried once


def with_faster_kernels(
    graph: DGraph, progress: ProgressCallback, known: KnownKernels | None = None
) -> tuple[DGraph, ChosenKernels]:
    """`graph` with other kernels where these take less time, forward and backward, and all that were tried.

    Each class of equal operations is tried once, on random numbers. Classes that are `known` are not tried again, and
    what is found is added there.
    """
    others = {op: other for op, other in _others_of(graph).items() if not other.is_picked}
    classes: dict[str, list[DNode]] = {}
    for op, other in others.items():
        digest = f"{class_of(op, other, graph.values)}, {torch.get_num_threads()} threads"
        classes.setdefault(digest, []).append(op)
    trials = []
    for number, (digest, ops) in enumerate(classes.items()):
        progress("kernels", number, len(classes))
        found = _TRIED.get(digest) or (known.get(digest) if known is not None else None)
        if found is None:
            found = _tried(graph, ops[0], others[ops[0]])
            if known is not None:
                known.put(digest, found)
        _TRIED[digest] = found
        trials.append(replace(found, operations=tuple(op.name for op in ops)))
    if classes:
        progress("kernels", len(classes), len(classes))
    chosen = ChosenKernels(tuple(trials))
    return _with(graph, {op: other for op, other in others.items() if op.name in chosen.operations}), chosen


def as_chosen(graph: DGraph, chosen: ChosenKernels) -> DGraph:
    """`graph` with the kernels that were `chosen` for one like it; operations that it does not have are left out.

    Raises `KernelsError` where this PyTorch has no such kernel for one that it has.
    """
    names = chosen.operations
    found = {op: other for op, other in _others_of(graph).items() if op.name in names}
    missing = sorted(names.intersection(op.name for op in graph).difference(op.name for op in found))
    if missing:
        trial = next(one for one in chosen.chosen if missing[0] in one.operations)
        raise KernelsError(
            f"{missing[0]} is one of {trial.kernel} in the plan, and cannot be here: is oneDNN "
            "switched off (torch.backends.mkldnn), or not in this PyTorch? Plan anew, or have it."
        )
    return _with(graph, found)


def _others_of(graph: DGraph) -> dict[DNode, Alternative]:
    found = ((op, alternative_of(graph, op)) for op in graph)
    return {op: other for op, other in found if other is not None}


def _tried(graph: DGraph, op: DNode, other: Alternative) -> KernelTrial:
    try:
        with without_autocast():
            return tried(op, other, graph.values)
    except Exception as error:  # noqa: BLE001  whatever PyTorch cannot do stays as it is
        return KernelTrial((op.name,), other.kernel, 0.0, 0.0, reason_of(error))


def _with(graph: DGraph, others: dict[DNode, Alternative]) -> DGraph:
    if not others:
        return graph
    nodes = [replace(op, call=others[op].call) if op in others else op for op in graph.nodes]
    result = replace(graph, nodes=nodes)
    result.verify()
    return result
