"""From a traced graph to one whose operations run by the kernels that are measured to be fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rkgb import DGraph, DNode
from rkgb.ir.call import Ref
from rkgb.process.autocast import without_autocast
from rockmate.errors import KernelsError
from rockmate.kernels.alternative import Alternative
from rockmate.kernels.alternatives import alternatives_of
from rockmate.kernels.option import ChosenKernels, KernelTrial, KnownKernels
from rockmate.kernels.trial import class_of, tried
from rockmate.progress import ProgressCallback
from rockmate.regions.choose import reason_of

_TRIED: dict[str, KernelTrial] = {}  # in this process: each class is tried once


def with_faster_kernels(
    graph: DGraph, progress: ProgressCallback, known: KnownKernels | None = None
) -> tuple[DGraph, ChosenKernels]:
    """`graph` with other kernels where these take less time, forward and backward, and all that were tried.

    Each class of equal operations is tried once by each kernel, on random numbers. Classes that are `known` are not
    tried again, and what is found is added there.
    """
    others = [(op, other) for op, other in _others_of(graph) if not other.is_picked]
    classes: dict[str, list[tuple[DNode, Alternative]]] = {}
    for op, other in others:
        digest = f"{class_of(op, other, graph.values)}, {torch.get_num_threads()} threads"
        classes.setdefault(digest, []).append((op, other))
    trials = []
    for number, (digest, alike) in enumerate(classes.items()):
        progress("kernels", number, len(classes))
        found = _TRIED.get(digest) or (known.get(digest) if known is not None else None)
        if found is None:
            found = _tried(graph, *alike[0])
            if known is not None:
                known.put(digest, found)
        _TRIED[digest] = found
        trials.append(replace(found, operations=tuple(op.name for op, _ in alike)))
    if classes:
        progress("kernels", len(classes), len(classes))
    chosen = ChosenKernels(_with_one_each(trials))
    return _with(graph, others, chosen), chosen


def as_chosen(graph: DGraph, chosen: ChosenKernels) -> DGraph:
    """`graph` with the kernels that were `chosen` for one like it; operations that it does not have are left out.

    Raises `KernelsError` where this PyTorch has no such kernel for one that it has.
    """
    others = _others_of(graph)
    kernels, there = chosen.kernel_of, {(op.name, other.kernel) for op, other in others}
    missing = [op.name for op in graph if op.name in kernels and (op.name, kernels[op.name]) not in there]
    if missing:
        raise KernelsError(
            f"{missing[0]} is one of {kernels[missing[0]]} in the plan, and cannot be here: are they switched off "
            "(torch.backends.mkldnn, torch.backends.cuda.enable_flash_sdp and the like), or not in this PyTorch? "
            "Plan anew, or have them."
        )
    return _with(graph, others, chosen)


def _others_of(graph: DGraph) -> list[tuple[DNode, Alternative]]:
    return [(op, other) for op in graph for other in alternatives_of(graph, op)]


def _with_one_each(trials: Sequence[KernelTrial]) -> tuple[KernelTrial, ...]:
    """The same, where of several kernels that would pay for an operation the quickest does."""
    quickest: dict[str, KernelTrial] = {}
    for trial in sorted((one for one in trials if one.pays), key=lambda one: one.other_ms):
        for name in trial.operations:
            quickest.setdefault(name, trial)

    def told(trial: KernelTrial) -> KernelTrial:
        first = quickest.get(trial.operations[0], trial)
        return trial if first is trial or not trial.pays else replace(trial, refused=f"{first.kernel} are faster")

    return tuple(map(told, trials))


def _tried(graph: DGraph, op: DNode, other: Alternative) -> KernelTrial:
    try:
        with without_autocast():
            return tried(op, other, graph.values)
    except Exception as error:  # noqa: BLE001  whatever PyTorch cannot do stays as it is
        return KernelTrial((op.name,), other.kernel, 0.0, 0.0, reason_of(error))


def _with(graph: DGraph, others: Sequence[tuple[DNode, Alternative]], chosen: ChosenKernels) -> DGraph:
    """`graph` with those of the `others` that were chosen."""
    kernels = chosen.kernel_of
    taken = {op: other for op, other in others if kernels.get(op.name) == other.kernel}
    if not taken:
        return graph
    nodes = [
        replace(op, call=taken[op].call, outputs=Ref(op.output_names[0])) if op in taken else op for op in graph.nodes
    ]
    noted = {name for op in taken for name in op.output_names[1:]}  # by a kernel, for its backward alone
    values = {name: info for name, info in graph.values.items() if name not in noted}
    result = replace(graph, nodes=nodes, values=values)
    result.verify()
    return result
