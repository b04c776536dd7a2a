"""Where in the user's code something happens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
CALLER = str(Path(__file__).parent / "ir" / "sample.py")  # calls the module: what called that is not the model's code
OWN_FOLDER = str(Path(__file__).parent)  # its files stand between torch's tracers and the user's module


def caller_is_torch(depth: int) -> bool:
    """Whether the frame that many calls above is torch's own, or this package's."""
    return sys._getframe(depth + 1).f_code.co_filename.startswith((_TORCH, OWN_FOLDER))


def opaque_advice(place: str) -> str:
    """How the code at `place`, as `Source` tells places, can become a part of one operation of the graph."""
    path = place.split(" ")[0]
    if path == "(root)":
        return "move the code there into a submodule, and let its call be one operation (opaque=[it])"
    return f"let the call of the submodule be one operation: opaque=[model.get_submodule({path!r})]"


def python_location() -> str:
    """``file.py:12`` of the innermost frame of the user's model; empty where all its code is torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == CALLER:
            break
        if not file.startswith((OWN_FOLDER, _TORCH)):
            return f"{file.rsplit('/', maxsplit=1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
