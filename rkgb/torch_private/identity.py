"""Which objects of C++ stand behind Python's, of which PyTorch makes new ones as it likes.

Public ways compare two at a time, or tell addresses of data, which empty storages have none of.
"""

from __future__ import annotations

from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage. Another storage may have it as soon as this one is gone."""
    return tensor.untyped_storage()._cdata


def generator_key(generator: Any) -> int:
    """Equal for all Python objects of one random generator."""
    return int(generator._cdata)
