"""Which objects of C++ stand behind Python's, of which PyTorch makes new ones as it likes.

Public ways compare two at a time, or tell addresses of data, which empty storages have none of.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from rkgb.torch_private.asked import nobody_asked


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage. Another storage may have it as soon as this one is gone."""
    return tensor.untyped_storage()._cdata


def generator_key(generator: Any) -> int:
    """Equal for all Python objects of one random generator."""
    return int(generator._cdata)


# ---- how many hold a tensor's memory -----------------------------------------------------------------------
# PyTorch counts holders in C++; its own code for graphs of CUDA asks in the same way.


def _counts(tensor: torch.Tensor) -> tuple[int, int, int]:
    with nobody_asked():
        storage = tensor.untyped_storage()
        in_cpp: int = torch._C._storage_Use_Count(storage._cdata)
        return in_cpp, sys.getrefcount(storage), torch.Tensor._use_count(tensor)  # type: ignore[attr-defined]


def _of_nobody_else() -> tuple[int, int, int]:
    alone = torch.empty(1)
    return _counts(alone)


_ALONE = _of_nobody_else()  # Python's versions count differently


def is_only_holder(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor` has its storage, and nothing in C++ reads `tensor`: no view, no array, no graph.

    Of a parameter that trains, one more in C++ is where its gradient is accumulated, which does not read it: whatever
    else of a graph has it keeps that, too.
    """
    with nobody_asked():
        can_be_freed = tensor.untyped_storage().resizable()
        in_cpp, in_python, tensors = _counts(tensor)
        tensors -= tensor.requires_grad and tensor.is_leaf
    return can_be_freed and all(map(int.__le__, (in_cpp, in_python, tensors), _ALONE))


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the storage of `tensor`, and how many hold it: to be compared with what one gets for another."""
    with nobody_asked():
        storage = tensor.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), torch.Tensor._use_count(tensor)  # type: ignore[attr-defined]
