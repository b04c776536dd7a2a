"""Data that a trace has not seen: from random numbers, down to what a particular module takes as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.devices.registry import device_of
from rkgb.ir.sample import Sample

# Relative, of the last offer but one: more than rounding takes away, and less than what most bounds leave.
_PERTURBATION = 2.0**-10
_SHOWN_CHARACTERS = 160  # of what a module says that refuses its data


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to make other data of a sample."""

    words: str  # what is offered
    integers_as_given: bool  # integers and masks, which mostly choose the way, are the sample's in their places
    is_random: bool  # numbers of no sample: what holds for these holds for any
    of: Callable[[Sample, int], Sample]  # such data, from a seed, in storages of their own


def offers(sample: Sample) -> Iterator[Offer]:
    """From the data that prove most to those that every module takes which takes `sample`.

    On an accelerator, ids keep to the sample's from the first: one out of range would end every later call there.
    """
    if not any(device_of(tensor.device).fails_for_good for tensor in sample.tensors):
        yield Offer("random numbers, and integers in another order", False, True, fresh_sample)
        yield Offer(
            "random numbers beside the sample's own integers", True, True, partial(fresh_sample, permuted=False)
        )
    with_ids = partial(fresh_sample, ids_kept=True)
    yield Offer("random numbers, with integers and columns of whole numbers in another order", False, True, with_ids)
    yield Offer("random numbers beside the sample's own integers and whole numbers", True, True, _beside_whole)
    yield Offer("the sample's rows in another order", False, False, _rows_in_another_order)
    yield Offer("the sample's values in another order", False, False, _values_in_another_order)
    yield Offer("the sample with its fractions moved by a thousandth", True, False, _perturbed)
    yield Offer("the sample itself", True, False, lambda sample, _: sample.copy())


def fresh_sample(sample: Sample, seed: int = 0, permuted: bool = True, ids_kept: bool = False) -> Sample:
    """Random data of the sample's shapes and ranges: integers and booleans are permuted, not invented.

    Not `permuted`, these stay as they are. Floating-point tensors of one sign, such as probabilities, keep their range;
    all others become normal noise. With `ids_kept`, floating-point columns that hold whole numbers alone, such as the
    ids in a table of boxes, are handled as integers.
    """
    generator = _generator(seed)

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            drawn = _drawn(tensor, generator)
            return _with_ids(tensor, drawn, generator if permuted else None) if ids_kept else drawn
        return _shuffled(tensor, generator) if permuted else tensor

    return _each(sample, fresh)


def _beside_whole(sample: Sample, seed: int) -> Sample:
    return fresh_sample(sample, seed, permuted=False, ids_kept=True)


def refused(error: Exception) -> str:
    """In words: what a module said that did not take its data. Raises `error` anew if memory was short."""
    if is_out_of_memory(error):
        raise error
    text = " ".join(str(error).split())
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


# ---- how they are made -------------------------------------------------------------------------------------


def _each(sample: Sample, make: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    """`sample` with other values in storages of their own."""
    return sample.with_tensors([_like(t, make(t.detach())) for t in sample.tensors])


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor.detach()).copy_(values)
    return made.requires_grad_(tensor.requires_grad)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.complex128, device="cpu")
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
    return noise if tensor.numel() == 0 else _in_range_of(tensor, noise)


def _with_ids(tensor: torch.Tensor, drawn: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """`drawn`, but for the columns of `tensor` that hold ids: these from the sample, in another order."""
    ids = None if tensor.is_complex() or tensor.numel() == 0 else _columns_of_ids(tensor)
    if ids is None:
        return drawn
    kept = tensor if generator is None else _shuffled_within_columns(tensor, generator)
    return torch.where(ids.cpu(), kept.double().cpu(), drawn)


def _in_range_of(tensor: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Normal `noise`, made uniform between the extremes of `tensor` where these differ and are of one sign."""
    low, high = (float(bound) for bound in tensor.aminmax())
    if low < 0 < high or low == high or not math.isfinite(high - low):
        return noise
    return low + (high - low) * torch.special.ndtr(noise)


def _columns_of_ids(tensor: torch.Tensor) -> torch.Tensor | None:
    """Which places of the last dimension hold whole numbers alone; None where none does, or all hold the same number.

    Such are ids, counts and masks: a module may look something up by them, and has no more than the sample's.
    """
    if bool((tensor == tensor.reshape(-1)[0]).all()):
        return None
    whole = (tensor == tensor.round()) & tensor.isfinite()
    columns = whole if tensor.dim() == 0 else whole.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1).all(0)
    return columns if bool(columns.any()) else None


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(tensor.numel(), generator=generator, device="cpu").to(tensor.device)
    return tensor.reshape(-1)[order].view(tensor.shape)


def _shuffled_within_columns(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    shuffled = rows[torch.randperm(len(rows), generator=generator, device="cpu").to(tensor.device)].view(tensor.shape)
    return _shuffled(tensor, generator) if torch.equal(shuffled, tensor) else shuffled  # such as equal rows


def _rows_in_another_order(sample: Sample, seed: int) -> Sample:
    """The same order for all tensors of as many rows: what belongs together stays together."""
    generator = _generator(seed)
    orders: dict[int, torch.Tensor] = {}

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.layout is not torch.strided:
            return tensor
        count = len(tensor)
        if count not in orders:
            orders[count] = torch.randperm(count, generator=generator, device="cpu")
        return tensor[orders[count].to(tensor.device)]

    return _each(sample, reordered)


def _values_in_another_order(sample: Sample, seed: int) -> Sample:
    generator = _generator(seed)
    return _each(sample, lambda t: _shuffled(t, generator) if t.layout is torch.strided else t)


def _perturbed(sample: Sample, seed: int) -> Sample:
    """Fractions a little larger, signs kept; whole numbers, which may be ids or masks, stay."""
    generator = _generator(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        step = max(_PERTURBATION, 2 * torch.finfo(tensor.dtype).eps)
        by = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").to(tensor.device)
        whole = (tensor == tensor.round()) | ~tensor.isfinite()
        return torch.where(whole, tensor.double(), tensor.double() * (1 + step * by))

    return _each(sample, moved)
