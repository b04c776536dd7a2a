"""The budget holds for every step, however the training loop treats gradients, outputs and losses; and less is less."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rk_solvers import Greedy, KeepAll
from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetTooSmall, Rockmate, zoo
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying import tried
from tests.module.models import WIDTH, Layers, Normalised, Tied, TwoHeads, built, images, rows, tokens
from tests.module.steps import measured_for, rockmate_from, squares
from tests.where import here

STEPS = 50
QUICK = Greedy(tries=2, rounds=3)  # a guarantee does not depend on who made the plan
MODELS: dict[str, tuple[type[nn.Module], Callable[[int], Tensor]]] = {
    "layers": (Layers, rows),
    "normalised": (Normalised, images),
    "tied": (Tied, tokens),
    "two-heads": (TwoHeads, rows),
}
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def planned() -> Callable[[str], Rockmate]:
    """Makes a plan for the smallest budget that a refusal names, where a byte too much shows."""

    @cache
    def measured(name: str) -> tuple[nn.Module, Measured]:
        """The module and its costs, once for all plans. Tests train copies of it."""
        make, batch = MODELS[name]
        module = built(make)
        return module, measured_for(module, batch(0))

    def plan(name: str) -> Rockmate:
        module, costs = measured(name)
        request = partial(PlanRequest, loss=squares, solver=QUICK)
        with pytest.raises(BudgetTooSmall) as refusal:
            rockmate_from(costs, module, request(1))
        model = rockmate_from(costs, copy.deepcopy(module), request(refusal.value.smallest_budget_bytes))
        assert model.plan.recomputations > 0
        return model

    return plan


@dataclass
class Watched:
    """The levels of memory over a stretch of training, of which some parts are steps."""

    log: AllocationLog = field(default_factory=lambda: AllocationLog(here()))
    levels: list[int] = field(default_factory=list)

    def __enter__(self) -> Watched:
        self.log.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.log.__exit__(*raised)
        self.levels = [0]
        for event in self.log.events:
            self.levels.append(self.levels[-1] + event.size_bytes)

    def mark(self) -> None:
        """A step starts, or ends."""
        self.log.mark()

    def windows(self) -> Iterator[list[int]]:
        """The levels in each step, that at its start first."""
        for start, end in zip(self.log.marks[::2], self.log.marks[1::2], strict=True):
            yield self.levels[start : end + 1]

    def peaks(self) -> list[int]:
        """For each step, most bytes above what was there at its start."""
        return [max(levels) - levels[0] for levels in self.windows()]


def step(watched: Watched, model: nn.Module, data: Tensor) -> tuple[Any, Tensor]:
    """Forward, loss and backward; output and loss live to the end of it, and as long as the caller holds them."""
    watched.mark()
    output = model(data)
    loss = squares(output)
    loss.backward()
    watched.mark()
    return output, loss


def net_bytes(watched: Watched) -> int:
    return watched.levels[-1]


# ---- gradients and optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize(
    ("name", "make_optimizer"),
    [
        *(pytest.param("layers", make, id=f"layers-{name}") for name, make in OPTIMIZERS.items()),
        *(pytest.param(name, OPTIMIZERS["adam"], id=f"{name}-adam") for name in MODELS if name != "layers"),
    ],
)
def test_each_of_fifty_steps_is_within_the_budget(planned, name, make_optimizer, set_to_none):
    model, batch = planned(name), MODELS[name][1]
    optimizer = make_optimizer(model.parameters())
    data = [batch(seed) for seed in range(4)]  # but for the first, not the sample
    with Watched() as watched:
        for number in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            step(watched, model, data[number % 4])
            optimizer.step()
    peaks = watched.peaks()
    assert len(peaks) == STEPS
    assert max(peaks) <= model.plan.budget_bytes
    assert peaks[0] == model.plan.measured_peak_bytes  # of a step from no gradients, as this one is
    assert peaks[1:] == [peaks[-1]] * (STEPS - 1)
    assert (peaks[-1] == peaks[0]) if set_to_none else (peaks[-1] <= peaks[0])


@every_model
def test_steps_that_add_to_gradients_are_within_the_budget(planned, name):
    """A backward adds what it computes to a gradient that is there, and frees it: that step takes no more."""
    model, batch = planned(name), MODELS[name][1]
    data = [batch(seed) for seed in range(5)]
    with Watched() as watched:
        for number in range(20):
            if number % 5 == 0:
                model.zero_grad()
            step(watched, model, data[number % 5])
    peaks = watched.peaks()
    assert max(peaks) <= model.plan.budget_bytes
    assert len(set(peaks[::5])) == 1
    assert max(peaks[number] for number in range(20) if number % 5) <= peaks[0]


@every_model
def test_gradients_of_several_losses_are_within_the_budget_where_some_are_there_and_some_are_not(planned, name):
    model, batch = planned(name), MODELS[name][1]
    data = batch(1)
    with Watched() as watched:
        for number, _ in enumerate(parameters := list(model.parameters())):
            step(watched, model, data)
            for parameter in parameters[number:]:
                parameter.grad = None
    assert max(watched.peaks()) <= model.plan.budget_bytes


@every_model
def test_gradients_cleared_between_forward_and_backward_are_within_the_budget(planned, name):
    """As many loops do: ``loss = ...; optimizer.zero_grad(); loss.backward()``."""
    model, batch = planned(name), MODELS[name][1]
    optimizer = OPTIMIZERS["adam"](model.parameters())
    data = batch(1)
    with Watched() as watched:
        for _ in range(10):
            watched.mark()
            loss = squares(model(data))
            optimizer.zero_grad()
            loss.backward()
            watched.mark()
            optimizer.step()
    assert max(watched.peaks()) <= model.plan.budget_bytes


# ---- what the loop keeps ---------------------------------------------------------------------------------


def losses_kept(watched: Watched, model: nn.Module, data: Tensor, kept: list[Any]) -> None:
    kept.append(step(watched, model, data)[1])


def last_output_kept(watched: Watched, model: nn.Module, data: Tensor, kept: list[Any]) -> None:
    kept[:] = step(watched, model, data)


def every_output_kept(watched: Watched, model: nn.Module, data: Tensor, kept: list[Any]) -> None:
    kept.append(step(watched, model, data))


def nothing_kept(watched: Watched, model: nn.Module, data: Tensor, kept: list[Any]) -> None:
    watched.mark()
    squares(model(data)).backward()
    watched.mark()


def evaluated_between(watched: Watched, model: nn.Module, data: Tensor, kept: list[Any]) -> None:
    step(watched, model, data)
    model.eval()
    with torch.no_grad():
        kept[:] = [model(data)]
    model.train()


LOOPS = (losses_kept, last_output_kept, every_output_kept, nothing_kept, evaluated_between)


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
@every_model
def test_what_a_loop_keeps_does_not_make_its_steps_take_more(planned, name, loop):
    model, batch = planned(name), MODELS[name][1]
    left = []
    for module in (copy.deepcopy(model.original), model):
        data, kept = [batch(seed) for seed in range(3)], list[Any]()
        with Watched() as watched:
            for number in range(12):
                loop(watched, module, data[number % 3], kept)
                module.zero_grad()
        left.append(net_bytes(watched))
        peaks = watched.peaks()
    assert max(peaks) <= model.plan.budget_bytes
    assert len(set(peaks[1:])) == 1
    assert left[1] == left[0], "what is left after the steps is not what eager training leaves"


# ---- what a step leaves alone ----------------------------------------------------------------------------


class Auxiliary(nn.Module):
    """A second output by layers of its own, of which a loss may make nothing."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.trunk, self.main, self.other = Layers(2), Layers(2), Layers(depth)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(hidden)
        return self.main(hidden), self.other(hidden)


def of_first(output: tuple[Tensor, ...]) -> Tensor:
    return output[0].float().square().mean()


@pytest.mark.parametrize("depth", [1, 4])
def test_what_an_output_without_gradient_holds_is_predicted(depth):
    """No backward frees what its operations saved: the output's own graph holds it, in eager training too."""
    network = built(Auxiliary, depth)
    costs = measured_for(network, rows(), of_first)
    for budget in (1.0, 0.9):
        plan = rockmate_from(costs, network, PlanRequest(budget, of_first, QUICK)).plan
        assert plan.measured_peak_bytes <= plan.budget_bytes
        assert abs(plan.peak_bytes - plan.measured_peak_bytes) <= 0.01 * plan.measured_peak_bytes


class Attending(nn.Module):
    """Attention with dropout, whose parts autocast computes in several types."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.project(hidden).view(8, -1, 3, 4, WIDTH // 4)
        queries, keys, values = (part.squeeze(2).transpose(1, 2) for part in heads.split(1, dim=2))
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, dropout_p=0.1)
        return hidden + mixed.transpose(1, 2).reshape(hidden.shape)


@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_the_step_measured_under_autocast_takes_its_backward_outside_as_training_does(budget):
    with torch.autocast(here().type, torch.bfloat16):
        model = Rockmate(built(Attending), rows(), budget, loss=squares, solver=QUICK)
    plan, data = model.plan, rows(1)
    with AllocationLog(here()) as log:
        with torch.autocast(here().type, torch.bfloat16):
            output = model(data)
            loss = squares(output)
        loss.backward()
    assert log.peak_bytes == plan.measured_peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes - plan.measured_peak_bytes) <= 0.01 * plan.measured_peak_bytes


# ---- all of training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("treatment", ["to-none", "to-zero", "accumulated"])
@pytest.mark.parametrize("name", ["layers", "tied"])
def test_fifty_steps_are_within_a_budget_for_all_of_training(name, treatment):
    make, batch = MODELS[name]
    make_optimizer = OPTIMIZERS["adam"]
    network, data = built(make), batch(0)
    model = Rockmate(network, data, 0.85, loss=squares, solver=QUICK, scope="total", optimizer=make_optimizer)
    residents = model.memory_split.residents
    held_bytes = residents.parameter_bytes + residents.buffer_bytes + residents.input_bytes  # before the log starts
    with Watched() as watched:
        optimizer = make_optimizer(model.parameters())
        for number in range(STEPS):
            with torch.no_grad():
                data.copy_(batch(number))  # one batch at a time, in one place
            if treatment != "accumulated" or number % 4 == 0:
                optimizer.zero_grad(set_to_none=treatment != "to-zero")
            step(watched, model, data)
            if treatment != "accumulated" or number % 4 == 3:
                optimizer.step()
    assert held_bytes + max(max(levels) for levels in watched.windows()) <= model.memory_split.total_bytes


# ---- less is less ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny"])
@pytest.mark.ci
def test_a_lower_budget_has_no_higher_measured_peak(name):
    entry = zoo.get(name)
    costs = measured_for(entry.model, entry.sample, entry.loss)
    peaks = []
    for budget in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        try:
            plan = rockmate_from(costs, entry.model, PlanRequest(budget, entry.loss, QUICK)).plan
        except BudgetTooSmall as refusal:
            smallest_bytes = refusal.smallest_budget_bytes
            plan = rockmate_from(costs, entry.model, PlanRequest(smallest_bytes, entry.loss, QUICK)).plan
            peaks.append(plan.measured_peak_bytes)
            break
        peaks.append(plan.measured_peak_bytes)
    assert len(peaks) > 3
    assert peaks == sorted(peaks, reverse=True)


class Forgetful(Greedy):
    """Finds nothing, as a search may whose time is over."""

    def solve(self, problem, budget_bytes):
        found = Greedy.solve(self, problem, budget_bytes)
        return KeepAll().solve(problem, budget_bytes) if budget_bytes > 1 else found


@pytest.mark.parametrize("offload", [None, "auto"])
def test_the_bytes_that_a_refusal_names_are_enough_though_a_search_finds_that_plan_no_more(quick_disk, offload):
    module, batch = built(Layers), rows(0)
    options = {"loss": squares, "offload": offload, "cache": False}
    with pytest.raises(BudgetTooSmall) as refusal:
        Rockmate(module, batch, 1, solver=QUICK, **options)
    enough_bytes = refusal.value.smallest_budget_bytes
    plan = Rockmate(module, batch, enough_bytes, solver=Forgetful(tries=1, rounds=1), **options).plan
    assert plan.measured_peak_bytes <= enough_bytes
    with pytest.raises(BudgetTooSmall):
        Rockmate(module, batch, enough_bytes - 1024, solver=Forgetful(tries=1, rounds=1), **options)


def test_the_bytes_that_a_refusal_names_are_enough_though_more_is_predicted(monkeypatch):
    """As where a step takes less than its operations by themselves: these bytes were measured."""
    real = tried.measured_peak

    def measured_peak(*given):
        peak = real(*given)
        return replace(peak, allocated_bytes=int(0.9 * peak.allocated_bytes))

    monkeypatch.setattr(tried, "measured_peak", measured_peak)
    module, batch = built(Layers), rows(0)
    with pytest.raises(BudgetTooSmall) as refusal:
        Rockmate(module, batch, 1, loss=squares, solver=QUICK, cache=False)
    enough_bytes = refusal.value.smallest_budget_bytes
    plan = Rockmate(module, batch, enough_bytes, loss=squares, solver=Forgetful(tries=1, rounds=1), cache=False).plan
    assert plan.measured_peak_bytes <= enough_bytes < plan.peak_bytes


def test_the_bytes_that_a_refusal_names_are_enough_though_its_steps_took_a_hair_less_than_later_ones(monkeypatch):
    """As was seen once of a ResNet-50: 512 bytes less than predicted, in all steps of the first call alone."""
    real, less_bytes = tried.measured_peak, 512

    def measured_peak(*given):
        peak = real(*given)
        return replace(peak, allocated_bytes=peak.allocated_bytes - less_bytes)

    monkeypatch.setattr(tried, "measured_peak", measured_peak)
    module, batch = built(Layers), rows(0)
    with pytest.raises(BudgetTooSmall) as refusal:
        Rockmate(module, batch, 1, loss=squares, solver=QUICK, cache=False)
    less_bytes = 0
    enough_bytes = refusal.value.smallest_budget_bytes
    plan = Rockmate(module, batch, enough_bytes, loss=squares, solver=QUICK, cache=False).plan
    assert plan.measured_peak_bytes <= enough_bytes
