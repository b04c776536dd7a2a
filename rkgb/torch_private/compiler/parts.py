"""Parts of a model compiled by inductor from their operations alone, without Dynamo: nothing is guarded.

Importing this imports the compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._inductor.config
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = ["SymbolicSizes", "compiled", "forward_and_backward_of", "numbers_in"]


class SymbolicSizes:
    """Numbers in the place of which symbols stand while a function is traced, and what that takes for granted."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._symbols: list[Any] = []
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._environment)

    def symbol(self, number: int) -> Any:
        """A number that is `number` for now, and may be any from 2 on."""
        source = ConstantSource(f"number_{len(self._symbols)}")
        symbol = self._environment.create_symbol(number, source, DimDynamic.DYNAMIC, constraint_dim=None)
        self._symbols.append(symbol)
        return self._environment.create_symintnode(symbol, hint=number, source=source)

    def conditions(self) -> Callable[[Sequence[int]], bool]:
        """Whether what was traced and compiled holds for other numbers, in the order of their symbols."""
        symbols = tuple(self._symbols)
        asked = dict.fromkeys(guard.expr for guard in self._environment.guards)
        equal = [sympy.Eq(symbol, other) for symbol, other in self._environment.replacements.items()]

        def hold(numbers: Sequence[int]) -> bool:
            given = dict(zip(symbols, map(sympy.Integer, numbers), strict=True))
            return min(numbers, default=2) > 1 and all(one.xreplace(given) == sympy.true for one in (*asked, *equal))

        return hold


def numbers_in(layout: tuple[Sequence[Any], ...], symbols: Sequence[Any]) -> Callable[[Sequence[int]], Any]:
    """That `layout`, whose numbers may be made of `symbols`, where these are the numbers that are given."""
    names = [symbol.node.expr for symbol in symbols]

    def at(numbers: Sequence[int]) -> Any:
        given = dict(zip(names, map(sympy.Integer, numbers), strict=True))
        return tuple(tuple(_at(number, given) for number in part) for part in layout)

    return at


def _at(number: Any, given: dict[Any, Any]) -> int:
    return number if isinstance(number, int) else int(number.node.expr.xreplace(given))


def forward_and_backward_of(
    function: Callable[..., Any], make_inputs: Callable[[], Sequence[Any]], sizes: SymbolicSizes | None = None
) -> GraphModule:
    """The graph of `function`, which returns a tuple of tensors, and of its gradients: in operations for inductor.

    Its inputs are those of `function`, then the gradients of its outputs that have any; its outputs are those of
    `function`, then the gradients of all inputs, None for those without. Nothing is run: tensors made in here
    hold no data, and may have sizes that are symbols of `sizes`, which are inputs themselves.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if sizes is None else sizes.mode
    with mode, torch.enable_grad():
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
