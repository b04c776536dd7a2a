"""A report as one page: no network, no script."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rockmate.units import format_bytes

if TYPE_CHECKING:
    from rockmate.observing.peak_report import PeakReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; }
body { color: #222; background: #fff; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .2em .6em; text-align: left; border-bottom: 1px solid #ddd; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { background: #4878a8; height: .8em; } .growing { color: #a02020; } svg { width: 100%; font-size: 12px; }
"""
_WIDTH, _HEIGHT = 900, 140  # of the lines: names are beside them
_LEFT, _RIGHT, _TOP = 80, 30, 10


def page_of(report: PeakReport, title: str) -> str:
    """The page as HTML."""
    return "\n".join(_lines(report, title))


def _lines(report: PeakReport, title: str) -> Iterator[str]:
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    yield f"<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>"
    number = report.steps.index(report.highest) + 1
    yield f"<p>{format_bytes(report.peak_bytes)} at the highest moment, in step {number} of {len(report.steps)}.</p>"
    yield "<table><tr><th>kind</th><th class=n>bytes</th><th></th></tr>"
    for kind, size_bytes in report.kinds.items():
        share = 100 * size_bytes / max(1, report.peak_bytes)
        bar = f'<div class=bar style="width:{share:.1f}%"></div>'
        size = format_bytes(size_bytes)
        yield f"<tr><td>{html.escape(kind)}</td><td class=n>{size}</td><td width=50%>{bar}</td></tr>"
    yield "</table>\n<h2>Steps</h2>"
    yield _curve([step.peak_bytes for step in report.steps], [step.end_bytes for step in report.steps])
    for holder in report.growing:
        where = " ".join(filter(None, [holder.label.operation, holder.label.module, holder.label.line]))
        yield f"<p class=growing>Growing from step to step: {format_bytes(holder.size_bytes)}, {html.escape(where)}</p>"
    yield "<h2>Who holds it</h2>\n<table><tr><th class=n>bytes</th><th class=n>blocks</th><th>kind</th><th>module</th>"
    yield "<th>line</th><th>operation</th><th>phase</th></tr>"
    for holder in report.holders:
        texts = (holder.kind, holder.label.module, holder.label.line, holder.label.operation, holder.label.phase)
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        size = format_bytes(holder.size_bytes)
        yield f"<tr><td class=n>{size}</td><td class=n>{holder.blocks}</td>{cells}</tr>"
    yield "</table></html>"


def _curve(peaks: list[int], ends: list[int]) -> str:
    """The highest level of each step, and that at its end, above a line of nothing and below that of the most."""
    most = max([1, *peaks])

    def place(step: int, level: int) -> str:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, len(peaks) - 1)
        return f"{x:.1f},{_TOP + _HEIGHT * (1 - level / most):.1f}"

    parts = []
    for level, text in ((most, format_bytes(most)), (most // 2, format_bytes(most / 2)), (0, "0")):
        y = place(0, level).partition(",")[2]
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy=".35em" text-anchor="end">{text}</text>')
    for step in sorted({0, len(peaks) - 1}):
        x = place(step, 0).partition(",")[0]
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">step {step + 1}</text>')
    for levels, color, name in ((ends, "#b08030", "at its end"), (peaks, "#4878a8", "highest in the step")):
        points = " ".join(place(step, level) for step, level in enumerate(levels))
        drawn = f'fill="none" stroke="{color}" stroke-width="2" points="{points}"'
        dots = "".join(
            f'<circle r="3" fill="{color}" cx="{point.partition(",")[0]}" cy="{point.partition(",")[2]}">'
            f"<title>step {step + 1}, {name}: {format_bytes(levels[step])}</title></circle>"
            for step, point in enumerate(points.split())
        )
        parts.append(f"<polyline {drawn}/>{dots}")
    box = f'viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + 24}" role="img" aria-label="levels over the steps"'
    return f"<svg {box}>{''.join(parts)}</svg><p>Blue: the highest level in each step. Brown: at its end.</p>"
