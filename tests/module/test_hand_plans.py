"""Any plan runs, and runs exactly: plans written by hand and at random, on modules that are hard to repeat."""

from collections import Counter

import pytest
from torch import nn

from rk_solvers import Schedule, check, peak_and_time, schedule_of, simulate
from rk_solvers.groups import normalise
from rk_solvers.liveness import recompute_of
from rk_solvers.problem import Recompute
from rockmate.planning.measured import Measured
from tests.module.models import Layers, Normalised, SharedMask, Smooth, Tied, TwoHeads, built, images, rows, tokens
from tests.module.random_modules import RandomModule, random_plan
from tests.module.steps import (
    assert_same_training,
    following,
    keep_nothing,
    measured_for,
    peak_of_step,
    recomputing,
    runner_for,
    train,
)

# The runtime holds a copy of the random stream's state (5 KiB a piece) while it repeats random operations, and
# keeps one for each operation to repeat; measured stages alone cannot tell when a few small tensors are freed.
SMALL_BYTES = 64 << 10
MODELS = {
    "layers": (Layers, rows()),
    "smooth": (Smooth, rows()),
    "normalised": (Normalised, images()),
    "tied": (Tied, tokens()),
    "two-heads": (TwoHeads, rows()),
    "shared-mask": (SharedMask, rows()),
}
every_model = pytest.mark.parametrize(("make", "sample"), MODELS.values(), ids=MODELS)


def assert_runs_exactly(measured: Measured, model: nn.Module, recompute: Recompute) -> None:
    """Three steps through the runner against three eager ones, from the same weights."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    arguments = measured.sample.args
    found = train(model, [arguments] * 3, forward=runner_for(measured, model, recompute))
    model.load_state_dict(start)
    assert_same_training(found, train(model, [arguments] * 3))


def assert_peak_is_as_simulated(measured: Measured, model: nn.Module, recompute: Recompute) -> None:
    simulated = simulate(measured.problem, schedule_of(measured.problem, recompute)).peak_bytes
    model.zero_grad()
    found = peak_of_step(runner_for(measured, model, recompute), measured.sample.args)
    assert found <= simulated * 1.02 + SMALL_BYTES


@every_model
def test_recomputing_everything_at_every_stage_is_exact(make, sample):
    model = built(make)
    measured = measured_for(model, sample)
    assert_runs_exactly(measured, model, keep_nothing(measured))
    assert_peak_is_as_simulated(measured, model, normalise(measured.problem, keep_nothing(measured)))


@every_model
def test_values_recomputed_several_times_are_exact(make, sample):
    """The first halves of the forward, before every stage that they lead to."""
    model = built(make)
    measured = measured_for(model, sample)
    half = len(measured.problem.forward) // 2
    plan = normalise(measured.problem, tuple(tuple(i for i in group if i <= half) for group in keep_nothing(measured)))
    counts = Counter(index for group in plan for index in group)
    assert max(counts.values()) >= 2
    assert_runs_exactly(measured, model, plan)


@every_model
def test_recomputing_only_what_makes_phantoms_is_exact(make, sample):
    model = built(make)
    measured = measured_for(model, sample)
    makers = {data.producer for data in measured.problem.data if data.kind == "phantom"}
    allowed = tuple(sorted(index for index in makers if measured.problem.forward[index].recomputable))
    plan = normalise(measured.problem, (allowed,) * len(measured.problem.backward))
    assert_runs_exactly(measured, model, plan)


@every_model
def test_each_single_recomputation_is_exact(make, sample):
    model = built(make)
    measured = measured_for(model, sample)
    count = len(measured.problem.backward)
    for index, op in enumerate(measured.problem.forward):
        if op.recomputable:
            assert_runs_exactly(measured, model, normalise(measured.problem, ((index,),) * count))


def test_batch_statistics_are_counted_once_however_often_they_are_recomputed():
    model = built(Normalised)
    planned = recomputing(model, images())
    counts = Counter(name for names in planned.plan.schedule.recomputed.values() for name in names)
    assert max(counts.values()) >= 3
    train(planned, [images()] * 5)
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [5, 5, 5]


@every_model
def test_simulator_checker_and_solvers_agree_on_any_plan(make, sample):
    model = built(make)
    measured = measured_for(model, sample)
    problem = measured.problem
    for plan in [problem.no_recompute, normalise(problem, keep_nothing(measured))] + [
        random_plan(problem, seed) for seed in range(20)
    ]:
        schedule = schedule_of(problem, plan)
        peak_bytes, time_ms = peak_and_time(problem, plan)
        checked, simulated = check(problem, schedule), simulate(problem, schedule)
        assert checked.peak_bytes == simulated.peak_bytes == peak_bytes
        assert checked.time_ms == pytest.approx(time_ms)
        assert simulated.time_ms == pytest.approx(time_ms)
        assert checked.peak_at == str(simulated.peak.op)
        assert Schedule.parse(str(schedule)) == schedule
        assert recompute_of(problem, schedule) == recompute_of(problem, plan)


def assert_random_plan_is_exact(seed: int) -> None:
    model = built(RandomModule, seed, seed=seed)
    measured = measured_for(model, rows(seed))
    plan = random_plan(measured.problem, seed)
    assert_runs_exactly(measured, model, plan)
    assert_peak_is_as_simulated(measured, model, plan)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_of_random_modules_are_exact_and_need_what_is_simulated(seed):
    assert_random_plan_is_exact(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 220))
def test_many_random_plans_of_random_modules_are_exact(seed):
    assert_random_plan_is_exact(seed)


def test_a_hand_written_plan_reads_as_any_other():
    model = built(Layers)
    measured = measured_for(model, rows())
    planned = following(measured, model, keep_nothing(measured))
    assert check(measured.problem, planned.plan.schedule).peak_bytes == planned.plan.peak_bytes
