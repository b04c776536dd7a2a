"""What a person looks at: graphs as pictures in files, and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rkgb.errors import RenderError
from rkgb.export.render.describe import describe
from rkgb.export.render.pages import Cut, pages_of
from rkgb.export.render.picture import Picture
from rkgb.export.render.structure import Graph
from rkgb.pipeline import AllGraphs

__all__ = ["DIRECTORY", "describe", "print_all_graphs", "print_graph", "print_graph_list"]

DIRECTORY = "graphviz_dir"
"""Where pictures go unless a `directory` is given: below the working directory."""

AnyGraph = Graph | AllGraphs


def print_graph(
    g: AnyGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
    *,
    directory: str | Path = DIRECTORY,
) -> list[Path]:
    """Draw one graph; a large one as an overview and a page for each distinct block.

    Args:
        g: a B, D, S or K graph, or a block; what `make_all_graphs` returns is given to `print_all_graphs`.
        name: the files' name without its ending; by default ``B_graph``, ``block``, … as `g` is one.
        open: show the first file with the system's viewer, if there is one.
        render_format: "svg", "png" and "dot" give a file for each page, "pdf" gives one file.
        directory: where to write; made if it is missing.

    Returns:
        The paths written, in the order of the pages.

    Raises:
        RenderError: the format is unknown, or `g` is no graph of rkgb.
    """
    if isinstance(g, AllGraphs):
        return print_all_graphs(g, name, open, render_format, directory=directory)
    pages = pages_of(g)
    return _write({name or _default_name(g): pages}, open, render_format, directory)


def print_graph_list(
    gl: Iterable[Graph],
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
    *,
    directory: str | Path = DIRECTORY,
) -> list[Path]:
    """Draw several graphs as one document: titles number them. Arguments, result and errors are `print_graph`'s."""
    graphs = list(gl)
    pages = [
        page for number, graph in enumerate(graphs, 1) for page in pages_of(graph, None, f"{number} of {len(graphs)}: ")
    ]
    return _write({name or "graphs": pages}, open, render_format, directory)


def print_all_graphs(
    graphs: AllGraphs,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
    *,
    directory: str | Path = DIRECTORY,
) -> list[Path]:
    """Draw the B, D, S and K graph: with "pdf" a file of several pages for each, otherwise a file for each page.

    Files are called ``<name>_B``, …, `name` being "graphs" by default. Arguments, result and errors are
    `print_graph`'s otherwise.
    """
    if not isinstance(graphs, AllGraphs):
        raise RenderError(
            f"print_all_graphs draws what make_all_graphs returns, not {type(graphs).__name__}. "
            "Give a single graph to print_graph, several to print_graph_list."
        )
    known = Cut(graphs.blocks, graphs.equivalent_classes)
    kinds: dict[str, Graph] = {
        "B": graphs.B_graph,
        "D": graphs.D_graph,
        "S": graphs.S_graph,
        "K": graphs.K_graph,
    }
    documents = {f"{name or 'graphs'}_{kind}": pages_of(graph, known) for kind, graph in kinds.items()}
    return _write(documents, open, render_format, directory)


def _default_name(graph: Graph) -> str:
    kind = type(graph).__name__
    return f"{kind[0]}_graph" if kind.endswith("Graph") else kind.lower()


def _write(
    documents: Mapping[str, Sequence[Picture]], open: bool, render_format: str, directory: str | Path
) -> list[Path]:
    # Here, so that building graphs does not load matplotlib.
    from rkgb.export.render.files import Document, checked_format, open_file, write

    found = checked_format(render_format)
    paths = [path for stem, pages in documents.items() for path in write(Document(stem, pages), Path(directory), found)]
    if open and paths:
        open_file(paths[0])
    return paths
