"""Graphs as text in aligned columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rkgb.export.render.pages import class_letter
from rkgb.export.render.parts import modules_of, parts_of
from rkgb.export.render.structure import Element, Graph, Structure, structure_of
from rkgb.export.render.style import brief, format_bytes, format_ms
from rkgb.ir.values import ValueInfo
from rkgb.pipeline import AllGraphs

HEADINGS = ("name", "kind", "operation", "reads", "shape", "bytes", "time", "where")
RIGHT_ALIGNED = frozenset(("bytes", "time", "nodes"))
COLUMN_LENGTH = 40  # characters


def describe(graph: Graph | AllGraphs, values: Mapping[str, ValueInfo] | None = None) -> str:
    """A graph as a table with a line for each element, or all graphs as a summary with a line for each block.

    `values` are the facts of a `Block`'s values, which it does not hold itself: ``graphs.D_graph.values``.

    Raises:
        RenderError: `graph` is none of the graphs of rkgb.
    """
    if isinstance(graph, AllGraphs):
        return _summary(graph)
    structure = structure_of(graph, values)
    reads: dict[str, list[str]] = {}
    for link in structure.links:
        reads.setdefault(link.target, []).append(link.source)
    rows = [_row(element, reads.get(element.name, [])) for element in structure.elements.values()]
    return "\n".join((_headline(structure), *table(HEADINGS, rows)))


def _headline(structure: Structure) -> str:
    counts = Counter(element.kind for element in structure.elements.values())
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    name = "block" if structure.graph_kind == "block" else f"{structure.graph_kind} graph"
    return f"{name}: {listed}"


def _row(element: Element, reads: Sequence[str]) -> list[str]:
    fills_nothing = element.is_computation and not element.size_bytes
    return [
        element.name,
        element.kind,
        element.op,
        ", ".join(reads),
        element.shape,
        "" if fills_nothing or element.size_bytes is None else format_bytes(element.size_bytes),
        "" if element.time_ms is None else format_ms(element.time_ms),
        " ".join(filter(None, (element.source.module_path, element.source.location))),
    ]


def _summary(graphs: AllGraphs) -> str:
    kinds: tuple[Graph, ...] = (graphs.B_graph, graphs.D_graph, graphs.S_graph, graphs.K_graph)
    lines = [_headline(structure_of(graph)) for graph in kinds]
    structure = structure_of(graphs.K_graph)
    parts = parts_of(structure, graphs.blocks, graphs.equivalent_classes)
    lines.append(f"{len(parts)} blocks, {len(graphs.equivalent_classes)} distinct")
    rows = []
    for part, block in zip(parts, graphs.blocks, strict=True):
        elements = [structure.elements[name] for name in part.names]
        made = {name for node in block.nodes for name in node.data}
        size_bytes = sum(structure.elements[name].size_bytes or 0 for name in made)
        time_ms = sum(element.time_ms or 0.0 for element in elements)
        letter = class_letter(part.class_number)
        where = modules_of(elements)
        rows.append(
            [str(part.index), letter, str(len(block.nodes)), format_bytes(size_bytes), format_ms(time_ms), where]
        )
    return "\n".join((*lines, *table(("block", "class", "nodes", "bytes", "time", "where"), rows)))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text with columns aligned; columns in which all is empty are left out."""
    cells = [[brief(cell, COLUMN_LENGTH) for cell in row] for row in rows]
    kept = [index for index in range(len(headings)) if any(row[index] for row in cells)]
    widths = {index: max(len(headings[index]), *(len(row[index]) for row in cells)) for index in kept}
    lines = []
    for row in (list(headings), *cells):
        texts = [
            row[index].rjust(widths[index]) if headings[index] in RIGHT_ALIGNED else row[index].ljust(widths[index])
            for index in kept
        ]
        lines.append("  ".join(texts).rstrip())
    return lines
