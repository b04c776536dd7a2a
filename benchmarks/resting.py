"""Training whose weights and optimizer state rest in a file, beside eager's: resident bytes and time.

    python benchmarks/resting.py                                # a GPT-2 with adapters, and with AdamW of all; minutes
    python benchmarks/resting.py --tasks lora --batch 8
    python benchmarks/resting.py --quick --output folder        # a tiny model

`lora`: low-rank adapters train beside a frozen base, whose weights rest. `adamw`: all trains; weights and state rest,
and each parameter steps in the backward, so that its gradient goes at once. `state`: the same, but weights stay.
Resident is what is there beside the step's own tensors: parameters, gradients, state and buffers, of what rests the
most that was here at a time, and the staging of the file. Both take turns, step by step; ratios are of medians; all
parameters are compared to the bit at the end. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn

from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rockmate import Rockmate
from rockmate.offload.file_tier import FileTier
from rockmate.offload.speed import measured_links
from rockmate.resting.optimizer import OffloadedOptimizer
from rockmate.resting.tensors import RestingTensors
from rockmate.units import format_bytes
from rockmate.zoo.language.gpt2 import GPT2, GPT2Config, next_token_loss

TASKS = ("lora", "adamw", "state")
CPU = torch.device("cpu")


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output with the adapter's."""
        output: Tensor = self.base(hidden)
        return output + hidden @ self.down.t() @ self.up.t()


@dataclass(frozen=True)
class Row:
    """One way to train."""

    task: str
    way: str
    resident_bytes: int
    stored_bytes: int
    read_bytes: int  # in a step, as what follows
    sent_bytes: int
    median_ms: float
    over_eager: float
    less_resident: float  # so many times


def adapted(model: GPT2) -> GPT2:
    """With adapters beside all projections that make queries, keys and values; nothing else trains."""
    model.requires_grad_(False)
    for block in model.modules():
        for name, child in list(block.named_children()):
            if name == "qkv" and isinstance(child, nn.Linear):
                setattr(block, name, Adapted(child))
    return model


def training_step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    """A step of training."""
    optimizer.zero_grad()
    next_token_loss(module(tokens), targets).backward()
    optimizer.step()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of all storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def eager_resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters, gradients, state and buffers, once a step is over."""
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return bytes_of([*model.parameters(), *model.buffers(), *gradients, *state])


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, owners: list[RestingTensors]) -> int:
    """The same where some rests: what does not, and the most that was here of what does."""
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    every = [*model.parameters(), *model.buffers(), *gradients, *state]
    stays = [tensor for tensor in every if not any(tensor in owner for owner in owners)]
    in_flight = 0
    if isinstance(optimizer, OffloadedOptimizer) and optimizer.in_backward:
        in_flight = max(parameter.nbytes for parameter in model.parameters())  # the gradient that steps
    here = sum(owner.most_held_bytes for owner in owners)
    return bytes_of(stays) + in_flight + here + owners[0].tier.staging_bytes  # they share it


def at_rest(
    task: str, model: nn.Module, tier: FileTier, window: float
) -> tuple[torch.optim.Optimizer, list[RestingTensors]]:
    """The optimizer of `model`, and what rests from now on."""
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    owners: list[RestingTensors] = []
    if task != "lora":
        optimizer = OffloadedOptimizer(optimizer, tier, in_backward=True)
        owners.append(optimizer.resting)
    if task != "state":
        weights = RestingTensors(tier, int(window * bytes_of(model.parameters())))
        weights.take(p for p in model.parameters() if task == "adamw" or not p.requires_grad)
        owners.append(weights)
    return optimizer, owners


def rows_of(task: str, config: GPT2Config, options: argparse.Namespace) -> list[Row]:
    """Eager and resting by turns."""
    torch.manual_seed(0)
    eager = GPT2(config)
    if task == "lora":
        adapted(eager)
    model = copy.deepcopy(eager)
    tokens = torch.randint(config.vocabulary, (options.batch, config.context))
    targets = torch.randint(config.vocabulary, (options.batch, config.context))
    planned = Rockmate(
        model,
        tokens,
        1.0,
        loss=lambda logits: next_token_loss(logits, targets),
        time_limit=2,
        cache=False,
        plan_in_background=False,
    )
    plain = torch.optim.AdamW([parameter for parameter in eager.parameters() if parameter.requires_grad])
    tier = FileTier(options.folder)
    optimizer, owners = at_rest(task, model, tier, options.window)
    repeats = 2 if options.quick else options.repeats
    ways = {"eager": (eager, plain), "resting": (planned, optimizer)}
    for module, one in ways.values():
        torch.manual_seed(repeats)
        training_step(module, one, tokens, targets)
    moved = [(owner.read_bytes, owner.sent_bytes) for owner in owners]
    for owner in owners:
        owner.most_held_bytes = owner.held_bytes
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(repeats):
        for way, (module, one) in ways.items():
            torch.manual_seed(step)
            started = time.perf_counter()
            training_step(module, one, tokens, targets)
            times[way].append((time.perf_counter() - started) * 1e3)
    read = sum(owner.read_bytes - before for owner, (before, _) in zip(owners, moved, strict=True)) // repeats
    sent = sum(owner.sent_bytes - before for owner, (_, before) in zip(owners, moved, strict=True)) // repeats
    all_bytes, here_bytes = eager_resident_bytes(eager, plain), resident_bytes(model, optimizer, owners)
    assert all(map(torch.equal, eager.parameters(), model.parameters())), "parameters differ"
    medians = {way: statistics.median(found) for way, found in times.items()}
    tier.close()
    return [
        Row(task, "eager", all_bytes, 0, 0, 0, medians["eager"], 1.0, 1.0),
        Row(
            task,
            "resting",
            here_bytes,
            tier.most_held_bytes,
            read,
            sent,
            medians["resting"],
            medians["resting"] / medians["eager"],
            all_bytes / here_bytes,
        ),
    ]


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="a tiny model, few steps")
    parser.set_defaults(threads=1)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=float, default=0.18, help="of the parameters' bytes (default 0.18)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    tier = FileTier(options.folder)
    links = measured_links(tier, CPU)
    tier.close()
    speeds = f"out {links.out.bytes_per_ms / 1e6:.2f} GB/s, back {links.back.bytes_per_ms / 1e6:.2f} GB/s"
    config = GPT2Config(
        options.layers, options.width, options.width // 64, options.context, options.vocabulary, dropout=0.1
    )
    if options.quick:
        config, options.batch = GPT2Config(2, 128, 2, 16, 512), 2
    rows: list[Row] = []
    for task in options.tasks:
        rows += rows_of(task, config, options)
    table = new_table(f"GPT-2, {config.layers} layers, width {config.width}, batch {options.batch}; {speeds}")
    for heading in ("resident", "less", "stored", "read", "sent", "time", "of eager's"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [format_bytes(size) for size in (row.stored_bytes, row.read_bytes, row.sent_bytes)]
        table.add_row(
            f"{row.task} {row.way}",
            format_bytes(row.resident_bytes),
            f"{row.less_resident:.2f}x",
            *sizes,
            f"{row.median_ms:.0f} ms",
            f"{row.over_eager:.3f}",
        )
    console.print(table)
    where = {"code": code_version(), "links": asdict(links), "config": asdict(config), "batch": options.batch}
    content = {"circumstances": circumstances(options) | where, "rows": [asdict(row) for row in rows]}
    write_report(options.output, "resting-cpu.json", content)


if __name__ == "__main__":
    main()
