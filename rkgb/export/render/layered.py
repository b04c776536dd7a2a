"""Layers along the edges, for machines without Graphviz.

Which layer a node goes to, and the order within layers that lets few edges cross, come from fast-sugiyama (K. Sugiyama,
S. Tagawa, M. Toda: Methods for visual understanding of hierarchical system structures, 1981). It takes all nodes to be
of one size, so places within the layers are found here: each node is drawn towards its neighbours, as near as the
widths of those beside it allow, which is isotonic regression in each layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import fast_sugiyama

from rkgb.export.render.layout import ARROW, Box, Curve, Layout, Point, edge_ends
from rkgb.export.render.picture import Picture
from rkgb.export.render.style import Size

NODE_GAP = 16.0
BEND_GAP = 9.0  # beside an edge that passes a layer
LEAST_LAYER_GAP = 24.0
SWEEPS = 12
STRAIGHTNESS = 12.0  # how much more a long edge wants to be straight than a short one
PORT_SPREAD = 0.7  # part of a node's width along which its edges leave and arrive


@dataclass(eq=False, slots=True)
class Slot:
    """A node's place in a layer, or that of a bend of an edge which passes the layer."""

    name: str  # empty for a bend
    width: float
    height: float
    x: float = 0.0
    layer: int = 0
    above: list[tuple[Slot, float]] = field(default_factory=list, repr=False)  # neighbours, and how much they pull
    below: list[tuple[Slot, float]] = field(default_factory=list, repr=False)


def layered_layout(picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """Layers of a connected picture from top to bottom; upward edges point from lower to higher layers."""
    paths, layers = _slots(picture, sizes)
    for layer in layers:
        _pack(layer)
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 else reversed(layers):
            _draw_together(layer, bool(sweep % 2))
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 else reversed(layers):
            _draw_together(layer, None)
    _straighten(list(paths.values()), layers)
    left = min(slot.x - slot.width / 2 for layer in layers for slot in layer)
    for layer in layers:
        for slot in layer:
            slot.x -= left
    tops = _tops(layers)
    boxes = {
        slot.name: Box(slot.x, tops[slot.layer] + _height(layers[slot.layer]) / 2, slot.width, slot.height)
        for layer in layers
        for slot in layer
        if slot.name
    }
    curves = _curves(picture, paths, boxes, layers, tops)
    width = max(slot.x + slot.width / 2 for layer in layers for slot in layer)
    return Layout(boxes, curves, width, tops[-1] + _height(layers[-1]))


def _slots(picture: Picture, sizes: Mapping[str, Size]) -> tuple[dict[tuple[str, str], list[Slot]], list[list[Slot]]]:
    """The slots along each edge from its upper to its lower end, and all slots by layer, in order."""
    number = {node.name: index for index, node in enumerate(picture.nodes)}
    slots = {index: Slot(name, sizes[name].width, sizes[name].height) for name, index in number.items()}
    if not picture.edges:
        return {}, [list(slots.values())]
    weights = {edge_ends(edge): edge.weight for edge in picture.edges}
    pairs = [(number[upper], number[lower]) for upper, lower in weights]
    ((places, _, _, steps),) = fast_sugiyama.from_edges(pairs, dummy_vertices=True, check_layout=False)
    # What the library calls a dummy vertex is a bend; it has a number of its own. Higher layers have a larger y.
    for node, _ in places:
        slots.setdefault(int(node), Slot("", BEND_GAP, 0.0))
    layer_of = {y: index for index, y in enumerate(sorted({y for _, (_, y) in places}, reverse=True))}
    layers: list[list[Slot]] = [[] for _ in layer_of]
    for x, number_of_node, y in sorted((x, int(node), y) for node, (x, y) in places):
        slot = slots[number_of_node]
        slot.x, slot.layer = x, layer_of[y]
        layers[slot.layer].append(slot)
    followers: dict[int, list[int]] = {}
    for upper, lower in steps or ():
        followers.setdefault(int(upper), []).append(int(lower))
    paths = {}
    for first in number.values():
        for second in followers.get(first, ()):
            path = [slots[first], slots[second]]
            while not path[-1].name:
                second = followers[second][0]
                path.append(slots[second])
            paths[path[0].name, path[-1].name] = path
    for ends, weight in weights.items():
        for upper_slot, lower_slot in itertools.pairwise(paths[ends]):
            pull = STRAIGHTNESS if not (upper_slot.name or lower_slot.name) else float(weight)
            upper_slot.below.append((lower_slot, pull))
            lower_slot.above.append((upper_slot, pull))
    return paths, layers


def _apart(left: Slot, right: Slot) -> float:
    """Least distance between the centres of two neighbours."""
    gap = NODE_GAP if left.name and right.name else BEND_GAP
    return (left.width + right.width) / 2 + gap


def _pack(layer: list[Slot]) -> None:
    x = 0.0
    for index, slot in enumerate(layer):
        x += _apart(layer[index - 1], slot) if index else 0.0
        slot.x = x
    for slot in layer:
        slot.x -= x / 2


def _draw_together(layer: list[Slot], from_above: bool | None) -> None:
    """Move the slots of a layer towards their neighbours above, below, or both; order and gaps stay."""
    wanted, weights = [], []
    offset = 0.0
    offsets = []
    for index, slot in enumerate(layer):
        offset += _apart(layer[index - 1], slot) if index else 0.0
        offsets.append(offset)
        neighbours = slot.above * (from_above is not False) + slot.below * (from_above is not True)
        weight = sum(pull for _, pull in neighbours)
        goal = sum(pull * other.x for other, pull in neighbours) / weight if neighbours else slot.x
        wanted.append(goal - offset)
        weights.append(weight or 0.05)
    for slot, start, offset in zip(layer, _isotonic(wanted, weights), offsets, strict=True):
        slot.x = start + offset


def _isotonic(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing numbers nearest to `wanted` in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(wanted, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            before, before_weight, before_count = pools.pop()
            mean = (mean * total + before * before_weight) / (total + before_weight)
            total += before_weight
            count += before_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _straighten(paths: Sequence[Sequence[Slot]], layers: Sequence[Sequence[Slot]]) -> None:
    """Put the bends of each edge below one another as far as their neighbours leave room."""
    beside = {slot: (index, layer) for layer in layers for index, slot in enumerate(layer)}
    for path in sorted(paths, key=len, reverse=True):
        run: list[Slot] = []
        low, high = -math.inf, math.inf
        for slot in path[1:-1]:
            index, layer = beside[slot]
            least = layer[index - 1].x + _apart(layer[index - 1], slot) if index else -math.inf
            most = layer[index + 1].x - _apart(slot, layer[index + 1]) if index + 1 < len(layer) else math.inf
            if max(low, least) > min(high, most):
                _align(run, low, high)
                run, low, high = [], -math.inf, math.inf
            run.append(slot)
            low, high = max(low, least), min(high, most)
        _align(run, low, high)


def _align(run: Sequence[Slot], low: float, high: float) -> None:
    if run:
        x = min(high, max(low, median(slot.x for slot in run)))
        for slot in run:
            slot.x = x


def _height(layer: list[Slot]) -> float:
    return max(slot.height for slot in layer)


def _tops(layers: list[list[Slot]]) -> list[float]:
    """Where each layer begins. Gaps grow with how far edges go sideways, so that they stay apart."""
    tops = [0.0]
    for layer in layers[:-1]:
        sideways = max((abs(slot.x - other.x) for slot in layer for other, _ in slot.below), default=0.0)
        tops.append(tops[-1] + _height(layer) + LEAST_LAYER_GAP + min(46.0, 0.07 * sideways))
    return tops


def _curves(
    picture: Picture,
    paths: Mapping[tuple[str, str], list[Slot]],
    boxes: Mapping[str, Box],
    layers: list[list[Slot]],
    tops: list[float],
) -> tuple[Curve, ...]:
    ends = [edge_ends(edge) for edge in picture.edges]
    leaving = _ports([(upper, paths[upper, lower][1].x, index) for index, (upper, lower) in enumerate(ends)], boxes)
    arriving = _ports([(lower, paths[upper, lower][-2].x, index) for index, (upper, lower) in enumerate(ends)], boxes)
    curves = []
    for index, (edge, (upper, lower)) in enumerate(zip(picture.edges, ends, strict=True)):
        start = (leaving[index], boxes[upper].y + boxes[upper].height / 2)
        end = (arriving[index], boxes[lower].y - boxes[lower].height / 2)
        bends = [(slot.x, tops[slot.layer], _height(layers[slot.layer])) for slot in paths[upper, lower][1:-1]]
        tip = start if edge.upward else end
        if edge.upward:
            start = (start[0], start[1] + ARROW)
        else:
            end = (end[0], end[1] - ARROW)
        # An edge leaves the band of its layer straight down: a higher node beside it is never crossed.
        first = (start[0], tops[paths[upper, lower][0].layer] + _height(layers[paths[upper, lower][0].layer]))
        last = (end[0], tops[paths[upper, lower][-1].layer])
        points = [start]
        _line(points, first if first[1] > start[1] else start)
        for x, top, height in bends:
            _bend(points, (x, top))
            _line(points, (x, top + height))
        _bend(points, last if last[1] < end[1] else end)
        _line(points, end)
        curves.append(Curve(tuple(points), tip))
    return tuple(curves)


def _ports(wishes: list[tuple[str, float, int]], boxes: Mapping[str, Box]) -> dict[int, float]:
    """Where along their nodes' sides the edges attach: in the order of where they go, evenly."""
    by_node: dict[str, list[tuple[float, int]]] = {}
    for name, x, index in wishes:
        by_node.setdefault(name, []).append((x, index))
    ports = {}
    for name, edges in by_node.items():
        box = boxes[name]
        step = min(14.0, PORT_SPREAD * box.width / len(edges))
        for place, (_, index) in enumerate(sorted(edges)):
            ports[index] = box.x + (place - (len(edges) - 1) / 2) * step
    return ports


def _line(points: list[Point], end: Point) -> None:
    x, y = points[-1]
    if (x, y) != end:
        points += [(x, y + (end[1] - y) / 3), (x, y + 2 * (end[1] - y) / 3), end]


def _bend(points: list[Point], end: Point) -> None:
    x, y = points[-1]
    middle = (y + end[1]) / 2
    points += [(x, middle), (end[0], middle), end]
