"""Boxes stay apart and edges go their way, with Graphviz and without; the two draw the same page."""

import itertools
import re
import stat
import sys
import xml.etree.ElementTree as ET

import pytest

import rkgb.export.render.dot
from rkgb.export.render.canvas import draw_page, texts_of
from rkgb.export.render.dot import dot_text, has_dot
from rkgb.export.render.files import layout_of, sizes_of
from rkgb.export.render.layout import components, edge_ends
from rkgb.export.render.pages import pages_of
from rkgb.export.render.style import LOOKS
from tests.graph.pictured import KINDS, VARIED, graph, hostile, pictured, taken
from tests.graph.programs import zoo_graphs

pytestmark = pytest.mark.usefixtures("without_graphviz")


# ---- layout ----------------------------------------------------------------------------------------------


def overlaps(first, second, gap=0.0):
    return (
        abs(first.x - second.x) * 2 < first.width + second.width - 2 * gap
        and abs(first.y - second.y) * 2 < first.height + second.height - 2 * gap
    )


def check_layout(picture, layout):
    boxes = layout.boxes
    assert set(boxes) == {node.name for node in picture.nodes}
    for first, second in itertools.combinations(boxes.values(), 2):
        assert not overlaps(first, second, 0.1)
    for box in boxes.values():
        assert -0.1 <= box.x - box.width / 2 <= box.x + box.width / 2 <= layout.width + 0.1
        assert -0.1 <= box.y - box.height / 2 <= box.y + box.height / 2 <= layout.height + 0.1
    assert len(layout.curves) == len(picture.edges)
    for edge, curve in zip(picture.edges, layout.curves, strict=True):
        assert len(curve.points) % 3 == 1
        upper, lower = (boxes[name] for name in edge_ends(edge))
        assert upper.y < lower.y
        at_tip, at_tail = (upper, lower) if edge.upward else (lower, upper)
        assert touches(at_tip, curve.tip)
        assert touches(at_tail, curve.points[-1] if edge.upward else curve.points[0])


def touches(box, point):
    inside_x = abs(point[0] - box.x) <= box.width / 2 + 2
    return inside_x and abs(point[1] - box.y) <= box.height / 2 + 2


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_boxes_apart_and_edges_in_direction(name, kind):
    for page in pages_of(graph(zoo_graphs(name), kind)):
        if not page.columns:
            check_layout(page, layout_of(page, sizes_of(page)))


def test_no_edge_passes_through_a_box():
    _, picture = pictured(zoo_graphs("gpt2-tiny").K_graph)
    layout = layout_of(picture, sizes_of(picture))
    for edge, curve in zip(picture.edges, layout.curves, strict=True):
        others = [box for name, box in layout.boxes.items() if name not in (edge.source, edge.target)]
        for start in range(0, len(curve.points) - 1, 3):
            for x, y in bezier(curve.points[start : start + 4]):
                for box in others:
                    inside = abs(x - box.x) < box.width / 2 - 1 and abs(y - box.y) < box.height / 2 - 1
                    assert not inside, f"{edge.source} → {edge.target}"


def bezier(points):
    a, b, c, d = points
    for step in range(1, 8):
        t = step / 8
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
        yield tuple(sum(w * p[axis] for w, p in zip(weights, (a, b, c, d), strict=True)) for axis in (0, 1))


def test_backward_stands_right_of_the_forward():
    for page in pages_of(zoo_graphs("gpt2-tiny").K_graph)[1:]:
        boxes = layout_of(page, sizes_of(page)).boxes
        places = {backward: [] for backward in (False, True)}
        for node in page.nodes:
            places[node.look is LOOKS["backward"]].append(boxes[node.name].x)
        assert sum(places[True]) / len(places[True]) > sum(places[False]) / len(places[False])


# ---- Graphviz --------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z_0-9]*)|(?P<number>-?[0-9]+(?:\.[0-9]+)?)|(?P<text>\"(?:[^\"\\]|\\.)*\")|(?P<mark>->|[][{}=;,]))"
)


def tokens_of(text):
    """(kind, token) of a text in the dot language; a label in markup runs to the bracket that closes it."""
    tokens = []
    place = 0
    while text[place:].strip():
        match = TOKEN.match(text, place)
        if match:
            tokens.append((match.lastgroup, match[match.lastgroup]))
            place = match.end()
            continue
        start = place = place + len(text[place:]) - len(text[place:].lstrip())
        assert text[start] == "<", text[start : start + 80]
        depth = 0
        while depth or place == start:
            depth += {"<": 1, ">": -1}.get(text[place], 0)
            place += 1
        tokens.append(("markup", text[start:place]))
    return tokens


def statements_of(text):
    """(subject, attributes) of every node and edge of a text in the dot language that this project writes."""
    tokens = tokens_of(text)
    assert [token for _, token in tokens[:3]] == ["digraph", "picture", "{"]
    assert tokens[-1] == ("mark", "}")
    found = []
    place = 3
    while place < len(tokens) - 1:
        subject = []
        while tokens[place][1] not in ("[", ";"):
            subject.append(tokens[place][1])
            place += 1
        attributes = {}
        if tokens[place][1] == "[":
            place += 1
            while tokens[place][1] != "]":
                (kind, key), (_, equals), (_, value) = tokens[place : place + 3]
                assert (kind, equals) == ("word", "=")
                attributes[key] = value
                place += 3
                if tokens[place][1] == ",":
                    place += 1
            place += 1
        assert tokens[place][1] == ";"
        place += 1
        found.append((subject, attributes))
    return found


@pytest.mark.parametrize("name", ["gpt2-tiny", "hostile", "colourful"])
def test_dot_text_parses_and_says_what_the_picture_says(name):
    for kind in KINDS:
        _, picture = pictured(graph(taken(name), kind))
        statements = statements_of(dot_text(picture, sizes_of(picture)))
        nodes = {
            subject[0]: values
            for subject, values in statements
            if re.fullmatch(r"n\d+", subject[0]) and "shape" in values
        }
        edges = [(subject, values) for subject, values in statements if "->" in subject]
        assert list(nodes) == [f"n{index}" for index in range(len(picture.nodes))]
        for node, values in zip(picture.nodes, nodes.values(), strict=True):
            label = ET.fromstring(f"<label>{values['label'][1:-1]}</label>")
            assert "".join(label.find("FONT/B").itertext()) == node.title
            assert set(node.lines) <= set(label.itertext()) | {text.tail for text in label}
            assert unquoted(values["tooltip"]) == node.tooltip
            assert (unquoted(values["fillcolor"]), unquoted(values["color"])) == (node.look.fill, node.look.border)
        number = {node.name: f"n{index}" for index, node in enumerate(picture.nodes)}
        wanted = [[number[upper], "->", number[lower]] for upper, lower in map(edge_ends, picture.edges)]
        assert [subject for subject, _ in edges] == wanted
        assert [values.get("dir") == '"back"' for _, values in edges] == [edge.upward for edge in picture.edges]


def unquoted(text):
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text[1:-1])


def install_dot(folder, monkeypatch, program):
    """Put a program called dot on the PATH, and nothing else."""
    folder.mkdir()
    path = folder / "dot"
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    assert has_dot()


STAND_IN = """
import json, re, sys
text = sys.stdin.buffer.read().decode()
assert sys.argv[1:] == ["-Tjson0"], sys.argv
nodes = [
    (name, float(width) * 72, float(height) * 72)
    for name, width, height in re.findall(r'^  (n\\d+) \\[.*width="([\\d.]+)", height="([\\d.]+)"\\];$', text, re.M)
]
edges = re.findall(r"^  (n\\d+) -> (n\\d+) \\[(.*)\\];$", text, re.M)
total = sum(height + 30 for _, _, height in nodes)
places, top = {}, total
for name, width, height in nodes:
    places[name] = (500.0, top - height / 2)
    top -= height + 30
index = {name: number for number, (name, _, _) in enumerate(nodes)}
def path(tail, head, values):
    (x, y), (u, v) = places[tail], places[head]
    first = f"s,{x},{y}" if 'dir="back"' in values else f"e,{u},{v}"
    return f"{first} {x},{y} {x},{y - 1} {u},{v + 1} {u},{v}"
print(json.dumps({
    "bb": f"0,0,1000,{total}",
    "objects": [{"name": name, "pos": "%f,%f" % places[name]} for name, _, _ in nodes],
    "edges": [{"tail": index[a], "head": index[b], "pos": path(a, b, values)} for a, b, values in edges],
}))
"""


def test_places_are_those_that_graphviz_gives(tmp_path, monkeypatch):
    _, picture = pictured(zoo_graphs("unet-tiny").K_graph)
    part = components(picture)[0]
    sizes = sizes_of(part)
    install_dot(tmp_path / "bin", monkeypatch, STAND_IN)
    layout = layout_of(part, sizes)
    assert len({round(box.x, 3) for box in layout.boxes.values()}) == 1
    tops = [layout.boxes[node.name].y - sizes[node.name].height / 2 for node in part.nodes]
    assert tops[0] == pytest.approx(0, abs=0.1)
    for node, (top, below) in zip(part.nodes, itertools.pairwise(tops), strict=False):
        assert below - top == pytest.approx(sizes[node.name].height + 30, abs=0.1)
    for edge, curve in zip(part.edges, layout.curves, strict=True):
        assert curve.tip[1] == pytest.approx(layout.boxes[edge.target].y, abs=0.1)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('syntax error in line 3')", "exit status 1: syntax error in line 3"),
        ("print('no JSON')", "no layout that can be read"),
        ("print('{}')", "no layout that can be read"),
        ("""print('{"bb": "0,0,1,1", "objects": [], "edges": []}')""", "no layout that can be read"),
        ("import time; time.sleep(60)", "did not run to its end"),
    ],
    ids=["fails", "no-json", "empty", "nodes-missing", "hangs"],
)
def test_a_graphviz_that_fails_is_told_and_done_without(program, reason, tmp_path, monkeypatch):
    _, picture = pictured(zoo_graphs("unet-tiny").S_graph)
    sizes = sizes_of(picture)
    wanted = layout_of(picture, sizes)
    monkeypatch.setattr(rkgb.export.render.dot, "TIMEOUT_S", 0.5 if "sleep" in program else 60)
    install_dot(tmp_path / "bin", monkeypatch, program)
    with pytest.warns(UserWarning, match=reason):
        assert layout_of(picture, sizes) == wanted


def test_the_page_has_the_same_texts_with_and_without_graphviz(tmp_path, monkeypatch):
    _, picture = pictured(hostile().K_graph)
    sizes = sizes_of(picture)
    without = draw_page(picture, layout_of(picture, sizes))
    install_dot(tmp_path / "bin", monkeypatch, STAND_IN)
    with_it = draw_page(picture, layout_of(picture, sizes))
    assert [text.get_text() for text in texts_of(with_it)] == [text.get_text() for text in texts_of(without)]
    assert len(with_it.axes[0].patches) == len(without.axes[0].patches)
