"""The repeated blocks of a model: which they are, how they are called, and which of them are equal."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rkgb import ModelError, ReplayMismatch, Sample, SampleError, make_sample
from rkgb.process.autocast import Autocast
from rkgb.replay.replay import replay_check
from rkgb.state.module_state import module_state_kept, training_mode
from rockmate.distributed.precision import casting, removed
from rockmate.guards.inputs import CallPattern
from rockmate.module import Rockmate
from rockmate.planning.measured import Measured

Blocks = type[nn.Module] | Iterable[type[nn.Module] | nn.Module] | None
"""Classes of blocks, the blocks themselves, or None for those that the model repeats."""


@dataclass(eq=False, slots=True)
class BlockClass:
    """Blocks that are equal but for the values of their parameters and buffers: one plan serves them all."""

    measured: Measured  # of the first one
    sample: Sample
    blocks: dict[str, nn.Module]  # by name, in the model's order
    calls: int  # of all of them in one forward

    @property
    def name(self) -> str:
        """The class of the blocks."""
        return type(next(iter(self.blocks.values()))).__name__

    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one block's parameters."""
        block = next(iter(self.blocks.values()))
        return sum(parameter.nbytes for parameter in block.parameters() if parameter.requires_grad)


# ---- which they are --------------------------------------------------------------------------------


def find_blocks(model: nn.Module, blocks: Blocks = None) -> dict[str, nn.Module]:
    """The blocks by name, in the model's order, none within another.

    Without `blocks`, those of the classes that are repeated, in a list if any is, and hold the most parameters. Raises
    `ModelError` where there are none, where one holds another, and where a module is planned already.
    """
    for name, module in model.named_modules():
        if isinstance(module, Rockmate):
            raise ModelError(f"{name or 'the model'!r} is planned already. Give the model as it was before.")
    wanted = _repeated(model) if blocks is None else _given(model, blocks)
    if not wanted:
        raise ModelError(
            f"{type(model).__name__} repeats no class of modules with submodules of their own: say which are its "
            "blocks (blocks=MyBlock, or a list of modules), or plan it whole by Rockmate(model, ...)."
        )
    for name in wanted:
        inside = [other for other in wanted if other != name and other.startswith(f"{name}.")]
        if inside or not name:
            held = inside[0] if inside else "the others"
            raise ModelError(f"the block {name or '(root)'!r} holds {held!r}: give the one or the other.")
    return wanted


def _given(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    each = [blocks] if isinstance(blocks, type) else list(blocks or ())
    classes = tuple(item for item in each if isinstance(item, type))
    objects = {id(item) for item in each if not isinstance(item, type)}
    found = {n: m for n, m in model.named_modules() if n and (id(m) in objects or isinstance(m, classes))}
    missing = objects - {id(module) for module in found.values()}
    if missing:
        kinds = {type(item).__name__ for item in each if id(item) in missing}
        raise ModelError(f"{len(missing)} of the blocks given ({', '.join(sorted(kinds))}) are not in the model")
    return found


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Greedily, the class that holds the most, then the next one that holds other modules.

    Those that repeat in a list come before all others: the encoder and the decoder of a model may be of one class, too.
    """
    modules = dict(model.named_modules())
    every: dict[type, list[str]] = defaultdict(list)
    listed: dict[type, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if not name or isinstance(module, _CONTAINERS) or not any(True for _ in module.children()):
            continue
        every[type(module)].append(name)
        siblings = modules[name.rpartition(".")[0]]
        if isinstance(siblings, _CONTAINERS) and sum(type(other) is type(module) for other in siblings.children()) > 1:
            listed[type(module)].append(name)
    places = {kind: _outermost(names) for kind, names in (listed or every).items()}
    sizes = {kind: sum(_held(modules[name]) for name in names) for kind, names in places.items()}
    chosen: list[str] = []
    for kind in sorted(places, key=lambda kind: (-sizes[kind], places[kind][0].count("."))):
        names = places[kind]
        if len(names) > 1 and sizes[kind] and not any(_overlap(one, other) for one in names for other in chosen):
            chosen += names
    return {name: module for name, module in modules.items() if name in set(chosen)}


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _held(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


# ---- how they are called ---------------------------------------------------------------------------


@dataclass(slots=True)
class Calls:
    """Calls of one block in a forward."""

    patterns: list[CallPattern] = field(default_factory=list)
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the whole model, as training runs it: in which ways it calls the blocks is to be seen."""

    model: nn.Module
    sample: Sample
    blocks: dict[str, nn.Module]
    policy: Any = None  # under which model and blocks will be sharded


def calls_of(forward: Forward, copied: str | None = None) -> dict[str, Calls]:
    """How each block is called; of the one named `copied`, the arguments too. The model is left as it was.

    What autograd would save is dropped: this takes the memory of inference. Raises `SampleError` for a block that is
    not called, and for one that is called in more ways than one.
    """
    seen = {name: Calls() for name in forward.blocks}
    with contextlib.ExitStack() as stack:
        stack.enter_context(module_state_kept(forward.model))
        stack.enter_context(casting([forward.model, *forward.blocks.values()], forward.policy))
        for name, block in forward.blocks.items():
            hook = _noting(block, seen[name], copied=name == copied)
            stack.enter_context(removed(block.register_forward_pre_hook(hook, with_kwargs=True)))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never))
        forward.sample.copy().call(forward.model)
    for name, calls in seen.items():
        if not calls.patterns:
            raise SampleError(
                f"the block {name!r} is not called with gradients by a training step on this sample: leave it out of "
                "`blocks`, or give a sample that reaches it."
            )
        if any(pattern != calls.patterns[0] for pattern in calls.patterns):
            raise SampleError(
                f"the block {name!r} is called {len(calls.patterns)} times in one step, in more ways than one: a plan "
                "holds for one shape. Leave it out of `blocks`."
            )
    return seen


def _noting(block: nn.Module, seen: Calls, *, copied: bool) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        arguments = make_sample(block, Sample(args, kwargs))
        seen.patterns.append(CallPattern.of(arguments, Autocast.now()))
        if copied and seen.sample is None:
            seen.sample = arguments.copy()

    return hook


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of this forward is never walked")


# ---- which are equal -------------------------------------------------------------------------------


def classes_of(forward: Forward, measure: Callable[[nn.Module, Sample], Measured]) -> list[BlockClass]:
    """Equal blocks together, each class measured once on the arguments of its first block.

    Blocks are equal if they look equal, and the graph of one gives exactly what the other gives on fresh data: numbers
    that differ from block to block, such as a scale by depth, are part of a graph.
    """
    classes: list[BlockClass] = []
    heads: dict[str, list[str]] = {}  # by looks: names of blocks
    blocks, seen = forward.blocks, calls_of(forward)
    for name, block in blocks.items():
        heads.setdefault(_looks(block, seen[name].patterns[0]), []).append(name)
    for names in heads.values():
        waiting = names
        while waiting:
            first, *others = waiting
            arguments = calls_of(forward, first)[first].sample
            assert arguments is not None
            measured = measure(blocks[first], arguments)
            equal = [first, *(n for n in others if _stands_for(measured, arguments, blocks[n]))]
            calls = sum(len(seen[n].patterns) for n in equal)
            classes.append(BlockClass(measured, arguments, {n: blocks[n] for n in equal}, calls))
            waiting = [n for n in others if n not in equal]
    return classes


def _looks(block: nn.Module, pattern: CallPattern) -> str:
    """What must be equal of equal blocks, as far as it can be seen."""
    tensors = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    places: dict[int, int] = {}
    facts = [
        (name, places.setdefault(id(t), len(places)), tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in tensors
    ]
    modes = [(name, type(module).__qualname__, module.training) for name, module in block.named_modules()]
    return f"{type(block)} {facts} {modes} {pattern}"


def _stands_for(measured: Measured, sample: Sample, block: nn.Module) -> bool:
    """Whether the graph that was measured is exact for `block`, too."""
    with training_mode(block):
        try:
            replay_check(measured.graphs.D_graph, block, sample)
        except ReplayMismatch:
            return False
    return True
