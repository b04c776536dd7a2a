"""What a step of a compiled module takes, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample, make_sample
from rkgb.process.surroundings import surroundings_aside
from rkgb.state.module_state import for_planning, main_device, module_devices, module_state_kept
from rockmate.compile.partitioner import Partitioner
from rockmate.errors import ArgumentError
from rockmate.planning.costs import LossFunction
from rockmate.planning.real_step import peak_of
from rockmate.units import format_bytes


@dataclass(frozen=True, slots=True)
class Checked:
    """What a real step took, and what it may take."""

    peak_bytes: int  # above what was there before the step, as the budget is
    budget_bytes: int
    predicted_bytes: int  # of the graph that takes most; the loss is left out where it is not compiled
    graphs: int  # that were compiled with the partitioner

    @property
    def fits(self) -> bool:
        """Whether the step was within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        verdict = "within" if self.fits else "above"
        text = f"a step took {format_bytes(self.peak_bytes)}, {verdict} the budget of {format_bytes(self.budget_bytes)}"
        return text if self.graphs == 1 else f"{text}, which each of {self.graphs} graphs had by itself"


def check(compiled: torch.nn.Module, sample: Any, loss: LossFunction | None = None) -> Checked:
    """Run two steps of a module that was compiled with a `Partitioner`, and measure the peak of the second.

    The first compiles, if nothing has yet. `sample` and `loss` are as for `Rockmate`; without a loss, gradients come to
    all outputs, and nothing else is counted. The module is left as it was: buffers, gradients, random streams.

    Raises:
        ArgumentError: the module was not compiled with a `Partitioner`.
        Whatever compiling raises, such as an error of the compiler whose cause is `BudgetTooSmall`.
    """
    partitioner = _partitioner_of(compiled)
    arguments: Sample = make_sample(compiled, sample)
    device = main_device(module_devices(compiled, arguments.tensors))
    with surroundings_aside(), for_planning(compiled):
        for _ in range(2):
            with module_state_kept(compiled, {device}):
                peak = peak_of(compiled, arguments, loss, device)
    predicted = max((one.predicted_peak_bytes for one in partitioner.divisions), default=0)
    return Checked(peak.allocated_bytes, partitioner.budget_bytes, predicted, len(partitioner.divisions))


def _partitioner_of(compiled: object) -> Partitioner:
    call = getattr(compiled, "_compiled_call_impl", None) or compiled
    options: dict[str, Any] = getattr(call, "get_compiler_config", dict)() or {}
    found = options.get("custom_partitioner_fn")
    if not isinstance(found, Partitioner):
        raise ArgumentError(
            f"this {type(compiled).__name__} was not compiled with a partitioner of ours: "
            'torch.compile(model, options={"custom_partitioner_fn": rockmate.compile.Partitioner("2GiB")}).'
        )
    return found
