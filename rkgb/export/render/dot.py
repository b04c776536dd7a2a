"""Pictures in the language of Graphviz, and layouts by its program `dot`."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rkgb.errors import RenderError
from rkgb.export.render.layout import Box, Curve, Layout, Point, edge_ends, moved
from rkgb.export.render.picture import Picture, PictureNode
from rkgb.export.render.style import FAMILY, LINE_SIZE, TITLE_SIZE, Size

PROGRAM = "dot"
TIMEOUT_S = 60.0


def has_dot() -> bool:
    """Whether Graphviz's program `dot` is on the path."""
    return shutil.which(PROGRAM) is not None


def dot_text(picture: Picture, sizes: Mapping[str, Size]) -> str:
    """The picture as a digraph; nodes are called n0, n1, … in the picture's order, whatever their names hold."""
    number = {node.name: index for index, node in enumerate(picture.nodes)}
    lines = [
        "digraph picture {",
        f"  label={_quoted(picture.title)}; labelloc=t; fontname={_quoted(FAMILY)}; nodesep=0.22; ranksep=0.34;",
        f"  node [fontname={_quoted(FAMILY)}, fontsize={LINE_SIZE}, fixedsize=true];",
        "  edge [arrowsize=0.6];",
    ]
    for node in picture.nodes:
        lines.append(f"  n{number[node.name]} [{_attributes(_node_attributes(node, sizes[node.name]))}];")
    for edge in picture.edges:
        # An upward edge is written the other way round, with its arrow at its tail: layers follow what is written.
        upper, lower = edge_ends(edge)
        values = {"color": edge.colour, "tooltip": edge.tooltip, "weight": str(edge.weight)}
        if edge.dashed:
            values["style"] = "dashed"
        if edge.upward:
            values["dir"] = "back"
        lines.append(f"  n{number[upper]} -> n{number[lower]} [{_attributes(values)}];")
    return "\n".join([*lines, "}", ""])


def dot_layout(picture: Picture, sizes: Mapping[str, Size]) -> Layout:
    """Places found by `dot`.

    Raises:
        RenderError: the program failed, took longer than `TIMEOUT_S`, or wrote what is no layout of the picture.
    """
    try:
        answer = subprocess.run(
            [PROGRAM, "-Tjson0"],
            input=dot_text(picture, sizes).encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout
        return _read_layout(picture, sizes, json.loads(answer))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise RenderError(f"Graphviz's dot failed with exit status {error.returncode}: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RenderError(f"Graphviz's dot did not run to its end: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RenderError(f"Graphviz's dot gave no layout that can be read: {error!r}") from error


def _quoted(text: str) -> str:
    """A string of the dot language. A backslash would begin an escape sequence there."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _markup(text: str) -> str:
    """Text within a label in dot's markup, in which \\N would still stand for the node's name."""
    return html.escape(text).replace("\\", "&#92;")


def _attributes(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value if key == 'label' else _quoted(value)}" for key, value in values.items())


def _node_attributes(node: PictureNode, size: Size) -> dict[str, str]:
    styles = ["filled"]
    if node.look.shape != "box":
        styles.append("rounded")
    if node.look.dashed or node.outside:
        styles.append("dashed")
    ink = "#ffffff" if node.look.fill < "#7" else "#000000"
    rows = [f'<FONT POINT-SIZE="{TITLE_SIZE}"><B>{_markup(node.title)}</B></FONT>']
    rows += [_markup(line) for line in node.lines]
    rows += [f"{bar.quantity} {'▬' * max(1, round(10 * bar.fraction))}" for bar in node.bars]
    return {
        "label": f"<{'<BR/>'.join(rows)}>",
        "shape": "box",
        "style": ",".join(styles),
        "fillcolor": node.look.fill,
        "color": node.look.border,
        "fontcolor": ink,
        "tooltip": node.tooltip,
        "width": f"{size.width / 72:.4f}",
        "height": f"{size.height / 72:.4f}",
    }


def _read_layout(picture: Picture, sizes: Mapping[str, Size], answer: dict[str, Any]) -> Layout:
    def point(text: str) -> Point:
        x, y = map(float, text.split(","))
        return x, -y

    name_of = {f"n{index}": node.name for index, node in enumerate(picture.nodes)}
    boxes = {}
    for found in answer["objects"]:
        name = name_of[found["name"]]
        x, y = point(found["pos"])
        boxes[name] = Box(x, y, sizes[name].width, sizes[name].height)
    paths = {}
    for found in answer.get("edges", ()):
        ends = tuple(name_of[answer["objects"][found[end]]["name"]] for end in ("tail", "head"))
        paths[ends] = found["pos"].split()
    curves = []
    for edge in picture.edges:
        words = paths[edge_ends(edge)]
        # "e,x,y" is the arrow's tip at the head, "s,x,y" at the tail; the points of the spline follow.
        tip = next(point(word[2:]) for word in words if word[:2] in ("e,", "s,"))
        curves.append(Curve(tuple(point(word) for word in words if word[:2] not in ("e,", "s,")), tip))
    if len(boxes) != len(picture.nodes):
        raise ValueError(f"{len(boxes)} of {len(picture.nodes)} nodes have a place")
    # dot keeps room for the title, which is drawn with the rest of the page's head, and rounds: what is there decides.
    points = [point for curve in curves for point in curve.points]
    left = min([box.x - box.width / 2 for box in boxes.values()] + [x for x, _ in points])
    right = max([box.x + box.width / 2 for box in boxes.values()] + [x for x, _ in points])
    top = min(box.y - box.height / 2 for box in boxes.values())
    bottom = max(box.y + box.height / 2 for box in boxes.values())
    return Layout(
        {name: replace(box, x=box.x - left, y=box.y - top) for name, box in boxes.items()},
        tuple(moved(curve, -left, -top) for curve in curves),
        right - left,
        bottom - top,
    )
