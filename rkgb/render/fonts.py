"""How wide texts are in the one font that pictures use, and how much room a node takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import LoadFlags

from rkgb.render.picture import PictureNode
from rkgb.render.style import LINE_LENGTH, shorten

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
    """The regular and the bold font."""

    @cached_property
    def _fonts(self) -> dict[bool, str]:
        return {
            bold: findfont(FontProperties(family=FAMILY, weight="bold" if bold else "normal")) for bold in (False, True)
        }

    def writable(self, text: str, bold: bool = False) -> str:
        """`text` with each character that the font lacks written as its number: ``\\u4e2d``."""
        font = get_font(self._fonts[bold])
        lacking = {character for character in text if not font.get_char_index(ord(character))}
        if not lacking:
            return text
        numbered = "".join(c.encode("unicode_escape").decode() if c in lacking else c for c in text)
        return shorten(numbered, max(len(text), LINE_LENGTH))

    def width(self, text: str, size: float, bold: bool = False) -> float:
        """Width of one line of text in points, as it can be written."""
        font = get_font(self._fonts[bold])
        font.set_size(size, 72)
        font.set_text(self.writable(text, bold), 0.0, flags=LoadFlags.NO_HINTING)
        return font.get_width_height()[0] / 64.0

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
