"""Which pages a graph takes: all of it on one, or an overview of its blocks and one page for each distinct block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rkgb.errors import GraphError
from rkgb.export.render.compose import Scales, Selection, compose
from rkgb.export.render.parts import MOST_COMPUTATIONS, Part, chunks, modules_of, parts_of
from rkgb.export.render.picture import Look, Picture, PictureEdge, PictureNode, Scale
from rkgb.export.render.structure import Graph, Structure, structure_of
from rkgb.export.render.style import EDGE_COLOUR, brief, class_look, format_bytes, format_ms, listed, numbered, plain
from rkgb.ir.bgraph import BGraph
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph
from rkgb.ir.kgraph import KGraph
from rkgb.ir.sgraph import SGraph
from rkgb.passes.cut import chain, cut
from rkgb.passes.d_to_s import d_to_s
from rkgb.passes.equivalence import equivalent_classes

GRAPH_NAMES = {
    "B": "B graph: the operations as traced",
    "D": "D graph: data flow",
    "S": "S graph: one node per storage filled",
    "K": "K graph: forward and backward",
    "block": "block",
}
MOST_CLASSES_IN_LEGEND = 12


@dataclass(frozen=True, slots=True)
class Cut:
    """The blocks of a graph, and which of them are equivalent."""

    blocks: Sequence[Block] = ()
    classes: Sequence[Sequence[int]] = ()


def cut_of(graph: Graph) -> Cut:
    """The blocks of a graph given alone. A B graph and a block have none: what they would need is not in them."""
    match graph:
        case KGraph():
            return Cut(graph.blocks, equivalent_classes(graph.sgraph.dgraph, graph.blocks))
        case DGraph() | SGraph():
            simplified = d_to_s(graph) if isinstance(graph, DGraph) else graph
            try:
                simplified.verify()
            except GraphError:
                return Cut()  # an S graph between two steps of its making has no chain yet
            blocks = cut(simplified, chain(simplified).skip_values)
            return Cut(blocks, equivalent_classes(simplified.dgraph, blocks))
        case BGraph() | _:
            return Cut()


def pages_of(graph: Graph, known: Cut | None = None, prefix: str = "") -> list[Picture]:
    """Pictures of `graph`, one for each page; titles begin with `prefix`. `known` saves finding the blocks again.

    Raises:
        RenderError: `graph` is none of the graphs of rkgb.
    """
    structure = structure_of(graph)
    name = prefix + GRAPH_NAMES[structure.graph_kind]
    scales = Scales.of(structure)
    count = len(structure.computations)
    if count <= MOST_COMPUTATIONS:
        return [compose(Selection(structure, scales), name, _counts(structure))]
    found = cut_of(graph) if known is None else known
    parts = parts_of(structure, found.blocks, found.classes)
    place_of = {each: part.label for part in reversed(parts) for each in part.names}
    pages = [overview(structure, parts, name)]
    for part in parts:
        if part.is_representative and part.names:
            pages += _pages_of_part(Selection(structure, scales, place_of=place_of), part, name)
    return pages


def _pages_of_part(selection: Selection, part: Part, name: str) -> list[Picture]:
    elements = selection.structure.elements
    others = [index for index in part.twins if index != part.index]
    label = part.label + (f" (and {listed(others)})" if others else "")
    runs = list(chunks(part.names, MOST_COMPUTATIONS))
    pages = []
    for number, run in enumerate(runs):
        page_label = label if len(runs) == 1 else f"{label}, page {number + 1} of {len(runs)}"
        place_of = dict(selection.place_of)
        if len(runs) > 1:
            pieces = {each: f"page {piece + 1}" for piece, names in enumerate(runs) for each in names}
            place_of.update(pieces)
        modules = modules_of([elements[each] for each in run])
        title = f"{page_label}: {modules}" if modules else page_label
        counts = f"{name} · {len(run)} nodes"
        shown = Selection(selection.structure, selection.scales, run, place_of)
        pages.append(compose(shown, title, counts))
    return pages


def _counts(structure: Structure) -> str:
    counts = [f"{len(structure.computations)} nodes"]
    data = [element for element in structure.elements.values() if element.kind in ("data", "grad", "phantom")]
    if data:
        counts.append(f"{len(data)} data, {format_bytes(sum(element.size_bytes or 0 for element in data))} in all")
    times = [element.time_ms for element in structure.elements.values() if element.time_ms is not None]
    if times:
        counts.append(format_ms(sum(times)))
    return " · ".join(counts)


def overview(structure: Structure, parts: Sequence[Part], name: str) -> Picture:
    """The chain of parts in reading order, one box each; equivalent parts share a colour."""
    sizes = [_part_bytes(structure, part) for part in parts]
    times = [_part_time(structure, part) for part in parts]
    scales = Scales(Scale.of(sizes), Scale.of(times))
    read = _parts_read(structure, parts)
    classes = len({part.class_number for part in parts})
    nodes = []
    for index, part in enumerate(parts):
        elements = [structure.elements[each] for each in part.names]
        measured = [f"{len(elements)} node{'s' if len(elements) != 1 else ''}"]
        measured += [format_bytes(size) for size in (sizes[index],) if size is not None]
        measured += [format_ms(time) for time in (times[index],) if time is not None]
        modules = modules_of(elements)
        lines = [" · ".join(measured), brief(modules, 30)]
        far = [other for other in read[index] if other != index - 1]
        if far:
            lines.append(f"reads {numbered(part.word, far, 4)} too")
        letter = class_letter(part.class_number)
        title = part.label + (f" · class {letter}" if classes < len(parts) else "")
        tooltip = "\n".join(map(plain, (part.label, *filter(None, lines), modules)))
        look = class_look(part.class_number, f"class {letter}")
        texts = tuple(line for line in lines if line)
        bars = scales.bars(sizes[index], times[index])
        nodes.append(PictureNode(part.label, title, texts, look, tooltip, part.names, bars))
    edges = [PictureEdge(before.label, after.label, EDGE_COLOUR) for before, after in itertools.pairwise(parts)]
    legend: list[Look] = []
    for part in parts:
        if part.is_representative and len(part.twins) > 1 and len(legend) < MOST_CLASSES_IN_LEGEND:
            label = f"class {class_letter(part.class_number)}: {numbered(part.word, part.twins)}"
            legend.append(class_look(part.class_number, label))
    word = parts[0].word if parts else "part"
    subtitle = f"{len(parts)} {word}s" + (f", {classes} distinct" if classes < len(parts) else "")
    columns = min(8, max(4, math.isqrt(len(parts))))
    return Picture(
        f"{name}, overview",
        f"{subtitle} · {_counts(structure)}",
        tuple(nodes),
        tuple(edges),
        tuple(legend),
        scales.meanings(),
        columns,
    )


def class_letter(number: int) -> str:
    """A, B, …, Z, AA, AB, … like the columns of a spreadsheet."""
    letters = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return letters


def _part_bytes(structure: Structure, part: Part) -> int | None:
    """Bytes that the forward of a part fills, phantoms included."""
    if structure.graph_kind == "K":
        inner = set(part.names)
        made = {link.target for link in structure.links if link.source in inner}
        elements = [structure.elements[each] for each in made if structure.elements[each].kind in ("data", "phantom")]
    else:
        elements = [structure.elements[each] for each in part.names]
    sizes = [element.size_bytes for element in elements]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _part_time(structure: Structure, part: Part) -> float | None:
    times = [structure.elements[each].time_ms for each in part.names]
    known = [time for time in times if time is not None]
    return sum(known) if known else None


def _parts_read(structure: Structure, parts: Sequence[Part]) -> list[list[int]]:
    """For each part, the earlier parts whose results it reads."""
    home = {each: part.index for part in reversed(parts) for each in part.names}
    # In K, data stand between computations: they are at home where their forward is.
    for link in structure.links:
        if link.source in home and structure.elements[link.target].kind in ("data", "phantom"):
            home.setdefault(link.target, home[link.source])
    read: list[set[int]] = [set() for _ in parts]
    for link in structure.links:
        source, target = home.get(link.source), home.get(link.target)
        if source is not None and target is not None and source < target:
            read[target].add(source)
    return [sorted(indices) for indices in read]
