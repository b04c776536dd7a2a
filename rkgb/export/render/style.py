"""How pictures look: colours of kinds and classes, how names, sizes and times are written, and how wide texts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rkgb.export.render.picture import Look, PictureNode

LOOKS: dict[str, Look] = {
    "forward": Look("#d6e6f7", "#2563a8", "box", "forward"),
    "backward": Look("#fbdcc4", "#bf5510", "box", "backward"),
    "view": Look("#f1f4f7", "#7b8794", "box", "view", dashed=True),
    "in-place": Look("#cdece6", "#12786a", "box", "in-place"),
    "random": Look("#fff0a8", "#a67c00", "box", "random"),
    "data": Look("#ffffff", "#2563a8", "round", "activation"),
    "grad": Look("#fff6ee", "#bf5510", "round", "gradient"),
    "phantom": Look("#ecdff7", "#7b3fa0", "round", "phantom (only the backward sees it)", dashed=True),
    "parameter": Look("#d9efd3", "#3c8031", "pill", "parameter"),
    "buffer": Look("#eeeec4", "#7d7a1e", "pill", "buffer"),
    "input": Look("#fcdbe8", "#b3296a", "pill", "input"),
    "constant": Look("#e6e6e6", "#666666", "pill", "constant"),
    "leaf": Look("#dcecd8", "#5b8a54", "pill", "parameter, buffer, constant or input of the model"),
    "output": Look("#3a4048", "#14171a", "pill", "output"),
    "elsewhere": Look("#ffffff", "#9aa2ab", "pill", "in another part", dashed=True),
}
EDGE_COLOURS = {"grad": "#d9803f", "backward": "#d9803f", "phantom": "#9a66bb", "parameter": "#79ad70"}
EDGE_COLOUR = "#5d7fa6"  # of every other edge
LEAF_EDGE_COLOUR = "#9aa2ab"
BAR_COLOURS = {"bytes": "#35679a", "time": "#c2452d"}
TEXT_COLOUR = "#1d2126"
MUTED_COLOUR = "#59626c"
TITLE_LENGTH = 36  # characters
LINE_LENGTH = 46


def class_look(number: int, label: str) -> Look:
    """The colour of a class of equivalent blocks. Numbers next to one another have hues far apart."""
    hue = (0.58 + number * 0.381966) % 1.0  # steps of the golden ratio never come near an earlier hue for long
    lightness = (0.86, 0.78, 0.92)[number // 8 % 3]
    return Look(_colour(hue, lightness), _colour(hue, 0.36), "box", label)


def _colour(hue: float, lightness: float) -> str:
    """#rrggbb of a hue in [0, 1) of middling saturation."""
    chroma = 0.62 * min(lightness, 1 - lightness)
    parts = []
    for shift in (0.0, 8.0, 4.0):
        sector = (shift + hue * 12) % 12
        parts.append(lightness - chroma * max(-1.0, min(sector - 3, 9 - sector, 1.0)))
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def edge_colour(source_kind: str, target_kind: str) -> str:
    """Colour of an arrow between elements of these kinds."""
    for kind in (source_kind, target_kind):
        if kind in EDGE_COLOURS and not (kind == "backward" and source_kind in ("data", "phantom")):
            return EDGE_COLOURS[kind]
    return LEAF_EDGE_COLOUR if source_kind in ("buffer", "input", "constant", "leaf", "elsewhere") else EDGE_COLOUR


def shorten(text: str, length: int) -> str:
    """At most `length` characters: the middle gives way, as names differ at their ends."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def plain(text: str) -> str:
    """`text` on one line, control characters and lone surrogates as escapes: every file format can hold the result."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def brief(text: str, length: int) -> str:
    """`text` as it may stand in a picture: plain, and at most `length` characters."""
    return shorten(plain(text), length)


def format_bytes(size_bytes: float) -> str:
    """Three digits and a unit: ``512 B``, ``1.50 MiB``."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(int(math.log2(size_bytes)) // 10, 4)
    return f"{_three_digits(size_bytes / 1024**power)} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def format_ms(time_ms: float) -> str:
    """Three digits and a unit: ``350 µs``, ``12.3 ms``, ``1.50 s``."""
    if time_ms < 1:
        return f"{time_ms * 1000:.0f} µs"
    return f"{_three_digits(time_ms)} ms" if time_ms < 1000 else f"{_three_digits(time_ms / 1000)} s"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def numbered(word: str, numbers: Sequence[int], most: int = 6) -> str:
    """``block 3``; ``blocks 3, 5, 7``."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {listed(numbers, most)}"


def listed(numbers: Sequence[int], most: int = 6) -> str:
    """``3, 5, 7``; of many, the first ones and the last: ``3, 5, 7, …, 25``."""
    texts = [str(number) for number in numbers]
    if len(texts) > most:
        texts = [*texts[: most - 1], "…", texts[-1]]
    return ", ".join(texts)


# ---- fonts and sizes --------------------------------------------------------------------------------------

FAMILY = "DejaVu Sans"  # comes with matplotlib, so that pictures are the same everywhere
TITLE_SIZE = 9.5  # all lengths in points, 1/72 inch
LINE_SIZE = 7.5
HEADING_SIZE = 14.0
TITLE_HEIGHT = 13.0
LINE_HEIGHT = 10.5
BAR_HEIGHT = 4.0
BAR_STEP = 6.5
BAR_WIDTH = 84.0
PADDING = 6.0
LEAST_WIDTH = 64.0


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in points."""

    width: float
    height: float


class Fonts:
    """The regular and the bold font, of matplotlib: loaded with the first, as not all that has looks is drawn."""

    @cached_property
    def _fonts(self) -> dict[bool, Any]:
        from matplotlib.font_manager import FontProperties, findfont, get_font

        weights = {False: "normal", True: "bold"}
        return {
            bold: get_font(findfont(FontProperties(family=FAMILY, weight=weight))) for bold, weight in weights.items()
        }

    def writable(self, text: str, bold: bool = False) -> str:
        """`text` with each character that the font lacks written as its number: ``\\u4e2d``."""
        font = self._fonts[bold]
        lacking = {character for character in text if not font.get_char_index(ord(character))}
        if not lacking:
            return text
        numbered = "".join(c.encode("unicode_escape").decode() if c in lacking else c for c in text)
        return shorten(numbered, max(len(text), LINE_LENGTH))

    def width(self, text: str, size: float, bold: bool = False) -> float:
        """Width of one line of text in points, as it can be written."""
        from matplotlib.ft2font import LoadFlags

        font = self._fonts[bold]
        font.set_size(size, 72)
        font.set_text(self.writable(text, bold), 0.0, flags=LoadFlags.NO_HINTING)
        width: float = font.get_width_height()[0] / 64.0
        return width

    def node_size(self, node: PictureNode) -> Size:
        """Room for a node's texts and bars."""
        widths = [self.width(node.title, TITLE_SIZE, bold=True), LEAST_WIDTH - 2 * PADDING]
        widths += [self.width(line, LINE_SIZE) for line in node.lines]
        if node.bars:
            widths.append(BAR_WIDTH)
        sides = 2 * PADDING + (8 if node.look.shape == "pill" else 0)
        height = TITLE_HEIGHT + LINE_HEIGHT * len(node.lines) + BAR_STEP * len(node.bars) + PADDING
        # Some room to spare: what draws an SVG may have another font, or round each letter's width.
        return Size(1.04 * max(widths) + sides, height)
