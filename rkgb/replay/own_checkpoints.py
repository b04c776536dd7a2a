"""Checkpoints of a model's own that recompute with other random numbers than they computed with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpoints

from rkgb.source import python_location
from rkgb.torch_private.modules import CHECKPOINT_GENERATOR


@contextlib.contextmanager
def random_numbers_restored() -> Iterator[list[str]]:
    """Meanwhile every `torch.utils.checkpoint` restores random numbers; yields where one did not want to."""
    places: list[str] = []
    plain: Any = vars(checkpoints)
    before = {name: plain[name] for name in ("CheckpointFunction", CHECKPOINT_GENERATOR) if name in plain}

    def restoring(apply: Callable[..., Any]) -> Callable[..., Any]:
        def called(function: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
            if not preserve:
                places.append(python_location())
            return apply(function, True, *args, **kwargs)

        return called

    class Reentrant:
        apply = staticmethod(restoring(lambda *args: before["CheckpointFunction"].apply(*args)))

    try:
        plain["CheckpointFunction"] = Reentrant
        if CHECKPOINT_GENERATOR in before:
            plain[CHECKPOINT_GENERATOR] = restoring(before[CHECKPOINT_GENERATOR])
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
