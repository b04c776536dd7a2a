"""Parts of a model compiled by inductor from their operations alone, without Dynamo: nothing is guarded.

Importing this imports the compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

__all__ = ["compiled", "forward_and_backward_of"]


def forward_and_backward_of(
    function: Callable[..., Any], make_inputs: Callable[[], Sequence[torch.Tensor]]
) -> GraphModule:
    """The graph of `function`, which returns a tuple of tensors, and of its gradients: in operations for inductor.

    Its inputs are those of `function`, then the gradients of its outputs that have any; its outputs are those of
    `function`, then the gradients of all inputs, None for those without. Nothing is run: tensors made in here
    hold no data.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        fake = tuple(make_inputs())
        graph: Any = aot_export_joint_simple(function, fake, trace_joint=True, decompositions=select_decomp_table())
    assert isinstance(graph, GraphModule)
    graph.graph.eliminate_dead_code()
    graph.graph = fx_graph_cse(graph.graph)
    return graph


def compiled(graph: GraphModule, is_backward: bool) -> Callable[[list[Any]], Sequence[Any]]:
    """What inductor makes of a graph of its own operations: called with a list, which it may empty."""
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(examples)
    with _as_the_compiler_asks(mode):
        # Importing it starts workers, unless it is told that there are none.
        from torch._inductor.compile_fx import compile_fx_inner

        made: Any = compile_fx_inner(graph, examples, is_backward=is_backward, static_input_idxs=())
    return made


@contextlib.contextmanager
def _as_the_compiler_asks(mode: Any) -> Iterator[None]:
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        # In this process: workers beside it would start while operations are timed.
        torch._inductor.config.patch(fx_graph_cache=True, cpp_wrapper=False, compile_threads=1),
    ):
        yield
