"""Files open, are the same bytes again, hold every text in its place, and break on no name."""

import itertools
import re
import stat
import sys
import threading
import time
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from torch import nn

from rkgb import RockmateError, cut, equivalent_classes
from rkgb.export.networkx_form import to_networkx
from rkgb.export.render import RenderError
from rkgb.export.render.canvas import draw_page, texts_of
from rkgb.export.render.describe import describe
from rkgb.export.render.files import layout_of, safe_stem, sizes_of
from rkgb.export.render.pages import pages_of
from rkgb.export.render.style import LOOKS
from rkgb.show import print_all_graphs, print_graph, print_graph_list
from tests.graph.pictured import KINDS, graph, hostile, pdf_pages, pictured, taken
from tests.graph.programs import linear, rows, simplified, zoo_graphs

pytestmark = pytest.mark.usefixtures("without_graphviz")


# ---- the page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tiny", "unet-tiny", "hostile"])
@pytest.mark.parametrize("kind", ["D", "K"])
def test_texts_stay_apart_and_within_their_boxes(name, kind):
    for page in pages_of(graph(taken(name), kind)):
        figure = draw_page(page, layout_of(page, sizes_of(page)))
        FigureCanvasAgg(figure)
        figure.set_dpi(144)
        texts = [text.get_window_extent().extents.tolist() for text in texts_of(figure)]
        for (left, low, right, high), (left_2, low_2, right_2, high_2) in itertools.combinations(texts, 2):
            # Boxes of letters count ascenders and descenders that few texts have: a pixel of overlap shows nothing.
            apart = right <= left_2 + 1 or right_2 <= left + 1 or high <= low_2 + 2 or high_2 <= low + 2
            assert apart
        frames = {patch.get_gid(): patch.get_window_extent() for patch in figure.axes[0].patches}
        # The texts of the page's head come first, then those of the nodes, in the picture's order.
        of_nodes = iter(texts[len(texts) - sum(1 + len(node.lines) for node in page.nodes) :])
        for index, node in enumerate(page.nodes):
            frame = frames[f"node{index}"]
            for left, low, right, high in itertools.islice(of_nodes, 1 + len(node.lines)):
                assert frame.x0 < left < right < frame.x1
                assert frame.y0 - 1 < low < high < frame.y1 + 1
        width, height = figure.get_size_inches() * 144
        assert all(0 <= left < right <= width and 0 <= low < high <= height for left, low, right, high in texts)


def test_every_text_of_the_picture_is_on_the_page():
    _, picture = pictured(zoo_graphs("unet-tiny").K_graph)
    texts = [text.get_text() for text in texts_of(draw_page(picture, layout_of(picture, sizes_of(picture))))]
    wanted = [picture.title, picture.subtitle, *(look.label for look in picture.legend), *picture.scales]
    wanted += [text for node in picture.nodes for text in (node.title, *node.lines)]
    assert sorted(texts) == sorted(filter(None, wanted))  # what is called "" is not drawn


# ---- files -----------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.slow
def test_pdf_has_a_file_for_each_kind_and_a_page_for_each_picture(tmp_path):
    graphs = zoo_graphs("gpt2-tiny")
    paths = print_all_graphs(graphs, "gpt2", render_format="pdf", directory=tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"gpt2_{kind}.pdf" for kind in KINDS]
    # An overview, and one page for each distinct block: none of them is too large for a page.
    assert [pdf_pages(path) for path in paths] == [1 + len(graphs.equivalent_classes)] * 4


def test_svg_parses_and_tells_more_about_each_node_and_edge(tmp_path):
    graphs = zoo_graphs("unet-tiny")
    paths = print_graph(graphs.S_graph, "unet", directory=tmp_path)
    assert [path.name for path in paths] == ["unet.svg"]
    root = ET.parse(paths[0]).getroot()
    groups = [group for group in root.iter() if group.find("{*}title") is not None]
    titles = {group.get("id"): group.find("{*}title").text for group in groups if group is not root}
    _, picture = pictured(graphs.S_graph)
    assert {key: text for key, text in titles.items() if key.startswith("node")} == {
        f"node{index}": node.tooltip for index, node in enumerate(picture.nodes)
    }
    assert sum(key.startswith("edge") for key in titles) == len(picture.edges)
    written = "".join(root.itertext())
    assert all(node.title in written for node in picture.nodes)


def test_png_opens_and_has_the_colours(tmp_path):
    paths = print_graph_list(zoo_graphs("gpt2-tiny").blocks[:2], "blocks", render_format=".PNG", directory=tmp_path)
    assert [path.name for path in paths] == ["blocks_1.png", "blocks_2.png"]
    for path in paths:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            colours = {colour[:3] for _, colour in image.getcolors(image.width * image.height)}
        assert tuple(bytes.fromhex(LOOKS["forward"].fill[1:])) in colours


def test_files_have_no_name_but_their_kind_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graphs = zoo_graphs("unet-tiny")
    made = [*print_graph(graphs.S_graph), *print_graph(graphs.blocks[0]), *print_graph_list([graphs.blocks[0]])]
    assert [path.as_posix() for path in made] == [f"graphviz_dir/{stem}.svg" for stem in ("S_graph", "block", "graphs")]
    assert all(path.exists() for path in made)


@pytest.mark.parametrize("render_format", ["svg", "pdf", "png", "dot"])
def test_hostile_names_break_no_format(render_format, tmp_path):
    graphs = hostile()
    name = 'a/../b"<c>\n' + "ü" * 300
    paths = print_all_graphs(graphs, name, render_format=render_format, directory=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    for path in paths:
        if render_format == "svg":
            ET.parse(path)
        elif render_format == "pdf":
            assert pdf_pages(path) == 1
        elif render_format == "png":
            with Image.open(path) as image:
                image.load()
        else:
            assert path.read_text(encoding="utf-8").startswith("digraph picture {\n")


@pytest.mark.parametrize("name", ["", "..", "/", "a/b", "CON\0", "ü" * 500, "x" * 500, ".hidden", "gpt2-tiny_v1.0"])
def test_file_names_stay_in_their_folder(name):
    stem = safe_stem(name)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", stem)
    assert stem == name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,90}", name)


@pytest.mark.parametrize("render_format", ["svg", "pdf", "png", "dot"])
def test_same_graph_gives_same_bytes_whatever_the_time_and_settings(render_format, tmp_path, monkeypatch):
    of = zoo_graphs("unet-tiny").K_graph
    first = print_graph(of, "k", render_format=render_format, directory=tmp_path / "first")
    monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
    with mpl.rc_context({"font.size": 31, "lines.linewidth": 9, "savefig.bbox": "tight", "path.sketch": (1, 2, 3)}):
        second = print_graph(of, "k", render_format=render_format, directory=tmp_path / "second")
    assert [path.name for path in first] == [path.name for path in second]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_settings_and_graphs_are_left_as_they_were(tmp_path):
    settings = dict(mpl.rcParams)
    of = zoo_graphs("unet-tiny").K_graph
    before = describe(of)
    print_graph(of, "k", render_format="pdf", directory=tmp_path)
    assert dict(mpl.rcParams) == settings
    assert describe(of) == before
    assert "matplotlib.pyplot" not in sys.modules or not mpl.pyplot.get_fignums()


# ---- errors and viewers ----------------------------------------------------------------------------------


def test_unknown_format_is_an_error_that_lists_the_formats(tmp_path):
    with pytest.raises(RenderError, match=r"'gif'.*pdf, svg, png, dot"):
        print_graph(zoo_graphs("unet-tiny").S_graph, render_format="gif", directory=tmp_path)
    assert not list(tmp_path.iterdir())
    assert issubclass(RenderError, RockmateError)


@pytest.mark.parametrize("draw", [print_graph, print_all_graphs, describe, to_networkx])
def test_what_is_no_graph_is_an_error_that_says_what_it_is(draw):
    with pytest.raises(RenderError, match="Linear"):
        draw(linear())


def test_all_graphs_are_asked_for_by_name():
    with pytest.raises(RenderError, match="SGraph.*print_graph"):
        print_all_graphs(zoo_graphs("unet-tiny").S_graph)


def viewers():
    return [thread for thread in threading.enumerate() if thread.name == "rkgb-viewer"]


def test_opening_where_there_is_no_viewer_fails_silently(tmp_path):
    paths = print_graph(zoo_graphs("unet-tiny").S_graph, "s", open=True, directory=tmp_path)
    for thread in viewers():
        thread.join(10)
    assert paths[0].exists()
    assert not viewers()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the viewer is called otherwise there")
def test_opening_shows_the_first_page(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    viewer = folder / "xdg-open"
    viewer.write_text(f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'seen')!r}, 'w').write(sys.argv[1])\n")
    viewer.chmod(viewer.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    paths = print_graph(zoo_graphs("gpt2-tiny").K_graph, "k", open=True, directory=tmp_path)
    for thread in viewers():
        thread.join(30)
    assert (tmp_path / "seen").read_text() == str(paths[0].resolve())


# ---- size ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_graph_of_2500_nodes_takes_seconds_and_few_pages(tmp_path):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(4), linear(), linear()

        def forward(self, x):
            hidden = self.norm(x)
            y = self.first(hidden)
            for _ in range(7):
                y = torch.tanh(y) * 2 + hidden
            return x + self.second(y)

    of = simplified(nn.Sequential(*(Layer() for _ in range(100))), rows())
    assert len(of.nodes) >= 2500
    blocks = cut(of)
    classes = equivalent_classes(of.dgraph, blocks)
    start = time.perf_counter()
    (path,) = print_graph(of, "large", render_format="pdf", directory=tmp_path)
    assert time.perf_counter() - start < 40  # 5 on an idle machine
    assert pdf_pages(path) == 1 + len(classes) < 12
