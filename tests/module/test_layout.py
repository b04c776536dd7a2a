"""`Rockmate(..., layout=...)`: convolutions in channels_last where that is faster, and all is eager's in it."""

import copy
import pickle
import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb.replay.step_record import bitwise_equal
from rockmate import (
    ArgumentError,
    BudgetTooSmall,
    LayoutError,
    Offload,
    PlanOptions,
    Rockmate,
    distributed,
    max_batch,
    plan_files,
    smallest_budget,
    verify,
    zoo,
)
from rockmate.calls import specializations
from rockmate.choices import layout as choice
from rockmate.layouts.weights import FORMATS, channels_last_strides, laid_out, lay_out
from rockmate.plan_files.rank_agreement import RankAgreement
from tests.module.steps import BRIEFLY, assert_same_training, squares, train
from tests.where import placed


def images(seed=0, size=20):
    return placed(torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed)))


class Convolutions(nn.Module):
    """What a convolutional network is made of, a transposed convolution and one of a function's among it."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), activation()
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 12, 1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.own = nn.Parameter(torch.randn(4, 6, 3, 3) / 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        x = x + self.act(self.deep(x))
        x = self.act(F.conv2d(self.up(self.point(x)), self.own, padding=1))
        return self.head(self.drop(x.mean((2, 3))))


class Towers(nn.Module):
    """Two towers that meet where there are no places any more: two regions."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in range(2))

    def forward(self, x):
        return self.left(x).mean((2, 3)) * self.right(x).mean((2, 3))


class Viewing(nn.Module):
    """What people wrote before `flatten`: it takes its input to lie as given."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 18 * 18, 3)

    def forward(self, x):
        x = self.body(x)
        return self.head(x.view(x.size(0), -1))


class Voxels(nn.Module):
    """Convolutions of three dimensions, and of one, which has no such layout."""

    def __init__(self):
        super().__init__()
        self.body, self.line = nn.Conv3d(3, 6, 3, padding=1), nn.Conv1d(6, 4, 3)

    def forward(self, x):
        x = self.body(x[:, :, None].expand(-1, -1, 4, -1, -1)).relu()
        return self.line(x.mean((2, 3)))


def built(make, seed=0):
    torch.manual_seed(seed)
    return placed(make())


def planned(model, sample, budget=1.0, **options):
    options = {"limits": BRIEFLY, "loss": squares, "layout": "channels_last", **options}
    return Rockmate(model, sample, budget, cache=options.pop("cache", False), **options)


def strides(module):
    return {path: parameter.stride() for path, parameter in module.named_parameters()}


@pytest.fixture
def quicker(monkeypatch):
    """Says which regions are quicker in channels_last, by a weight of theirs, whatever was measured."""
    quick = set()

    def times_ms(graph, region):
        leaves = graph.sgraph.dgraph.leaves
        names = {leaf.path: graph.sgraph.dgraph.values[leaf.name] for leaf in leaves.values()}
        is_laid = names[region.weights[0]].stride == channels_last_strides(names[region.weights[0]].shape)
        return 1.0 if is_laid and quick.intersection(region.weights) else 2.0

    monkeypatch.setattr(choice, "times_ms", times_ms)
    monkeypatch.setattr(choice, "eager_steps_ms", lambda *_: None)  # as where no step fits
    return quick


# ---- exactness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.6])
@pytest.mark.parametrize("make", [Convolutions, Towers, Voxels])
def test_training_is_eagers_in_that_layout_to_the_bit(make, budget):
    model = built(make)
    try:
        module = planned(model, images(), budget)
    except BudgetTooSmall as error:
        module = planned(model, images(), error.smallest_budget_bytes)
    eager = copy.deepcopy(model)
    assert strides(eager) == strides(model)
    assert laid_out(model)
    assert module.plan.measured_peak_bytes <= module.plan.budget_bytes
    assert_same_training(train(module, [images(1), images(2)]), train(eager, [images(1), images(2)]))
    module.eval()
    eager.eval()
    assert torch.equal(module(images(3)), eager(images(3)))


def test_every_weight_of_a_convolution_lies_otherwise_and_nothing_else_does():
    model = built(Convolutions)
    before, values = strides(model), {path: value.clone() for path, value in model.state_dict().items()}
    planned(model, images())
    changed = {path for path, now in strides(model).items() if now != before[path]}
    assert changed == {"first.weight", "deep.weight", "point.weight", "up.weight", "own"} == set(laid_out(model))
    assert all(strides(model)[path] == channels_last_strides(model.get_parameter(path).shape) for path in changed)
    state = model.state_dict()
    assert list(state) == list(values)
    assert all(torch.equal(state[path], values[path]) for path in values)


def test_strides_are_pytorchs_own():
    for shape in [(2, 3, 4, 5), (6, 1, 1, 1), (4, 1, 3, 3), (1, 2, 3, 4, 5), (3, 2, 1, 1, 1)]:
        tensor = torch.empty(shape).to(memory_format=FORMATS[len(shape)])
        made = torch.empty_strided(shape, channels_last_strides(shape))
        assert made.is_contiguous(memory_format=FORMATS[len(shape)])
        assert all(a == b for a, b, size in zip(tensor.stride(), made.stride(), shape, strict=True) if size > 1)


@pytest.mark.parametrize("name", ["resnet18-tiny", "densenet-tiny", "mobilenet-v2-tiny", "vit-tiny", "unet-tiny"])
def test_real_models_are_eagers_in_their_layout(name):
    entry = zoo.get(name)
    options = PlanOptions(loss=entry.loss, limits=BRIEFLY, layout="channels_last", cache=False)
    before = strides(entry.model)
    found = verify(entry.model, entry.sample, 0.85, options=options)
    assert found.exact, str(found)
    assert found.from_given_layout is not None
    assert "gradients are" in str(found)
    assert strides(entry.model) == before  # what was verified is left as it was


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_another_layout_is_another_rounding_and_no_other_accuracy(seed):
    """Beside the same in float64, on activations without kinks, whose units no rounding flips."""

    def gradients(dtype, last):
        model = built(lambda: Convolutions(nn.Softplus), seed).to(dtype)
        if last:
            lay_out(model, ["first.weight", "deep.weight", "point.weight", "up.weight", "own"])
        torch.manual_seed(1)
        squares(model.eval()(images(seed).to(dtype))).backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])

    exact = gradients(torch.float64, last=False)
    off = [float((gradients(torch.float32, last) - exact).norm() / exact.norm()) for last in (False, True)]
    assert max(off) < 2e-6  # some tens of float32's rounding, 6e-8: sums of some hundreds of products
    assert off[1] < 4 * off[0]


@pytest.mark.slow
def test_with_moves_and_mixed_precision():
    model = built(Convolutions)
    eager = copy.deepcopy(model)

    def mixed(module, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return module(batch)

    with torch.autocast("cpu", torch.bfloat16):
        module = planned(model, images(), 0.9, offload=Offload("disk"))
    lay_out(eager, laid_out(model))
    assert "own" in laid_out(eager)
    mine, theirs = (train(one, [images(1)] * 2, forward=partial(mixed, one)) for one in (module, eager))
    assert len(module.plans) == 1
    assert_same_training(mine, theirs)


# ---- the choice ------------------------------------------------------------------------------------------


def test_each_region_is_in_the_layout_in_which_it_is_quicker(quicker):
    quicker.add("right.0.weight")
    model = built(Towers)
    layout = planned(model, images(), layout="auto").plan.layout
    assert [region.weights for region in layout.regions] == [
        ("left.0.weight", "left.2.weight"),
        ("right.0.weight", "right.2.weight"),
    ]
    assert layout.weights == laid_out(model) == ("right.0.weight", "right.2.weight")
    assert str(layout) == "channels_last in 2 of 4 convolutions, at 0.50 of their time as given"


def test_what_is_no_quicker_stays_as_given(quicker):
    model = built(Towers)
    before = strides(model)
    layout = planned(model, images(), layout="auto").plan.layout
    assert not layout.weights
    assert strides(model) == before
    assert str(layout) == "as given, as it is no faster in channels_last"


@pytest.mark.parametrize(
    ("times_ms", "weights", "told"),
    [
        ([2.0, 1.0, 1.5], ("right.0.weight", "right.2.weight"), "2 of 4 convolutions: steps without a plan take 0.50"),
        ([2.0, 1.0, 0.9], ("left.0.weight", "left.2.weight", "right.0.weight", "right.2.weight"), "4 convolutions: "),
        ([2.0, 1.99, 3.0], (), "it is no faster in channels_last"),
    ],
)
def test_steps_by_turns_confirm_what_was_measured(quicker, monkeypatch, times_ms, weights, told):
    quicker.add("right.0.weight")
    tried = []
    monkeypatch.setattr(choice, "eager_steps_ms", lambda *given: tried.extend(given[-1]) or times_ms)
    model = built(Towers)
    layout = planned(model, images(), layout="auto").plan.layout
    assert [len(paths) for paths in tried] == [0, 2, 4]
    assert layout.weights == laid_out(model) == weights
    assert layout.told.startswith(told)


def test_steps_leave_the_module_as_it_was():
    model = built(Convolutions)
    values, stream = {path: value.clone() for path, value in model.state_dict().items()}, torch.get_rng_state()
    layout = planned(model, images(), layout="auto").plan.layout
    assert layout.step_ratio is not None
    assert all(torch.equal(value, values[path]) for path, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)


def test_times_are_those_of_the_regions_operations():
    model = built(Towers)
    layout = planned(model, images(), layout="auto").plan.layout
    assert all(region.given_ms > 0 < region.channels_last_ms for region in layout.regions)
    assert all(region.operations == 4 for region in layout.regions)  # and the mean, which leaves the layout


def test_a_model_that_does_not_run_so_stays_as_given_and_says_why():
    model = built(Viewing)
    before = strides(model)
    module = planned(model, images(), layout="auto")
    assert "view" in module.plan.layout.refused
    assert strides(model) == before
    assert_same_training(train(module, [images(1)]), train(built(Viewing), [images(1)]))
    with pytest.raises(LayoutError, match=r"Viewing does not run in channels_last: .*view.*reshape or flatten"):
        planned(model, images())
    assert strides(model) == before


def test_a_model_without_convolutions_has_nothing_to_choose():
    model = placed(nn.Sequential(nn.Flatten(), nn.Linear(1200, 4)))
    layout = planned(model, images(), 1.0, layout="auto").plan.layout
    assert str(layout).startswith("as given, as no convolution of the model has a weight of its own")


def test_a_budget_that_is_too_small_leaves_the_module_as_it_was(quicker):
    quicker.add("first.weight")
    model = built(Convolutions)
    before = strides(model)
    for layout in ("auto", "channels_last"):
        with pytest.raises(BudgetTooSmall):
            planned(model, images(), 1000, layout=layout)
        assert strides(model) == before
        assert not laid_out(model)


def test_what_fits_as_given_alone_is_planned_so(quicker, monkeypatch):
    quicker.add("first.weight")
    plan, tried = specializations.plan_by_faster_kernels, []

    def plan_or_reuse(model, call, request, *rest):
        tried.append(bool(laid_out(model)))
        if tried == [True]:
            raise BudgetTooSmall("budget 1 KiB < 2 KiB. Raise it.", 2048, "first", 0)
        return plan(model, call, request, *rest)

    monkeypatch.setattr(specializations, "plan_by_faster_kernels", plan_or_reuse)
    model = built(Convolutions)
    module = planned(model, images(), layout="auto")
    assert tried == [True, False]
    assert module.plan.layout.told == "no plan was found in channels_last: budget 1 KiB < 2 KiB"
    assert not laid_out(model)


def test_the_cache_keeps_what_was_chosen(quicker, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    quicker.add("left.0.weight")
    first = planned(built(Towers), images(), layout="auto", cache=True)
    monkeypatch.setattr(choice, "_measured_in_both", lambda *_: pytest.fail("it is known"))
    model = built(Towers)
    second = planned(model, images(), layout="auto", cache=True)
    assert second.plan.layout == first.plan.layout
    assert laid_out(model) == ("left.0.weight", "left.2.weight")
    assert plan_files.cache.clear() > 0
    assert not list(tmp_path.iterdir())


def test_all_ranks_have_the_layout_that_the_first_has_chosen(quicker, monkeypatch):
    store = torch.distributed.HashStore()
    quicker.add("left.0.weight")
    chosen = []
    for rank in range(2):
        monkeypatch.setattr(choice, "default_exchange", lambda _, rank=rank: RankAgreement(store, rank, 5.0))
        model = built(Towers)
        chosen.append(planned(model, images(), layout="auto").plan.layout)
        assert laid_out(model) == ("left.0.weight", "left.2.weight")
        monkeypatch.setattr(choice, "_measured_in_both", lambda *_: pytest.fail("the other rank did"))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("layout", ["nhwc", None, torch.channels_last])
def test_other_layouts_are_refused(layout):
    with pytest.raises(LayoutError, match='say "as given" to leave it alone, "channels_last", or "auto"'):
        planned(built(Towers), images(), layout=layout)


# ---- what happens to a module ----------------------------------------------------------------------------


def test_it_is_undone_by_as_given_and_the_first_plan_has_it_back():
    model = built(Convolutions)
    before = strides(model)
    first = planned(model, images())
    second = planned(model, images(), layout="as given")
    assert strides(model) == before
    assert second.plan.layout is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (first, second, first):
            train(module, [images(1)])
    assert laid_out(model)
    assert not first.fallbacks
    assert len(first.plans) == len(second.plans) == 1


def test_a_state_that_is_assigned_is_laid_out_again():
    model = built(Convolutions)
    module = planned(model, images())
    eager = copy.deepcopy(model)
    state = {path: value.contiguous() for path, value in module.state_dict().items()}
    module.load_state_dict(copy.deepcopy(state), assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = train(module, [images(1)])
    assert "own" in laid_out(model)
    assert len(module.plans) == 1
    assert_same_training(mine, train(eager, [images(1)]))


@pytest.mark.ci
def test_copies_and_pickles_have_it():
    model = built(Convolutions)
    module = planned(model, images())
    wanted = train(copy.deepcopy(module), [images(1), images(2)])
    again = pickle.loads(pickle.dumps(module))
    assert strides(again.original) == strides(model)
    assert_same_training(train(again, [images(1), images(2)]), wanted)
    assert again.plan.layout.weights == module.plan.layout.weights


def test_a_plan_file_lays_a_new_module_out(tmp_path):
    model = built(Convolutions)
    module = planned(model, images(), 0.85)
    module.save_plan(tmp_path / "plan.json")
    other = built(Convolutions)
    again = Rockmate(other, images(), plan=tmp_path / "plan.json", loss=squares, cache=False)
    assert strides(other) == strides(model)
    assert again.plan.layout == module.plan.layout
    assert_same_training(train(again, [images(1)]), train(module, [images(1)]))
    assert "channels_last" in again.report()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_was_there_before_goes_on(make, fused):
    """Fused steps of PyTorch take states by address: they are to lie like their parameters."""
    momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
    model, twin = built(Convolutions), built(Convolutions)
    lay_out(twin, ["first.weight", "deep.weight", "point.weight", "up.weight", "own"])
    found = []
    for one in (model, twin):
        optimizer = make(one.parameters(), 0.01, fused=fused, **momentum)
        for step in range(3):
            if step == 1 and one is model:
                planned(model, images())
            seeded = torch.Generator().manual_seed(step)
            for parameter in one.parameters():
                gradient = torch.randn(parameter.shape, generator=seeded)
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()
        found.append(one)
    for (path, mine), theirs in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        assert torch.equal(mine, theirs), path


def test_gradients_that_are_there_follow():
    model = built(Convolutions)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    values = [parameter.grad.clone() for parameter in model.parameters()]
    planned(model, images())
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, value)


def test_weights_that_others_see_stay_as_they_lie():
    model = built(Towers)
    model.left[0].weight.data.share_memory_()
    flat = torch.randn(2 * model.left[2].weight.numel())
    model.left[2].weight.data = flat[: flat.numel() // 2].view_as(model.left[2].weight)
    before = strides(model)
    planned(model, images())
    assert laid_out(model) == ("right.0.weight", "right.2.weight")
    assert {path: strides(model)[path] for path in before if "left" in path} == {
        path: stride for path, stride in before.items() if "left" in path
    }


def test_frozen_and_tied_weights():
    model = built(lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(False)
    module = planned(model, images())
    assert laid_out(model) == ("0.weight", "3.weight")
    eager = copy.deepcopy(model)
    assert eager[2].weight is eager[0].weight
    assert_same_training(train(module, [images(1)]), train(eager, [images(1)]))


@pytest.mark.ci
def test_other_shapes_and_another_budget_have_the_same_layout():
    model = built(Convolutions)
    module = planned(model, images(), 0.9, plan_in_background=False)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [images(1, size=16), images(2), images(3, size=16)]
        assert_same_training(train(module, batches), train(eager, batches))
        module.replan(0.95, images())
        train(module, [images(1, size=16), images(4, size=24)])
    assert all(plan.layout is not None and "own" in plan.layout.weights for plan in module.plans)
    assert all(a == b for a, b in pairwise([strides(module.original), strides(model)]))


@pytest.mark.slow
def test_questions_are_answered_for_the_layout_and_leave_the_module_as_it_was():
    model = built(Convolutions)
    before = strides(model)
    options = PlanOptions(loss=squares, limits=BRIEFLY, layout="channels_last", cache=False)
    found = smallest_budget(model, images(), 2.0, options=options)
    assert "own" in found.plan_file.plan.layout.weights
    assert strides(model) == before
    largest = max_batch(model, images(), found.budget_bytes, options=options, most=4)
    assert largest.plan_file.plan.layout.weights
    assert strides(model) == before
    module = Rockmate(model, images(), plan=found.plan_file, loss=squares, cache=False)
    assert laid_out(model) == laid_out(module.original)
    with pytest.raises(ArgumentError, match="layout is an option of whole models"):
        distributed.plan_blocks(model, images(), 1.0, blocks=[model.first], options=options)


@pytest.mark.ci
def test_a_question_about_the_module_as_given_is_answered_so_beside_a_plan():
    model = built(Convolutions)
    module = planned(model, images())
    laid = strides(model)
    found = smallest_budget(model, images(), 2.0, loss=squares, limits=BRIEFLY)
    assert found.plan_file.plan.layout is None
    assert strides(model) == laid
    train(module, [images(1)])
    assert len(module.plans) == 1


def test_a_sample_is_not_changed():
    sample = images()
    before = sample.clone()
    planned(built(Convolutions), sample)
    assert sample.is_contiguous()
    assert torch.equal(sample, before)
    assert bitwise_equal(sample, before)
