"""Flags of PyTorch's back ends: which of its implementations run, how exact they are, and what they take beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


def _getters(prefix: str, names: Iterable[str]) -> list[tuple[str, Callable[[], Any]]]:
    """Of those flags that this PyTorch has."""
    found = ((name, getattr(torch._C, f"{prefix}{name}", None)) for name in names)
    return [(name, getter) for name, getter in found if getter is not None]


def _precisions(backend: str) -> list[tuple[str, Callable[[], Any]]]:
    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return []
    return [(f"{backend} fp32_precision of {op}", partial(getter, backend, op)) for op in ("matmul", "conv", "rnn")]


_EVERYWHERE = (
    *_getters("_get_", ("deterministic_algorithms", "deterministic_fill_uninitialized_memory")),
    *_getters("_get_", ("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled")),
    *_getters("_get_", ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")),
    *_precisions("mkldnn"),
)
_ON_CUDA = (
    *_getters("_get_", ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_sdp_enabled")),
    *_getters("_get_", ("cublas_allow_fp16_reduced_precision_reduction",)),
    *_getters("_get_", ("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation")),
    *_precisions("cuda"),
)

Flags = tuple[Any, ...]
"""The values, in the order of the names; a device of CUDA has more of them than the CPU."""


def flags_in_force(on_cuda: bool) -> Flags:
    """The flags that are set now, of those that matter there."""
    values = [getter() for _, getter in _EVERYWHERE]
    return (*values, *[getter() for _, getter in _ON_CUDA]) if on_cuda else tuple(values)


def flag_texts(flags: Flags) -> tuple[str, ...]:
    """Names and values, such as "mkldnn_enabled=True"."""
    names = [name for name, _ in (*_EVERYWHERE, *_ON_CUDA)]
    return tuple(f"{name}={value}" for name, value in zip(names, flags, strict=False))


def flags_difference(now: Iterable[str], then: Iterable[str]) -> str:
    """Which values differ of flags that both tell, in words; empty where none do."""
    values = {name: value for name, _, value in (text.partition("=") for text in now)}
    before = {name: value for name, _, value in (text.partition("=") for text in then)}  # of a file: any text
    differ = [name for name in before if values.get(name, before[name]) != before[name]]
    return ", ".join(f"{name} is {values[name]}, but was {before[name]}" for name in differ)
