"""Steps of several contenders by turns: what else the machine does falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from rkgb.state.module_state import for_planning
from rockmate.planning.costs import LossFunction
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, borrowed_with_gradients
from rockmate.planning.trying.real_step import step_ms
from rockmate.runtime.runner import Runner

_TURNS_TO_COMPARE = 3  # steps of each of two plans
_MOST_TURNS = 5  # of those, where they are quick
_AGREEING = 0.01  # of a step's time: two turns that say the same to within this are enough
_CLEAR = 0.5  # of how far two plans are apart: turns that differ by less say the same
_PLAIN = 0.05  # of a step's time: where two plans are predicted to be so far apart, one turn that agrees is enough
_DECIDED = 0.15  # of it: the first is slower by so much each time, and another turn does not make it the quicker
_COMPARE_S = 4.0  # of such steps, beyond which there are no more than there must be
AS_PREDICTED = 0.02  # of a step's time: steps that differ by no more say what was predicted


def by_turns(
    steps: Sequence[Callable[[], float]],
    least: int,
    most: int,
    seconds: float,
    is_enough: Callable[[list[list[float]]], bool] | None = None,
) -> list[list[float]]:
    """Times of these steps in ms, turn by turn: `least` turns, and up to `most` while the `seconds` last.

    Fewer where the turns so far are enough.
    """
    started, times_ms = time.perf_counter(), list[list[float]]()
    while len(times_ms) < least or (len(times_ms) < most and time.perf_counter() < started + seconds):
        times_ms.append([step() for step in steps])
        if is_enough is not None and is_enough(times_ms):
            break
    return times_ms


def steps_by_turns_ms(
    module: torch.nn.Module,
    plans: Sequence[tuple[Measured, LoweredPlan]],
    loss: LossFunction | None,
    predicted: float | None = None,
) -> tuple[float, float]:
    """Times of a step of two plans of `module`, by turns: that of the first is what is to prove itself.

    Where the first is `predicted` to take a quite different time, as a share of the other's, a turn that says the same
    is the only one.

    What else the machine does only adds, so that the least of each would tell, if it did as much beside both: the
    first is as slow as the least times say, or as most of the turns do, whichever is slower. The module is left alone.
    """

    def timed(measured: Measured, runner: Runner) -> float:
        assert measured.sample is not None, "steps need the sample with which the module was measured"
        graph = measured.graphs.D_graph
        with borrowed_with_gradients(module, {measured.device}, graph, measured.gradients):
            return step_ms(runner, measured.sample, loss, measured.device)

    with for_planning(module):
        steps = [partial(timed, measured, planned.runner_for(module, measured)) for measured, planned in plans]
        turns = by_turns(steps, _TURNS_TO_COMPARE, _MOST_TURNS, _COMPARE_S, partial(_agree, predicted))
    first_ms, other_ms = (min(times_ms) for times_ms in zip(*turns, strict=True))
    return max(first_ms, other_ms * statistics.median(one / another for one, another in turns)), other_ms


def _agree(predicted: float | None, turns: list[list[float]]) -> bool:
    """Whether turns of two plans have told which is the quicker."""
    ratios = [one / another for one, another in turns]
    if len(ratios) == 1:
        return predicted is not None and abs(1 - predicted) >= _PLAIN and abs(ratios[0] - predicted) <= AS_PREDICTED
    apart = max(ratios) - min(ratios)
    is_clear = apart <= _CLEAR * abs(1 - statistics.mean(ratios))
    return min(ratios) > 1 + _DECIDED or apart <= _AGREEING or is_clear
