"""A plan: the schedule that a module follows, with what it promises and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from rk_solvers import Schedule, SecondMemory
from rockmate.kernels.option import ChosenKernels
from rockmate.layouts.option import ChosenLayout
from rockmate.memory.split import MemorySplit
from rockmate.nn.chunked_logits import Chunks
from rockmate.regions.option import CompiledRegions
from rockmate.units import format_bytes, format_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """What a module will do under its budget.

    Bytes are above what was resident before the step. Where the budget is for all of training, gradients of
    parameters are resident, and `budget_bytes` is what `memory_split` leaves to the step.
    """

    budget_bytes: int
    peak_bytes: int  # predicted
    time_ms: float  # predicted, of one training step
    baseline_peak_bytes: int  # of the eager step
    baseline_time_ms: float  # of the step that keeps everything, from the same measurements
    solver: str
    planning_s: float
    schedule: Schedule
    measured_peak_bytes: int | None = None  # of one real step on the sample
    lower_bound_ms: float | None = None  # no plan for this budget is predicted to take less; None where unknown
    memory_split: MemorySplit | None = None  # of a budget for all of training; None of one for the step
    # What CUDA's allocator held at most in that real step, gaps included, above what was allocated before it.
    measured_reserved_bytes: int | None = None  # None on the CPU
    predicted_reserved_bytes: int | None = None  # the same by an emulation of the allocator; None where there is none
    bounds_reserved: bool = False  # whether the budget is of that, and not of what is allocated
    calls: str = ""  # the tensors of the calls that it is for
    # Of the gradients that are there before the step, which adds to them; 0 where it is for steps that make them all.
    gradient_bytes: int = 0
    # Of the step with the model's own checkpointing: what a fraction is of, where that is switched on.
    checkpointed_peak_bytes: int | None = None
    # By how much the process's resident memory rose at most while it was planned; None where nobody looked.
    planning_peak_bytes: int | None = None
    # Of a plan that moves data:
    memory: SecondMemory | None = None  # where to, and how fast, as was measured when it was made
    waiting_ms: float = 0.0  # of its time, for transfers
    stored_bytes: int = 0  # in the second memory at most, predicted
    measured_stored_bytes: int | None = None  # in the real step
    layout: ChosenLayout | None = None  # of the weights of convolutions; None where none was asked for
    loss_chunks: Chunks = None  # rows whose logits are made at once; None where they are made whole
    compiled: CompiledRegions | None = None  # parts that are compiled; None where nobody asked for that
    kernels: ChosenKernels | None = None  # by which operations run; None where nobody asked for others

    @property
    def whole_budget_bytes(self) -> int:
        """The budget as it was given: of the step, or of all of training."""
        return self.budget_bytes if self.memory_split is None else self.memory_split.total_bytes

    @property
    def bounded_bytes(self) -> int | None:
        """What was measured of that which the budget is for; None where nothing was."""
        return self.measured_reserved_bytes if self.bounds_reserved else self.measured_peak_bytes

    @property
    def exceeds(self) -> bool:
        """Whether a measured step takes more than the budget."""
        return self.bounded_bytes is not None and self.bounded_bytes > self.budget_bytes

    @property
    def gap(self) -> float | None:
        """How much of the step's time a better plan could save at most: 0.02 is 2 %. None where no bound is known."""
        if self.lower_bound_ms is None or self.time_ms <= 0:
            return None
        return max(0.0, 1 - self.lower_bound_ms / self.time_ms)

    @property
    def overhead(self) -> float:
        """Extra time relative to keeping everything: 0.11 is +11 %."""
        return self.time_ms / self.baseline_time_ms - 1 if self.baseline_time_ms > 0 else 0.0

    @property
    def recomputations(self) -> int:
        """How many operations are computed again, in all."""
        return self.schedule.recomputations

    @property
    def keeps_all(self) -> bool:
        """Whether it does what eager does: nothing is recomputed, and nothing moved."""
        return not self.recomputations and not self.moves

    @property
    def moves(self) -> int:
        """How many data are in the second memory for a while."""
        return len(self.schedule.offloaded)

    def __str__(self) -> str:
        return (
            f"Plan(budget {self._budget_text()}, peak {format_bytes(self.peak_bytes)}"
            f" of {format_bytes(self.baseline_peak_bytes)} eager{self._checkpointed_text()}{self._gradients_text()},"
            f" time {format_ms(self.time_ms)}"
            f" ({self.overhead:+.1%}{self._gap_text()}), {self.recomputations} recomputations,"
            f"{self._moves_text()}{self._chunks_text()} {self.solver},{self._reserved_text()}"
            f" planned in {self.planning_s:.1f} s)"
        )

    def _budget_text(self) -> str:
        split = self.memory_split
        return format_bytes(self.budget_bytes) + (f" of {format_bytes(split.total_bytes)} in all" if split else "")

    def _checkpointed_text(self) -> str:
        peak_bytes = self.checkpointed_peak_bytes
        return "" if peak_bytes is None else f" ({format_bytes(peak_bytes)} with its own checkpointing)"

    def _gradients_text(self) -> str:
        return f" above {format_bytes(self.gradient_bytes)} of gradients" if self.gradient_bytes else ""

    def _reserved_text(self) -> str:
        reserved_bytes = self.measured_reserved_bytes
        return "" if reserved_bytes is None else f" {format_bytes(reserved_bytes)} reserved,"

    def _moves_text(self) -> str:
        return f" {self.moves} data moved ({format_bytes(self.stored_bytes)})," if self.moves else ""

    def _chunks_text(self) -> str:
        rows = self.loss_chunks
        return "" if rows is None else f" logits of {'a few' if rows == 'auto' else rows} rows at a time,"

    def _gap_text(self) -> str:
        return "" if self.gap is None or self.keeps_all else f", gap {self.gap:.1%}"
