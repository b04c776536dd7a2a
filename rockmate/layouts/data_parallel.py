"""Whether DistributedDataParallel holds a module: then its weights stay as they lie.

It notes the strides of parameters when it is made, and its buckets lie so: with weights that lie otherwise since, the
gradients that it hands out are wrong (PyTorch 2.13), and other ranks may have them as they were.
"""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel

HELD = "DistributedDataParallel holds it, which has noted how its parameters lie: plan the model before, with a sample"


def is_held(module: torch.nn.Module) -> bool:
    """Whether a DistributedDataParallel of several ranks holds a parameter of `module`."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    ours = {id(parameter) for parameter in module.parameters()}
    holders = (found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))
    return any(id(parameter) in ours for holder in holders for parameter in holder.parameters())
