"""A graph, or a part of one, as a picture: a node for each element, and stand-ins for what lies outside the part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rkgb.export.render.picture import Bar, Picture, PictureEdge, PictureNode, Scale
from rkgb.export.render.structure import DATA_KINDS, LEAF_KINDS, Element, Link, Structure
from rkgb.export.render.style import (
    LINE_LENGTH,
    LOOKS,
    TITLE_LENGTH,
    brief,
    edge_colour,
    format_bytes,
    format_ms,
    plain,
)

MOST_LEAVES_LISTED = 4  # in one node
MOST_PLACES_LISTED = 4  # where a value goes
HEADING_LENGTH = 90
STRAND_WEIGHT = 8  # of edges within the forward or within the backward, against leaves and what is between them


@dataclass(frozen=True, slots=True)
class Scales:
    """Bars of one document: the same length means the same size on every page."""

    bytes: Scale | None
    time: Scale | None

    @staticmethod
    def of(structure: Structure) -> Scales:
        """Scales that span the data and the computations of `structure`."""
        shown = [element for element in structure.elements.values() if element.kind not in LEAF_KINDS]
        return Scales(Scale.of(e.size_bytes for e in shown), Scale.of(e.time_ms for e in shown))

    def bars(self, size_bytes: int | None, time_ms: float | None) -> tuple[Bar, ...]:
        """A bar for each of the two quantities that is known and not zero."""
        bars = []
        if self.bytes is not None and size_bytes:
            bars.append(Bar(self.bytes.fraction(size_bytes), "bytes"))
        if self.time is not None and time_ms:
            bars.append(Bar(self.time.fraction(time_ms), "time"))
        return tuple(bars)

    def meanings(self) -> tuple[str, ...]:
        """What the bars mean, one text for each quantity, which is its first word."""
        texts = []
        if self.bytes is not None:
            ends = dict.fromkeys((format_bytes(self.bytes.lowest), format_bytes(self.bytes.highest)))
            texts.append(f"bytes: {' to '.join(ends)}, log scale")
        if self.time is not None:
            ends = dict.fromkeys((format_ms(self.time.lowest), format_ms(self.time.highest)))
            texts.append(f"time: {' to '.join(ends)}, log scale")
        return tuple(texts)


@dataclass(slots=True)
class Selection:
    """What of a structure a picture shows, and where the rest is."""

    structure: Structure
    scales: Scales
    names: Collection[str] = ()  # computations to show; empty for all
    place_of: Mapping[str, str] = field(default_factory=dict)  # computation → "block 2"


def compose(selection: Selection, title: str, subtitle: str = "") -> Picture:
    """The picture of the selected computations, what they read and what they make."""
    return _Composer(selection).picture(brief(title, HEADING_LENGTH), brief(subtitle, HEADING_LENGTH))


class _Composer:
    def __init__(self, selection: Selection) -> None:
        self.structure = selection.structure
        self.scales = selection.scales
        self.place_of = selection.place_of
        elements = self.structure.elements
        self.order = {name: index for index, name in enumerate(elements)}
        self.is_whole = not selection.names
        inner = set(selection.names) or {name for name, element in elements.items() if element.is_computation}
        touching = [link for link in self.structure.links if link.source in inner or link.target in inner]
        near = {name for link in touching for name in (link.source, link.target)}
        beside = {n for n in near if not elements[n].is_computation} if selection.names else set(elements) - inner
        self.shown = inner | beside
        self.inner = inner
        self.links = [link for link in self.structure.links if link.source in self.shown and link.target in self.shown]
        self.makers: dict[str, list[str]] = {}
        self.users: dict[str, list[str]] = {}
        for link in self.structure.links:
            self.makers.setdefault(link.target, []).append(link.source)
            self.users.setdefault(link.source, []).append(link.target)
        self.node_of: dict[str, str] = {}
        self.nodes: dict[str, PictureNode] = {}
        self.edges: dict[tuple[str, str], PictureEdge] = {}

    def picture(self, title: str, subtitle: str) -> Picture:
        self._add_leaves()
        for name in sorted(self.shown, key=self.order.__getitem__):
            if name not in self.node_of:
                self._add(self._node(self.structure.elements[name]))
        if not self.is_whole:
            self._add_stand_ins()
        for link in self.links:
            self._join(self.node_of[link.source], self.node_of[link.target], link)
        nodes = tuple(self.nodes.values())
        shown = {quantity for node in nodes for quantity in (bar.quantity for bar in node.bars)}
        scales = tuple(text for text in self.scales.meanings() if text.partition(":")[0] in shown)
        legend = tuple(look for look in LOOKS.values() if any(node.look is look for node in nodes))
        return Picture(title, subtitle, nodes, tuple(self.edges.values()), legend, scales)

    def _add(self, node: PictureNode) -> None:
        self.nodes[node.name] = node
        self.node_of.update(dict.fromkeys(node.members, node.name))

    def _join(self, source: str, target: str, link: Link) -> None:
        known = self.edges.get((source, target))
        values = "\n".join(plain(value) for value in link.values)
        if known is not None:
            self.edges[source, target] = replace(known, tooltip=f"{known.tooltip}\n{values}")
            return
        elements = self.structure.elements
        kinds = elements[link.source].kind, elements[link.target].kind
        upward = self.order[link.source] > self.order[link.target]
        is_dashed = "phantom" in kinds
        within_backward = [kind in ("backward", "grad") for kind in kinds]
        is_strand = within_backward[0] == within_backward[1] and kinds[0] not in LEAF_KINDS
        weight = STRAND_WEIGHT if is_strand else 1
        self.edges[source, target] = PictureEdge(source, target, edge_colour(*kinds), is_dashed, upward, values, weight)

    def _add_leaves(self) -> None:
        """One node for the leaves of one kind that the same computations read."""
        groups: dict[tuple[str, frozenset[str]], list[Element]] = {}
        users: dict[str, set[str]] = {}
        for link in self.links:
            users.setdefault(link.source, set()).add(link.target)
        for name in sorted(self.shown, key=self.order.__getitem__):
            element = self.structure.elements[name]
            if element.kind in LEAF_KINDS:
                groups.setdefault((element.kind, frozenset(users.get(name, ()))), []).append(element)
        for (kind, _), leaves in groups.items():
            self._add(self._leaf_node(kind, leaves))

    def _leaf_node(self, kind: str, leaves: list[Element]) -> PictureNode:
        tooltip = "\n".join(_tooltip(leaf) for leaf in leaves)
        members = tuple(leaf.name for leaf in leaves)
        if len(leaves) == 1:
            lines = (brief(leaves[0].shape, LINE_LENGTH),) if leaves[0].shape else ()
            title = brief(_leaf_name(leaves[0]), TITLE_LENGTH)
            return PictureNode(leaves[0].name, title, lines, LOOKS[kind], tooltip, members)
        modules = {_leaf_name(leaf).rpartition(".")[0] for leaf in leaves}
        shared = modules.pop() if len(modules) == 1 else ""
        texts = [_leaf_text(leaf, shared) for leaf in leaves]
        if len(texts) > MOST_LEAVES_LISTED:
            texts = [*texts[: MOST_LEAVES_LISTED - 1], f"… and {len(texts) - MOST_LEAVES_LISTED + 1} more"]
        title = brief(shared, TITLE_LENGTH) or f"{len(leaves)} {kind}s"
        return PictureNode(leaves[0].name, title, tuple(texts), LOOKS[kind], tooltip, members)

    def _node(self, element: Element) -> PictureNode:
        lines = _lines(element)
        makers = self.makers.get(element.name, ())
        is_outside = element.kind in DATA_KINDS and bool(makers) and self.inner.isdisjoint(makers)
        if element.kind in DATA_KINDS and not self.is_whole:
            lines += self._places_of_data(element)
        return PictureNode(
            element.name,
            brief(element.name, TITLE_LENGTH),
            tuple(brief(line, LINE_LENGTH) for line in lines),
            LOOKS[element.kind],
            _tooltip(element),
            (element.name,),
            self.scales.bars(element.size_bytes, element.time_ms),
            is_outside,
        )

    def _places_of_data(self, element: Element) -> list[str]:
        lines = []
        origins = _places(self.makers.get(element.name, []), self.inner, self.place_of)
        if origins:
            is_also_here = not self.inner.isdisjoint(self.makers[element.name])
            lines.append(f"{'also ' if is_also_here else ''}from {origins}")
        goals = _places(self.users.get(element.name, []), self.inner, self.place_of)
        if goals:
            lines.append(f"to {goals}")
        return lines

    def _add_stand_ins(self) -> None:
        """Nodes for computations elsewhere that make what is read here, and for where results go."""
        goals: dict[str, list[Link]] = {}
        for link in self.structure.links:
            elements = self.structure.elements
            if not (elements[link.source].is_computation and elements[link.target].is_computation):
                continue
            if link.target in self.inner and link.source not in self.inner:
                if link.source not in self.node_of:
                    self._add(self._stand_in(link.source, elements[link.source].name, self.place_of[link.source]))
                self._join(self.node_of[link.source], self.node_of[link.target], link)
            elif link.source in self.inner and link.target not in self.inner:
                goals.setdefault(link.source, []).append(link)
        for source, links in goals.items():
            places = _places([link.target for link in links], self.inner, self.place_of)
            goal = PictureNode(
                f"{source} goes on", f"to {places}", (), LOOKS["elsewhere"], f"to {places}", (), (), True
            )
            self._add(goal)
            for link in links:
                self._join(self.node_of[source], goal.name, link)

    def _stand_in(self, name: str, title: str, place: str) -> PictureNode:
        tooltip = _tooltip(self.structure.elements[name])
        return PictureNode(
            name,
            brief(title, TITLE_LENGTH),
            (f"from {place}",),
            LOOKS["elsewhere"],
            tooltip,
            (name,),
            (),
            True,
        )


def _places(names: list[str], inner: Collection[str], place_of: Mapping[str, str]) -> str:
    """Where these computations are, those of the page left out: ``block 2, block 5, …``."""
    places = list(dict.fromkeys(place_of[name] for name in names if name not in inner and name in place_of))
    if len(places) > MOST_PLACES_LISTED:
        places = [*places[: MOST_PLACES_LISTED - 2], "…", places[-1]]
    return ", ".join(places)


def _leaf_name(leaf: Element) -> str:
    return leaf.notes[0] if leaf.notes else leaf.name


def _leaf_text(leaf: Element, module: str) -> str:
    """Name within `module`, and shape."""
    name = _leaf_name(leaf).removeprefix(module).removeprefix(".")
    shape = f"  {brief(leaf.shape, LINE_LENGTH // 2)}" if leaf.shape else ""
    return brief(name, LINE_LENGTH - len(shape)) + shape


def _lines(element: Element) -> list[str]:
    lines = []
    what = element.shape
    if element.op and element.op.strip("_") not in element.name:
        what = f"{element.op} → {what}" if what else element.op
    measured = []
    if element.size_bytes or (element.kind in DATA_KINDS and element.size_bytes is not None):
        measured.append(format_bytes(element.size_bytes))
    if element.time_ms is not None:
        measured.append(format_ms(element.time_ms))
    if what and measured and len(what) < 27:
        lines.append(" · ".join((what, *measured)))
    else:
        lines += [text for text in (what, " · ".join(measured)) if text]
    if element.source.module_path:
        lines.append(element.source.module_path)
    lines += [note for note in element.notes if not note.startswith(("block ", "workspace_bytes"))]
    return lines


def _tooltip(element: Element) -> str:
    """Everything that is known of an element, one fact a line."""
    facts = [element.name, element.kind]
    facts += [text for text in (element.op, element.shape) if text]
    if element.size_bytes is not None:
        facts.append(f"{element.size_bytes} bytes")
    if element.time_ms is not None:
        facts.append(f"{element.time_ms:.4f} ms")
    if element.source.module_path or element.source.location:
        facts.append(str(element.source))
    facts += element.notes
    if len(element.ops) > 1:
        facts.append("operations: " + ", ".join(element.ops))
    return "\n".join(plain(fact) for fact in facts)
