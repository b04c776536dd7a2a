"""Tensors whose values may be away: whoever asks for them has them brought back first.

A tensor that rests stays the object that it is, and has another class meanwhile, through which PyTorch asks us before
each of its functions. What it is (its shape, its type, its gradient) is told at once. Everything else has its
values, as long as it runs; and for as long as anything else has its storage, such as a view, they stay.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch

from rkgb.process.uncompiled import never_compiled
from rkgb.torch_private.asked import ADDRESSES, METADATA, SET_DATA, SET_REQUIRES_GRAD, not_asked
from rockmate.errors import OffloadError
from rockmate.offload.tier import Parcel, Shape
from rockmate.resting.window import Place


class Owner(abc.ABC):
    """Who brings them, and sends them away."""

    @abc.abstractmethod
    def hold(self, rested: Rested) -> None:
        """Have it here, for a use that may be in no order."""

    @abc.abstractmethod
    def let_go(self, rested: Rested, is_unseen: bool, is_replaced: bool) -> None:
        """That use is over; it may have written, or others may yet, unseen, or it has put another storage in."""

    @abc.abstractmethod
    def wake(self, rested: Rested) -> None:
        """Have it here, and no longer rest."""

    @abc.abstractmethod
    def used_at(self, used: Sequence[Rested], cursor: int | None) -> AbstractContextManager[None]:
        """Context in which these are here as ordinary tensors, from a place of the order of uses on."""

    @abc.abstractmethod
    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to send what was just written, so that it can leave at once later."""

    @abc.abstractmethod
    def forget(self, rested: Rested) -> None:
        """Its tensor is gone."""


class Rested:
    """What is known of one tensor that rests."""

    __slots__ = (
        "__weakref__",
        "device",
        "handles",
        "is_lent",
        "kind",
        "owner",
        "parcel",
        "place",
        "readers",
        "replaced",
        "shape",
        "size_bytes",
        "tensor",
        "trains",
        "users",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, owner: Owner) -> None:
        identity, itself = id(tensor), ref(self)

        def gone(_: Any) -> None:
            rested = itself()
            _rested.pop(identity, None)
            if rested is not None:
                rested.owner.forget(rested)

        self.tensor = ref(tensor, gone)
        self.owner = owner
        self.kind = type(tensor)
        self.trains = tensor.requires_grad
        self.shape = Shape.of(tensor)
        self.device = tensor.device
        self.size_bytes = tensor.untyped_storage().nbytes()
        self.parcel: Parcel | None = None
        self.version = -1  # of the tensor, as the second memory has it
        self.is_lent = False  # others had its storage since: they may have written without a new version
        self.replaced = 0  # how often it was given another storage by others
        self.place = Place.HERE
        self.users = 0
        self.readers = 0  # of these users: those who take it for an ordinary tensor
        self.handles: list[ref[Any]] = []  # that have its values, and can have them again

    @property
    def alive(self) -> torch.Tensor:
        """The tensor."""
        tensor = self.tensor()
        assert tensor is not None, "it is asked for by who has it"
        return tensor

    @property
    def is_written(self) -> bool:
        """Whether the second memory may have something else."""
        return self.parcel is None or self.is_lent or self.alive._version != self.version


_rested: dict[int, Rested] = {}  # by the tensor's identity


class _Changes:
    """How often a tensor has begun to rest, or ended: code is written for what rests."""

    count = 0


def changes() -> int:
    """Another number than before where other tensors rest now."""
    return _Changes.count


def rested_of(tensor: torch.Tensor) -> Rested | None:
    """What is known of a tensor that rests; None of any other."""
    return _rested.get(id(tensor)) if type(tensor) in _CLASSES else None


def begin(tensor: torch.Tensor, rested: Rested) -> None:
    """From now on whoever wants its values asks for them."""
    _rested[id(tensor)] = rested
    tensor.__class__ = _KINDS[type(tensor)]
    _Changes.count += 1


def go_on(tensor: torch.Tensor) -> None:
    """It was an ordinary tensor for a while, and rests again."""
    tensor.__class__ = _KINDS.get(type(tensor), type(tensor))


def end(tensor: torch.Tensor) -> None:
    """Its values are there, and stay."""
    rested = _rested.pop(id(tensor))
    tensor.__class__ = rested.kind
    _Changes.count += 1


def can_rest(tensor: torch.Tensor) -> bool:
    """Whether it is of a class that is PyTorch's own, and dense."""
    return type(tensor) in _KINDS and tensor.layout is torch.strided and not tensor.is_meta and tensor._base is None


@never_compiled
def _asked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of PyTorch's on what rests."""
    if function in METADATA:
        with not_asked():
            return function(*args, **kwargs)
    asked = list(dict.fromkeys(_resting_in((args, kwargs.values()))))
    if function is torch.Tensor.requires_grad_ or function == SET_REQUIRES_GRAD:
        trains = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        for rested in asked:
            if trains != rested.trains:
                rested.owner.wake(rested)
    taken = []
    try:
        for rested in asked:
            rested.owner.hold(rested)
            taken.append(rested)
        with not_asked():
            return function(*args, **kwargs)
    finally:
        # Fused steps of optimizers write without a new version.
        is_unseen = function in ADDRESSES or getattr(function, "__name__", "").startswith("_fused")
        for rested in taken:
            rested.owner.let_go(rested, is_unseen, is_replaced=function == SET_DATA and rested is asked[0])


def _resting_in(arguments: Any) -> Iterable[Rested]:
    """What rests in arguments of a function, which lists may hold."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            if type(argument) not in _CLASSES:
                continue
            if id(argument) not in _rested:
                raise OffloadError(
                    "a tensor that rests was put in another one's place by torch.utils.swap_tensors, and its values "
                    "are not known any more. Have none rest where tensors are swapped."
                )
            yield _rested[id(argument)]
        elif isinstance(argument, (list, tuple)):
            yield from _resting_in(argument)
        elif not isinstance(argument, (str, bytes, int, float)) and type(argument).__name__ == "dict_values":
            yield from _resting_in(argument)


def _torch_function(
    _: type, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return _asked(function, args, kwargs or {})


class RestingTensor(torch.Tensor):
    """A tensor that rests."""

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(self.detach())

    __torch_function__: Any = classmethod(_torch_function)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        twin: torch.Tensor = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class RestingParameter(torch.nn.Parameter):
    """A parameter that rests."""

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"

    __torch_function__: Any = classmethod(_torch_function)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        values = self.data.clone(memory_format=torch.preserve_format)
        twin = torch.nn.Parameter(values, self.requires_grad)
        memo[id(self)] = twin
        return twin


_KINDS: dict[type, type] = {torch.Tensor: RestingTensor, torch.nn.Parameter: RestingParameter}
_CLASSES = frozenset(_KINDS.values())
