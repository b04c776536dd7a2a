"""Models' own checkpointing: what libraries build in to save memory. A plan takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Attributes of modules that switch it on: of transformers and Lightning's models, of timm, of Swin and its descendants.
CHECKPOINTING_FLAGS = frozenset({"gradient_checkpointing", "grad_checkpointing", "use_checkpoint"})
_SHOWN = 3  # submodules named in a message


class OwnCheckpointing:
    """The switches of a module's own checkpointing. Planned steps run without it: the plan recomputes instead."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._name = type(module).__name__
        self._told = False
        self.look(module)

    def look(self, module: torch.nn.Module) -> None:
        """Find the switches: at first, and where parts were put in or out."""
        self._switches = [
            (path or "(root)", submodule, flag)
            for path, submodule in (module.named_modules() if isinstance(module, torch.nn.Module) else ())
            for flag in CHECKPOINTING_FLAGS
            if isinstance(getattr(submodule, flag, None), bool)
        ]

    def news(self) -> str | None:
        """What to tell the user where it is on, in words; None where it is not, and once it has been told."""
        if self._told:
            return None
        on = [(path, flag) for path, submodule, flag in self._switches if getattr(submodule, flag)]
        if not on:
            return None
        self._told = True
        places = ", ".join(repr(path) for path, _ in on[:_SHOWN]) + (", …" if len(on) > _SHOWN else "")
        return (
            f"{self._name} has its own checkpointing switched on ({on[0][1]} of {places}). Planned steps run without "
            "it: the plan chooses what is recomputed, within the budget. Switch it off to silence this: "
            "model.gradient_checkpointing_disable(), or leave gradient_checkpointing out of the trainer's arguments."
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
