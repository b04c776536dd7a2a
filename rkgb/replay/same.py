"""Whether two traces run the same functions on the same values, and which numbers differ in their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rkgb.ir.bgraph import Leaf
from rkgb.ir.call import Call, Ref
from rkgb.ir.dgraph import DNode
from rkgb.ir.opaque import OpaqueCall
from rkgb.recording.guard import Guard
from rkgb.state.generators import OwnGenerator
from rkgb.torch_private.operations import OpOverload

_NUMBERS = (bool, int, float, complex)


def same_function(call: Call, other: Call) -> bool:
    """Whether two calls are of one function: of one operation, one submodule, or both of a guard of one kind."""
    mine, theirs = call.function, other.function
    if isinstance(mine, Guard) and isinstance(theirs, Guard):
        return mine.read == theirs.read and mine.may_vary == theirs.may_vary
    if isinstance(mine, OpaqueCall) and isinstance(theirs, OpaqueCall):
        return mine.path == theirs.path
    return mine == theirs or (type(mine) is type(theirs) and call.op_name == other.op_name and not _is_operation(mine))


def same_operation(mine: DNode, other: DNode) -> bool:
    """Whether two operations are one but for the numbers and constants in their arguments."""
    facts = ("name", "outputs", "grad_enabled", "is_random", "written", "is_guard", "plain_inputs", "inputs")
    return all(getattr(mine, fact) == getattr(other, fact) for fact in facts) and same_function(mine.call, other.call)


def argument_pairs(
    call: Call, other: Call, leaves: Mapping[str, Leaf], other_leaves: Mapping[str, Leaf]
) -> Iterator[tuple[Any, Any]]:
    """What differs in the arguments of two calls of one function: each value with the one in its place."""
    for mine, theirs in _pairs((call.args, call.kwargs), (other.args, other.kwargs)):
        if isinstance(mine, Ref) and isinstance(theirs, Ref) and mine == theirs:
            constants = [found.get(mine.name) for found in (leaves, other_leaves)]
            tensors = [leaf.constant for leaf in constants if leaf is not None and leaf.constant is not None]
            if len(tensors) == 2 and not _same_tensor(*tensors):
                yield tensors[0], tensors[1]
        elif not same_value(mine, theirs):
            yield mine, theirs


def same_value(mine: Any, theirs: Any) -> bool:
    """Whether two values that are no containers are one and the same; a NaN is equal to a NaN."""
    if isinstance(mine, _NUMBERS):
        return type(mine) is type(theirs) and repr(mine) == repr(theirs)
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _same_tensor(mine, theirs)
    if isinstance(mine, OwnGenerator) and isinstance(theirs, OwnGenerator):
        return mine.name == theirs.name
    return type(mine) is type(theirs) and bool(mine == theirs)


def _pairs(mine: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(mine, (list, tuple)) and type(mine) is type(theirs) and len(mine) == len(theirs):
        for part, other in zip(mine, theirs, strict=True):
            yield from _pairs(part, other)
    elif isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        for key in mine:
            yield from _pairs(mine[key], theirs[key])
    else:
        yield mine, theirs


def _is_operation(function: object) -> bool:
    return isinstance(function, OpOverload)


def _same_tensor(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine is theirs:
        return True
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or mine.device != theirs.device:
        return False
    return torch.equal(mine, theirs) or bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())
