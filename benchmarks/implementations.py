"""Whether other implementations of single operations would pay: attention and convolutions, as PyTorch offers them.

    python benchmarks/implementations.py                          # seven models, ten minutes; writes into results/
    python benchmarks/implementations.py --models vit --device cuda
    python benchmarks/implementations.py --quick --output folder  # tiny models, whose times mean nothing

Calls of a model's step are put into classes of equal sizes and settings. Each class runs forward and backward in every
implementation, by turns, on numbers of its own: time, bytes that autograd saves, and the most bytes at once. One pays
as a compiled part does: it takes less time, or saves less in no more time. Their numbers are compared with those of the
one that PyTorch chooses. What a step would gain is told as a share of its time. Nothing else should be computed on the
machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from benchmarks.operations import Argument, measured_classes
from benchmarks.peers.case import Case
from benchmarks.peers.models import case_named
from benchmarks.reporting import console, new_table
from rkgb.devices.registry import device_of
from rockmate import PeakMemory
from rockmate.regions.option import RegionTrial

RESULTS = "implementations-{}.json"
MODELS = ("gpt2", "hf-llama", "hf-bert", "vit", "resnet50", "mobilenet-v2", "unet")
QUICK = ("hf-bert", "resnet50")
CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose2d)
SECONDS, TURNS = 2.0, 5  # of turns of a class, and turns at least

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Call:
    """A call of a function, with what stands for its tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def is_attention(self) -> bool:
        return self.function is scaled_dot_product_attention

    @property
    def name(self) -> str:
        given = [*self.args, *(value for _, value in self.kwargs)]
        sizes = ["×".join(map(str, one.sizes)) for one in given if isinstance(one, Argument)]
        return f"{self.function.__name__} {', '.join(sizes)}"


class Calls(TorchFunctionMode):
    """Counts calls of attention and of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Call] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention or func in CONVOLUTIONS:
            named = tuple((name, _plain(value)) for name, value in (kwargs or {}).items())
            self.counts[Call(func, tuple(map(_plain, args)), named)] += 1
        return func(*args, **(kwargs or {}))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Argument.of(value)
    return tuple(value) if isinstance(value, list) else value


def implementations(call: Call, device: torch.device) -> dict[str, Context]:
    """All that PyTorch offers for a call there, by their names; first the one that it takes."""
    if call.is_attention:
        kinds = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
        if not device_of(device).is_host:
            kinds |= {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
        others: dict[str, Context] = {name: partial(sdpa_kernel, kind) for name, kind in kinds.items()}
    elif device_of(device).is_host:
        others = {"without oneDNN": partial(torch.backends.mkldnn.flags, enabled=False)}
    else:
        others = {
            "cuDNN, by trials": partial(torch.backends.cudnn.flags, enabled=True, benchmark=True),
            "without cuDNN": partial(torch.backends.cudnn.flags, enabled=False),
        }
    return {"as it is": nullcontext, **others}


@dataclass(frozen=True)
class Found:
    """An implementation of a class of calls."""

    name: str
    ms: float = 0.0  # forward and backward: the least
    saved_bytes: int = 0  # by autograd, arguments apart
    peak_bytes: int = 0
    away: float = 0.0  # the largest difference of outputs and gradients, over the largest number
    refused: str = ""


class Step:
    """A call's forward and backward on tensors of its own."""

    def __init__(self, call: Call, device: torch.device) -> None:
        torch.manual_seed(0)
        self.call, self.device = call, device
        self.args = [self._made(value) for value in call.args]
        self.kwargs = {name: self._made(value) for name, value in call.kwargs}
        given = [*self.args, *self.kwargs.values()]
        self.leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        self.gradient: torch.Tensor | None = None

    def _made(self, value: Any) -> Any:
        return value.made(self.device) if isinstance(value, Argument) else value

    def __call__(self) -> list[torch.Tensor]:
        output = self.call.function(*self.args, **self.kwargs)
        if self.gradient is None:
            self.gradient = torch.randn_like(output)
        return [output.detach(), *torch.autograd.grad(output, self.leaves, self.gradient)]

    def saved_bytes(self) -> int:
        """What autograd saves in its forward beside what was given."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.call.function(*self.args, **self.kwargs)
        given = {one.untyped_storage().data_ptr() for one in self.leaves}
        return sum(size_bytes for place, size_bytes in saved.items() if place not in given)


def tried(call: Call, device: torch.device, seconds: float) -> list[Found]:
    """Every implementation of a call; the first is the one that PyTorch takes."""
    step, found, times = Step(call, device), list[Found](), dict[str, list[float]]()
    contexts = implementations(call, device)
    expected: list[torch.Tensor] = []
    for name, context in contexts.items():
        try:
            with context():
                made = step()
                saved_bytes = step.saved_bytes()
                with PeakMemory(device) as memory:
                    step()
        except (RuntimeError, NotImplementedError) as error:
            found.append(Found(name, refused=str(error).split("\n", 1)[0]))
            continue
        expected = expected or made
        found.append(Found(name, 0.0, saved_bytes, memory.peak_bytes, _away(expected, made)))
        times[name] = []
    started = time.perf_counter()
    while len(times["as it is"]) < TURNS or time.perf_counter() < started + seconds:
        for name, spent in times.items():
            with contexts[name]():
                device_of(device).synchronize()
                begun = time.perf_counter()
                step()
                device_of(device).synchronize()
                spent.append(1e3 * (time.perf_counter() - begun))
    return [one if one.refused else Found(**{**asdict(one), "ms": min(times[one.name])}) for one in found]


def _away(expected: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> float:
    pairs = zip(expected, made, strict=True)
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-30)) for one, other in pairs)


def quickest(found: Sequence[Found]) -> Found:
    """The one to take: another one than that of PyTorch only where it pays."""
    usual = found[0]
    paying = [
        one
        for one in found[1:]
        if RegionTrial((), usual.ms, one.ms, usual.saved_bytes, one.saved_bytes, one.refused).pays
    ]
    return min(paying, key=lambda one: one.ms, default=usual)


def rows_of(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All classes of calls of a model's step."""
    device = torch.device(options.device)
    case = case_named(name, device, options.quick)
    model = case.fresh_model()
    step_ms = min(_timed_ms(case, model) for _ in range(2 if options.quick else 4))
    with Calls() as calls:
        case.step(model)
    rows = []
    for call, count in sorted(calls.counts.items(), key=lambda item: item[0].name):
        found = tried(call, device, 0.1 if options.quick else SECONDS)
        best = quickest(found)
        gain = count * (found[0].ms - best.ms) / step_ms
        rows.append(
            {
                "model": name,
                "call": call.name,
                "count": count,
                "share": count * found[0].ms / step_ms,  # of the step's time
                "gain": gain,
                "best": best.name,
                "found": [asdict(one) for one in found],
            }
        )
    total = sum(row["gain"] for row in rows)
    console.print(f"{name}: {len(rows)} classes, {sum(row['share'] for row in rows):.0%} of a step; gain {total:.2%}")
    return rows


def _timed_ms(case: Case, model: torch.nn.Module) -> float:
    device_of(case.device).synchronize()
    started = time.perf_counter()
    case.step(model)
    device_of(case.device).synchronize()
    model.zero_grad(set_to_none=True)
    return 1e3 * (time.perf_counter() - started)


def table(rows: Sequence[dict[str, Any]]) -> Any:
    """A line for each class of calls where another implementation pays, and the sum of each model."""
    made = new_table("Other implementations of single operations")
    for column in ("model", "call", "calls", "of a step", "gain", "best"):
        made.add_column(column)
    for row in rows:
        if row["gain"] > 0:
            texts = (f"{row['count']}", f"{row['share']:.1%}", f"{row['gain']:.2%}", row["best"])
            made.add_row(row["model"], row["call"], *texts)
    return made


def main() -> None:
    """Try all classes of all models, and write what was found after each model."""
    measured_classes(__doc__, MODELS, QUICK, RESULTS, rows_of, table)


if __name__ == "__main__":
    main()
