"""Calls that no plan holds for: other shapes, types, modes, autocast, and other branches of the model."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from rockmate import (
    BudgetTooSmall,
    FallbackWarning,
    InputMismatch,
    PlanMismatch,
    ReplanWarning,
    Rockmate,
    ShapesError,
    TraceWarning,
)
from tests.module.models import WIDTH, Layers, Normalised, built, images, rows
from tests.module.steps import FEW_ROUNDS, assert_same, assert_trains_exactly, peak_of_step, seen, squares
from tests.where import here


def planned(model: nn.Module, sample: object = None, budget: object = 0.6, **options: object) -> Rockmate:
    return Rockmate(model, sample, budget, loss=squares, limits=FEW_ROUNDS, **options)


def trains_like(model: Rockmate, eager: nn.Module, batch: Tensor) -> None:
    """One step of each from the same random stream, buffers compared too; gradients are taken off afterwards."""
    records = []
    for module in (eager, model):
        torch.manual_seed(5)
        output = module(batch)
        squares(output).backward()
        records.append(seen(module, (), output))
        module.zero_grad()
    assert_same(records[1], records[0])


# ---- other shapes ------------------------------------------------------------------------------------


def test_a_batch_of_another_shape_is_planned_when_it_first_comes_and_the_plan_is_kept():
    model = planned(built(Layers), rows())
    eager = copy.deepcopy(model.original)
    budget_bytes = model.plan.budget_bytes
    with pytest.warns(ReplanWarning) as told:
        trains_like(model, eager, rows(1)[:200])
    assert len(told) == 1
    assert re.match(
        r"Layers was planned once more, in [\d.]+ s, and has 2 plans now under .*: tensor 0 of this call is "
        rf"float32\[200, 32\] on {here()}, but the sample's was float32\[512, 32\] on {here()}\. Each is kept",
        str(told[0].message),
    )
    for batch in (rows(2), rows(3)[:200], rows(4)):
        trains_like(model, eager, batch)  # warnings are errors
    assert [plan.calls for plan in model.plans] == [f"float32[{rows}, 32] on {here()}" for rows in (512, 200)]
    assert all(plan.budget_bytes == budget_bytes >= plan.measured_peak_bytes for plan in model.plans)


@pytest.mark.ci
def test_the_bytes_of_the_first_plan_bound_all_others():
    model = planned(built(Layers), rows()[:100], budget=1.0)
    with pytest.warns(ReplanWarning):
        squares(model(rows()[:140])).backward()
    assert model.plan.recomputations > 0
    assert peak_of_step(model, (rows()[:140],)) <= model.plans[-1].budget_bytes
    with pytest.raises(BudgetTooSmall):
        model.plan_for(rows())
    assert len(model.plans) == 2
    squares(model(rows()[:100])).backward()


@pytest.mark.ci
def test_plans_made_ahead_are_used_without_a_word():
    model = planned(built(Layers))
    lengths = (512, 100, 300)
    plans = [model.plan_for(rows()[:length]) for length in lengths]
    assert {plan.budget_bytes for plan in plans} == {plans[0].budget_bytes}
    eager = copy.deepcopy(model.original)
    for length in reversed(lengths):
        trains_like(model, eager, rows(2)[:length])
    assert len(model.plans) == 3
    assert model.eval().plan_for(rows(1)[:300]) in plans  # there already
    assert len(model.plans) == 3


@pytest.mark.ci
def test_the_plan_that_was_not_used_for_longest_goes_when_there_are_many(monkeypatch):
    monkeypatch.setattr("rockmate.calls.specializations._MOST_PLANS", 2)
    model = planned(built(Layers), budget=1.0)
    for length in (32, 24, 32, 16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplanWarning)
            model.plan_for(rows()[:length])
            squares(model(rows()[:length])).backward()
    assert [plan.calls for plan in model.plans] == ["float32[16, 32] on cpu", "float32[32, 32] on cpu"]


def test_blocks_that_are_equal_are_not_measured_again():
    network = built(Layers)
    model = planned(network, rows())
    measured = dict(model._family._known)
    network.layers[3].requires_grad_(False)
    with pytest.warns(ReplanWarning, match=r"requires_grad of 'layers\.3\.weight' is False"):
        squares(model(rows(1))).backward()
    assert measured.items() <= model._family._known.items()
    network.layers[3].requires_grad_(True)
    squares(model(rows(1))).backward()  # the first plan holds again


def test_the_plan_next_in_size_is_followed():
    told = []
    model = planned(built(Layers), rows(), shapes="nearest", progress=lambda *report: told.append(report[0]))
    model.plan_for(rows()[:50])
    eager = copy.deepcopy(model.original)
    told.clear()
    with pytest.warns(ReplanWarning):
        trains_like(model, eager, rows(1)[:300])
    assert not [stage for stage in told if stage.startswith("solve (")]  # it was not searched for
    assert model.plan.schedule in (model.plans[2].schedule, model.plans[1].schedule)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert peak_of_step(model, (rows(1)[:300],)) <= model.plan.budget_bytes


def test_what_is_larger_than_every_plan_is_planned_by_itself():
    model = planned(built(Layers), rows()[:100], budget="2MiB", shapes="nearest")
    assert model.plan.recomputations == 0
    with pytest.warns(ReplanWarning):
        squares(model(rows())).backward()
    assert model.plan.measured_peak_bytes <= 2 << 20


def test_other_shapes_run_eagerly_if_so_wanted_and_say_so_once():
    model = planned(built(Layers), rows(), shapes="eager")
    eager = copy.deepcopy(model.original)
    with pytest.warns(ReplanWarning, match=r"runs without a plan, and without a budget: tensor 0 of this call is"):
        trains_like(model, eager, rows(1)[:200])
    trains_like(model, eager, rows(2)[:200])
    trains_like(model, eager, rows(3))
    assert len(model.plans) == 1


def test_other_shapes_are_refused_if_so_wanted():
    model = planned(built(Layers), rows(), shapes="error")
    with pytest.raises(InputMismatch, match="the plan holds for the sample's shapes"):
        model(rows(1)[:200])
    model.layers[0].weight.requires_grad_(False)
    with pytest.raises(PlanMismatch):
        model(rows(1))


def test_an_unknown_answer_to_other_shapes_is_refused():
    with pytest.raises(ShapesError, match=r"shapes is 'pad'; say what to do .* \"replan\", \"nearest\""):
        Rockmate(built(Layers), shapes="pad")


def test_the_short_last_batch_of_an_epoch_just_works():
    data = torch.utils.data.DataLoader(torch.randn(70, 3, 12, 12), batch_size=16)
    model = planned(built(Normalised), budget=0.8)
    eager = copy.deepcopy(model.original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplanWarning)
        for _ in range(2):
            for batch in data:
                trains_like(model, eager, batch)
    assert sorted(plan.calls for plan in model.plans) == [f"float32[{n}, 3, 12, 12] on cpu" for n in (16, 6)]


def test_a_copy_plans_other_shapes_as_the_original_does():
    network = built(Layers)
    model = planned(network, rows(), pin=[network.layers[1]])
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplanWarning)
        trains_like(twin, copy.deepcopy(network), rows(1)[:200])
    assert twin.plan.calls == "float32[200, 32] on cpu"
    assert len(model.plans) == 1


# ---- the module changed -------------------------------------------------------------------------------

CHANGES = {
    "frozen": lambda model: model.layers[1].requires_grad_(False),
    "mode": lambda model: model.dropout.eval(),
    "dtype": lambda model: model.double(),
    "part": lambda model: model.layers.__setitem__(2, nn.Linear(WIDTH, WIDTH, bias=False)),
    "added": lambda model: model.layers.append(nn.Linear(WIDTH, WIDTH)),
    "parameter": lambda model: setattr(model.layers[0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)),
    "parametrized": lambda model: nn.utils.parametrize.register_parametrization(model.layers[0], "weight", Halved()),
    "rate": lambda model: setattr(model.dropout, "p", 0.4),
    "hooked": lambda model: model.layers[0].register_forward_hook(double_output),
}


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def double_output(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::rockmate.TraceWarning")  # that hooks of submodules do not fire
def test_a_module_that_changed_is_planned_again_and_trains_exactly(change):
    model = planned(built(Layers), rows(), budget=1.0 if change == "dtype" else 0.6)
    eager = copy.deepcopy(model.original)
    for module in (model, eager):
        torch.manual_seed(3)
        CHANGES[change](module)
    batch = rows(1).to(next(model.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplanWarning)
        trains_like(model, eager, batch)
    trains_like(model, eager, batch + 1)


@pytest.mark.ci
def test_autocast_is_followed():
    model = planned(built(Layers), rows())
    eager = copy.deepcopy(model.original)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(ReplanWarning, match=r"autocast is on for cpu \(bfloat16\), but was off"),
    ):
        trains_like(model, eager, rows(1))
    trains_like(model, eager, rows(2))
    with torch.autocast("cpu", torch.bfloat16):
        trains_like(model, eager, rows(3))


# ---- branches on data -----------------------------------------------------------------------------------


class Branching(Layers):
    """Draws, counts, and then goes one of many ways, by what the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(self.dropout(hidden))
        ways = int(hidden.detach().abs().max() > 1e3) + int(hidden.detach()[0, 0] > 0)
        return super().forward(hidden) * (1 + ways)


@pytest.mark.ci
def test_data_that_take_another_branch_are_planned_by_themselves():
    """The plan that refuses them has drawn random numbers and counted a batch by then: both are undone."""
    batches = [rows(seed) for seed in range(6)]
    model = planned(built(Branching), rows(), budget=0.8)
    eager = copy.deepcopy(model.original)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches * 2:
            trains_like(model, eager, batch)
    assert len(model.plans) == 2
    assert len([one for one in told if one.category is ReplanWarning]) == 1


class Counting(nn.Module):
    """Reads another number out of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(hidden)) * float(hidden.sum())


@pytest.mark.ci
def test_a_module_that_reads_something_else_of_every_batch_is_not_planned_for_ever():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = planned(built(Counting), rows()[:8], budget="1MiB")
        for seed in range(1, 8):
            squares(model(rows(seed)[:8])).backward()
    model.zero_grad()
    with pytest.warns(FallbackWarning, match="8 plans for such calls are there, each for other data or settings"):
        trains_like(model, copy.deepcopy(model.original), rows(9)[:8])
    assert len(model.plans) == 8
    with pytest.warns(TraceWarning, match="data that take another branch than the sample are traced by themselves"):
        lenient = planned(built(Counting), rows()[:8], budget="1MiB", shapes="eager")
    with pytest.warns(ReplanWarning, match="runs without a plan, and without a budget: at"):
        trains_like(lenient, copy.deepcopy(lenient.original), rows(9)[:8])


def test_a_batch_norm_counts_each_batch_once_however_it_is_planned():
    model = planned(built(Normalised), images(), budget=0.8)
    assert int(next(b for n, b in model.named_buffers() if n.endswith("num_batches_tracked"))) == 0
    assert_trains_exactly(model, [images(1), images(2)])
