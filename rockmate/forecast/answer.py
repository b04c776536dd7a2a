"""What is told of training, and how it is told in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from rkgb.shapes.machine import Machine
from rockmate.forecast.batches import Largest
from rockmate.forecast.eager_step import EagerStep
from rockmate.units import format_bytes, format_ms


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What a plan takes, by prediction."""

    budget_bytes: int  # to be given to `Rockmate`: of the step
    peak_bytes: int  # of all of training
    overhead: float  # of the step's time, over that without recomputation: 0.11 is 11 % more
    moved_bytes: int = 0  # most that is in the second memory at once


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """How many rows fit."""

    sample: int  # rows of the sample
    eager: int | None  # the most without a plan; None where it is not known
    planned: Largest | None  # the most with one


@dataclass(frozen=True, slots=True)
class Estimate:
    """What training a model takes on a device, and what Rockmate can do about it. Sizes are in bytes, times in ms.

    `peak_bytes` is what eager training allocates at most, and `split` who holds it then. `smallest` is the plan of
    least peak that was found, `planned` the one for the budget that was asked about, or for the device's memory where
    eager training does not fit. What is `unknown` is not in any figure.
    """

    model: str
    machine: Machine
    eager: EagerStep = field(repr=False)
    reserved_bytes: int | None  # by the emulated caching allocator; None on the CPU
    smallest: PlannedStep | None  # None where the model cannot be planned, for the reason in `unplanned`
    proven_bytes: int | None  # no plan takes less, of all of training
    planned: PlannedStep | None
    batch: BatchEstimate | None
    unplanned: str = ""
    unknown: tuple[str, ...] = ()
    took_s: float = 0.0
    asked_bytes: int | None = None  # the budget that was asked about, of the step
    offload: str | None = None  # where plans may move data, as it was said; None where nowhere

    @property
    def peak_bytes(self) -> int:
        """The most that eager training allocates."""
        return self.eager.peak_bytes

    @property
    def peak_in(self) -> str:
        """In which phase of a step that is."""
        return self.eager.peak_in

    @property
    def split(self) -> tuple[tuple[str, int], ...]:
        """Who holds the bytes then: their sum is `peak_bytes`."""
        return self.eager.split()

    @property
    def step_ms(self) -> float | None:
        """Of a step without a plan, by a roofline: a guess, where ratios are better ones. None without speeds."""
        return self.eager.time_ms

    @property
    def usable_bytes(self) -> int | None:
        """What the device has for tensors; None where it is not known."""
        return self.machine.usable_bytes

    @property
    def fits(self) -> bool | None:
        """Whether eager training fits; None where the memory is not known."""
        if self.usable_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) <= self.usable_bytes

    def __str__(self) -> str:
        return _text_of(self)


# ---- in words ----------------------------------------------------------------------------------------------------


def _text_of(estimate: Estimate) -> str:
    """What people want to know first: does it fit, and if not, what would."""
    machine, usable_bytes = estimate.machine, estimate.usable_bytes
    where = machine.name if usable_bytes is None else f"{machine.name} with {format_bytes(usable_bytes)} for tensors"
    lines = [f"{estimate.model} on {where}: {_verdict(estimate)}"]
    held = ", ".join(f"{format_bytes(size_bytes)} {kind}" for kind, size_bytes in estimate.split)
    reserved = ""
    if estimate.reserved_bytes is not None:
        reserved = f"; the allocator reserves {format_bytes(estimate.reserved_bytes)}"
    lines.append(f"eager peak {format_bytes(estimate.peak_bytes)} in the {estimate.peak_in}: {held}{reserved}")
    if estimate.step_ms is not None:
        lines.append(f"a step takes some {format_ms(estimate.step_ms)} (a roofline by {machine.source})")
    lines += _plan_lines(estimate)
    lines += _batch_lines(estimate)
    lines.append(f"not known without running: {'; '.join(estimate.unknown)}")
    return "\n".join(lines)


def _verdict(estimate: Estimate) -> str:
    if estimate.fits is None:
        return f"training takes {format_bytes(estimate.peak_bytes)}"
    if estimate.fits:
        return "it fits as it is"
    if estimate.planned is not None:
        return f"it does not fit as it is; with a plan it does, in {estimate.planned.overhead:+.0%} of the time"
    if estimate.unplanned:
        return "it does not fit, and cannot be planned"
    return "it does not fit, and no plan was found that does"


def _plan_lines(estimate: Estimate) -> list[str]:
    if estimate.unplanned:
        return [f"no plan: {estimate.unplanned}"]
    lines = []
    if estimate.planned is not None:
        offload = f', offload="{estimate.offload}"' if estimate.offload is not None else ""
        lines.append(
            f"planned: Rockmate(model, sample, {estimate.planned.budget_bytes}{offload}) trains within "
            f"{format_bytes(estimate.planned.peak_bytes)}, {_cost(estimate.planned)}"
        )
    elif estimate.asked_bytes is not None:
        lines.append(f"no plan was found for a step of {format_bytes(estimate.asked_bytes)}")
    if estimate.smallest is not None and estimate.proven_bytes is not None:
        lines.append(
            f"smallest found: {format_bytes(estimate.smallest.peak_bytes)} in all, {_cost(estimate.smallest)}; none is "
            f"below {format_bytes(estimate.proven_bytes)}"
        )
    return lines


def _cost(step: PlannedStep) -> str:
    moved = f", with {format_bytes(step.moved_bytes)} moved away at once" if step.moved_bytes else ""
    return f"{step.overhead:+.1%} of the time{moved}"


def _batch_lines(estimate: Estimate) -> list[str]:
    batch = estimate.batch
    if batch is None:
        return []
    eager = "unknown" if batch.eager is None else str(batch.eager)
    planned = (
        "unknown" if batch.planned is None else f"{batch.planned.batch}, {batch.planned.overhead:+.0%} of the time"
    )
    return [f"largest batch: {eager} as it is, {planned} with a plan (the sample has {batch.sample})"]
