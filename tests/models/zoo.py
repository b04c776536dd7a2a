"""Every kind of model that must be traced exactly: `build(name)` gives the same model each time."""

from __future__ import annotations

import torch

from tests.models.factories import Factories, Model
from tests.models.hand_written import HAND_WRITTEN
from tests.models.hugging_face import HUGGING_FACE
from tests.models.mechanisms import MECHANISMS
from tests.models.values import VALUES

GROUPS: tuple[Factories, ...] = (HAND_WRITTEN, MECHANISMS, VALUES, HUGGING_FACE)
MODELS: Factories = {name: factory for group in GROUPS for name, factory in group.items()}
assert len(MODELS) == sum(map(len, GROUPS)), "two models of the zoo have one name"


def build(name: str, seed: int = 0) -> Model:
    """The module, in training mode, with the arguments of one call; the caller's random stream stays where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, args, kwargs = MODELS[name]()
    return module.train(), args, kwargs
