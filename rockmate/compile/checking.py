"""What a step of a compiled module takes, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from rkgb import make_sample
from rkgb.process.surroundings import surroundings_aside
from rkgb.state.module_state import for_planning, main_device, module_devices, module_state_kept
from rkgb.torch_private.compiler.partitioners import partitioner_of
from rockmate.compile.partitioner import Partitioner
from rockmate.errors import ArgumentError, BudgetTooSmall
from rockmate.planning.costs import LossFunction
from rockmate.planning.trying.real_step import peak_of
from rockmate.units import format_bytes

_ATTEMPTS = 4  # to compile
_BEYOND = 1.2  # of what a step took too much, the next target is lower


@dataclass(frozen=True, slots=True)
class Checked:
    """What a real step took, and what it may take."""

    peak_bytes: int  # above what was there before the step, as the budget is
    budget_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the step was within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        verdict = "within" if self.fits else "above"
        return f"a step took {format_bytes(self.peak_bytes)}, {verdict} the budget of {format_bytes(self.budget_bytes)}"


def check(compiled: torch.nn.Module, sample: Any, loss: LossFunction | None = None) -> Checked:
    """Run two steps of a module that was compiled with a `Partitioner`, and measure the peak of the second.

    The first compiles, if nothing has yet. `sample` and `loss` are as for `Rockmate`; without a loss, gradients come to
    all outputs, and nothing else is counted. The module is left as it was: buffers, gradients, random streams.

    Raises:
        ArgumentError: the module was not compiled with a `Partitioner`.
        Whatever compiling raises, such as an error of the compiler whose cause is `BudgetTooSmall`.
    """
    return Checked(_peak_bytes(compiled, sample, loss), _partitioner_of(compiled).budget_bytes)


def compile_within(
    model: torch.nn.Module,
    sample: Any,
    budget: int | str,
    loss: LossFunction | None = None,
    **options: Any,
) -> torch.nn.Module:
    """`model` compiled by `torch.compile`, and a step of it measured to be within a budget of bytes.

    Where a step takes more than was predicted, the model is compiled again within less, a few times at most. `sample`
    and `loss` are as for `check`, the other `options` those of `torch.compile`. The model is left as it was.

    Raises:
        BudgetError: the budget is none in bytes.
        BudgetTooSmall: no division is predicted to fit, or none that does was found to.
        Whatever else compiling raises.
    """
    budget_bytes = target_bytes = Partitioner(budget).budget_bytes
    inner = options.pop("options", {})
    least_bytes = 0
    for _ in range(_ATTEMPTS):
        torch.compiler.reset()  # or code compiled for another budget would run
        chosen = {**inner, "custom_partitioner_fn": Partitioner(target_bytes)}
        compiled = cast(torch.nn.Module, torch.compile(model, options=chosen, **options))
        try:
            peak_bytes = _peak_bytes(compiled, sample, loss)
        except Exception as error:
            if (refused := refusal_in(error)) is None:
                raise
            if refused.smallest_budget_bytes > budget_bytes or not least_bytes:
                least_bytes = refused.smallest_budget_bytes
                break
            target_bytes = refused.smallest_budget_bytes
            continue
        if peak_bytes <= budget_bytes:
            return compiled
        least_bytes = min(least_bytes or peak_bytes, peak_bytes)
        target_bytes = max(target_bytes - int(_BEYOND * (peak_bytes - budget_bytes)), 1)
    raise BudgetTooSmall(
        f"no step of the compiled {type(model).__name__} was found within {format_bytes(budget_bytes)}: the least "
        f"takes {format_bytes(least_bytes)}. Give that much, a smaller batch, or plan the model itself, which goes "
        "lower: Rockmate(model, sample, budget).",
        smallest_budget_bytes=least_bytes,
        binding_op="",
        proven_bytes=0,
    )


def refusal_in(error: BaseException) -> BudgetTooSmall | None:
    """The refusal of a partitioner that an error of the compiler tells of, if it does."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, BudgetTooSmall):
        seen = seen.__cause__ or getattr(seen, "inner_exception", None)
    return seen


def _peak_bytes(compiled: torch.nn.Module, sample: Any, loss: LossFunction | None) -> int:
    arguments = make_sample(compiled, sample)
    device = main_device(module_devices(compiled, arguments.tensors))
    with surroundings_aside(), for_planning(compiled):
        for _ in range(2):
            with module_state_kept(compiled, {device}):
                peak = peak_of(compiled, arguments, loss, device)
    return peak.allocated_bytes


def _partitioner_of(compiled: object) -> Partitioner:
    found = partitioner_of(compiled)
    if not isinstance(found, Partitioner):
        raise ArgumentError(
            f"this {type(compiled).__name__} was not compiled with a partitioner of ours: "
            'torch.compile(model, options={"custom_partitioner_fn": rockmate.compile.Partitioner("2GiB")}).'
        )
    return found
