"""What docs/peers.md says of the results: a table, a picture and the bars of each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.families import Family
from benchmarks.peers.monet import PUBLISHED
from rockmate.units import format_bytes, format_ms

Report = Mapping[str, Any]

NO_RESULTS = (
    "No results are stored yet: `python benchmarks/against_peers.py` measures them, and `python docs/make_tables.py` "
    "writes them here."
)
NUMBERS = ("median step", "time / eager", "predicted", "gap", "peak", "of eager's", "ready in")
HEADINGS = ("", "gradients", *NUMBERS, "ours / this", "")
RUNS, ABSENT = ("exact", "close"), "does not apply"


def picture_name(report: Report) -> str:
    """File name of the picture of a result file."""
    return f"{file_name(report)}.svg"


def file_name(report: Report) -> str:
    """Name of a result file, without its suffix."""
    where = report["circumstances"]
    coarse = "" if where["dtype"] == "float32" else f"-{where['dtype']}"
    tag = f"-{where['tag']}" if where.get("tag") else ""
    return f"peers-{report['model']}-{where['device'].partition(':')[0]}{coarse}{tag}"


def sections(reports: Sequence[Report], pictures: str) -> Iterator[str]:
    """Lines of the generated part: a summary of all models, then one section each; `pictures` is their folder."""
    if not reports:
        yield NO_RESULTS
        return
    yield from summary(reports)
    for report in reports:
        yield ""
        yield from section(report, pictures)


def summary(reports: Sequence[Report]) -> Iterator[str]:
    """Lines of the table of ours in all models, by share of the eager peak."""
    shares = sorted({result["share"] for report in reports for result in ours_of(report)}, reverse=True)
    yield line(["time / eager", *(f"{share:.2f}" for share in shares), "bars met"])
    yield line(["---", *["--:"] * (len(shares) + 1)])
    for report in reports:
        by_share = {result["share"]: result for result in ours_of(report)}
        bars = report["bars"]
        met = f"{sum(bar['met'] for bar in bars)} of {len(bars)}" if bars else "–"
        yield line([title_of(report), *(share_cell(by_share.get(share)) for share in shares), met])


def share_cell(result: Report | None) -> str:
    """What the summary says of one plan."""
    if result is None:
        return ""
    if result["time_ratio"] is None or result["status"] not in RUNS:
        return result["status"]
    return f"{result['time_ratio']:.3f} ×"


def ours_of(report: Report) -> list[Report]:
    """The contenders that are ours, with the default solver."""
    return [result for result in report["contenders"] if result["family"] == Family.OURS]


def title_of(report: Report) -> str:
    """The model and where it ran."""
    where = report["circumstances"]
    coarse = "" if where["dtype"] == "float32" else f", {where['dtype']}"
    tag = f", {where['tag']}" if where.get("tag") else ""
    return f"{report['model']} on {where['gpu'] or where['device']}{coarse}{tag}"


def steps_told(where: Report) -> str:
    """Of how many steps the medians are."""
    told = f"medians of {where['repeats']} steps"
    if where["sittings"]:
        told += f", of eager's and ours of {where['rounds']} in each of {where['sittings']} processes"
    return f"{told}, freed memory kept" if where.get("keeps_freed_memory") else told


def section(report: Report, pictures: str) -> Iterator[str]:
    """Lines of one result file."""
    where = report["circumstances"]
    yield f"### {title_of(report)}"
    yield ""
    told = (
        f"PyTorch {where['torch']}, {where['threads']} CPU threads, {where['dtype']}, {steps_told(where)}, code at "
        f"{where['code']}."
    )
    if where.get("processor"):  # not told by results from before there were several machines
        told += f" Processor: {where['processor']}."
    if where.get("wait_policy") == "ACTIVE":
        told += " Threads spin while they wait."
    yield told + (f" Left out: {', '.join(where['skipped'])}." if where["skipped"] else "")
    yield ""
    yield f"![Time against memory: {title_of(report)}]({pictures}/{picture_name(report)})"
    yield ""
    yield line(HEADINGS)
    yield line(["---", "---", *["--:"] * (len(HEADINGS) - 3), "---"])
    for result in report["contenders"]:
        if result["status"] != ABSENT:
            yield line(cells(result, ours_beside(result, report)))
    yield from published(report["model"])
    yield from absent(report["contenders"])
    if report["bars"]:
        yield ""
        yield "| bar | reached | at most | |"
        yield "| --- | --: | --: | --- |"
        for bar in report["bars"]:
            reached = escaped(bar["reason"]) if bar["reached"] is None else f"{bar['reached']:g}"
            limit = bar["limit"] if isinstance(bar["limit"], str) else f"{bar['limit']:g}"
            yield line([bar["label"], reached, limit, "met" if bar["met"] else "not met"])


def published(name: str) -> Iterator[str]:
    """Rows of what MONeT published of this model, in the columns of the others."""
    if name not in PUBLISHED:
        return
    remark = f"on its authors' GPU, PyTorch 1.5.1, a batch of {PUBLISHED[name].batch}"
    for share, ratio in PUBLISHED[name].ratios:
        row = dict.fromkeys(HEADINGS[:-1], "–") | {"": "MONeT, as published"}
        row |= {"time / eager": f"{ratio:.3f} ×", "of eager's": f"{share:.3f}"}
        yield line([*row.values(), remark])


def absent(results: Sequence[Report]) -> Iterator[str]:
    """A line for those that have no place here, by reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result["status"] == ABSENT:
            reasons.setdefault(result["reason"], []).append(result["label"])
    if reasons:
        yield ""
        yield "Not here:"
        yield ""
        for reason, labels in reasons.items():
            yield f"* {', '.join(labels)}: {escaped(reason)}"


def cells(result: Report, beside: float | None) -> list[str]:
    """What the table says of a contender; `beside` is ours by its time."""
    return [
        result["label"],
        exactness(result),
        *numbers(result),
        shown(beside, lambda ratio: f"{ratio:.3f} ×"),
        remarks(result),
    ]


def numbers(result: Report) -> list[str]:
    """What was measured of a contender, under `NUMBERS`."""
    error = "" if result["time_error"] is None else f" ± {result['time_error']:.3f}"
    return [
        shown(result["median_ms"], format_ms),
        shown(result["time_ratio"], lambda ratio: f"{ratio:.3f} ×{error}"),
        shown(result["predicted_ratio"], lambda ratio: f"{ratio:.3f} ×"),
        shown(result["gap"], lambda gap: f"{100 * gap:.1f} %"),
        shown(result["peak_bytes"], format_bytes),
        shown(result["peak_share"], lambda share: f"{share:.3f}"),
        shown(result["ready_s"], lambda seconds: f"{seconds:.1f} s"),
    ]


def ours_beside(result: Report, report: Report) -> float | None:
    """Time of our fastest plan whose peak is no higher, by that of this competitor; None where there is none."""
    if result["family"] == Family.OURS or result["status"] not in RUNS or result["time_ratio"] is None:
        return None
    times = [
        ours["time_ratio"]
        for ours in ours_of(report)
        if ours["status"] in RUNS and ours["time_ratio"] and ours["peak_bytes"] <= result["peak_bytes"]
    ]
    return min(times) / result["time_ratio"] if times else None


def exactness(result: Report) -> str:
    """Whether it trains as eager does."""
    if result["status"] == "close" and result["relative_difference"] is not None and result["slope"] is None:
        return f"off by {result['relative_difference']:.0e}"
    return f"**{result['status']}**" if result["status"] == "wrong" else result["status"]


def remarks(result: Report) -> str:
    """Reasons and notes, and what a refusal has proven."""
    texts = [result["reason"], result["note"]]
    if result["smallest_budget_bytes"] is not None:
        texts.append(f"smallest budget {format_bytes(result['smallest_budget_bytes'])}")
        if result["proven_bytes"] is not None:
            texts[-1] += f", {format_bytes(result['proven_bytes'])} proven"
    if result["random_equal"] is False:
        texts.append("leaves other random numbers")
    return escaped("; ".join(filter(None, texts)))


def escaped(text: str) -> str:
    """The text as a cell of a table holds it."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("`", "'").replace("\n", " ")


def shown(number: Any, form: Callable[[Any], str]) -> str:
    """The number in that form, a dash for None."""
    return "–" if number is None else form(number)


def line(texts: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def result_files(folder: Path) -> list[Path]:
    """The result files of the comparison with peers in this folder."""
    return sorted(folder.glob("peers-*.json"))
