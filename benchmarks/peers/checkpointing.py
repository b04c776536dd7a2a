"""Eager training, and `torch.utils.checkpoint` in the ways that people use it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.peers.case import Built, Case, Chains, Forward, NotForThisModel, Peer

aten = torch.ops.aten
MATMULS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
)
ATTENTIONS = frozenset(
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(aten, name)
)
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def plain(case: Case, eager_peak_bytes: int) -> Built:
    """The model as it is."""
    model = case.fresh_model()
    return Built(model, model)


# ---- whose forward is replaced ----------------------------------------------------------------------------


def replace_forward(model: nn.Module, path: str, wrap: Callable[[Forward], Forward]) -> None:
    """Have the submodule at `path` call `wrap` of its own forward."""
    module = model.get_submodule(path)
    module.forward = wrap(module.forward)


def checkpointed(forward: Forward, contexts: Contexts | None = None) -> Forward:
    """`forward`, whose activations are forgotten and computed again but for what `contexts` save."""
    options = {} if contexts is None else {"context_fn": contexts}

    @functools.wraps(forward)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **keywords)

    return call


def join(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Run these blocks as one at the place of the first, under one checkpoint; the others hand on what they are given."""
    first, *others = (model.get_submodule(path) for path in paths)
    forwards = [module.forward for module in (first, *others)]
    in_tuple = False

    def all_of_them(hidden: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal in_tuple
        for forward in forwards:
            output = forward(hidden, *arguments, **keywords)
            in_tuple = isinstance(output, tuple)
            if in_tuple and len(output) != 1:
                raise NotForThisModel("a block hands more than one value to the next one")
            hidden = output[0] if in_tuple else output
        return (hidden,) if in_tuple else hidden

    def hand_on(hidden: Any, *arguments: Any, **keywords: Any) -> Any:
        return (hidden,) if in_tuple else hidden

    first.forward = checkpointed(all_of_them)
    for module in others:
        module.forward = hand_on


def groups_of(chains: Chains, size: int) -> Iterator[tuple[str, ...]]:
    """Each chain cut into stretches of so many blocks, the last being shorter."""
    for chain in chains:
        for start in range(0, len(chain), size):
            yield chain[start : start + size]


def per_block(case: Case, eager_peak_bytes: int, contexts: Contexts | None = None) -> Built:
    """Each block under a checkpoint of its own."""
    model = case.fresh_model()
    if not case.blocks:
        raise NotForThisModel("no blocks are named for this model")
    for path in case.blocks:
        replace_forward(model, path, lambda forward: checkpointed(forward, contexts))
    return Built(model, model)


def in_groups(case: Case, size: int, nested: bool = False) -> Built:
    """Stretches of `size` blocks under one checkpoint each; if `nested`, each block again under one of its own."""
    longest = max(map(len, case.chains), default=0)
    if longest < 2 or size < 2:
        raise NotForThisModel("its blocks form no chain: none hands its output alone to the next one")
    model = case.fresh_model()
    for paths in groups_of(case.chains, size):
        if nested:
            for path in paths:
                replace_forward(model, path, checkpointed)
        join(model, paths)
    return Built(model, model, note=f"{size} blocks a segment")


def per_two_blocks(case: Case, eager_peak_bytes: int) -> Built:
    """Two blocks a checkpoint."""
    return in_groups(case, 2)


def root_of_blocks(case: Case, eager_peak_bytes: int) -> Built:
    """As many segments as blocks in each, as Chen et al. (arXiv:1604.06174) have it."""
    return in_groups(case, math.ceil(math.sqrt(len(case.blocks))))


def nested(case: Case, eager_peak_bytes: int) -> Built:
    """The segments of `root_of_blocks`, and within them each block under a checkpoint of its own."""
    return in_groups(case, math.ceil(math.sqrt(len(case.blocks))), nested=True)


# ---- selective: some operations' results are saved ----------------------------------------------------------


def saving(operators: Collection[Any], every: int = 1) -> Contexts:
    """What saves the results of these operators, or of every so manieth one of them, within each checkpoint."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        seen = {False: 0, True: 0}  # by whether this is the recomputation, which makes the same choices

        def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
            if operator not in operators:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[context.is_recompute] += 1
            is_saved = seen[context.is_recompute] % every == 0
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def selective(case: Case, eager_peak_bytes: int, *, operators: Collection[Any], every: int = 1) -> Built:
    """Each block under a checkpoint that saves the results of these operators."""
    return per_block(case, eager_peak_bytes, saving(operators, every))


PEERS = (
    Peer("eager", "eager", plain),
    Peer("eager, again", "eager", plain),  # how far the machine lets two equal steps differ
    Peer("checkpoint, per block", "checkpoint", per_block),
    Peer("checkpoint, per 2 blocks", "checkpoint", per_two_blocks),
    Peer("checkpoint, √n segments", "checkpoint", root_of_blocks),
    Peer("checkpoint, nested", "checkpoint", nested),
    Peer("selective, matmuls", "selective", functools.partial(selective, operators=MATMULS)),
    Peer(
        "selective, matmuls and attention", "selective", functools.partial(selective, operators=MATMULS | ATTENTIONS)
    ),
    Peer("selective, every 2nd matmul", "selective", functools.partial(selective, operators=MATMULS, every=2)),
)
