"""Digests of what a module computes, by which two runs of it are compared without keeping either."""

from __future__ import annotations

import hashlib

import torch

from rkgb.sample import Sample
from rkgb.tracing.record import Recorder, recording


class _Digesting(Recorder):
    """Takes the digest of every result."""

    def __init__(self, module: torch.nn.Module, sample: Sample) -> None:
        super().__init__(module, sample)
        self.digests: set[bytes] = set()

    def noted(self, tensors: list[torch.Tensor]) -> None:
        self.digests.update(digest(tensor) for tensor in tensors)


def computed_digests(module: torch.nn.Module, sample: Sample) -> set[bytes]:
    """Digests of all that `module` computes on `sample`, of the arguments too."""
    recorder = _Digesting(module, sample)
    given = {digest(tensor) for tensor in (*sample.tensors, *module.parameters(), *module.buffers())}
    with recording(recorder, frugal=False):
        sample.call(module)
    return recorder.digests | given


def digest(tensor: torch.Tensor) -> bytes:
    """Equal for tensors of the same elements, whatever their shape."""
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()
