"""Names of what PyTorch calls by objects: operations, types of elements, devices, ways to read numbers.

Names in a file are looked up here and nowhere else; none of them is ever imported or evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rkgb.recording.guard import read_shape
from rkgb.torch_private.operations import OpOverload, overload_names


def _named(kind: type) -> dict[str, Any]:
    """What ``torch`` has of that type, by name; of several names for one thing, one that is its own."""
    return {name: getattr(torch, name) for name in sorted(vars(torch)) if isinstance(getattr(torch, name), kind)}


DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _named(torch.dtype).values()}
LAYOUTS: Mapping[str, torch.layout] = {str(one).removeprefix("torch."): one for one in _named(torch.layout).values()}
MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    str(one).removeprefix("torch."): one for one in _named(torch.memory_format).values()
}
# How a guard reads, beside operations.
READS: Mapping[str, Callable[..., Any]] = {
    "shape": read_shape,
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "__array__": torch.Tensor.__array__,
    "__repr__": torch.Tensor.__repr__,
}

_OPERATION = re.compile(r"([A-Za-z_]\w*::[A-Za-z_]\w*)\.(\w+)", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,3})?", re.ASCII)
# Who runs a graph of a stranger lets it compute; it must not get at files by that.
_TOUCH_FILES = frozenset({"aten::from_file", "aten::save", "debugprims::load_tensor"})


def name_in(table: Mapping[str, Any], thing: object) -> str | None:
    """The name of `thing` in `table`, None where it has none."""
    return next((name for name, known in table.items() if known is thing), None)


def operation_name(function: OpOverload) -> str:
    """``aten::add.Tensor``; ``aten::linear.default`` where the overload has no name."""
    schema = function._schema
    return f"{schema.name}.{schema.overload_name or 'default'}"


def operation(name: str) -> OpOverload:
    """The operation of that name; `ValueError` says why there is none."""
    parts = _OPERATION.fullmatch(name)
    if parts is None:
        raise ValueError("no name of an operation, such as aten::add.Tensor")
    qualified, overload = parts[1], parts[2]
    if qualified in _TOUCH_FILES:
        raise ValueError("this operation reads or writes files: no graph may name it")
    if overload not in overload_names(qualified):
        raise ValueError(
            f"PyTorch {torch.__version__} knows no such operation; import the library that registers it first"
        )
    namespace, short = qualified.split("::")
    found = getattr(getattr(getattr(torch.ops, namespace), short), overload, None)
    if not isinstance(found, OpOverload):
        raise ValueError("this is no operation on tensors")
    return found


def device(name: str) -> torch.device:
    """The device of that name; `ValueError` if it is none."""
    if not _DEVICE.fullmatch(name):
        raise ValueError("no name of a device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError("no name of a device of this PyTorch") from error
