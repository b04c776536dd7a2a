"""Eager training, and `torch.utils.checkpoint` in the ways that people use it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.peers.case import Block, Built, Case, Chains, Forward, NotForThisModel, Peer
from benchmarks.peers.families import Family

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
ContextsOf = Callable[[nn.Module], Contexts | None]


def no_contexts(model: nn.Module) -> None:
    """Nothing around a checkpoint's forward and recomputation."""


def plain(case: Case, eager_peak_bytes: int) -> Built:
    """The model as it is."""
    model = case.fresh_model()
    return Built(model, model)


# ---- whose forward is replaced ----------------------------------------------------------------------------


def checkpointed(forward: Forward, contexts: Contexts | None = None) -> Forward:
    """`forward`, whose activations are forgotten and computed again but for what `contexts` save."""
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    @functools.wraps(forward)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **keywords)

    return call


def wrap(model: nn.Module, paths: Block, contexts: Contexts | None = None) -> None:
    """Put one checkpoint around these submodules: the first runs them all, the others hand on what they are given."""
    modules = [model.get_submodule(path) for path in paths]
    forwards = [module.forward for module in modules]
    if len(modules) == 1:
        modules[0].forward = checkpointed(forwards[0], contexts)
        return
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

    modules[0].forward = checkpointed(all_of_them, contexts)
    for module in modules[1:]:
        module.forward = hand_on


def segments_of(chains: Chains, size: int) -> Iterator[tuple[Block, ...]]:
    """Each chain cut into stretches of so many blocks, the last being shorter."""
    for chain in chains:
        for start in range(0, len(chain), size):
            yield chain[start : start + size]


def per_block(case: Case, eager_peak_bytes: int, contexts_of: ContextsOf = no_contexts) -> Built:
    """Each block under a checkpoint of its own."""
    if not case.blocks:
        raise NotForThisModel("no blocks are named for this model")
    model = case.fresh_model()
    contexts = contexts_of(model)
    for block in case.blocks:
        wrap(model, block, contexts)
    return Built(model, model)


def in_segments(case: Case, size: int, nested: bool = False, contexts_of: ContextsOf = no_contexts) -> Built:
    """Stretches of `size` blocks under one checkpoint each; if `nested`, each block again under one of its own."""
    longest = max(map(len, case.chains), default=0)
    if longest < 2 or size < 2:
        raise NotForThisModel("its blocks form no chain: none hands its output alone to the next one")
    model = case.fresh_model()
    contexts = contexts_of(model)
    for segment in segments_of(case.chains, size):
        if nested:
            for block in segment:
                wrap(model, block, contexts)
        wrap(model, tuple(path for block in segment for path in block), contexts)
    return Built(model, model, note=f"{size} blocks a segment")


def per_two_blocks(case: Case, eager_peak_bytes: int) -> Built:
    """Two blocks a checkpoint."""
    return in_segments(case, 2)


def root_of_blocks(case: Case, eager_peak_bytes: int, contexts_of: ContextsOf = no_contexts) -> Built:
    """As many segments as blocks in each, as Chen et al. (arXiv:1604.06174) have it."""
    return in_segments(case, math.ceil(math.sqrt(len(case.blocks))), contexts_of=contexts_of)


def nested(case: Case, eager_peak_bytes: int) -> Built:
    """The segments of `root_of_blocks`, and within them each block under a checkpoint of its own."""
    return in_segments(case, math.ceil(math.sqrt(len(case.blocks))), nested=True)


# ---- BatchNorm, mended by hand ------------------------------------------------------------------------------


def mended(model: nn.Module, inner: Contexts | None = None) -> Contexts:
    """`inner`, and in recomputations no BatchNorm of the model counts the batch again: what a careful user writes."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        raise NotForThisModel("it has no BatchNorm")

    @contextlib.contextmanager
    def uncounted(other: AbstractContextManager[Any]) -> Iterator[None]:
        before = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
        for layer in layers:
            layer.momentum, layer.num_batches_tracked = 0.0, None
        try:
            with other:
                yield
        finally:
            for layer, (momentum, count) in zip(layers, before, strict=True):
                layer.momentum, layer.num_batches_tracked = momentum, count

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = inner() if inner else (contextlib.nullcontext(), contextlib.nullcontext())
        return forward, uncounted(recomputation)

    return contexts


# ---- selective: some operations' results are saved ----------------------------------------------------------


def saving_by_number(counts: Callable[[Any], bool], is_saved: Callable[[int], bool]) -> Contexts:
    """What numbers, within each checkpoint, the operations that count, and saves the results of those it is told."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        seen = {False: 0, True: 0}  # by whether this is the recomputation, which makes the same choices

        def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
            if not counts(operator):
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = seen[context.is_recompute]
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if is_saved(number) else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def saving(operators: Collection[Any], every: int = 1) -> Contexts:
    """What saves the results of these operators, or of every so manieth one of them, within each checkpoint."""
    return saving_by_number(lambda operator: operator in operators, lambda number: number % every == every - 1)


def selective(
    case: Case, eager_peak_bytes: int, *, operators: Collection[Any], every: int = 1, mend: bool = False
) -> Built:
    """Each block under a checkpoint that saves the results of these operators."""
    contexts = saving(operators, every)
    return per_block(case, eager_peak_bytes, lambda model: mended(model, contexts) if mend else contexts)


MENDED = "BatchNorm mended"
PEERS = (
    Peer("eager", Family.EAGER, plain),
    Peer("eager, again", Family.EAGER, plain),  # how far the machine lets two equal steps differ
    Peer("checkpoint, per block", Family.CHECKPOINT, per_block),
    Peer("checkpoint, per 2 blocks", Family.CHECKPOINT, per_two_blocks),
    Peer("checkpoint, √n segments", Family.CHECKPOINT, root_of_blocks),
    Peer("checkpoint, nested", Family.CHECKPOINT, nested),
    Peer(f"checkpoint, per block, {MENDED}", Family.CHECKPOINT, functools.partial(per_block, contexts_of=mended)),
    Peer(
        f"checkpoint, √n segments, {MENDED}", Family.CHECKPOINT, functools.partial(root_of_blocks, contexts_of=mended)
    ),
    Peer("selective, matmuls", Family.SELECTIVE, functools.partial(selective, operators=MATMULS)),
    Peer(
        "selective, matmuls and attention",
        Family.SELECTIVE,
        functools.partial(selective, operators=MATMULS | ATTENTIONS),
    ),
    Peer("selective, every 2nd matmul", Family.SELECTIVE, functools.partial(selective, operators=MATMULS, every=2)),
    Peer(f"selective, matmuls, {MENDED}", Family.SELECTIVE, functools.partial(selective, operators=MATMULS, mend=True)),
)
