"""Another value, the same graph: a plan that is there holds for it, with nothing measured or solved anew.

An argument or a setting that is no tensor may change from call to call: a temperature, an epoch, ``return_dict``. The
module is traced with the new value. Where its graph is that of an earlier plan but for numbers in it, all that was
measured and decided is taken over, once a forward of each block has saved the same tensors. Where these numbers come
of numbers among the arguments and settings, and of nothing else, the code of the plan computes them in each call from
then on: no further value needs a trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb import AllGraphs, DGraph, RecordMismatch, SNode
from rkgb.errors import GraphError
from rkgb.ir.call import Call
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.restoration import Restoration
from rkgb.passes.cut import chain, cut
from rkgb.passes.equivalence import canonical_form, equivalent_classes
from rkgb.passes.s_to_k import s_to_k
from rkgb.profile.measure import MeasuredBlocks
from rkgb.profile.recorded import recorded_profiles
from rkgb.recording.guard import Guard
from rkgb.replay.same import argument_pairs, same_operation, same_value
from rkgb.state.module_state import for_planning
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import structure
from rockmate.guards.numbers import (
    Expression,
    Number,
    Question,
    RunTimeNumbers,
    Value,
    evaluated,
    is_same,
    kind_of,
    numbers_in,
)
from rockmate.guards.tracked import NotFollowed, Uses, uses_of
from rockmate.planning.lowered import LoweredPlan, planned_as
from rockmate.planning.measured import Measured, Traced, problem_of

Place = tuple[str, tuple[Any, ...]]  # the name of an operation, and which of its arguments
_OPERANDS = ("number", "float", "Tensor")  # kinds of arguments that may be computed anew


def taken_over(
    model: torch.nn.Module, traced: Traced, earlier: Sequence[tuple[Measured, LoweredPlan]]
) -> tuple[Measured, LoweredPlan] | None:
    """The plan among the `earlier` ones whose graph is what was traced, made one for that; None where there is none."""
    same = [(*one, _other_numbers(traced, one[0])) for one in earlier if _holds_as_it_is(one[0], traced)]
    # First one that differs in numbers alone: of these, the code can compute the numbers.
    for measured, planned, different in sorted(same, key=lambda one: (one[2] is None, -len(one[0].gradients))):
        made = _made(model, traced, measured, planned)
        if made is not None:
            opened = None if different is None else _opened(model, traced, made, measured, different)
            return opened or made
    return None


def _holds_as_it_is(measured: Measured, traced: Traced) -> bool:
    """Whether what was `measured` is of the graph that was traced, but for numbers, and of such a step."""
    if not measured.gradients <= traced.gradients:
        return False  # made for steps before which more gradients are there
    if traced.traits != measured.traits or traced.pattern.traits != measured.pattern.traits:
        return False
    if traced.pinned != measured.pinned or traced.pattern.autocast != measured.pattern.autocast:
        return False
    return _is_same_graph(measured.graphs.D_graph, traced.graph.dgraph)


def _is_same_graph(first: DGraph, second: DGraph) -> bool:
    """Whether two graphs are the same but for numbers and constants in the arguments of their operations."""
    if len(first.nodes) != len(second.nodes) or first.values != second.values:
        return False
    if first.output_names != second.output_names or (first.trained, first.assumed) != (second.trained, second.assumed):
        return False
    if [_leaf(leaf) for leaf in first.leaves.values()] != [_leaf(leaf) for leaf in second.leaves.values()]:
        return False
    if first.varying != second.varying or len(first.generators) != len(second.generators):
        return False
    return all(map(_is_same_operation, first.nodes, second.nodes))


def _leaf(leaf: Any) -> Any:
    return leaf.name, leaf.kind, leaf.path, leaf.index, leaf.constant is None


def _is_same_operation(mine: Any, other: Any) -> bool:
    if not same_operation(mine, other):
        return False
    if isinstance(mine.call.function, OpaqueCall) and mine.call.function.traits != other.call.function.traits:
        return False
    return all(
        type(a) is type(b) and isinstance(a, (int, float)) for a, b in argument_pairs(mine.call, other.call, {}, {})
    )


# ---- the plan with other numbers ---------------------------------------------------------------------------


def _made(
    model: torch.nn.Module, traced: Traced, measured: Measured, planned: LoweredPlan
) -> tuple[Measured, LoweredPlan] | None:
    """What was measured and decided, for the graph that was traced; None where it saves other tensors."""
    started = time.perf_counter()
    try:
        graphs = _graphs(model, traced, measured.graphs)
        problem, _ = problem_of(graphs, measured.loss, measured.residents, measured.gradients)
    except (RecordMismatch, GraphError, KeyError, IndexError, ValueError):
        return None
    if problem != measured.problem:
        return None
    whole = replace(
        measured,
        sample=traced.sample,
        pattern=traced.pattern,
        settings=traced.settings,
        graphs=graphs,
        measuring_s=traced.tracing_s,
        numbers=None,
    )
    planning_s = traced.tracing_s + time.perf_counter() - started
    plan = replace(planned.plan, planning_s=planning_s, calls=str(whole.pattern))
    return whole, replace(planned_as(plan, whole, model, planned.tier), is_taken_over=True)


def _graphs(model: torch.nn.Module, traced: Traced, before: AllGraphs) -> AllGraphs:
    dataflow = traced.graph.dgraph
    blocks = cut(traced.graph, chain(traced.graph).skip_values)
    recorded: MeasuredBlocks = {}
    for block, profile in zip(blocks, before.profiles, strict=True):
        form = canonical_form(dataflow, block)
        recorded.setdefault(form.digest, (form.names, profile))
    with for_planning(model):
        profiles = recorded_profiles(traced.graph, blocks, model, traced.sample, recorded)
    whole = s_to_k(traced.graph, blocks, profiles)
    for comp, earlier in zip(whole.backward, before.K_graph.backward, strict=True):
        comp.resident_bytes, comp.peak_bytes = earlier.resident_bytes, earlier.peak_bytes
    return AllGraphs(
        traced.basic, dataflow, traced.graph, blocks, equivalent_classes(dataflow, blocks), whole, profiles
    )


# ---- numbers that are computed in each call ----------------------------------------------------------------


def covers(measured: Measured, before: Measured) -> bool:
    """Whether a plan of what was `measured`, some of whose numbers are free, holds wherever one of `before` does."""
    numbers = measured.numbers
    if numbers is None or measured.gradients != before.gradients or any(op.is_guard for op in before.graphs.D_graph):
        return False
    pattern = replace(before.pattern, free=measured.pattern.free | before.pattern.free)
    settings = replace(before.settings, free=measured.settings.free | before.settings.free)
    if pattern.but_for_numbers != measured.pattern.but_for_numbers or before.traits != measured.traits:
        return False
    return settings.but_for_free == measured.settings.but_for_free and numbers.holds(_numbers_of(before))


def _numbers_of(measured: Measured | Traced) -> dict[Number, Value]:
    """Numbers as they were when a graph was traced."""
    found: dict[Number, Value] = {}
    for path, value in numbers_in(measured.pattern.skeleton):
        found[Number(_argument_name(path), argument=path)] = value
    for setting in measured.settings.settings:
        if setting.number is not None:
            found[Number(str(setting), setting=setting.key)] = setting.number
    return found


def _argument_name(path: tuple[Any, ...]) -> str:
    """As code: ``kwargs['beta']``, ``args[1]``."""
    return ("args", "kwargs")[path[0]] + "".join(f"[{step!r}]" for step in path[1:])


def _other_numbers(traced: Traced, before: Measured) -> set[Number] | None:
    """The numbers that differ, where nothing else does; None where something does, or nothing."""
    then, now = _numbers_of(before), _numbers_of(traced)
    earlier = before.numbers
    if then.keys() != now.keys() or any(
        isinstance(op.call.function, OpaqueCall | CompiledCall) for op in before.graphs.D_graph
    ):
        return None
    different = {number for number in now if not is_same(then[number], now[number])}
    different |= set(earlier.numbers if earlier is not None else ())
    free, settings = _free(different)
    # Whatever else has changed is no number, and of a plan of its own.
    if _left_behind(traced.graph.dgraph) != _left_behind(before.graphs.D_graph):
        return None
    one, other = (replace(pattern, free=free).but_for_numbers for pattern in (traced.pattern, before.pattern))
    mine, others = (replace(held, free=settings).but_for_free for held in (traced.settings, before.settings))
    return different if different and one == other and mine == others else None


def _free(numbers: Iterable[Number]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Which arguments, and which settings, these are."""
    arguments = frozenset(number.argument for number in numbers if number.argument is not None)
    return arguments, frozenset(number.setting for number in numbers if number.setting is not None)


def _opened(
    model: torch.nn.Module,
    traced: Traced,
    made: tuple[Measured, LoweredPlan],
    before: Measured,
    different: set[Number],
) -> tuple[Measured, LoweredPlan] | None:
    """The plan with operands in the places of numbers; None where these come of anything else than numbers given."""
    then, now, earlier = _numbers_of(before), _numbers_of(traced), before.numbers
    free, settings = _free(different)
    measured = replace(
        made[0], pattern=replace(made[0].pattern, free=free), settings=replace(made[0].settings, free=settings)
    )
    try:
        with for_planning(model):
            uses = uses_of(model, traced.sample, {number: now[number] for number in sorted(different, key=str)})
        then = {number: then[number] for number in uses.known}
        operands = dict(_operands(made[0].graphs.D_graph, before.graphs.D_graph, then, uses, earlier))
        questions = list(_questions(then, uses, operands, earlier))
    except (NotFollowed, ArithmeticError):
        return None
    computed = {name for name, _ in operands}
    if any(_holds(one.way, one.node, computed) for one in made[1].program.restored.values()):
        return None
    # Nor is there to be such a way in another plan of what was measured.
    whole = measured.graphs.K_graph
    ways = {
        node: tuple(way for way in found if not _holds(way, node, computed))
        for node, found in whole.restorations.items()
    }
    ways = {node: found for node, found in ways.items() if found}
    measured.graphs = replace(measured.graphs, K_graph=replace(whole, restorations=ways))
    numbers = RunTimeNumbers(tuple(uses.known), tuple(questions), operands)
    return (replace(measured, numbers=numbers), made[1]) if numbers.holds(uses.known) else None


def _holds(way: Restoration, node: SNode, computed: set[str]) -> bool:
    """Whether what was computed of numbers for these operations is in a way to have data again."""
    return way.holds_arguments and not computed.isdisjoint(op.name for op in way.ops(node))


def _left_behind(graph: DGraph) -> Any:
    """What is returned and left in attributes, with the values in it that are no tensors."""
    writes = [
        (write.path, write.steps, write.kind, write.detached, structure(write.value)) for write in graph.attributes
    ]
    return structure(graph.output), writes


def _operands(
    graph: DGraph, before: DGraph, then: dict[Number, Value], uses: Uses, earlier: RunTimeNumbers | None
) -> Iterator[tuple[Place, Number | Expression]]:
    """Each number of `graph` that differs from the one before, and the expression that gives both.

    Raises `NotFollowed` where there is none, or where an operand is nowhere in the graph.
    """
    for name, leaf in graph.leaves.items():
        constant = before.leaves[name].constant
        if leaf.constant is not None and constant is not None and not same_value(leaf.constant, constant):
            raise NotFollowed  # a tensor is made of it
    candidates = {str(given): given for group in uses.given for given in group}
    found: set[str] = set()
    for mine, other in zip(graph.nodes, before.nodes, strict=True):
        for place, value in _arguments(mine.call):
            known = earlier.operands.get((mine.name, place)) if earlier is not None else None
            text = str(known) if known is not None else ""
            if known is None and same_value(value, _at(other.call, place)):
                continue
            if known is None:
                wanted = (_at(other.call, place), value)
                texts = [t for t, given in candidates.items() if _gives(given, then, uses.known, wanted)]
                text = texts[0] if len(texts) == 1 else ""  # two that were equal in both traces may differ later
            if text not in candidates or not _may_be_operand(mine.call, place):
                raise NotFollowed
            found.add(text)
            yield (mine.name, place), candidates[text]
        if _differs_deeper(mine.call, other.call) or _expected(mine.call) != _expected(other.call):
            raise NotFollowed
    for group in uses.given:
        flat = all(is_same(evaluated(given, then), evaluated(given, uses.known)) for given in group)
        if not flat and found.isdisjoint(map(str, group)):
            raise NotFollowed


def _questions(
    then: dict[Number, Value],
    uses: Uses,
    operands: dict[Place, Number | Expression],
    earlier: RunTimeNumbers | None,
) -> Iterator[Question]:
    """What later numbers must answer as these do: all that was asked, and of which kind operands are."""
    yield from uses.questions
    texts = {str(expression) for expression in operands.values()}
    for group in uses.given:
        for given in group:
            value = evaluated(given, uses.known)
            kind = Expression(f"kind of {given}", kind_of, (given,))
            yield Question(kind, kind_of(value))
        if texts.isdisjoint(map(str, group)):  # it was the same with both numbers: a plan is for those with which it is
            yield Question(group[0], evaluated(group[0], uses.known))


def _gives(
    given: Number | Expression, then: dict[Number, Value], now: dict[Number, Value], wanted: tuple[Any, Any]
) -> bool:
    return is_same(evaluated(given, then), wanted[0]) and is_same(evaluated(given, now), wanted[1])


def _arguments(call: Call) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The arguments that are numbers themselves, each with its place."""
    for place, value in [
        *(((0, i), v) for i, v in enumerate(call.args)),
        *(((1, k), v) for k, v in call.kwargs.items()),
    ]:
        if type(value) in (int, float):
            yield place, value


def _at(call: Call, place: tuple[Any, ...]) -> Any:
    return call.args[place[1]] if place[0] == 0 else call.kwargs[place[1]]


def _expected(call: Call) -> str:
    """What a guard holds data to."""
    return repr(call.function.expected) if isinstance(call.function, Guard) else ""


def _differs_deeper(mine: Call, other: Call) -> bool:
    """Whether anything but a number that is an argument itself differs."""
    plain = [
        Call(
            call.function,
            tuple(None if type(a) in (int, float) else a for a in call.args),
            {key: None if type(a) in (int, float) else a for key, a in call.kwargs.items()},
        )
        for call in (mine, other)
    ]
    return next(argument_pairs(plain[0], plain[1], {}, {}), None) is not None


def _may_be_operand(call: Call, place: tuple[Any, ...]) -> bool:
    """Whether an operation takes a number there that decides no shape."""
    if not isinstance(call.function, OpOverload):
        return False
    arguments = call.function._schema.arguments
    if place[0] == 0:
        argument = arguments[place[1]]
    else:
        argument = next(one for one in arguments if one.name == place[1])
    kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    return kind in _OPERANDS
