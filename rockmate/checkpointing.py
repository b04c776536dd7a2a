"""Models' own checkpointing: what libraries build in to save memory. A plan takes its place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rockmate.errors import CheckpointingWarning

# Attributes of modules that switch it on: of transformers and Lightning's models, of timm, of Swin and its descendants.
CHECKPOINTING_FLAGS = frozenset({"gradient_checkpointing", "grad_checkpointing", "use_checkpoint"})
_SHOWN = 3  # submodules named in a message


class OwnCheckpointing:
    """The switches of a module's own checkpointing. Planned steps run without it: the plan recomputes instead."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._name = type(module).__name__
        self._switches = [
            (path or "(root)", submodule, flag)
            for path, submodule in (module.named_modules() if isinstance(module, torch.nn.Module) else ())
            for flag in CHECKPOINTING_FLAGS
            if isinstance(getattr(submodule, flag, None), bool)
        ]
        self._told = False

    def tell(self) -> None:
        """Warn once, by `CheckpointingWarning`, where it is on."""
        if self._told:
            return
        on = [(path, flag) for path, submodule, flag in self._switches if getattr(submodule, flag)]
        if not on:
            return
        self._told = True
        places = ", ".join(repr(path) for path, _ in on[:_SHOWN]) + (", …" if len(on) > _SHOWN else "")
        warnings.warn(
            f"{self._name} has its own checkpointing switched on ({on[0][1]} of {places}). Planned steps run without "
            "it: the plan chooses what is recomputed, within the budget. Switch it off to silence this: "
            "model.gradient_checkpointing_disable(), or leave gradient_checkpointing out of the trainer's arguments.",
            CheckpointingWarning,
            stacklevel=4,
        )

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Plan inside: fractions of a budget are then of the peak without it. Its switches are put back."""
        kept: list[tuple[dict[str, Any], str, bool, Any]] = []
        for _, submodule, flag in self._switches:
            values = vars(submodule)
            kept.append((values, flag, flag in values, values.get(flag)))  # the class may hold the default
        try:
            for _, submodule, flag in self._switches:
                if getattr(submodule, flag):
                    vars(submodule)[flag] = False
            yield
        finally:
            for values, flag, was_there, value in kept:
                if was_there:
                    values[flag] = value
                else:
                    values.pop(flag, None)


@contextlib.contextmanager
def without_own_checkpointing(module: torch.nn.Module) -> Iterator[None]:
    """Plan `module` inside: warns by `CheckpointingWarning` where its own checkpointing is on, and switches it off."""
    own = OwnCheckpointing(module)
    own.tell()
    with own.switched_off():
        yield
