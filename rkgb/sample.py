"""The sample: the arguments with which a module is traced, measured and planned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.errors import ModelError, SampleError
from rkgb.tree import is_tensor, leaves, map_leaves, structure


@dataclass(frozen=True, slots=True)
class Sample:
    """Positional and keyword arguments of one call of the module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the arguments, in order."""
        return leaves((self.args, self.kwargs))

    def with_tensors(self, tensors: list[torch.Tensor]) -> Sample:
        """The same structure around other tensors."""
        remaining = iter(tensors)
        args, kwargs = map_leaves(lambda _: next(remaining), (self.args, self.kwargs))
        return Sample(args, kwargs)

    def copy(self) -> Sample:
        """The same arguments in storages of their own."""
        return self.with_tensors([t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors])

    def skeleton(self) -> Any:
        """The structure with every tensor blanked: what must be equal from call to call."""
        return structure((self.args, self.kwargs))

    def call(self, module: torch.nn.Module) -> Any:
        """``module(*args, **kwargs)``."""
        return module(*self.args, **self.kwargs)


def make_sample(module: torch.nn.Module, sample: Any, kwargs: Mapping[str, Any] | None = None) -> Sample:
    """Read what the user gave: a tensor, a tuple or list of positional arguments, or a dict of keyword ones.

    Raises `SampleError` when the module's ``forward`` cannot take them, or when no tensor is in them, and
    `ModelError` when `module` is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"the model must be a torch.nn.Module, but is {_described(module)}. Give an instance; wrap a function in a "
            "module whose forward calls it."
        )
    keywords = dict(kwargs or {})
    if isinstance(sample, Sample):
        positional, keywords = sample.args, {**sample.kwargs, **keywords}
    elif isinstance(sample, Mapping):
        positional, keywords = (), {**sample, **keywords}
    elif isinstance(sample, (tuple, list)):
        positional = tuple(sample)
    else:
        positional = (sample,)
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*positional, **keywords)
    except TypeError as error:
        raise SampleError(
            f"the sample does not fit {type(module).__name__}.forward{signature}: {error}. Give one tensor, "
            "a tuple of positional arguments, or a dict of keyword arguments, as you would call the module."
        ) from None
    made = Sample(bound.args, bound.kwargs)  # one form, however the arguments were passed
    if not any(is_tensor(leaf) for leaf in made.tensors):
        raise SampleError(
            f"the sample of {type(module).__name__} holds no tensor (got {type(sample).__name__}). "
            "Give the arguments of one training step, on the device where it will run."
        )
    return made


def _described(thing: object) -> str:
    return f"the class {thing.__name__} itself" if isinstance(thing, type) else f"a {type(thing).__name__}"
