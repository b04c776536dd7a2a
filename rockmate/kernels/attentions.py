"""Kernels of attention beside the one that PyTorch picks: those of the device that the user lets PyTorch have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rkgb import DGraph, DNode
from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, Ref
from rkgb.kernels.attention import IS_ON
from rkgb.torch_private.operations import (
    attention_of_accelerators,
    attention_of_cudnn,
    attention_of_the_cpu,
    flash_attention,
)
from rockmate.kernels.alternative import Alternative, given

_attention = torch.ops.rkgb.attention.default
_BY_RULE = torch.ops.aten.scaled_dot_product_attention.default

# What stands in a graph, and the kernel that it is.
_KERNELS: Mapping[Any, str] = {
    flash_attention.default: "flash",
    attention_of_the_cpu.default: "flash of the CPU",
    attention_of_accelerators.default: "memory-efficient",
    attention_of_cudnn.default: "cuDNN",
}
_SAID = {
    "flash": "attentions by flash kernels",
    "flash of the CPU": "attentions by flash kernels",
    "memory-efficient": "attentions by memory-efficient kernels",
    "cuDNN": "attentions by cuDNN",
    "written out": "attentions by products and a softmax",
}
_WITHOUT_MASKS = frozenset({"flash"})
_OF_EQUAL_HEADS = frozenset({"memory-efficient"})  # the keys of several queries are not taken


def is_attention(op: DNode) -> bool:
    """Whether it is an attention by one kernel, or by PyTorch's choice among them."""
    return op.call.function is _BY_RULE or op.call.function in _KERNELS


def attentions(graph: DGraph, op: DNode) -> tuple[Alternative, ...]:
    """The same attention by the other kernels of its device; none where it draws a dropout, as kernels draw otherwise.

    What a kernel notes for its backward must be of use for that alone.
    """
    query, key, value, mask, bias = given(op.call, "query", "key", "value", "attn_mask", "attn_bias")
    mask = bias if mask is None else mask
    dropout, is_causal, scale, shares = given(op.call, "dropout_p", "is_causal", "scale", "enable_gqa")
    if dropout or op.is_random or op.call.sizes or not all(isinstance(one, Ref) for one in (query, key, value)):
        return ()
    infos = [graph.values[one.name] for one in (query, key, value)]
    if any(len(info.shape) != 4 for info in infos) or _are_read(graph, op.output_names[1:]):
        return ()
    if mask is not None and op.tracks(mask.name, graph.values):
        return ()
    heads, heads_of_keys = (info.shape[1] for info in infos[:2])
    shares = bool(shares) or heads != heads_of_keys
    found = []
    for kernel in device_of(infos[0].device).attentions:
        fits = (mask is None or kernel not in _WITHOUT_MASKS) and not (shares and kernel in _OF_EQUAL_HEADS)
        if fits and kernel != _KERNELS.get(op.call.function) and IS_ON[kernel]():
            args = (query, key, value, mask, bool(is_causal), scale, shares, kernel)
            call = Call(_attention, args, sizes=op.call.sizes)
            found.append(Alternative(_SAID[kernel], call, mask="" if mask is None else mask.name))
    return tuple(found)


def _are_read(graph: DGraph, names: list[str]) -> bool:
    return any(name in op.inputs for op in graph for name in names) or not set(names).isdisjoint(graph.output_names)
