"""Kinds of parameters, inputs and outputs: whatever the model takes and gives, the planned module does, too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate import InputMismatch, PlanMismatch
from tests.module.models import (
    WIDTH,
    Layers,
    Normalised,
    Smooth,
    Tied,
    TwoHeads,
    TwoInputs,
    built,
    images,
    rows,
    tokens,
)
from tests.module.steps import assert_trains_exactly, recomputing


def test_tied_weights_get_one_gradient():
    model = recomputing(built(Tied), tokens())
    assert model.head.weight is model.embedding.weight
    assert_trains_exactly(model, [tokens(seed) for seed in range(3)])


@pytest.mark.parametrize("frozen", [0, 2, 3])
def test_frozen_parameters_stay_without_gradients(frozen):
    network = built(Layers)
    network.layers[frozen].requires_grad_(False)
    model = recomputing(network, rows())
    assert_trains_exactly(model, [rows(seed) for seed in range(3)])
    assert model.layers[frozen].weight.grad is None


def test_only_the_last_layer_trains():
    network = built(Layers).requires_grad_(False)
    network.layers[-1].requires_grad_(True)
    assert_trains_exactly(recomputing(network, rows()), [rows(seed) for seed in range(3)])


def test_inputs_that_require_gradients_get_them():
    model = recomputing(built(Layers), rows(requires_grad=True))
    assert_trains_exactly(model, [rows(seed, requires_grad=True) for seed in range(3)])


def test_a_module_without_parameters_trains_its_inputs():
    model = recomputing(nn.Sequential(nn.GELU(), nn.Dropout(0.2), nn.Tanh()), rows(requires_grad=True))
    assert_trains_exactly(model, [rows(seed, requires_grad=True) for seed in range(3)])


def test_dictionaries_of_outputs_keep_their_structure():
    model = recomputing(built(TwoHeads), rows())
    output = model(rows(1))
    assert list(output) == ["left", "right", "width"]
    assert output["width"] == WIDTH
    assert_trains_exactly(model, [rows(seed) for seed in range(3)])


def test_arguments_go_by_position_or_by_name():
    model = recomputing(built(TwoInputs), {"first": rows(1), "second": rows(2)})
    expected = model(rows(3), rows(4))
    assert torch.equal(model(second=rows(4), first=rows(3)), expected)
    assert torch.equal(model(rows(3), second=rows(4)), expected)


def strided(seed: int) -> Tensor:
    """[ROWS, WIDTH], column by column in memory."""
    return rows(seed).t().contiguous().t()


def expanded(seed: int) -> Tensor:
    """[ROWS, WIDTH], all rows one in memory."""
    return rows(seed)[:1].expand_as(rows(seed))


@pytest.mark.parametrize("make_batch", [strided, expanded])
@pytest.mark.parametrize("make", [Layers, Smooth])
def test_inputs_may_have_any_strides_that_the_sample_had(make, make_batch):
    assert_trains_exactly(recomputing(built(make), make_batch(0)), [make_batch(seed) for seed in range(3)])


def test_images_may_have_the_channels_last():
    model = recomputing(built(Normalised), images().to(memory_format=torch.channels_last))
    assert_trains_exactly(model, [images(seed).to(memory_format=torch.channels_last) for seed in range(3)])


@pytest.mark.parametrize("make_batch", [strided, expanded])
def test_strides_unlike_the_sample_s_are_refused(layers, make_batch):
    """What was a view when planned would be a copy now, or the other way round."""
    with pytest.raises(InputMismatch, match=r"float32\[512, 32\] on cpu with strides .* \(\.contiguous\(\) repairs"):
        layers(make_batch(1))
    assert_trains_exactly(layers, [make_batch(1).contiguous()])


def test_strides_of_a_dimension_of_one_element_do_not_matter():
    model = recomputing(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU()), torch.randn(8, 1, 9, 9))
    batch = torch.randn(8, 1, 9, 9).as_strided((8, 1, 9, 9), (81, 5, 9, 1))
    assert_trains_exactly(model, [batch] * 2)


def test_parameters_in_another_memory_format_are_refused():
    model = recomputing(built(Normalised), images())
    model.to(memory_format=torch.channels_last)
    with pytest.raises(
        PlanMismatch, match=r"'stem\.weight' is torch\.float32\[8, 3, 3, 3\] .* with strides .* plan the module again"
    ):
        model(images())


def test_an_input_may_be_a_slice_of_something_larger():
    whole = torch.randn(3, *rows().shape)
    assert_trains_exactly(recomputing(built(Layers), rows()), list(whole))


def test_losses_of_the_user_may_use_outputs_twice():
    target = tokens(9)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + F.smooth_l1_loss(output, output.softmax(-1).detach())

    assert_trains_exactly(recomputing(built(Tied), tokens(), loss=loss), [tokens(1)] * 3, loss)


def test_parameters_of_another_type_are_refused():
    model = recomputing(built(Tied), tokens())
    model.double()
    message = r"is torch\.float64.* with strides .*, but was torch\.float32.* Put it back, or plan the module again"
    with pytest.raises(PlanMismatch, match=message):
        model(tokens())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_train_exactly(dtype):
    model = recomputing(built(Layers).to(dtype), rows().to(dtype))
    assert_trains_exactly(model, [rows(seed).to(dtype) for seed in range(2)])


def test_an_empty_batch_trains():
    assert_trains_exactly(recomputing(built(Smooth), rows()[:0]), [rows()[:0]])
