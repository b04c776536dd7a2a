"""One plan of a module with all that belongs to it: what was measured, what runs it, and when it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from rkgb import RockmateError, Sample
from rkgb.devices.registry import device_of
from rockmate.errors import PlanMismatch
from rockmate.families.sized_plan import PlanOfSize
from rockmate.guards.attributes import BoundSettings, Settings
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits, TraitsReader
from rockmate.memory.split import gradient_is_there, gradients_made, gradients_there, parameter_at
from rockmate.plan_files.alike import covers
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.planning.refusal import tell_of_lack
from rockmate.runtime.runner import Runner


@dataclass(eq=False, slots=True)
class Specialization:
    """A plan, what was measured for it, and what runs it."""

    model: torch.nn.Module
    measured: Measured
    planned: LoweredPlan
    _runner: Runner | None = None
    # Compared with what the module held when it was planned, or copied: a tensor put there since is another.
    _settings: BoundSettings | None = None
    _found_gradients: int = 0  # calls that found all gradients there, of which the plan makes some
    uses: int = 0  # calls since it was made
    ahead: bool = False  # made before such a call came
    losses_bytes: tuple[int, ...] = ()  # what steps took between forward and backward, above what is assumed
    loss_is_settled: bool = False  # what its loss takes was seen in a step, or cannot be
    why_above: str = ""  # why its step takes more than the budget, where it does

    @staticmethod
    def of(model: torch.nn.Module, measured: Measured, planned: LoweredPlan) -> Specialization:
        """A plan that is there already, for `model`: the module that was planned, or a copy of it."""
        made = Specialization(model, measured, planned)
        made._make_runner()
        return made

    @property
    def runner(self) -> Runner:
        """What calls the plan's code, which reads the parts that the module has now."""
        if self._runner is None or not self._runner.is_of_now:
            return self._make_runner()
        return self._runner

    def _make_runner(self) -> Runner:
        runner = self._runner = self.planned.runner_for(self.model, self.measured, self._settings)
        runner.on_lack(partial(tell_of_lack, self.measured, self.plan, type(self.model).__name__))
        self._settings = runner.settings
        return runner

    @property
    def bound_settings(self) -> BoundSettings | None:
        """What the module held when it was planned; None where that is not bound yet."""
        return self._settings

    def let_go(self) -> None:
        """The module has other parts now: neither run those that the code reads, nor keep them."""
        self._runner = None

    def threads_mismatch(self) -> PlanMismatch | None:
        """Why its peak may be another now: libraries take scratch memory for each thread of the CPU's."""
        now, then = torch.get_num_threads(), self.measured.threads
        if now == then or not device_of(self.measured.device).is_host:
            return None
        return PlanMismatch(
            f"PyTorch runs with {now} threads, but ran with {then} when the module was planned. Put it back, or plan "
            "the module again."
        )

    def gradients_mismatch(self) -> PlanMismatch | None:
        """Why the plan does not hold before the gradients that are there now; None where it does.

        It holds where more are there than it was made for: then a step takes less than it may.
        """
        if not self.measured.gradients:
            return None
        missing = self.measured.gradients - gradients_there(self.model, self.measured.graphs.D_graph)
        if not missing:
            return None
        path = self.measured.graphs.D_graph.leaves[min(missing)].path
        return PlanMismatch(
            f"{len(missing)} of {len(self.measured.gradients)} gradients that a step was planned to add to are not "
            f"there, such as that of {path!r}: a step that makes them takes more. Put them back: keep gradients "
            "between steps by zero_grad(set_to_none=False), or set each parameter's grad to zeros before the step."
        )

    def gradients_now(self) -> frozenset[str]:
        """Those that a step would make, by the names of their parameters in the graph, and that are there already."""
        graphs = self.measured.graphs
        return gradients_there(self.model, graphs.D_graph).intersection(gradients_made(graphs))

    def is_due_for_another(self, habit: int) -> bool:
        """Told of each call: whether it is the one of that number which finds all gradients there.

        Only of a plan that makes some of them, and recomputes to have room for them, so that another one would gain.
        """
        if not self._would_gain():
            return False
        self._found_gradients += 1
        return self._found_gradients == habit

    def is_for_calls_of(self, other: Specialization) -> bool:
        """Whether the two are for the same calls and modules, whatever gradients are there."""
        return self.measured.pattern == other.measured.pattern and self.measured.traits == other.measured.traits

    def _would_gain(self) -> bool:
        if self.plan.keeps_all or self.measured.residents is not None:
            return False
        made = gradients_made(self.measured.graphs).keys()
        if self.measured.gradients >= made:
            return False
        leaves = self.measured.graphs.D_graph.leaves
        return all(gradient_is_there(parameter_at(self.model, leaves[name].path)) for name in made)

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
    def is_by_size(self) -> bool:
        """Whether it is of a family: made for its sizes, which were not measured."""
        return isinstance(self.planned, PlanOfSize)

    @property
    def exceeds(self) -> bool:
        """Whether its step takes more than the budget: no plan was found that takes less."""
        return self.plan.exceeds

    @property
    def decisions(self) -> PortablePlan:
        """What the plan recomputes, for others to follow."""
        return PortablePlan.of(self.plan.schedule, self.plan.solver)

    def covers(self, other: Specialization) -> bool:
        """Whether this plan, some of whose numbers are free, holds wherever the other does."""
        return covers(self.measured, other.measured)


@dataclass(eq=False, slots=True)
class InferenceCall:
    """Calls whose outputs no gradient reaches: the module itself runs them, and autograd saves nothing."""

    pattern: CallPattern
    traits: ModuleTraits
    settings: BoundSettings

    @staticmethod
    def of(model: torch.nn.Module, call: Sample) -> InferenceCall:
        """Such calls as `call`, on the module as it is."""
        settings = Settings.read_by(model, call).bound_to(model)
        return InferenceCall(CallPattern.of(call), TraitsReader(model).read(), settings)

    def holds(self, call: Sample, traits: ModuleTraits) -> bool:
        """Whether `call` is one of them."""
        return (
            self.pattern.mismatch(call) is None
            and traits.mismatch(self.traits) is None
            and self.settings.difference() is None
        )
