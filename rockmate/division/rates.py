"""What computing a node again takes, roughly: products by their operations, all else by the bytes that move.

What decides is how the two compare on a device, so two short runs measure that, once in a process.
"""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from functools import cache

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from rkgb.devices.registry import device_of
from rkgb.torch_private.modes import without_dispatch_modes
from rkgb.tree import map_leaves
from rockmate.division.joint import bytes_of, is_fused, is_view, size_of, tensors_of

_SIDE = 512  # of the matrices whose product is timed
_COPIED_BYTES = 1 << 25
_RUNS = 3
_FUSED_SHARE = 0.5  # of what its bytes take: a joined loop reads or writes, and seldom both


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a millisecond."""

    operations: float  # of products, in floating point
    bytes: float  # read and written

    def time_ms(self, node: Node) -> float:
        """What `node` takes."""
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            return 0.0
        moved_bytes = bytes_of(node)
        if is_fused(node):
            return _FUSED_SHARE * moved_bytes / self.bytes
        moved_bytes += sum(bytes_of(dep) for dep in node.all_input_nodes)
        return moved_bytes / self.bytes + _operations(node) / self.operations


def _operations(node: Node) -> int:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda dep: map_leaves(_sized, dep.meta["val"]))
    try:
        return int(count(*args, **kwargs, out_val=map_leaves(_sized, node.meta["val"])))
    except (TypeError, ValueError, AssertionError, NotImplementedError):
        return 0  # a form of the operation that nobody counts


def _sized(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the sizes of `tensor`, which are mere numbers."""
    return torch.empty([size_of(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


@cache
def rates_of(device: torch.device) -> Rates:
    """What `device` does with the threads that it has now, measured; not exact, as it need not be."""
    kind = device_of(device)

    def least_ms(run: object) -> float:
        assert callable(run)
        run()
        times = []
        for _ in range(_RUNS):
            kind.synchronize()
            started = time.perf_counter()
            run()
            kind.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        return max(min(times), 1e-6)

    # The compiler asks while tensors are not real.
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        matrix = torch.ones(_SIDE, _SIDE, device=device)
        copied = torch.ones(_COPIED_BYTES // 4, device=device)
        product_ms = least_ms(lambda: matrix @ matrix)
        copy_ms = least_ms(copied.clone)
    return Rates(2 * _SIDE**3 / product_ms, 2 * _COPIED_BYTES / copy_ms)


def main_device_of(nodes: list[Node]) -> torch.device:
    """Where most of the bytes of `nodes` are."""
    found: dict[torch.device, int] = {}
    for node in nodes:
        for tensor in tensors_of(node):
            found[tensor.device] = found.get(tensor.device, 0) + bytes_of(node)
    return max(found, key=lambda device: found[device], default=torch.device("cpu"))
