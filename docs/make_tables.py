"""Write the tables of docs/benchmarks.md and docs/peers.md, and the pictures of this, from benchmarks/results/.

python docs/make_tables.py
python docs/make_tables.py --results folder --page page.md   # all results of a folder on one page
"""
# a script, not a package

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.deep import verdict
from benchmarks.peers import page as peers
from benchmarks.peers.monet import PUBLISHED
from rockmate.units import format_bytes, format_ms

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- begin: written by docs/make_tables.py -->"
END = "<!-- end -->"
NO_RESULTS = "No results are stored yet: `make bench` measures them, `python docs/make_tables.py` writes them here."
SAME = 1.001  # plans within this factor of the fastest are as good
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


def with_tables(page: str, results: Sequence[Path], *stored: Path | None) -> str:
    """The page with what stands between its marks replaced by the tables of these files.

    `results` are those of training steps, between the first pair of marks; those that are `stored` are of the scripts
    of `SECTIONS`, in that order, between the second pair and so on. A pair whose file is None is left as it is.

    Raises:
        ValueError: the page lacks a mark.
    """
    texts: list[str | None] = ["\n\n".join("\n".join(section(_read(path))) for path in sorted(results))]
    for path, sections in zip(stored, SECTIONS.values(), strict=False):
        exists = path is not None and path.exists()
        texts.append(None if path is None else "\n".join(sections(_read(path))) if exists else "")
    while texts and texts[-1] is None:
        texts.pop()
    parts = page.split(BEGIN)
    if len(parts) <= len(texts) or any(END not in part for part in parts[1:]):
        raise ValueError(f"the page must hold {BEGIN} and, after it, {END}, {len(texts)} times: the tables go between")
    for place, text in enumerate(texts, start=1):
        if text is not None:
            parts[place] = f"\n\n{text or NO_RESULTS}\n\n{END}{parts[place].partition(END)[2]}"
    return BEGIN.join(parts)


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def machine(where: dict[str, Any]) -> str:
    """What it was measured on."""
    return f"PyTorch {where['torch']}, {where['threads']} CPU thread(s) of {where['cores']} cores, {where['processor']}"


def bytes_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the comparison of predicted with measured peaks: one table of all models and budgets, and the bars."""
    where = report["circumstances"]
    yield f"PyTorch {where['torch']}, {where['threads']} CPU threads."
    yield ""
    headings = ["", "budget", "", "predicted", "measured", "off by", "process", "recomputed", "time", "exact"]
    yield row(headings)
    yield row(["---", "---", *["--:"] * (len(headings) - 2)])
    for result in report["rows"]:
        texts = [result["model"], result["budget"], format_bytes(result["budget_bytes"])]
        if result["needed_bytes"] is not None:
            least, proven = format_bytes(result["needed_bytes"]), result["proven_bytes"] / result["needed_bytes"]
            yield row([*texts, f"refused: {least} needed, proven {100 * proven:.1f} %", *["–"] * (len(headings) - 4)])
            continue
        predicted, measured = result["predicted_bytes"], result["measured_bytes"]
        texts += [format_bytes(predicted), format_bytes(measured), f"{100 * abs(predicted / measured - 1):.3f} %"]
        texts += [optional_bytes(result["process_bytes"]), str(result["recomputations"])]
        yield row([*texts, f"{100 * result['overhead']:+.1f} %", "yes" if result["exact"] else result["difference"]])
    yield ""
    yield from bar_table(report["bars"])


def bar_table(bars: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table of bars, each with what was reached."""
    yield "| what | reached | at most | |"
    yield "| --- | --: | --: | --- |"
    for bar in bars:
        yield row([bar["label"], f"{bar['reached']:g}", f"{bar['limit']:g}", "met" if bar["met"] else "not met"])


def solver_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the comparison of solvers: a table per problem, and the bars."""
    where = report["circumstances"]
    yield (
        f"At most {where['time_limit_s']:.0f} s for a search of `auto`, which ends at a gap of {100 * where['gap']:g} "
        f"%, and {where['others_limit_s']:.0f} s for one of the others, on {where['cores']} CPU cores. Times are those "
        "of the plans above keep-all, the fastest in bold. The gap is to the best bound that any solver has proven."
    )
    results = report["results"]
    bounds: dict[tuple[str, float], float] = {}
    for result in results:
        key = result["problem"], result["budget"]
        bounds[key] = max(bounds.get(key, 0.0), result["bound_ms"] or 0.0)
    for problem in dict.fromkeys(result["problem"] for result in results):
        yield ""
        yield from solver_table(problem, [result for result in results if result["problem"] == problem], bounds)
        sizes = report["bytes"][problem]
        yield ""
        yield (
            f"Smallest budget known: {sizes['smallest'] / sizes['keep_all']:.3f} of keep-all's peak; one operation "
            f"alone takes {sizes['one_operation'] / sizes['keep_all']:.3f}."
        )
    yield ""
    yield from bar_table(report["bars"])


def deep_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the planning of long chains: a table, and what the second process took at most."""
    where, rows = report["circumstances"], report["rows"]
    yield f"PyTorch {where['torch']}, {where['threads']} threads on {where['cores']} cores."
    yield ""
    yield row(["", "budget", "planned in", "planning took", "second process", "recomputation", "gap", "bar"])
    yield row(["---", *["--:"] * 6, "---"])
    for result in rows:
        texts = [f"{result['kind']}, {result['operations']:,} operations", f"{result['share']:.0%}"]
        if "gap" not in result:
            yield row([*texts, result.get("refused") or result["failed"], *["–"] * 5])
            continue
        gap = result["gap"]
        texts += [f"{result['seconds']:.1f} s"]
        texts += [format_bytes(result[f"{process}_peak_bytes"]) for process in ("planning", "aside")]
        texts += [f"{100 * result['overhead']:+.1f} %", "not known" if gap is None else f"{100 * gap:.2f} %"]
        yield row([*texts, verdict(result)])


def lengths_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of runs on batches padded to their own longest row: a table, and the bars."""
    where = report["circumstances"]
    code = ", ".join(dict.fromkeys(run.get("code") or where["code"] for run in report["runs"]))
    yield f"PyTorch {where['torch']}, {where['threads']} threads on {where['cores']} cores, code at {code}."
    yield ""
    ways = ("eager", "checkpoint", "rockmate")
    yield row(["", "batches", "traced or measured", *ways, "a step later on / eager", "a new length", "budget", "peak"])
    yield row(["---", *["--:"] * 9])
    for run in report["runs"]:
        steps = list(zip(*(run["step_s"][way] for way in ("rockmate", "eager")), strict=True))
        later = [mine / theirs for number, (mine, theirs) in enumerate(steps) if number not in run["planned"]]
        texts = [run["model"], str(len(run["lengths"])), str(len(run["planned"]))]
        texts += [f"{sum(run['step_s'][way]):.0f} s" for way in ways]
        texts.append(f"{statistics.median(later):.3f}")
        new = statistics.median(run["new_length_ms"]), statistics.median(run["new_length_share"])
        texts.append(f"{new[0]:.0f} ms, {100 * new[1]:.1f} %")
        yield row([*texts, format_bytes(run["budget_bytes"]), format_bytes(run["peak_bytes"]["rockmate"])])
    yield ""
    yield from bar_table(report["bars"])


def planning_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of what planning takes: a table, and the bars."""
    where = report["circumstances"]
    yield f"PyTorch {where['torch']}, {where['threads']} threads on {where['cores']} cores, code at {where['code']}."
    yield ""
    yield row(["", "eager step", "first plan, processors", "by the clock", "second budget", "by the cache"])
    yield row(["---", *["--:"] * 5])
    for result in report["rows"]:
        names = ("eager_s", "first_cpu_s", "first_s", "second_s", "cached_s")
        yield row([result["model"], *(f"{result[name]:.2f} s" for name in names)])
    yield ""
    yield from bar_table(report["bars"])


def new_size_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of calls of new sizes: a table, and the bars."""
    where = report["circumstances"]
    yield f"PyTorch {where['torch']}, {where['threads']} threads on {where['cores']} cores, code at {where['code']}."
    yield ""
    yield row(
        ["", "sizes", "traced", "eager step", "beyond it, a new size", "peak of the budget", "of a dedicated plan"]
    )
    yield row(["---", *["--:"] * 6])
    for result in report["rows"]:
        times = [f"{statistics.median(result[name]):.0f} ms" for name in ("eager_ms", "beyond_ms")]
        peak = f"{max(result['peak_bytes']) / result['budget_bytes']:.3f}"
        counts = [str(len(result["sizes"])), str(result["traced"])]
        yield row([result["model"], *counts, *times, peak, f"{max(result['against_dedicated']):.3f}"])
    yield ""
    yield from bar_table(report["bars"])


def family_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the families of transformers: counts by kind, the bars, and a line of each family."""
    where, rows = report["circumstances"], report["rows"]
    code = dict.fromkeys(result["code"] for result in rows)
    yield (
        f"PyTorch {where['torch']}, transformers {where['transformers']}, code at {', '.join(code)}. Budgets are "
        f"{where['budget']:g} of the eager peak, or, where that is refused, the smallest one named."
    )
    yield ""
    yield row(["kind", "families", "exact, within the budget"])
    yield row(["---", "--:", "--:"])
    for kind in [*dict.fromkeys(result["kind"] for result in rows), None]:
        of_kind = [result for result in rows if kind in (result["kind"], None)]
        met = sum(result["exact"] and result["under_budget"] for result in of_kind)
        yield row([kind or "all", str(len(of_kind)), str(met)])
    yield ""
    yield from bar_table(report["bars"])
    yield ""
    yield row(["", "eager", "budget", "measured", "recomputed", "time", "exact", "within", "planning", ""])
    yield row(["---", *["--:"] * 8, "---"])
    for result in rows:
        yield row(family_cells(result))


def family_cells(result: dict[str, Any]) -> list[str]:
    """What the table says of a family."""
    told = [result["note"], (result["reason"] or "").replace("|", "\\|")]
    if not result["eager_bytes"]:
        return [result["family"], *["–"] * 8, "; ".join(filter(None, told))]
    if result["proven_bytes"] is not None:
        told.insert(0, f"smallest budget: {format_bytes(result['proven_bytes'])} are proven to be needed")
    return [
        result["family"],
        *(format_bytes(result[f"{size}_bytes"]) for size in ("eager", "budget", "measured")),
        str(result["recomputations"]),
        f"{100 * result['overhead']:+.1f} %",
        *("yes" if result[claim] else "no" for claim in ("exact", "under_budget")),
        f"{result['planning_s']:.1f} s",
        "; ".join(filter(None, told)),
    ]


def solver_table(problem: str, results: list[dict[str, Any]], bounds: dict[tuple[str, float], float]) -> Iterator[str]:
    """One line per solver; for each budget the overhead, the gap, and the seconds of planning."""
    budgets = list(dict.fromkeys(result["budget"] for result in results))
    names = [f"{budget:g}" if budget else "smallest" for budget in budgets]
    yield f"### {problem}"
    yield ""
    yield row(["", *(text for name in names for text in (f"at {name}", "gap", "planned in"))])
    yield row(["---", *["--:"] * (3 * len(names))])
    least = {b: min((r["time_ms"] for r in results if r["fits"] and r["budget"] == b), default=0.0) for b in budgets}
    for solver in dict.fromkeys(result["solver"] for result in results):
        texts = [solver]
        for budget in budgets:
            found = next(r for r in results if (r["solver"], r["budget"]) == (solver, budget))
            if not found["fits"]:
                texts += ["does not fit", "–", f"{found['seconds']:.1f} s"]
                continue
            overhead = f"{100 * found['overhead']:.2f} %"
            gap = max(0.0, 100 * (1 - bounds[problem, budget] / found["time_ms"]))
            texts.append(f"**{overhead}**" if found["time_ms"] <= SAME * least[budget] else overhead)
            texts += [f"{gap:.2f} %", f"{found['seconds']:.1f} s"]
        yield row(texts)


def section(result: dict[str, Any]) -> Iterator[str]:
    """Lines of one result file: heading, circumstances, table, bars."""
    where = result["circumstances"]
    device = where.get("gpu") or where["device"]
    yield f"### {result['entry']} on {device}"
    yield ""
    counted = f"medians of {where['repeats']} steps, code at {where['code']}"
    yield f"PyTorch {where['torch']}, {where['threads']} CPU threads, {counted}."
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


def zoo_page(page: str, index: dict[str, Any]) -> str:
    """The page of stored plans with its table replaced by that of the index, a line for each model.

    Raises:
        ValueError: the page lacks a mark.
    """
    return between_marks(page, zoo_sections(index))


def peers_page(page: str, results: Sequence[Path]) -> str:
    """The page of other ways to train with its generated part replaced by that of these result files.

    Raises:
        ValueError: the page lacks a mark.
    """
    return between_marks(page, peers.sections([_read(path) for path in sorted(results)], "images"))


def between_marks(page: str, lines: Iterable[str]) -> str:
    """The page with these lines between its only pair of marks. Raises `ValueError` where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold {BEGIN} and, after it, {END}: the table goes between")
    return f"{before}{BEGIN}\n\n{chr(10).join(lines)}\n\n{END}{after}"


def zoo_sections(index: dict[str, Any]) -> Iterator[str]:
    """Lines of the table of stored plans: the extra time of each, and the gap."""
    plans = index["plans"]
    if not plans:
        yield "No plans are stored yet: `python benchmarks/schedule_zoo.py` makes them."
        return
    shares = sorted({plan["share"] for plan in plans}, reverse=True)
    made = dict.fromkeys((plan["device"], plan["torch"]) for plan in plans)
    yield f"Made on {', '.join(f'{device} with PyTorch {torch}' for device, torch in made)}, code at {index['code']}."
    yield ""
    yield row(["model", "eager peak", *(f"{share:.2f}" for share in shares)])
    yield row(["---", *["--:"] * (1 + len(shares))])
    for model in dict.fromkeys(plan["model"] for plan in plans):
        of_model = {plan["share"]: plan for plan in plans if plan["model"] == model}
        peak_bytes = next(iter(of_model.values()))["eager_peak_bytes"]
        yield row([f"`{model}`", format_bytes(peak_bytes), *(zoo_cell(of_model.get(share)) for share in shares)])
        found = PUBLISHED.get(model.removesuffix("-demo"))
        if found is not None and len(found.points) == len(shares):
            overheads = [f"{percent:+.1f} %" for _, percent in found.points]
            yield row([f"MONeT, as published, {found.batch} images", f"{found.eager_gb} GB", *overheads])


def zoo_cell(plan: dict[str, Any] | None) -> str:
    """What the table says of one plan."""
    if plan is None:
        return ""
    if plan["peak_bytes"] is None:
        return f"needs {plan['smallest_budget_bytes'] / plan['eager_peak_bytes']:.3f}"
    gap = "" if plan["gap"] is None else f" (gap {100 * plan['gap']:.1f} %)"
    return f"{100 * plan['overhead']:+.1f} %{gap}"


def offload_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of steps that move data, by turns with others: a table of all models and budgets."""
    where, links = report["circumstances"], report["circumstances"]["links"]
    speeds = " and ".join(
        f"{links[way]['bytes_per_ms'] / 1e6:.2f} GB/s {way}, at {links[way]['burden']:.0%} of a computation's time"
        for way in ("out", "back")
    )
    yield (f"{machine(where)}; {where.get('second_memory', 'a file')}, {speeds}; code at {where['code']}.")
    yield ""
    headings = [
        "",
        "budget",
        "",
        "peak",
        "moved",
        "time",
        "of eager's",
        "predicted",
        "gap",
        "recomputed",
        "tensors moved",
        "ready in",
        "of it measuring",
    ]
    yield row(headings)
    yield row(["---", "---", *["--:"] * (len(headings) - 2)])
    for result in report["rows"]:
        predicted, gap = result["predicted_over_eager"], result["gap"]
        yield row(
            [
                f"{result['model'].removesuffix('-demo')} at {result['share']:g}",
                optional_bytes(result["budget_bytes"]),
                OFFLOAD_WAYS[result["way"]],
                format_bytes(result["peak_bytes"]),
                optional_bytes(result["stored_bytes"] or None),
                format_ms(result["median_ms"]),
                f"{result['over_eager']:.3f}",
                "–" if predicted is None else f"{predicted:.3f}",
                "–" if gap is None else f"{100 * gap:.1f} %",
                str(result["recomputations"] or "–"),
                str(result["moves"] or "–"),
                "–" if not result["planned_s"] else f"{result['planned_s']:.0f} s",
                "–" if not result.get("measured_s") else f"{result['measured_s']:.0f} s",
            ]
        )


def _short_offload_lines(report: dict[str, Any]) -> Iterator[str]:
    """Of eager's time, a line for each model and budget."""
    links = report["circumstances"]["links"]
    out, back = (links[way]["bytes_per_ms"] / 1e6 for way in ("out", "back"))
    yield (
        f"On a machine of two cores, one of them computing, with a disk that moves {out:.1f} GB/s out and {back:.1f} "
        "back, and nothing else to do"
    )
    yield "([all figures](benchmarks.md#data-that-move)), steps take of eager's time:"
    yield ""
    ways = {
        "recomputed": "recomputation alone",
        "both": "beside moves",
        "moved": "all moved by hand, whatever the peak",
    }
    yield row(["", *ways.values(), "seconds of planning, without moves and with"])
    yield row(["---", *["--:"] * (len(ways) + 1)])
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for result in report["rows"]:
        found.setdefault((result["model"], result["share"]), {})[result["way"]] = result
    for (model, share), by_way in found.items():
        times = [f"{by_way[way]['over_eager']:.2f}" if way in by_way else "–" for way in ways]
        seconds = ", ".join(f"{by_way[way]['planned_s']:.0f}" for way in ("recomputed", "both") if way in by_way)
        yield row([f"{model.removesuffix('-demo')} at {share:.2g} of eager's peak", *times, seconds])


OFFLOAD_WAYS = {
    "eager": "eager",
    "save_on_cpu": "`save_on_cpu`",
    "moved": "everything moved",
    "recomputed": "recomputed",
    "both": "recomputed and moved",
}


def model_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of ways to train several models: a table for each model, from a run of its own."""
    for place, model in enumerate(report["models"]):
        where = model["circumstances"]
        if place:
            yield ""
        yield (f"**{model['model']}**: {machine(where)}; medians of {where['repeats']} steps, code at {where['code']}.")
        yield ""
        headings = ["", "gradients", "time", "of eager's", "±", "peak", "of eager's", "ready in", ""]
        yield row(headings)
        yield row(["---", "---", *["--:"] * (len(headings) - 3), "---"])
        for result in model["rows"]:
            facts = ("time_ratio", "time_error", "peak_share", "ready_s")
            ratio, error, share, ready_s = (result[fact] for fact in facts)
            told = (result["note"], "" if result["status"] == "close" else result["reason"])
            yield row(
                [
                    result["label"],
                    peers.exactness({"slope": None} | result),
                    "–" if result["median_ms"] is None else format_ms(result["median_ms"]),
                    "–" if ratio is None else f"{ratio:.3f}",
                    "–" if error is None else f"{ratio * error:.3f}",
                    optional_bytes(result["peak_bytes"]),
                    "–" if share is None else f"{share:.3f}",
                    "–" if ready_s is None else f"{ready_s:.0f} s",
                    peers.escaped("; ".join(filter(None, told))),
                ]
            )


def _short_layout_lines(report: dict[str, Any]) -> Iterator[str]:
    """Of eager's time as given, with the share of its peak: a line for each model."""
    yield "Of eager's time as given, with the share of its peak ([all figures](benchmarks.md#layouts-of-convolutions)):"
    yield ""
    ways = {
        "eager, channels_last": "eager, channels_last",
        "auto": 'planned with `layout="auto"`',
        "rockmate": "planned as given",
        "inductor": "compiled by inductor, its own budgets",
    }
    yield row(["", *ways.values()])
    yield row(["---"] * (len(ways) + 1))
    for model in report["models"]:
        found: dict[str, list[str]] = {way: [] for way in ways}
        for result in model["rows"]:
            label = result["label"]
            way = next((way for way in ("our partitioner", "inductor", "auto", "rockmate") if way in label), label)
            if way in found and result["time_ratio"] is not None:
                told = " (wrong gradients)" if result["status"] == "wrong" else ""
                found[way].append(f"{result['time_ratio']:.2f} at {result['peak_share']:.2f}{told}")
        yield row([model["model"], *(", ".join(of_way) or "–" for of_way in found.values())])


SHORT = {
    "offload.md": ("offload-cpu.json", _short_offload_lines),
    "layouts.md": ("layouts-cpu.json", _short_layout_lines),
}
"""By page, the results that a short table on it is of, and its lines."""


def with_short_table(name: str, page: str, report: dict[str, Any]) -> str:
    """The page of that name with its short table replaced by that of these results. Raises `ValueError`."""
    return between_marks(page, SHORT[name][1](report))


def compiled_budget_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of one model that is compiled under many budgets: peak, time and slope of each way, side by side."""
    where, model = report["circumstances"], report["model"]
    yield (
        f"GPT-2 with {model['layers']} layers of {model['width']} and dropout {model['dropout']}, {model['batch']} "
        f"rows of {model['context']} tokens; its eager step takes {format_bytes(report['eager_bytes'])}. "
        f"{machine(where)}; medians of {where['repeats']} steps, code at {where['code']}."
    )
    yield ""
    ways = list(dict.fromkeys(result["way"] for result in report["rows"]))
    yield row(["budget", *(f"{way}: {what}" for way in ways for what in ("peak", "time", "slope", "ready in"))])
    yield row(["--:"] * (1 + 4 * len(ways)))
    for share in dict.fromkeys(result["share"] for result in report["rows"]):
        cells = [f"{share:g}"]
        for way in ways:
            result = next(one for one in report["rows"] if (one["way"], one["share"]) == (way, share))
            if result["refused"]:
                cells += ["refused", "–", "–", f"{result['ready_s']:.0f} s"]
                continue
            slope = f"{result['slope']:.3f}"
            peak = f"{result['peak_share']:.3f}"
            cells += [
                peak if result["peak_share"] <= share else f"**{peak}**",
                f"{result['time_ratio']:.3f}",
                slope if result["is_right"] else f"**{slope}**",
                f"{result['ready_s']:.0f} s",
            ]
        yield row(cells)


def chunked_loss_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of a step with whole logits and with a few rows' at a time, and the bars."""
    where, repeats = report["circumstances"], len(report["rows"][0]["times_ms"])
    yield (f"{machine(where)}; medians of {repeats} steps by turns, code at {where['code']}.")
    yield ""
    yield row(["logits", "peak", "of whole", "time", "of whole", "gradients apart"])
    yield row(["---", *["--:"] * 5])
    medians = [statistics.median(one["times_ms"]) for one in report["rows"]]
    for place, (one, time_ms) in enumerate(zip(report["rows"], medians, strict=True)):
        whole = place - place % 2  # ways come in pairs, the one with whole logits first
        peak = f"{one['peak_bytes'] / report['rows'][whole]['peak_bytes']:.3f}"
        ratio = f"{time_ms / medians[whole]:.3f}"
        apart = f"{one['gradient_difference']:.0e}"
        yield row([one["way"], format_bytes(one["peak_bytes"]), peak, format_ms(time_ms), ratio, apart])
    yield ""
    yield from bar_table(report["bars"])


def observing_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of scripts as they are and watched, and the bars."""
    where = report["circumstances"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["script", "peak", "told", "holders add up to", "prints the same", "step", "watched", "ratio"])
    yield row(["---", *["--:"] * 7])
    for one in report["rows"]:
        sizes = [f"{one[name]:,}" for name in ("peak_bytes", "told_bytes", "held_bytes")]
        plain, watched = (statistics.median(one[name]) for name in ("times_ms", "watched_ms"))
        same = "yes" if one["same"] else "**no**"
        yield row([one["script"], *sizes, same, format_ms(plain), format_ms(watched), f"{watched / plain:.2f}"])
    yield ""
    yield from bar_table(report["bars"])


def largest_batch_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of batches that were found and true ones, and the bars."""
    where = report["circumstances"]
    yield f"PyTorch {where['torch']}, code at {where['code']}."
    yield ""
    yield row(["model", "budget", "found", "measured", "true", "short by"])
    yield row(["---", *["--:"] * 5])
    for one in report["rows"]:
        short = 1 - one["batch"] / one["true_batch"]
        numbers = [one["batch"], one["measurements"], one["true_batch"]]
        yield row([one["model"], format_bytes(one["budget_bytes"]), *map(str, numbers), f"{short:.1%}"])
    yield ""
    yield from bar_table(report["bars"])


MISS = 0.01  # an estimate that is off by more has a row of its own


def estimate_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of what shapes tell beside what was measured: the bars, and each model that is off or has no estimate."""
    where, rows = report["circumstances"], report["rows"]
    told = [one for one in rows if one["estimated_bytes"]]
    close = sum(abs(one["estimated_bytes"] / one["eager_bytes"] - 1) <= MISS / 100 for one in told)
    yield (
        f"{len(rows)} models, {len(told)} with an estimate; of {close} it is within 0.01 % of what was measured. "
        f"PyTorch {where['torch']}, transformers {where['transformers']}, code at {where['code']}."
    )
    yield ""
    yield from bar_table(report["bars"])
    yield ""
    yield "Those that are off by more than 1 %, and those without an estimate or without a plan:"
    yield ""
    yield row(["model", "eager", "estimated", "", "plan", "estimated", "", ""])
    yield row(["---", *["--:"] * 6, "---"])
    for one in rows:
        eager = one["estimated_bytes"] / one["eager_bytes"] - 1 if one["estimated_bytes"] else None
        plan = one["plan_estimated_bytes"] / one["plan_bytes"] - 1 if one["plan_bytes"] else None
        if one["reason"] is None and all(error is not None and abs(error) <= MISS for error in (eager, plan)):
            continue
        sizes = [one[f"{name}bytes"] or None for name in ("eager_", "estimated_", "plan_", "plan_estimated_")]
        texts = [optional_bytes(size) for size in sizes]
        errors = ["–" if error is None else f"{100 * error:+.1f} %" for error in (eager, plan)]
        reason = (one["reason"] or "").partition(":")[0]
        told = "traced with data, it has other operations: no plan by name" if reason == "PlanMismatch" else reason
        yield row([one["model"], *texts[:2], errors[0], *texts[2:], errors[1], told])


def small_budget_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of small budgets: one table of what is found and proven, in percent of keep-all's time above it."""
    cases = report["cases"]
    where = cases[0]["circumstances"]
    codes = ", ".join(dict.fromkeys(case["code"] for case in cases))
    yield f"{machine(where)}; code at {codes}."
    yield ""
    known = ["", "budget", "of keep-all's peak"]
    found_in_time = ["plan", "bound", "gap", "for longer", "bound", "gap"]
    yield row([*known, *found_in_time])
    yield row(["---", *["--:"] * (len(known) + len(found_in_time) - 1)])
    for case in cases:
        texts = [f"{100 * case['first'][key]:.1f} %" for key in ("plan", "bound", "gap")]
        if "alone" in case:
            alone = case["alone"]
            texts += [f"{alone['seconds']:.0f} s", *(f"{100 * alone[key]:.1f} %" for key in ("bound", "gap"))]
        texts += ["–"] * (len(found_in_time) - len(texts))
        budget = format_bytes(case["budget_bytes"])
        name, _, share = case["case"].partition("@")
        least, _, factor = share.partition("*")
        told = f"{factor} × {least}" if factor else share
        yield row([f"{name} at {told}", budget, f"{case['share']:.3f}", *texts])


def implementation_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of other implementations of single operations: one table of all models, and what would pay."""
    where, rows = report["circumstances"], report["rows"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["", "kinds of calls", "of a step's time", "kinds with another that pays", "gain, of a step"])
    yield row(["---", *["--:"] * 4])
    for name in dict.fromkeys(result["model"] for result in rows):
        own = [result for result in rows if result["model"] == name]
        share, gain = (sum(result[key] for result in own) for key in ("share", "gain"))
        paying = [result for result in own if result["gain"] > 0]
        told = ", ".join([str(len(paying)), *dict.fromkeys(result["best"] for result in paying)])
        yield row([name, str(len(own)), f"{100 * share:.0f} %", told, f"{100 * gain:.2f} %"])


def in_place_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of operations that may write into their input: one table of all models."""
    where, rows = report["circumstances"], report["rows"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["", "operations", "of a step's time", "gain, of a step", "most by", "largest result"])
    yield row(["---", *["--:"] * 5])
    for name in dict.fromkeys(result["model"] for result in rows):
        own = [result for result in rows if result["model"] == name]
        count, share, gain = (sum(result[key] for result in own) for key in ("count", "share", "gain"))
        best = max(own, key=lambda result: result["gain"])
        most = f"{best['operation']}, {100 * best['gain']:.2f} %" if best["gain"] > 0 else "–"
        largest = format_bytes(max(result["result_bytes"] for result in own))
        yield row([name, str(count), f"{100 * share:.1f} %", f"{100 * gain:.2f} %", most, largest])


def draw_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of steps with dropout: one table of all models and numbers of threads."""
    where, rows = report["circumstances"], report["rows"]
    yield f"PyTorch {where['torch']}, {where['cores']} cores, {where['processor']}; code at {where['code']}."
    yield ""
    ways = list(dict.fromkeys(result["way"] for result in rows))
    yield row(["", "threads", "draws, of eager's step", *ways[1:]])
    yield row(["---", *["--:"] * (len(ways) + 1)])
    for key in dict.fromkeys((result["model"], result["threads"]) for result in rows):
        own = {result["way"]: result for result in rows if (result["model"], result["threads"]) == key}
        share = f"{100 * own[ways[0]]['drawn_share']:.1f} %"
        yield row([key[0], str(key[1]), share, *(f"{own[way]['over_eager']:.3f}" for way in ways[1:])])


def transfer_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of what transfers take: a table of links by sizes, one of a computation beside them, and the bars."""
    where = report["circumstances"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["storages of", "out", "back", "of processors, out", "of processors, back"])
    yield row(["--:"] * 5)
    for link in report["links"]:
        speeds = [f"{link[key]:.2f} GB/s" for key in ("out_gb_s", "back_gb_s")]
        busy = [f"{link[key]:.2f} s for a GB" for key in ("processor_out_s_gb", "processor_back_s_gb")]
        yield row([format_bytes(link["size_bytes"]), *speeds, *busy])
    yield ""
    yield row(["moved beside a computation", "its time, of that alone"])
    yield row(["--:"] * 2)
    for beside in report["beside"]:
        yield row([f"{beside['moved_gb_s']:.2f} GB/s", f"{beside['slower']:.3f}"])
    yield ""
    yield from bar_table(report["bars"])


def compiling_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of what compiling takes: a table, and the bars."""
    where = report["circumstances"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["GPT-2", "layers", "parts", "empty caches", "warm caches"])
    yield row(["---", *["--:"] * 4])
    told = {"parts": "its parts, compiled and tried", "whole": "`torch.compile` of all"}
    for one in report["rows"]:
        seconds = [f"{one[key]:.1f} s" for key in ("cold_s", "warm_s")]
        yield row([told[one["way"]], str(one["layers"]), str(one["parts"] or "–"), *seconds])
    yield ""
    yield from bar_table(report["bars"])


def division_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of divisions of compiled parts: one table of all models."""
    where = report["circumstances"]
    yield f"{machine(where)}; code at {where['code']}."
    yield ""
    yield row(["", "price of a byte", "parts", "of a step's time", "saved, of eager's"])
    yield row(["---", *["--:"] * 4])
    for one in report["rows"]:
        share, saved = one["compiled_ms"] / one["step_ms"], one["compiled_bytes"] / max(one["eager_bytes"], 1)
        yield row([one["model"], f"{one['price']:g}", str(one["parts"]), f"{100 * share:.1f} %", f"{saved:.2f}"])


SECTIONS = {
    "bytes-cpu.json": bytes_sections,
    "solvers.json": solver_sections,
    "deep-cpu.json": deep_sections,
    "hf-families.json": family_sections,
    "lengths-cpu.json": lengths_sections,
    "new-sizes-cpu.json": new_size_sections,
    "planning-cpu.json": planning_sections,
    "offload-cpu.json": offload_sections,
    "layouts-cpu.json": model_sections,
    "layouts-milan-cpu.json": model_sections,
    "layouts-intel-cpu.json": model_sections,
    "compiled-budgets-cpu.json": compiled_budget_sections,
    "compiled-parts-cpu.json": model_sections,
    "estimates.json": estimate_sections,
    "chunked-loss-cpu.json": chunked_loss_sections,
    "observing-cpu.json": observing_sections,
    "largest-batches-cpu.json": largest_batch_sections,
    "small-budgets.json": small_budget_sections,
    "implementations-cpu.json": implementation_sections,
    "in-place-cpu.json": in_place_sections,
    "draws-cpu.json": draw_sections,
    "transfers-cpu.json": transfer_sections,
    "compile-seconds-cpu.json": compiling_sections,
    "part-divisions-cpu.json": division_sections,
}
"""What is drawn of each file of results, in the order of the page's marks after the first."""


def reserved_sections(report: dict[str, Any]) -> Iterator[str]:
    """Lines of what allocators reserve over many steps: a table, and the bars."""
    where = report["circumstances"]
    segments = "expandable segments" if where["expandable"] else "segments of fixed sizes"
    yield (
        f"PyTorch {where['torch']}, {where['device']}, {segments}, the most of {where['steps']} steps, code at "
        f"{where['code']}."
    )
    yield ""
    headings = ["", "budget", "predicted", "allocated", "reserved", "reserved by the first", "eager's", "reserved"]
    yield row(headings)
    yield row(["---", *["--:"] * (len(headings) - 1)])
    names = ("budget", "predicted", "allocated", "reserved", "first_reserved", "eager_allocated", "eager_reserved")
    for result in report["rows"]:
        sizes = [format_bytes(result[f"{name}_bytes"]) for name in names]
        yield row([f"{result['model']} at {result['share']:g}", *sizes])
    yield ""
    yield from bar_table(report["bars"])


def page_of(folder: Path) -> str:
    """One page of all results in a folder, such as those of a GPU's first hour."""
    drawn = {
        "bytes": bytes_sections,
        "reserved": reserved_sections,
        "offload": offload_sections,
        "compiled-parts": model_sections,
        "lengths": lengths_sections,
    }
    lines = []
    for name, sections in drawn.items():
        for path in sorted(folder.glob(f"{name}-*.json")):
            lines += [f"## {path.stem}", "", *sections(_read(path)), ""]
    reports = [_read(path) for path in peers.result_files(folder)]
    if reports:
        lines += ["## Beside other ways to train", "", *peers.sections(reports, "images"), ""]
    return "\n".join(lines)


def write_peers() -> None:
    """Write the page of other ways to train, and draw its pictures."""
    from benchmarks.peers import pareto

    page = ROOT / "docs" / "peers.md"
    results = peers.result_files(ROOT / "benchmarks" / "results")
    page.write_text(peers_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for path in results:
        report = _read(path)
        pareto.draw(report, ROOT / "docs" / "images" / peers.picture_name(report))


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="draw all of this folder on one page, and nothing else")
    parser.add_argument("--page", type=Path, help="that page")
    options = parser.parse_args()
    if (options.results is None) != (options.page is None):
        parser.error("--results and --page go together")
    if options.page is None:
        write_pages()
    else:
        options.page.write_text(page_of(options.results), encoding="utf-8")


def write_pages() -> None:
    """Write those of the documentation."""
    zoo, index = ROOT / "docs" / "schedule_zoo.md", ROOT / "rockmate" / "zoo" / "plans" / "index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    zoo.write_text(zoo_page(zoo.read_text(encoding="utf-8"), content), encoding="utf-8")
    write_peers()
    for name, (results_name, _) in SHORT.items():
        short, report = ROOT / "docs" / name, _read(ROOT / "benchmarks" / "results" / results_name)
        short.write_text(with_short_table(name, short.read_text(encoding="utf-8"), report), encoding="utf-8")
    page = ROOT / "docs" / "benchmarks.md"
    results = list((ROOT / "benchmarks" / "results").glob("step-*.json"))
    stored = [ROOT / "benchmarks" / "results" / name for name in SECTIONS]
    page.write_text(with_tables(page.read_text(encoding="utf-8"), results, *stored), encoding="utf-8")


if __name__ == "__main__":
    main()
