"""How tests trace a model exactly, and how they compare what a graph gives with what the model gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkgb import DGraph, RockmateError, Sample, make_sample
from rkgb.pipeline import exact_trace
from rkgb.replay.replay import run_graph
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.generators import OwnGenerator
from rkgb.state.module_state import module_state_kept
from rkgb.tree import leaves


def exact_graph(module: nn.Module, sample: Sample) -> DGraph:
    """The D graph of the finest trace that is exact, by whichever front end; `TraceError` where there is none."""
    return exact_trace(module, sample, tracer="auto")[1]


def tried(function: Callable[..., Any], *args: Any) -> tuple[Any, RockmateError | None]:
    """What `function` gives and None, or None and the error that it raises on purpose."""
    try:
        return function(*args), None
    except RockmateError as error:
        return None, error


def step_difference(graph: DGraph, module: nn.Module, sample: Sample, seed: int) -> str | None:
    """The first thing in which a training step of the graph differs from one of the module on `sample`, or None."""
    own = graph.generators
    expected = training_step(module, sample.copy(), lambda data: data.call(module), seed, own)
    found = training_step(module, sample.copy(), lambda data: run_graph(graph, module, data), seed, own)
    return next(differences(expected, found, "step", set()), None)


def training_step(
    module: nn.Module, sample: Sample, run: Callable[[Sample], Any], seed: int, own: Sequence[OwnGenerator] = ()
) -> dict[str, Any]:
    """All that training sees of one step from fixed random gradients; the module is left as it was."""
    with module_state_kept(module, own=own), torch.enable_grad():
        torch.manual_seed(seed)
        outputs = leaves(run(sample))
        values = [output.detach().clone() for output in outputs]
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            generator = torch.Generator().manual_seed(seed)
            noise = [torch.randn(root.shape, generator=generator).to(root.dtype) for root in roots]
            torch.autograd.backward(roots, noise)
        return {
            "outputs": values,
            "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
            "gradients of inputs": [tensor.grad for tensor in sample.tensors],
            "buffers": {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
            "random stream": torch.get_rng_state(),
            "generators": [one.in_module(module).get_state() for one in own],
        }


def output_differences(graph: DGraph, module: nn.Module, sample: Sample, seed: int) -> list[str]:
    """Where the output of the graph is not what the module returns: types, structure, tensors, objects with tensors."""
    outputs = []
    for run in (lambda data: data.call(module), lambda data: run_graph(graph, module, data)):
        with module_state_kept(module):
            torch.manual_seed(seed)
            outputs.append(run(sample.copy()))
    return list(differences(*outputs, "output", set()))


def differences(mine: Any, theirs: Any, place: str, seen: set[int]) -> Iterator[str]:
    """Places at which two values differ, looking into every object that has attributes."""
    if id(mine) in seen:
        return
    if type(mine) is not type(theirs):
        yield f"{place} is {type(theirs).__name__} instead of {type(mine).__name__}"
    elif isinstance(mine, torch.Tensor):
        facts = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in (mine, theirs)]
        if facts[0] != facts[1]:
            yield f"{place} is {facts[1]} instead of {facts[0]}"
        elif not bitwise_equal(mine, theirs):
            yield f"{place} has other values"
    elif isinstance(mine, Mapping | Sequence) and not isinstance(mine, str):
        keys = [list(x) if isinstance(x, Mapping) else list(range(len(x))) for x in (mine, theirs)]
        if keys[0] != keys[1]:
            yield f"{place} has {keys[1]} instead of {keys[0]}"
            return
        for key in keys[0]:
            yield from differences(mine[key], theirs[key], f"{place}[{key!r}]", seen)
    elif hasattr(mine, "__dict__") and not isinstance(mine, type):
        yield from differences(vars(mine), vars(theirs), place, seen | {id(mine)})
    elif mine != theirs:
        yield f"{place} is {theirs!r} instead of {mine!r}"


def sample_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
    """The arguments as a sample."""
    return make_sample(module, args, kwargs)
