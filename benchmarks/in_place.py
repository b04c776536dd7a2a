"""Whether operations that write into their input would pay: in place of a new tensor, where nothing else needs it.

    python benchmarks/in_place.py                          # seven models, five minutes; writes into results/
    python benchmarks/in_place.py --models vit --device cuda
    python benchmarks/in_place.py --quick --output folder  # tiny models, whose times mean nothing

An operation of the forward may write into its input where it has a form that does, the result is as large, nothing
reads that input later, no backward needs it, and nothing else lies in its storage. Each class of such operations runs
in both forms, by turns, on numbers of its own. What a step would gain is told as a share of its time; the memory that
would be taken less while such an operation runs is that of its result. What models do in place already is no part of
this. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.operations import Argument, measured_classes
from benchmarks.peers.models import case_named
from benchmarks.reporting import console, new_table
from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, Ref, is_ref
from rkgb.ir.dgraph import DNode, last_uses
from rkgb.ir.kgraph import KGraph
from rkgb.ir.values import ValueInfo
from rkgb.tree import map_leaves
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest

RESULTS = "in-place-{}.json"
MODELS = ("gpt2", "hf-llama", "hf-bert", "vit", "resnet50", "mobilenet-v2", "unet")
QUICK = ("hf-bert", "resnet50")
SECONDS, TURNS = 0.3, 30  # of turns of a class, and turns at least
COMMUTATIVE = ("add", "mul")  # their second argument may be written into as well


@dataclass(frozen=True)
class Candidate:
    """A class of operations, with what stands for their tensors: the first of these may be written into."""

    name: str
    plain: Any
    in_place: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result_bytes: int


def candidates(graph: KGraph) -> Iterator[Candidate]:
    """Of every operation of the forward that may write into an input."""
    dataflow = graph.sgraph.dgraph
    values = dataflow.values
    sharing = Counter(dataflow.owner(name) for name in values)
    saved = {tensor.source for profile in graph.op_profiles.values() for tensor in profile.saved}
    lasting = {*dataflow.leaves, *dataflow.output_names}
    for node, dropped in zip(dataflow.nodes, last_uses(dataflow.nodes, dataflow.output_names), strict=True):
        in_place = _in_place_form(node.call.function)
        if in_place is None or len(node.output_names) != 1 or node.output_names[0] not in values:
            continue
        made = values[node.output_names[0]]
        for args in _orders(node):
            name = args[0].name
            given = values[name]
            is_free = name in dropped and name not in lasting and given.owner == name and sharing[name] == 1
            is_alike = (given.shape, given.stride, given.dtype) == (made.shape, made.stride, made.dtype)
            if is_free and is_alike and name not in saved and made.owner == node.output_names[0]:
                yield _candidate(Call(node.call.function, args, node.call.kwargs), in_place, values, made.storage_bytes)
                break


def _orders(node: DNode) -> Iterator[tuple[Any, ...]]:
    """The arguments, first as they are, then with the first two exchanged where that changes nothing."""
    args = node.call.args
    if args and is_ref(args[0]):
        yield args
    if node.call.op_name in COMMUTATIVE and len(args) == 2 and is_ref(args[1]) and not node.call.kwargs:
        yield args[::-1]


def _in_place_form(function: Any) -> Any:
    """Of an operation that makes a new tensor; None where it has none, or is in place itself."""
    schema = getattr(function, "_schema", None)
    if schema is None or any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns)):
        return None
    packet = getattr(torch.ops.aten, f"{schema.name.split('::')[-1]}_", None)
    found = None if packet is None else getattr(packet, schema.overload_name or "default", None)
    names = [argument.name for argument in schema.arguments]
    return found if found is not None and [one.name for one in found._schema.arguments] == names else None


def _candidate(call: Call, in_place: Any, values: dict[str, ValueInfo], result_bytes: int) -> Candidate:
    def argument(ref: Ref) -> Argument:
        value = values[ref.name]
        return Argument(value.shape, value.stride, value.dtype, has_gradient=False)

    args, kwargs = map_leaves(argument, (call.args, call.kwargs), is_ref)
    args = tuple(tuple(one) if isinstance(one, list) else one for one in args)
    sizes = "×".join(map(str, args[0].sizes))
    return Candidate(f"{call.op_name} {sizes}", call.function, in_place, args, tuple(kwargs.items()), result_bytes)


@dataclass(frozen=True)
class Found:
    """Times of a class of operations: the least of each form."""

    ms: float
    in_place_ms: float


def tried(one: Candidate, device: torch.device, seconds: float) -> Found:
    """Both forms by turns. The new tensor is let go before the next is made, as in a step that keeps nothing."""

    def given(value: Any) -> Any:
        return value.made(device) if isinstance(value, Argument) else value

    torch.manual_seed(0)
    args, kwargs = [given(value) for value in one.args], {name: given(value) for name, value in one.kwargs}
    forms: tuple[Callable[..., Any], ...] = (one.plain, one.in_place)
    spent: list[list[float]] = [[], []]
    started = time.perf_counter()
    with torch.no_grad():
        while len(spent[0]) < TURNS or time.perf_counter() < started + seconds:
            for form, times_ms in zip(forms, spent, strict=True):
                args[0].fill_(1.0)  # what was made last is read soon, and numbers stay finite
                device_of(device).synchronize()
                begun = time.perf_counter()
                form(*args, **kwargs)
                device_of(device).synchronize()
                times_ms.append(1e3 * (time.perf_counter() - begun))
    return Found(min(spent[0]), min(spent[1]))


def rows_of(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All classes of operations of a model's step that may write into an input."""
    device = torch.device(options.device)
    case = case_named(name, device, options.quick)
    measured = measure(case.fresh_model(), case.sample, PlanRequest(1.0, case.loss))
    step_ms = measured.problem.keep_all_time_ms
    counts = Counter(candidates(measured.graphs.K_graph))
    rows = []
    for one, count in sorted(counts.items(), key=lambda item: item[0].name):
        found = tried(one, device, 0.02 if options.quick else SECONDS)
        rows.append(
            {
                "model": name,
                "operation": one.name,
                "count": count,
                "result_bytes": one.result_bytes,
                "share": count * found.ms / step_ms,  # of the step's time
                "gain": count * max(0.0, found.ms - found.in_place_ms) / step_ms,
                **asdict(found),
            }
        )
    total, most = (sum(row[key] for row in rows) for key in ("gain", "share"))
    console.print(f"{name}: {counts.total()} operations in {len(rows)} classes, {most:.1%} of a step; gain {total:.2%}")
    return rows or [{"model": name, "operation": "", "count": 0, **NOTHING}]


NOTHING = {"result_bytes": 0, "share": 0.0, "gain": 0.0, "ms": 0.0, "in_place_ms": 0.0}  # no such operation


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """A line for each class of operations."""
    made = new_table("Operations that may write into their input")
    for column in ("model", "operation", "operations", "of a step", "gain"):
        made.add_column(column)
    for row in rows:
        made.add_row(row["model"], row["operation"], str(row["count"]), f"{row['share']:.2%}", f"{row['gain']:.2%}")
    return made


def main() -> None:
    """Try all classes of all models, and write what was found after each model."""
    measured_classes(__doc__, MODELS, QUICK, RESULTS, rows_of, table)


if __name__ == "__main__":
    main()
