"""Modules given by a plain function, and the graphs of modules."""

from __future__ import annotations

import itertools
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import rkgb.profile.measure
from rkgb import AllGraphs, BNode, DGraph, DNode, SGraph, b_to_d, d_to_s, make_all_graphs, make_sample, trace
from rkgb.ir.profiles import BlockProfile
from rockmate import zoo

TINY = tuple(name for name in zoo.names() if "tiny" in name)


class Program(nn.Module):
    """``forward(*inputs)`` is ``function(self, *inputs)``; `parts` become submodules, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = [function]  # in a list, as torch.jit.trace would try to compile a bare one

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function[0](self, *inputs, **keywords)


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def op_names(graph: Iterable[BNode] | Iterable[DNode]) -> list[str]:
    """The operations of a B or D graph, in order."""
    return [node.call.op_name for node in graph]


def rows(*shape: int, requires_grad: bool = False) -> Tensor:
    """Normal noise of that shape, [3, 4] by default."""
    return torch.randn(*(shape or (3, 4)), requires_grad=requires_grad)


def scale(size: int | tuple[int, ...] = 4) -> nn.Parameter:
    """A trainable vector."""
    return nn.Parameter(torch.randn(size))


def traced(module: nn.Module, sample: Any) -> DGraph:
    """D graph of the trace as it came, composite operations left whole."""
    made = make_sample(module, sample)
    return b_to_d(trace(module, made), module, made)


def simplified(module: nn.Module, sample: Any) -> SGraph:
    """S graph of the trace as it came."""
    return d_to_s(traced(module, sample))


@contextmanager
def timed_once() -> Iterator[None]:
    """Measure every block's time in one run: these tests look at bytes."""
    once = {"_WALKS": ("measure",), "_TIMED_BLOCKS": 1, "_TIMED_RUNS": 1}
    with unittest.mock.patch.multiple(rkgb.profile.measure, **once):
        yield


def graphs_of(module: nn.Module, sample: Any) -> AllGraphs:
    """Every graph of `module`."""
    with timed_once():
        return make_all_graphs(module, sample)


@cache
def zoo_graphs(name: str) -> AllGraphs:
    """Every graph of a zoo entry, made once."""
    entry = zoo.get(name)
    return graphs_of(entry.model, entry.sample)


def measured_alone(graphs: AllGraphs, module: nn.Module, sample: Any) -> list[BlockProfile]:
    """Profiles of all blocks, each measured itself although it is equivalent to others."""
    numbers = itertools.count()
    canonical_form = rkgb.profile.measure.canonical_form

    def unlike_any_other(*block: Any) -> Any:
        return replace(canonical_form(*block), digest=str(next(numbers)))

    with timed_once(), unittest.mock.patch.object(rkgb.profile.measure, "canonical_form", unlike_any_other):
        return rkgb.profile.measure.measure_blocks(graphs.S_graph, graphs.blocks, module, make_sample(module, sample))


def measured_together(graphs: AllGraphs, module: nn.Module, sample: Any) -> list[BlockProfile]:
    """Profiles of all blocks; equivalent ones get the profile of their representative, renamed."""
    with timed_once():
        return rkgb.profile.measure.measure_blocks(graphs.S_graph, graphs.blocks, module, make_sample(module, sample))


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything that using a module could change, as values that `==` compares."""
    state: dict[str, Any] = {"random stream": bytes_of(torch.get_rng_state())}
    for name, submodule in module.named_modules():
        state[f"{name} training"] = submodule.training
        state[f"{name} attributes"] = sorted(vars(submodule))
        state[f"{name} hooks"] = (len(submodule._forward_hooks), len(submodule._backward_hooks))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state[name] = (id(parameter), parameter.requires_grad, bytes_of(parameter), parameter.grad_fn)
        state[f"gradient of {name}"] = (id(parameter.grad), bytes_of(parameter.grad))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        state[name] = (id(buffer), buffer.requires_grad, bytes_of(buffer), buffer.grad_fn)
    return state


def bytes_of(tensor: Tensor | None) -> bytes | None:
    """The elements of `tensor`, as bytes."""
    return None if tensor is None else tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def with_gradients(module: nn.Module) -> nn.Module:
    """`module`, its parameters having gradients as in the middle of training."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return module
