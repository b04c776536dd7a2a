"""Reads that nobody may depend on: which of them differ on other data, and which a guard must hold to the trace's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from rkgb.bgraph import BGraph
from rkgb.dgraph import DGraph, b_to_d, leaf_tensors, run_nodes
from rkgb.errors import GuardError
from rkgb.guard import Guard
from rkgb.replay import fresh_sample
from rkgb.sample import Sample
from rkgb.state import borrowed


def without_varying_guards(
    basic: BGraph, dataflow: DGraph, module: torch.nn.Module, sample: Sample
) -> tuple[BGraph, DGraph]:
    """Drop the guards, of those that may vary, that read another value on fresh data.

    Python may have looked at a shape that depends on data (a loop over what was found), and PyTorch may have
    made something of a number that it read, so that each has a guard at first. Where another value comes up
    and the replay check, which follows, still finds the trace exact, nothing depends on it.
    """
    varying = _varying_guards(basic, module, sample)
    if not varying:
        return basic, dataflow
    nodes = [node for node in basic.nodes if node.name not in varying]
    kept = replace(basic, nodes=nodes)
    kept.verify()
    return kept, b_to_d(kept, module, sample.copy())


def _varying_guards(graph: BGraph, module: torch.nn.Module, sample: Sample) -> set[str]:
    nodes: list[Any] = []
    varying: set[str] = set()
    for node in graph.nodes:
        guard = node.call.function
        if isinstance(guard, Guard) and guard.may_vary:
            node = replace(node, call=replace(node.call, function=_Noting(guard, node.name, varying)))
        nodes.append(node)
    if len(nodes) == 0 or not any(isinstance(node.call.function, _Noting) for node in nodes):
        return set()
    with borrowed(module), torch.no_grad():
        for permuted in (True, False):  # integers in another order are nothing to some modules: sorted lengths
            torch.manual_seed(0)
            fresh = fresh_sample(sample, permuted=permuted)
            values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, fresh.tensors))
            with contextlib.suppress(Exception):
                run_nodes(nodes, values, [])
                return varying
            varying.clear()
    return set()


class _Noting:
    """In place of a guard: notes that another value is read instead of refusing it."""

    is_guard = True

    def __init__(self, guard: Guard, name: str, varying: set[str]) -> None:
        self._guard = guard
        self._name = name
        self._varying = varying

    def __call__(self, *args: Any) -> None:
        """Check one run."""
        try:
            self._guard(*args)
        except GuardError:
            self._varying.add(self._name)
