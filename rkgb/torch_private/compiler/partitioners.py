"""How `torch.compile` divides a joint graph in a forward and a backward one: who is asked, and how a choice is told.

Importing this imports the compiler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["CustomPartitionerFn", "partitioned", "partitioner_of"]


def partitioned(
    joint: torch.fx.GraphModule,
    inputs: Sequence[object],
    saved: Collection[torch.fx.Node],
    repeated: Collection[torch.fx.Node],
    **options: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The two graphs that PyTorch's own partitioner makes of `joint`, which it changes.

    What is `saved` is not computed again, what is `repeated` is, where the backward needs it: as selective activation
    checkpointing tells it, whose own marks are taken off. The `options` are those that the compiler hands to a
    partitioner.
    """
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    for nodes, policy in ((saved, CheckpointPolicy.MUST_SAVE), (repeated, CheckpointPolicy.MUST_RECOMPUTE)):
        for node in nodes:
            node.meta["recompute"] = policy
            node.meta["ac_graph_id"] = 0  # all in one region: no borders of regions within
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # or it would choose by itself, and otherwise
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    return forward, backward


def partitioner_of(compiled: object) -> object:
    """The partitioner with which a module was compiled by inductor, or a copy of it; None if none can be found.

    The back end that is wrapped innermost has it. Of a module that was compiled in place, `get_compiler_config` has a
    copy, but not where that was with ``fullgraph=True``.
    """
    backend = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    config: Any = getattr(backend, "config", None)
    if not isinstance(config, dict):
        config = getattr(getattr(compiled, "_compiled_call_impl", None), "get_compiler_config", dict)()
    return (config or {}).get("custom_partitioner_fn")
