"""Try the graph builder on a module, and say in words what came of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from rkgb.capture.trace import Tracer
from rkgb.devices.registry import device_of
from rkgb.export.render.style import format_bytes
from rkgb.ir.sample import make_sample
from rkgb.pipeline import AllGraphs, make_all_graphs
from rkgb.recording.guard import Guard
from rkgb.replay.replay import record_step, run_graph
from rkgb.state.module_state import training_mode


def test_rkgb(
    model: torch.nn.Module, sample: Any, model_kwargs: dict[str, Any] | None = None, *, tracer: Tracer = "auto"
) -> AllGraphs:
    """Build all graphs of `model`, verify them, replay a training step against autograd, and print a summary.

    Returns the graphs. Raises what `make_all_graphs` raises, and `AssertionError` if the step of the graphs
    differs in any bit from that of the model.
    """
    graphs = make_all_graphs(model, sample, model_kwargs, tracer=tracer)
    checked: list[Any] = [graphs.B_graph, graphs.D_graph, graphs.S_graph, graphs.K_graph, *graphs.K_graph_list]
    for graph in checked:
        graph.verify()
    arguments = make_sample(model, sample, model_kwargs)
    with training_mode(model):
        own = graphs.D_graph.generators
        expected = record_step(model, arguments.copy(), lambda data: data.call(model), own=own)
        found = record_step(model, arguments.copy(), lambda data: run_graph(graphs.D_graph, model, data), own=own)
    difference = expected.first_difference(found)
    assert difference is None, f"the graphs of {type(model).__name__} differ from it: {difference}"
    print(summary(graphs, type(model).__name__, len(expected.tensors)))
    return graphs


test_rkgb.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's, whatever its name


def summary(graphs: AllGraphs, name: str, compared: int = 0) -> str:
    """A screenful about `graphs`: sizes, blocks, what may not be repeated, and what was noticed on the way."""
    lines = [f"{name}, traced by {graphs.B_graph.tracer}"]
    for letter, what in _sizes(graphs).items():
        lines.append(f"  {letter}  {what}")
    lines.append(f"  {len(graphs.blocks)} blocks, {len(graphs.equivalent_classes)} distinct (forward + backward):")
    for members in graphs.equivalent_classes:
        lines.append(f"    {_named(members):<28} {_block(graphs, members[0])}")
    once = Counter(node.keep_reason for node in graphs.S_graph if node.keep_reason)
    if once:
        lines.append("  computed once, never again:")
        lines += [f"    {count} × {reason}" for reason, count in once.items()]
    guards = [node.call.function for node in graphs.D_graph if isinstance(node.call.function, Guard)]
    if guards:
        lines.append("  read out of the data, and compared at every run:")
        lines += [f"    {guard!r} at {guard.place}" for guard in guards]
    if graphs.B_graph.side_effects:
        lines.append("  besides:")
        lines += [f"    {told}" for told in graphs.B_graph.side_effects]
    if compared:
        lines.append(f"  a training step gives the same as the model's: {compared} tensors, every bit")
    return "\n".join(lines)


def _sizes(graphs: AllGraphs) -> dict[str, str]:
    phantoms = [data for data in graphs.K_graph.data.values() if data.kind == "phantom"]
    phantom_bytes = sum(data.size_bytes for data in phantoms)
    return {
        "B": f"{len(graphs.B_graph.nodes)} operations as traced",
        "D": f"{len(graphs.D_graph.nodes)} operations of the data flow, {len(graphs.D_graph.values)} values",
        "S": f"{len(graphs.S_graph.nodes)} nodes that fill a storage",
        "K": (
            f"{len(graphs.K_graph.forward)} forward and {len(graphs.K_graph.backward)} backward computations, "
            f"{len(phantoms)} phantoms of {format_bytes(phantom_bytes)}"
        ),
    }


def _block(graphs: AllGraphs, index: int) -> str:
    block, k_graph = graphs.S_graph_list[index], graphs.K_graph_list[index]
    values = graphs.D_graph.values
    filled = [values[owner] for node in block.nodes for owner in node.data]
    size_bytes = sum(device_of(info.device).allocated_bytes(info.storage_bytes) for info in filled)
    forward_ms = sum(comp.time_ms for comp in k_graph.forward)
    backward_ms = sum(comp.time_ms for comp in k_graph.backward)
    return f"{len(block.nodes):>3} nodes, {format_bytes(size_bytes):>10}, {forward_ms:7.2f} + {backward_ms:.2f} ms"


def _named(members: list[int]) -> str:
    shown = ", ".join(str(index) for index in members[:4])
    return f"block {shown}" + (f", … ({len(members)})" if len(members) > 4 else "")
