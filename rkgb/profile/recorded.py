"""Profiles that were measured before, of the same graph: believed once a forward has saved the same tensors.

What a plan recomputes, and with it the gradients, rests on which tensors autograd saves, and where these lie. That is
seen again, in one forward of each distinct block; times and bytes are taken as they were recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from rkgb.errors import RecordMismatch
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph
from rkgb.ir.profiles import BlockProfile
from rkgb.ir.sample import Sample
from rkgb.ir.sgraph import SGraph
from rkgb.passes.equivalence import canonical_form
from rkgb.profile.block_run import run_block, stand_ins
from rkgb.profile.measure import MeasuredBlocks, measure_blocks
from rkgb.profile.recompute_cost import still_given
from rkgb.profile.saved import SavedObserver
from rkgb.restore import restorations


def recorded_profiles(
    graph: SGraph, blocks: list[Block], module: torch.nn.Module, sample: Sample, recorded: MeasuredBlocks
) -> list[BlockProfile]:
    """The profiles of `blocks` as they were `recorded`, each checked in a forward.

    The module's buffers, its gradients and the random streams are left as they were. Raises `RecordMismatch` for a
    block of which nothing was recorded, or that saves other tensors than it did.
    """
    for block in blocks:
        form = canonical_form(graph.dgraph, block)
        if form.digest not in recorded or len(recorded[form.digest][0]) != len(form.names):
            raise RecordMismatch(f"nothing was recorded of the block that begins with {block.ops[0].name}.")
    return measure_blocks(graph, blocks, module, sample, known=dict(recorded), compare=_compare)


def _compare(graph: DGraph, block: Block, values: dict[str, Any], profile: BlockProfile) -> None:
    """Raise `RecordMismatch` unless a forward of `block` saves what `profile` tells, and data come back in its ways."""
    ways = restorations(graph, block.nodes, profile.ops)
    whole = {node.name for node, (first, *_) in ways.items() if first.of_node}
    for name in sorted(whole.difference(profile.repeat_ms)):
        raise RecordMismatch(f"{name} is not repeated here, but was where it was recorded.")
    for name in sorted(profile.restore_ms.keys() - still_given(graph, block, values, profile.ops)):
        raise RecordMismatch(f"{name} comes back by its repetition alone here, but did not where it was recorded.")
    observer = SavedObserver(graph, block)
    with torch.autograd.graph.saved_tensors_hooks(observer.pack, observer.unpack):
        run_block(graph, block, stand_ins(graph, block, values), observer, forward_only=True)
    for op in block.ops:
        told = profile.ops.get(op.name)
        if told is None:
            raise RecordMismatch(f"nothing was recorded of the operation {op.name}.")
        saved, phantoms = tuple(observer.saved[op.name]), tuple(observer.phantoms[op.name])
        if saved != told.saved or phantoms != told.phantoms:
            raise RecordMismatch(
                f"{op.name} ({op.source}) saves {_text(saved)} for its backward here, but {_text(told.saved)} were "
                "recorded."
            )


def _text(saved: tuple[Any, ...]) -> str:
    return ", ".join(f"{list(one.size)} in {one.source}" for one in saved) or "nothing"
