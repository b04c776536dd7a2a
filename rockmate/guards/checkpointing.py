"""Models' own checkpointing: what libraries build in to save memory. A plan takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

# Attributes of modules that switch it on: of transformers and Lightning's models, of timm, of Swin and its descendants.
CHECKPOINTING_FLAGS = frozenset({"gradient_checkpointing", "grad_checkpointing", "use_checkpoint"})
_SHOWN = 3  # submodules named in a message
_switched_off: ContextVar[tuple[tuple[torch.nn.Module, str], ...]] = ContextVar("rockmate_switched_off", default=())


def is_switched_off() -> bool:
    """Whether checkpointing that the user has on is off here."""
    return bool(_switched_off.get())


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Within `OwnCheckpointing.switched_off`: checkpointing as the user has it, for a step as training runs it now."""
    on = _switched_off.get()
    try:
        for submodule, flag in on:
            vars(submodule)[flag] = True
        yield
    finally:
        for submodule, flag in on:
            vars(submodule)[flag] = False


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
            "it: the plan chooses what is recomputed, within the budget; a fraction is of what a step takes with it. "
            "Switch it off to silence this: model.gradient_checkpointing_disable(), or leave gradient_checkpointing "
            "out of the trainer's arguments."
        )

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Plan inside: what is traced and measured is without it, but within `as_it_was`. Its switches are put back."""
        kept: list[tuple[dict[str, Any], str, bool, Any]] = []
        for _, submodule, flag in self._switches:
            values = vars(submodule)
            kept.append((values, flag, flag in values, values.get(flag)))  # the class may hold the default
        on = tuple((submodule, flag) for _, submodule, flag in self._switches if getattr(submodule, flag))
        token = _switched_off.set(on or _switched_off.get())
        try:
            for submodule, flag in on:
                vars(submodule)[flag] = False
            yield
        finally:
            _switched_off.reset(token)
            for values, flag, was_there, value in kept:
                if was_there:
                    values[flag] = value
                else:
                    values.pop(flag, None)
