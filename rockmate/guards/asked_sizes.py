"""What a forward asks of sizes when nobody traces it: some modules take another way under a tracer.

A trace is compared with the module on the sizes that it was made of. With others, the module may go a way that it takes
only where no tracer is at work: what it decides by sizes then is seen in a run of its own, with numbers in the place of
sizes that note what is done with them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rkgb import Sample
from rkgb.recording.record import nothing_saved
from rkgb.sizes import OPERATIONS, Computed, SizeQuestion, SizeRead
from rkgb.tree import leaves
from rockmate.guards.numbers import Expression, Number
from rockmate.guards.tracked import NotFollowed, Uses, is_watched, watched

_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_POLYNOMIAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos)
_NAMES: dict[Callable[..., Any], str] = {function: name for name, function in OPERATIONS.items()}


class AskingForward:
    """A forward in which sizes are watched: `questions` are what Python asked of them, and the answers.

    Where what it computes with them is to be `polynomial`, so that a few calls tell the rest, it counts as asked for
    what is not.
    """

    def __init__(self, polynomial: bool = False) -> None:
        self.questions: tuple[SizeQuestion, ...] = ()
        self.outputs: list[torch.Tensor] = []  # tensors that the forward has returned
        self._polynomial = polynomial

    def __call__(self, module: torch.nn.Module, sample: Sample) -> None:
        """Call `module`, saving nothing. Raises whatever it raises: a number that is watched is not always taken for
        one."""
        uses = Uses({})
        with nothing_saved(), _Sizes(uses, self._polynomial):
            self.outputs = leaves(sample.call(module))
        # Before anybody compares what the forward has put into attributes.
        self.questions = tuple(SizeQuestion(_expression(one.asked, uses), one.answer) for one in uses.questions)


class _Shape(tuple):  # type: ignore[type-arg]
    """The shape of a tensor, in numbers that are watched."""

    __slots__ = ()

    def numel(self) -> Any:
        """The product of the sizes."""
        product: Any = 1
        for size in self:
            product = product * size
        return product

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return _Shape(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return _Shape(super().__add__(tuple(other)))


class _Sizes(TorchFunctionMode):
    """Gives sizes as numbers that are watched, and PyTorch's functions plain ones."""

    def __init__(self, uses: Uses, polynomial: bool) -> None:
        super().__init__()
        self._uses = uses
        self._polynomial = polynomial
        self._reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._plain((args, kwargs or {}))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(result, torch.Size) and (name == "size" or func == _SHAPE):
            return self._shape(result)
        if name == "size" and type(result) is int:
            place = args[1] if len(args) > 1 else kwargs["dim"]
            return self._shape(args[0].size())[place]
        if name in ("numel", "nelement") and type(result) is int and isinstance(args[0], torch.Tensor):
            return self._shape(args[0].size()).numel()
        if name == "__len__" and args[0].dim():  # which is to be an int
            self._uses.ask(self._shape(args[0].size())[0].expression)
        return result

    def _plain(self, tree: Any) -> Any:
        """The arguments of a function with plain numbers."""
        if is_watched(tree):
            if self._polynomial and not _is_polynomial(tree.expression):
                self._uses.ask(tree.expression)
            return tree.value
        if type(tree) in (tuple, list, _Shape):
            return (list if type(tree) is list else tuple)(map(self._plain, tree))
        if type(tree) is dict:
            return {key: self._plain(item) for key, item in tree.items()}
        if type(tree) is slice:
            return slice(*map(self._plain, (tree.start, tree.stop, tree.step)))
        return tree

    def _shape(self, sizes: torch.Size) -> _Shape:
        self._reads += 1
        found = []
        for dimension, size in enumerate(sizes):
            number = Number(f"{self._reads}", argument=(self._reads, dimension))
            self._uses.known[number] = size
            found.append(watched(number, size, self._uses, 0))
        return _Shape(found)


def _is_polynomial(tree: Any) -> bool:
    if isinstance(tree, Expression):
        return tree.function in _POLYNOMIAL and all(map(_is_polynomial, tree.operands))
    return isinstance(tree, Number) or type(tree) is int


def _expression(tree: Any, uses: Uses) -> Any:
    if isinstance(tree, Number):
        assert tree.argument is not None
        read, dimension = tree.argument
        return SizeRead(f"read {read}", dimension, int(uses.known[tree]))
    if isinstance(tree, Expression):
        name = "+" if tree.function is operator.pos else _NAMES.get(tree.function)
        if name is None:
            raise NotFollowed
        return Computed(name, tuple(_expression(operand, uses) for operand in tree.operands))
    return tree
