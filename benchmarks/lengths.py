"""Batches that are padded to their own longest row: whole runs, and what a new length takes.

    python benchmarks/lengths.py                          # GPT-2 and BERT, about half an hour; into results/
    python benchmarks/lengths.py --quick --output folder  # tiny models: shows that it runs, measures nothing

Three ways take turns batch by batch: the model itself, each of its blocks under `torch.utils.checkpoint`, and the
planned model under half of what the model itself takes for the longest batch. All train on the same batches from the
same weights, and gradients are compared bit by bit. Planning is part of the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from torch import nn

from benchmarks.reporting import (
    bar,
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_bars,
    write_report,
)
from rkgb.devices.registry import device_of
from rockmate import PeakMemory, Rockmate, keep_freed_memory

LONGEST, SHORTEST = 512, 32
WIDTH, LAYERS, WORDS, ROWS = 256, 12, 8000, 4
TURNS = 5  # in which a first step is measured
FEW_WORDS = 50  # that batches are made of, which tiny models have, too
EAGER, CHECKPOINT, PLANNED = "eager", "checkpoint", "rockmate"


@dataclass
class Run:
    """One model, trained in three ways."""

    model: str
    budget_bytes: int
    lengths: list[int]
    step_s: dict[str, list[float]] = field(default_factory=dict)  # by way: of each batch, planning included
    peak_bytes: dict[str, int] = field(default_factory=dict)  # by way: the most of any length
    planned: list[int] = field(default_factory=list)  # batches whose calls were traced, or their steps measured
    new_length_ms: list[float] = field(default_factory=list)  # beyond a step, of lengths that are new to a family
    new_length_share: list[float] = field(default_factory=list)  # the same, of an eager step of that length
    exact: bool = True
    code: str = ""  # its version


def built(name: str, quick: bool) -> nn.Module:
    """A language model of transformers with random weights; `quick`, a tiny one."""
    width, layers, words = (32, 2, FEW_WORDS) if quick else (WIDTH, LAYERS, WORDS)
    torch.manual_seed(0)
    if name == "hf-gpt2":
        gpt2 = transformers.GPT2Config(vocab_size=words, n_positions=LONGEST, n_embd=width, n_layer=layers, n_head=4)
        return transformers.GPT2LMHeadModel(gpt2).train()
    bert = transformers.BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LONGEST,
    )
    return transformers.BertForMaskedLM(bert).train()


def batch_of(length: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows of random words, the first as long as the batch, the others padded."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, FEW_WORDS, (ROWS, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (ROWS, 1), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    labels = words.masked_fill(mask == 0, -100)
    made = {"input_ids": words * mask, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in made.items()}


def step_s(model: nn.Module, batch: dict[str, torch.Tensor], seed: int) -> float:
    """What forward and backward take, with fresh gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    return device_of(batch["labels"].device).time_ms(lambda: model(**batch).loss.backward()) / 1e3


def peak_of(model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 0) -> int:
    """Most bytes that a step holds above what was there before it."""
    model.zero_grad()
    torch.manual_seed(seed)
    with PeakMemory(batch["labels"].device) as peak:
        model(**batch).loss.backward()
    return peak.peak_bytes


def is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all gradients are, bit by bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.grad is b.grad or torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def trained(name: str, options: argparse.Namespace) -> Run:
    """Train on batches of lengths drawn at random, the ways taking turns."""
    shortest, longest = (8, 48) if options.quick else (SHORTEST, LONGEST)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (options.batches,), generator=generator).tolist()
    device = torch.device(options.device)
    eager = built(name, options.quick).to(device)
    checkpointed = copy.deepcopy(eager)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    budget_bytes = peak_of(eager, batch_of(longest, 0, device)) // 2
    planned = Rockmate(copy.deepcopy(eager), budget=budget_bytes, loss=lambda output: output.loss)
    ways: dict[str, nn.Module] = {EAGER: eager, CHECKPOINT: checkpointed, PLANNED: planned}
    run = Run(name, budget_bytes, lengths, {way: [] for way in ways}, code=code_version())
    for number, length in enumerate(lengths):
        batch, plans = batch_of(length, number, device), measured_plans(planned)
        for turn in range(len(ways)):
            way = list(ways)[(number + turn) % len(ways)]
            run.step_s[way].append(step_s(ways[way], batch, number))
        if measured_plans(planned) > plans:
            run.planned.append(number)
        run.exact = run.exact and is_same(eager, planned)
        console.print(
            f"{number:4} length {length:4} " + "  ".join(f"{way} {run.step_s[way][-1] * 1e3:.0f} ms" for way in ways)
        )
    for way, model in ways.items():
        measured = sorted(set(lengths)) if way == PLANNED else [max(lengths)]  # whose steps grow with the length
        run.peak_bytes[way] = max(peak_of(model, batch_of(length, 0, device)) for length in measured)
    measure_new_lengths(run, planned, eager, (shortest, longest), device)
    return run


def measured_plans(planned: Rockmate) -> int:
    """How many plans there are whose step was measured."""
    return sum(plan.measured_peak_bytes is not None for plan in planned.plans)


def measure_new_lengths(
    run: Run, planned: Rockmate, eager: nn.Module, ends: tuple[int, int], device: torch.device
) -> None:
    """What the first step of a length takes beyond the next one, in turns, with the length forgotten in between."""
    unseen = [length for length in range(*ends) if length not in run.lengths]
    for length in unseen[:: max(1, len(unseen) // 24)]:
        batch = batch_of(length, 0, device)
        beyond_s, eager_s = beyond_first_s(planned, eager, batch)
        run.new_length_ms.append(beyond_s * 1e3)
        run.new_length_share.append(beyond_s / eager_s)


def beyond_first_s(planned: Rockmate, eager: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """What the first step of a size takes beyond the next, which it takes turns with, and what an eager step takes."""
    beyond_s: list[float] = []
    eager_s: list[float] = []
    for _ in range(TURNS):
        planned._family._by_size._made.clear()
        first_s = step_s(planned, batch, 0)
        beyond_s.append(first_s - step_s(planned, batch, 0))
        eager_s.append(step_s(eager, batch, 0))
    return statistics.median(beyond_s), statistics.median(eager_s)


def bars_of(run: Run) -> list[dict[str, Any]]:
    """What is promised."""
    totals = {way: sum(times) for way, times in run.step_s.items()}
    pairs = zip(run.new_length_ms, run.new_length_share, strict=True)
    above = [ms > 20 and share > 0.05 for ms, share in pairs]
    peak = run.peak_bytes[PLANNED] / run.budget_bytes
    return [
        bar(f"{run.model}: whole run, planning included, of eager's", totals[PLANNED] / totals[EAGER], 1.15),
        bar(f"{run.model}: the same of checkpoints'", totals[PLANNED] / totals[CHECKPOINT], 1.0),
        bar(f"{run.model}: measured peak of any length, of the budget", peak, 1.0),
        bar(f"{run.model}: new lengths above 20 ms and 5 % of an eager step, of all", statistics.mean(above), 0.5),
        bar(f"{run.model}: steps that are not exact", 0.0 if run.exact else 1.0, 0.0),
    ]


def main() -> None:
    """Run the script."""
    parser = option_parser(__doc__, "tiny models")
    parser.add_argument("--models", nargs="+", choices=("hf-gpt2", "hf-bert"), default=["hf-gpt2", "hf-bert"])
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--batches", type=int, default=300, help="default 300")
    parser.add_argument("--add", action="store_true", help="to the result file: runs of other models stay in it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    path = options.output / f"lengths-{torch.device(options.device).type}.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["runs"] if options.add and path.exists() else []
    runs = [Run(**run) for run in stored if run["model"] not in options.models]
    runs += [trained(name, options) for name in options.models]
    bars = [one for run in runs for one in bars_of(run)]
    table = new_table("Lengths drawn at random")
    for heading in ("batches", "traced or measured", EAGER, CHECKPOINT, PLANNED, "a new length", "budget", "peak"):
        table.add_column(heading, justify="right")
    for run in runs:
        totals = [f"{sum(run.step_s[way]):.1f} s" for way in (EAGER, CHECKPOINT, PLANNED)]
        new = f"{statistics.median(run.new_length_ms):.0f} ms, {statistics.median(run.new_length_share):.1%}"
        sizes = [f"{size / 2**20:.1f} MiB" for size in (run.budget_bytes, run.peak_bytes[PLANNED])]
        table.add_row(run.model, str(len(run.lengths)), str(len(run.planned)), *totals, new, *sizes)
    console.print(table)
    print_bars(bars)
    content = {
        "circumstances": {"code": code_version(), **circumstances(options)},
        "bars": bars,
        "runs": [asdict(run) for run in runs],
    }
    write_report(options.output, path.name, content)


if __name__ == "__main__":
    main()
