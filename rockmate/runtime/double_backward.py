"""What is told of a backward whose own graph is wanted: it holds more than a plan counts."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

from rockmate.errors import DoubleBackwardWarning

_OWN_CODE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__)


class DoubleBackward:
    """Tells once of a module that a backward with `create_graph=True` goes through it.

    Steps hold this object and not the module's plans: an autograd graph in one of its attributes would hold itself.
    """

    __slots__ = ("_name", "is_told")

    def __init__(self, module: torch.nn.Module) -> None:
        self._name = type(module).__name__
        self.is_told = False

    def tell(self) -> None:
        """Warn, where this is the first time."""
        if self.is_told:
            return
        self.is_told = True
        warnings.warn(
            f"a backward with create_graph=True goes through {self._name}, and what its plan recomputes is kept for "
            "the second backward. The values are exact, but the budget bounds ordinary steps: this one may take more. "
            "Where the memory does not suffice, take the inner gradient in forward (torch.autograd.grad with "
            "create_graph=True, on what forward computes), and return what the loss needs of it: a plan counts it "
            "there. Or plan only the part of the model that the inner gradient does not go through.",
            DoubleBackwardWarning,
            stacklevel=frames_to_the_user(),
        )


def frames_to_the_user() -> int:
    """How many calls above the caller there is code that is neither ours nor torch's, as `warnings.warn` counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame, level = frame.f_back, level + 1
    return level
