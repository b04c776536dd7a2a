"""What reports show is what the plan file holds, in every form; observing steps leaves the module as it was."""

import json
import re

import pytest
import torch
from msgspec.structs import replace

from rk_solvers import schedule_of, simulate
from rkgb import make_sample
from rockmate import Rockmate, zoo
from rockmate.plan_files import dumps, loads
from rockmate.reports import observe, pareto_points, text_report, write_figure, write_html, write_report
from rockmate.reports.explain import explain
from rockmate.reports.measured import thinned
from rockmate.reports.pareto import best_of
from rockmate.reports.step import computations
from rockmate.reports.words import headline, time_bar
from rockmate.units import format_bytes
from tests.reports.conftest import HOSTILE
from tests.reports.synthetic import plan_file_of_layers


@pytest.fixture(scope="module")
def files(plan_file, hostile_file):
    return [plan_file, hostile_file, *(plan_file_of_layers(30, budget=budget) for budget in (0.3, 0.6, 1.0))]


@pytest.mark.ci
def test_parts_of_the_memory_add_up_to_what_the_simulator_counts(files):
    for file in files:
        moments = simulate(file.problem, file.parsed_schedule).moments
        steps = computations(file, explain(file))
        assert [step.peak_bytes for step in steps] == [moment.peak_bytes for moment in moments]
        assert [(step.start_ms, step.end_ms) for step in steps] == [(one.start_ms, one.end_ms) for one in moments]
        for step in steps:
            assert min(step.kept_bytes, step.recomputed_bytes, step.gradient_bytes, step.workspace_bytes) >= 0
        lanes = [step.lane for step in steps]
        assert lanes.count("forward") == len(file.problem.forward)
        assert lanes.count("recompute") == file.plan.recomputations
        assert lanes.count("backward") == len(file.problem.backward)
        if not file.plan.recomputations:
            assert not any(step.recomputed_bytes for step in steps)


def test_what_is_recomputed_is_told_with_what_it_is_for(plan_file):
    found = {}
    for step in computations(plan_file, explain(plan_file)):
        if step.lane == "recompute":
            found.setdefault(plan_file.problem.backward[step.stage].name, []).append(step.name)
    assert {stage: tuple(names) for stage, names in found.items()} == plan_file.parsed_schedule.recomputed


def test_points_of_memory_against_time_are_plans_of_the_problem(plan_file):
    points = pareto_points(plan_file, budgets=4)
    problem = plan_file.problem
    all_kept = simulate(problem, schedule_of(problem, problem.no_recompute))
    (keep_all,) = (point for point in points if point.solver == "keep-all")
    assert keep_all.peak_bytes == all_kept.peak_bytes
    assert keep_all.time_ms == pytest.approx(all_kept.time_ms)
    assert {"chen", "greedy", "keep-none", "knapsack", "rotor"} <= {point.solver for point in points}
    for solver in {point.solver for point in points}:
        own = [point for point in points if point.solver == solver]
        assert best_of(own) == own  # none is beaten in peak and time by another
    assert pareto_points(plan_file, budgets=4) == points
    with pytest.raises(ValueError, match="at least two budgets"):
        pareto_points(plan_file, budgets=1)


@pytest.mark.parametrize("suffix", ["html", "png", "pdf", "svg"])
def test_the_same_plan_gives_the_same_bytes(plan_file, tmp_path, suffix):
    sweep = pareto_points(plan_file, budgets=2)
    first = write_report(plan_file, tmp_path / f"first.{suffix}", sweep=sweep)
    again = write_report(loads(dumps(plan_file)), tmp_path / "new" / f"again.{suffix}", sweep=sweep)
    assert first.read_bytes() == again.read_bytes()


def test_the_page_holds_the_numbers_of_the_plan_and_nothing_can_leave_them(hostile_file, tmp_path):
    text = write_html(hostile_file, tmp_path / "page.html").read_text("utf-8")
    blocks = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert len(blocks) == 2
    data = json.loads(blocks[0])
    assert data["budget"] == hostile_file.promise.budget_bytes
    assert data["forward"]["name"] == [op.name for op in hostile_file.problem.forward]
    assert any(HOSTILE in one for one in data["texts"])
    assert "src=x" not in text.replace("src=x onerror=&#34;", "").replace(r"src=x onerror=\"", "")
    assert not re.search(r"https?:|url\((?!#)|@import", re.sub(r"http://www\.w3\.org/2000/svg", "", text))


@pytest.mark.parametrize("width", [40, 57, 80, 200])
def test_text_keeps_to_the_width_and_tells_the_promise(plan_file, width):
    text = text_report(plan_file, width=width)
    assert max(map(len, text.splitlines())) <= min(width, 110)
    promise = plan_file.promise
    for size_bytes in (promise.budget_bytes, promise.peak_bytes, promise.baseline_peak_bytes):
        assert format_bytes(size_bytes) in text
    assert "\x1b" not in text
    assert repr(text) == str(text)


def test_text_takes_names_as_they_are(hostile_file):
    assert "window.harmed" in text_report(hostile_file)
    assert "[bold]" in text_report(plan_file_of_layers(12, model="a[bold]b"))


def test_names_with_dollars_are_drawn(hostile_file, tmp_path):
    assert write_figure(hostile_file, tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_file_is_refused(plan_file, tmp_path):
    with pytest.raises(ValueError, match=r"'report\.txt'"):
        write_report(plan_file, tmp_path / "report.txt")
    with pytest.raises(ValueError, match=r"\.png"):
        write_figure(plan_file, tmp_path / "report.html")
    assert not any(tmp_path.iterdir())


def test_thinning_keeps_ends_and_extremes():
    levels = [(float(at), (at * 7919) % 10_007) for at in range(9_000)]
    thin = thinned(levels, 200)
    assert len(thin) <= 200
    assert (thin[0], thin[-1]) == (levels[0], levels[-1])
    assert list(thin) == sorted(thin)
    assert max(level for _, level in thin) == max(level for _, level in levels)
    assert set(thin) <= set(levels)
    assert thinned(levels[:50], 200) == levels[:50]
    with pytest.raises(ValueError, match="at least 4"):
        thinned(levels, 3)


@pytest.mark.ci
def test_observed_steps_take_what_was_measured_and_leave_the_module_as_it_was(planned, tmp_path):
    entry = zoo.get("gpt2-tiny")
    parameters = list(planned.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = [tensor.detach().clone() for tensor in planned.state_dict().values()]
    stream = torch.get_rng_state()
    path = planned.report(tmp_path / "observed.png", sample=entry.sample)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(map(torch.equal, before, planned.state_dict().values()))
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(parameter.grad is None for parameter in parameters[1:])
    parameters[0].grad = None
    call = make_sample(planned.original, entry.sample)
    seen = observe(planned.original, planned._member.runner, call, entry.loss, torch.device("cpu"))
    assert seen.plan.peak_bytes == planned.plan.measured_peak_bytes
    assert seen.eager is not None
    assert seen.eager.peak_bytes == planned.plan.baseline_peak_bytes
    assert max(level for _, level in seen.plan.timeline) == seen.plan.peak_bytes
    assert seen.plan.timeline[-1][0] == pytest.approx(seen.plan.time_ms)


def test_a_module_reports_its_plan_as_text(planned):
    text = planned.report()
    assert text == text_report(planned.plan_file())
    with pytest.raises(ValueError, match="no sample"):
        planned.report(loss=lambda output: output.sum())


@pytest.mark.ci
def test_a_report_for_other_calls_is_of_their_plan(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    planned = Rockmate(model, torch.randn(4, 8), "1 MiB", solver="greedy")
    planned.plan_for(torch.randn(2, 8))
    text = planned.report(sample=torch.randn(4, 8))
    assert "float32[4, 8]" in text
    assert "Observed peak" in text


@pytest.mark.parametrize(("factor", "told"), [(0.8, "for 25.0 % more time"), (1.25, "in 20.0 % less time")])
def test_a_plan_may_take_less_time_than_the_eager_step(plan_file, tmp_path, factor, told):
    """As where random numbers are drawn by kernels of our own."""
    baseline_ms = factor * plan_file.promise.time_ms
    other = replace(plan_file, promise=replace(plan_file.promise, baseline_time_ms=baseline_ms))
    assert told in headline(other)
    for bar in time_bar(other):
        assert all(0 <= share <= 1 for _, share in bar.parts)
        assert sum(share for _, share in bar.parts) <= 1 + 1e-9
    assert told in " ".join(text_report(other).split())
    write_report(other, tmp_path / "report.html")
    write_figure(other, tmp_path / "figure.svg")
