"""A picture of a graph before anything is drawn: what each node shows, and what is joined to what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Shape = Literal["box", "round", "pill"]


@dataclass(frozen=True, slots=True)
class Look:
    """How nodes of one kind are drawn."""

    fill: str  # colours as #rrggbb
    border: str
    shape: Shape
    label: str  # in the legend
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A quantity as a bar: `fraction` of the width that a bar may take."""

    fraction: float
    quantity: str  # "bytes" or "time"


@dataclass(frozen=True, slots=True)
class PictureNode:
    """One box. `members` are the elements of the graph that it stands for: one, or several leaves."""

    name: str  # unique in its picture
    title: str
    lines: tuple[str, ...]
    look: Look
    tooltip: str
    members: tuple[str, ...]
    bars: tuple[Bar, ...] = ()
    outside: bool = False  # it belongs to another part of the graph, and stands here for it


@dataclass(frozen=True, slots=True)
class PictureEdge:
    """An arrow. `upward`: it points from a lower to a higher node, as the backward does."""

    source: str
    target: str
    colour: str
    dashed: bool = False
    upward: bool = False
    tooltip: str = ""
    weight: int = 1  # how much its ends want to be one below the other


@dataclass(frozen=True, slots=True)
class Picture:
    """One page. `columns` is the number of nodes in a row, or 0 to place nodes in layers along the edges."""

    title: str
    subtitle: str
    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]
    legend: tuple[Look, ...]
    scales: tuple[str, ...] = ()  # what the bars mean
    columns: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale for bars, the same on all pages of a document."""

    lowest: float
    highest: float

    @staticmethod
    def of(quantities: Iterable[float | None]) -> Scale | None:
        """The scale that the positive ones of these span; None where there are none."""
        positive = [quantity for quantity in quantities if quantity]
        return Scale(min(positive), max(positive)) if positive else None

    def fraction(self, quantity: float) -> float:
        """Length of the bar: 1 for the highest, 0.06 for the lowest, 0 for nothing."""
        if quantity <= 0:
            return 0.0
        if self.highest <= self.lowest:
            return 1.0
        place = math.log(quantity / self.lowest) / math.log(self.highest / self.lowest)
        return 0.06 + 0.94 * min(1.0, max(0.0, place))
