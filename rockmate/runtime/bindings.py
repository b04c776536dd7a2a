"""PyTorch's own Python functions of operations: the same overload, with less code around it.

`torch.ops.aten.mul.Tensor` finds its arguments by a schema, at each call, and hands them on boxed; `torch.mul` has C++
of its own for that. Where other data and code go through the caches between two calls, that is up to two thirds of
what a small operation takes (benchmarks/calls.py). A name such as `torch.mul` has several overloads: those stand here
that the arguments of the overload lead to, tests/module/test_bindings.py shows of each one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rkgb.ir.call import Call, Ref
from rkgb.kernels import KERNELS
from rkgb.torch_private.operations import OpOverload
from rkgb.torch_private.operations import nn_functions as _nn
from rkgb.torch_private.operations import tensor_functions as _functions
from rkgb.torch_private.operations import tensor_methods as _methods

_aten = torch.ops.aten

BINDINGS: Mapping[OpOverload, Callable[..., Any]] = {
    # ---- views
    _aten.expand.default: _methods.expand,
    _aten.flatten.using_ints: _functions.flatten,
    _aten.permute.default: _functions.permute,
    _aten.reshape.default: _functions.reshape,
    _aten.select.int: _functions.select,
    _aten.squeeze.dim: _functions.squeeze,
    _aten.t.default: _functions.t,
    _aten.transpose.int: _functions.transpose,
    _aten.unsqueeze.default: _functions.unsqueeze,
    _aten.view.default: _methods.view,
    # ---- element by element
    _aten.add.Tensor: _functions.add,
    _aten.add_.Tensor: _methods.add_,
    _aten.bernoulli_.float: _methods.bernoulli_,
    _aten.cos.default: _functions.cos,
    _aten.exp.default: _functions.exp,
    _aten.gelu.default: _nn.gelu,
    _aten.hardtanh.default: _nn.hardtanh,
    _aten.hardtanh_.default: _nn.hardtanh_,
    _aten.mul.Tensor: _functions.mul,
    _aten.mul_.Tensor: _methods.mul_,
    _aten.neg.default: _functions.neg,
    _aten.relu.default: _functions.relu,
    _aten.relu_.default: _functions.relu_,
    _aten.rsqrt.default: _functions.rsqrt,
    _aten.sigmoid.default: _functions.sigmoid,
    _aten.silu.default: _nn.silu,
    _aten.sin.default: _functions.sin,
    _aten.sub.Tensor: _functions.sub,
    _aten.tanh.default: _functions.tanh,
    _aten.where.self: _functions.where,
    # ---- copies and allocations
    _aten.cat.default: _functions.cat,
    _aten.clone.default: _functions.clone,
    _aten.contiguous.default: _methods.contiguous,
    _aten.empty_strided.default: _functions.empty_strided,
    # ---- products, normalisations, poolings
    _aten.adaptive_avg_pool2d.default: _nn.adaptive_avg_pool2d,
    _aten.addmm.default: _functions.addmm,
    _aten.avg_pool2d.default: _nn.avg_pool2d,
    _aten.baddbmm.default: _functions.baddbmm,
    _aten.batch_norm.default: _functions.batch_norm,
    _aten.bmm.default: _functions.bmm,
    _aten.conv2d.default: _functions.conv2d,
    _aten.embedding.default: _functions.embedding,
    _aten.linear.default: _nn.linear,
    _aten.max_pool2d_with_indices.default: _nn.max_pool2d_with_indices,
    _aten.mean.dim: _functions.mean,
    _aten.mm.default: _functions.mm,
    _aten.native_batch_norm.default: _functions.native_batch_norm,
    _aten.native_group_norm.default: _functions.native_group_norm,
    _aten.native_layer_norm.default: _functions.native_layer_norm,
    _aten.softmax.int: _functions.softmax,
}


def binding(call: Call) -> Callable[..., Any] | None:
    """PyTorch's own Python function of the overload that is called, or our own; None for arguments of another one."""
    function = call.function
    if not isinstance(function, OpOverload) or function not in BINDINGS:
        return None
    taken = dict(zip((argument.name for argument in function._schema.arguments), call.args, strict=False)) | call.kwargs
    for argument in function._schema.arguments:
        # A number in a tensor's place may lead to another overload.
        given = taken.get(argument.name)
        if isinstance(argument.type, torch.TensorType) and argument.name in taken and not isinstance(given, Ref):
            return None
    return KERNELS.get(function, BINDINGS[function])
