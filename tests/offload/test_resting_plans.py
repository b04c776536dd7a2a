"""Plans for a budget of all of training, where parameters and optimizer state are in a second memory."""

import time

import pytest
import torch

from rk_solvers.links import Link, SecondMemory
from rockmate import PeakMemory
from rockmate.calls.resting import rest_as_planned
from rockmate.offload.file_tier import FileTier
from rockmate.offload.option import Offload
from rockmate.offload.tiers import Tiers
from rockmate.planning.measured import measure
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest, limits_of
from rockmate.resting.optimizer import OffloadedOptimizer
from rockmate.resting.tensor import rested_of
from rockmate.resting.window import Place
from tests.offload.lora import LoraModel, batch, next_token_loss, trained

TOKENS = batch()


class Fast(Tiers):
    """A second memory that is there, whose links no computation waits for."""

    def __init__(self, tier):
        super().__init__(Offload())
        self.tier = tier

    def on(self, device):
        return self.tier

    def links_on(self, device, *_):
        return SecondMemory(Link(1e7), Link(1e7), None, self.tier.staging_bytes)


def loss_of(logits):
    return next_token_loss(logits, TOKENS)


@pytest.fixture
def tier(tmp_path):
    class Unstaged(FileTier):
        staging_bytes = 0  # as large as ten such models; it is no memory of PyTorch's

    made = Unstaged(tmp_path)
    yield made
    made.close()


def whole(trains):
    torch.manual_seed(0)
    model = LoraModel(layers=3)
    return model.requires_grad_(True) if trains else model


def request_of(budget, tier, optimizer):
    return PlanRequest(
        budget,
        loss_of,
        scope="total",
        optimizer=optimizer,
        limits=limits_of(0.5),
        tiers=Fast(tier),
    )


def optimizer_of(model, tier, trains):
    plain = torch.optim.AdamW(trained(model), lr=0.01)
    return OffloadedOptimizer(plain, tier, in_backward=True) if trains else plain


@pytest.mark.parametrize("trains", [False, True], ids=["adapters", "all"])
def test_the_budget_bounds_all_that_is_here(tier, trains):
    model = whole(trains)
    optimizer = optimizer_of(model, tier, trains)
    measured = measure(model, (TOKENS,), request_of(None, tier, optimizer))
    plain_bytes = measured.residents.total_bytes
    budget = plain_bytes - sum(measured.may_rest.values()) // 2 + int(1.02 * measured.eager_peak_bytes)
    assert measured.residents.total_bytes + measured.eager_peak_bytes > budget  # it would not fit by far
    planned = make_plan(measured, request_of(budget, tier, optimizer), model)
    split = planned.plan.memory_split
    held = split.residents
    assert held.window_bytes < 0.6 * sum(measured.may_rest.values())
    assert held.total_bytes + planned.plan.peak_bytes <= budget
    assert "parameters that rest" in str(split)
    del optimizer

    before = TOKENS.clone()
    with PeakMemory() as memory:
        entered = time.perf_counter()
        tokens = before.clone()
        model = whole(trains)
        runner = planned.runner_for(model, measured)
        owner = rest_as_planned(model, measured, planned.plan, tier)
        runner = planned.runner_for(model, measured)
        optimizer = optimizer_of(model, tier, trains)
        losses = []
        for step in range(4):
            if step == 1:
                start_ms = (time.perf_counter() - entered) * 1e3  # state is there from then on
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = loss_of(runner(tokens))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            del loss
    most_bytes = max(size_bytes for time_ms, size_bytes in memory.timeline if time_ms >= start_ms)
    predicted_bytes = held.total_bytes + planned.plan.peak_bytes
    assert most_bytes <= 1.01 * predicted_bytes
    assert most_bytes <= budget
    # The window is full, and an optimizer steps within the backward, at other moments than the highest of the step.
    assert most_bytes >= (0.8 if trains else 0.95) * predicted_bytes
    assert 0.99 * held.window_bytes <= owner.most_held_bytes <= held.window_bytes

    eager = whole(trains)
    optimizer = torch.optim.AdamW(trained(eager), lr=0.01)
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(eager(TOKENS))
        loss.backward()
        optimizer.step()
        assert torch.equal(loss, losses[step])
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_blocks_that_are_not_in_use_rest_and_are_never_brought(tier):
    model = whole(trains=False)
    model.unused = torch.nn.Linear(160, 320).requires_grad_(False)
    optimizer = torch.optim.AdamW(trained(model))
    request = request_of(None, tier, optimizer)
    measured = measure(model, (TOKENS,), request)
    assert measured.may_rest["unused.weight"] == model.unused.weight.nbytes
    budget = measured.residents.total_bytes + measured.eager_peak_bytes - measured.may_rest["unused.weight"] // 2
    planned = make_plan(measured, request_of(budget, tier, optimizer), model)
    owner = rest_as_planned(model, measured, planned.plan, tier)
    runner = planned.runner_for(model, measured)
    for _ in range(2):
        loss_of(runner(TOKENS)).backward()
    assert rested_of(model.unused.weight).place is Place.AWAY
    assert owner.held_bytes <= owner.window_bytes
    assert model.unused.weight.sum().isfinite()


def test_nothing_rests_where_all_fits(tier):
    model = whole(trains=False)
    optimizer = torch.optim.AdamW(trained(model))
    measured = measure(model, (TOKENS,), request_of(None, tier, optimizer))
    planned = make_plan(measured, request_of(1 << 30, tier, optimizer), model)
    assert planned.plan.memory_split.residents.window_bytes == 0
    assert rest_as_planned(model, measured, planned.plan, tier) is None


def test_a_slow_link_has_a_larger_window(tier):
    from rockmate.runtime.windows import window_for

    model = whole(trains=False)
    request = request_of(None, tier, torch.optim.AdamW(trained(model)))
    measured = measure(model, (TOKENS,), request)
    windows = [
        window_for(measured.graphs.K_graph, measured.may_rest, SecondMemory(Link(speed), Link(speed)), 0)
        for speed in (1e3, 1e4, 1e5, 1e6, 1e8)
    ]
    assert windows[-1] < windows[1] <= sum(measured.may_rest.values())
    assert windows[1:] == sorted(windows[1:], reverse=True)


def test_a_window_leaves_the_step_what_it_needs_though_a_slow_link_is_waited_for_then(tier):
    from rockmate.runtime.windows import window_for

    model = whole(trains=False)
    measured = measure(model, (TOKENS,), request_of(None, tier, torch.optim.AdamW(trained(model))))
    slow, sizes = SecondMemory(Link(1e4), Link(1e4)), measured.may_rest
    wanted_bytes = window_for(measured.graphs.K_graph, sizes, slow, 0)
    assert window_for(measured.graphs.K_graph, sizes, slow, 0, wanted_bytes) == wanted_bytes
    assert window_for(measured.graphs.K_graph, sizes, slow, 0, wanted_bytes // 2) == wanted_bytes // 2
    least_bytes = window_for(measured.graphs.K_graph, sizes, slow, 0, 0)
    assert max(sizes.values()) <= least_bytes < wanted_bytes // 2
