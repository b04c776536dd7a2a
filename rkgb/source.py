"""Where in the user's code something happens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
OWN_FOLDER = str(Path(__file__).parent)  # its files stand between torch's tracers and the user's module


def caller_is_torch(depth: int) -> bool:
    """Whether the frame that many calls above is torch's own, or this package's."""
    return sys._getframe(depth + 1).f_code.co_filename.startswith((_TORCH, OWN_FOLDER))


def python_location() -> str:
    """``file.py:12`` of the innermost frame outside of torch and of this package; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    fallback = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN_FOLDER):
            place = f"{file.rsplit('/', maxsplit=1)[-1]}:{frame.f_lineno}"
            if not file.startswith(_TORCH):
                # Below the call of a module made of torch's own there is no line of the user's but this one.
                return place
            fallback = fallback or place
        frame = frame.f_back
    return fallback
