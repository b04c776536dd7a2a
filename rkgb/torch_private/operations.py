"""Operations, as the dispatcher knows them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_C: Any = torch._C

OpOverload = torch._ops.OpOverload
"""One operation with one signature, such as `torch.ops.aten.add.Tensor`. `torch.ops` makes them, and names no class."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""All operations of one name, such as `torch.ops.aten.add`."""

tensor_functions: Any = _C._VariableFunctions
"""Operations as functions of C++ with its own parser of arguments. In `torch`, some of these names are Python code."""

nn_functions: Any = _C._nn
"""Those of `torch.nn.functional`, without the Python code that most names have there."""

tensor_methods: Any = _C.TensorBase
"""Those of `torch.Tensor`, without the Python code that some names have there."""

suggested_format = torch._prims_common.suggest_memory_format
"""Of a tensor: in which memory format operations that keep one give their results."""

negated_view = torch._neg_view
"""Of a tensor: the same storage, read with the other sign. Public functions make one of the imaginary part alone."""

# ---- operations with private names --------------------------------------------------------------------------

_aten: Any = torch.ops.aten

read_number = _aten._local_scalar_dense.default
"""What `Tensor.item` is."""

copy_to = _aten._to_copy.default
"""What `Tensor.to` is, where it copies."""

convolution = _aten._convolution.default
"""All convolutions, with what back ends are to do."""

safe_softmax = _aten._safe_softmax.default
"""A softmax that gives zeros for rows of minus infinity: that of attention without a fused kernel."""

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

HALF_OF_ONEDNN = frozenset(
    dtype for dtype, name in _ASKED.items() if hasattr(torch.ops.mkldnn, name) and getattr(torch.ops.mkldnn, name)()
)
"""Numbers of half precision for which oneDNN has kernels on this processor; builds without it have no such question."""

linear_of_onednn = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
"""A linear layer by oneDNN, with what may follow it element by element; None in builds that have no such operation.

It takes the input, the weight, the bias or None, and of what follows a name ("none"), its numbers and a variant.
"""

softmaxes = _aten._softmax.default, _aten._log_softmax.default
softmaxes_backward = _aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default
"""With the gradient first, and then what was made."""

all_true = _aten._is_all_true.default
"""Whether all of a tensor of truths is: asked where a forward makes sure of something."""

any_true = _aten._is_any_true.default
"""As `all_true`, of the opposite."""

ctc_loss = _aten._ctc_loss
"""With its overloads `default`, given lengths as numbers, and `Tensor`."""

ctc_loss_backward = _aten._ctc_loss_backward
"""With the same overloads."""

distances = _aten._euclidean_dist.default
"""What `torch.cdist` takes for many points: between two sets of them."""

fourier_of_numbers = _aten._fft_r2c.default
"""A Fourier transform of real numbers along dimensions."""

fourier_of_complex = _aten._fft_c2c.default
"""One of complex numbers."""

fourier_to_numbers = _aten._fft_c2r.default
"""One of complex numbers that comes to real ones."""

pack_padded_rows = tensor_functions._pack_padded_sequence
"""What `torch.nn.utils.rnn.pack_padded_sequence` calls: rows, their lengths, and whether rows are first."""

pad_packed_rows = tensor_functions._pad_packed_sequence
"""What `torch.nn.utils.rnn.pad_packed_sequence` calls: data, and how many rows are as long."""

lstm_layer = _aten.mkldnn_rnn_layer.default
"""A layer of an LSTM by oneDNN in one direction: outputs, the last states, and a workspace for the backward."""

lstm_layer_backward = _aten.mkldnn_rnn_layer_backward.default
"""Its derivative."""

embedding_bag = _aten._embedding_bag.default
"""Sums of rows of a table: the sums, the bag of each index, the size of each bag, and where maxima are."""

embedding_bag_backward = _aten._embedding_bag_backward.default
"""Its derivative, of the gradient, the indices, the offsets and those notes."""

attention_of_the_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
"""The fused attention of the CPU: the output, and the logarithm of a sum for each row."""

attention_of_the_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its derivative."""

attention_of_accelerators = _aten._scaled_dot_product_efficient_attention
"""A fused attention of CUDA that takes masks and dropout: the same, and the state of its draws."""

flash_attention = _aten._scaled_dot_product_flash_attention
"""Another one, for half precision and without masks: the same, and for what it was given in which order."""

attention_of_cudnn = _aten._scaled_dot_product_cudnn_attention
"""That of cuDNN, for half precision."""

attention_written_out = _aten._scaled_dot_product_attention_math
"""Attention by products and a softmax: the output, and the weights."""

grouped_product = _aten._grouped_mm.default
"""A product of matrices for each group of rows, of columns, or of what is summed over."""


_UNDER_WAY = threading.Lock()
_open: list[Any] = []  # for each context that is open, the library of these kernels: all have the same


@contextlib.contextmanager
def whole_without_data() -> Iterator[None]:
    """Context in which no operation is taken apart on the device "meta" that has kernels of its own on the others.

    That is the derivative of `mish`: PyTorch has a kernel of it for each device with data, and none that tells shapes.
    It holds for all threads, on that device.
    """
    with _UNDER_WAY:
        _open.append(_open[0] if _open else _kernels_without_data())
    try:
        yield
    finally:
        with _UNDER_WAY:
            kernels = _open.pop()
            if not _open:
                kernels._destroy()


def _kernels_without_data() -> Any:
    library: Any = torch.library.Library("aten", "IMPL")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mish_backward", "Meta"):
        library.m.impl("mish_backward", "Meta", lambda gradient, given: torch.empty_like(given))
    return library


def overload_names(qualified: str) -> set[str]:
    """Which overloads there are of an operation such as "aten::add"; none where nobody has registered it.

    `torch.ops` makes a namespace of every name that it is asked for.
    """
    return {schema.overload_name or "default" for schema in _C._jit_get_schemas_for_operator(qualified)}


def parsed_schema(text: str) -> Any:
    """The schema that PyTorch prints as this text."""
    return _C.parse_schema(text)


def is_composite(operation: OpOverload) -> bool:
    """Whether the operation is made of others for every device, which autograd differentiates in its place.

    `OpOverload` has a method for that, which asks for a key by a class that is private, too.
    """
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd"))
