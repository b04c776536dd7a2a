"""`Rockmate(..., offload=...)`: some data move to a second memory, others are computed again, and all is eager's."""

import copy
import gc
import os
import pickle
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from rk_solvers import Limits
from rk_solvers.links import Link, SecondMemory
from rk_solvers.transfers.bound import lower_bound_with_moves_ms
from rk_solvers.transfers.reading import costs_of
from rk_solvers.transfers.with_moves import WithMoves
from rkgb.devices.registry import device_of
from rkgb.replay.step_record import bitwise_equal
from rockmate import (
    BudgetTooSmall,
    Offload,
    OffloadError,
    OffloadWarning,
    PeakMemory,
    PlanFileError,
    Rockmate,
    plan_files,
    verify,
    zoo,
)
from rockmate.offload import tiers
from rockmate.offload.file_tier import FileTier
from rockmate.offload.host_tier import HostTier
from rockmate.offload.tier import Traffic
from rockmate.planning import planner
from rockmate.planning.graph_solver import solver_for
from rockmate.planning.measured import Measured
from rockmate.planning.trying import moving
from rockmate.planning.trying import tried as trying
from rockmate.planning.trying import turns as by_turn
from rockmate.planning.trying.turns import by_turns
from rockmate.reports.explain import explain
from tests.graph.programs import TINY
from tests.module.models import Layers, built, rows
from tests.module.steps import BRIEFLY, assert_same_step, assert_same_training, squares, train
from tests.where import elsewhere, here, placed


def planned(model, sample, budget=0.5, **options):
    options = {"limits": BRIEFLY, "loss": squares, "offload": "auto", **options}
    return Rockmate(model, sample, budget, **options)


@pytest.mark.parametrize("share", [0.7, 0.4, 0.2])
@pytest.mark.parametrize("name", TINY)
def test_real_models_train_exactly_within_both_budgets(quick_disk, tmp_path, name, share):
    entry = zoo.get(name)
    entry = replace(entry, model=placed(entry.model), sample=tuple(map(placed, entry.sample)))
    eager = copy.deepcopy(entry.model)
    offload = elsewhere(tmp_path, "2MiB")
    try:
        module = planned(entry.model, entry.sample, share, loss=entry.loss, offload=offload)
    except BudgetTooSmall as error:
        module = planned(entry.model, entry.sample, error.smallest_budget_bytes, loss=entry.loss, offload=offload)
    plan, batches = module.plan, [entry.sample] * 2
    assert_same_training(train(module, batches, entry.loss), train(eager, batches, entry.loss))
    module.zero_grad()
    with PeakMemory(here()) as memory:
        entry.loss(module(*entry.sample)).backward()
    assert memory.peak_bytes <= plan.budget_bytes
    if plan.moves:
        assert 0 < plan.measured_stored_bytes == plan.stored_bytes <= 2 << 20
        assert str(plan).count("data moved") == 1
        assert plan.gap is not None
        assert os.listdir(tmp_path) == []  # the file has no name
    else:
        assert plan.measured_stored_bytes is None


def test_most_of_a_chain_moves_where_the_disk_is_quick(quick_disk):
    module = planned(built(Layers), rows(), 0.5)
    assert module.plan.moves > 0
    assert module.plan.solver.endswith("+moves")
    assert "step.offload('" in module.code
    assert verify(module, rows(), loss=squares).exact


def test_nothing_moves_where_steps_show_that_it_is_slower(quick_disk, monkeypatch):
    monkeypatch.setattr(moving, "steps_by_turns_ms", lambda *_: [2.0, 1.0])
    module = planned(built(Layers), rows(), 0.85)
    assert module.plan.recomputations > 0
    assert not module.plan.moves


def test_links_are_corrected_where_steps_take_longer_than_predicted(quick_disk, monkeypatch):
    tried, told, run = [], [], trying.try_plan
    monkeypatch.setattr(trying, "try_plan", lambda *given: tried.append(given[3]) or run(*given))

    def steps_ms(*_):
        moving = next(solution for solution in reversed(tried) if solution.schedule.offloaded)
        late = 1.0 if told else 1.05  # whatever was measured of the operations: they are quick, and times vary
        told.append([late * moving.time_ms, moving.alone.time_ms])
        return told[-1]

    monkeypatch.setattr(moving, "steps_by_turns_ms", steps_ms)
    module = planned(built(Layers), rows(), 0.5)
    plan = module.plan
    assert plan.moves > 0
    assert plan.memory.out.burden == plan.memory.back.burden > 0
    assert plan.memory == module._family.request.tiers.links_on(here())
    assert plan.time_ms == pytest.approx(costs_of(module._member.measured.problem, plan.schedule, plan.memory).time_ms)


@pytest.mark.parametrize("step_s", [0.0, 0.6], ids=["quick steps", "slow steps"])
def test_moves_are_looked_for_again_while_there_is_time(quick_disk, monkeypatch, step_s):
    """Of 2 s, two steps that take 1.2 s leave too little for another search and two more."""
    moves_beside, the_quicker = moving.moves_beside, planner.the_quicker
    compared, given, now_s = [], [], [0.0]

    def steps_ms(module, plans, *_):
        (_, moved), (_, alone) = plans
        compared.append(moved)
        now_s[0] += step_s * len(plans)
        return 1.5 * moved.plan.time_ms, alone.plan.time_ms  # not as predicted: another mix may be better

    def beside(*asked):
        given.append(asked[-1])
        return moves_beside(*asked)

    # The clock is the test's own: a busy machine may take the two seconds for the first search.
    monkeypatch.setattr(moving, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(planner, "the_quicker", lambda *asked: the_quicker(*asked[:-1], 2.0))
    monkeypatch.setattr(moving, "steps_by_turns_ms", steps_ms)
    monkeypatch.setattr(moving, "moves_beside", beside)
    planned(built(Layers), rows(), 0.5)
    assert compared
    assert bool(given) == (step_s == 0.0)
    assert all(seconds == 2.0 for seconds in given)


def test_searches_leave_time_for_steps(quick_disk, monkeypatch):
    module = planned(built(Layers), rows(), 0.5)
    measured, request = module._member.measured, replace(module._family.request, limits=Limits(search_s=30.0))

    def seconds(eager_ms):
        monkeypatch.setattr(Measured, "eager_time_ms", eager_ms)
        solver = solver_for(request, measured)
        assert isinstance(solver, WithMoves)
        return solver.time_limit_s + solver.alone.limits.search_s

    assert seconds(0.0) == pytest.approx(30.0)
    assert seconds(1000.0) == pytest.approx(22.0)
    assert seconds(1e6) == pytest.approx(15.0)  # half of it at least


def burdened(monkeypatch, burden):
    """The links are quick, and said to slow the computation by that share of their time."""
    quick = tiers.measured_links

    def links(*given):
        link = Link(1e6, burden=burden)
        return replace(quick(*given), out=link, back=link)

    monkeypatch.setattr(tiers, "measured_links", links)


@pytest.mark.parametrize("took", [(1.0, 2.0), (2.0, 1.0)], ids=["quicker", "slower"])
def test_moves_that_seem_to_cost_too_much_are_tried_as_if_they_cost_nothing(quick_disk, monkeypatch, took):
    burdened(monkeypatch, 1.0)
    tried = []
    monkeypatch.setattr(moving, "steps_by_turns_ms", lambda *_: tried.append(1) or took)
    module = planned(built(Layers), rows(), 0.5)
    assert tried
    assert (module.plan.moves > 0) == (took[0] < took[1])
    assert module.plan.gap >= 0
    assert verify(module, rows(), loss=squares).exact


def test_links_are_as_measured_where_planning_is_interrupted_before_a_step(quick_disk, monkeypatch):
    burdened(monkeypatch, 1.0)
    tried, run = [], trying.try_plan

    def interrupted(*given):
        if given[3].schedule.offloaded:
            tried.append(given[1].tiers)
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(trying, "try_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned(built(Layers), rows(), 0.5)
    assert tried[0].links_on(here()).out.burden == 1.0


def test_links_are_corrected_where_steps_take_less_time_than_predicted(quick_disk, monkeypatch):
    tried, run = [], trying.try_plan
    monkeypatch.setattr(trying, "try_plan", lambda *given: tried.append(given[3]) or run(*given))

    burdened(monkeypatch, 0.5)

    def steps_ms(*_):
        moving = next(solution for solution in reversed(tried) if solution.schedule.offloaded)
        alone = moving.alone or next(solution for solution in tried if not solution.schedule.offloaded)
        return 0.9 * moving.time_ms, alone.time_ms

    monkeypatch.setattr(moving, "steps_by_turns_ms", steps_ms)
    module = planned(built(Layers), rows(), 0.5)
    plan, problem = module.plan, module._member.measured.problem
    assert plan.moves > 0
    assert plan.memory.out.burden < 0.5
    free = replace(plan.memory, out=replace(plan.memory.out, burden=0.0), back=replace(plan.memory.back, burden=0.0))
    bound_ms = lower_bound_with_moves_ms(problem, plan.budget_bytes, free, 20.0, module._member.measured.chain)
    least_ms = problem.keep_all_time_ms  # a busy machine may leave a process aside no time
    assert least_ms * (1 - 1e-9) <= plan.lower_bound_ms <= min(bound_ms, plan.time_ms) * (1 + 1e-6)


def test_links_have_the_speeds_of_transfers_within_steps(quick_disk, monkeypatch):
    """They were measured beside another computation; where steps are late, these say how much of it is waiting."""
    measured = [(Traffic(), Traffic()), (Traffic(4, 4 << 20, 8.0), Traffic(2, 2 << 20, 16.0))]
    for tier in (FileTier, HostTier):
        monkeypatch.setattr(tier, "traffic", lambda _: measured.pop(0) if len(measured) > 1 else measured[0])
    tried, run = [], trying.try_plan
    monkeypatch.setattr(trying, "try_plan", lambda *given: tried.append(given[3]) or run(*given))

    def steps_ms(*_):
        solution = next(solution for solution in reversed(tried) if solution.schedule.offloaded)
        return 1.1 * solution.alone.time_ms, solution.alone.time_ms

    monkeypatch.setattr(moving, "steps_by_turns_ms", steps_ms)
    module = planned(built(Layers), rows(), 0.5)
    links = module._family.request.tiers.links_on(here())
    assert module.plan.moves == 0  # it was the slower one
    assert links.out.bytes_per_ms == pytest.approx((4 << 20) / 8.0 / moving._TO_SPARE)
    assert links.back.bytes_per_ms == pytest.approx((2 << 20) / 16.0 / moving._TO_SPARE)


def test_what_steps_have_shown_of_links_is_not_forgotten_for_the_next_plan(quick_disk, monkeypatch):
    burdened(monkeypatch, 0.5)
    monkeypatch.setattr(moving, "steps_by_turns_ms", lambda _, plans, *__: [1.3 * one.plan.time_ms for _, one in plans])
    module = planned(built(Layers), rows(), 0.5)
    request, measured = module._family.request, module._member.measured
    shown = request.tiers.links_on(here())
    assert module.plan.moves > 0
    assert request.tiers.are_shown(here())
    with moving.FreeLinks(request, measured, 1):
        assert request.tiers.links_on(here()) == shown
    fresh = replace(request, tiers=copy.deepcopy(request.tiers))
    with moving.FreeLinks(fresh, measured, 1):
        assert fresh.tiers.links_on(here()).out.burden == 0
    assert fresh.tiers.links_on(here()).out.burden == 0.5
    assert not fresh.tiers.are_shown(here())


def test_a_link_that_moved_nothing_in_a_step_is_as_measured():
    links = SecondMemory(Link(1e6, 0.5), Link(2e6))
    nothing, some = Traffic(), Traffic(2, 4_000_000, 10.0)
    assert moving._as_in_steps(links, (nothing, nothing), (nothing, nothing)) == links
    seen = moving._as_in_steps(links, (nothing, nothing), (some, nothing))
    assert seen.back == links.back
    assert 2 * seen.out.latency_ms + 4_000_000 / seen.out.bytes_per_ms == pytest.approx(moving._TO_SPARE * 10.0)
    assert moving._is_faster(links, seen)
    assert not moving._is_faster(seen, links)


def test_nothing_moves_and_no_link_is_measured_where_all_fits(monkeypatch):
    monkeypatch.setattr(tiers, "measured_links", lambda *_: pytest.fail("nobody needs it"))
    assert planned(built(Layers), rows(), 1.0).plan.keeps_all


def test_real_links_and_real_steps_decide():
    module = planned(built(Layers), rows(), 0.6)
    eager = copy.deepcopy(module.original)
    assert_same_training(train(module, [rows(1), rows(2)]), train(eager, [rows(1), rows(2)]))


@pytest.mark.parametrize(
    ("moving_ms", "staying_ms", "turns"),
    [
        ([90, 90, 90], [100, 100, 100], 2),  # both say the same
        ([90, 110, 95], [100, 100, 100], 3),
        ([88, 92, 90], [100, 100, 100], 2),  # not quite, but the plans are further apart
        ([94, 98, 96], [100, 100, 100], 3),
        ([120, 150, 130], [100, 100, 100], 2),  # slower, whatever a third says
        ([120, 100, 130], [100, 100, 100], 3),
        ([105, 120, 110], [100, 100, 100], 3),
    ],
)
def test_turns_end_where_they_agree(moving_ms, staying_ms, turns):
    steps = [iter(moving_ms).__next__, iter(staying_ms).__next__]
    assert len(by_turns(steps, 3, 3, 0.0, partial(by_turn._agree, None))) == turns
    steps = [iter(moving_ms).__next__, iter(staying_ms).__next__]
    assert len(by_turns(steps, 3, 3, 0.0)) == 3


@pytest.mark.parametrize(
    ("predicted", "turns"),
    [
        (0.90, 1),  # far from 1, and the first turn says so
        (0.885, 1),
        (0.87, 2),  # the turn says something else, by which links are corrected
        (0.96, 2),
        (1.10, 2),
    ],
)
def test_one_turn_is_enough_where_it_is_what_was_predicted(predicted, turns):
    steps = [iter([90, 90, 90]).__next__, iter([100, 100, 100]).__next__]
    assert len(by_turns(steps, 3, 3, 0.0, partial(by_turn._agree, predicted))) == turns


@pytest.mark.parametrize("said", [{}, {"scope": "total"}, {"plan_in_background": True}], ids=str)
def test_measuring_real_links_within_a_first_call_draws_nothing(said, tmp_path):
    eager = built(Layers, 6)
    options = {"loss": squares, "limits": BRIEFLY, "offload": elsewhere(tmp_path), **said}
    budget = "1MiB" if said.get("scope") else 0.5
    module = Rockmate(copy.deepcopy(eager), budget=budget, **options)
    for seed in range(2):
        assert_same_step(module, eager, rows(seed), seed)
    state = device_of(here()).generator.get_state()
    Rockmate(copy.deepcopy(eager), rows(), budget, **options)
    assert torch.equal(device_of(here()).generator.get_state(), state)


# ---- what users say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("tape", 'data are to be moved to \'tape\'; say "auto", "disk" or "host"'),
        (7, "offload is 7; give"),
        ({"where": "host", "path": "/scratch"}, "host memory, which has no path such as '/scratch'"),
        ({"path": 7}, "path is 7; give the path of a folder"),
        ({"limit": "much"}, "limit cannot be read"),
        ({"limit": -1}, "limit is -1; give bytes"),
        ({"limit": 1.5}, "limit is 1.5; give bytes"),
    ],
)
def test_what_is_no_second_memory_is_refused_before_anything_is_traced(said, told):
    def ask():
        return Rockmate(built(Layers), None, 0.5, offload=Offload(**said) if isinstance(said, dict) else said)

    with pytest.raises(OffloadError, match=told):
        ask()


def test_places_that_do_not_go_with_the_device_are_told(tmp_path):
    with pytest.raises(OffloadError, match="are in host memory already"):
        planned(built(Layers), rows(), 0.5, offload="host")
    with pytest.raises(OffloadError, match="no scratch file can be made in"):
        planned(built(Layers), rows(), 0.5, offload=Offload("disk", path=str(tmp_path / "none")))


def test_auto_without_a_disk_warns_and_recomputes(monkeypatch):
    def refused(_):
        raise OffloadError("'/tmp' is in memory")

    monkeypatch.setattr(tiers.FileTier, "open", refused)
    with pytest.warns(OffloadWarning, match="no data are moved: '/tmp' is in memory"):
        module = planned(built(Layers), rows(), 0.85)
    assert module.plan.recomputations > 0


def test_a_second_folder_is_taken_where_the_first_is_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(tiers, "gettempdir", lambda: str(tmp_path / "none"))
    monkeypatch.setattr(tiers, "_ELSE", str(tmp_path))
    assert str(tmp_path) in tiers.Tiers(Offload()).on(torch.device("cpu")).name


def test_the_limit_is_kept_when_links_are_measured_too(tmp_path):
    limit_bytes = 1 << 20
    seconds = tiers.Tiers(Offload("disk", str(tmp_path), limit_bytes))
    links, tier = seconds.links_on(torch.device("cpu")), seconds.on(torch.device("cpu"))
    assert links.limit_bytes == limit_bytes >= tier.most_held_bytes > 0
    with pytest.raises(OffloadError, match="a limit of 0 B in .* leaves nothing to move"):
        tiers.Tiers(Offload("disk", str(tmp_path), 0)).links_on(torch.device("cpu"))


def test_the_limit_is_kept(quick_disk):
    model, limit_bytes = built(Layers), 70_000
    free = planned(copy.deepcopy(model), rows(), 0.85).plan
    plan = planned(model, rows(), 0.85, offload=Offload(limit=limit_bytes)).plan
    assert plan.stored_bytes <= limit_bytes < free.stored_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes


# ---- what becomes of it -----------------------------------------------------------------------------------


def test_a_plan_file_keeps_the_moves_and_explains_them(quick_disk, tmp_path):
    model = built(Layers)
    module = planned(copy.deepcopy(model), rows(), 0.5, offload=elsewhere(tmp_path))
    module.save_plan(tmp_path / "plan.json")
    file = plan_files.load(tmp_path / "plan.json")
    assert file.plan.schedule == module.plan.schedule
    assert file.plan.memory == module.plan.memory
    again = Rockmate(copy.deepcopy(model), rows(), plan=file)
    assert (again.plan.schedule, again.plan.stored_bytes) == (module.plan.schedule, module.plan.stored_bytes)
    assert again.code.split("\n", 4)[-1] == module.code.split("\n", 4)[-1]
    assert_same_training(train(again, [rows(1)]), train(copy.deepcopy(model), [rows(1)]))
    found = explain(file)
    moved = [entry for entry in found.entries if entry.decision == "moved"]
    assert {entry.name for entry in moved} == set(module.plan.schedule.offloaded)
    assert all("Where it stayed, the peak would be" in entry.why for entry in moved)
    assert any(not entry.flip.fits for entry in moved)
    assert all(stay.is_back for entry in moved for stay in entry.lifetimes[1:])
    text = module.report()
    assert "Moved" in text
    assert {"out", "back"} <= {line.split()[0] for line in text.splitlines() if line.split()}
    for ending in ("html", "svg"):
        assert module.report(tmp_path / f"report.{ending}").stat().st_size > 10_000


def test_a_file_that_promises_other_bytes_there_is_refused(quick_disk, tmp_path):
    module = planned(built(Layers), rows(), 0.5)
    file = module.plan_file()
    file = structs.replace(file, promise=structs.replace(file.promise, stored_bytes=1))
    plan_files.save(file, tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="bytes elsewhere, but it promises 1"):
        plan_files.load(tmp_path / "plan.json")


def test_copies_and_pickles_go_on_moving(quick_disk):
    module = planned(built(Layers), rows(), 0.5)
    eager = copy.deepcopy(module.original)
    with warnings.catch_warnings(action="ignore"):
        others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for other in others:
        assert_same_training(train(other, [rows(1)]), train(copy.deepcopy(eager), [rows(1)]))
        assert other.plan.moves == module.plan.moves
        assert other.plan.measured_peak_bytes <= other.plan.budget_bytes


def test_a_second_budget_is_solved_with_moves(quick_disk):
    module = planned(built(Layers), rows(), 0.7)
    first = module.plan
    module.replan(int(0.8 * first.budget_bytes), rows())
    assert module.plan.stored_bytes > first.stored_bytes
    assert module.plan.measured_peak_bytes <= module.plan.budget_bytes < first.budget_bytes


def test_calls_of_other_sizes_are_within_the_same_budget(quick_disk):
    model = built(Layers)
    eager, module = copy.deepcopy(model), planned(model, rows(), 0.5)
    batches = [rows(1), rows(2)[:400], rows(3)[:300], rows(4)[:100], rows(5)]
    with warnings.catch_warnings(action="ignore"):
        assert_same_training(train(module, batches), train(eager, batches))
    assert not module.fallbacks
    assert all(plan.peak_bytes <= module.plan.budget_bytes for plan in module.plans)


def test_a_full_disk_keeps_data_in_memory_and_training_goes_on(quick_disk, monkeypatch):
    module = planned(built(Layers), rows(), 0.5)
    eager = copy.deepcopy(module.original)
    write = os.pwrite

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(OffloadWarning, match="stays in memory, .* the disk is full"):
        found = train(module, [rows(1)])
    assert_same_training(found, train(eager, [rows(1)]))
    monkeypatch.setattr(os, "pwrite", write)
    with warnings.catch_warnings(action="error"):
        assert_same_training(train(module, [rows(2)]), train(eager, [rows(2)]))


def test_several_steps_under_one_limit_keep_what_is_beyond_it(quick_disk):
    """Two forwards before a backward store twice as much as was planned."""
    first = planned(built(Layers), rows(), 0.5)
    limit_bytes = first.plan.stored_bytes
    module = planned(built(Layers), rows(), 0.5, offload=Offload(limit=limit_bytes))
    eager = copy.deepcopy(module.original)
    torch.manual_seed(0)
    with pytest.warns(OffloadWarning, match="are beyond its limit"):
        ours = [squares(module(rows(number))) for number in (1, 2)]
    torch.manual_seed(0)
    theirs = [squares(eager(rows(number))) for number in (1, 2)]
    sum(ours).backward()
    sum(theirs).backward()
    pairs = zip(module.parameters(), eager.parameters(), strict=True)
    assert all(bitwise_equal(mine.grad, other.grad) for mine, other in pairs)


def test_a_module_that_is_gone_leaves_no_file_and_no_thread(quick_disk):
    import threading

    def ours():
        return [thread for thread in threading.enumerate() if thread.name.startswith("rockmate-")]

    gc.collect()
    before = len(ours())
    module = planned(built(Layers), rows(), 0.5)
    assert module.plan.moves
    tier = module._member.planned.tier
    descriptor = tier._opened.file.descriptor
    os.fstat(descriptor)
    del module, tier
    gc.collect()
    assert len(ours()) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_decisions_with_moves_are_followed_elsewhere(quick_disk):
    from rockmate.planning.fixed_plan import FixedPlan, PortablePlan

    module = planned(built(Layers), rows(), 0.5)
    measured, plan = module._member.measured, module.plan
    decisions = PortablePlan.of(plan.schedule, plan.solver)
    assert PortablePlan.from_json(decisions.to_json()) == decisions
    found = FixedPlan(decisions, memory=plan.memory).solve(measured.problem, plan.budget_bytes)
    assert found.status.fits
    assert found.stored_bytes == plan.stored_bytes
    assert not FixedPlan(decisions, memory=plan.memory).solve(measured.problem, 1).status.fits
    less = FixedPlan(decisions, memory=replace(plan.memory, limit_bytes=0))
    assert not less.solve(measured.problem, plan.budget_bytes).status.fits
