"""Draw the picture of docs/architecture.md: the rooms of the three packages, and what goes from one to the next.

python docs/make_architecture.py            # docs/images/architecture.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

WIDTH, HEIGHT, GAP = 24.0, 5.6, 1.2
# Each package: title, colour, left edge, and its rooms from the first that a model meets to the last.
PACKAGES = (
    (
        "rkgb: a module as graphs",
        "#d6e6f7",
        "#2563a8",
        0.0,
        (
            ("capture/", "recording/, opaque/", "module, sample → B graph"),
            ("replay/", "", "is the trace exact?"),
            ("passes/", "ir/, restore/", "B → D → S → blocks, classes"),
            ("profile/", "devices/", "bytes and times of each block"),
            ("ir/kgraph", "", "K graph: forward, backward, data"),
        ),
    ),
    (
        "rk_solvers: plain numbers",
        "#cdece6",
        "#12786a",
        33.0,
        (
            ("problem, liveness", "", "operations, data, options; what is alive when"),
            ("baselines/, local/", "", "first plans, improved step by step"),
            ("exact/, chain/", "intervals/", "programs; dynamic programs over blocks"),
            ("bounds/", "", "what no plan can beat"),
            ("anytime/", "replay/", "→ Schedule, proven gap"),
        ),
    ),
    (
        "rockmate: a module that trains",
        "#fbdcc4",
        "#bf5510",
        66.0,
        (
            ("module, calls/", "guards/", "which plan serves this call?"),
            ("planning/", "memory/", "budget → plan, checked on a real step"),
            ("runtime/", "", "Schedule → generated code → Step"),
            ("plan_files/", "", "plans on disk, in the cache, on other ranks"),
            ("queries/, reports/, cli/", "", "compat/, distributed/, integrations/: other ways in"),
        ),
    ),
)


def corner(package: int, row: int) -> tuple[float, float]:
    """Left lower corner of a room's box."""
    return PACKAGES[package][3] + 1.5, 32.0 - row * (HEIGHT + GAP)


def draw(axes: Axes) -> None:
    """All rooms, and the arrows between them."""
    for package, (title, fill, ink, left, rooms) in enumerate(PACKAGES):
        frame = (left, 32.0 - 4 * (HEIGHT + GAP) - 1.6)
        axes.add_patch(
            FancyBboxPatch(
                frame, WIDTH + 3, 5 * (HEIGHT + GAP) + 4.2, "round,pad=0.1,rounding_size=1", fc="none", ec=ink
            )
        )
        axes.text(left + (WIDTH + 3) / 2, 39.9, title, ha="center", fontsize=10.5, color=ink, weight="bold")
        for row, (name, beside, does) in enumerate(rooms):
            x, y = corner(package, row)
            axes.add_patch(
                FancyBboxPatch((x, y), WIDTH, HEIGHT, "round,pad=0.1,rounding_size=0.8", fc=fill, ec=ink, lw=0.8)
            )
            label = f"{name}  ({beside})" if beside else name
            axes.text(x + WIDTH / 2, y + 3.6, label, ha="center", fontsize=9, weight="bold")
            axes.text(x + WIDTH / 2, y + 1.3, does, ha="center", fontsize=7.5)
            if row and (package < 2 or row < 3):
                axes.add_patch(arrow((x + WIDTH / 2, y + HEIGHT + GAP), (x + WIDTH / 2, y + HEIGHT), ink))
    (x, y), (to_x, to_y) = corner(0, 4), corner(1, 0)
    axes.add_patch(arrow((x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2), "#444444"))
    axes.text(30.3, 10.0, "Problem,\nchain", ha="center", fontsize=9, style="italic")
    (x, y), (to_x, to_y) = corner(1, 4), corner(2, 2)
    axes.add_patch(arrow((x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2), "#444444"))
    axes.text(63.2, 10.0, "Schedule", ha="center", fontsize=9, style="italic")


def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> FancyArrowPatch:
    """An arrow from one place to another."""
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, shrinkA=0, shrinkB=0, lw=1.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images", help="folder")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "architecture", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(13, 6))
        axes = figure.add_subplot()
        axes.set_xlim(-1, 95)
        axes.set_ylim(1.5, 42)
        axes.axis("off")
        draw(axes)
        figure.savefig(folder / "architecture.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
