"""Write the tables of docs/benchmarks.md from the result files in benchmarks/results/.

python docs/make_tables.py
"""
# a script, not a package

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rockmate.units import format_bytes, format_ms

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- begin: written by docs/make_tables.py -->"
END = "<!-- end -->"
NO_RESULTS = "No results are stored yet: `make bench` measures them, `python docs/make_tables.py` writes them here."
HEADINGS = (
    "",
    "median step",
    "time / eager",
    "budget",
    "predicted peak",
    "measured peak",
    "gradients off by",
    "planning",
)


def with_tables(page: str, results: Sequence[Path]) -> str:
    """The page with what stands between its two marks replaced by the tables of these files.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold {BEGIN} and, after it, {END}: the tables go between them")
    sections = ["\n".join(section(json.loads(path.read_text(encoding="utf-8")))) for path in sorted(results)]
    return f"{before}{begin}\n\n" + "\n\n".join(sections or [NO_RESULTS]) + f"\n\n{end}{after}"


def section(result: dict[str, Any]) -> Iterator[str]:
    """Lines of one result file: heading, circumstances, table, bars."""
    where = result["circumstances"]
    device = where.get("gpu") or where["device"]
    yield f"### {result['entry']} on {device}"
    yield ""
    yield f"PyTorch {where['torch']}, {where['threads']} CPU threads, medians of {where['repeats']} steps."
    yield ""
    yield row(HEADINGS)
    yield row(["---", *["--:"] * (len(HEADINGS) - 1)])
    for contender in result["contenders"]:
        yield row(cells(contender))
    for bar in result["bars"]:
        reached = "was not run" if bar["ratio"] is None else f"{bar['ratio']:.3f} ×"
        verdict = "met" if bar["met"] else "not met"
        yield f"\n{bar['label']} at most {bar['limit']} × {bar['base']}: {reached}, {verdict}."


def row(texts: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def cells(contender: dict[str, Any]) -> list[str]:
    """What the table says of a contender."""
    difference = contender["largest_gradient_difference"]
    return [
        contender["label"],
        format_ms(contender["median_ms"]),
        f"{contender['time_ratio']:.3f} ×",
        optional_bytes(contender["budget_bytes"]),
        optional_bytes(contender["predicted_peak_bytes"]),
        format_bytes(contender["measured_peak_bytes"]),
        f"{difference:.0e}" if difference else "0",
        "–" if contender["planning_s"] is None else f"{contender['planning_s']:.1f} s",
    ]


def optional_bytes(size_bytes: int | None) -> str:
    """The size, or a dash where there is none."""
    return "–" if size_bytes is None else format_bytes(size_bytes)


def main() -> None:
    """Run the script."""
    page = ROOT / "docs" / "benchmarks.md"
    results = list((ROOT / "benchmarks" / "results").glob("step-*.json"))
    page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
