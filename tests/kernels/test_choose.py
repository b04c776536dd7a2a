"""`Rockmate(..., kernels="auto")`: other kernels where they are faster, and training is exact in what it then is."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from rkgb.replay.step_record import bitwise_equal
from rockmate import (
    ArgumentError,
    BudgetTooSmall,
    KernelsError,
    PlanOptions,
    Rockmate,
    distributed,
    max_batch,
    plan_files,
    smallest_budget,
    verify,
    zoo,
)
from rockmate.choices import kernels as choice
from rockmate.kernels import choose, trial
from rockmate.kernels.alternative import Alternative
from rockmate.kernels.alternatives import alternatives_of
from rockmate.kernels.option import ChosenKernels, KernelTrial
from rockmate.plan_files.rank_agreement import RankAgreement
from rockmate.planning.measured import trace_model
from rockmate.planning.request import PlanRequest
from rockmate.queries.sweep import OURS, sweep
from tests.kernels.conftest import onednn_off
from tests.module.models import built
from tests.module.random_networks import random_case
from tests.module.steps import BRIEFLY, squares, train

AUTO = PlanOptions(loss=squares, kernels="auto", limits=BRIEFLY, plan_in_background=False)


class Products(nn.Module):
    """Products in each form in which models have them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.plain, self.drop = nn.Linear(24, 16, bias=False), nn.Dropout(0.2)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 20) / 4), nn.Parameter(torch.randn(20))
        self.last = nn.Parameter(torch.randn(20, 3) / 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(layer(x).tanh())
        flat = torch.addmm(self.bias, self.plain(x).flatten(0, 1), self.weight).tanh()
        return flat.view(*x.shape[:2], 20) @ self.last


class Points(nn.Module):
    """Convolutions of single points, and others."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.wide, self.narrow = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 8, 1, bias=False)
        self.strided, self.head = nn.Conv2d(8, 8, 1, stride=2), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.body(x)).relu()
        x = x + self.narrow(self.wide(x).relu())
        return self.head(self.strided(x).mean((2, 3)))


def rows(batch=8, length=32):
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(batch + length))


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


CASES = {"products": (Products, rows, 7), "points": (Points, images, 3)}


def steady():
    """A smooth model that draws nothing."""
    model = built(Products)
    model.drop.p = 0.0
    return model


def planned(model, sample, budget=0.8, **said):
    return Rockmate(model, sample, budget, options=replace(AUTO, **({"cache": False} | said)))


def kernels_of(model: Rockmate) -> ChosenKernels:
    assert model.plan.kernels is not None
    return model.plan.kernels


def others_in(model: nn.Module, sample: torch.Tensor) -> list[str]:
    """Names of the operations for which there is another kernel that PyTorch does not pick itself."""
    graph = trace_model(model, sample, PlanRequest(None, loss=squares)).graph.dgraph
    return [op.name for op in graph for other in alternatives_of(graph, op) if not other.is_picked]


# ---- exactness -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize(
    ("name", "budget"),
    [("products", 1.0), ("products", 0.8), ("products", 0.6), ("points", "1MiB"), ("points", "195KiB")],
)
def test_training_is_that_of_these_kernels_without_a_plan(name, budget):
    make, sample, count = CASES[name]
    model = planned(built(make), sample(), budget)
    assert len(kernels_of(model).operations) == count
    found = verify(model, sample(), loss=squares)
    assert found.exact, found
    assert found.from_eager is not None
    assert found.from_eager < 1e-5  # rounding alone
    # Both libraries of an Intel processor sum small products in one order.
    assert found.from_eager > 0 or name == "products"
    assert "with other kernels; gradients are" in str(found)


@pytest.mark.usefixtures("quicker")
def test_all_budgets_give_equal_bits():
    first, *others = (train(planned(built(Products), rows(), budget), [rows(), rows()]) for budget in (1.0, 0.7, 0.55))
    for other in others:
        for name, value in first.parameters.items():
            assert bitwise_equal(other.parameters[name], value), name


@pytest.mark.usefixtures("quicker")
def test_a_smooth_model_is_as_far_from_float64_as_eager_is():
    models = steady().double(), steady(), planned(steady(), rows())
    for model, batch in zip(models, (rows().double(), rows(), rows()), strict=True):
        squares(model(batch)).backward()
    truth, eager, ours = ([one.grad.double() for one in model.parameters()] for model in models)
    away, usual = (
        sum(float((one - other).square().sum()) for one, other in zip(found, truth, strict=True)) ** 0.5
        for found in (ours, eager)
    )
    assert 0 < away < 3 * usual  # rounding, in another order of sums


@pytest.mark.ci
@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("seed", range(24))
def test_random_networks_train_exactly(seed):
    case = random_case(seed)
    with case.casting():
        found = verify(case.network, case.batch(0), 0.9, options=replace(AUTO, loss=case.loss), steps=2)
    assert found.exact or not found.eager_is_deterministic, f"{found}\n{case}"


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "resnet18-tiny"])
def test_models_of_the_zoo_train_exactly(name):
    entry = zoo.get(name)
    found = verify(entry.model, entry.sample, 0.8, options=replace(AUTO, loss=entry.loss))
    assert found.exact, found
    assert found.plan.kernels.operations


@pytest.mark.usefixtures("quicker")
def test_the_measured_peak_is_within_the_budget_and_predicted():
    model = planned(built(Products), rows(16, 64), 0.6)
    plan = model.plan
    assert kernels_of(model).operations
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes <= plan.peak_bytes


# ---- what is chosen --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quicker")
def test_a_class_of_equal_operations_is_tried_once(quicker):
    model = planned(built(Products), rows())
    counts = sorted(len(one.operations) for one in kernels_of(model).trials)
    assert counts == [1, 1, 1, 1, 3]  # the input of the first layer has no gradient
    assert len(quicker) == len(counts)
    planned(built(Products), rows())
    assert len(quicker) == len(counts)


@pytest.mark.usefixtures("fresh", "one_thread")
def test_what_is_slower_or_hardly_faster_stays(monkeypatch):
    for other_ms in (0.97, 1.3):
        choose._TRIED.clear()
        monkeypatch.setattr(
            choose, "tried", lambda op, other, _, ms=other_ms: KernelTrial((op.name,), other.kernel, 1.0, ms)
        )
        model = planned(built(Products), rows())
        assert not kernels_of(model).operations
        assert str(model.plan.kernels) == "those that PyTorch picks are the fastest"
        found = verify(model, rows(), loss=squares)
        assert found.exact
        assert found.from_eager is None


@pytest.mark.usefixtures("fresh", "one_thread")
def test_both_kernels_are_timed_on_numbers_like_theirs():
    for name, (make, sample, _) in CASES.items():
        graph = trace_model(built(make), sample(), PlanRequest(None, loss=squares)).graph.dgraph
        for op in graph:
            for other in alternatives_of(graph, op):
                found = trial.tried(op, other, graph.values)
                assert not found.refused, (name, op.name, found.refused)
                assert min(found.given_ms, found.other_ms) > 0


@pytest.mark.usefixtures("quicker")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda call: replace(call, args=(*call.args[:2], None, call.args[3])), "its numbers are others"),
        (lambda call: replace(call, args=(*call.args[:3], not call.args[3])), "RuntimeError"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_stands_for_nothing(monkeypatch, change, reason):
    def wrong(graph, op):
        others = alternatives_of(graph, op) if op.call.op_name == "linear" else ()
        return tuple(Alternative(other.kernel, change(other.call)) for other in others)

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 8)

        def forward(self, x):
            return self.layer(x).tanh()

    monkeypatch.setattr(choose, "alternatives_of", wrong)
    model = planned(built(Narrow), rows(), 1.0)
    (found,) = kernels_of(model).trials
    assert reason in found.refused
    assert verify(model, rows(), loss=squares).from_eager is None


def test_no_other_kernel_is_known_of_what_it_would_not_fit():
    assert len(others_in(built(Products), rows())) == 7
    assert not others_in(built(Products).double(), rows().double())
    with onednn_off():
        assert not others_in(built(Products), rows())


class Scaled(nn.Module):
    def __init__(self, beta, bias):
        super().__init__()
        self.weight, self.bias, self.beta = nn.Parameter(torch.randn(24, 6)), nn.Parameter(torch.randn(bias)), beta

    def forward(self, x):
        return torch.addmm(self.bias, x[0], self.weight, beta=self.beta).tanh()


@pytest.mark.parametrize(("beta", "bias", "count"), [(1, (6,), 1), (2, (6,), 0), (1, (32, 6), 0), (1, (1,), 0)])
def test_sums_with_a_product_are_taken_where_a_bias_is_added(beta, bias, count):
    assert len(others_in(built(Scaled, beta, bias), rows())) == count


@pytest.mark.usefixtures("one_thread")
def test_points_are_pytorch_s_own_choice_in_large_batches_and_with_threads():
    assert len(others_in(built(Points), images())) == 3
    assert len(others_in(built(Points), torch.randn(16, 3, 16, 16))) == 1  # the linear layer
    torch.set_num_threads(2)
    assert len(others_in(built(Points), images())) == 1


@pytest.mark.usefixtures("quicker")
def test_where_they_take_too_much_the_usual_ones_are_taken():
    model = planned(built(Points), images(), 0.9)
    assert str(model.plan.kernels) == "no plan by other kernels is within the budget"
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    found = verify(model, images(), loss=squares)
    assert found.exact
    assert found.from_eager is None


@pytest.mark.usefixtures("quicker")
def test_under_autocast_what_is_computed_in_fewer_bits_stays():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = planned(built(Products), rows())
        assert not kernels_of(model).operations
        assert verify(model, rows(), loss=squares).exact


def test_by_default_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(choose, "tried", lambda *_: pytest.fail("nobody asked"))
    model = planned(built(Products), rows(), kernels="as given")
    assert model.plan.kernels is None
    assert verify(model, rows(), loss=squares).from_eager is None


@pytest.mark.parametrize("kernels", ["fast", None, True])
def test_other_choices_are_refused(kernels):
    with pytest.raises(KernelsError, match='say "as given" for those that PyTorch picks, or "auto"'):
        planned(built(Products), rows(), kernels=kernels)


# ---- plans that are kept, of other sizes, of other ranks -------------------------------------------------


@pytest.mark.usefixtures("quicker")
def test_a_plan_of_a_file_has_the_same_kernels(tmp_path, monkeypatch):
    model, path = planned(built(Products), rows(), 0.7), tmp_path / "plan.json"
    plan_files.save(model.plan_file(), path)
    expected = train(copy.deepcopy(model), [rows()])
    monkeypatch.setattr(choose, "tried", lambda *_: pytest.fail("the file tells"))
    choose._TRIED.clear()
    again = Rockmate(built(Products), rows(), plan=path, loss=squares)
    assert again.plan.kernels == model.plan.kernels
    found = train(again, [rows()])
    for name, value in expected.parameters.items():
        assert bitwise_equal(found.parameters[name], value), name
    with (
        onednn_off(),
        pytest.raises(
            KernelsError, match="one of products by oneDNN in the plan, and cannot be here: are they switched off"
        ),
    ):
        Rockmate(built(Products), rows(), plan=path, loss=squares)


@pytest.mark.usefixtures("quicker")
def test_a_second_start_tries_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    first = planned(built(Products), rows(), cache=True)
    choose._TRIED.clear()
    monkeypatch.setattr(choose, "tried", lambda *_: pytest.fail("it is in the cache"))
    again = planned(built(Products), rows(), cache=True)
    assert again.plan.kernels == first.plan.kernels
    assert again.plan.schedule == first.plan.schedule
    assert len(kernels_of(planned(built(Products), rows(), 0.7, cache=True)).operations) == 7


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.usefixtures("quicker")
def test_lengths_that_are_not_planned_have_them_too():
    model, eager = planned(steady(), rows(3, 24)), steady()
    for length in (24, 20, 16, 22, 12, 18, 23):
        batch = rows(3, length)
        found, expected = (squares(one(batch)) for one in (model, eager))
        found.backward(), expected.backward()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # rounding of sums
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
    assert len(model.plans) > 3
    assert all(plan.kernels is not None and plan.kernels.operations for plan in model.plans)


@pytest.mark.usefixtures("quicker")
def test_all_ranks_have_what_the_first_has_chosen(monkeypatch):
    store, found = torch.distributed.HashStore(), []
    for rank in range(2):
        monkeypatch.setattr(choice, "default_exchange", lambda _, rank=rank: RankAgreement(store, rank, 5.0))
        found.append(kernels_of(planned(built(Products), rows())))
        choose._TRIED.clear()
        monkeypatch.setattr(choose, "tried", lambda *_: pytest.fail("the other rank did"))
    assert found[0] == found[1]
    assert found[0].operations


@pytest.mark.usefixtures("quicker")
def test_a_planned_module_is_copied_and_pickled_with_them():
    model = planned(built(Products), rows(), 0.7)
    expected = train(copy.deepcopy(model), [rows()])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = train(other, [rows()])
        assert all(bitwise_equal(found.parameters[name], value) for name, value in expected.parameters.items())


@pytest.mark.usefixtures("quicker")
def test_questions_are_answered_for_plans_with_them():
    options = replace(AUTO, cache=False)
    found = smallest_budget(built(Products), rows(), 1.2, options=options)
    usual = smallest_budget(built(Products), rows(), 1.2, options=replace(options, kernels="as given"))
    assert found.plan_file.plan.kernels.operations
    assert found.budget_bytes < usual.budget_bytes  # as the plan may repeat more in that time
    largest, most = (
        max_batch(lambda batch: (built(Products), rows(batch), squares), budget="400KiB", measurements=2, options=one)
        for one in (options, replace(options, kernels="as given"))
    )
    assert largest.batch >= most.batch > 1
    assert largest.plan_file.plan.measured_peak_bytes <= largest.budget_bytes


@pytest.mark.usefixtures("quicker")
def test_where_they_take_more_memory_answers_are_those_of_the_usual_ones():
    """Convolutions of single points are said to be quicker here, and take more."""
    options, usual = replace(AUTO, cache=False), replace(AUTO, cache=False, kernels="as given")
    found, expected = (smallest_budget(built(Points), images(), 3.0, options=one) for one in (options, usual))
    assert found.budget_bytes == expected.budget_bytes
    assert found.plan_file.plan.kernels is None
    largest, most = (
        max_batch(
            lambda batch: (built(Points), torch.randn(batch, 3, 16, 16), squares), budget="1MiB", options=one
        ).batch
        for one in (options, usual)
    )
    assert largest >= most
    table = sweep(built(Points), images(), [0.9, 1.0], options=replace(options, loss=squares))
    assert [row.fits for row in table.rows if row.solver == OURS] == [True, True]


@pytest.mark.usefixtures("fresh", "one_thread")
def test_a_budget_that_is_too_small_is_searched_once_where_no_other_kernel_is_faster(monkeypatch):
    monkeypatch.setattr(choose, "tried", lambda op, other, _: KernelTrial((op.name,), other.kernel, 1.0, 1.2))
    asked = []
    plain = choice.plan_with_or_without_parts
    monkeypatch.setattr(
        choice, "plan_with_or_without_parts", lambda *given: (asked.append(given[2].kernels), plain(*given))[1]
    )
    with pytest.raises(BudgetTooSmall):
        planned(built(Products), rows(), "40KiB")
    assert asked == ["auto"]


@pytest.mark.usefixtures("quicker")
def test_it_goes_with_compiled_parts_and_layouts(monkeypatch):
    found = verify(built(Points), images(), "1MiB", options=replace(AUTO, layout="channels_last"))
    assert found.exact, found
    assert len(found.plan.kernels.operations) == 3
    assert found.plan.layout.weights


def test_plans_of_blocks_refuse_it():
    with pytest.raises(ArgumentError, match="kernels is an option of whole models"):
        distributed.plan_blocks(built(Products), "1GiB", rows(), options=AUTO)


def test_one_dilation_more_changes_nothing_of_a_single_point():
    x, weight = torch.randn(2, 5, 7, 7, dtype=torch.float64), torch.randn(3, 5, 1, 1, dtype=torch.float64)
    one, other = (torch.nn.functional.conv2d(x, weight, padding=1, dilation=apart) for apart in (1, 2))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # sums of float64 in another order
