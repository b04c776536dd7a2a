"""Graphs for the algorithms of networkx."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from rkgb.export.render.structure import Graph, structure_of
from rkgb.ir.values import ValueInfo


def to_networkx(graph: Graph, values: Mapping[str, ValueInfo] | None = None) -> nx.DiGraph:
    """A graph of rkgb as a directed graph: one vertex for each element, keyed by its name.

    Vertices have the attributes `kind`, `op`, `ops`, `shape`, `size_bytes`, `time_ms` (the last two are None where
    they are unknown), `module_path`, `location`, `source` and `notes`; edges have `values`, the names of the values
    read. Leaves and the output are vertices too. In a K graph the forward of an S node is called ``<name>.forward``.
    `values` are the facts of a `Block`'s values, which it does not hold itself.

    Raises:
        RenderError: `graph` is none of the graphs of rkgb.
    """
    structure = structure_of(graph, values)
    result = nx.DiGraph(graph_kind=structure.graph_kind)
    for element in structure.elements.values():
        has_source = bool(element.source.module_path or element.source.location)
        result.add_node(
            element.name,
            kind=element.kind,
            op=element.op,
            ops=element.ops,
            shape=element.shape,
            size_bytes=element.size_bytes,
            time_ms=element.time_ms,
            module_path=element.source.module_path,
            location=element.source.location,
            source=str(element.source) if has_source else "",
            notes=element.notes,
        )
    for link in structure.links:
        result.add_edge(link.source, link.target, values=link.values)
    return result
