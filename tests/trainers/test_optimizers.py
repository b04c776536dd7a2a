"""Optimizers, scalers and averages beside a planned module: bit by bit what they are beside the module itself."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from rockmate import Rockmate
from tests.module.models import WIDTH, Layers, Normalised, Tied, built, images, rows, tokens
from tests.module.steps import assert_same, assert_trains_exactly, keep_every_other, recomputing, squares
from tests.where import here, random_stream

Batches = list[Tensor]


def three_batches() -> Batches:
    return [rows(1), rows(2), rows(3)]


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Parameters, gradients, buffers, the optimizer's state and the random stream."""
    state: dict[str, Any] = {name: value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        for key, value in (optimizer.state[parameter] if optimizer is not None else {}).items():
            state[f"{key} of {name}"] = torch.as_tensor(value).clone()
    state["random stream"] = random_stream()
    return state


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    for batch in batches:
        optimizer.zero_grad()
        squares(module(batch)).backward()
        optimizer.step()
    return state_of(module, optimizer)


def assert_equal_to_eager(planned: Rockmate, train: Callable[[nn.Module], dict[str, Any]]) -> None:
    eager = copy.deepcopy(planned.original)
    expected = train(eager)
    assert_same(train(planned), expected)


# ---- optimizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_every_implementation_of_an_optimizer_steps_as_beside_the_module(layers, make, implementation):
    settings = {"lr": 0.05, **implementation, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
    assert_equal_to_eager(layers, lambda module: steps(module, make(module.parameters(), **settings), three_batches()))


def test_an_optimizer_made_before_planning_holds_the_same_parameters():
    model = built(Layers)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.05, fused=True) for module in (model, eager)]
    planned = recomputing(model, rows())
    assert_same(steps(planned, optimizers[0], three_batches()), steps(eager, optimizers[1], three_batches()))


@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped_as_those_of_the_module(layers, foreach):
    def train(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(0)
        norms = []
        for batch in three_batches():
            optimizer.zero_grad()
            squares(module(batch)).backward()
            norms.append(clip_grad_norm_(module.parameters(), 0.01, foreach=foreach))
            clip_grad_value_(module.parameters(), 0.001, foreach=foreach)
            optimizer.step()
        return {**state_of(module), "norms": torch.stack(norms)}

    assert_equal_to_eager(layers, train)


# ---- a step of the optimizer within the backward ----------------------------------------------------------


def step_in_backward(module: nn.Module) -> None:
    """Every parameter is stepped, and its gradient freed, as soon as it is there."""
    for parameter in module.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.05)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("recompute", [None, keep_every_other], ids=["all", "every other"])
@pytest.mark.parametrize(
    ("make", "batch"), [(Layers, rows), (Tied, tokens), (Normalised, images)], ids=["layers", "tied", "norms"]
)
def test_a_step_within_the_backward_is_exact_while_the_rest_is_still_recomputed(make, batch, recompute):
    """What a parameter's gradient is complete for is never recomputed again: recomputation reads unchanged weights."""
    planned = recomputing(built(make), batch(), recompute)

    def train(module):
        step_in_backward(module)
        torch.manual_seed(0)
        for seed in range(3):
            squares(module(batch(seed))).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        return state_of(module)

    assert_equal_to_eager(planned, train)


def test_a_step_within_the_backward_that_comes_too_soon_is_refused_as_by_eager(layers):
    """All parameters are stepped at the first gradient: the rest of the backward would recompute from others."""
    for module in (layers.original, layers):

        def halve(_: Tensor, module: nn.Module = module) -> None:
            for parameter in module.parameters():
                parameter.detach().mul_(0.5)

        handle = module.layers[3].weight.register_post_accumulate_grad_hook(halve)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            squares(module(rows(1))).backward()
        handle.remove()
        module.zero_grad()


# ---- scalers and autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_gradient_scaler_is_exact_where_steps_are_skipped_too(dtype):
    with torch.autocast(here().type, dtype):
        planned = recomputing(built(Layers), rows())

    def train(module):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
        # Scaled so far, the gradients overflow in float16: the first steps are skipped, later ones are not.
        scaler = torch.amp.GradScaler(here().type, init_scale=2.0**26, growth_interval=2)
        scales = []
        for seed in range(8):
            optimizer.zero_grad()
            with torch.autocast(here().type, dtype):
                loss = squares(module(rows(seed)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return {**state_of(module), "scales": torch.tensor(scales)}

    assert_equal_to_eager(planned, train)


# ---- averages, parametrizations ------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [True, False])
def test_an_average_of_weights_is_that_of_the_modules(buffers):
    planned = recomputing(built(Normalised), images())

    def train(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=buffers)
        torch.manual_seed(0)
        for seed in range(3):
            optimizer.zero_grad()
            squares(module(images(seed))).backward()
            optimizer.step()
            average.update_parameters(module)
        if not buffers:
            update_bn([images(4), images(5)], average)
        with torch.no_grad():
            output = average.eval()(images(6))
        return {**{f"average {name}": value for name, value in average.state_dict().items()}, "output": output}

    assert_equal_to_eager(planned, train)


class Symmetric(nn.Module):
    """A weight that is its own transpose."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.triu()


def test_parametrized_weights_are_exact():
    model = built(Layers)
    parametrize.register_parametrization(model.layers[1], "weight", Symmetric())
    parametrizations.spectral_norm(model.layers[2])
    parametrizations.weight_norm(model.layers[3])
    planned = recomputing(model, rows())
    assert_trains_exactly(planned, three_batches())
    assert torch.equal(planned.layers[1].weight, planned.layers[1].weight.T)


def symmetric(module: nn.Module) -> None:
    parametrize.register_parametrization(module.layers[1], "weight", Symmetric())


def pruned(module: nn.Module) -> None:
    prune.random_unstructured(module.layers[1], "weight", 0.5)


def another_layer(module: nn.Module) -> None:
    module.layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("change", [symmetric, pruned, another_layer])
@pytest.mark.ci
def test_weights_parametrized_pruned_or_replaced_after_planning_are_exact(change):
    planned = Rockmate(built(Layers), rows(), 0.75, loss=squares)

    def train(module):
        steps(module, torch.optim.SGD(module.parameters(), 0.1), three_batches()[:1])
        torch.manual_seed(1)
        change(module)
        return steps(module, torch.optim.SGD(module.parameters(), 0.1), three_batches())

    assert_equal_to_eager(planned, train)
    assert len(planned.plans) == 2
