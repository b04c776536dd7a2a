"""A step of sizes that were not measured, compared with the module's own: its bits, and what it takes."""

from __future__ import annotations

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
from rockmate.planning.planner import measured_peak
from rockmate.planning.real_step import run_step
from rockmate.runtime.runner import Runner


def gives_the_same(
    module: torch.nn.Module, runner: Runner, measured: Measured, sample: Sample, loss: LossFunction | None
) -> bool:
    """Whether a step by `runner` gives bit by bit what one of the module gives: outputs, gradients, buffers, streams.

    A module that differs from itself is none to compare with, but where a device adds in another order each time: then
    the two are compared in a fixed order. Where its own step does not fit the memory, nothing is compared. A step by
    `runner` that fails gives nothing. The module is left as it was. Raises `GuardError` where the data take another
    branch than the plan is for.
    """
    step = partial(_digests, module, measured, sample, loss)
    with for_planning(module):
        expected = if_it_fits(lambda: step(module))
        if expected is None:
            return True
        try:
            if step(runner) == expected:
                return True
            if step(module) == expected:
                return False
            if are_orderly({measured.device}):
                return True
            with fixed_order():
                expected = step(module)
                return step(runner) == expected or step(module) != expected
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, GuardError):
                raise
            return False  # such as of kernels that take some sizes alone


def step_bytes(
    module: torch.nn.Module, runner: Runner, measured: Measured, sample: Sample, loss: LossFunction | None
) -> int:
    """Peak of one real step by `runner`. The module is left as it was."""
    return measured_peak(module, runner, replace(measured, sample=sample), loss).allocated_bytes


def _digests(
    module: torch.nn.Module,
    measured: Measured,
    sample: Sample,
    loss: LossFunction | None,
    step: Callable[..., Any],
) -> list[Any]:
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
        tensors = [*outputs, *module.buffers(), *(tensor.grad for tensor in (*module.parameters(), *given.tensors))]
        streams = [state.tolist() for _, state in random_states(devices) if isinstance(state, torch.Tensor)]
        return [*(None if tensor is None else digest(tensor.detach()) for tensor in tensors), *streams]
