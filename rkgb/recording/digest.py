"""Digests of what a module computes, by which two runs of it are compared without keeping either."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from rkgb.ir.opaque import Interception, OpaqueModules
from rkgb.ir.sample import Sample
from rkgb.recording.record import Recorder, recording
from rkgb.recording.untraced import untraced
from rkgb.tree import leaves


class _Digesting(Recorder):
    """Takes the digest of every result."""

    def __init__(self, module: torch.nn.Module, sample: Sample) -> None:
        super().__init__(module, sample)
        self.digests: set[bytes] = set()

    def noted(self, tensors: list[torch.Tensor]) -> None:
        self.digests.update(digest(tensor) for tensor in tensors)


def computed_digests(module: torch.nn.Module, sample: Sample, opaque: Iterable[str] = ()) -> set[bytes]:
    """Digests of all that `module` computes on `sample`, of the arguments too. Submodules at `opaque` run whole."""
    recorder = _Digesting(module, sample)
    given = {digest(tensor) for tensor in (*sample.tensors, *module.parameters(), *module.buffers())}

    def called(_: str, submodule: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with untraced():
            output = submodule(*args, **kwargs)
        recorder.noted(leaves(output))
        return output

    whole = OpaqueModules(module, [module.get_submodule(path) for path in opaque])
    with recording(recorder, frugal=False), Interception(whole, called).on():
        sample.call(module)
    return recorder.digests | given


def digest(tensor: torch.Tensor) -> bytes:
    """Equal for tensors of the same elements, whatever their shape."""
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()
