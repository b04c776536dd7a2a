"""Random modules with compiled parts, on random lengths: near eager's steps, and those of any budget to the bit."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rkgb.devices.allocation_log import AllocationLog
from rkgb.replay.step_record import bitwise_equal
from rockmate import BudgetTooSmall, Rockmate
from tests.families.test_random_lengths import PER_ROW, WithLengths
from tests.module.models import WIDTH
from tests.module.steps import CPU, FEW_ROUNDS, squares


def gradients_of(module, x, number):
    torch.manual_seed(number)
    module.zero_grad()
    squares(module(x)).backward()
    return [one.grad for one in module.parameters() if one.grad is not None], torch.get_rng_state()


def compiled_parts(module, x):
    """Of the plan of such a call; None where it has none."""
    sizes = str(list(x.shape))
    plan = next((one for one in module.plans if sizes in one.calls), None)
    if plan is None:
        return None
    return [] if plan.compiled is None else [trial.operations for trial in plan.compiled.chosen]


def train(seed: int, chosen: Callable[[Rockmate, torch.Tensor], Any], **said: Any) -> tuple[int, int]:
    """How many steps were taken, and how many of these with what is `chosen` of a plan that is made as `said`."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    eager = WithLengths(seed)
    tight, loose = (
        Rockmate(copy.deepcopy(eager), budget=budget, loss=squares, limits=FEW_ROUNDS, **said)
        for budget in (rng.choice([0.9, 0.8, 0.7]), "1GiB")
    )
    lengths = [rng.randint(24, 40), *(rng.randint(2, 40) for _ in range(10))]
    others = 0
    for number, length in enumerate([*lengths, *lengths]):
        x = torch.randn(PER_ROW, length, WIDTH)
        try:
            mine, stream = gradients_of(tight, x, number)
        except BudgetTooSmall:
            tight.replan(1.0)
            mine, stream = gradients_of(tight, x, number)
        with_room, _ = gradients_of(loose, x, number)
        expected, theirs = gradients_of(eager, x, number)
        assert torch.equal(stream, theirs)
        away = sum(float((one - other).square().sum()) for one, other in zip(mine, expected, strict=True))
        # Sums in another order, and the few units that this switches.
        assert away**0.5 <= 1e-3 * sum(float(one.square().sum()) for one in expected) ** 0.5 + 1e-6
        if chosen(tight, x) == chosen(loose, x):
            assert all(bitwise_equal(*pair) for pair in zip(mine, with_room, strict=True)), (seed, number)
        others += bool(chosen(tight, x))
        if number >= len(lengths) and not tight.fallbacks:
            tight.zero_grad()
            with AllocationLog(CPU) as log:
                squares(tight(x)).backward()
            assert log.peak_bytes <= tight.plan.budget_bytes
    return 2 * len(lengths), others


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.slow) for seed in range(24)])
def test_steps_of_any_length_are_near_eager_s_and_those_of_any_budget(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, compiled = train(seed, compiled_parts, compile=True)
    assert compiled in (0, steps) or compiled > steps // 3
