"""How much of the parameters that may rest in a second memory is to be here at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rk_solvers.links import Link, SecondMemory
from rkgb import KGraph, LeafKind
from rockmate.resting.tensors import can_rest
from rockmate.resting.window import SimulatedWindow
from rockmate.runtime.lowering import may_rest, uses_of
from rockmate.runtime.resting import Rests, backward_of

_HIDDEN = 0.01  # of the step's time: what is waited for at most where all comes in time
_SIZES = 10  # windows that are simulated, from what one operation needs to all
_STEPS = 3  # of a simulation: then it goes on as it has begun

Uses = list[tuple[float, list[int]]]


def window_for(
    graph: KGraph, sizes_bytes: Mapping[str, int], memory: SecondMemory, room_bytes: int, most_bytes: int | None = None
) -> int:
    """What is to be here at a time of parameters, by their names in the graph, that rest in a second memory.

    It is the smallest window for which hardly anything is waited for, and what there is room for above that. Where that
    is more than `most_bytes`, it is those, and waits are longer: but never less than one operation needs.
    """
    names, sizes = list(sizes_bytes), list(sizes_bytes.values())
    uses, step_ms = timed_uses(graph, names)
    found = _smallest(sizes, uses, step_ms, memory.back)
    if most_bytes is not None and found > most_bytes:
        return max(most_bytes, _least(sizes, uses))
    return found if room_bytes <= found else _fitted(sizes, uses, min(sum(sizes), room_bytes), memory.back)


def parameters_that_may_rest(model: torch.nn.Module, graph: KGraph, trains: bool) -> dict[str, int]:
    """By name in the graph: bytes of parameters that may rest; without those that train, or with them.

    Those that the forward does not read have the names that the model gives them.
    """
    leaves = graph.sgraph.dgraph.leaves
    parameters = {name: model.get_parameter(leaves[name].path) for name in may_rest(graph)}
    read = {id(model.get_parameter(leaf.path)) for leaf in leaves.values() if leaf.kind is LeafKind.PARAMETER}
    parameters |= {path: held for path, held in model.named_parameters() if id(held) not in read}
    return {
        name: parameter.untyped_storage().nbytes()
        for name, parameter in parameters.items()
        if can_rest(parameter) and (trains or not parameter.requires_grad)
    }


def timed_uses(graph: KGraph, names: list[str]) -> tuple[Uses, float]:
    """Which of the parameters a step that recomputes nothing uses, each time after so many ms of computation.

    And the time of that step.
    """
    rests = uses_of(graph, dict.fromkeys(names, ({}, "")))
    number = {name: index for index, name in enumerate(names)}
    uses: Uses = []
    last_ms = 0.0
    for event, start_ms in _starts(graph, rests):
        uses.append((max(0.0, start_ms - last_ms), [number[name] for name in rests.reads[event]]))
        last_ms = max(last_ms, start_ms)
    return uses, sum(comp.time_ms for comp in graph)


def _starts(graph: KGraph, rests: Rests) -> Iterator[tuple[str, float]]:
    """When each event begins; what was not measured by itself, with what comes before it."""
    now_ms, starts_ms = 0.0, dict[str, float]()
    for comp in graph.forward:
        starts_ms |= {op.name: now_ms for op in comp.node.ops}
        now_ms += comp.time_ms
    for comp in graph.backward:
        starts_ms.setdefault(backward_of(comp.op), now_ms)
        now_ms += comp.time_ms
    last_ms = 0.0
    for event in rests.reads:
        last_ms = starts_ms.get(event, last_ms)
        yield event, last_ms


def _simulated(sizes: list[int], uses: Uses, window_bytes: int, link: Link) -> SimulatedWindow:
    window = SimulatedWindow(window_bytes, sizes, link)
    for _ in range(_STEPS):
        window.step(uses)
    return window


def _smallest(sizes: list[int], uses: Uses, step_ms: float, link: Link) -> int:
    """The smallest window for which hardly anything is waited for; where there is none, hardly more than for any."""
    least = _least(sizes, uses)
    most = max(least, sum(sizes))
    windows = [round(least * (most / least) ** (part / _SIZES)) for part in range(_SIZES)] if least else [0]
    waits = {window: _simulated(sizes, uses, window, link).wait_ms for window in windows}
    enough_ms = max(0.0, min(waits.values())) + _HIDDEN * step_ms
    return _fitted(sizes, uses, min(window for window, wait in waits.items() if wait <= enough_ms), link)


def _least(sizes: list[int], uses: Uses) -> int:
    """What one operation needs at most."""
    return max((sum(sizes[index] for index in used) for _, used in uses), default=0)


def _fitted(sizes: list[int], uses: Uses, window_bytes: int, link: Link) -> int:
    """What of a window is in use at most: another size would stay empty."""
    while (taken := _simulated(sizes, uses, window_bytes, link).most_held_bytes) < window_bytes:
        window_bytes = taken
    return window_bytes
