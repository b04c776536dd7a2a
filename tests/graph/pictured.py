"""Graphs to draw, and pictures of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rkgb import AllGraphs
from rkgb.export.render.compose import Scales, Selection, compose
from rkgb.export.render.picture import Picture
from rkgb.export.render.structure import Structure, structure_of
from tests.graph.programs import Program, graphs_of, linear, rows, scale, zoo_graphs

KINDS = ("B", "D", "S", "K")
VARIED = ("gpt2-tiny", "unet-tiny", "transformer-tiny")  # large blocks, long skips, blocks that take several pages
HOSTILE_NAMES = ('a"b<c>&', "模块\u202e$x^2$", "\x07bell\\N{new\nline", "ü" * 300, "$\\frac{}$", "%s{0}", "-->")


def graph(graphs: AllGraphs, kind: str) -> Any:
    """The graph of this kind, or the last block."""
    return graphs.blocks[-1] if kind == "block" else getattr(graphs, f"{kind}_graph")


def pictured(of: Any, title: str = "all of it") -> tuple[Structure, Picture]:
    """The structure, and a picture with everything on one page, however large."""
    structure = structure_of(of)
    return structure, compose(Selection(structure, Scales.of(structure)), title)


def taken(name: str) -> AllGraphs:
    """Graphs of a zoo entry, "hostile" or "colourful"."""
    return {"hostile": hostile, "colourful": colourful}.get(name, lambda: zoo_graphs(name))()


@cache
def hostile() -> AllGraphs:
    """Modules with names that mean something to dot, XML, mathematics or the terminal."""
    model = nn.Sequential()
    for name in HOSTILE_NAMES:
        model.add_module(name, nn.Sequential(linear(), nn.Tanh()))
    return graphs_of(model, rows())


@cache
def colourful() -> AllGraphs:
    """A module that has elements of every kind."""
    table = torch.randn(4)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer_norm(self.norm(x @ self.weight)) + table
        y = torch.dropout(y.view(4, 3).t(), 0.5, True)
        return y.exp_().tanh()

    return graphs_of(Program(forward, norm=nn.BatchNorm1d(4), layer_norm=nn.LayerNorm(4), weight=scale((4, 4))), rows())


def pdf_pages(path: Path) -> int:
    """How many pages a PDF has."""
    data = path.read_bytes()
    assert data.startswith(b"%PDF-1.")
    assert data.rstrip().endswith(b"%%EOF")
    return len(re.findall(rb"/Type /Page\b", data))
