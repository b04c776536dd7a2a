"""Samples written as text: "float32[8,3,224,224]", or "input_ids=int64[N,128]<50257, use_cache=false".

A sample is a list of arguments of the model's forward, separated by commas, keyword arguments with their name and "="
before them. An argument is a tensor or a plain value:

    float32[8,3,224,224]     random numbers of the normal distribution; also float64, bfloat16, complex64, …
    [8,3,224,224]            the same: float32 is the type where none is said
    int64[4,256]<50257       random whole numbers from 0 to 50256
    bool[4,1,16,16]          random truth values
    int64[4,256]=1           the same number everywhere
    float32[4,16] grad       a tensor that requires a gradient
    int64[N,128]<1000        N is the size of the batch, 2N twice that
    true  none  0.5  'text'  a plain value
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample

_TENSOR = re.compile(
    r"(?P<dtype>[a-z]+[0-9]*)?\s*\[(?P<shape>[^\]]*)\]\s*(?:<\s*(?P<below>\d+)|=\s*(?P<fill>[^\s]+))?\s*(?P<grad>grad)?"
)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", re.DOTALL)
_DIMENSION = re.compile(r"(\d*)\s*(N?)")
_WORDS = {"true": True, "false": False, "none": None}
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_FORMS = 'Write a tensor as "float32[8,3,32,32]" or "int64[4,128]<1000", and "name=" before it for a keyword argument.'


class SampleTextError(ValueError):
    """The text of a sample cannot be read."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """The size of a dimension: a number, or a multiple of the batch."""

    size: int
    of_batch: bool = False

    def resolved(self, batch: int | None) -> int:
        """The number. Raises `SampleTextError` for one of the batch, where there is none."""
        if not self.of_batch:
            return self.size
        if batch is None:
            raise SampleTextError("a dimension of the sample is N, and N is not given: give --batch, or write a number")
        return self.size * batch


@dataclass(frozen=True, slots=True)
class TensorText:
    """A tensor of a sample, as it was written."""

    dtype: torch.dtype
    shape: tuple[Dimension, ...]
    below: int | None = None
    fill: complex | None = None
    requires_grad: bool = False

    def draw(self, batch: int | None, generator: torch.Generator) -> torch.Tensor:
        """Such a tensor, on the CPU."""
        shape = [dimension.resolved(batch) for dimension in self.shape]
        if self.fill is not None:
            tensor = torch.full(shape, self.fill, dtype=self.dtype, device="cpu")
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            tensor = torch.randn(shape, dtype=self.dtype, generator=generator, device="cpu")
        else:
            below = 2 if self.below is None else self.below
            tensor = torch.randint(below, shape, generator=generator, device="cpu").to(self.dtype)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class SampleText:
    """The arguments of one call of a model, as they were written."""

    args: tuple[Any, ...]  # `TensorText`, or plain values
    kwargs: dict[str, Any]

    @property
    def has_batch(self) -> bool:
        """Whether a dimension is N."""
        parts = (*self.args, *self.kwargs.values())
        return any(dimension.of_batch for part in parts if isinstance(part, TensorText) for dimension in part.shape)

    def draw(self, batch: int | None = None, device: torch.device | str = "cpu", seed: int = 0) -> Sample:
        """The arguments, the same for the same seed on every device.

        Raises `SampleTextError` where a dimension is N, and `batch` is None.
        """
        generator = torch.Generator().manual_seed(seed)

        def made(part: Any) -> Any:
            if not isinstance(part, TensorText):
                return part
            tensor = part.draw(batch, generator)
            return tensor.detach().to(device).requires_grad_(part.requires_grad)

        return Sample(tuple(map(made, self.args)), {name: made(part) for name, part in self.kwargs.items()})


def read_sample(texts: Iterable[str]) -> SampleText:
    """The sample that `texts` describe, one after the other.

    Raises:
        SampleTextError: one of them cannot be read; the message tells which part, and what to write.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for part in (part for text in texts for part in _parts(text)):
        keyword = _KEYWORD.fullmatch(part)
        if keyword is None:
            if kwargs:
                raise SampleTextError(f"{part.strip()!r} comes after a keyword argument: give positional ones first")
            args.append(_argument(part))
        elif keyword[1] in kwargs:
            raise SampleTextError(f"the keyword argument {keyword[1]!r} is given twice")
        else:
            kwargs[keyword[1]] = _argument(keyword[2])
    if not any(isinstance(part, TensorText) for part in (*args, *kwargs.values())):
        raise SampleTextError(f"the sample holds no tensor. {_FORMS}")
    return SampleText(tuple(args), kwargs)


def _parts(text: str) -> list[str]:
    """`text`, cut at the commas that are in no bracket and in no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _argument(text: str) -> Any:
    text = text.strip()
    match = _TENSOR.fullmatch(text)
    if match is not None:
        return _tensor(text, match)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise SampleTextError(f"the sample's {text!r} cannot be read. {_FORMS}") from None
    if not isinstance(value, int | float | complex | str):
        raise SampleTextError(f"the sample's {text!r} is a {type(value).__name__}. {_FORMS}")
    return value


def _tensor(text: str, match: re.Match[str]) -> TensorText:
    name = match["dtype"] or "float32"
    if name not in DTYPES:
        raise SampleTextError(f"{text!r} is of type {name!r}, which is none of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    drawn = dtype.is_floating_point or dtype.is_complex
    below = None if match["below"] is None else int(match["below"])
    fill = None if match["fill"] is None else _fill(text, match["fill"], dtype)
    if below is not None and (drawn or below < 1):
        raise SampleTextError(f"{text!r}: only whole numbers are drawn below a bound, which is at least 1")
    if not drawn and dtype is not torch.bool and below is None and fill is None:
        raise SampleTextError(f'{text!r} does not say which numbers: write "{text}<1000" for random ones below 1000')
    if match["grad"] and not drawn:
        raise SampleTextError(f"{text!r}: tensors of {name} have no gradient")
    return TensorText(dtype, _shape(text, match["shape"]), below, fill, bool(match["grad"]))


def _shape(text: str, shape: str) -> tuple[Dimension, ...]:
    found = []
    for part in filter(None, map(str.strip, shape.split(","))):
        match = _DIMENSION.fullmatch(part)
        if match is None or not part:
            raise SampleTextError(f"{text!r}: the dimension {part!r} is neither a number nor N, the size of the batch")
        found.append(Dimension(int(match[1] or 1), bool(match[2])))
    return tuple(found)


def _fill(text: str, number: str, dtype: torch.dtype) -> complex:
    try:
        value = complex(number)
    except ValueError:
        raise SampleTextError(f"{text!r}: {number!r} is no number to fill a tensor with") from None
    if dtype.is_complex:
        return value
    if value.imag or (not dtype.is_floating_point and value.real != int(value.real)):
        raise SampleTextError(f"{text!r}: {number!r} is no number of its type")
    return value.real if dtype.is_floating_point else int(value.real)
