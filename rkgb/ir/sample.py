"""The sample: the arguments with which a module is traced, measured and planned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.devices.registry import device_of, refusal_text
from rkgb.errors import ModelError, SampleError
from rkgb.torch_private.identity import storage_key
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
        """The same values and strides in storages of their own. Tensors given twice or sharing a storage still do."""
        given = {id(tensor): tensor for tensor in self.tensors}
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in given.values():
            if _is_plain(tensor):
                by_storage.setdefault(storage_key(tensor), []).append(tensor)
        twins = {key: t.detach().clone() for key, t in given.items() if not _is_plain(t)}
        for sharing in by_storage.values():
            twins.update(zip(map(id, sharing), _copied(sharing), strict=True))
        return self.with_tensors([twins[id(t)].requires_grad_(t.requires_grad) for t in self.tensors])

    def aliases(self) -> Sample:
        """The same memory in tensors of their own: gradients of theirs are not found on the given ones.

        For a forward that is known not to write into its inputs.
        """
        twins = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors}
        return self.with_tensors([twins[id(tensor)] for tensor in self.tensors])

    def skeleton(self) -> Any:
        """The structure with every tensor blanked: what must be equal from call to call."""
        return structure((self.args, self.kwargs))

    def call(self, module: torch.nn.Module) -> Any:
        """The module's forward with its hooks. Where a class has a ``__call__`` of its own, that is around all this."""
        return torch.nn.Module.__call__(module, *self.args, **self.kwargs)


_ALIGNMENT_BYTES = 64  # a copy starts as far from such a boundary as its original: kernels may depend on that


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a place in its storage."""
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return usual and not tensor.is_conj() and not tensor.is_neg()


def _copied(sharing: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one storage, in one storage: of what they span, which may be a small part of a data set."""
    storage = sharing[0].untyped_storage()
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in sharing]
    first_byte = min(starts) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    end_byte = max(start + _span_bytes(tensor) for start, tensor in zip(starts, sharing, strict=True))
    whole = torch.empty(0, dtype=torch.uint8, device=sharing[0].device).set_(storage)
    copy = whole[first_byte:end_byte].clone().untyped_storage()
    return [
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            copy, (start - first_byte) // tensor.element_size(), tensor.size(), tensor.stride()
        )
        for start, tensor in zip(starts, sharing, strict=True)
    ]


def _span_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Binding:
    """One form for the arguments of a call: `f(x, y)` and `f(x, b=y)` are one call of a forward that takes (a, b).

    They are not where another function is around it that has its signature only for show, as `functools.wraps` leaves
    it: that one may look for a keyword. Then they stay as they were passed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        forward = module.forward
        self.declared = inspect.signature(forward)
        function = getattr(forward, "__func__", forward)
        self._is_own = not hasattr(function, "__wrapped__") and getattr(function, "__signature__", None) is None
        self._places = {name: place for place, name in enumerate(self.declared.parameters)}

    def sample(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
        """The call. Raises `TypeError` where the forward cannot take it."""
        if self._is_own:
            bound = self.declared.bind(*args, **kwargs)
            return Sample(bound.args, bound.kwargs)
        last = len(self._places)
        return Sample(tuple(args), dict(sorted(kwargs.items(), key=lambda item: self._places.get(item[0], last))))


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
    binding = Binding(module)
    try:
        made = binding.sample(positional, keywords)
    except TypeError as error:
        raise SampleError(
            f"the sample does not fit {type(module).__name__}.forward{binding.declared}: {error}. Give one tensor, "
            "a tuple of positional arguments, or a dict of keyword arguments, as you would call the module."
        ) from None
    if not any(is_tensor(leaf) for leaf in made.tensors):
        raise SampleError(
            f"the sample of {type(module).__name__} holds no tensor (got {type(sample).__name__}). "
            "Give the arguments of one training step, on the device where it will run."
        )
    return made


def _described(thing: object) -> str:
    return f"the class {thing.__name__} itself" if isinstance(thing, type) else f"a {type(thing).__name__}"


# ---- where it may be ---------------------------------------------------------------------------------------

_ADVICE = (
    "a plan could keep no budget there. Move the model and its inputs to such a device, or train the model as it is."
)


def refuse_devices(module: torch.nn.Module, sample: Sample) -> None:
    """Raise `ModelError` or `SampleError` for what is on a device of another kind; "meta" is for others to refuse."""
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if _is_elsewhere(tensor):
                raise ModelError(f"{what} {name!r} of {type(module).__name__} is on {_refused(tensor.device)}")
    for index, tensor in enumerate(sample.tensors):
        if _is_elsewhere(tensor):
            what = f"tensor {index} of the sample of {type(module).__name__}"
            raise SampleError(f"{what} is on {_refused(tensor.device)}")


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return not (device_of(tensor.device).is_supported or tensor.is_meta)


def _refused(device: torch.device) -> str:
    return f"{device}. {refusal_text(device)}: {_ADVICE}"


def _lacks_data(tensor: torch.Tensor) -> bool:
    """On the meta device, unless it stands for another one."""
    return tensor.is_meta and not device_of(tensor.device).is_supported


def refuse_without_data(module: torch.nn.Module, sample: Sample) -> None:
    """Raise `ModelError` or `SampleError` for tensors on the meta device.

    They are not loaded yet, or were taken away between calls by hooks of a library.
    """
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if _lacks_data(tensor):
                raise ModelError(
                    f"{what} {name!r} of {type(module).__name__} is on the meta device, without data: there is nothing "
                    "to plan with. Load the weights first; a module whose weights a library offloads between calls (as "
                    "cpu_offload and device_map do) is for inference, and cannot be planned."
                )
    for index, tensor in enumerate(sample.tensors):
        if _lacks_data(tensor):
            raise SampleError(
                f"tensor {index} of the sample of {type(module).__name__} is on the meta device, without data. Give "
                "the tensors of one training step, on the device where it will run."
            )
