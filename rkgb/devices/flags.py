"""What reads flags of PyTorch's back ends, with their names: of those that this PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rkgb.torch_private.flags import flag_getter, precision_getter

Getter = tuple[str, Callable[[], Any]]


def getters(names: Iterable[str]) -> list[Getter]:
    """Of flags that PyTorch's own functions tell."""
    found = ((name, flag_getter(name)) for name in names)
    return [(name, getter) for name, getter in found if getter is not None]


def precisions(backend: str) -> list[Getter]:
    """How exact a back end's products are in float32."""
    found = ((f"{backend} fp32_precision of {op}", precision_getter(backend, op)) for op in ("matmul", "conv", "rnn"))
    return [(name, getter) for name, getter in found if getter is not None]
