"""`rockmate explain`: why each tensor of a plan is kept or recomputed."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import click

from rockmate import plan_files
from rockmate.cli.app import examples
from rockmate.cli.options import json_option, plan_argument
from rockmate.cli.output import GOOD, counted, pairs, table, tell, tell_json
from rockmate.cli.targets import TargetError
from rockmate.reports.explain import explain
from rockmate.reports.explanation import Decision, Entry, Explanation, PeakFacts
from rockmate.units import format_bytes, format_ms

_LARGEST = 8  # tensors of the peak that are listed


@click.command(
    "explain",
    epilog=examples(
        "rockmate explain plan.json",
        "rockmate explain plan.json --top 3",
        "rockmate explain plan.json --op linear_3",
        "rockmate explain plan.json --json",
    ),
)
@plan_argument
@click.option("--op", "name", metavar="NAME", help="Only what this tensor, operation or submodule makes, in detail.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="How many tensors: those with most bytes for the longest time.",
)
@json_option
def command(plan: str, name: str | None, top: int, as_json: bool) -> int:
    """Tell why each tensor of PLAN, a plan file, is kept or recomputed.

    For each: its size, how long it would lie between its last use in the forward and its first in the backward, what
    recomputing it costs, and the peak with that one decision the other way. Then where the peak is, what is alive
    there, and the operation that no budget can be below. Needs no model.
    """
    found = explain(plan_files.load(plan))
    chosen = found.heaviest(top) if name is None else found.of_operation(name)
    if not chosen:
        known = sorted({entry.producer for entry in found.entries})
        alike = [one for one in known if name is not None and name.lower() in one.lower()] or known
        raise TargetError(f"the plan has no tensor, operation or submodule {name!r}; there are {_some(alike)}")
    if as_json:
        tell_json("explain", _content(found, found.entries if name is None else chosen))
    elif name is None:
        tell(_overview(found, chosen))
    else:
        tell("\n\n".join(map(_detail, chosen)))
    return GOOD


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


# ---- text ------------------------------------------------------------------------------------------------


def _overview(found: Explanation, chosen: tuple[Entry, ...]) -> str:
    rows = [
        (
            entry.name,
            entry.decision if entry.recomputed < 2 else f"{entry.decision} {entry.recomputed}×",
            format_bytes(entry.size_bytes),
            "–" if entry.idle_ms is None else format_ms(entry.idle_ms),
            format_ms(entry.cost_ms),
            f"{entry.cost_ms_per_mib:.3g}" if entry.size_bytes else "–",
            "–" if entry.flip is None else format_bytes(entry.flip.peak_bytes),
            entry.source,
        )
        for entry in chosen
    ]
    headings = ("tensor", "decision", "size", "would lie", "costs", "ms per MiB", "peak if not", "source")
    counts = Counter(entry.decision for entry in found.entries)
    sizes = Counter[str]()
    for entry in found.entries:
        sizes[entry.decision] += entry.size_bytes
    summary = [
        (decision, f"{counted(counts[decision], 'tensor')}, {format_bytes(sizes[decision])}")
        for decision in get_args(Decision)
        if counts[decision]
    ]
    more = len(found.entries) - len(chosen)
    rest = f"\n… and {more} more, lighter ones (--top)" if more else ""
    return "\n\n".join([pairs(summary), table(headings, rows, left=2) + rest, _peak_text(found)])


def _peak_text(found: Explanation) -> str:
    peak = found.peak
    lines = [
        f"The peak, {format_bytes(peak.peak_bytes)} of a budget of {format_bytes(found.budget_bytes)}, is at "
        f"{peak.op}{_at(peak.source)}, {format_ms(peak.at_ms)} into the step.",
        pairs(_parts(peak)),
        f"No plan takes less than {format_bytes(found.binding_bytes)}: {found.binding_op} needs that by itself.",
    ]
    return "\n".join(lines)


def _parts(peak: PeakFacts) -> list[tuple[str, str]]:
    shown = peak.alive[:_LARGEST]
    rows = [(f"  {one.name}", f"{format_bytes(one.size_bytes)}, {one.decision}") for one in shown]
    rest = peak.alive[_LARGEST:]
    if rest:
        rows.append((f"  {len(rest)} more tensors", format_bytes(sum(one.size_bytes for one in rest))))
    rows += [
        (name, format_bytes(size_bytes))
        for name, size_bytes in (
            ("  gradients", peak.gradient_bytes),
            ("  the operation itself", peak.working_bytes),
            ("  random states and others", peak.other_bytes),
        )
        if size_bytes
    ]
    return rows


def _at(source: str) -> str:
    return f" ({source})" if source else ""


def _detail(entry: Entry) -> str:
    rows = [
        ("size", f"{format_bytes(entry.size_bytes)} {entry.text}".rstrip()),
        ("made by", f"{entry.function} in {entry.module or 'the model'}{_at(entry.source)}"),
        ("decision", entry.decision + (f", {entry.recomputed} times" if entry.recomputed > 1 else "")),
        ("alive", ", ".join(f"steps {stay.first} to {stay.last}" for stay in entry.lifetimes)),
        ("used by", ", ".join((*entry.forward_users, *entry.backward_users)) or "nothing"),
        ("costs", f"{format_ms(entry.cost_ms)} to recompute"),
    ]
    if entry.idle_ms is not None:
        rows.append(("would lie", f"{format_ms(entry.idle_ms)} between forward and backward"))
    if entry.flip is not None:
        other = "kept" if entry.decision in ("recomputed", "moved") else "recomputed"
        rows.append(
            (
                f"if {other}",
                f"peak {format_bytes(entry.flip.peak_bytes)} at {entry.flip.peak_op}, "
                f"step {format_ms(entry.flip.time_ms)} ({entry.flip.extra_ms:+.3g} ms)",
            )
        )
    return f"{entry.name}\n{pairs([(f'  {name}', value) for name, value in rows])}\n  {entry.why}"


def _content(found: Explanation, entries: tuple[Entry, ...]) -> dict[str, object]:
    return {
        "budget_bytes": found.budget_bytes,
        "time_ms": found.time_ms,
        "peak": found.peak,
        "binding_op": found.binding_op,
        "binding_bytes": found.binding_bytes,
        "tensors": entries,
    }
