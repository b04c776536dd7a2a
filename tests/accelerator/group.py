"""A group of ranks, each with a test accelerator of its own: collectives run on the host, by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from tests.accelerator.device import device as accelerator_device
from tests.distributed import ranks

NAME = "testacc-group"


class Group(distributed.ProcessGroup):
    """Copies to the host, lets gloo do it, and copies back. Each call is done when it returns.

    Some names of collectives are those of earlier versions of PyTorch.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size, self._rank = size, rank
        self._gloo = torch._C._distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802  as PyTorch names it
        return NAME

    @property
    def group_name(self) -> str:
        return distributed.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, distributed.AllreduceOptions() if opts is None else opts))
        return _done(list(tensors))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            host = tensor.cpu().contiguous()
            self._gloo.broadcast([host], opts).wait()
            tensor.copy_(host)
        return _done(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for places, tensor in zip(outputs, inputs, strict=True):
            for place, found in zip(places, self._gathered(tensor), strict=True):
                place.copy_(found)
        return _done([list(places) for places in outputs])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat([found.reshape(-1) for found in self._gathered(given)]).view_as(output))
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], given: Sequence[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, given, strict=True):
            self.all_gather_single(output, tensor)
        return _done(list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.copy_(self._reduced(given, opts).reshape(self._size, -1)[self._rank].view_as(output))
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done([])

    def _reduced(self, tensor: Tensor, opts: Any) -> Tensor:
        host = tensor.detach().cpu().contiguous().clone()
        is_mean = opts.reduceOp == ReduceOp.AVG  # which gloo lacks
        asked = distributed.AllreduceOptions()
        asked.reduceOp = ReduceOp.SUM if is_mean else opts.reduceOp
        self._gloo.allreduce([host], asked).wait()
        return host / self._size if is_mean else host

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        host = tensor.detach().cpu().contiguous()
        found = [torch.empty_like(host) for _ in range(self._size)]
        self._gloo.allgather([found], [host]).wait()
        return found


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def begin(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """In a rank's process: its device, before autograd is first used, and the group."""
    accelerator_device()
    torch.accelerator.set_device_index(rank)
    ranks.PLACE = torch.device("testacc", rank)
    creator: Callable[..., Group] = lambda store, rank, size, timeout: Group(store, rank, size, timeout)  # noqa: E731
    distributed.Backend.register_backend(NAME, creator, devices=["cpu", "testacc"])
    distributed.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=timeout)
