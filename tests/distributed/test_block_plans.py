"""Blocks of a model planned under one budget for its whole step: which they are, and what the step then takes."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rk_solvers import Auto
from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetTooSmall, ModelError, PlanOptions, Rockmate, SampleError
from rockmate.distributed import plan_blocks
from rockmate.distributed.account import BlockProblem, Chooser, step_bytes, step_time_ms
from rockmate.distributed.blocks import Forward, classes_of, find_blocks
from rockmate.errors import CheckpointingWarning
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from tests.distributed.sharded import Block, Stack, batch
from tests.module.models import WIDTH, built
from tests.module.steps import assert_same_training, squares, train

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A block whose result depends on a number of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


class Mixed(nn.Module):
    """Two kinds of blocks; of the second kind, the last has another scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.Sequential(Scaled(0.5), Scaled(0.5), Scaled(0.25))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for block in self.first:
            hidden = block(hidden)
        return self.second(hidden)


def hidden(count: int = 64) -> Tensor:
    return torch.randn(count, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def tokens(count: int = 32) -> Tensor:
    return torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(2))


def step_above_gradients(model: nn.Module, sample: Tensor) -> int:
    """Most bytes of a step to whose gradients it adds."""
    squares(model(sample)).backward()
    with AllocationLog(CPU) as log:
        squares(model(sample)).backward()
    return log.peak_bytes


# ---- which blocks ----------------------------------------------------------------------------------


def test_repeated_blocks_are_found():
    assert list(find_blocks(Stack(3))) == ["blocks.0", "blocks.1", "blocks.2"]
    names = ["first.0", "first.1", "second.0", "second.1", "second.2"]
    assert list(find_blocks(Mixed())) == names


def test_the_encoder_and_the_decoder_of_a_transformer_are_found():
    model = nn.Transformer(WIDTH, 2, 2, 2, WIDTH, batch_first=True)
    found = find_blocks(model)
    assert {type(block).__name__ for block in found.values()} == {"TransformerEncoderLayer", "TransformerDecoderLayer"}
    assert len(found) == 4


def test_blocks_are_those_that_are_given():
    model = Mixed()
    assert list(find_blocks(model, Scaled)) == ["second.0", "second.1", "second.2"]
    assert list(find_blocks(model, [model.first[1], Scaled])) == ["first.1", "second.0", "second.1", "second.2"]


def test_blocks_that_are_none_are_refused():
    model = Mixed()
    with pytest.raises(ModelError, match="repeats no class"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(ModelError, match="not in the model"):
        find_blocks(model, [Block()])
    with pytest.raises(ModelError, match=r"'second' holds 'second\.0'"):
        find_blocks(model, [model.second, Scaled])


def test_blocks_are_equal_if_one_graph_is_exact_for_all():
    model = built(Mixed)
    forward = Forward(model, make(hidden()), find_blocks(model))
    classes = classes_of(forward, lambda block, sample: measure(block, sample, PlanRequest(None)))
    assert [list(each.blocks) for each in classes] == [["first.0", "first.1"], ["second.0", "second.1"], ["second.2"]]
    assert [each.calls for each in classes] == [2, 2, 1]


def make(sample: Tensor):
    from rkgb import make_sample

    return make_sample(Mixed(), sample)


# ---- the account -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems() -> list[BlockProblem]:
    model = built(Mixed)
    forward = Forward(model, make(hidden()), find_blocks(model))
    classes = classes_of(forward, lambda block, sample: measure(block, sample, PlanRequest(None)))
    return [BlockProblem.of(each) for each in classes]


@pytest.mark.parametrize("part", [0.35, 0.5, 0.7, 0.9])
def test_the_choice_is_the_best_of_all_candidates(problems, part):
    """Against every combination of everything that was found."""
    most = step_bytes(problems, [max(p.extremes(), key=lambda c: c.kept_bytes) for p in problems])
    limit_bytes = int(part * most)
    chooser = Chooser(problems, [Auto(p.chain) for p in problems])
    choice = chooser.choose(limit_bytes)
    fitting = [list(c) for c in itertools.product(*chooser._candidates) if step_bytes(problems, c) <= limit_bytes]
    if choice is None:
        assert not fitting
        return
    assert step_bytes(problems, choice) <= limit_bytes
    best_ms = min(step_time_ms(problems, c) for c in fitting)
    assert step_time_ms(problems, choice) == pytest.approx(best_ms)
    assert math.prod(map(len, chooser._candidates)) > 100


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_a_choice_by_steps_is_not_much_worse(problems, part, monkeypatch):
    most = step_bytes(problems, [max(p.extremes(), key=lambda c: c.kept_bytes) for p in problems])
    chooser = Chooser(problems, [Auto(p.chain) for p in problems])
    best = chooser.choose(int(part * most))
    monkeypatch.setattr("rockmate.distributed.account._MOST_CHOICES", 0)
    climbed = chooser.choose(int(part * most))
    assert best is not None
    assert climbed is not None
    assert step_bytes(problems, climbed) <= int(part * most)
    lean_ms = step_time_ms(problems, chooser.leanest())
    full_ms = min(step_time_ms(problems, c) for c in itertools.product(*chooser._candidates))
    assert step_time_ms(problems, climbed) - step_time_ms(problems, best) <= 0.3 * (lean_ms - full_ms)


def test_solved_plans_keep_and_take_no_more_than_asked(problems):
    for problem in problems:
        lean, full = (problem.extremes()[0], problem.extremes()[1])
        for kept_bytes in (lean.kept_bytes, (lean.kept_bytes + full.kept_bytes) // 2, full.kept_bytes):
            found = problem.solve(Auto(problem.chain), kept_bytes, 2 * full.peak_bytes)
            assert found is not None
            assert found.kept_bytes <= kept_bytes
            assert found.time_ms >= full.time_ms


# ---- the whole step --------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.45])
def test_a_step_stays_within_the_budget_and_is_exact(budget):
    eager, model = built(lambda: Stack(5)), built(lambda: Stack(5))
    sample = tokens()
    plans = plan_blocks(model, budget, sample, loss=squares)
    assert plans.measured_peak_bytes <= plans.budget_bytes
    assert all(isinstance(block, Rockmate) for block in model.blocks)
    assert list(model.state_dict()) == list(eager.state_dict())
    batches = [tokens() + step for step in range(2)]
    batches = [step % 64 for step in batches]
    assert_same_training(train(model, batches), train(eager, batches))
    model.zero_grad(set_to_none=True)
    taken_bytes = step_above_gradients(model, sample)
    assert taken_bytes <= plans.budget_bytes
    assert taken_bytes == pytest.approx(plans.measured_peak_bytes, rel=0.02)
    assert (sum(plan.recomputations for _, plan in plans.plans) > 0) == (budget < 1)


def test_blocks_are_planned_by_the_solver_that_is_named():
    sample = tokens()
    options = PlanOptions(loss=squares, solver="greedy")
    plans = plan_blocks(built(lambda: Stack(5)), 0.7, sample, options=options)
    assert plans.measured_peak_bytes <= plans.budget_bytes
    assert {plan.solver for _, plan in plans.plans} <= {"greedy", "keep-none", "keep-all"}


@pytest.mark.ci
def test_equal_blocks_share_a_plan_and_others_have_their_own():
    model = built(Mixed)
    eager = copy.deepcopy(model)
    plans = plan_blocks(model, 0.7, hidden(), loss=squares)
    assert [names for names, _ in plans.plans] == [("first.0", "first.1"), ("second.0", "second.1"), ("second.2",)]
    assert model.first[0].plan is model.first[1].plan
    batches = [hidden(), hidden() + 1]
    assert_same_training(train(model, batches), train(eager, batches))
    assert "2 blocks such as first.0" in str(plans)


@pytest.mark.ci
def test_a_short_last_batch_follows_the_same_decisions():
    model, eager = built(lambda: Stack(2)), built(lambda: Stack(2))
    plan_blocks(model, 0.7, tokens(32), loss=squares)
    batches = [tokens(32), tokens(20)]
    with pytest.warns(UserWarning, match="planned once more"):
        found = train(model, batches)
    assert_same_training(found, train(eager, batches))
    plans = model.blocks[0].plans
    assert [plan.schedule for plan in plans] == [plans[0].schedule] * 2


def test_a_budget_that_is_too_small_says_so_and_leaves_the_model_as_it_was():
    model = built(lambda: Stack(3))
    blocks, before = list(model.blocks), copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetTooSmall, match="the smallest step found for Stack") as error:
        plan_blocks(model, 20_000, tokens(), loss=squares)
    assert list(model.blocks) == blocks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    plans = plan_blocks(model, error.value.smallest_budget_bytes, tokens(), loss=squares)
    assert plans.measured_peak_bytes <= error.value.smallest_budget_bytes


class Checkpointed(Stack):
    """Checkpoints its blocks, where it is told to."""

    gradient_checkpointing = True

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.gradient_checkpointing else block(hidden)
        return self.head(hidden)


def test_a_model_with_its_own_checkpointing_is_planned_without_it():
    model, sample = built(lambda: Checkpointed(3)), tokens()
    with pytest.warns(CheckpointingWarning, match="gradient_checkpointing"):
        plans = plan_blocks(model, 0.7, sample, loss=squares)
    assert model.gradient_checkpointing
    model.gradient_checkpointing = False
    eager_bytes = step_above_gradients(built(lambda: Stack(3)), sample)
    assert plans.budget_bytes == pytest.approx(0.7 * eager_bytes, rel=0.02)
    assert step_above_gradients(model, sample) <= plans.budget_bytes


def test_a_block_that_is_not_called_is_named():
    model = built(lambda: Stack(3))
    model.spare = Block()
    with pytest.raises(SampleError, match="'spare' is not called with gradients"):
        plan_blocks(model, 0.7, tokens(), blocks=Block)
    plan_blocks(model, 0.8, tokens())
    assert [type(module) is Block for module in (model.spare, *model.blocks)] == [True, False, False, False]


def test_a_planned_model_is_refused():
    with pytest.raises(ModelError, match="planned already"):
        plan_blocks(Rockmate(built(lambda: Stack(2)), batch(), 1.0), 0.7, batch())
    model = built(lambda: Stack(2))
    plan_blocks(model, 1.0, tokens())
    with pytest.raises(ModelError, match="'blocks.0' is planned already"):
        plan_blocks(model, 0.8, tokens())
