"""Which hooks fire in planned steps: those on the module, its parameters and its output. Those on submodules do not."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import rkgb
from rockmate import PlanMismatch, ReplanWarning, Rockmate
from rockmate.errors import FallbackWarning
from tests.module.models import Layers, built, rows
from tests.module.steps import assert_same, seen, squares


def planned_for(model: nn.Module) -> Rockmate:
    return Rockmate(model, rows(requires_grad=True), 0.75, loss=squares)


def step(module: nn.Module) -> dict[str, Tensor | None]:
    """One training step from the same random numbers."""
    torch.manual_seed(0)
    module.zero_grad()
    batch = rows(1, requires_grad=True)  # else PyTorch warns of backward hooks on the module
    output = module(batch)
    squares(output).backward()
    return seen(module, (batch,), output)


# ---- on the module -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before planning", "after planning"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_the_module_fire_once_in_every_call(kind, when):
    model, fired = built(Layers), []
    if when == "before planning":
        getattr(model, kind)(lambda *_: fired.append(1))
    planned = planned_for(model)
    assert not fired, "planning calls nothing of the user's"
    if when == "after planning":
        getattr(planned, kind)(lambda *_: fired.append(1))
    planned(rows(1, requires_grad=True))
    assert len(fired) == 1
    planned.eval()
    planned(rows(1, requires_grad=True))
    assert len(fired) == 2


def test_a_hook_on_the_module_may_change_what_it_returns():
    eager = built(Layers)
    planned = planned_for(copy.deepcopy(eager))
    for module in (eager, planned):
        module.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        module.register_forward_hook(lambda _, given, output: output + given[0])
    assert_same(step(planned), step(eager))


# ---- on parameters and outputs -------------------------------------------------------------------------------


def test_hooks_on_parameters_and_outputs_fire_as_often_as_without_a_plan():
    counts = []
    for module in (built(Layers), planned_for(built(Layers))):
        fired = {"gradient": 0, "accumulated": 0, "output": 0}

        def count(name: str, fired: dict[str, int] = fired) -> None:
            fired[name] += 1

        for parameter in module.parameters():
            parameter.register_hook(lambda _, count=count: count("gradient"))
            parameter.register_post_accumulate_grad_hook(lambda _, count=count: count("accumulated"))
        for seed in range(2):
            output = module(rows(seed, requires_grad=True))
            output.register_hook(lambda _, count=count: count("output"))
            squares(output).backward()
        counts.append(fired)
    assert counts[1] == counts[0] == {"gradient": 16, "accumulated": 16, "output": 2}


def test_planning_on_the_first_batch_fires_no_hook_of_parameters():
    """Such hooks may step an optimizer: planning would train."""
    model, fired = built(Layers), []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: fired.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    planned = Rockmate(model, budget=0.75)
    planned(rows())
    assert planned.plans
    assert not fired


def test_gradients_changed_by_hooks_are_those_that_train():
    eager = built(Layers)
    planned = planned_for(copy.deepcopy(eager))
    for module in (eager, planned):
        module.layers[1].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    assert_same(step(planned), step(eager))


# ---- on submodules -------------------------------------------------------------------------------------------


class Logger:
    """Notes the mean of what a submodule returns; changes nothing."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        self.means.append(output.detach().mean())


@pytest.mark.slow
def test_hooks_on_submodules_before_planning_do_not_fire_in_planned_steps_and_a_warning_says_so():
    model, logger = built(Layers), Logger()
    expected = step(copy.deepcopy(model))
    model.layers[1].register_forward_hook(logger)
    with pytest.warns(rkgb.TraceWarning, match=r"'layers\.1' has forward hooks.* they do not fire"):
        planned = planned_for(model)
    logger.means.clear()
    assert_same(step(planned), expected)
    assert not logger.means
    # They do where the module itself runs: to look at activations, call it now and then.
    with torch.no_grad():
        planned.original(rows(1))
    planned.eval()
    planned(rows(1, requires_grad=True))
    assert len(logger.means) == 2


@pytest.mark.ci
@pytest.mark.slow
def test_hooks_on_submodules_after_planning_are_told_of_too():
    planned, logger = planned_for(built(Layers)), Logger()
    expected = step(planned)
    handle = planned.layers[1].register_forward_hook(logger)
    with pytest.warns((rkgb.TraceWarning, ReplanWarning)) as told:
        found = step(planned)
    assert any("they do not fire" in str(warning.message) for warning in told)
    assert_same(found, expected)
    logger.means.clear()
    step(planned)
    assert not logger.means
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first plan holds again
        step(planned)
    assert len(planned.plans) == 2


@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning", "ignore::rockmate.ReplanWarning")
@pytest.mark.ci
def test_hooks_on_submodules_that_change_what_they_return_are_part_of_the_plan():
    eager = built(Layers)
    planned = planned_for(copy.deepcopy(eager))
    step(planned)
    for module in (eager, planned):
        module.layers[1].register_forward_hook(lambda _, given, output: torch.sin(output) + given[0])
        module.layers[2].register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    assert_same(step(planned), step(eager))


BACKWARD = ["register_full_backward_hook", "register_full_backward_pre_hook"]


def double(module: nn.Module, *gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Of a backward hook, what goes on; of a backward-pre hook, what comes in."""
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients[0])


@pytest.mark.parametrize("register", BACKWARD)
@pytest.mark.ci
def test_backward_hooks_on_submodules_are_refused_before_planning_and_told_after_it(register):
    model = built(Layers)
    planned = planned_for(copy.deepcopy(model))
    step(planned)
    for module in (model, planned):
        getattr(module.layers[1], register)(double)
    with pytest.raises(rkgb.TraceError, match=r"'layers\.1' has a backward hook"):
        planned_for(model)
    with pytest.warns(FallbackWarning, match=r"runs by itself.* 'layers\.1' has a backward hook"):
        step(planned)
    held = Rockmate(built(Layers), rows(requires_grad=True), 0.75, shapes="error")
    getattr(held.layers[1], register)(double)
    with pytest.raises(PlanMismatch, match=r"'layers\.1' has the hooks double, but no hooks when"):
        step(held)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
@pytest.mark.parametrize("register", BACKWARD)
def test_with_backward_hooks_on_submodules_the_module_itself_runs_if_it_may(register):
    eager = built(Layers)
    planned = Rockmate(copy.deepcopy(eager), rows(requires_grad=True), 0.75, loss=squares, shapes="eager")
    for module in (eager, planned):
        getattr(module.layers[1], register)(double)
    assert_same(step(planned), step(eager))


@pytest.mark.parametrize("register", BACKWARD)
@pytest.mark.ci
def test_backward_hooks_on_the_module_fire_before_and_after_planning(register):
    eager, fired = built(Layers), []
    before, after = planned_for(copy.deepcopy(eager)), copy.deepcopy(eager)
    for module in (eager, before, after):
        getattr(module, register)(lambda module, *gradients: fired.append(1) or double(module, *gradients))
    after = planned_for(after)
    fired.clear()
    expected = step(eager)
    for module in (before, after):
        assert_same(step(module), expected)
    assert len(fired) == 3


def test_activations_are_logged_by_returning_them():
    """What a planned step is to show, the forward returns: then it is an output, exact and held."""

    class Telling(Layers):
        def forward(self, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            means = {}
            for index, layer in enumerate(self.layers):
                hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
                means[f"layer {index}"] = hidden.detach().mean()
            return hidden, means

    eager = built(Telling)
    planned = Rockmate(copy.deepcopy(eager), rows(), 0.75, loss=lambda output: squares(output[0]))
    torch.manual_seed(0)
    _, expected = eager(rows(1))
    torch.manual_seed(0)
    _, found = planned(rows(1))
    assert_same(found, expected)
