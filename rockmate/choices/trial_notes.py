"""What was found of operations that ran in two ways, in the user's cache."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import torch

from rkgb.state.module_state import main_device, module_devices
from rockmate.plan_files import cache
from rockmate.plan_files.record import made_here
from rockmate.plan_files.reuse import code_digest, digest_of

Trial = TypeVar("Trial")


class TrialNotes(Generic[Trial]):
    """Of classes of regions or of operations of `model`, by a digest of each: what was measured here."""

    def __init__(self, model: torch.nn.Module, kind: type[Trial]) -> None:
        self._kind = kind
        self._here = msgspec.to_builtins(made_here(main_device(module_devices(model, []))))

    def _key(self, digest: str) -> str:
        return digest_of([self._kind.__name__, digest, self._here, code_digest()])

    def get(self, digest: str) -> Trial | None:
        """What was found of that class; None where it was not tried yet."""
        return cache.get_note(self._key(digest), self._kind)

    def put(self, digest: str, trial: Trial) -> None:
        """Keep what was found."""
        cache.put_note(self._key(digest), msgspec.json.encode(trial).decode())
