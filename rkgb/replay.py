"""Replay check: a trace is believed only when it gives what the module gives, on data it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.bgraph import BGraph
from rkgb.call import is_ref
from rkgb.dgraph import DGraph, leaf_tensors, run_nodes
from rkgb.errors import ReplayMismatch, TraceError
from rkgb.sample import Sample
from rkgb.state import borrowed, random_states
from rkgb.tree import leaves, map_leaves


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one forward and backward left behind, by name: everything that training can see."""

    tensors: dict[str, torch.Tensor | None]

    def first_difference(self, other: StepRecord) -> str | None:
        """Name and size of the first entry that is not bitwise equal, or None."""
        for name, mine in self.tensors.items():
            theirs = other.tensors.get(name)
            if mine is None and theirs is None:
                continue
            if mine is None or theirs is None:
                return f"{name} exists on one side only"
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return f"{name} is {theirs.dtype}{list(theirs.shape)} instead of {mine.dtype}{list(mine.shape)}"
            if not bitwise_equal(mine, theirs):
                return f"{name} differs by up to {largest_difference(mine, theirs):.3g}"
        return None


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of every element, a NaN being equal to a NaN."""
    if left.is_floating_point() or left.is_complex():
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return torch.equal(left, right)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference between two tensors of one shape; 0.0 for empty ones."""
    if left.numel() == 0:
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    return float((left.to(wide) - right.to(wide)).abs().nan_to_num().max())


def fresh_sample(sample: Sample, seed: int = 0) -> Sample:
    """Random data of the sample's shapes and ranges: integers and booleans are permuted, not invented.

    Floating-point tensors of one sign, such as probabilities, keep their range; all others become normal noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            drawn = torch.empty_like(tensor.detach()).copy_(_in_range_of(tensor.detach(), noise))
        else:
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            drawn = torch.empty_like(tensor.detach()).copy_(tensor.reshape(-1)[order].view(tensor.shape))
        return drawn.requires_grad_(tensor.requires_grad)

    return sample.with_tensors(
        [fresh(tensor.detach().requires_grad_(tensor.requires_grad)) for tensor in sample.tensors]
    )


def _in_range_of(tensor: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Normal `noise`, made uniform between the extremes of `tensor` where these differ and are of one sign."""
    if tensor.is_complex() or tensor.numel() == 0:
        return noise
    low, high = (float(bound) for bound in tensor.aminmax())
    if low < 0 < high or low == high or not math.isfinite(high - low):
        return noise
    return low + (high - low) * torch.special.ndtr(noise)


def record_step(module: torch.nn.Module, sample: Sample, forward: Callable[[Sample], Any], seed: int = 0) -> StepRecord:
    """Forward and backward by `forward`, from a seed; `module` is given back unchanged.

    The backward starts from fixed random gradients, so that no cancellation hides a difference.
    """
    devices = {tensor.device for tensor in (*module.parameters(), *sample.tensors)}
    with borrowed(module, devices):
        if any(True for _ in module.buffers()):
            # From a later state than the trace's: a number that the forward reads out of its buffers has changed.
            with torch.no_grad():
                fresh_sample(sample, seed + 1).call(module)
        torch.manual_seed(seed)
        with torch.enable_grad():
            outputs = leaves(forward(sample))
        record: dict[str, torch.Tensor | None] = {
            f"output {index}": tensor.detach().clone() for index, tensor in enumerate(outputs)
        }
        backward_from(outputs)
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise TraceError(
                    f"the gradient of {name} is {parameter.grad.layout}: only dense gradients can be planned. "
                    "Build the embedding with sparse=False."
                )
            record[f"gradient of {name}"] = parameter.grad
        for index, tensor in enumerate(sample.tensors):
            if tensor.requires_grad:
                record[f"gradient of input {index}"] = tensor.grad
        for name, buffer in module.named_buffers():
            record[f"buffer {name}"] = buffer.detach().clone()
        for index, (_, state) in enumerate(random_states(devices)):
            record[f"random stream {index}"] = state
    for tensor in sample.tensors:
        tensor.grad = None
    return StepRecord(record)


def backward_from(outputs: list[torch.Tensor], seed: int = 0) -> None:
    """Backward from every differentiable output, with fixed random gradients."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(root.shape, generator=generator).to(root.device, root.dtype) for root in roots]
    if roots:
        torch.autograd.backward(roots, gradients)


def run_graph(graph: BGraph | DGraph, module: torch.nn.Module, sample: Sample) -> Any:
    """The module's output, computed by the graph's operations."""
    values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.tensors))
    run_nodes(graph.nodes, values, graph.output_names)
    return map_leaves(lambda ref: values[ref.name], graph.output, is_ref)


def replay_check(graph: BGraph | DGraph, module: torch.nn.Module, sample: Sample) -> None:
    """Compare outputs, gradients, buffers and random stream of graph and module on fresh data.

    Raises `ReplayMismatch` naming the first difference. A module that differs from itself between
    two equal runs is compared all the same: it cannot be exact, and the message says so.
    """
    # Each run has its own copy of the data: a module may write into its inputs.
    expected = record_step(module, fresh_sample(sample), lambda fresh: fresh.call(module))
    found = record_step(module, fresh_sample(sample), lambda fresh: run_graph(graph, module, fresh))
    difference = expected.first_difference(found)
    if difference is None:
        return
    again = record_step(module, fresh_sample(sample), lambda fresh: fresh.call(module)).first_difference(expected)
    cause = (
        f"The module differs from itself between two runs, too ({again}): it is not deterministic."
        if again is not None
        else "Control flow that depends on data, or side effects in forward, are the usual causes."
    )
    raise ReplayMismatch(
        f"the trace of {type(module).__name__} is not exact on fresh data: {difference}. {cause} "
        "Rewrite that part with tensor operations, or keep it outside the module."
    )
