"""A step of sizes that were not measured, compared with the module's own: its bits, and what it takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rkgb import GuardError, Sample
from rkgb.devices.out_of_memory import if_it_fits, is_out_of_memory
from rkgb.recording.digest import digest
from rkgb.replay.order import are_orderly, fixed_order
from rkgb.state.module_state import for_planning, random_states
from rkgb.tree import leaves
from rockmate.planning.costs import LossFunction
from rockmate.planning.measured import Measured, borrowed_with_gradients
from rockmate.planning.trying.real_step import run_step
from rockmate.planning.trying.tried import measured_peak
from rockmate.regions.rounding import CLOSE, MOVES, is_as_moved, is_close, is_explained, moved
from rockmate.runtime.runner import Runner


def gives_the_same(
    module: torch.nn.Module, runner: Runner, measured: Measured, sample: Sample, loss: LossFunction | None
) -> bool:
    """Whether a step by `runner` gives bit by bit what one of the module gives: outputs, gradients, buffers, streams.

    A module that differs from itself is none to compare with, but where a device adds in another order each time: then
    the two are compared in a fixed order. Where its own step does not fit the memory, nothing is compared. A step by
    `runner` that fails gives nothing. Where it rounds otherwise than the module, numbers are to be near, and
    streams the same. The module is left as it was. Raises `GuardError` where the data take another branch than the plan
    is for.
    """
    rounds_otherwise = measured.rounds_otherwise
    note = _kept if rounds_otherwise else digest
    step = partial(_step, module, measured, sample, loss, note)
    same: Callable[[Any, Any], bool] = operator.eq
    if rounds_otherwise:
        same = partial(
            _are_near, of_moved=lambda seed: _step(module, measured, moved(sample, seed), loss, note, module)
        )
    with for_planning(module):
        expected = if_it_fits(lambda: step(module))
        if expected is None:
            return True
        try:
            if same(step(runner), expected):
                return True
            if same(step(module), expected):
                return False
            if are_orderly({measured.device}):
                return True
            with fixed_order():
                expected = step(module)
                return same(step(runner), expected) or not same(step(module), expected)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, GuardError):
                raise
            return False  # such as of kernels that take some sizes alone


def step_bytes(
    module: torch.nn.Module, runner: Runner, measured: Measured, sample: Sample, loss: LossFunction | None
) -> int:
    """Peak of one real step by `runner`. The module is left as it was."""
    return measured_peak(module, runner, replace(measured, sample=sample), loss).allocated_bytes


Found = tuple[list[Any], list[Any], list[Any]]
"""Of a step: what was noted of outputs and buffers, and of gradients, and the random streams after it."""


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # the module's buffers are given back


def _step(
    module: torch.nn.Module,
    measured: Measured,
    sample: Sample,
    loss: LossFunction | None,
    note: Callable[[torch.Tensor], Any],
    step: Callable[..., Any],
) -> Found:
    given = sample.copy()
    outputs: list[torch.Tensor] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        outputs.extend(leaves(output))
        return output

    noted.original = module  # type: ignore[attr-defined]
    devices = {measured.device}
    with borrowed_with_gradients(module, devices, measured.graphs.D_graph, measured.gradients):
        run_step(noted, given, loss)
        values = [note(one.detach()) for one in (*outputs, *module.buffers())]
        gradients = [one.grad for one in (*module.parameters(), *given.tensors)]
        streams = [state.tolist() for _, state in random_states(devices) if isinstance(state, torch.Tensor)]
        return values, [None if one is None else note(one.detach()) for one in gradients], streams


def _are_near(found: Found, expected: Found, of_moved: Callable[[int], Found]) -> bool:
    """Whether two steps differ in the rounding of other code alone: gradients by little of the norm of all of them.

    `of_moved` is for kinks: an expected step on inputs that are off by rounding.
    """
    if found[2] != expected[2] or any(
        (one is None) != (other is None) for one, other in zip(found[1], expected[1], strict=True)
    ):
        return False
    apart = _gradients_apart(found, expected)
    most = max((CLOSE.get(one.dtype, 0.0) for one in expected[1] if one is not None), default=0.0)
    far = [place for place, other in enumerate(expected[0]) if not is_close(other, found[0][place])]
    if apart <= most and not far:
        return True
    moves = [of_moved(seed) for seed in range(MOVES)]
    reached = max(_gradients_apart(step, expected) for step in moves)
    return (apart <= most or is_explained(apart, reached)) and all(
        is_as_moved(expected[0][place], found[0][place], (step[0][place] for step in moves)) for place in far
    )


def _gradients_apart(found: Found, expected: Found) -> float:
    """Norm of the difference of all gradients over that of those expected."""
    pairs = [
        (one, other)
        for one, other in zip(found[1], expected[1], strict=True)
        if one is not None and other is not None and other.is_floating_point()
    ]
    away = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs) ** 0.5
    norm = sum(float(other.double().square().sum()) for _, other in pairs) ** 0.5
    return away / norm if norm else away
