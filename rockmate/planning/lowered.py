"""A plan, and the program that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from rockmate.guards.attributes import BoundSettings
from rockmate.guards.numbers import RunTimeNumbers
from rockmate.offload.tier import Tier
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.runtime.codegen import CompiledProgram, compile_program
from rockmate.runtime.lowering import Program, make_program
from rockmate.runtime.moves import MovingStep
from rockmate.runtime.runner import Runner
from rockmate.units import format_bytes


@dataclass(eq=False, slots=True)
class LoweredPlan:
    """A plan and the program that follows it."""

    plan: Plan
    program: Program
    header: str
    is_complete: bool = True  # False where the user ended the search
    is_out_of_time: bool = False  # True where the search had to end, and found the plan by then
    tier: Tier | None = None  # where its data move, where some do
    is_taken_over: bool = False  # from a plan of other numbers with the same graph: nothing was measured or solved

    def compile_for(self, module: torch.nn.Module, numbers: RunTimeNumbers | None = None) -> CompiledProgram:
        """Generate and compile the code for `module` (the one planned, or a copy of it)."""
        return compile_program(self.program, module, self.header, numbers)

    def runner_for(self, module: torch.nn.Module, measured: Measured, settings: BoundSettings | None = None) -> Runner:
        """What calls that code in the place of `module`; `settings` are those of a runner that was there before."""
        graph = measured.graphs.D_graph
        compiled = self.compile_for(module, measured.numbers)
        bound = settings or measured.settings.bound_to(module)
        return self.moving(Runner(module, graph, measured.pattern, measured.traits, bound, compiled, measured.numbers))

    def moving(self, runner: Runner) -> Runner:
        """The runner, whose steps move what the plan moves."""
        if self.program.moves is not None and self.tier is not None:
            runner.make_step = partial(MovingStep, moves=self.program.moves, tier=self.tier)
        return runner


def planned_as(plan: Plan, measured: Measured, module: torch.nn.Module, tier: Tier | None = None) -> LoweredPlan:
    """`plan`, made for what was `measured` of `module`, with the program that follows it, and where its data move."""
    program = make_program(measured.graphs.K_graph, plan.schedule)
    header = (
        f"{type(module).__name__} under {format_bytes(plan.budget_bytes)}: generated code, to be read and stepped "
        f"through.\nPredicted peak {format_bytes(plan.peak_bytes)}, overhead {plan.overhead:+.1%}, by {plan.solver}."
    )
    return LoweredPlan(plan, program, header, tier=tier)
