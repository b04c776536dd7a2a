"""Dropout's draws on the CPU: each element of a tensor is 1 with a probability, and 0 otherwise.

PyTorch draws one number after the other, on one thread: a sixth of a step of a vision transformer with dropout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from rkgb.devices.registry import device_of
from rkgb.kernels.mersenne_twister import Draw, draw_into, drawing
from rkgb.torch_private.modes import dispatch_mode_count, without_dispatch_modes

LEAST_ELEMENTS = 1 << 13  # below that, what is around the loops takes longer than they save
_PROVEN_ON = (1000, 1, 12345, 624)  # elements, one draw after the other
_TIMED_ON = 1 << 16
_TURNS = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bernoulli_(tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """As `tensor.bernoulli_(p, generator=generator)`, to the bit, and so is what the generator draws next."""
    elements = tensor.numel()
    source = torch.default_generator if generator is None else generator
    if elements < LEAST_ELEMENTS or not _suits(tensor, p, source) or (draw := quicker()) is None:
        return tensor.bernoulli_(p, generator=generator)
    size_bytes = tensor.element_size()
    places = tensor.detach().as_strided((elements,), (1,)).view(_INTEGERS[size_bytes]).numpy()
    draw_into(places.view(f"u{size_bytes}"), p, _one(tensor.dtype), source, draw)
    torch.autograd.graph.increment_version(tensor)
    return tensor


def saved_ms(elements: int, device: torch.device) -> float:
    """Of PyTorch's time to draw so many: what is saved here."""
    is_ours = elements >= LEAST_ELEMENTS and device_of(device).is_host and quicker() is not None
    return elements * _saved_ms_each() if is_ours else 0.0


@functools.cache
def quicker() -> Draw | None:
    """The loops that draw what PyTorch draws, and sooner; None where there are none.

    They are proven on first use, with arrays of numpy: tensors that live are counted.
    """
    draw = drawing()
    with without_dispatch_modes():  # those that a user's call is in
        return draw if draw is not None and _is_equal(draw) and _saved_ms_each() > 0 else None


def _suits(tensor: torch.Tensor, p: float, generator: torch.Generator) -> bool:
    """Whether it is a plain dense tensor in the host's memory, without gradient, drawn there, and `p` a probability.

    Modes that see operations would miss this one.
    """
    return (
        type(tensor) is torch.Tensor
        and dispatch_mode_count() == 0
        and device_of(tensor.device).is_host
        and device_of(generator.device).is_host
        and not tensor.requires_grad
        and not tensor.is_inference()
        and (tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, *_INTEGERS.values()))
        and tensor.element_size() in _INTEGERS
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        and isinstance(p, float | int)
        and 0.0 <= p <= 1.0
    )


@functools.cache
def _one(dtype: torch.dtype) -> int:
    """The bits of 1, as an unsigned integer of the element's size."""
    one = torch.ones(1, dtype=dtype, device="cpu")
    return int(one.view(_INTEGERS[one.element_size()]).item())


def _is_equal(draw: Draw) -> bool:
    """Whether draws are PyTorch's, wherever the generator is in its words, and leave it where PyTorch's do."""
    theirs, ours = torch.Generator("cpu").manual_seed(7), torch.Generator("cpu").manual_seed(7)
    one = _one(torch.float32)
    for elements in _PROVEN_ON:
        for p in (0.0, 0.1, 0.5, 0.9, 1.0):
            expected, found = np.empty(elements, np.float32), np.empty(elements, np.float32)
            torch.from_numpy(expected).bernoulli_(p, generator=theirs)
            try:
                draw_into(found.view(np.uint32), p, one, ours, draw)
            except Exception:  # noqa: BLE001  another layout of the state, or what numba cannot compile here
                return False
            if not np.array_equal(expected, found) or not torch.equal(theirs.get_state(), ours.get_state()):
                return False
            for generator in (theirs, ours):
                torch.rand(1, generator=generator, device="cpu")
    return True


@functools.cache
def _saved_ms_each() -> float:
    """By element: the least of some turns each."""
    draw = drawing()
    if draw is None:
        return 0.0
    generator, places = torch.Generator("cpu").manual_seed(7), np.empty(_TIMED_ON, np.float32)
    ways: tuple[Callable[[], object], ...] = (
        lambda: torch.from_numpy(places).bernoulli_(0.9, generator=generator),
        lambda: draw_into(places.view(np.uint32), 0.9, _one(torch.float32), generator, draw),
    )
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TURNS):
        for way, seconds in zip(ways, spent, strict=True):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
    return 1e3 * (min(spent[0]) - min(spent[1])) / _TIMED_ON
