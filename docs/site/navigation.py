"""The site's navigation, made from the tables of links that readers of the plain files see."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ALL_PAGES = "docs/index"
# The page that gets the navigation, and the page whose tables say what is in it.
TABLES = {"README": ALL_PAGES, "docs/use_with/index": "docs/use_with/index"}
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| *\[([^\]]*)\]\(([^)#]+)\.(?:md|ipynb)\)", re.MULTILINE)


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Append hidden tables of contents to a page that has them; `source` is the page's text, in a list."""
    if name not in TABLES:
        return
    sections = sections_of(TABLES[name])
    if name != TABLES[name]:
        sections.insert(0, ("", [f"All pages </{TABLES[name]}>"]))
    source[0] += "".join(f"\n\n{toctree(caption, entries)}" for caption, entries in sections)


def sections_of(page: str) -> list[tuple[str, list[str]]]:
    """(Heading, entries) of each section whose tables begin their rows with links."""
    parts = ["", *SECTION.split((ROOT / f"{page}.md").read_text("utf-8"))]  # above the first heading there is none
    folder = posixpath.dirname(page)
    sections = []
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        links = [(title, posixpath.normpath(posixpath.join(folder, path))) for title, path in ROW.findall(body)]
        if links:
            sections.append((heading.strip(), [f"{title} </{path}>" for title, path in links]))
    return sections


def toctree(caption: str, entries: list[str]) -> str:
    """The directive that puts the entries, each a title and a page, under a caption into the navigation."""
    options = [":hidden:"] + ([f":caption: {caption}"] if caption else [])
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension to Sphinx."""
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True}
