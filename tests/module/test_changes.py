"""What changes between forward and backward is refused where eager would not see it: never a wrong gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate import PlanMismatch, Rockmate, zoo
from tests.module.models import WIDTH, Layers, Smooth, built, rows, tokens
from tests.module.steps import assert_same, assert_trains_exactly, recomputing, seen, squares


class Shifted(nn.Module):
    """Starts with an addition, which saves neither its input nor its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(F.gelu(torch.sigmoid((hidden + self.shift) * 1.0) + self.scale))).square()


@pytest.fixture
def shifted() -> Rockmate:
    return recomputing(built(Shifted), rows())


CHANGED = "since the forward, but the backward recomputes from it. Change it after the backward"


def test_an_input_overwritten_before_the_backward_is_refused(shifted):
    batch = rows(1)
    loss = squares(shifted(batch))
    batch.zero_()
    with pytest.raises(RuntimeError, match=rf"shape \[512, 32\], .* {CHANGED}"):
        loss.backward()


@pytest.mark.parametrize("name", ["shift", "layer.bias", "layer.weight", "scale"])
def test_parameters_and_buffers_changed_before_the_backward_are_refused(shifted, name):
    loss = squares(shifted(rows(1)))
    with torch.no_grad():
        shifted.state_dict()[name].add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    assert_trains_exactly(shifted, [rows(2)])


def test_data_put_in_a_parameters_place_before_the_backward_is_refused(shifted):
    loss = squares(shifted(rows(1)))
    shifted.original.shift.data = torch.ones(WIDTH)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    shifted.zero_grad()
    assert_trains_exactly(shifted, [rows(2)])


def test_a_parameter_replaced_before_the_backward_is_the_old_one_there_as_in_eager():
    model = recomputing(built(Shifted), rows())
    gradients = []
    for module, place in ((copy.deepcopy(model.original), None), (model, model.original)):
        place = place or module
        old, loss = place.shift, squares(module(rows(1)))
        place.shift = new = nn.Parameter(torch.zeros(WIDTH))
        loss.backward()
        assert place.shift is new
        assert new.grad is None
        gradients.append({"shift": old.grad, "weight": place.layer.weight.grad, "bias": place.layer.bias.grad})
    assert_same(gradients[1], gradients[0])


def test_a_parameter_taken_out_before_the_backward_is_refused(shifted):
    loss = squares(shifted(rows(1)))
    weight = shifted.layer.weight
    del shifted.layer.weight
    shifted.layer.weight = weight.detach() * 2  # as an attribute: the layer has no such parameter any more
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_changes_between_steps_are_seen():
    """The forward reads parameters where the module has them now."""
    model = recomputing(built(Shifted), rows())
    eager = copy.deepcopy(model.original)
    records = []
    for module, place in ((eager, eager), (model, model.original)):
        place.layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)
        with torch.no_grad():
            place.shift.zero_()
        output = module(rows(1))
        squares(output).backward()
        records.append(seen(module, (), output))
    assert_same(records[1], records[0])


def test_an_optimizer_step_before_the_backward_is_refused_as_by_eager():
    model = recomputing(built(Layers), rows())
    for module in (model.original, model):
        first, second = squares(module(rows(1))), squares(module(rows(2)))
        first.backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            second.backward()
        module.zero_grad()


def test_outputs_may_be_changed_in_place_as_in_eager():
    model = recomputing(built(Layers), rows())
    records = []
    for module in (copy.deepcopy(model.original), model):
        torch.manual_seed(1)
        output = module(rows(1))
        output.mul_(2).add_(1)
        squares(output).backward()
        records.append(seen(module, (), output))
    assert_same(records[1], records[0])


def test_an_output_that_its_own_backward_needs_may_not_be_changed_in_place():
    model = recomputing(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sigmoid()), rows())
    for module in (model.original, model):
        output = module(rows(1))
        output.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            squares(output).backward()


# ---- flags ------------------------------------------------------------------------------------------


def test_a_parameter_frozen_after_planning_is_refused():
    model = recomputing(built(Layers), rows())
    model.layers[1].weight.requires_grad_(False)
    message = r"requires_grad of 'layers\.1\.weight' is False, but was True when .* planned. Put it back, or plan"
    with pytest.raises(PlanMismatch, match=message):
        model(rows(1))
    model.layers[1].weight.requires_grad_(True)
    assert_trains_exactly(model, [rows(1)])


def test_a_submodule_in_another_mode_than_planned_is_refused():
    model = recomputing(built(Layers), rows())
    model.dropout.eval()
    message = "submodule 'dropout' is in eval mode, but was not when the module was planned. Put it back, or plan"
    with pytest.raises(PlanMismatch, match=message):
        model(rows(1))
    model.dropout.train()
    assert_trains_exactly(model, [rows(1)])


def test_a_submodule_planned_in_eval_mode_stays_in_it():
    network = built(Layers)
    network.dropout.eval()
    model = recomputing(network, rows())
    assert_trains_exactly(model, [rows(1)])
    with pytest.raises(PlanMismatch, match="submodule 'dropout' is in training mode"):
        model.train()(rows(1))


def test_autocast_around_the_forward_is_refused():
    model = recomputing(built(Smooth), rows())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanMismatch, match=r"autocast is on for cpu \(bfloat16\), but was off when"),
    ):
        model(rows(1))


def test_autocast_around_the_backward_changes_no_recomputation():
    model = recomputing(built(Smooth), rows())
    records = []
    for module in (copy.deepcopy(model.original), model):
        output = module(rows(1))
        loss = squares(output)
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        records.append(seen(module, (), output))
    assert_same(records[1], records[0])


def test_a_batch_may_be_reused_as_long_as_nobody_writes_into_it():
    embedding = recomputing(nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), tokens())
    batch = tokens(4)
    assert_trains_exactly(embedding, [batch, batch, batch])


def test_a_module_planned_under_autocast_wants_it_in_every_call():
    with torch.autocast("cpu", torch.bfloat16):
        model = Rockmate(built(Layers), rows(), 0.9, loss=squares, shapes="error")
        squares(model(rows(1))).backward()
    with pytest.raises(PlanMismatch, match=r"autocast is off, but was on for cpu \(bfloat16\) when"):
        model(rows(1))
    with torch.autocast("cpu", torch.float16), pytest.raises(PlanMismatch, match=r"autocast is on for cpu \(float16\)"):
        model(rows(1))


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2-tiny",
        "resnet18-tiny",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet-tiny", "transformer-tiny")),
    ],
)
@pytest.mark.ci
def test_a_step_under_autocast_is_that_of_eager(name, recomputes, inside):
    # Not by a budget: what kernels of low precision take beside their tensors is the processor's own, and may bind.
    entry = zoo.get(name)
    with torch.autocast("cpu", torch.bfloat16):
        planned = copy.deepcopy(entry.model)
        if recomputes:
            model = recomputing(planned, entry.sample, loss=entry.loss)
        else:
            model = Rockmate(planned, entry.sample, 1.0, loss=entry.loss)
    gradients = []
    for module in (entry.model, model):
        torch.manual_seed(0)
        torch.clear_autocast_cache()
        with torch.autocast("cpu", torch.bfloat16):
            loss = entry.loss(module(*entry.sample))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert_same(*gradients)
    assert (model.plan.recomputations > 0) == recomputes
