"""Autocast of tensors without data: PyTorch casts by the device that holds a tensor, and these are on none.

Which functions cast, and how, is PyTorch's documentation of `torch.amp`, "Autocast Op Reference": the lists of the CPU
and those of CUDA, which are taken for every accelerator. Whether autocast is on is asked of PyTorch, so that regions
which forward opens and closes count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rkgb.process.autocast import Autocast, autocast_kinds
from rkgb.tree import leaves, map_leaves

_HALF = {torch.float16, torch.bfloat16}
_PRODUCTS = frozenset(
    """matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm linear einsum chain_matmul multi_dot linalg_multi_dot
    multi_head_attention_forward lstm gru rnn_tanh rnn_relu
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention""".split()
)
_LOSSES = frozenset(
    """binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss hinge_embedding_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss poisson_nll_loss smooth_l1_loss
    soft_margin_loss triplet_margin_loss""".split()
)
_MORE_PRODUCTS_ON_ACCELERATORS = frozenset("addmv addr mv prelu".split())
_WHOLE_ON_ACCELERATORS = _LOSSES | frozenset(
    """__pow__ __rpow__ __rtruediv__ __rdiv__ acos asin cdist cosh cosine_similarity cumprod cumsum dist erfinv exp
    expm1 group_norm layer_norm log log10 log1p log2 log_softmax norm normalize pdist pow prod reciprocal renorm
    rms_norm rsqrt sinh softmax softmin softplus sum tan""".split()
)
_WHOLE_ON_THE_CPU = _LOSSES | frozenset(
    """adaptive_avg_pool3d avg_pool3d binary_cross_entropy cdist cholesky grid_sample huber_loss inverse max_pool3d
    nanquantile pinverse polar prod quantile stft trace view_as_complex""".split()
)
_BY_TYPE = frozenset("softmax log_softmax cumprod cumsum prod sum".split())  # where one is said, it is that
_WIDEST_ON_ACCELERATORS = frozenset(
    """addcdiv addcmul atan2 bilinear cat concat concatenate cross dot grid_sample index_put scatter_add stack
    tensordot""".split()
)
_WIDEST_ON_THE_CPU = frozenset("cat concat concatenate index_copy stack".split())


class Casts:
    """What autocast makes of the arguments of a function, for a machine of that kind."""

    def __init__(self, dtype: torch.dtype | None, *, is_accelerator: bool) -> None:
        """Autocast is turned on for `dtype`; without one, it is as it is around."""
        self._on = None if dtype is None else Autocast((("cuda" if is_accelerator else "cpu", dtype),))
        self._kinds = tuple(kind for kind in autocast_kinds() if (kind != "cpu") is is_accelerator)
        self._products = _PRODUCTS | (_MORE_PRODUCTS_ON_ACCELERATORS if is_accelerator else frozenset())
        self._whole = _WHOLE_ON_ACCELERATORS if is_accelerator else _WHOLE_ON_THE_CPU
        self._widest = _WIDEST_ON_ACCELERATORS if is_accelerator else _WIDEST_ON_THE_CPU
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with the weight, which so lives on

    def arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Those that the function computes with."""
        to = next((torch.get_autocast_dtype(kind) for kind in self._kinds if torch.is_autocast_enabled(kind)), None)
        if to is None:
            self._weights.clear()
            return args, kwargs
        name, given = getattr(func, "__name__", ""), leaves((args, kwargs))
        dtype = None if name in _BY_TYPE and kwargs.get("dtype") is not None else self._type_for(name, given, to)
        if dtype is None:
            return args, kwargs
        cast = {id(tensor): self._cast(tensor, dtype) for tensor in given}  # each once: attention looks who is whom
        made: tuple[Any, Any] = map_leaves(lambda tensor: cast[id(tensor)], (args, kwargs))
        return made

    def _type_for(self, name: str, given: Iterable[torch.Tensor], to: torch.dtype) -> torch.dtype | None:
        if name in self._products:
            return to
        if name in self._whole:
            return torch.float32
        if name in self._widest:
            types = {tensor.dtype for tensor in given if tensor.is_floating_point()}
            return torch.float32 if torch.float32 in types and types & _HALF else None
        return None

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Double precision stays as it is. Weights are cast once, as long as autocast is on."""
        if tensor.dtype is dtype or (tensor.dtype is not torch.float32 and tensor.dtype not in _HALF):
            return tensor
        is_kept = dtype in _HALF and tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()
        if not is_kept:
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Context of what computes under autocast."""
        try:
            with (self._on or Autocast.now()).entered():
                yield
        finally:
            self._weights.clear()
