"""One schedule for all calls of a family: code that reads sizes from its tables, and the tables of each call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rk_solvers import Schedule
from rkgb.ir.kgraph import KGraph
from rockmate.families.aligned import AtPoint, numbers_in
from rockmate.families.family import Family
from rockmate.families.polynomials import Point
from rockmate.guards.attributes import BoundSettings
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.resting.tensor import changes
from rockmate.runtime.codegen import CompiledProgram, compile_program
from rockmate.runtime.lowering import make_program
from rockmate.runtime.runner import Runner
from rockmate.runtime.sized import Layout, Size, SizedCode
from rockmate.runtime.tables import ForgottenTensor, SavingOp, StepTables


class SizedPlan:
    """A schedule of a family, with the code that follows it."""

    def __init__(self, family: Family, decisions: PortablePlan, schedule: Schedule) -> None:
        self.family = family
        self.decisions = decisions
        self.schedule = schedule  # of these decisions: names, which are those of all sizes
        whole = family.base.graphs.K_graph
        graph = replace(whole, restorations={node: whole.restorations[node] for node in family.ways})
        self.program = make_program(graph, schedule)
        self._functions: dict[str, Any] = {}  # of a point, by the text under which code looks up their values
        self._saved = {
            (slot.op, slot.index): family.saved[slot.op][slot.index]
            for slots in self.program.slots.values()
            for slot in slots
        }
        self._code = self._sized(graph)
        self._saved_at, self._functions_at = AtPoint(self._saved), AtPoint(self._functions)
        # By module: for parameters that rested at a time, checked or not.
        self._compiled: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[int, bool], CompiledProgram]] = (
            weakref.WeakKeyDictionary()
        )

    def compiled_at(self, point: Point, module: torch.nn.Module, checked: bool = False) -> CompiledProgram:
        """The code for `module`, with the tables of calls of these sizes; `checked`, it compares every shape."""
        compiled = self._compiled_for(module, checked)
        return replace(compiled, tables=self._tables_at(point, compiled.tables, checked))

    def _compiled_for(self, module: torch.nn.Module, checked: bool) -> CompiledProgram:
        known = self._compiled.setdefault(module, {})
        if (key := (changes(), checked)) not in known:
            for other in [other for other in known if other[0] != key[0]]:
                del known[other]
            header = (
                f"{type(module).__name__} for calls of several sizes: generated code, to be read and stepped through."
            )
            known[key] = compile_program(self.program, module, header, sized=replace(self._code, is_checked=checked))
        return known[key]

    def _sized(self, graph: KGraph) -> SizedCode:
        family = self.family
        made = {slot.tensor.source for slots in self.program.slots.values() for slot in slots}
        calls = {
            name: replace(call, args=self._written(call.args), kwargs=self._written(call.kwargs))
            for name, call in family.calls.items()
        }
        return SizedCode(
            calls=calls,
            values={name: self._written(layout) for name, layout in family.layouts.items() if name in made},
            saved={key: self._written(layout) for key, layout in self._saved.items()},
            symbols=family.symbols(),
        )

    def _written(self, tree: Any) -> Any:
        """`tree` as code has it: with a `Size` in the place of each function."""

        def size(function: Any) -> Size:
            text = str(function)
            self._functions[text] = function
            return Size(text)

        return numbers_in(tree, size)

    def _tables_at(self, point: Point, tables: StepTables, checked: bool) -> StepTables:
        lies: Mapping[tuple[str, int], Layout] = self._saved_at(point)
        saving = {
            op: SavingOp(
                known.saved_count,
                {place: ForgottenTensor(one.segment, *lies[op, place]) for place, one in known.forgotten.items()},
                known.kept,
                known.is_whole,
                checked,
            )
            for op, known in tables.saving.items()
        }
        ways = self.family.at(point, "ways")
        packs, unpacks = dict(tables.packs), dict(tables.unpacks)
        for one in self.program.restored.values():
            way = next(found for found in ways[one.node] if found.key(one.node) == one.key)
            packs[one.key], unpacks[one.key] = way.pack, (way.unpack, one.kept)
        shapes = self.family.at(point, "shapes") if checked else {}
        sizes = self._functions_at(point)
        return replace(tables, saving=saving, packs=packs, unpacks=unpacks, sizes=sizes, shapes=shapes)


@dataclass(eq=False, slots=True)
class PlanOfSize(LoweredPlan):
    """The plan of calls of some sizes: a `SizedPlan`, at a point."""

    sized: SizedPlan = field(kw_only=True)
    point: Point = field(kw_only=True)

    def runner_for(
        self,
        module: torch.nn.Module,
        measured: Measured,
        settings: BoundSettings | None = None,
        checked: bool = False,
    ) -> Runner:
        """What calls the code with the tables of these sizes; `checked`, for the first call of them."""
        compiled = self.sized.compiled_at(self.point, module, checked)
        bound = settings or measured.settings.bound_to(module)
        graph = measured.graphs.D_graph
        return self.moving(
            Runner(module, graph, measured.pattern, measured.traits, bound, compiled, None, may_be_refused=checked)
        )
