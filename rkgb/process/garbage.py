"""Garbage of planning: what traces leave goes in circles, and would hold a model when its user has let it go."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def own_garbage_collected() -> Iterator[None]:
    """Collect at the end what was made inside and goes in circles; what was there before is not walked through.

    A process that trains has a million objects and more, and a collection looks at all of them, for half a second.
    Meanwhile they are frozen, as `gc.freeze` calls it: collections inside take as long as what is made inside. Where
    the user has frozen objects, which cannot be told from others afterwards, collections see what they always see.
    """
    if gc.get_freeze_count():
        try:
            yield
        finally:
            gc.collect()
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
