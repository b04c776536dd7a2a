"""Draws a picture, laid out, with matplotlib: the same page whatever the file format and whoever found the layout."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.text import Text

from rkgb.export.render import style
from rkgb.export.render.layout import Box, Curve, Layout
from rkgb.export.render.picture import Look, Picture, PictureEdge, PictureNode
from rkgb.export.render.style import BAR_COLOURS, MUTED_COLOUR, TEXT_COLOUR, Fonts

MARGIN = 22.0  # points
HEAD_GAP = 18.0  # between the legend and the graph
LEAST_PAGE_WIDTH = 430.0
LEGEND_STEP = 15.0
SWATCH = 11.0
PNG_DPI = 144.0
MOST_PIXELS = 24_000  # on a side: image libraries refuse more than about twice that
MOST_POINTS = 14_400.0  # on a side: PDF viewers refuse more
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
# Neither a user's settings nor the time may change what is written.
_GROUPS = ("font.", "text.", "svg.", "pdf.", "path.", "figure.", "savefig.", "patch.", "lines.", "hatch.")
_SETTINGS: dict[str, Any] = {
    "font.family": [style.FAMILY],
    "svg.fonttype": "none",  # text stays text: it can be searched for and copied
    "svg.hashsalt": "rkgb",
    "pdf.fonttype": 42,
}


@contextmanager
def _fixed_settings() -> Iterator[None]:
    settings: Any = {key: value for key, value in mpl.rcParamsDefault.items() if key.startswith(_GROUPS)}
    settings |= _SETTINGS
    with mpl.rc_context(settings):
        yield


def draw_page(picture: Picture, layout: Layout) -> Figure:
    """A figure that holds the page, with everything in place."""
    with _fixed_settings():
        return _Pen(picture, layout).page()


def to_png(figure: Figure) -> bytes:
    """The page as a PNG, at 144 dots per inch where that is not too large."""
    file = BytesIO()
    dpi = min(PNG_DPI, MOST_PIXELS / max(figure.get_size_inches()))
    with _fixed_settings():
        FigureCanvasAgg(figure)
        figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def to_svg(figure: Figure, picture: Picture) -> bytes:
    """The page as an SVG whose nodes and edges tell more when pointed at."""
    file = BytesIO()
    with _fixed_settings():
        FigureCanvasSVG(figure)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    ET.register_namespace("", SVG_NAMESPACE)
    ET.register_namespace("cc", "http://creativecommons.org/ns#")
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    tooltips = {f"node{index}": node.tooltip for index, node in enumerate(picture.nodes)}
    tooltips |= {f"edge{index}": edge.tooltip for index, edge in enumerate(picture.edges)}
    root = ET.fromstring(file.getvalue())
    for group in root.iter(f"{{{SVG_NAMESPACE}}}g"):
        tooltip = tooltips.get(group.get("id", ""))
        if tooltip:
            title = ET.Element(f"{{{SVG_NAMESPACE}}}title")
            title.text = tooltip
            group.insert(0, title)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def to_pdf(figures: list[Figure], title: str) -> bytes:
    """All pages as one PDF."""
    file = BytesIO()
    with _fixed_settings(), PdfPages(file, metadata={"Title": title, "CreationDate": None}) as pages:
        for figure in figures:
            FigureCanvasPdf(figure)
            pages.savefig(figure)
    return file.getvalue()


class _Pen:
    """Draws on one figure. Lengths are points; y grows downwards from the top of the page."""

    def __init__(self, picture: Picture, layout: Layout) -> None:
        self.picture = picture
        self.layout = layout
        self.fonts = Fonts()
        self.legend_rows = self._legend_rows(max(layout.width, self._head_width(), LEAST_PAGE_WIDTH))
        self.head = style.HEADING_SIZE * 1.4 + 14 + LEGEND_STEP * len(self.legend_rows) + HEAD_GAP
        self.width = max(layout.width, self._head_width(), LEAST_PAGE_WIDTH) + 2 * MARGIN
        self.height = layout.height + self.head + 2 * MARGIN
        shrink = min(1.0, MOST_POINTS / max(self.width, self.height))
        self.shrink = shrink
        self.figure = Figure(figsize=(self.width * shrink / 72, self.height * shrink / 72), facecolor="white")
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.height, 0)
        self.axes.set_axis_off()
        self.left = MARGIN + max(0.0, (self.width - 2 * MARGIN - layout.width) / 2)
        self.top = MARGIN + self.head

    def page(self) -> Figure:
        self._draw_head()
        for index, (edge, curve) in enumerate(zip(self.picture.edges, self.layout.curves, strict=True)):
            self._draw_edge(edge, curve, f"edge{index}")
        for index, node in enumerate(self.picture.nodes):
            self._draw_node(node, self.layout.boxes[node.name], f"node{index}")
        return self.figure

    def _head_width(self) -> float:
        return max(
            self.fonts.width(self.picture.title, style.HEADING_SIZE, bold=True),
            self.fonts.width(self.picture.subtitle, style.TITLE_SIZE),
        )

    # ---- the head of the page ------------------------------------------------------------------------

    def _legend_rows(self, width: float) -> list[list[tuple[Look | str, float]]]:
        """Legend entries with their places from the left, in rows that fit the page."""
        rows: list[list[tuple[Look | str, float]]] = [[]]
        x = 0.0
        entries: list[Look | str] = [*self.picture.legend, *self.picture.scales]
        for entry in entries:
            text = entry if isinstance(entry, str) else entry.label
            room = SWATCH + 5 + self.fonts.width(text, style.LINE_SIZE) * 1.04 + 14
            if rows[-1] and x + room - 14 > width:
                rows.append([])
                x = 0.0
            rows[-1].append((entry, x))
            x += room
        return [row for row in rows if row]

    def _draw_head(self) -> None:
        y = MARGIN + style.HEADING_SIZE
        self._text(MARGIN, y, self.picture.title, style.HEADING_SIZE, bold=True, align="left")
        y += 16
        self._text(MARGIN, y, self.picture.subtitle, style.TITLE_SIZE, colour=MUTED_COLOUR, align="left")
        for row in self.legend_rows:
            y += LEGEND_STEP
            for entry, x in row:
                self._draw_entry(entry, MARGIN + x, y)

    def _draw_entry(self, entry: Look | str, x: float, y: float) -> None:
        if isinstance(entry, str):
            colour = BAR_COLOURS[entry.partition(":")[0]]
            self.axes.add_patch(Rectangle((x, y - 5), SWATCH, style.BAR_HEIGHT, facecolor=colour, linewidth=0))
            text = entry
        else:
            self._frame(entry, Box(x + SWATCH / 2, y - 3, SWATCH, SWATCH * 0.8), entry.dashed, "")
            text = entry.label
        self._text(x + SWATCH + 5, y, text, style.LINE_SIZE, align="left")

    # ---- the graph -----------------------------------------------------------------------------------

    def _draw_edge(self, edge: PictureEdge, curve: Curve, gid: str) -> None:
        points = [(x + self.left, y + self.top) for x, y in curve.points]
        codes = [Outline.MOVETO, *[Outline.CURVE4] * (len(points) - 1)]
        dashes = (0, (4, 2.5)) if edge.dashed else "solid"
        line = PathPatch(
            Outline(points, codes),
            facecolor="none",
            edgecolor=edge.colour,
            linewidth=1.0 * self.shrink,
            linestyle=dashes,
            capstyle="butt",
        )
        self._add(line, gid)
        tip = (curve.tip[0] + self.left, curve.tip[1] + self.top)
        base_x, base_y = points[0] if edge.upward else points[-1]
        length = ((tip[0] - base_x) ** 2 + (tip[1] - base_y) ** 2) ** 0.5 or 1.0
        across = ((base_y - tip[1]) / length * 3.0, (tip[0] - base_x) / length * 3.0)
        corners = [tip, (base_x + across[0], base_y + across[1]), (base_x - across[0], base_y - across[1])]
        self.axes.add_patch(Polygon(corners, closed=True, facecolor=edge.colour, linewidth=0))

    def _draw_node(self, node: PictureNode, box: Box, gid: str) -> None:
        place = Box(box.x + self.left, box.y + self.top, box.width, box.height)
        self._frame(node.look, place, node.look.dashed or node.outside, gid)
        ink = "#ffffff" if node.look.fill < "#7" else TEXT_COLOUR
        rows = style.TITLE_HEIGHT + style.LINE_HEIGHT * len(node.lines) + style.BAR_STEP * len(node.bars)
        # Boxes of a grid are as high as the highest: their texts begin at the top.
        y = place.y - rows / 2 + 1 if not self.picture.columns else place.y - box.height / 2 + style.PADDING / 2
        self._text(place.x, y + 9.5, node.title, style.TITLE_SIZE, bold=True, colour=ink)
        y += style.TITLE_HEIGHT
        for line in node.lines:
            self._text(place.x, y + 7.5, line, style.LINE_SIZE, colour=ink)
            y += style.LINE_HEIGHT
        for bar in node.bars:
            left = place.x - style.BAR_WIDTH / 2
            for fraction, colour in ((1.0, "#00000018"), (bar.fraction, BAR_COLOURS[bar.quantity])):
                size = (style.BAR_WIDTH * fraction, style.BAR_HEIGHT)
                self.axes.add_patch(Rectangle((left, y + 1), *size, facecolor=colour, linewidth=0))
            y += style.BAR_STEP

    def _frame(self, look: Look, box: Box, dashed: bool, gid: str) -> None:
        rounding = {"box": 1.5, "round": 6.0, "pill": box.height / 2 if box.height < 30 else 12.0}[look.shape]
        frame = FancyBboxPatch(
            (box.x - box.width / 2, box.y - box.height / 2),
            box.width,
            box.height,
            boxstyle=f"round,pad=0,rounding_size={min(rounding, box.height / 2)}",
            facecolor=look.fill,
            edgecolor=look.border,
            linewidth=1.1 * self.shrink,
            linestyle=(0, (3, 2)) if dashed else "solid",
        )
        self._add(frame, gid)

    def _add(self, patch: PathPatch | FancyBboxPatch, gid: str) -> None:
        if gid:
            patch.set_gid(gid)
        self.axes.add_patch(patch)

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        bold: bool = False,
        colour: str = TEXT_COLOUR,
        align: str = "center",
    ) -> None:
        self.axes.text(
            x,
            y,
            self.fonts.writable(text, bold),
            fontsize=size * self.shrink,
            fontweight="bold" if bold else "normal",
            color=colour,
            horizontalalignment=align,
            verticalalignment="baseline",
            parse_math=False,
        )


def texts_of(figure: Figure) -> list[Text]:
    """The texts on a page, in drawing order."""
    found: list[Artist] = figure.axes[0].findobj(Text)
    return [artist for artist in found if isinstance(artist, Text) and re.search(r"\S", artist.get_text())]
