"""Writes pictures to files: lays them out with Graphviz where it is installed, and without where it is not."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from rkgb.errors import RenderError
from rkgb.export.render.canvas import draw_page, to_pdf, to_png, to_svg
from rkgb.export.render.dot import dot_layout, dot_text, has_dot
from rkgb.export.render.layered import layered_layout
from rkgb.export.render.layout import Layout, components, grid_layout, mirrored, packed
from rkgb.export.render.picture import Picture
from rkgb.export.render.style import Fonts, Size

Format = Literal["pdf", "svg", "png", "dot"]
FORMATS: tuple[str, ...] = get_args(Format)
LONGEST_STEM = 100  # characters; file systems take 255 bytes


@dataclass(frozen=True, slots=True)
class Document:
    """Pages that belong together, under a file name without its ending."""

    stem: str
    pages: Sequence[Picture]


def checked_format(render_format: str) -> Format:
    """The format, in lower case and without a dot.

    Raises:
        RenderError: there is no such format.
    """
    found = render_format.lower().removeprefix(".")
    if found not in FORMATS:
        raise RenderError(f"no graph can be written as {render_format!r}. Choose one of {', '.join(FORMATS)}.")
    return cast(Format, found)


def write(document: Document, directory: Path, render_format: Format) -> list[Path]:
    """Write the pages: a PDF holds them all, of the other formats there is a file for each page. Returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = safe_stem(document.stem)
    if render_format == "pdf":
        path = directory / f"{stem}.pdf"
        figures = [draw_page(page, layout_of(page, sizes_of(page))) for page in document.pages]
        path.write_bytes(to_pdf(figures, document.stem))
        return [path]
    digits = len(str(len(document.pages)))
    paths = []
    for number, page in enumerate(document.pages, 1):
        suffix = f"_{number:0{digits}}" if len(document.pages) > 1 else ""
        path = directory / f"{stem}{suffix}.{render_format}"
        sizes = sizes_of(page)
        if render_format == "dot":
            path.write_text(dot_text(page, sizes), encoding="utf-8")
        else:
            figure = draw_page(page, layout_of(page, sizes))
            path.write_bytes(to_png(figure) if render_format == "png" else to_svg(figure, page))
        paths.append(path)
    return paths


def sizes_of(picture: Picture) -> dict[str, Size]:
    """How much room each node takes."""
    fonts = Fonts()
    return {node.name: fonts.node_size(node) for node in picture.nodes}


def layout_of(picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """Places for nodes and edges. Graphviz finds those of a layered picture; where it fails, a warning says so."""
    if not picture.nodes:
        return Layout({}, (), 0.0, 0.0)
    if picture.columns:
        return grid_layout(picture, sizes)
    parts = components(picture)
    if has_dot():
        try:
            return packed(picture, [(part, mirrored(part, dot_layout(part, sizes))) for part in parts])
        except RenderError as error:
            warnings.warn(f"{error} The layout is made without Graphviz instead.", stacklevel=2)
    return packed(picture, [(part, mirrored(part, layered_layout(part, sizes))) for part in parts])


def safe_stem(name: str) -> str:
    """`name` as the name of a file on any system: letters, digits and ``-_.`` stay, the rest becomes ``_``."""
    stem = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._")[:LONGEST_STEM]
    return stem or "graph"


def open_file(path: Path) -> None:
    """Show a file with the system's viewer, if there is one; never waits, never fails."""
    command = {"darwin": ["open"], "win32": ["cmd", "/c", "start", ""]}.get(sys.platform, ["xdg-open"])

    def show() -> None:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            subprocess.run([*command, str(path.resolve())], check=False, **quiet)  # type: ignore[call-overload]
        except OSError:
            return  # there is no viewer here

    # Some viewers return when their window is closed: nobody waits for that.
    threading.Thread(target=show, name="rkgb-viewer", daemon=True).start()
