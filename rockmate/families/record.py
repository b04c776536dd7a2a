"""A family as a plan file has it: what varies in what was measured of one of its calls, as expressions of sizes.

The file holds that one call, whose graph is traced and compared where the file is read. All else is numbers in places
of it; at the sizes of that call, they are to give what it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from typing import Any

from rk_solvers import Problem
from rkgb.ir.call import Call
from rkgb.sizes import OPERATIONS
from rockmate.errors import PlanFileError, PlanMismatch
from rockmate.families.aligned import Interpolated, Leaf, NotAligned, at_point, varying_in, with_varying
from rockmate.families.family import Family, saved_layouts, value_layouts
from rockmate.families.formulas import Formula
from rockmate.families.polynomials import Blocks, Chords, NotWhole, Polynomial
from rockmate.plan_files.content import (
    BlocksRecord,
    ChordsRecord,
    DecisionsRecord,
    Expression,
    FamilyRecord,
    FormulaRecord,
    Places,
    PolynomialRecord,
    QuestionRecord,
    TimesRecord,
)
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.measured import Measured

_DAMAGED = (
    "what the file tells of other sizes does not belong to its plan: get the file anew, or plan the module again."
)


def recorded(family: Family, schedules: Iterable[PortablePlan]) -> FamilyRecord:
    """What a file holds of `family`, whose base is the call of the file, and of what is known to recompute."""
    table, point = _Table(), family.own_point
    ways = {node.name: found for node, found in family.ways.items()}
    return FamilyRecord(
        positions=family.positions,
        points=family.points,
        point=point,
        traits=table.places(family.traits),
        calls=table.places({name: (call.args, call.kwargs) for name, call in family.calls.items()}),
        layouts=table.places(dict(family.layouts)),
        saved=table.places(dict(family.saved)),
        ways=table.places(ways),
        ways_of=tuple(ways),
        problem=table.places(dict(family.problem)),
        of_file=family.problem_at(point),
        questions=tuple(QuestionRecord(asked=_formula(asked), answer=answer) for asked, answer in family.questions),
        schedules=tuple(DecisionsRecord(solver=one.solver, stages=one.stages, moves=one.moves) for one in schedules),
        expressions=tuple(table.expressions),
    )


def restored(record: FamilyRecord, base: Measured) -> tuple[Family, list[PortablePlan]]:
    """The family of which `recorded` made the record, where `base` is the call of the file; and its schedules.

    Raises `PlanFileError` where the record is of another call.
    """
    try:
        family = _family(record, base)
        _check(family)
        if record.point != family.own_point:
            raise ValueError("point")
        schedules = [PortablePlan(one.stages, one.solver, one.moves) for one in record.schedules]
        for one in schedules:
            one.schedule_for(family.base.problem)
    except (NotAligned, NotWhole, PlanMismatch, LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise PlanFileError(f"the plan cannot be used: {_DAMAGED}") from error
    return family, schedules


def _family(record: FamilyRecord, base: Measured) -> Family:
    functions = [_function(one) for one in record.expressions]

    def put(tree: Any, places: Places) -> Any:
        return with_varying(tree, {steps: functions[index] for steps, index in places})

    graphs = base.graphs
    operations = {op.name: op.call for op in graphs.D_graph}
    varying = list(dict.fromkeys(str(steps[0]) for steps, _ in record.calls))
    given = put({name: (operations[name].args, operations[name].kwargs) for name in varying}, record.calls)
    lies = {name: saved_layouts(profile) for name, profile in graphs.K_graph.op_profiles.items()}
    layouts = put(value_layouts(graphs), record.layouts)
    restorations = {node.name: (node, ways) for node, ways in graphs.K_graph.restorations.items()}
    ways = put({name: restorations[name][1] for name in record.ways_of}, record.ways)
    shapes = {name: layouts[name][0] for name in graphs.D_graph.values}
    return Family(
        base=base,
        positions=record.positions,
        points=record.points,
        traits=put(base.pattern.traits, record.traits),
        calls={name: Call(operations[name].function, *given[name]) for name in varying},
        questions=tuple((_formula_of(one.asked), one.answer) for one in record.questions),
        shapes={name: shape for name, shape in shapes.items() if any(isinstance(size, Polynomial) for size in shape)},
        layouts=layouts,
        saved=put(lies, record.saved),
        ways={restorations[name][0]: found for name, found in ways.items()},
        problem=put(_parts(record.of_file), record.problem),
    )


def _check(family: Family) -> None:
    """At the sizes of the file's call, all is to be what that call has. Raises `ValueError`."""
    base, graphs = family.base, family.base.graphs
    point = family.own_point
    operations = {op.name: op.call for op in graphs.D_graph}
    calls = {name: (call.args, call.kwargs) for name, call in family.calls.items()}
    profiles = graphs.K_graph.op_profiles
    pairs = [
        (family.traits, base.pattern.traits),
        (calls, {name: (operations[name].args, operations[name].kwargs) for name in calls}),
        (dict(family.layouts), value_layouts(graphs)),
        (dict(family.saved), {name: saved_layouts(profile) for name, profile in profiles.items()}),
        (list(family.ways.values()), [graphs.K_graph.restorations[node] for node in family.ways]),
    ]
    # A point whose times and bounds nobody measured would be as good as any other.
    if point not in family.points or any(at_point(tree, point) != known for tree, known in pairs):
        raise ValueError("sizes")
    if [op.name for op in family.problem_at(point).backward] != [op.name for op in base.problem.backward]:
        raise ValueError("backward operations")
    if family.point_of(base.pattern) != point:
        raise ValueError("questions")


def _parts(problem: Problem) -> dict[str, Any]:
    return {part.name: getattr(problem, part.name) for part in fields(problem)}


# ---- expressions -----------------------------------------------------------------------------------------


class _Table:
    """Each expression once, however often it occurs."""

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self._known: dict[Leaf, int] = {}

    def places(self, tree: Any) -> Places:
        """Where functions are in `tree`."""
        return tuple((steps, self._index(function)) for steps, function in varying_in(tree))

    def _index(self, function: Leaf) -> int:
        if function not in self._known:
            self._known[function] = len(self.expressions)
            self.expressions.append(_expression(function))
        return self._known[function]


def _expression(function: Leaf) -> Expression:
    if isinstance(function, Polynomial):
        return _polynomial(function)
    if isinstance(function, Blocks):
        return BlocksRecord(terms=_polynomial(function.terms), block_bytes=function.block_bytes)
    if isinstance(function, Chords):
        return ChordsRecord(points=function.points, values=function.values, rounded_bytes=function.rounded_bytes)
    if isinstance(function, Interpolated):
        return TimesRecord(work=function.work, times_ms=function.times_ms)
    return _formula(function)


def _polynomial(function: Polynomial) -> PolynomialRecord:
    terms = tuple((monomial, number.numerator, number.denominator) for monomial, number in function.terms)
    return PolynomialRecord(terms=terms, has_padded=function.has_padded)


def _formula(function: Formula) -> FormulaRecord:
    operands = [
        _polynomial(one) if isinstance(one, Polynomial) else _formula(one) if isinstance(one, Formula) else one
        for one in function.operands
    ]
    return FormulaRecord(operation=function.operation, operands=tuple(operands))


def _function(record: Expression) -> Leaf:
    if isinstance(record, PolynomialRecord):
        return _polynomial_of(record)
    if isinstance(record, BlocksRecord):
        if record.block_bytes < 1:
            raise ValueError(f"blocks of {record.block_bytes} bytes")
        return Blocks(_polynomial_of(record.terms), record.block_bytes)
    if isinstance(record, ChordsRecord):
        if len(record.points) != len(record.values):
            raise ValueError("points and values")
        return Chords(record.points, record.values, record.rounded_bytes)
    if isinstance(record, TimesRecord):
        rises = all(a < b for a, b in zip(record.work, record.work[1:], strict=False))
        if len(record.work) != len(record.times_ms) or len(record.work) < 2 or not rises or record.work[0] <= 0:
            raise ValueError("times")
        return Interpolated(record.work, record.times_ms)
    return _formula_of(record)


def _polynomial_of(record: PolynomialRecord) -> Polynomial:
    return Polynomial(
        tuple((monomial, Fraction(over, under)) for monomial, over, under in record.terms), record.has_padded
    )


def _formula_of(record: FormulaRecord) -> Formula:
    if record.operation not in OPERATIONS:
        raise ValueError(record.operation)
    operands: list[Any] = [
        _polynomial_of(one)
        if isinstance(one, PolynomialRecord)
        else _formula_of(one)
        if isinstance(one, FormulaRecord)
        else one
        for one in record.operands
    ]
    return Formula(record.operation, tuple(operands))
