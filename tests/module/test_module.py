"""The wrapper looks like the model that it wraps, and says what it does."""

import copy
import io
import re

import pytest
import torch
from torch import nn

from rk_solvers import Greedy, Schedule
from rk_solvers.anytime.search import Search
from rockmate import BudgetError, BudgetTooSmall, Plan, Rockmate, SolverError, zoo
from rockmate.memory.budget import resolve_budget
from tests.module.models import WIDTH, Layers, Normalised, Tied, built, images, rows, tokens
from tests.module.steps import assert_trains_exactly, recomputing, squares
from tests.where import CPU, here


@pytest.fixture
def network() -> Layers:
    return built(Layers)


@pytest.fixture
def model(network) -> Rockmate:
    return recomputing(network, rows())


# ---- the same parameters, buffers, names and modes ----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Layers, rows), (Normalised, images), (Tied, tokens)],
    ids=["layers", "normalised", "tied"],
)
def test_names_and_objects_are_the_model_s_own(make, batch):
    network = built(make)
    model = recomputing(network, batch())
    for view in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, view)()), dict(getattr(network, view)())
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs)
    assert list(model.state_dict()) == list(network.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in network.named_modules()]
    assert list(model.children()) == list(network.children())


def test_state_dicts_go_back_and_forth(network, model):
    other = built(Layers, seed=7)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(network.layers[0].weight, other.layers[0].weight)
    other.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    network.load_state_dict(torch.load(file))
    assert_trains_exactly(model, [rows(1)])


def test_modes_go_to_the_model_and_its_parts(network, model):
    assert model.training
    assert model.eval() is model
    assert not any(module.training for module in network.modules())
    assert not model.training
    assert model.train() is model
    assert all(module.training for module in network.modules())
    network.eval()
    assert not model.training


def test_attributes_and_methods_of_the_model_are_seen_through(network, model):
    network.note = "mine"
    assert model.note == "mine"
    assert model.layers is network.layers
    assert model.dropout.p == 0.1
    with pytest.raises(AttributeError, match="'Layers' object has no attribute 'unknown'"):
        _ = model.unknown


def test_moving_and_casting_reach_the_model(network, model):
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    model.requires_grad_(True)
    model.double()
    assert network.layers[0].weight.dtype == torch.float64
    model.float()
    assert_trains_exactly(model, [rows(1)])


def test_zero_grad_and_optimizers_see_the_parameters(network, model):
    squares(model(rows(1))).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_wrapper_may_be_a_part_of_a_larger_model():
    class Larger(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, 1)

        def forward(self, hidden):
            return self.last(self.part(self.first(hidden)))

    part = recomputing(built(Layers), rows(requires_grad=True))
    larger = built(Larger, part)
    eager = Larger(part.original)
    eager.first, eager.last = larger.first, larger.last
    gradients = []
    for module in (eager, larger):
        torch.manual_seed(2)
        module.zero_grad()
        squares(module(rows(1))).backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert len(gradients[0]) == len(gradients[1]) == 4 + len(list(part.parameters()))
    assert all(map(torch.equal, *gradients))


def test_a_planned_module_may_be_planned_again_for_other_batches(network):
    small = recomputing(network, rows()[:64])
    large = recomputing(network, rows())
    assert_trains_exactly(small, [rows(1)[:64]])
    assert_trains_exactly(large, [rows(1)])
    assert small.layers is large.layers


# ---- copies -----------------------------------------------------------------------------------------


def test_a_deep_copy_is_independent_and_exact(network, model):
    twin = copy.deepcopy(model)
    assert isinstance(twin, Rockmate)
    assert twin.plan is model.plan
    assert twin.code == model.code
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert twin.layers[0].weight.abs().sum() > 0
    squares(twin(rows(1))).backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    twin.zero_grad()
    assert_trains_exactly(twin, [rows(1), rows(2)])
    assert_trains_exactly(copy.deepcopy(twin), [rows(1)])


def test_a_deep_copy_keeps_tied_weights_tied():
    twin = copy.deepcopy(recomputing(built(Tied), tokens()))
    assert twin.head.weight is twin.embedding.weight
    assert_trains_exactly(twin, [tokens(1)] * 2)


def test_a_deep_copy_made_in_eval_mode_trains(model):
    twin = copy.deepcopy(model.eval())
    assert not twin.training
    assert_trains_exactly(twin.train(), [rows(1)])


def test_a_copy_inside_a_copied_container_is_made_once(model):
    pair = copy.deepcopy([model, model])
    assert pair[0] is pair[1]


# ---- what it says -----------------------------------------------------------------------------------


def test_the_code_compiles_and_reads_as_the_model(model):
    compile(model.code, "generated", "exec")
    assert "def forward(step: Step, " in model.code
    assert re.search(r"^    # layers\.0 models\.py:\d+$", model.code, re.MULTILINE), "where each line comes from"
    assert "layers_0.weight" in model.code
    assert "def recompute_0(step: Step):" in model.code
    assert max(map(len, model.code.splitlines())) <= 200


def test_the_plan_prints_on_one_line_with_units(model):
    text = str(model.plan)
    assert "\n" not in text
    assert re.search(r"budget [\d.]+ [KMG]iB, peak [\d.]+ [KMG]iB of [\d.]+ [KMG]iB eager, time [\d.]+ m?s", text)
    assert re.search(r"\([+-][\d.]+%\), \d+ recomputations, hand, planned in [\d.]+ s\)", text)
    assert text in repr(model)


def test_backward_is_accepted_and_does_nothing(model):
    squares(model(rows(1))).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.backward()
    model.backward(torch.ones(()), retain_graph=True)
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), gradients, strict=True))


# ---- planning ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pytorchs_draws")
def test_fields_of_a_plan_agree_with_one_another(network):
    plan = Rockmate(network, rows(), 0.6, loss=squares).plan
    assert plan.overhead == pytest.approx(plan.time_ms / plan.baseline_time_ms - 1)
    assert plan.overhead > 0
    assert plan.budget_bytes == round(0.6 * plan.baseline_peak_bytes)
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.recomputations == sum(map(len, plan.schedule.recomputed.values()))
    assert plan.planning_s > 0
    assert Schedule.parse(str(plan.schedule)) == plan.schedule


@pytest.mark.usefixtures("pytorchs_draws")
def test_a_plan_that_recomputes_nothing_has_no_overhead(network):
    plan = Rockmate(network, rows(), 1.0, loss=squares).plan
    assert plan.recomputations == 0
    assert plan.overhead == 0.0
    assert plan.measured_peak_bytes == plan.baseline_peak_bytes


def test_an_empty_baseline_has_no_overhead():
    plan = Plan(1, 1, 0.0, 1, 0.0, "none", 0.0, Schedule(()))
    assert plan.overhead == 0.0


@pytest.mark.both_walks
def test_progress_is_told_the_stages_in_order(network):
    told: list[tuple[str, int, int]] = []
    Rockmate(network, rows(), 0.6, loss=squares, progress=lambda *report: told.append(report))
    assert list(dict.fromkeys(stage.split(" (")[0] for stage, _, _ in told)) == [
        "trace",
        "loss",
        "measure",
        "time",
        "eager step",
        "solve",
        "check",
        "bound",
    ]
    assert all(0 <= done <= total for _, done, total in told)
    for stage in ("trace", "measure", "time", "eager step", "check"):
        reports = [(done, total) for name, done, total in told if name == stage]
        assert [done for done, _ in reports] == sorted(done for done, _ in reports)
        assert reports[-1][0] == reports[-1][1], f"{stage} ends complete"


def test_a_progress_display_goes_to_standard_error(network, capsys):
    Rockmate(network, rows(), 0.8, loss=squares, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "measure" in captured.err


def test_without_progress_nothing_is_written(network, capfd):
    Rockmate(network, rows(), 0.8, loss=squares)
    captured = capfd.readouterr()
    assert captured.out == ""


def test_a_given_solver_makes_the_plan(network):
    plan = Rockmate(network, rows(), 0.6, loss=squares, solver=Greedy(tries=2, rounds=5)).plan
    assert plan.solver == "greedy"


@pytest.mark.parametrize("budget", [700_000, "684KiB", "0.7 MB", 0.7, None])
def test_budgets_come_in_several_forms(network, budget):
    model = Rockmate(network, rows(), budget, loss=squares)
    if isinstance(budget, float):
        assert model.plan.budget_bytes == round(budget * model.plan.baseline_peak_bytes)
    elif budget is None:
        assert model.plan.recomputations == 0
        assert model.plan.budget_bytes > 1 << 20
    else:
        assert abs(model.plan.budget_bytes - 700_000) < 1000
    assert_trains_exactly(model, [rows(1)])


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [(5, 5), ("2GiB", 2 << 30), ("1.5 GiB", 3 << 29), ("500 MB", 500_000_000), (0.5, 500), (1.0, 1000), (1, 1)],
)
def test_a_budget_is_read_in_bytes(budget, size_bytes):
    assert resolve_budget(budget, 1000, CPU) == size_bytes


def test_no_budget_means_most_of_what_is_free():
    free = resolve_budget(None, 1000, CPU)
    assert 1 << 20 < free
    with pytest.raises(BudgetError):
        resolve_budget("nothing", 1000, CPU)


def test_the_same_budget_gives_the_same_plan(network):
    solver = Greedy(tries=2, rounds=5)
    plans = [Rockmate(copy.deepcopy(network), rows(), 0.6, loss=squares, solver=solver).plan for _ in range(2)]
    assert plans[0].baseline_peak_bytes == plans[1].baseline_peak_bytes
    assert plans[0].peak_bytes <= plans[0].budget_bytes
    assert plans[1].peak_bytes <= plans[1].budget_bytes


def test_without_a_loss_a_cross_entropy_fits(network):
    """Its needs are assumed: it saves one tensor of the output's size and holds two gradients of it."""
    target = tokens(1)
    try:
        model = Rockmate(network, rows(), 0.7)
    except BudgetTooSmall as error:
        pytest.fail(f"0.7 of the eager peak is far above the least: {error}")
    assert_trains_exactly(model, [rows(1)], lambda output: nn.functional.cross_entropy(output, target))


@pytest.mark.parametrize("solver", ["auto", "chen", "greedy", "keep-none", "rotor"])
def test_a_solver_may_be_named(solver):
    network = built(Layers)
    model = Rockmate(network, rows(), 0.85, loss=squares, solver=solver, time_limit=2.0)
    assert model.plan.recomputations > 0
    assert model.plan.solver == solver or solver == "auto"
    assert_trains_exactly(model, [rows(1)])


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_time_limit_that_is_none_is_refused(limit):
    with pytest.raises(SolverError, match="time_limit is"):
        Rockmate(built(Layers), rows(), 0.85, time_limit=limit)


@pytest.mark.usefixtures("pytorchs_draws")
def test_a_plan_tells_how_far_from_the_best_it_may_be():
    model = Rockmate(built(Layers), rows(), 0.85, loss=squares)
    plan = model.plan
    assert plan.baseline_time_ms <= plan.lower_bound_ms <= plan.time_ms
    assert plan.gap == 1 - plan.lower_bound_ms / plan.time_ms
    assert f"gap {plan.gap:.1%}" in str(plan)
    easy = Rockmate(built(Layers), rows(), 1.0, loss=squares).plan
    assert (easy.lower_bound_ms, easy.gap) == (easy.time_ms, 0.0)


def test_a_search_that_is_interrupted_leaves_its_best_plan(monkeypatch):
    """Ctrl-C ends the search, not the planning."""
    entry = zoo.get("gpt2-tiny", device=here())
    told: list[str] = []

    def interrupted(search: Search) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_combine", interrupted)
    model = Rockmate(
        entry.model, entry.sample, 0.6, loss=entry.loss, gap=0.0, progress=lambda stage, *_: told.append(stage)
    )
    assert any("interrupted" in stage for stage in told)
    assert model.plan.recomputations > 0
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
