"""Gradients that are there before a step: a plan is for what a step allocates above them, and others make them."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetTooSmall, ReplanWarning, Rockmate, plan_files, verify
from rockmate.queries.profiling import profile
from tests.module.models import Tied, built, tokens
from tests.module.steps import CPU, FEW_ROUNDS, assert_same, seen, squares

WIDTH, DEPTH = 64, 6
GRADIENT_BYTES = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)


class Wide(nn.Module):
    """Layers whose parameters outweigh the activations of a small batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(nn.functional.gelu(layer(hidden)))
        return hidden


def batch(seed: int = 0) -> Tensor:
    return torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed))


def with_gradients(model: nn.Module, which=lambda name: True) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter) if which(name) else None
    return model


def step(model: nn.Module, sample: Tensor) -> None:
    output = model(sample)
    squares(output).backward()


def step_bytes(model: nn.Module, sample: Tensor) -> int:
    """Highest level of a step, above what was there before it."""
    with AllocationLog(CPU) as log:
        output = model(sample)
        loss = squares(output)
        loss.backward()
    return log.peak_bytes


def planned(model: nn.Module, budget, sample: Tensor | None = None, **options) -> Rockmate:
    return Rockmate(model, batch() if sample is None else sample, budget, loss=squares, limits=FEW_ROUNDS, **options)


def smallest(model: nn.Module, sample: Tensor | None = None) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        planned(model, 1000, sample)
    return refused.value.smallest_budget_bytes


WHICH = {
    "all": lambda name: True,
    "weights": lambda name: "weight" in name,
    "some": lambda name: name.startswith(("layers.0", "layers.3")),
    "none": lambda name: False,
}


@pytest.mark.parametrize("which", WHICH.values(), ids=WHICH)
@pytest.mark.ci
def test_a_step_takes_to_the_byte_what_is_predicted_above_the_gradients_that_are_there(which):
    model = with_gradients(built(Wide), which)
    there = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    least = smallest(model)
    for budget in (least, (least + step_bytes(copy.deepcopy(model), batch())) // 2, 1.0):
        plan = planned(model, budget).plan
        assert plan.gradient_bytes == there
        assert plan.peak_bytes == plan.measured_peak_bytes <= plan.budget_bytes
    module = planned(model, least)
    assert [step_bytes(module, batch())] == [module.plan.peak_bytes]


@pytest.mark.ci
def test_a_budget_that_fits_where_gradients_are_there_is_refused_with_that_advice_where_they_are_not():
    least, without = smallest(with_gradients(built(Wide))), smallest(built(Wide))
    assert least < 0.6 * without
    words = rf"zero_grad\(set_to_none=False\) \(this budget does, above {GRADIENT_BYTES / 1024:.1f} KiB of gradients\)"
    with pytest.raises(BudgetTooSmall, match=words):
        planned(built(Wide), least)
    with pytest.raises(BudgetTooSmall, match=r"set_to_none=False\) \(about "):
        planned(built(Wide), 1000)


def test_accumulated_gradients_are_eagers_and_each_step_takes_what_its_plan_says():
    model = with_gradients(built(Wide))
    module = planned(model, smallest(model))
    eager = copy.deepcopy(model)
    with_gradients(eager)
    for seed in range(3):
        assert step_bytes(module, batch(seed)) <= module.plan.budget_bytes
        step(eager, batch(seed))
    assert len(module.plans) == 1
    assert_same(seen(module.original, (), ()), seen(eager, (), ()))


@pytest.mark.ci
def test_each_step_of_accumulation_has_its_plan_and_both_are_kept():
    """The first makes the gradients; the others add to them, and have as many bytes more for activations."""
    model = built(Wide)
    budget = smallest(model) + 4096
    module = planned(model, budget)
    first = module.plan
    assert first.recomputations
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the other plan is no news
        for cycle in range(3):
            model.zero_grad()
            for seed in range(4):
                if cycle < 2:
                    step(module, batch(seed))
                else:
                    assert step_bytes(module, batch(seed)) <= budget
                assert module.plan.gradient_bytes == (0 if seed == 0 or len(module.plans) == 1 else GRADIENT_BYTES)
    assert [plan.gradient_bytes for plan in module.plans] == [GRADIENT_BYTES, 0]
    assert module.plan.time_ms <= first.time_ms
    assert module.plan.budget_bytes == first.budget_bytes == budget


@pytest.mark.ci
def test_a_plan_above_gradients_makes_room_for_another_where_they_are_gone():
    model = with_gradients(built(Wide))
    budget = smallest(built(Wide)) + 4096
    module = planned(model, budget)
    model.zero_grad()
    with pytest.warns(ReplanWarning, match=r"12 of 12 gradients that a step was planned to add to are not there, .*\."):
        step(module, batch())
    model.zero_grad()
    assert step_bytes(module, batch()) <= budget
    with_gradients(model)
    assert step_bytes(module, batch()) <= budget
    assert [plan.gradient_bytes for plan in module.plans] == [GRADIENT_BYTES, 0]


@pytest.mark.ci
def test_gradients_that_go_and_come_between_forward_and_backward_stay_within_the_budget():
    model = with_gradients(built(Wide))
    least = smallest(model)
    module = planned(model, least)
    held = sum(parameter.grad.nbytes for parameter in model.parameters())
    output = module(batch())
    with AllocationLog(CPU) as log:  # from the forward's end on, the activations are there
        model.zero_grad()
        squares(output).backward()
    assert log.peak_bytes - held <= least, "what is freed makes room"
    other = planned(built(Wide), 0.9)
    output = other(batch())
    with_gradients(other)  # somebody else's bytes
    squares(output).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in other.parameters())


@pytest.mark.ci
def test_frozen_and_sparse_gradients_and_those_of_unused_parameters_count_as_what_they_are():
    model = built(Wide)
    model.unused = nn.Parameter(torch.ones(1000))
    model.layers[0].requires_grad_(False)
    with_gradients(model)
    plan = planned(model, 1.0).plan
    assert plan.gradient_bytes == GRADIENT_BYTES * (DEPTH - 1) // DEPTH
    assert plan.peak_bytes == plan.measured_peak_bytes
    model.layers[1].weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
    assert planned(model, 1.0).plan.gradient_bytes == plan.gradient_bytes - 4 * WIDTH * WIDTH


def test_tied_parameters_have_one_gradient_that_is_there():
    model = with_gradients(built(Tied))
    sample = tokens()
    plan = planned(model, 1.0, sample).plan
    assert plan.gradient_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert plan.peak_bytes == plan.measured_peak_bytes


@pytest.mark.ci
def test_a_budget_for_all_of_training_counts_gradients_once_whether_or_not_they_are_there():
    without = planned(built(Wide), 0.9, scope="total")
    there = planned(with_gradients(built(Wide)), 0.9, scope="total")
    assert there.plan.gradient_bytes == without.plan.gradient_bytes == 0
    assert there.plan.budget_bytes == without.plan.budget_bytes
    assert there.memory_split.residents.gradient_bytes == GRADIENT_BYTES


@pytest.mark.ci
def test_a_plan_file_tells_for_which_gradients_its_plan_is(tmp_path):
    model = with_gradients(built(Wide))
    module = planned(model, smallest(model))
    module.save_plan(tmp_path / "plan.json")
    file = plan_files.load(tmp_path / "plan.json")
    assert len(file.asked.gradients) == 2 * DEPTH
    again = Rockmate(with_gradients(built(Wide)), batch(), plan=file)
    assert again.plan.gradient_bytes == module.plan.gradient_bytes == GRADIENT_BYTES
    assert step_bytes(again, batch()) == module.plan.peak_bytes


@pytest.mark.ci
def test_the_cache_keeps_plans_for_other_gradients_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    plans = [planned(model, "1MiB").plan for model in (built(Wide), with_gradients(built(Wide)), built(Wide))]
    assert [plan.gradient_bytes for plan in plans] == [0, GRADIENT_BYTES, 0]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.ci
def test_a_report_of_such_a_plan_measures_steps_above_the_gradients():
    model = with_gradients(built(Wide))
    module = planned(model, smallest(model))
    text = module.report(sample=batch())
    assert re.search("above 97.5 KiB of gradients", str(module.plan))
    assert text


class Branching(nn.Module):
    """Goes by the sign of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Wide()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.wide(hidden) if bool(hidden.sum() > 0) else self.wide(hidden.neg()).cos()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ci
def test_other_gradients_and_other_branches_go_together():
    model = built(Branching)
    sample = batch().abs()
    budget = smallest(model, sample) + 20_000
    module = planned(model, budget, sample)
    eager = copy.deepcopy(model)
    for turn in range(12):
        data = sample if turn % 3 else -sample
        step(module, data)
        step(eager, data)
    assert_same(seen(module.original, (), ()), seen(eager, (), ()))
    assert len(module.plans) <= 5


@pytest.mark.parametrize("as_planned", [False, True])
def test_verify_runs_the_steps_that_the_plan_is_for(as_planned):
    """A warning of another plan would be an error."""
    model = with_gradients(built(Wide))
    least = smallest(model)
    result = verify(planned(model, least) if as_planned else model, batch(), least, loss=squares)
    assert result.exact, result
    assert result.plan.gradient_bytes == GRADIENT_BYTES
    assert all(parameter.grad.abs().sum() == 0 for parameter in model.parameters())


def test_a_profile_measures_steps_above_the_gradients():
    model = with_gradients(built(Wide))
    module = planned(model, smallest(model))
    assert profile(module, batch(), loss=squares, steps=1).plan.peak_bytes == module.plan.peak_bytes


@pytest.mark.parametrize(("fraction", "rows"), [(0.95, 48), (1.0, 48), (1.0, 12), ("100%", 12)])
@pytest.mark.ci
def test_a_fraction_is_of_what_the_steps_of_the_loop_take_whatever_gradients_a_warm_up_left(fraction, rows):
    """Warnings are errors: that the steps make their gradients is no news."""
    warmed, fresh = built(Wide), built(Wide)
    step(warmed, batch())
    module = planned(warmed, fraction, batch()[:rows])
    above = module.plan
    warmed.zero_grad()
    step(module, batch()[:rows])
    for seed in range(3):
        warmed.zero_grad()
        assert step_bytes(module, batch(seed)[:rows]) <= module.plan.budget_bytes
    expected = planned(fresh, fraction, batch()[:rows]).plan
    assert module.plan.budget_bytes == expected.budget_bytes >= above.budget_bytes
    assert (module.plan.budget_bytes > above.budget_bytes) == (rows == 12), "gradients make the peak of few rows"
    assert module.plan.baseline_peak_bytes == expected.baseline_peak_bytes
    assert len(module.plans) == 2


@pytest.mark.ci
def test_a_fraction_is_of_the_first_calls_step_where_calls_of_another_shape_make_gradients():
    warmed = with_gradients(built(Wide))
    module = planned(warmed, 1.0, batch()[:12])
    above = module.plan
    warmed.zero_grad()
    with pytest.warns(ReplanWarning, match="tensor 0 of this call"):
        step(module, batch()[:8])
    assert above.budget_bytes < module.plan.budget_bytes
    assert module.plan.budget_bytes == planned(built(Wide), 1.0, batch()[:12]).plan.budget_bytes
    assert [plan.gradient_bytes for plan in module.plans] == [0, GRADIENT_BYTES]


@pytest.mark.ci
def test_what_a_fraction_is_of_outlives_a_copy():
    module = copy.deepcopy(planned(with_gradients(built(Wide)), 1.0, batch()[:12]))
    module.zero_grad()
    step(module, batch()[:12])
    assert module.plan.budget_bytes == planned(built(Wide), 1.0, batch()[:12]).plan.budget_bytes
