"""One plan of a module with all that belongs to it: what was measured, what runs it, and when it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rkgb import RockmateError, Sample
from rockmate.plan import Plan
from rockmate.planning.follow import Decisions
from rockmate.planning.measured import Measured
from rockmate.planning.planner import Planned
from rockmate.running.module_traits import ModuleTraits, TraitsReader
from rockmate.running.pattern import CallPattern
from rockmate.running.runner import Runner
from rockmate.running.settings import BoundSettings, Settings


@dataclass(eq=False, slots=True)
class Member:
    """A plan, what was measured for it, and what runs it."""

    model: torch.nn.Module
    measured: Measured
    planned: Planned
    _runner: Runner | None = None
    # Compared with what the module held when it was planned, or copied: a tensor put there since is another.
    _settings: BoundSettings | None = None

    @staticmethod
    def of(model: torch.nn.Module, measured: Measured, planned: Planned) -> Member:
        """A plan that is there already, for `model`: the module that was planned, or a copy of it."""
        runner = planned.runner_for(model, measured)
        return Member(model, measured, planned, runner, runner.settings)

    @property
    def runner(self) -> Runner:
        """What calls the plan's code, which reads the parts that the module has now."""
        if self._runner is None:
            self._runner = self.planned.runner_for(self.model, self.measured, self._settings)
            self._settings = self._runner.settings
        return self._runner

    def let_go(self) -> None:
        """The module has other parts now: neither run those that the code reads, nor keep them."""
        self._runner = None

    def mismatch(self, call: Sample, traits: ModuleTraits) -> RockmateError | None:
        """Why the plan does not hold for `call` on the module as it is, with `traits`; None where it does."""
        if self._runner is None:  # then there may be no such parts any more
            refusal = self.measured.pattern.mismatch(call) or traits.mismatch(self.measured.traits)
            if refusal is not None:
                return refusal
        return self.runner.mismatch(call, traits)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.planned.plan

    @property
    def decisions(self) -> Decisions:
        """What the plan recomputes, for others to follow."""
        return Decisions.of(self.measured.problem, self.plan.recompute, self.plan.solver)

    def is_like(self, other: Member) -> bool:
        """Whether the two differ in what the module read out of the data, and in nothing else."""
        same_calls = self.measured.pattern == other.measured.pattern
        return same_calls and self.measured.traits == other.measured.traits


@dataclass(eq=False, slots=True)
class Untrained:
    """Calls whose outputs no gradient reaches: the module itself runs them, and autograd saves nothing."""

    pattern: CallPattern
    traits: ModuleTraits
    settings: BoundSettings

    @staticmethod
    def of(model: torch.nn.Module, call: Sample) -> Untrained:
        """Such calls as `call`, on the module as it is."""
        settings = Settings.read_by(model, call).bound_to(model)
        return Untrained(CallPattern.of(call), TraitsReader(model).read(), settings)

    def holds(self, call: Sample, traits: ModuleTraits) -> bool:
        """Whether `call` is one of them."""
        return (
            self.pattern.mismatch(call) is None
            and traits.mismatch(self.traits) is None
            and self.settings.difference() is None
        )
