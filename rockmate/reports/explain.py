"""Why a plan keeps or recomputes each tensor, and where its peak is: records made of a plan file alone."""

from __future__ import annotations

import bisect
from collections import defaultdict

from rk_solvers import ForwardOp, Recomputed, Simulation, binding, evaluate, normalise, simulate
from rk_solvers.liveness import Instance
from rk_solvers.transfers.reading import moves_in
from rockmate.plan_files.content import OperationRecord, PlanFile
from rockmate.reports.explanation import MIB, Alive, Decision, Entry, Explanation, Flip, Lifetime, PeakFacts
from rockmate.reports.step import calls_by_name
from rockmate.units import format_bytes, format_ms

__all__ = ["Alive", "Decision", "Entry", "Explanation", "Flip", "Lifetime", "PeakFacts", "explain"]

MOST_FLIPS = 500_000  # tensors times operations: of larger plans, no tensor is tried the other way, in minutes


def explain(plan_file: PlanFile) -> Explanation:
    """Why each tensor of a plan is kept or recomputed, and what its peak is made of. Needs no model.

    Of a plan of many hundred operations (`MOST_FLIPS`), entries have no `flip`; of one that moves data, those alone
    that move.

    Raises `ScheduleError` for a schedule that cannot be read, which none that `plan_files.load` returns has.
    """
    return _Walk(plan_file).explanation()


class _Walk:
    """What all entries are made of, drawn once from a plan file."""

    def __init__(self, plan_file: PlanFile) -> None:
        self.file = plan_file
        self.problem = problem = plan_file.problem
        self.budget_bytes = plan_file.promise.budget_bytes
        schedule = plan_file.parsed_schedule
        self.recomputed = schedule.recomputed
        self.memory = plan_file.promise.memory
        self.simulation: Simulation = simulate(problem, schedule, self.memory)
        self.moving = None
        if self.memory is not None and schedule.offloaded:
            self.moving = moves_in(problem, schedule, self.memory)
        self.lifetimes: dict[int, list[Instance]] = defaultdict(list)  # each stay, by data
        for instance in self.simulation.instances:
            self.lifetimes[instance.data].append(instance)
        self.inputs = {op.name: frozenset(op.inputs) for op in problem.forward}
        self.forward_users = problem.forward_users()
        self.backward_users = problem.backward_users()
        self.main, self.reasons = _main_operations(plan_file)
        self.calls = calls_by_name(plan_file)
        self.texts = {value.name: value.text for op in plan_file.graph.operations for value in op.makes}
        costs = [self._mib_cost(index) for index in range(len(problem.data))]
        self.ranked = sorted(cost for cost in costs if cost is not None)

    def _mib_cost(self, item: int) -> float | None:
        """Of what may be recomputed, what a MiB of it costs; None for what may not be, or need not."""
        data = self.problem.data[item]
        producer = self.problem.forward[data.producer]
        if item in self.problem.held or not producer.recomputable or not self.backward_users[item]:
            return None
        return producer.recompute_ms * MIB / data.size_bytes if data.size_bytes else float("inf")

    def explanation(self) -> Explanation:
        entries = tuple(self._entry(item) for item in range(len(self.problem.data)))
        binding_op, binding_bytes = binding(self.problem)
        decisions = {entry.name: entry.decision for entry in entries}
        return Explanation(
            entries=entries,
            peak=self._peak(decisions),
            budget_bytes=self.budget_bytes,
            time_ms=self.simulation.time_ms,
            binding_op=str(binding_op or ""),
            binding_bytes=binding_bytes,
        )

    # ---- entries -------------------------------------------------------------------------------------

    def _entry(self, item: int) -> Entry:
        problem, data = self.problem, self.problem.data[item]
        producer = problem.forward[data.producer]
        op = self.main.get(producer.name)
        decision = self._decision(item)
        flip = None
        if decision == "moved":
            flip = self._flip_to_stay(item)
        elif self.moving is not None:
            pass  # what is recomputed decides when data may move: another plan would have to be found
        elif decision in ("kept", "recomputed") and len(problem.data) * len(problem.forward) <= MOST_FLIPS:
            flip = self._flip_to_kept(item) if decision == "recomputed" else self._flip_to_recomputed(item)
        return Entry(
            name=data.name,
            kind=data.kind,
            text=self.texts.get(data.name, ""),
            size_bytes=data.size_bytes,
            producer=producer.name,
            function=op.function if op else "",
            module=op.module if op else "",
            source=op.source if op else "",
            decision=decision,
            why=self._why(item, decision, flip),
            cost_ms=producer.recompute_ms,
            recomputed=sum(stay.last > stay.first and not stay.is_back for stay in self.lifetimes[item][1:]),
            idle_ms=self._idle_ms(item),
            lifetimes=tuple(self._timed(stay) for stay in self.lifetimes[item]),
            forward_users=tuple(problem.forward[index].name for index in self.forward_users[item]),
            backward_users=tuple(problem.backward[index].name for index in self.backward_users[item]),
            flip=flip,
        )

    def _timed(self, stay: Instance) -> Lifetime:
        start_ms, end_ms = self.simulation.moments[stay.first].start_ms, self.simulation.moments[stay.last].end_ms
        return Lifetime(stay.first, stay.last, start_ms, end_ms, stay.is_back)

    def _decision(self, item: int) -> Decision:
        stays = self.lifetimes[item]
        if item in self.problem.held:
            return "held"
        if any(stay.last > stay.first and not stay.is_back for stay in stays[1:]):
            return "recomputed"
        if any(stay.is_back for stay in stays):
            return "moved"
        if stays[0].last < len(self.problem.forward) or self._first_use(item) is None:
            return "not needed"
        return "kept" if self.problem.forward[self.problem.data[item].producer].recomputable else "never recomputed"

    def _first_use(self, item: int) -> int | None:
        """The first stage of the backward that uses it, or in which something that uses it is recomputed."""
        for stage, op in enumerate(self.problem.backward):
            if item in op.needs or any(item in self.inputs[name] for name in self.recomputed.get(op.name, ())):
                return stage
        return None

    def _idle_ms(self, item: int) -> float | None:
        """In the step that keeps everything."""
        if not self.backward_users[item]:
            return None
        problem = self.problem
        last = max(self.forward_users[item], default=problem.data[item].producer)
        stage = self.backward_users[item][0]
        between = sum(op.time_ms for op in problem.forward[last + 1 :])
        return between + sum(op.time_ms for op in problem.backward[:stage])

    def _flip_to_kept(self, item: int) -> Flip:
        """The plan without any recomputation of its producer, and of what served that alone."""
        producer = self.problem.forward[self.problem.data[item].producer].name
        plan = {stage: [name for name in names if name != producer] for stage, names in self.recomputed.items()}
        return self._flip(plan, ())

    def _flip_to_recomputed(self, item: int) -> Flip:
        """The plan with its producer recomputed just before the first stage that uses it."""
        problem, producer = self.problem, self.problem.data[item].producer
        stage = self._first_use(item)
        assert stage is not None  # else it would not be called kept
        backward = problem.backward[stage].name
        plan = {**self.recomputed, backward: (*self.recomputed.get(backward, ()), problem.forward[producer].name)}
        step = next(place for place, moment in enumerate(self.simulation.moments) if moment.step.stage == stage)
        missing = [
            problem.data[source].name
            for source in problem.forward[producer].inputs
            if not any(stay.first <= step <= stay.last for stay in self.lifetimes[source])
        ]
        return self._flip(plan, tuple(missing))

    def _flip_to_stay(self, item: int) -> Flip:
        """The plan where it stays in memory, and all else moves as it did."""
        assert self.moving is not None
        base, moves = self.moving
        others = [move for move in moves if move.gap.data != item]
        costs = base.costs(others)
        at = self.simulation.moments[int(base.held(others).argmax())].op
        extra_ms = costs.time_ms - self.simulation.time_ms
        return Flip(costs.peak_bytes, str(at), costs.time_ms, extra_ms, costs.peak_bytes <= self.budget_bytes, ())

    def _flip(self, plan: Recomputed, also_kept: tuple[str, ...]) -> Flip:
        found = evaluate(self.problem, normalise(self.problem, plan))
        extra_ms = found.time_ms - self.simulation.time_ms
        fits = found.peak_bytes <= self.budget_bytes
        return Flip(found.peak_bytes, found.peak_at, found.time_ms, extra_ms, fits, also_kept)

    # ---- why -----------------------------------------------------------------------------------------

    def _why(self, item: int, decision: Decision, flip: Flip | None) -> str:
        data = self.problem.data[item]
        if decision == "held":
            return "It is an output of the model, which stays with its user to the end of the step."
        if decision == "not needed":
            return "Nothing needs it after the forward: it is forgotten after its last use there."
        if decision == "never recomputed":
            reason = self.reasons.get(self.problem.forward[data.producer].name)
            if len(self.lifetimes[item]) > 1:
                return "Its producer is recomputed for another tensor, and this one is not used then."
            return f"Its producer runs once: {reason or 'what it saves cannot be put back by computing it again'}."
        if decision == "moved" and flip is not None:
            return self._why_moved(item, flip)
        if flip is None:
            price = self._price(item)
            return f"{price[0].upper()}{price[1:]}."
        return self._why_recomputed(item, flip) if decision == "recomputed" else self._why_kept(item, flip)

    def _producer(self, item: int) -> ForwardOp:
        return self.problem.forward[self.problem.data[item].producer]

    def _why_moved(self, item: int, flip: Flip) -> str:
        assert self.memory is not None
        size_bytes = self.problem.data[item].size_bytes
        takes = f"{format_ms(self.memory.out.time_ms(size_bytes))} there"
        takes += f" and {format_ms(self.memory.back.time_ms(size_bytes))} back"
        again = f"computing it again would take {format_ms(self._producer(item).recompute_ms)}"
        stays = f"Where it stayed, the peak would be {format_bytes(flip.peak_bytes)}"
        above = "" if flip.fits else f", {format_bytes(flip.peak_bytes - self.budget_bytes)} above the budget"
        return f"{stays}{above}. It takes {takes}, beside the computation; {again}."

    def _why_recomputed(self, item: int, flip: Flip) -> str:
        saved = f"saves {format_ms(-flip.extra_ms)}" if flip.extra_ms < 0 else "saves no time"
        if flip.fits:
            return (
                f"Keeping it would fit the budget by prediction (peak {format_bytes(flip.peak_bytes)}) and {saved}: "
                "the search did not find that, or a real step took more than was predicted."
            )
        over = format_bytes(flip.peak_bytes - self.budget_bytes)
        return (
            f"Keeping it {saved}, but takes the peak to {format_bytes(flip.peak_bytes)} at {flip.peak_op}, {over} "
            f"above the budget; {self._price(item)}."
        )

    def _why_kept(self, item: int, flip: Flip) -> str:
        if not self.recomputed:
            return "The plan fits the budget with everything kept."
        kept = f" (with {_listed(flip.also_kept)} kept for it)" if flip.also_kept else ""
        cost = f"Recomputing it{kept} would take {format_ms(flip.extra_ms)} more"
        if not flip.fits:
            return f"{cost} and lift the peak to {format_bytes(flip.peak_bytes)} at {flip.peak_op}, above the budget."
        if flip.peak_bytes < self.simulation.peak_bytes:
            return (
                f"{cost} for a peak of {format_bytes(flip.peak_bytes)} that the budget does not ask for; "
                f"{self._price(item)}."
            )
        return f"{cost} without lowering the peak, which is at {flip.peak_op}; {self._price(item)}."

    def _price(self, item: int) -> str:
        """Where it stands among all that could be recomputed, by what a MiB costs."""
        cost = self._mib_cost(item)
        if cost is None or cost == float("inf"):
            producer = self.problem.forward[self.problem.data[item].producer]
            return f"recomputing it costs {format_ms(producer.recompute_ms)}"
        cheaper = bisect.bisect_left(self.ranked, cost)
        return f"at {cost:.3g} ms per MiB, {cheaper} of {len(self.ranked)} tensors are cheaper to recompute"

    # ---- the peak ------------------------------------------------------------------------------------

    def _peak(self, decisions: dict[str, Decision]) -> PeakFacts:
        problem, moment = self.problem, self.simulation.peak
        step = self.simulation.moments.index(moment)
        there = (problem.data[item] for item in self.simulation.alive_at(step))
        alive = [Alive(data.name, data.size_bytes, decisions[data.name]) for data in there]
        alive.sort(key=lambda one: -one.size_bytes)
        stage, index, name = moment.step.stage, moment.step.forward, moment.op.name
        gradient_bytes = problem.backward[stage].resident_bytes if stage >= 0 else 0
        if index < 0:
            working_bytes = problem.backward[stage].peak_bytes - gradient_bytes
        else:
            working_bytes = problem.forward[index].workspace_bytes
        counted = sum(one.size_bytes for one in alive) + gradient_bytes + working_bytes
        op = self.main.get(name) if index >= 0 else self.calls.get(problem.backward[stage].op)
        return PeakFacts(
            step=step,
            op=str(moment.op),
            source=op.source if op else "",
            at_ms=moment.start_ms,
            peak_bytes=moment.peak_bytes,
            alive=tuple(alive),
            gradient_bytes=gradient_bytes,
            working_bytes=working_bytes,
            other_bytes=moment.peak_bytes - counted,
        )


def _main_operations(plan_file: PlanFile) -> tuple[dict[str, OperationRecord], dict[str, str]]:
    """By forward operation of the problem: the operation that it is called after, and why it runs once, if it does."""
    main: dict[str, OperationRecord] = {}
    reasons: dict[str, str] = {}
    for op in plan_file.graph.operations:
        if op.name == op.node or op.node not in main:
            main[op.node] = op
        if op.keep_reason:
            reasons[op.node] = op.keep_reason
    return main, reasons


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
