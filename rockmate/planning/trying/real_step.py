"""Real steps on the sample: how many bytes the eager one takes, and how many a plan's."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rkgb import Sample
from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.out_of_memory import if_it_fits, out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.process.autocast import without_autocast
from rkgb.process.surroundings import surroundings_aside
from rkgb.profile.block_run import FreshGradients
from rkgb.state.attributes import FreshTensors, is_a_loss
from rkgb.state.generators import GeneratorsMet, MeetingGenerators
from rkgb.state.module_state import for_planning, gradients_elsewhere_kept, module_state_kept
from rkgb.tree import leaves
from rockmate.memory.allocators import (
    StepPeak,
    allocated_now_bytes,
    end_peak,
    predicted_reserved_bytes,
    start_peak,
)
from rockmate.memory.split import Residents
from rockmate.planning.costs import LossFunction, evaluate_loss
from rockmate.runtime.runner import Runner
from rockmate.units import format_bytes

# A cross-entropy saves one tensor of the outputs' size and holds two gradients of that size at once; one is measured.
_BEYOND_GRADIENTS = 2
_MOST_COPIED = 0.01  # of the memory that is free: a larger sample is read where it is

StepFunction = Callable[..., Any]  # called like the module


def run_step(step: StepFunction, sample: Sample, loss: LossFunction | None) -> None:
    """One forward and backward, holding the output to the end as training loops do.

    What forward leaves in attributes takes gradients, too: single numbers, which are losses, always; all where there
    is no `loss` that would say which.
    """
    module: Any = getattr(step, "original", step)  # of a planned one, and of what runs a plan
    attributes = FreshTensors(module)
    with torch.enable_grad():
        output = step(*sample.args, **sample.kwargs)
        left = [tensor for tensor in attributes.now() if tensor.requires_grad]
        if loss is None:
            # As a loss would: its gradients belong to autograd, which frees them once they are used.
            tensors = {id(tensor): tensor for tensor in (*leaves(output), *left) if tensor.requires_grad}
            roots = [FreshGradients.apply(*tensors.values())]  # type: ignore[no-untyped-call]
        else:
            roots = [evaluate_loss(loss, output), *(tensor for tensor in left if is_a_loss(tensor.shape))]
        # Training calls it behind its autocast context, the end of which lets go of the weights that were cast.
        torch.clear_autocast_cache()
        with without_autocast():
            torch.autograd.backward(roots)


def step_ms(step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device) -> float:
    """Time of one step, which is over on the device. The module is to be borrowed."""
    fresh = sample.copy()
    device_of(device).synchronize()
    started = time.perf_counter()
    run_step(step, fresh, loss)
    device_of(device).synchronize()
    return 1e3 * (time.perf_counter() - started)


def _for_a_step(step: StepFunction, sample: Sample, device: torch.device) -> Sample:
    """Gradients of inputs are not the user's to find; nor is what forward writes into them, which no plan does.

    A copy, which lies in memory as a batch of training does; but none for a plan's step where it would take much of
    what is free.
    """
    copy_bytes = sum(tensor.nbytes for tensor in sample.tensors)
    if isinstance(step, Runner) and copy_bytes > _MOST_COPIED * device_of(device).available_bytes():
        return sample.aliases()
    return sample.copy()


def peak_of(step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device) -> StepPeak:
    """Most bytes that one step allocates at once above what was there before, and what it has reserved."""
    return device_of(device).unwatched(lambda: _peak_of(step, sample, loss, device))


def _peak_of(step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device) -> StepPeak:
    fresh = _for_a_step(step, sample, device)
    before_bytes = start_peak(device)
    allocator = device_of(device).emulated()
    with AllocationLog(device) as log:
        run_step(step, fresh, loss)
    peak = end_peak(device, before_bytes, log.peak_bytes)
    return replace(peak, predicted_reserved_bytes=predicted_reserved_bytes(allocator, log.events))


def warm_step(
    step: StepFunction,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    borrow: Callable[[], AbstractContextManager[None]],
) -> None:
    """Where libraries keep what they take in the first step: one whose peak nobody measures. On the CPU nothing.

    `borrow` is entered around it: its gradients are gone afterwards. Raises like `real_peak_bytes`.
    """

    def run() -> None:
        with _lack_told(device), borrow():
            run_step(step, _for_a_step(step, sample, device), loss)

    device_of(device).warm_up(run)


def real_peak_bytes(
    step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device, residents: Residents | None
) -> StepPeak:
    """Peak of a real step, from the gradients that are there; above `residents`, if given, from none and from all.

    The module is to be borrowed: the first step leaves the gradients to which the second adds. Raises what the
    allocator raises where the step does not fit the device, with a note of what does.
    """
    with _lack_told(device):
        return _real_peak_bytes(step, sample, loss, device, residents)


def _lack_told(device: torch.device) -> AbstractContextManager[None]:
    free_bytes = device_of(device).available_bytes()
    return out_of_memory_told(
        "in a real step of the plan, to check its peak",
        f"{format_bytes(free_bytes)} were free on {device} before it, gaps and libraries' scratch buffers included: "
        "give a budget below that, or None for the free memory less a reserve.",
    )


def _real_peak_bytes(
    step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device, residents: Residents | None
) -> StepPeak:
    without = peak_of(step, sample, loss, device)
    if residents is None:
        return without
    adding = peak_of(step, sample, loss, device)  # as where each gradient goes as soon as it is complete
    return adding if residents.gradients_go else adding.or_higher(without.above(residents.gradient_bytes))


def eager_peak_bytes(
    model: torch.nn.Module,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    keep_all_peak_bytes: int,
    residents: Residents | None,
    borrow: Callable[[], AbstractContextManager[None]],
) -> StepPeak | None:
    """Peak of the eager step, measured within `borrow`; None where eager does not fit the device.

    Without a loss to run, a measured step lacks what the assumed loss takes: the larger figure counts.
    """
    if keep_all_peak_bytes > device_of(device).available_bytes():
        return (
            None  # not even tried: it would run out of memory, or end the process where more is promised than is there
        )

    def run() -> StepPeak:
        warm_step(model, sample, loss, device, borrow)
        before_bytes = allocated_now_bytes(device)
        with borrow():
            return _real_peak_bytes(model, sample, loss, device, residents).of_training(before_bytes)

    measured = if_it_fits(run)
    if measured is None or loss is not None:
        return measured
    return measured.or_higher(StepPeak(keep_all_peak_bytes, measured.reserved_bytes and keep_all_peak_bytes))


def own_step_bytes(
    model: torch.nn.Module,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    residents: Residents | None,
) -> int | None:
    """Peak of a step of the module itself, as it is now and as it may not have been traced; it is left as it was.

    None where the step does not fit the device. Without a loss to run, what a cross-entropy takes is added. Raises what
    the module raises.
    """
    trained_bytes = [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        trained_bytes.append(sum(tensor.nbytes for tensor in leaves(output) if tensor.requires_grad))
        return output

    step.original = model  # type: ignore[attr-defined]  # whose attributes may be losses
    met = GeneratorsMet(model)
    with surroundings_aside(), for_planning(model), met.given_back(), gradients_elsewhere_kept(model):
        with MeetingGenerators(met), module_state_kept(model, {device}), torch.no_grad():
            sample.copy().call(model)  # which generators of the user's own there are
        borrow = partial(module_state_kept, model, {device}, met.found)

        def run() -> int:
            warm_step(step, sample, loss, device, borrow)
            with borrow():
                return _real_peak_bytes(step, sample, loss, device, residents).allocated_bytes

        peak_bytes = if_it_fits(run)
    if peak_bytes is None or loss is not None:
        return peak_bytes
    return peak_bytes + _BEYOND_GRADIENTS * max(trained_bytes)
