"""Take the picture of docs/reports.md: the report of a plan, in a browser.

    python docs/make_report_picture.py                                     # a minute on two CPU cores
    python docs/make_report_picture.py --entry gpt2-tiny --output folder   # seconds: shows that it runs

Needs playwright, a Chromium on the path, and Pillow.
"""
# a script, not a package

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from rockmate import Rockmate, zoo

SIZE = {"width": 1240, "height": 1300}  # in pixels of the page
COLOURS = 128  # of the picture, which keeps it small


def take_picture(page_path: Path, picture: Path) -> None:
    """The first screen of the page, hovered over where the backward is at work."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("no Chromium is on the path")
    with sync_playwright() as started:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=browser_path, args=options)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(page_path.absolute().as_uri())
        box = page.locator("#chart svg").bounding_box()
        assert box is not None, "the page shows no chart"
        page.mouse.move(box["x"] + 0.56 * box["width"], box["y"] + 0.55 * box["height"])
        page.screenshot(path=picture)
        browser.close()
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", choices=zoo.names(), default="gpt2-demo")
    parser.add_argument("--budget", type=float, default=0.5, help="part of eager's peak")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds for a search")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images", help="folder")
    options = parser.parse_args()
    torch.set_num_threads(2)
    entry = zoo.get(options.entry)
    model = Rockmate(entry.model, entry.sample, options.budget, loss=entry.loss, time_limit=options.time_limit)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = model.report(Path(scratch) / "report.html")
        assert isinstance(path, Path)
        take_picture(path, options.output / "report.png")


if __name__ == "__main__":
    main()
