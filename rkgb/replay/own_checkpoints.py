"""Checkpoints of a model's own that recompute with other random numbers than they computed with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch.utils.checkpoint as checkpoints

from rkgb.source import python_location
from rkgb.torch_private.modules import CHECKPOINT_GENERATOR

_PRESERVE = "preserve_rng_state"  # with or without a place among the positional arguments


@contextlib.contextmanager
def random_numbers_restored() -> Iterator[list[str]]:
    """Meanwhile every `torch.utils.checkpoint` restores random numbers; yields where one did not want to."""
    places: list[str] = []
    plain: Any = vars(checkpoints)
    before = {name: plain[name] for name in ("CheckpointFunction", CHECKPOINT_GENERATOR)}
    signature = inspect.signature(before[CHECKPOINT_GENERATOR])

    def preserving(preserve: bool) -> bool:
        if not preserve:
            places.append(python_location())
        return True

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return before["CheckpointFunction"].apply(function, preserving(preserve), *args)

    def not_reentrant(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments[_PRESERVE] = preserving(given.arguments.get(_PRESERVE, True))
        return before[CHECKPOINT_GENERATOR](*given.args, **given.kwargs)

    try:
        plain["CheckpointFunction"] = Reentrant
        plain[CHECKPOINT_GENERATOR] = not_reentrant
        yield places
    finally:
        plain.update(before)


def told_of_other_numbers(place: str) -> str:
    """What to tell of such a checkpoint where it draws random numbers."""
    return (
        f"the checkpoint at {place} does not restore random numbers (preserve_rng_state=False): the module's own "
        "backward is that of other random numbers than its forward drew. A planned step has the gradients of the "
        "numbers that the forward drew, as without checkpointing: these differ from those of the module as given. "
        "Leave preserve_rng_state out, or leave out the checkpoint, which a plan does without."
    )
