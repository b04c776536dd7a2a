"""Reads that nobody may depend on: which of them differ on other data, and which a guard must hold to the trace's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rkgb.capture.trace import trace
from rkgb.errors import GuardError, TraceError
from rkgb.ir.bgraph import BGraph, BNode
from rkgb.ir.dgraph import DGraph, leaf_tensors, run_nodes
from rkgb.ir.sample import Sample
from rkgb.passes.b_to_d import b_to_d
from rkgb.recording.guard import Guard
from rkgb.replay.fresh import offers
from rkgb.replay.same import argument_pairs, same_function
from rkgb.state.module_state import module_state_kept, seed_default_streams
from rkgb.tree import is_tensor

# One of many counts, such as the rows of an expert, is sometimes that of the sample by chance: it is to vary, too.
_ROUNDS = 4


def without_varying_guards(
    basic: BGraph, dataflow: DGraph, module: torch.nn.Module, sample: Sample, opaque: Iterable[torch.nn.Module] = ()
) -> tuple[BGraph, DGraph]:
    """Drop the guards, of those that may vary, that read another value on fresh data.

    Python may have looked at a shape that depends on data (a loop over what was found), and PyTorch may have
    made something of a number that it read, so that each has a guard at first. Where another value comes up, the
    module is recorded once more on the data that gave it: only where this leads to the same operations with the same
    numbers in them, nothing depends on it. The replay check follows.
    """
    dropped, varying, used = _what_varies(basic, dataflow, module, sample, tuple(opaque))
    if not dropped and not varying and not used:
        return basic, dataflow
    nodes = [node for node in basic.nodes if node.name not in dropped]
    nodes = [_held(node) if node.name in used else node for node in nodes]
    told = list(basic.side_effects)
    if varying:
        first = next(node for node in nodes if not varying.isdisjoint(node.output_names))
        told.append(
            f"{len(varying)} values, first %{first.name} at {first.source}, have a shape that depends on data: bytes "
            "and times are those of the sample. Give a sample that takes as much as any batch."
        )
    kept = replace(basic, nodes=nodes, varying=frozenset(varying), side_effects=told)
    kept.verify()
    return kept, b_to_d(kept, module, sample)


def _held(node: BNode) -> BNode:
    """`node`, a guard, as one that no run may pass with another value."""
    assert isinstance(node.call.function, Guard)
    return replace(node, call=replace(node.call, function=replace(node.call.function, may_vary=False)))


def _what_varies(
    graph: BGraph, dataflow: DGraph, module: torch.nn.Module, sample: Sample, opaque: tuple[torch.nn.Module, ...]
) -> tuple[set[str], set[str], set[str]]:
    """Names of guards to drop, of values that have another shape on fresh data, and of guards that must hold."""
    guards: set[str] = set()
    varying: set[str] = set()
    used: set[str] = set()
    nodes: list[Any] = []
    for node in graph.nodes:
        guard = node.call.function
        if isinstance(guard, Guard) and guard.may_vary:
            node = replace(node, call=replace(node.call, function=Noting(guard, node.name, guards)))
        nodes.append(node)
    if not any(isinstance(node.call.function, Noting) for node in nodes):
        return set(), set(), set()

    def observe(node: Any, values: dict[str, Any]) -> None:
        for name in node.output_names:
            if name in dataflow.values and tuple(values[name].shape) != dataflow.values[name].shape:
                varying.add(name)

    for seed in range(_ROUNDS):
        for offer in offers(sample):  # integers in another order are nothing to some modules: sorted lengths
            fresh = offer.of(sample, seed)
            before = set(guards), set(varying)
            with module_state_kept(module, own=graph.generators), torch.no_grad(), contextlib.suppress(Exception):
                seed_default_streams(seed)
                run_nodes(nodes, dict(leaf_tensors(graph.leaves, module, fresh.copy().tensors)), [], observe)
                break
            # What the run has read until it failed is not believed; but if a number that is read stands in an operation
            # as it was in the sample, the operation may have failed for that: the module's own recording tells.
            used |= _used(graph, module, fresh, seed, guards - before[0], opaque)
            guards.clear()
            varying.clear()
            guards.update(before[0])
            varying.update(before[1])
        if not guards <= before[0]:
            used |= _used(graph, module, fresh, seed, guards, opaque)
    if guards & used:
        varying.clear()  # a run in which they differ does not come to its end
    return guards - used, varying, used


def _used(
    graph: BGraph,
    module: torch.nn.Module,
    fresh: Sample,
    seed: int,
    different: set[str],
    opaque: tuple[torch.nn.Module, ...],
) -> set[str]:
    """Of the guards that read a `different` value on `fresh` data, those on whose value the module's operations depend.

    The module is recorded on these data, and the two graphs are compared up to where a guard that must hold differs.
    """
    if not different:
        return set()
    with module_state_kept(module, own=graph.generators):
        seed_default_streams(seed)
        try:
            again = trace(module, fresh.copy(), "record", opaque)
        except TraceError:  # the module refuses these data, or goes a way on them that has no graph
            return set()
    read: dict[str, tuple[Any, Any]] = {}
    used: set[str] = set()
    others = iter(again.nodes)
    for node in graph.nodes:
        other = next(others, None)
        if other is None or not same_function(node.call, other.call):
            return used | read.keys()  # such as another turn of a loop
        guard, theirs = node.call.function, other.call.function
        if isinstance(guard, Guard) and isinstance(theirs, Guard):
            values = (guard.expected, theirs.expected)
            if not guard.may_vary and _plain(values[0]) != _plain(values[1]):
                return used  # another branch, which this guard holds every run to
            if node.name in different and _plain(values[0]) != _plain(values[1]):
                read[node.name] = values
        for numbers in argument_pairs(node.call, other.call, graph.leaves, again.leaves):
            found = set() if any(map(is_tensor, numbers)) else {n for n, v in read.items() if numbers in _parts(v)}
            used |= found or read.keys()
    return used


def _parts(values: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The numbers of what was read, each with what was read in its place on other data."""
    yield values
    if all(isinstance(value, (tuple, list)) for value in values):
        yield from zip(*values, strict=False)


def _plain(value: Any) -> Any:
    """As text: an array and a NaN equal themselves."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


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
