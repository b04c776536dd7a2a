"""What PyTorch asks a class of tensors before each of its functions, and how to have it not ask.

Of getters and setters of attributes only their slots in C++ are told, whose names are nowhere public.
"""

from __future__ import annotations

from typing import Any

import torch

not_asked = torch._C.DisableTorchFunctionSubclass
"""Context in which functions take tensors of any class for ordinary ones; modes that the user has entered go on."""

nobody_asked = torch._C.DisableTorchFunction
"""Context in which modes are not asked either."""

_tensor: Any = torch.Tensor

SET_DATA: Any = _tensor.data.__set__
SET_REQUIRES_GRAD: Any = _tensor.requires_grad.__set__

_ATTRIBUTES = (
    *("shape", "requires_grad", "dtype", "device", "layout", "is_leaf", "grad", "_grad", "grad_fn", "_version", "ndim"),
    *("names", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_nested", "is_quantized", "is_xpu"),
    *("is_mps", "is_mkldnn", "retains_grad", "output_nr", "itemsize", "nbytes", "name", "_backward_hooks", "_base"),
)
_METHODS = (
    *("size", "stride", "dim", "numel", "nelement", "ndimension", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "register_hook", "is_inference", "has_names", "is_same_size"),
    *("__len__", "_is_view", "is_conj", "is_neg", "__hash__", "register_post_accumulate_grad_hook", "_use_count"),
)
_ADDRESSES = ("data_ptr", "const_data_ptr", "numpy", "__array__", "__dlpack__", "storage")


def _methods(names: tuple[str, ...]) -> list[Any]:
    return [getattr(_tensor, name) for name in names if hasattr(_tensor, name)]


METADATA: frozenset[Any] = frozenset(
    _methods(_METHODS)
    + [getattr(_tensor, name).__get__ for name in _ATTRIBUTES if hasattr(_tensor, name)]
    + [_tensor.grad.__set__, _tensor.grad.__delete__]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""Functions that tell what a tensor is, and do not read its values."""

ADDRESSES: frozenset[Any] = frozenset(_methods(_ADDRESSES))
"""Functions that tell where values are: whoever knows may read and write there unseen."""
