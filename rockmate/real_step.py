"""Real steps on the sample: how many bytes the eager one takes, and how many a plan's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkgb import Sample
from rkgb.measure import FreshGradients
from rkgb.memory import AllocationLog
from rkgb.state import borrowed
from rkgb.tree import leaves
from rockmate.costs import LossFunction, evaluate_loss
from rockmate.memory_split import Residents

StepFunction = Callable[..., Any]  # called like the module


def run_step(step: StepFunction, sample: Sample, loss: LossFunction | None) -> None:
    """One forward and backward, holding the output to the end as training loops do."""
    with torch.enable_grad():
        output = step(*sample.args, **sample.kwargs)
        if loss is None:
            # As a loss would: its gradients belong to autograd, which frees them once they are used.
            differentiable = [tensor for tensor in leaves(output) if tensor.requires_grad]
            FreshGradients.apply(*differentiable).backward()  # type: ignore[no-untyped-call]
        else:
            evaluate_loss(loss, output).backward()


def peak_of(step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device) -> int:
    """Most bytes that one step allocates at once above what was there before."""
    fresh = sample.copy()  # gradients of inputs are not the user's to find
    with AllocationLog(device) as log:
        run_step(step, fresh, loss)
    return log.peak_bytes


def real_peak_bytes(
    step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device, residents: Residents | None
) -> int:
    """Peak of a real step, from no gradients of parameters; above `residents`, if given, with and without gradients.

    The module is to be borrowed: the first step leaves the gradients to which the second adds.
    """
    without_bytes = peak_of(step, sample, loss, device)
    if residents is None:
        return without_bytes
    return max(peak_of(step, sample, loss, device), without_bytes - residents.gradient_bytes)


def eager_peak_bytes(
    model: torch.nn.Module,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    keep_all_peak_bytes: int,
    residents: Residents | None,
) -> int:
    """Peak of the eager step, measured; what keep-all takes, where eager does not fit the device.

    Without a loss to run, a measured step lacks what the assumed loss takes: the larger figure counts.
    """
    try:
        with borrowed(model, {device}):
            measured = real_peak_bytes(model, sample, loss, device, residents)
    except (torch.OutOfMemoryError, MemoryError):
        return keep_all_peak_bytes
    return max(measured, keep_all_peak_bytes) if loss is None else measured
