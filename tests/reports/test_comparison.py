"""The table states what its rows state, and the figure is written in both formats."""

import dataclasses
import re

import pytest
from rich.console import Console

from rockmate.reports.comparison import ComparisonRow, MemoryCurve, comparison_table, draw_memory_figure, scaled_to

MIB = 2**20
RED, GREEN = r"\x1b\[1;31m", r"\x1b\[32m"
EAGER = ComparisonRow("GPT-2", None, None, None, 400 * MIB, 1.0, None, None)
HALF = ComparisonRow("GPT-2", 0.5, 200 * MIB, 198 * MIB, 199 * MIB, 1.08, 0.0, 2.5)


def printed(*rows: ComparisonRow) -> str:
    console = Console(width=80, color_system="standard", force_terminal=True, no_color=False)
    with console.capture() as capture:
        console.print(comparison_table(rows))
    return capture.get()


def test_a_row_shows_its_numbers_with_units():
    text = printed(EAGER, HALF)
    for part in (
        "GPT-2",
        "eager",
        "400 MiB",
        "0.50",
        "200 MiB",
        "198 MiB",
        "199 MiB",
        "1.080×",
        "2.50 s",
    ):
        assert part in text
    assert text.count("GPT-2") == 1


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"measured_peak_bytes": 201 * MIB}, f"{RED} *201 MiB"),
        ({"largest_gradient_difference": 2e-6}, f"{RED} *2e-06"),
        ({}, f"{GREEN} *199 MiB"),
        ({}, rf"{GREEN} *0\b"),
    ],
)
def test_what_breaks_the_promise_is_red(change, shown):
    assert re.search(shown, printed(dataclasses.replace(HALF, **change)))


def test_figure_is_written_as_png_and_pdf(tmp_path):
    eager = [(1.0, 200 * MIB), (2.0, 400 * MIB), (4.0, 10 * MIB)]
    curves = [MemoryCurve(f"budget {share}", eager[:1], int(share * 400 * MIB), 200 * MIB) for share in (0.7, 0.5)]
    paths = draw_memory_figure(tmp_path / "new" / "figure", "A title", eager, curves)
    assert [path.name for path in paths] == ["figure.png", "figure.pdf"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    first = paths[1].read_bytes()
    draw_memory_figure(tmp_path / "new" / "figure", "A title", eager, curves)
    assert paths[1].read_bytes() == first


def test_figure_without_plans_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one plan"):
        draw_memory_figure(tmp_path / "figure", "A title", [(0.0, 1)], [])


def test_scaling_keeps_the_levels():
    assert scaled_to([(1.0, 5), (4.0, 7)], 2.0) == ((0.5, 5), (2.0, 7))
    assert scaled_to([], 2.0) == []
