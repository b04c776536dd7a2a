"""Draw the pictures of docs/graphs.md from a real model, and those of docs/four_graphs.md from the code on that page.

    python docs/make_graph_figures.py                                     # seconds on two CPU cores
    python docs/make_graph_figures.py --entry gpt2-tiny --output folder   # less: shows that it runs

Times in the pictures are measured, so they differ from run to run.
"""
# a script, not a package

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from PIL import Image

from rkgb import make_all_graphs
from rkgb.show import print_graph
from rockmate import zoo


def draw(entry: zoo.ZooEntry, block: int, folder: Path) -> list[Path]:
    """Write the overview of the K graph and the page of one block's class; returns the paths."""
    graphs = make_all_graphs(entry.model, entry.sample)
    number = next(index for index, members in enumerate(graphs.equivalent_classes) if block in members)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with tempfile.TemporaryDirectory() as scratch:
        pages = print_graph(graphs.K_graph, render_format="png", directory=scratch)
        # The first page is the overview; one for each class follows.
        for name, page in (("graph_overview", pages[0]), ("graph_block", pages[1 + number])):
            paths.append(store(page, folder / f"{name}.png"))
    return paths


def draw_four_graphs(folder: Path) -> list[Path]:
    """Write a picture of each of the four graphs of the module on the page that explains them; returns the paths."""
    page = (Path(__file__).parent / "four_graphs.md").read_text("utf-8")
    [code] = re.findall(r"^```python\n(.*?class .*?)^```$", page, re.MULTILINE | re.DOTALL)[:1]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "example.py", "exec"), names)
    graphs = make_all_graphs(names["model"], names["sample"])
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in "BDSK":
            [picture] = print_graph(getattr(graphs, f"{kind}_graph"), render_format="png", directory=scratch)
            paths.append(store(picture, folder / f"graph_of_block_{kind}.png"))
    return paths


def store(picture: Path, path: Path) -> Path:
    """Write the picture with few colours: a palette makes the file a quarter as large."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)
    return path


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", choices=zoo.names(), default="gpt2-demo")
    parser.add_argument("--block", type=int, default=4, help="the block whose page is drawn (default 4)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images", help="folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw(zoo.get(options.entry), options.block, options.output)
    draw_four_graphs(options.output)


if __name__ == "__main__":
    main()
