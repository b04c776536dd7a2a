"""The state of autocast in a thread: noted where something is called, and entered again where it is repeated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rkgb.torch_private.flags import extension_kind

Regions = tuple[tuple[str, torch.dtype], ...]

# Kinds of devices that PyTorch has autocast for, and what they cast to where nobody has said otherwise: only what
# differs from these is noted. A version of PyTorch with another default has it noted each time.
_DEFAULTS: Mapping[str, torch.dtype] = {
    "cpu": torch.bfloat16,
    "cuda": torch.float16,
    "hpu": torch.bfloat16,
    "maia": torch.bfloat16,
    "mps": torch.float16,
    "mtia": torch.float16,
    "privateuseone": torch.float16,
    "xla": torch.bfloat16,
    "xpu": torch.float16,
}


def autocast_kinds() -> tuple[str, ...]:
    """Those that this PyTorch has, and that of an extension, which may come at any time and under a name of its own."""
    return _kinds_with(extension_kind())


@functools.cache
def _kinds_with(private: str) -> tuple[str, ...]:
    return tuple(kind for kind in dict.fromkeys((*_DEFAULTS, private)) if torch.amp.is_autocast_available(kind))


def _default(kind: str) -> torch.dtype:
    return _DEFAULTS.get(kind, _DEFAULTS["privateuseone"])


@dataclass(frozen=True, slots=True)
class Autocast:
    """What code can see of autocast."""

    regions: Regions = ()  # kinds of devices, by name, for which it is on, and what it casts to
    off: Regions = ()  # where it is off, but a region that opens and says no type casts to this one, no default
    caches: bool = True  # whether weights that were cast are cast once

    @classmethod
    def now(cls) -> Autocast:
        """In this thread."""
        states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in autocast_kinds()]
        return cls(
            tuple((kind, dtype) for kind, dtype, is_on in states if is_on),
            tuple((kind, dtype) for kind, dtype, is_on in states if not is_on and dtype is not _default(kind)),
            torch.is_autocast_cache_enabled(),
        )

    def __str__(self) -> str:
        on = " and ".join(f"on for {kind} ({_short(dtype)})" for kind, dtype in self.regions) or "off"
        more = [f"{_short(dtype)} where it opens for {kind}" for kind, dtype in self.off]
        return ", ".join([on, *more, *([] if self.caches else ["without its cache of weights"])])

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run what is inside in this state, whatever is around it.

        `torch.autocast` would refuse a kind of device that is not there, and a type by which code has set it by hand.
        """
        before = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in autocast_kinds()]
        cached, on, off = torch.is_autocast_cache_enabled(), dict(self.regions), dict(self.off)
        torch.autocast_increment_nesting()
        try:
            for kind in autocast_kinds():
                torch.set_autocast_enabled(kind, kind in on)
                torch.set_autocast_dtype(kind, on.get(kind) or off.get(kind) or _default(kind))
            torch.set_autocast_cache_enabled(self.caches)
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            for kind, dtype, is_on in before:
                torch.set_autocast_enabled(kind, is_on)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(cached)


OFF = Autocast()
"""As in a program that never used it."""


def autocast(
    *, off: Mapping[str, torch.dtype] | None = None, caches: bool = True, **regions: torch.dtype
) -> contextlib.AbstractContextManager[None]:
    """Context with autocast on for just these kinds of devices, as generated code writes it."""
    return Autocast(tuple(regions.items()), tuple((off or {}).items()), caches).entered()


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Run operations below autocast, whose casts were recorded as operations of their own."""
    if not Autocast.now().regions:
        yield
        return
    with OFF.entered():
        yield


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
