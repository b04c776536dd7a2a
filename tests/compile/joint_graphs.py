"""Joint graphs as the compiler hands them over, and modules divided by a partitioner without compiling anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function, default_partition, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule, Interpreter

from rockmate.division.joint import JointGraph


def joint_of(function: Callable[..., Any], *arguments: Tensor) -> JointGraph:
    """The joint graph of a function of tensors, as far as `arguments` require gradients."""
    found: list[JointGraph] = []

    def partition(module: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        found.append(JointGraph.of(module, options["num_fwd_outputs"]))
        return default_partition(module, inputs, **options)

    aot_function(function, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)(*arguments)
    return found[0]


def interpreted(graph: GraphModule, _: object) -> Callable[[list[Any]], Any]:
    """What runs `graph` operation by operation, and lets go of each value, given ones too, after its last use."""

    def run(arguments: list[Any]) -> Any:
        return Interpreter(graph).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def divided(module: nn.Module, partitioner: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    """`module`, whose forward and backward are the two graphs that `partitioner` makes, run operation by operation.

    Raises what the partitioner raises.
    """
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=interpreted, partition_fn=partitioner)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)

    def run(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except BackendCompilerFailed as error:
            raise error.inner_exception from None

    return run
