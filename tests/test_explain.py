"""Explanations of plans: what they say of each tensor is what brute force finds, on random steps and on real plans."""

import math

import pytest

from rk_solvers import Problem, check, peak_and_time, schedule_of, simulate
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.problem import Recompute
from rockmate import Rockmate, plan_files, zoo
from rockmate.plan_files import PlanFile
from rockmate.plan_files.content import (
    FORMAT,
    VERSION,
    Asked,
    ChainRecord,
    GraphRecord,
    Made,
    Measurements,
    OperationRecord,
    Promise,
)
from rockmate.reports.explain import explain
from tests.module.steps import FEW_ROUNDS
from tests.solver.instances import random_plan, random_problem

SEEDS = range(60)


def plan_file_around(problem: Problem, recompute: Recompute, spare_bytes: int = 0) -> PlanFile:
    """A plan file of a step on plain numbers, whose budget is its peak and some bytes more."""
    plan = normalise(problem, recompute)
    peak_bytes, time_ms = peak_and_time(problem, plan)
    schedule = schedule_of(problem, plan)
    return PlanFile(
        format=FORMAT,
        version=VERSION,
        made=Made(rockmate="0", torch="0", device="cpu", threads=1),
        asked=Asked(),
        graph=GraphRecord(
            digest="",
            model="Numbers",
            calls="",
            leaves=(),
            operations=tuple(
                OperationRecord(
                    name=op.name,
                    function="aten::f.default",
                    arguments="",
                    makes=(),
                    node=op.name,
                    module="numbers",
                    source=f"numbers.py:{index}",
                    keep_reason="" if op.recomputable else "it must not run twice",
                )
                for index, op in enumerate(problem.forward)
            ),
            output="",
        ),
        measured=Measurements(blocks=(), stages=(), loss=None, eager_peak_bytes=peak_bytes),
        problem=problem,
        chain=ChainRecord(blocks=((0, len(problem.forward)),), backward_block=(0,) * len(problem.backward)),
        promise=Promise(
            budget_bytes=peak_bytes + spare_bytes,
            peak_bytes=peak_bytes,
            time_ms=time_ms,
            baseline_peak_bytes=peak_bytes,
            baseline_time_ms=problem.keep_all_time_ms,
            solver="hand",
            planning_s=0.0,
            measured_peak_bytes=None,
            measured_reserved_bytes=None,
            lower_bound_ms=None,
            gap=None,
            memory_split=None,
        ),
        schedule=tuple(map(str, schedule.ops)),
    )


def cases():
    """Random steps under random plans, with the parts that make them."""
    for seed in SEEDS:
        problem = random_problem(seed)
        if not problem.backward:
            continue
        plan = normalise(problem, random_plan(problem, seed))
        yield problem, plan, plan_file_around(problem, plan, spare_bytes=seed % 7)


def checked(problem, plan):
    """Peak and time by the replay that no solver uses."""
    found = check(problem, schedule_of(problem, normalise(problem, plan)), None)
    return found.peak_bytes, pytest.approx(found.time_ms)


def without(plan, producer):
    return tuple(tuple(index for index in group if index != producer) for group in plan)


def with_one_more(problem, plan, item):
    """`plan`, with the producer of `item` recomputed where the backward first uses it."""
    for stage, op in enumerate(problem.backward):
        if item in op.needs or any(item in problem.forward[index].inputs for index in plan[stage]):
            return *plan[:stage], tuple(sorted({*plan[stage], problem.data[item].producer})), *plan[stage + 1 :]
    raise AssertionError("nothing uses it")


def test_every_tensor_has_an_entry_whose_stays_add_up_to_the_memory_of_each_step():
    for problem, _, file in cases():
        found = explain(file)
        assert [entry.name for entry in found.entries] == [data.name for data in problem.data]
        moments = simulate(problem, file.parsed_schedule).moments
        for step, moment in enumerate(moments):
            before = sum(  # what is alive when a step starts: not yet what it makes
                entry.size_bytes
                for entry in found.entries
                if any(stay.first < step <= stay.last for stay in entry.lifetimes)
            )
            # Gradients, random states and what is there throughout are the rest.
            assert 0 <= moment.alive_bytes - before <= 200
        assert max(stay.last for entry in found.entries for stay in entry.lifetimes) < len(moments)


def test_the_parts_of_the_peak_add_up_to_it():
    for problem, plan, file in cases():
        peak = explain(file).peak
        assert peak.peak_bytes == peak_and_time(problem, plan)[0] == file.promise.peak_bytes
        parts = sum(one.size_bytes for one in peak.alive) + peak.gradient_bytes + peak.working_bytes + peak.other_bytes
        assert parts == peak.peak_bytes
        assert peak.gradient_bytes >= 0
        assert peak.working_bytes >= 0
        replay_bytes = sum(op.replay_bytes for op in problem.forward)
        assert problem.base_bytes <= peak.other_bytes <= problem.base_bytes + replay_bytes
        assert peak.op == str(simulate(problem, file.parsed_schedule).peak.op)


def test_decisions_are_those_of_the_schedule():
    seen = set()
    for problem, plan, file in cases():
        repeated = {index for group in plan for index in group}
        for item, entry in enumerate(explain(file).entries):
            seen.add(entry.decision)
            producer = problem.data[item].producer
            crosses = any(stay.first < len(problem.forward) <= stay.last for stay in entry.lifetimes)
            if entry.decision == "held":
                assert item in problem.held
            elif entry.decision == "recomputed":
                assert producer in repeated
                assert 1 <= entry.recomputed <= sum(producer in group for group in plan)
            elif entry.decision == "never recomputed":
                assert not problem.forward[producer].recomputable
                assert "it must not run twice" in entry.why
                assert crosses
            elif entry.decision == "kept":
                assert crosses
            else:
                assert not crosses
                assert item not in {need for op in problem.backward for need in op.needs} or entry.recomputed
            if entry.decision != "recomputed":
                assert entry.recomputed == 0
    assert seen == {"held", "recomputed", "never recomputed", "kept", "not needed"}


def test_a_flipped_decision_costs_what_the_plan_with_it_flipped_costs():
    flips = 0
    for problem, plan, file in cases():
        for item, entry in enumerate(explain(file).entries):
            assert (entry.flip is None) == (entry.decision not in ("kept", "recomputed"))
            if entry.flip is None:
                continue
            flips += 1
            if entry.decision == "recomputed":
                other = without(plan, problem.data[item].producer)
                assert entry.flip.extra_ms <= 0
            else:
                other = with_one_more(problem, plan, item)
                assert entry.flip.extra_ms >= 0
            assert (entry.flip.peak_bytes, entry.flip.time_ms) == checked(problem, other)
            assert entry.flip.fits == (entry.flip.peak_bytes <= file.promise.budget_bytes)
            assert entry.flip.extra_ms == pytest.approx(entry.flip.time_ms - peak_and_time(problem, plan)[1])
            if entry.decision == "recomputed" and not entry.flip.fits:
                assert "above the budget" in entry.why
    assert flips > 100


def test_no_plan_is_below_the_binding_operation():
    for problem, plan, file in cases():
        found = explain(file)
        least = peak_and_time(problem, normalise(problem, least_peak(problem)))[0]
        assert found.binding_bytes <= least <= peak_and_time(problem, plan)[0]
        if problem.forward:
            assert found.binding_op.split()[0] in ("compute", "backward")


def test_idle_times_are_those_of_the_step_that_keeps_everything():
    for problem, _, file in cases():
        keep_all = explain(plan_file_around(problem, problem.no_recompute)).entries
        moments = simulate(problem, schedule_of(problem, problem.no_recompute)).moments
        for item, (entry, kept) in enumerate(zip(explain(file).entries, keep_all, strict=True)):
            assert entry.idle_ms == kept.idle_ms
            users = [index for index, op in enumerate(problem.backward) if item in op.needs]
            assert (entry.idle_ms is None) == (not users)
            if users:
                last = max(
                    [index for index, op in enumerate(problem.forward) if item in op.inputs],
                    default=problem.data[item].producer,
                )
                start, end = moments[last].end_ms, moments[len(problem.forward) + users[0]].start_ms
                assert entry.idle_ms == pytest.approx(end - start)


def test_a_tensor_that_stays_for_longer_than_anything_needs_it_is_explained():
    problem = random_problem(1)
    plain = plan_file_around(problem, problem.no_recompute)
    forgets = [line for line in plain.schedule if line.startswith("forget")]
    late = tuple(line for line in plain.schedule if line not in forgets) + tuple(forgets)
    found = explain(
        PlanFile(**{name: getattr(plain, name) for name in PlanFile.__struct_fields__} | {"schedule": late})
    )
    used = {need for op in problem.backward for need in op.needs}
    for item, entry in enumerate(found.entries):
        assert (entry.decision == "not needed") == (item not in used | problem.held)


@pytest.fixture(scope="module")
def planned() -> PlanFile:
    entry = zoo.get("gpt2-tiny")
    model = Rockmate(entry.model, entry.sample, 0.6, loss=entry.loss, solver="greedy", limits=FEW_ROUNDS)
    return plan_files.loads(plan_files.dumps(model.plan_file()))


def test_a_real_plan_is_explained_with_the_source_lines_of_its_user(planned):
    found = explain(planned)
    assert {entry.decision for entry in found.entries} >= {"kept", "recomputed", "held", "not needed"}
    for entry in found.entries:
        assert entry.why.endswith(".")
        assert "\n" not in entry.why
        if entry.flip is not None:
            assert entry.source.startswith("gpt2.py:")
            assert math.isfinite(entry.cost_ms_per_mib)
    recomputed = {name for names in planned.parsed_schedule.recomputed.values() for name in names}
    assert {entry.producer for entry in found.entries if entry.recomputed} <= recomputed
    weights = [entry.weight for entry in found.heaviest(10)]
    assert weights == sorted(weights, reverse=True)


def test_entries_are_found_by_tensor_operation_and_submodule(planned):
    found = explain(planned)
    (linear,) = (entry for entry in found.entries if entry.name == "linear_2")
    assert found.entry("linear_2") == linear
    assert linear in found.of_operation("blocks.0.feed_forward")
    assert set(found.of_operation("blocks.0")) < set(found.of_operation("blocks"))
    assert found.of_operation("nothing") == ()
    with pytest.raises(KeyError, match="the plan has no tensor 'linear_'; there are linear_0"):
        found.entry("linear_")
