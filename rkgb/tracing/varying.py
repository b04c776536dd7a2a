"""Reads that nobody may depend on: which of them differ on other data, and which a guard must hold to the trace's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from rkgb.bgraph import BGraph
from rkgb.dgraph import DGraph, leaf_tensors, run_nodes
from rkgb.errors import GuardError
from rkgb.inspection import b_to_d
from rkgb.sample import Sample
from rkgb.state import borrowed
from rkgb.tracing.guard import Guard
from rkgb.tracing.replay import fresh_sample

# One of many counts, such as the rows of an expert, is sometimes that of the sample by chance: it is to vary, too.
_ROUNDS = 4


def without_varying_guards(
    basic: BGraph, dataflow: DGraph, module: torch.nn.Module, sample: Sample
) -> tuple[BGraph, DGraph]:
    """Drop the guards, of those that may vary, that read another value on fresh data.

    Python may have looked at a shape that depends on data (a loop over what was found), and PyTorch may have
    made something of a number that it read, so that each has a guard at first. Where another value comes up
    and the replay check, which follows, still finds the trace exact, nothing depends on it.
    """
    dropped, varying = _what_varies(basic, dataflow, module, sample)
    if not dropped and not varying:
        return basic, dataflow
    nodes = [node for node in basic.nodes if node.name not in dropped]
    told = list(basic.side_effects)
    if varying:
        first = next(node for node in nodes if not varying.isdisjoint(node.output_names))
        told.append(
            f"{len(varying)} values, first %{first.name} at {first.source}, have a shape that depends on data: bytes "
            "and times are those of the sample. Give a sample that takes as much as any batch."
        )
    kept = replace(basic, nodes=nodes, varying=frozenset(varying), side_effects=told)
    kept.verify()
    return kept, b_to_d(kept, module, sample.copy())


def _what_varies(graph: BGraph, dataflow: DGraph, module: torch.nn.Module, sample: Sample) -> tuple[set[str], set[str]]:
    """Names of guards that read another value on fresh data, and of values that have another shape."""
    guards: set[str] = set()
    varying: set[str] = set()
    nodes: list[Any] = []
    for node in graph.nodes:
        guard = node.call.function
        if isinstance(guard, Guard) and guard.may_vary:
            node = replace(node, call=replace(node.call, function=Noting(guard, node.name, guards)))
        nodes.append(node)
    if not any(isinstance(node.call.function, Noting) for node in nodes):
        return set(), set()

    def observe(node: Any, values: dict[str, Any]) -> None:
        for name in node.output_names:
            if name in dataflow.values and tuple(values[name].shape) != dataflow.values[name].shape:
                varying.add(name)

    with borrowed(module, own=graph.generators), torch.no_grad():
        for seed in range(_ROUNDS):
            for permuted in (True, False):  # integers in another order are nothing to some modules: sorted lengths
                torch.manual_seed(seed)
                fresh = fresh_sample(sample, seed, permuted)
                values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, fresh.tensors))
                before = set(guards), set(varying)
                with contextlib.suppress(Exception):
                    run_nodes(nodes, values, [], observe)
                    break
                guards.clear()
                varying.clear()
                guards.update(before[0])
                varying.update(before[1])
    return guards, varying


class Noting:
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
