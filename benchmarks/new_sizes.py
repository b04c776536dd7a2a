"""What calls of new sizes take, and how good their plans are, for five kinds of model.

    python benchmarks/new_sizes.py                          # some ten minutes; writes results/new-sizes-cpu.json
    python benchmarks/new_sizes.py --quick --output folder  # tiny models: shows that it runs, measures nothing

Each model is trained on a few sizes under half of what the largest takes, until no better plan is looked for in the
background. Then each new size takes its first step, five times over with the size forgotten in between: what that takes
beyond the step after it, by the clock and of an eager step, which takes turns with it. Gradients are compared bit by
bit, and the memory of each first step is measured. For some sizes a plan of their own is looked for as long as for a
first plan without a background; what a step takes by the plan in use is compared with that, as predicted.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from torch import nn

from benchmarks.lengths import beyond_first_s, is_same, peak_of, step_s
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
from rk_solvers import Limits
from rockmate import Rockmate, keep_freed_memory
from rockmate.planning.graph_solver import solver_for
from rockmate.planning.request import PlanRequest

Size = tuple[int, ...]

WORDS, ROWS = 1000, 4
SETTLED_S = 180.0  # no search goes on for longer: then it is told
DEDICATED_S = 20.0  # for a plan of one size alone


@dataclass(frozen=True)
class Case:
    """A model, the sizes that it begins with, and others."""

    make: Callable[[int, int], nn.Module]  # of width and layers
    layers: int
    batch: Callable[[Size], dict[str, torch.Tensor]]
    first: tuple[Size, ...]
    new: tuple[Size, ...]


@dataclass
class Row:
    """What was measured of one model."""

    model: str
    budget_bytes: int
    traced: int  # calls whose module was traced
    sizes: list[Size]
    beyond_ms: list[float] = field(default_factory=list)  # what the first step of a size takes beyond the next
    eager_ms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # of first steps
    against_dedicated: list[float] = field(default_factory=list)  # predicted: the plan in use, of one of its own
    exact: bool = True
    settled: bool = True  # the background search had ended


def words(size: Size) -> dict[str, torch.Tensor]:
    """Rows of words, to be predicted."""
    given = torch.randint(1, WORDS, (ROWS, size[0]))
    return {"input_ids": given, "labels": given}


def padded(size: Size) -> dict[str, torch.Tensor]:
    """The same with padding: the first row is the longest."""
    lengths = torch.randint(size[0] // 2, size[0] + 1, (ROWS, 1))
    lengths[0] = size[0]
    mask = (torch.arange(size[0]) < lengths).long()
    given = words(size)["input_ids"] * mask
    return {"input_ids": given, "attention_mask": mask, "labels": given.masked_fill(mask == 0, -100)}


def translation(size: Size) -> dict[str, torch.Tensor]:
    """Rows of words of one length for rows of another."""
    return {"input_ids": torch.randint(1, WORDS, (ROWS, size[0])), "labels": torch.randint(1, WORDS, (ROWS, size[1]))}


def images(size: Size) -> dict[str, Any]:
    """Images of that height and width."""
    pixels = torch.randn(ROWS, 3, *size)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (ROWS,)), "interpolate_pos_encoding": True}


def gpt2(width: int, layers: int) -> nn.Module:
    """A GPT-2."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=512, n_embd=width, n_layer=layers, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def llama(width: int, layers: int) -> nn.Module:
    """A Llama whose heads share keys and values."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, **heads
    )
    return transformers.LlamaForCausalLM(config)


def bert(width: int, layers: int) -> nn.Module:
    """A BERT."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    return transformers.BertForMaskedLM(config)


def t5(width: int, layers: int) -> nn.Module:
    """A T5."""
    sizes: dict[str, Any] = {
        "d_model": width,
        "d_kv": width // 4,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_heads": 4,
    }
    sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=WORDS, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def vit(width: int, layers: int) -> nn.Module:
    """A ViT, whose positions are interpolated."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    images_of: dict[str, Any] = {"image_size": 64, "patch_size": 8, "num_labels": 2}
    config = transformers.ViTConfig(**sizes, **images_of, num_attention_heads=4)
    return transformers.ViTForImageClassification(config)


LENGTHS = tuple((length,) for length in (37, 64, 101, 128, 150, 177, 200, 231, 244, 250))
PAIRS = ((41, 27), (64, 60), (77, 30), (96, 48), (100, 81), (120, 40), (90, 90), (126, 64))
RESOLUTIONS = ((72, 72), (80, 104), (104, 88), (112, 112), (120, 80), (88, 120), (64, 120), (120, 112))
CASES = {
    "gpt2": Case(gpt2, 12, words, ((256,), (160,)), LENGTHS),
    "llama": Case(llama, 8, words, ((256,), (160,)), LENGTHS),
    "bert": Case(bert, 12, padded, ((256,), (160,)), LENGTHS),
    "t5": Case(t5, 4, translation, ((128, 96), (97, 71), (110, 50), (65, 83), (80, 64), (70, 90)), PAIRS),
    "vit": Case(vit, 8, images, ((128, 128), (96, 96), (80, 112), (112, 80), (96, 80)), RESOLUTIONS),
}


def measured(name: str, quick: bool) -> Row:
    """Train, and see what new sizes take."""
    case = CASES[name]
    torch.manual_seed(0)
    eager = case.make(32 if quick else 128, 2 if quick else case.layers).train()
    new = case.new[:2] if quick else case.new
    budget_bytes = peak_of(eager, case.batch(case.first[0])) // 2
    planned = Rockmate(copy.deepcopy(eager), budget=budget_bytes, loss=lambda output: output.loss)
    for size in case.first:
        step_s(planned, case.batch(size), 0)
    row = Row(name, budget_bytes, 0, list(new))
    row.settled = settle(planned, case, 5.0 if quick else SETTLED_S)
    for size in new:
        measure_size(row, planned, eager, case.batch(size))
    row.traced = len(planned._family.members)
    for size in new[:: 1 if quick else 3]:
        row.against_dedicated.append(against_dedicated(planned, case.batch(size), 0.5 if quick else DEDICATED_S))
    return row


def settle(planned: Rockmate, case: Case, seconds: float) -> bool:
    """Train on all sizes until no better plan is looked for, nor taken; whether that came about in time."""
    started = time.perf_counter()
    is_settled = False
    while time.perf_counter() - started < seconds:
        for size in (*case.first, *case.new):
            step_s(planned, case.batch(size), 0)
        if not planned._family._by_size.improvements.is_busy:
            if is_settled:
                return True
            is_settled = True  # what was found last may make more to be looked for
        else:
            is_settled = False
            time.sleep(1.0)
    return False


def measure_size(row: Row, planned: Rockmate, eager: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Add what a size takes that was forgotten."""
    planned._family._by_size._made.clear()
    row.peak_bytes.append(peak_of(planned, batch))
    peak_of(eager, batch)
    row.exact = row.exact and is_same(eager, planned)
    beyond_s, eager_s = beyond_first_s(planned, eager, batch)
    row.beyond_ms.append(beyond_s * 1e3)
    row.eager_ms.append(eager_s * 1e3)


def against_dedicated(planned: Rockmate, batch: dict[str, torch.Tensor], seconds: float) -> float:
    """What a step takes by the plan in use, of what it takes by one that is looked for at this size alone."""
    step_s(planned, batch, 0)
    member = list(planned._family._by_size)[-1]  # the one used last
    request = PlanRequest(member.plan.budget_bytes, limits=Limits().within(seconds), in_background=False)
    found = solver_for(request, member.measured).solve(member.measured.problem, member.plan.budget_bytes)
    return member.plan.time_ms / found.time_ms


def bars_of(row: Row) -> list[dict[str, Any]]:
    """What is promised."""
    pairs = zip(row.beyond_ms, row.eager_ms, strict=True)
    beyond = statistics.median(ms / max(20.0, 0.05 * eager_ms) for ms, eager_ms in pairs)
    peak = max(row.peak_bytes) / row.budget_bytes
    return [
        bar(f"{row.model}: a new size, of 20 ms or 5 % of an eager step, whichever is more", beyond, 1.0),
        bar(f"{row.model}: measured peak of first steps, of the budget", peak, 1.0),
        bar(f"{row.model}: sizes that are not exact", 0.0 if row.exact else 1.0, 0.0),
        bar(f"{row.model}: a plan in use against one of its own", max(row.against_dedicated), 1.03),
    ]


def main() -> None:
    """Run the script."""
    parser = option_parser(__doc__, "tiny models")
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = [measured(name, options.quick) for name in options.models]
    table = new_table("Calls of new sizes")
    for heading in ("sizes", "traced", "eager step", "a new size", "peak of the budget", "against a plan of its own"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [str(len(row.sizes)), str(row.traced)]
        times = [f"{statistics.median(row.eager_ms):.0f} ms", f"{statistics.median(row.beyond_ms):.1f} ms"]
        peak = f"{max(row.peak_bytes) / row.budget_bytes:.3f}"
        table.add_row(row.model, *numbers, *times, peak, f"{max(row.against_dedicated):.3f}")
    console.print(table)
    bars = [one for row in rows for one in bars_of(row)]
    print_bars(bars)
    content = {
        "circumstances": {"code": code_version(), **circumstances(options)},
        "bars": bars,
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, "new-sizes-cpu.json", content)


if __name__ == "__main__":
    main()
