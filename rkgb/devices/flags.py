"""What reads flags of PyTorch's back ends, with their names: of those that this PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

Getter = tuple[str, Callable[[], Any]]


def getters(prefix: str, names: Iterable[str]) -> list[Getter]:
    """Of flags that PyTorch's own functions tell, named by `prefix` and the flag's name."""
    found = ((name, getattr(torch._C, f"{prefix}{name}", None)) for name in names)
    return [(name, getter) for name, getter in found if getter is not None]


def precisions(backend: str) -> list[Getter]:
    """How exact a back end's products are in float32."""
    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return []
    return [(f"{backend} fp32_precision of {op}", partial(getter, backend, op)) for op in ("matmul", "conv", "rnn")]
