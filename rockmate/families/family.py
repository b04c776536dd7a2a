"""Calls that differ in sizes alone: what was measured of a few of them tells all that others take, and what they run.

A family is made of three or more calls that were planned one by one. Each was traced by itself; where the traces have
the same operations in the same order, what differs in them is a function of the sizes that differ in the calls:

* Numbers that Python computed are followed by the front end (`rkgb.sizes`): they are what Python would compute. What
  Python decided by sizes is asked again, and a call with another answer is not of the family.
* Shapes, strides and bytes are polynomials, found from the calls that were measured (`polynomials`). The first step
  with other sizes compares each shape, and each tensor that autograd saves, with what was computed.
* Times are interpolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rk_solvers import Problem
from rkgb import AllGraphs
from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, is_ref
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.profiles import OpProfile
from rkgb.ir.sgraph import SNode
from rkgb.ir.values import ValueInfo
from rkgb.replay.same import same_operation, same_value
from rkgb.sizes import SizeRead
from rkgb.state.generators import OwnGenerator
from rkgb.tree import attributes_of
from rockmate.families.aligned import AtPoint, NotAligned, aligned
from rockmate.families.formulas import Fixed, Formula, Unfollowed, formula
from rockmate.families.polynomials import NotWhole, Point, Polynomial, constant, symbol_name
from rockmate.families.stages import with_common_stages
from rockmate.guards.inputs import CallPattern
from rockmate.planning.measured import Measured, problem_of
from rockmate.regions.any_size import AtAnySize, code_of, has_parts_of_one_size

LEAST_MEMBERS = 3
Position = tuple[int, int]  # a tensor of a call, and one of its dimensions


@dataclass(eq=False, slots=True)
class Family:
    """What was measured of a few calls, as functions of their sizes."""

    base: Measured  # one of the calls, whose graphs stand for all
    positions: tuple[tuple[Position, ...], ...]  # by symbol: the dimensions that have its size
    points: tuple[Point, ...]  # those that were measured
    traits: Any  # of the tensors of a call
    calls: Mapping[str, Call]  # by operation, where its arguments vary
    questions: tuple[tuple[Formula, Any], ...]
    shapes: Mapping[str, tuple[Any, ...]]  # by value
    layouts: Mapping[str, Any]  # by value or phantom: size, stride and offset
    saved: Mapping[str, tuple[Any, ...]]  # by operation: those of each tensor that autograd saves
    ways: Mapping[SNode, tuple[Any, ...]]  # of having data again
    problem: Mapping[str, Any]  # the fields of a `Problem`
    sizes: Mapping[Polynomial, str] = field(init=False)  # each that varies, with a value that has it
    parts: Mapping[str, Any] = field(init=False)  # by compiled part: how its inputs lie, and its numbers
    _parts: dict[str, AtPoint] = field(default_factory=dict)  # by name, those that were asked for
    _told: dict[Point, str] = field(default_factory=dict)  # why a point is none of the family; empty where it is one

    def __post_init__(self) -> None:
        named = ((size, name) for name, shape in self.shapes.items() for size in shape)
        self.sizes = {size: name for size, name in named if isinstance(size, Polynomial)}
        self.parts = {
            name: ([self.layouts[one] for one in call.inputs], call.args[-call.function.count :])
            for name, call in self.calls.items()
            if isinstance(call.function, AtAnySize)
        }

    def point_of(self, pattern: CallPattern) -> Point | None:
        """The sizes of such a call; None where it is none of the family."""
        if pattern.autocast != self.base.pattern.autocast or len(pattern.traits) != len(self.base.pattern.traits):
            return None
        point = []
        for positions in self.positions:
            try:
                sizes = {pattern.traits[tensor].shape[dimension] for tensor, dimension in positions}
            except IndexError:
                return None
            if len(sizes) != 1:
                return None
            point.append(sizes.pop())
        return tuple(point) if not self._why_not(tuple(point)) and self._has_traits(tuple(point), pattern) else None

    @property
    def own_point(self) -> Point:
        """The sizes of `base`."""
        traits = self.base.pattern.traits
        return tuple(traits[tensor].shape[dimension] for ((tensor, dimension), *_) in self.positions)

    def at(self, point: Point, part: Literal["problem", "traits", "shapes", "ways", "parts"]) -> Any:
        """A part of it at these sizes. Raises `NotWhole`."""
        if part not in self._parts:
            self._parts[part] = AtPoint(getattr(self, part))
        return self._parts[part](point)

    def problem_at(self, point: Point) -> Problem:
        """The training step of a call of these sizes. Raises `NotWhole`."""
        parts = self.at(point, "problem")
        # Bounds of the two may cross, where what they bound does not.
        parts["backward"] = tuple(
            op if op.peak_bytes >= op.resident_bytes else replace(op, peak_bytes=op.resident_bytes)
            for op in parts["backward"]
        )
        try:
            return Problem(**parts)
        except ValueError as error:  # such as sizes below 0
            raise NotWhole(str(error)) from error

    def symbols(self) -> tuple[str, ...]:
        """What the symbols stand for, as text."""
        tensors = [f"input_{tensor}.shape[{dimension}]" for ((tensor, dimension), *_) in self.positions]
        return tuple(f"{symbol_name(index)} = {text}" for index, text in enumerate(tensors))

    def _has_traits(self, point: Point, pattern: CallPattern) -> bool:
        return bool(self.at(point, "traits") == pattern.traits)

    def _why_not(self, point: Point) -> str:
        if point not in self._told:
            if len(self._told) > _MOST_TOLD:
                self._told.clear()
            self._told[point] = self._refusal(point)
        return self._told[point]

    def _refusal(self, point: Point) -> str:
        """Why calls of these sizes may run other operations than the family does; empty where they do not."""
        if min(point) < _LEAST_SIZE:
            return "sizes of 0 and 1 are broadcast, and lead to other operations"
        try:
            for asked, answer in self.questions:
                given = asked.at(point)
                if type(given) is not type(answer) or given != answer:
                    return f"Python asks for {asked}, which is {given}, and was {answer}"
            for size, name in self.sizes.items():
                if (found := size.at(point)) < _LEAST_SIZE:
                    return f"%{name} has a size of {found}"
            for part, (layouts, numbers) in self.at(point, "parts").items():
                function = self.calls[part].function
                assert isinstance(function, AtAnySize)
                if not function.holds([layout[:2] for layout in layouts], numbers):
                    return f"%{part} was compiled for other sizes"
        except (NotWhole, ArithmeticError, ValueError) as error:
            return str(error)
        return ""


_MOST_TOLD = 4096
_LEAST_SIZE = 2


def family_of(members: Sequence[Measured]) -> Family | None:
    """The family of these calls; None where they differ in more than sizes, or sizes are not followed."""
    try:
        return _Alignment(members).family() if len(members) >= LEAST_MEMBERS else None
    except (NotAligned, Unfollowed):
        return None


class _Alignment:
    """Compares what was measured of several calls, part by part. Raises `NotAligned` and `Unfollowed`."""

    def __init__(self, members: Sequence[Measured]) -> None:
        # A plan of a step that makes a gradient holds where the gradient is there already, too.
        gradients = frozenset[str].intersection(*(member.gradients for member in members))
        members = [_with_assumed_loss(member) for member in with_common_stages(members)]
        self._members = members = [_above(member, gradients) for member in members]
        self._base = members[0]
        self._graphs = [member.graphs.D_graph for member in members]
        self._positions = self._varying_positions()
        self._points = tuple(self._point(member) for member in members)
        if not self._positions or len(set(self._points)) < len(members) or min(map(min, self._points)) < _LEAST_SIZE:
            raise NotAligned("sizes")

    def family(self) -> Family:
        self._refuse_other_steps()
        self._refuse_other_graphs()
        names = self._base.graphs.D_graph.values
        layouts: dict[str, Any] = {name: self._layout_of_value(name) for name in names}
        self._shapes = {name: layouts[name][0] for name in names}
        calls = dict(self._calls())
        saved = {name: self._saved(name, layouts) for name in self._base.graphs.K_graph.op_profiles}
        ways, problem = self._ways_and_problem()
        varying = {
            name: shape for name, shape in self._shapes.items() if any(isinstance(size, Polynomial) for size in shape)
        }
        traits = self._aligned([member.pattern.traits for member in self._members])
        questions = tuple(dict.fromkeys(self._questions()))
        return Family(
            self._base, self._positions, self._points, traits, calls, questions, varying, layouts, saved, ways, problem
        )

    # ---- the calls --------------------------------------------------------------------------------

    def _varying_positions(self) -> tuple[tuple[Position, ...], ...]:
        shapes = [[traits.shape for traits in member.pattern.traits] for member in self._members]
        if any(len(one) != len(shapes[0]) or list(map(len, one)) != list(map(len, shapes[0])) for one in shapes):
            raise NotAligned("tensors")
        groups: dict[tuple[int, ...], list[Position]] = {}
        for tensor, shape in enumerate(shapes[0]):
            for dimension in range(len(shape)):
                sizes = tuple(one[tensor][dimension] for one in shapes)
                if len(set(sizes)) > 1:
                    groups.setdefault(sizes, []).append((tensor, dimension))
        return tuple(map(tuple, groups.values()))

    def _point(self, member: Measured) -> Point:
        return tuple(member.pattern.traits[tensor].shape[dimension] for ((tensor, dimension), *_) in self._positions)

    def _refuse_other_steps(self) -> None:
        for member in self._members:
            if member.residents is not None or member.numbers is not None:
                raise NotAligned("a budget for all of training, or free numbers")
            if (member.graphs.B_graph.questions is None) != (self._base.graphs.B_graph.questions is None):
                raise NotAligned("front ends")
            for fact in ("traits", "pinned", "device", "threads"):
                if getattr(member, fact) != getattr(self._base, fact):
                    raise NotAligned(fact)
            if member.settings.by_place != self._base.settings.by_place:
                raise NotAligned("settings")
            mine, other = member.pattern, self._base.pattern
            if (mine.skeleton, mine.autocast, mine.flags) != (other.skeleton, other.autocast, other.flags):
                raise NotAligned("arguments")

    # ---- the graphs -------------------------------------------------------------------------------

    def _refuse_other_graphs(self) -> None:
        base = self._graphs[0]
        for graph in self._graphs[1:]:
            if len(graph.nodes) != len(base.nodes) or graph.values.keys() != base.values.keys():
                raise NotAligned("operations")
            if not all(map(same_operation, graph.nodes, base.nodes)):
                raise NotAligned("operations")
            for name, leaf in base.leaves.items():
                if name not in graph.leaves or not _is_same_leaf(leaf, graph.leaves[name]):
                    raise NotAligned(name)
            if not _is_same_tree(graph.output, base.output):
                raise NotAligned("output")
            if any(getattr(graph, part) != getattr(base, part) for part in ("trained", "assumed", "varying", "handed")):
                raise NotAligned("outputs")
            if graph.attributes or base.attributes or graph.varying or len(graph.generators) != len(base.generators):
                raise NotAligned("attributes, shapes that depend on data, or generators")
            if any(isinstance(op.call.function, OpaqueCall) for op in graph):
                raise NotAligned("operations of which nothing is known")
            if list(map(code_of, graph)) != list(map(code_of, base)) or has_parts_of_one_size(graph):
                raise NotAligned("code compiled for one set of sizes")
            for name, value in base.values.items():
                other = graph.values[name]
                facts = ("dtype", "device", "requires_grad", "owner")
                if any(getattr(value, fact) != getattr(other, fact) for fact in facts):
                    raise NotAligned(name)

    def _layout_of_value(self, name: str) -> Any:
        return self._aligned([_layout(graph.values[name]) for graph in self._graphs])

    def _calls(self) -> Iterator[tuple[str, Call]]:
        """Calls in whose arguments something varies."""
        for nodes in zip(*(graph.nodes for graph in self._graphs), strict=True):
            calls = [node.call for node in nodes]
            function = calls[0].function
            if isinstance(function, CompiledCall) and function.numbers:
                any_size = function.kernels[0].any_size
                assert any_size is not None
                numbers = self._aligned([tuple(one.function.numbers) for one in calls])
                yield nodes[0].name, Call(AtAnySize(function, any_size), (*calls[0].args, *numbers))
                continue
            args, kwargs = self._arguments(calls)
            if args is not calls[0].args or kwargs is not calls[0].kwargs:
                yield nodes[0].name, Call(calls[0].function, args, kwargs)

    def _arguments(self, calls: Sequence[Call]) -> tuple[Any, Any]:
        given = [(call.args, call.kwargs) for call in calls]
        sizes = [call.sizes for call in calls]
        if any(one is None for one in sizes):
            # What an operation is made of, or computed of a shape that is compared with what it is to be; or recorded
            # in a forward that computes polynomials of sizes alone.
            args, kwargs = self._aligned(given)
            return args, kwargs
        paths = {path for one in sizes if one is not None for path in one}
        if any(one is None or one.keys() != paths for one in sizes):
            raise Unfollowed("arguments")
        for path in sorted(paths, key=repr):
            found = self._formula([one[path] for one in sizes if one is not None])
            if isinstance(found, Fixed):
                continue
            given = [_with(tree, path, found) for tree in given]
        args, kwargs = given[0]
        if any(not _is_same_tree(tree, given[0]) for tree in given):
            raise Unfollowed("arguments")
        return args if any(path[0] == 0 for path in paths) else calls[0].args, (
            kwargs if any(path[0] == 1 for path in paths) else calls[0].kwargs
        )

    def _questions(self) -> Iterator[tuple[Formula, Any]]:
        if any(member.asked_sizes is None for member in self._members):
            raise Unfollowed("sizes")
        asked = [(*(one.graphs.B_graph.questions or ()), *(one.asked_sizes or ())) for one in self._members]
        if any(len(one) != len(asked[0]) for one in asked):
            raise Unfollowed("questions")
        for questions in zip(*asked, strict=True):
            found = self._formula([question.asked for question in questions])
            answers = [question.answer for question in questions]
            if any(type(answer) is not type(answers[0]) or answer != answers[0] for answer in answers):
                raise Unfollowed(str(found))
            if isinstance(found, (Formula, Polynomial)):
                yield (found if isinstance(found, Formula) else Formula("int", (found,))), answers[0]

    def _formula(self, expressions: Sequence[Any]) -> Any:
        found = formula(expressions, self._size_read, len(self._positions))
        if isinstance(found, Polynomial) and found.constant is not None:
            return found.constant
        return found

    def _size_read(self, read: Sequence[SizeRead]) -> Polynomial:
        first = read[0]
        if any((one.value, one.dimension) != (first.value, first.dimension) for one in read):
            raise Unfollowed(str(first))
        known = self._shapes.get(first.value)
        size = self._aligned([one.seen for one in read]) if known is None else known[first.dimension]
        return size if isinstance(size, Polynomial) else constant(size, len(self._positions))

    # ---- what was measured ------------------------------------------------------------------------

    def _saved(self, op: str, layouts: dict[str, Any]) -> tuple[Any, ...]:
        """Where in their storages the tensors lie that autograd saves; phantoms are added to the `layouts`."""
        profiles = [member.graphs.K_graph.op_profiles[op] for member in self._members]
        facts = [[(one.kind, one.source, one.refillable) for one in profile.saved] for profile in profiles]
        names = [[phantom.name for phantom in profile.phantoms] for profile in profiles]
        if any(one != facts[0] for one in facts) or any(one != names[0] for one in names):
            raise NotAligned(op)
        found = tuple(self._aligned(list(one)) for one in zip(*map(saved_layouts, profiles), strict=True))
        for tensor, layout in zip(profiles[0].saved, found, strict=True):
            if tensor.source in names[0]:
                layouts.setdefault(tensor.source, layout)
        return found

    def _ways_and_problem(self) -> tuple[dict[SNode, tuple[Any, ...]], Any]:
        """Ways to have data again that are there in all calls, and the problem with these."""
        wholes = [member.graphs.K_graph for member in self._members]
        by_name = [{node.name: ways for node, ways in whole.restorations.items()} for whole in wholes]
        kinds = [
            {name: [(type(way), way.key(node)) for way in whole.restorations[node]] for node, name in _named(whole)}
            for whole in wholes
        ]
        common = {name for name in kinds[0] if all(one.get(name) == kinds[0][name] for one in kinds)}
        problems = []
        if any(member.chain != self._base.chain for member in self._members):
            raise NotAligned("blocks")
        for member, whole in zip(self._members, wholes, strict=True):
            if common != {node.name for node in whole.restorations}:
                kept = {node: ways for node, ways in whole.restorations.items() if node.name in common}
                graphs = replace(member.graphs, K_graph=replace(whole, restorations=kept))
                problems.append(problem_of(graphs, member.loss, None, member.gradients)[0])
            else:
                problems.append(member.problem)
        node_of = {node.name: node for node in wholes[0].restorations}
        ways = {node_of[name]: self._aligned([one[name] for one in by_name]) for name in sorted(common)}
        parts = [{part.name: getattr(one, part.name) for part in fields(one)} for one in _repeated_alike(problems)]
        return ways, aligned(parts, self._points, device_of(self._base.device).allocated_bytes(1))

    def _aligned(self, trees: Sequence[Any]) -> Any:
        return aligned(trees, self._points)


def _layout(value: ValueInfo) -> Any:
    return tuple(value.shape), tuple(value.stride), value.offset


def saved_layouts(profile: OpProfile) -> tuple[Any, ...]:
    """Size, stride and offset of each tensor that autograd saves for an operation."""
    return tuple((one.size, one.stride, one.offset) for one in profile.saved)


def value_layouts(graphs: AllGraphs) -> dict[str, Any]:
    """Size, stride and offset of each value and phantom."""
    found = {name: _layout(value) for name, value in graphs.D_graph.values.items()}
    for profile in graphs.K_graph.op_profiles.values():
        phantoms = {phantom.name for phantom in profile.phantoms}
        for tensor, layout in zip(profile.saved, saved_layouts(profile), strict=True):
            if tensor.source in phantoms:
                found.setdefault(tensor.source, layout)
    return found


def _above(member: Measured, gradients: frozenset[str]) -> Measured:
    """What was measured, for steps before which these gradients are there."""
    if member.gradients == gradients:
        return member
    problem, chain = problem_of(member.graphs, member.loss, None, gradients)
    return replace(member, gradients=gradients, problem=problem, chain=chain)


def _with_assumed_loss(member: Measured) -> Measured:
    """What was measured, without what a step of this size alone has shown of the loss: others have shown nothing."""
    if member.loss is None or not member.loss.is_seen:
        return member
    problem, chain = problem_of(member.graphs, None, None, member.gradients)
    return replace(member, loss=None, problem=problem, chain=chain)


def _named(whole: Any) -> list[tuple[SNode, str]]:
    return [(node, node.name) for node in whole.restorations]


def _repeated_alike(problems: Sequence[Problem]) -> list[Problem]:
    """Where a repetition was timed in some of them alone, it takes what the forward took in the others."""
    times = zip(*([op.repeat_ms for op in problem.forward] for problem in problems), strict=True)
    mixed = {place for place, found in enumerate(times) if None in found and any(ms is not None for ms in found)}
    if not mixed:
        return list(problems)
    return [
        replace(
            problem,
            forward=tuple(
                replace(op, repeat_ms=op.recompute_ms) if place in mixed else op
                for place, op in enumerate(problem.forward)
            ),
        )
        for problem in problems
    ]


def _is_same_leaf(mine: Any, other: Any) -> bool:
    if (mine.kind, mine.path, mine.index) != (other.kind, other.path, other.index):
        return False
    if mine.constant is None or other.constant is None:
        return mine.constant is other.constant
    return same_value(mine.constant, other.constant)


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `tree` with `value` at `path`."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {**tree, step: _with(tree[step], rest, value)}
    items = list(tree)
    items[step] = _with(items[step], rest, value)
    return type(tree)(items)


def _is_same_tree(mine: Any, other: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether two structures with references in them are alike: of arguments, or of what a module returns."""
    if isinstance(mine, (list, tuple)) and type(mine) is type(other) and len(mine) == len(other):
        return all(_is_same_tree(one, two, seen) for one, two in zip(mine, other, strict=True))
    if isinstance(mine, dict) and isinstance(other, dict):
        return mine.keys() == other.keys() and all(_is_same_tree(mine[key], other[key], seen) for key in mine)
    parts, others = attributes_of(mine), attributes_of(other)
    if not parts or is_ref(mine) or type(mine) is not type(other) or isinstance(mine, OwnGenerator):
        return same_value(mine, other)
    return id(mine) in seen or _is_same_tree(parts, others, seen | {id(mine)})
