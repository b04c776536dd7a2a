"""Module and sample to B graph, by ``torch.jit.trace`` and a walk of its inlined graph.

Operations stay composite (linear, layer_norm, scaled_dot_product_attention): half the nodes of a
dispatcher-level trace and fewer Python calls. What the tracer cannot see (regions without
gradient, values read from data) is restored or refused, and the replay check has the last word.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.jit._trace import TracerWarning

from rkgb.bgraph import BGraph
from rkgb.errors import TraceError
from rkgb.jit_walker import JitWalker
from rkgb.sample import Sample
from rkgb.state import borrowed
from rkgb.tree import leaves, map_leaves


class _Flat(torch.nn.Module):
    """The module as the tracer wants it: flat tensors in, a tuple of tensors out."""

    def __init__(self, module: torch.nn.Module, sample: Sample) -> None:
        super().__init__()
        self.wrapped = module
        self.sample = sample
        self.output: Any = None  # what the module returned: the structure to rebuild

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.output = self.sample.with_tensors(list(tensors)).call(self.wrapped)
        return tuple(leaves(self.output))


def trace(module: torch.nn.Module, sample: Sample) -> BGraph:
    """Record what `module` runs on `sample`. The module is left as it was.

    Raises `TraceError` when the module cannot be traced, naming the operation and what to change.
    """
    _refuse_scripted(module)
    flat = _Flat(module, sample)
    flat.training = module.training
    with borrowed(module), torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            traced = torch.jit.trace(flat, tuple(sample.tensors), check_trace=False, strict=False)
        except Exception as error:
            raise TraceError(
                f"{type(module).__name__} cannot be traced: {type(error).__name__}: {error}. Run the module on "
                "the sample first; if it runs there, replace what depends on Python side effects."
            ) from error
    # The traced module is part of a cycle: through the output it would hold every activation until it is collected.
    output, flat.output = flat.output, None
    if not leaves(output):
        raise TraceError(f"{type(module).__name__}.forward returned no tensor. Return what the loss is made of.")
    walker = JitWalker(module, sample)
    walker.walk(traced.inlined_graph)
    remaining = iter(walker.output_refs)
    graph = BGraph(
        nodes=walker.nodes,
        leaves=walker.leaves,
        output=map_leaves(lambda _: next(remaining), output),
        warnings=[str(w.message) for w in caught if issubclass(w.category, TracerWarning)],
    )
    graph.verify()
    return graph


def _refuse_scripted(module: torch.nn.Module) -> None:
    for path, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise TraceError(
                f"submodule {path or '(root)'!r} is compiled by torch.jit ({type(submodule).__name__}): its "
                "operations cannot be told apart. Use the Python module that it was made from."
            )
