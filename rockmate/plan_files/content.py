"""What a plan file holds: plain records, read and written as JSON.

Everything that people look at (reports, explanations, comparisons) is made of these records, whether they come from a
file or from a planned module. They name operations and hold numbers; nothing of them is ever executed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rk_solvers import Chain, Problem, Schedule, SecondMemory
from rkgb.ir.profiles import BlockProfile
from rockmate.kernels.option import ChosenKernels
from rockmate.layouts.option import ChosenLayout
from rockmate.memory.split import MemorySplit
from rockmate.planning.plan import Plan
from rockmate.regions.option import CompiledRegions

FORMAT: Literal["rockmate-plan"] = "rockmate-plan"
VERSION: Literal[2] = 2


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a plan file: other fields than its own are refused."""


class Made(Record, frozen=True):
    """Where and by what a plan was made. Costs hold for such a place alone."""

    rockmate: str  # versions
    torch: str
    device: str  # its kind: "cpu", or "cuda" with the name of the device
    threads: int  # of torch, on the CPU
    processor: str = ""  # what the device is, and can do; empty in files of a Rockmate that did not tell
    flags: tuple[str, ...] = ()  # of PyTorch's back ends, such as "mkldnn_enabled=True"


class ValueRecord(Record, frozen=True):
    """A tensor of the graph."""

    name: str
    text: str  # type, shape and marks, such as "float32[8, 128] grad"
    size_bytes: int  # of its whole storage
    storage: str  # name of the value that first held that storage: itself, where it is fresh


class LeafRecord(Record, frozen=True):
    """A tensor given from outside: a parameter, a buffer, an input or a constant."""

    kind: Literal["parameter", "buffer", "input", "constant"]
    path: str  # of a parameter or buffer: its name in the module
    index: int  # of an input: its place among the sample's tensors; else -1
    value: ValueRecord
    digest: str = ""  # of a constant's elements


class OperationRecord(Record, frozen=True):
    """One call of the graph, in the order of the trace."""

    name: str
    function: str  # such as "aten::linear.default"
    arguments: str  # as text, values by their names with a % before them
    makes: tuple[ValueRecord, ...]
    node: str = ""  # the forward operation of the problem that it belongs to; "" for one on leaves alone
    module: str = ""  # path of the submodule in which it was called
    source: str = ""  # "file.py:12"
    facts: str = ""  # of the call, that decide what it computes: modes, whether it draws random numbers
    keep_reason: str = ""  # why it must not run twice; empty where it may


class GraphRecord(Record, frozen=True):
    """The traced operations, in order."""

    digest: str  # equal for graphs that compute and cost the same
    model: str  # name of the module's class
    calls: str  # the tensors of the calls that the plan is for
    leaves: tuple[LeafRecord, ...]
    operations: tuple[OperationRecord, ...]
    output: str  # the structure of what the module returns
    attributes: tuple[str, ...] = ()  # what it leaves in attributes, and where


class MeasuredBlock(Record, frozen=True):
    """What was measured of one block, for all equal ones."""

    digest: str
    names: tuple[str, ...]  # of its values
    profile: BlockProfile


class LossRecord(Record, frozen=True):
    """What the loss takes between forward and backward."""

    time_ms: float
    peak_bytes: int
    is_seen: bool = False  # in a step, as none was given


class Measurements(Record, frozen=True):
    """Costs from which the problem is made."""

    blocks: tuple[MeasuredBlock, ...]
    stages: tuple[tuple[int, int], ...]  # of each backward operation of the graph: its resident and its peak bytes
    loss: LossRecord | None  # None where no loss was given
    eager_peak_bytes: int  # of the eager step
    drawn_sooner_ms: float = 0.0  # than by the eager step: random numbers


class OffloadRecord(Record, frozen=True):
    """Where data may be moved, as `rockmate.Offload` says it."""

    where: Literal["auto", "disk", "host"] = "auto"
    path: str | None = None
    limit_bytes: int | None = None


class Asked(Record, frozen=True):
    """What planning was asked for that decides the graph or what the plan means."""

    scope: Literal["step", "total", "reserved"] = "step"
    pinned: tuple[str, ...] = ()  # operations that are never recomputed
    opaque: tuple[str, ...] = ()  # paths of submodules whose call is one operation
    gradients: tuple[str, ...] = ()  # parameters whose gradients are there before the step, which adds to them
    trained: tuple[str, ...] | None = None  # outputs that the loss hands a gradient to; None for all that take one
    assumed: tuple[str, ...] = ()  # of these, losses in attributes that training may as well leave out
    offload: OffloadRecord | None = None  # None where nothing may move


class Promise(Record, frozen=True):
    """The numbers of a plan; see `rockmate.Plan`, whose fields these are."""

    budget_bytes: int
    peak_bytes: int
    time_ms: float
    baseline_peak_bytes: int
    baseline_time_ms: float
    solver: str
    planning_s: float
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None
    lower_bound_ms: float | None
    gap: float | None  # how much of the step's time a better plan could save at most
    memory_split: MemorySplit | None
    gradient_bytes: int = 0  # of the gradients that are there before the step
    checkpointed_peak_bytes: int | None = None  # of the step with the model's own checkpointing, where that was on
    planning_peak_bytes: int | None = None  # files of before have none
    predicted_reserved_bytes: int | None = None  # files of before have none
    memory: SecondMemory | None = None  # where its data move, and how fast; None where none do
    waiting_ms: float = 0.0  # of its time, for transfers
    stored_bytes: int = 0  # in the second memory at most
    measured_stored_bytes: int | None = None
    layout: ChosenLayout | None = None  # of the weights of convolutions; None where none was asked for
    compiled: CompiledRegions | None = None  # parts that are compiled; None where nobody asked for that
    kernels: ChosenKernels | None = None  # by which operations run; None where nobody asked for others

    @property
    def whole_budget_bytes(self) -> int:
        """The budget as it was given: of the step, or of all of training."""
        return self.budget_bytes if self.memory_split is None else self.memory_split.total_bytes


# ---- calls of other sizes ----------------------------------------------------------------------------


class PolynomialRecord(Record, frozen=True, tag="polynomial"):
    """A whole number that depends on sizes: a sum of products of these."""

    terms: tuple[tuple[tuple[int, ...], int, int], ...]  # exponents, and the coefficient's numerator and denominator
    has_padded: bool = False  # whether exponents of padded sizes follow


class BlocksRecord(Record, frozen=True, tag="blocks"):
    """Bytes in whole blocks."""

    terms: PolynomialRecord
    block_bytes: int


class ChordsRecord(Record, frozen=True, tag="chords"):
    """Bytes that are bounded by those at a few points."""

    points: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]
    rounded_bytes: int


class TimesRecord(Record, frozen=True, tag="times"):
    """A time, between those that were measured for so much work each."""

    work: tuple[float, ...]
    times_ms: tuple[float, ...]


class FormulaRecord(Record, frozen=True, tag="formula"):
    """What Python computes with sizes."""

    operation: str  # a name in `rkgb.sizes.OPERATIONS`
    operands: tuple[PolynomialRecord | FormulaRecord | bool | int | float, ...]


Expression = PolynomialRecord | BlocksRecord | ChordsRecord | TimesRecord | FormulaRecord
Places = tuple[tuple[tuple[int | str, ...], int], ...]  # steps to a number, and which of the expressions it is


class QuestionRecord(Record, frozen=True):
    """What Python asks of sizes, and the answer of all calls of the family."""

    asked: FormulaRecord
    answer: bool | int | float


class DecisionsRecord(Record, frozen=True):
    """What a schedule recomputes, and what it moves."""

    solver: str
    stages: tuple[tuple[str, tuple[str, ...]], ...]  # of each backward operation that has some
    moves: tuple[tuple[str, int], ...] = ()  # data, and the computation before which each is back


class FamilyRecord(Record, frozen=True):
    """Calls that differ from the file's in sizes alone: what varies in graph, measurements and problem, and how."""

    positions: tuple[tuple[tuple[int, int], ...], ...]  # by symbol: tensors of a call, and their dimensions
    points: tuple[tuple[int, ...], ...]  # the sizes that were measured
    point: tuple[int, ...]  # those of the file's call
    expressions: tuple[Expression, ...]
    traits: Places  # of the tensors of a call
    calls: Places  # by operation: arguments
    layouts: Places  # by value: size, stride and offset
    saved: Places  # by operation: where the tensors lie that autograd saves
    ways: Places  # of having data again, by operation of the problem
    ways_of: tuple[str, ...]  # the operations of the problem that have some
    problem: Places
    of_file: Problem  # the problem of the file's call, as the family has it: with what all of its calls have
    questions: tuple[QuestionRecord, ...]
    schedules: tuple[DecisionsRecord, ...]


class ChainRecord(Record, frozen=True):
    """The partition of the problem's operations into blocks."""

    blocks: tuple[tuple[int, int], ...]  # first forward operation, and the one after the last
    backward_block: tuple[int, ...]


class PlanFile(Record, frozen=True):
    """A plan with all that is needed to look at it, to check it, and to run it without measuring or solving."""

    format: Literal["rockmate-plan"]
    version: Literal[2]
    made: Made
    asked: Asked
    graph: GraphRecord
    measured: Measurements
    problem: Problem  # made of the graph and the measurements
    chain: ChainRecord
    promise: Promise
    schedule: tuple[str, ...]  # a line for each step, such as "compute linear_3"
    family: FamilyRecord | None = None  # None where calls of other sizes are planned by themselves

    def __repr__(self) -> str:
        return f"PlanFile({self.graph.model} on {self.graph.calls}: {self.promise.solver}, {self.graph.digest[:12]})"

    @property
    def plan(self) -> Plan:
        """The plan, as a planned module has it."""
        numbers = {name: getattr(self.promise, name) for name in Promise.__struct_fields__ if name != "gap"}
        bounds_reserved = self.asked.scope == "reserved"
        return Plan(schedule=self.parsed_schedule, calls=self.graph.calls, bounds_reserved=bounds_reserved, **numbers)

    @property
    def parsed_schedule(self) -> Schedule:
        """The steps, in order. Raises `ScheduleError` for lines that are none."""
        return Schedule.parse("\n".join(self.schedule))

    @property
    def solver_chain(self) -> Chain:
        """The partition into blocks, as solvers take it."""
        return Chain(tuple(range(*ends) for ends in self.chain.blocks), self.chain.backward_block)
