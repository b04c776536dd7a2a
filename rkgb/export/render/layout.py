"""Where the boxes and curves of a picture go: what every layout returns, and the simplest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from rkgb.export.render.picture import Picture, PictureEdge, PictureNode
from rkgb.export.render.style import Size

Point = tuple[float, float]

ROW_GAP = 26.0
COLUMN_GAP = 26.0
ARROW = 7.0


@dataclass(frozen=True, slots=True)
class Box:
    """A node's place: its centre, with y growing downwards, and its size, in points."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Curve:
    """An edge's path: Bézier points (start, then two controls and an end for each cubic), and the arrow's tip."""

    points: tuple[Point, ...]
    tip: Point


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all nodes, by name, and of all edges, in the picture's order."""

    boxes: dict[str, Box]
    curves: tuple[Curve, ...]
    width: float
    height: float


def edge_ends(edge: PictureEdge) -> tuple[str, str]:
    """The upper and the lower end of an edge of a layered picture."""
    return (edge.target, edge.source) if edge.upward else (edge.source, edge.target)


def straight(start: Point, end: Point, tip: Point) -> Curve:
    """A curve that is a line."""
    third = ((2 * start[0] + end[0]) / 3, (2 * start[1] + end[1]) / 3)
    two_thirds = ((start[0] + 2 * end[0]) / 3, (start[1] + 2 * end[1]) / 3)
    return Curve((start, third, two_thirds, end), tip)


def grid_layout(picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """Nodes in rows, in reading order; edges lead from each node to the next."""
    width = max(size.width for size in sizes.values())
    height = max(size.height for size in sizes.values())
    boxes = {}
    for index, node in enumerate(picture.nodes):
        row, column = divmod(index, picture.columns)
        x = width / 2 + column * (width + COLUMN_GAP)
        boxes[node.name] = Box(x, height / 2 + row * (height + ROW_GAP), width, height)
    columns = min(picture.columns, len(boxes))
    rows = -(-len(boxes) // picture.columns)
    curves = tuple(_between(boxes[edge.source], boxes[edge.target]) for edge in picture.edges)
    return Layout(boxes, curves, columns * (width + COLUMN_GAP) - COLUMN_GAP, rows * (height + ROW_GAP) - ROW_GAP)


def mirrored(picture: Picture, layout: Layout) -> Layout:
    """The layout with what upward edges leave, which is the backward, on the right."""
    upward = {edge.source for edge in picture.edges if edge.upward}
    xs = [box.x for name, box in layout.boxes.items() if name in upward]
    others = [box.x for name, box in layout.boxes.items() if name not in upward]
    if not xs or not others or mean(xs) >= mean(others):
        return layout
    boxes = {name: replace(box, x=layout.width - box.x) for name, box in layout.boxes.items()}
    curves = tuple(
        Curve(tuple((layout.width - x, y) for x, y in curve.points), (layout.width - curve.tip[0], curve.tip[1]))
        for curve in layout.curves
    )
    return replace(layout, boxes=boxes, curves=curves)


def components(picture: Picture) -> list[Picture]:
    """The picture's connected parts as pictures, the largest first."""
    root = {node.name: node.name for node in picture.nodes}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for edge in picture.edges:
        root[find(edge.target)] = find(edge.source)
    nodes: dict[str, list[PictureNode]] = {}
    edges: dict[str, list[PictureEdge]] = {}
    for node in picture.nodes:
        nodes.setdefault(find(node.name), []).append(node)
    for edge in picture.edges:
        edges.setdefault(find(edge.source), []).append(edge)
    found = [
        replace(picture, nodes=tuple(members), edges=tuple(edges.get(name, ()))) for name, members in nodes.items()
    ]
    return sorted(found, key=lambda part: -len(part.nodes))


def packed(picture: Picture, parts: Sequence[tuple[Picture, Layout]]) -> Layout:
    """Layouts of the picture's connected parts in columns, none much higher than the first part or a square page."""
    area = sum((layout.width + COLUMN_GAP) * (layout.height + ROW_GAP) for _, layout in parts)
    highest = max(parts[0][1].height, area**0.5)
    boxes: dict[str, Box] = {}
    curves: dict[tuple[str, str], Curve] = {}
    left = top = width = height = 0.0
    for part, layout in parts:
        if top and top + layout.height > highest:
            left, top = width + COLUMN_GAP, 0.0
        for name, box in layout.boxes.items():
            boxes[name] = replace(box, x=box.x + left, y=box.y + top)
        for edge, curve in zip(part.edges, layout.curves, strict=True):
            curves[edge.source, edge.target] = moved(curve, left, top)
        width = max(width, left + layout.width)
        height = max(height, top + layout.height)
        top += layout.height + ROW_GAP
    return Layout(boxes, tuple(curves[edge.source, edge.target] for edge in picture.edges), width, height)


def moved(curve: Curve, right: float, down: float) -> Curve:
    """The curve elsewhere."""
    tip = (curve.tip[0] + right, curve.tip[1] + down)
    return Curve(tuple((x + right, y + down) for x, y in curve.points), tip)


def _between(before: Box, after: Box) -> Curve:
    if before.y == after.y:
        tip = (after.x - after.width / 2, after.y)
        return straight((before.x + before.width / 2, before.y), (tip[0] - ARROW, tip[1]), tip)
    # From the end of a row back to the start of the next, in the gap between the rows.
    start = (before.x, before.y + before.height / 2)
    tip = (after.x, after.y - after.height / 2)
    end = (tip[0], tip[1] - ARROW)
    middle = (start[1] + end[1]) / 2
    return Curve((start, (start[0], middle + 4), (end[0], middle - 4), end), tip)
