"""`rockmate graph`: pictures of a model's graphs."""

from __future__ import annotations

import html
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from rkgb import d_to_s, make_all_graphs, make_sample
from rkgb.export.render.pages import Cut, pages_of
from rkgb.pipeline import exact_trace
from rkgb.state.module_state import training_mode
from rockmate.cli.app import examples
from rockmate.cli.options import Chosen, json_option, target_options
from rockmate.cli.output import GOOD, tell, tell_json
from rockmate.cli.targets import Target

LEVELS = ("B", "D", "S", "K", "all")
FORMATS = ("pdf", "svg", "png", "html", "dot")


@click.command(
    "graph",
    epilog=examples(
        "rockmate graph model.py:make -o graphs.pdf",
        "rockmate graph model.py:make --level S --format svg -o S.svg",
        "rockmate graph model.py:make --level D -o D.html",
    ),
)
@target_options
@click.option(
    "--level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="all",
    show_default=True,
    help="Basic, dataflow, simplified or backward graph, or all four. K and all measure the model.",
)
@click.option(
    "--format", "render_format", type=click.Choice(FORMATS), help="By default, what the name of the output ends in."
)
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The picture's file."
)
@json_option
def command(
    chosen: Chosen,
    level: str,
    render_format: str | None,
    output: Path,
    as_json: bool,
) -> int:
    """Draw the graphs that MODEL goes through on its way to a plan.

    A large graph is drawn as an overview and a page for each distinct block. PDF and HTML hold all pages in one file,
    SVG, PNG and DOT are a file for each page, numbered. Graphviz is used for the layout where it is installed.
    """
    render_format = render_format or output.suffix.removeprefix(".").lower()
    if render_format not in FORMATS:
        raise click.UsageError(f"what {output.name} is to be is not known: end it in .pdf, or say --format pdf")
    target = chosen.target()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        drawn = _draw(target, level.upper() if level != "all" else level, render_format, Path(folder))
        written = _delivered(drawn, render_format, output)
    files = list(map(str, written))
    if as_json:
        tell_json("graph", {"model": chosen.name, "level": level, "format": render_format, "files": files})
    else:
        tell("\n".join(f"written to {path}" for path in written))
    return GOOD


def _draw(target: Target, level: str, render_format: str, folder: Path) -> list[Path]:
    """Files of the pages. Of several graphs there is one document where a file holds many pages, else one of each."""
    # Here, so that the help does not load matplotlib.
    from rkgb.export.render.files import Document, checked_format, write

    drawn_as = checked_format("svg" if render_format == "html" else render_format)
    name = type(target.model).__name__
    graphs, known = _graphs(target, level)
    pages = {f"{name}_{kind}": pages_of(graph, known) for kind, graph in graphs.items()}
    if drawn_as == "pdf":
        pages = {name: [page for some in pages.values() for page in some]}
    return [path for stem, some in pages.items() for path in write(Document(stem, some), folder, drawn_as)]


def _graphs(target: Target, level: str) -> tuple[dict[str, Any], Cut | None]:
    """The graphs of that level, by its letter. The first three need no measurement."""
    model = target.model
    sample = make_sample(model, target.sample)
    if level in ("K", "all"):
        found = make_all_graphs(model, sample)
        every = {"B": found.B_graph, "D": found.D_graph, "S": found.S_graph, "K": found.K_graph}
        known = Cut(found.blocks, found.equivalent_classes)
        return (every if level == "all" else {"K": found.K_graph}), known
    with training_mode(model):
        basic, dataflow = exact_trace(model, sample)
        if level == "B":
            return {"B": basic}, None
        return {level: dataflow if level == "D" else d_to_s(dataflow)}, None


def _delivered(drawn: list[Path], render_format: str, output: Path) -> list[Path]:
    """Put what was drawn where it was asked for. Returns the files."""
    if render_format == "html":
        output.write_text(_page(drawn), encoding="utf-8")
        return [output]
    if len(drawn) == 1:
        places = [output]
    else:  # S.svg → S_1.svg, …; of all graphs: graphs_B.svg, …
        stem = _common(path.stem for path in drawn)
        places = [output.with_name(f"{output.stem}_{path.stem[len(stem) :]}{output.suffix}") for path in drawn]
    for path, place in zip(drawn, places, strict=True):
        shutil.move(path, place)
    return places


def _common(stems: Any) -> str:
    """What all begin with, up to an underscore."""
    found = list(stems)
    end = next((i for i, letters in enumerate(zip(*found, strict=False)) if len(set(letters)) > 1), 0)
    return found[0][: found[0][:end].rfind("_") + 1]


def _page(drawn: list[Path]) -> str:
    """One page of HTML with every picture in it, which needs no other file and no network."""
    parts = []
    for path in drawn:
        picture = path.read_text(encoding="utf-8")
        parts.append(f"<h2>{html.escape(path.stem)}</h2>\n" + re.sub(r"^.*?(?=<svg)", "", picture, flags=re.DOTALL))
    body = "\n".join(parts)
    style = "body{font-family:sans-serif;margin:2em;color:#2b2f36}svg{max-width:100%;height:auto}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Graphs</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
