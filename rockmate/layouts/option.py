"""In which layout a plan has the weights of convolutions: what was chosen, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rockmate.errors import LayoutError

Layout = Literal["as given", "channels_last", "auto"]
"""Which layout the weights of convolutions are to have."""

LAYOUTS: tuple[str, ...] = get_args(Layout)


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Convolutions with what lies between them: a part of the model that has one layout."""

    weights: tuple[str, ...]  # parameters, by their paths in the module
    operations: int  # how many read or make its tensors
    channels_last: bool  # what was chosen
    given_ms: float | None = None  # of its forward and backward, all kept; None where nobody measured
    channels_last_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """Its time in channels_last over that as given."""
        if self.given_ms is None or self.channels_last_ms is None:
            return None
        return self.channels_last_ms / self.given_ms if self.given_ms > 0 else 1.0


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """The layout of each region of a model."""

    regions: tuple[RegionLayout, ...] = ()
    refused: str = ""  # why channels_last is not to be had, where it is not
    step_ratio: float | None = None  # of an eager step's time so over that as given; None where nobody measured

    @property
    def weights(self) -> tuple[str, ...]:
        """Parameters that are in channels_last, by their paths in the module."""
        return tuple(path for region in self.regions if region.channels_last for path in region.weights)

    @property
    def name(self) -> str:
        """What the model has: "channels_last", if only in a part of it, or "as given"."""
        return "channels_last" if self.weights else "as given"

    @property
    def told(self) -> str:
        """Why, or where and what that gains, in words."""
        chosen = [region for region in self.regions if region.channels_last]
        if not chosen:
            return self.refused or ("it is no faster in channels_last" if self.regions else "")
        of_all = sum(len(region.weights) for region in self.regions)
        count = sum(len(region.weights) for region in chosen)
        noun = "convolution" if of_all == 1 else "convolutions"
        which = f"{count} {noun}" if count == of_all else f"{count} of {of_all} {noun}"
        if self.step_ratio is not None:
            return f"{which}: steps without a plan take {self.step_ratio:.2f} of their time as given"
        given_ms = sum(region.given_ms or 0.0 for region in chosen)
        if not given_ms:
            return which
        share = sum(region.channels_last_ms or 0.0 for region in chosen) / given_ms
        return f"{which}, at {share:.2f} of their time as given"

    def __str__(self) -> str:
        if self.weights:
            return f"{self.name} in {self.told}"
        return f"{self.name}, as {self.told}" if self.told else self.name


def check_layout(layout: object) -> None:
    """Raise `LayoutError` for what is no layout."""
    if layout not in LAYOUTS:
        raise LayoutError(
            f'layout is {layout!r}; say "as given" to leave it alone, "channels_last", or "auto" for whichever is '
            "measured to be faster."
        )
