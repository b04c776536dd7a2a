"""A planned module is a good citizen of autograd: every way to call it gives what eager gives, bit by bit.

The plans recompute everything at every stage: what works with them works with milder ones.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from rockmate import Rockmate
from tests.module.models import (
    WIDTH,
    Layers,
    Normalised,
    SharedMask,
    SharedNoise,
    Smooth,
    TwoHeads,
    built,
    images,
    rows,
)
from tests.module.steps import assert_same, keep_nothing, recomputing, squares

Scenario = Callable[[nn.Module], list[Tensor]]


def assert_like_eager(model: Rockmate, scenario: Scenario) -> None:
    """`scenario` gives the same tensors, gradients, buffers and random stream with `model` and without it."""
    records = []
    for module in (copy.deepcopy(model.original), model):
        torch.manual_seed(3)
        found: dict[str, Tensor | None] = {f"result {i}": t.detach() for i, t in enumerate(scenario(module))}
        found |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
        found["random stream"] = torch.get_rng_state()
        records.append(found)
    assert_same(records[1], records[0])
    assert any(name.startswith("gradient") and tensor is not None for name, tensor in records[0].items()) or any(
        name.startswith("result") for name in records[0]
    )


# ---- several forwards, several backwards -------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Normalised, images)], ids=["dropout", "batch-norm"])
def test_two_forwards_before_their_backwards(make, batch, order):
    def scenario(module):
        losses = [squares(module(batch(seed))) for seed in (1, 2)]
        for index in order:
            losses[index].backward()
        return losses

    assert_like_eager(recomputing(built(make), batch()), scenario)


def test_two_forwards_of_one_loss(layers):
    def scenario(module):
        loss = (module(rows(1)) * module(rows(2))).mean()
        loss.backward()
        return [loss]

    assert_like_eager(layers, scenario)


def test_a_module_fed_with_its_own_output(layers):
    def scenario(module):
        loss = squares(module(module(rows(1))))
        loss.backward()
        return [loss]

    model = recomputing(built(Layers), rows(requires_grad=True))
    with torch.no_grad():
        assert model(rows(1)).shape == rows().shape

    def scenario_with_gradient(module):
        loss = squares(module(module(rows(1, requires_grad=True))))
        loss.backward()
        return [loss]

    assert_like_eager(model, scenario_with_gradient)


def test_gradients_accumulate_over_batches(layers):
    def scenario(module):
        for seed in (1, 2):
            (squares(module(rows(seed))) / 2).backward()
        return []

    assert_like_eager(layers, scenario)


def test_a_graph_walked_twice_gives_the_gradients_twice(layers):
    def scenario(module):
        loss = squares(module(rows(1)))
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in module.parameters()]
        loss.backward()
        return first

    assert_like_eager(layers, scenario)


def test_a_graph_walked_three_times_with_another_forward_between(layers):
    def scenario(module):
        loss = squares(module(rows(1)))
        loss.backward(retain_graph=True)
        squares(module(rows(2))).backward()
        loss.backward(retain_graph=True)
        loss.backward()
        return []

    assert_like_eager(layers, scenario)


def test_a_second_backward_without_retaining_is_refused_as_by_eager(layers):
    for module in (layers.original, layers):
        loss = squares(module(rows(1)))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


# ---- parts of the backward ---------------------------------------------------------------------------


def test_gradients_of_some_inputs_alone(layers):
    def scenario(module):
        parameters = dict(module.named_parameters())
        return list(torch.autograd.grad(squares(module(rows(1))), [parameters["layers.2.weight"]]))

    assert_like_eager(layers, scenario)


@pytest.mark.parametrize("index", range(4))
def test_a_backward_restricted_to_one_layer(layers, index):
    def scenario(module):
        squares(module(rows(1))).backward(inputs=list(module.layers[index].parameters()))
        return []

    assert_like_eager(layers, scenario)


def test_restricted_backwards_one_after_the_other(layers):
    def scenario(module):
        loss = squares(module(rows(1)))
        for layer in (module.layers[3], module.layers[0], module.layers[2]):
            loss.backward(inputs=list(layer.parameters()), retain_graph=True)
        loss.backward()
        return []

    assert_like_eager(layers, scenario)


def recompute_all_but_the_mask(measured):
    """The mask is kept for the recomputations of both outputs."""
    first = measured.problem.forward
    mask = {index for index, op in enumerate(first) if op.name.startswith(("mul_0", "sigmoid_0", "add_0"))}
    return tuple(tuple(index for index in group if index not in mask) for group in keep_nothing(measured))


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
@pytest.mark.parametrize(
    ("make", "recompute"),
    [(SharedMask, keep_nothing), (SharedMask, recompute_all_but_the_mask), (SharedNoise, keep_nothing)],
)
def test_outputs_that_share_no_gradient_take_their_backwards_one_by_one(order, make, recompute):
    def scenario(module):
        left, right = module(rows(1))
        losses = {"left": squares(left), "right": squares(right)}
        for name in order:
            losses[name].backward()
        return []

    assert_like_eager(recomputing(built(make), rows(), recompute), scenario)


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
def test_outputs_that_share_a_trunk_take_their_backwards_one_by_one(order):
    def scenario(module):
        output = module(rows(1))
        squares(output[order[0]]).backward(retain_graph=True)
        squares(output[order[1]]).backward()
        return []

    assert_like_eager(recomputing(built(TwoHeads), rows()), scenario)


@pytest.mark.parametrize("name", ["left", "right"])
def test_only_one_of_several_outputs_reaches_the_loss(name):
    def scenario(module):
        squares(module(rows(1))[name]).backward()
        return []

    assert_like_eager(recomputing(built(TwoHeads), rows()), scenario)


@pytest.mark.filterwarnings("ignore::rockmate.errors.DoubleBackwardWarning")
def test_gradients_of_gradients():
    def scenario(module):
        data = rows(1, requires_grad=True)
        output = module(data)
        (gradient,) = torch.autograd.grad(output.sum(), data, create_graph=True)
        (output.square().mean() + gradient.square().mean()).backward()
        return [output, gradient, data.grad]

    assert_like_eager(recomputing(built(Smooth), rows(requires_grad=True)), scenario)


@pytest.mark.filterwarnings("ignore::rockmate.errors.DoubleBackwardWarning")
def test_gradients_of_gradients_of_parameters():
    def scenario(module):
        loss = squares(module(rows(1)))
        gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        return list(gradients)

    assert_like_eager(recomputing(built(Smooth), rows()), scenario)


def test_hooks_on_tensors_and_parameters_run(layers):
    def scenario(module):
        seen = []
        weight = module.layers[1].weight
        handles = [weight.register_hook(lambda gradient: gradient * 2)]
        handles.append(weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())))
        output = module(rows(1))
        output.register_hook(lambda gradient: gradient.clamp(max=1e-5))
        squares(output).backward()
        for handle in handles:
            handle.remove()
        return seen

    assert_like_eager(layers, scenario)


def test_parameters_updated_during_the_backward_as_their_gradients_come(layers):
    """The optimiser in the backward, which saves the memory of the gradients."""

    def scenario(module):
        def update(parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in module.parameters()]
        for seed in (1, 2):
            squares(module(rows(seed))).backward()
        for handle in handles:
            handle.remove()
        return [parameter.clone() for parameter in module.parameters()]

    assert_like_eager(layers, scenario)


# ---- modes ------------------------------------------------------------------------------------------


def test_eval_mode_runs_the_model_itself_with_its_hooks(layers):
    calls = []
    handles = [
        layers.original.register_forward_hook(lambda *_: calls.append("root")),
        layers.layers[0].register_forward_hook(lambda *_: calls.append("layer")),
    ]
    layers.eval()
    assert torch.equal(layers(rows(1)), layers.original(rows(1)))
    assert calls == ["layer", "root"] * 2
    squares(layers(rows(1))).backward()
    for handle in handles:
        handle.remove()
    assert layers.train()(rows(1)).requires_grad


def test_without_gradients_the_model_itself_runs_on_any_batch(layers):
    with torch.no_grad():
        assert layers(torch.randn(3, WIDTH)).shape == (3, WIDTH)
    with torch.inference_mode():
        assert layers(torch.randn(3, WIDTH)).shape == (3, WIDTH)


def test_hooks_on_the_wrapper_run(layers):
    calls = []
    layers.register_forward_hook(lambda *_: calls.append("wrapper"))
    squares(layers(rows(1))).backward()
    assert calls == ["wrapper"]


# ---- beside other tools of torch ----------------------------------------------------------------------


def test_checkpointing_around_a_planned_module(layers):
    def scenario(module):
        loss = squares(torch.utils.checkpoint.checkpoint(module, rows(1), use_reentrant=False))
        loss.backward()
        return [loss]

    assert_like_eager(layers, scenario)


def test_saved_tensors_offloaded_by_the_user(layers):
    def scenario(module):
        with torch.autograd.graph.save_on_cpu():
            loss = squares(module(rows(1)))
        loss.backward()
        return [loss]

    assert_like_eager(layers, scenario)


def test_anomaly_detection(layers):
    def scenario(module):
        with torch.autograd.set_detect_anomaly(True):
            loss = squares(module(rows(1)))
            loss.backward()
        return [loss]

    assert_like_eager(layers, scenario)
