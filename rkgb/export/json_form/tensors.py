"""Forms of tensors: bytes of storages in base64, and for each tensor its place in one of them.

Tensors that share a storage still do when they come back. Bytes are little-endian; those of a storage in
which no tensor has an element are written as zeros.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.devices.registry import device_of
from rkgb.export.json_form import names
from rkgb.export.json_form.errors import Place, shortly
from rkgb.export.json_form.trees import TreeReader
from rkgb.torch_private.identity import storage_key

_ALIGNMENT = 16  # bytes: no element is larger
_KEYS = {"storage", "dtype", "shape", "stride", "offset", "device", "requires_grad"}


def _can_be_read(dtype: torch.dtype) -> bool:
    """Whether bytes can be taken for elements of that type: quantized ones need more than that."""
    return dtype.is_floating_point or dtype.is_complex or not str(dtype).startswith(("torch.q", "torch.bits"))


@dataclass(slots=True)
class _Storage:
    number: int
    held: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)


class TensorWriter:
    """Notes tensors, and writes their storages once all are known."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._storages: dict[int, _Storage] = {}

    def write(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The form of `tensor`, complete once `storages` has been called."""
        plain = tensor.detach()
        if plain.layout is not torch.strided or plain.is_meta or not _can_be_read(plain.dtype):
            kind = f"{plain.layout}, {plain.dtype} on {plain.device}"
            raise self._place.error(f"a tensor of {kind} has no form in JSON")
        plain = plain.resolve_conj().resolve_neg()
        known = self._storages.setdefault(storage_key(plain), _Storage(len(self._storages)))
        form: dict[str, Any] = {
            "storage": known.number,
            "dtype": names.name_in(names.DTYPES, plain.dtype),
            "shape": list(plain.shape),
            "stride": list(plain.stride()),
            "offset": 0,  # from the first byte that is written, which is not known yet
        }
        if not device_of(plain.device).is_host:
            form["device"] = str(plain.device)
        if tensor.requires_grad:
            form["requires_grad"] = True
        known.held.append((plain, form))
        return form

    def storages(self) -> list[str]:
        """The bytes of all storages, in base64."""
        return [base64.b64encode(_bytes_of(storage.held)).decode("ascii") for storage in self._storages.values()]


def _bytes_of(held: list[tuple[torch.Tensor, dict[str, Any]]]) -> bytes:
    """Every element of the tensors at its place, from the first place on; tells their forms where that is."""
    first = min(tensor.storage_offset() * tensor.element_size() for tensor, _ in held)
    first -= first % _ALIGNMENT
    ends = []
    for tensor, form in held:
        form["offset"] = tensor.storage_offset() - first // tensor.element_size()
        ends.append((form["offset"] + _extent(form["shape"], form["stride"])) * tensor.element_size())
    result = torch.zeros(max(ends), dtype=torch.uint8, device="cpu")
    for tensor, form in held:
        if tensor.numel():
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            _elements(result, tensor, form["offset"]).copy_(_elements(source, tensor, int(tensor.storage_offset())))
    return result.numpy().tobytes()


def _elements(storage: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The bytes of the elements of `tensor`, were it in `storage` from element `offset` on; of equal places, one."""
    size = tensor.element_size()
    shape = [count if step else 1 for count, step in zip(tensor.shape, tensor.stride(), strict=True)]
    steps = [step * size if count > 1 else 0 for count, step in zip(shape, tensor.stride(), strict=True)]
    return storage.as_strided([*shape, size], [*steps, 1], offset * size)


def _extent(shape: list[int], stride: list[int]) -> int:
    """Elements from the first to the last one of a tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class TensorReader:
    """Makes tensors of storages out of a file. It takes no more memory than their bytes."""

    def __init__(self, place: Place, trees: TreeReader, storages: list[Any]) -> None:
        self._place = place
        self._trees = trees
        self._forms = storages
        self._found: dict[tuple[int, torch.device], torch.Tensor] = {}

    def read(self, form: Any) -> torch.Tensor:
        """The tensor of that form, on the CPU where this machine has not its device."""
        if type(form) is not dict or not form.keys() <= _KEYS or not form.keys() >= _KEYS - {"device", "requires_grad"}:
            raise self._place.error(f"{shortly(form)} is no tensor: it needs {', '.join(sorted(_KEYS))}")
        values = dict(self._parts(form))
        dtype, shape, stride, offset = (values[key] for key in ("dtype", "shape", "stride", "offset"))
        storage = self._storage(values["storage"], _at_hand(values.get("device", torch.device("cpu"))))
        if len(shape) != len(stride) or len(shape) > 64 or not _can_be_read(dtype):
            raise self._place.error(f"shape, strides and type of elements do not fit each other: {shortly(form)}")
        if offset < 0 or math.prod(shape) >= 2**63 or max(offset, *shape, *stride, 0) >= 2**62:
            raise self._place.error("a shape, strides or an offset that no tensor can have")
        size = dtype.itemsize
        end = (offset + _extent(shape, stride)) * size
        if end > len(storage) or (0 in shape and offset * size > len(storage)):
            raise self._place.error(f"the tensor ends at byte {shortly(end)} of a storage of {len(storage)} bytes")
        try:
            elements = storage[: len(storage) // size * size].view(dtype)
            tensor = elements.as_strided(shape, stride, offset).detach()
            if dtype is torch.bool and bool((storage[offset:end] > 1).any()):
                raise self._place.error("a byte of a boolean is 0 or 1")
            return tensor.requires_grad_(values.get("requires_grad", False))
        except RuntimeError as error:
            raise self._place.error(f"PyTorch has no such tensor: {error}") from error

    def _parts(self, form: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in form.items():
            with self._place.at(key):
                if key == "dtype":
                    yield key, self._trees.named(names.DTYPES, value)
                elif key == "device":
                    yield key, self._trees.device(value)
                elif key in ("shape", "stride"):
                    yield key, self._trees.whole_numbers(value)
                elif key == "requires_grad":
                    if type(value) is not bool:
                        raise self._place.error(f"true or false is expected, not {shortly(value)}")
                    yield key, value
                else:
                    yield key, self._trees.whole_number(value)

    def _storage(self, number: int, device: torch.device) -> torch.Tensor:
        if not 0 <= number < len(self._forms):
            raise self._place.error(f"the file has no storage number {number}")
        if (number, device) not in self._found:
            data = self._trees.bytes(self._forms[number])
            empty = torch.empty(0, dtype=torch.uint8, device="cpu")
            plain = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty
            self._found[number, device] = plain.to(device, copy=True)  # into memory that PyTorch has aligned
        return self._found[number, device]


def _at_hand(device: torch.device) -> torch.device:
    """`device`, or the CPU where there is no such device: a graph can be looked at anywhere."""
    return device if device_of(device).is_there else torch.device("cpu")
