"""Plans that come with the package: for models of `rockmate.zoo`, at several parts of their eager peak.

``benchmarks/schedule_zoo.py`` made them, on the device that each one names. On another, or with another PyTorch,
their decisions are followed, and costs measured anew.
"""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from rockmate.errors import PlanFileError
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.files import loads, unpacked


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that comes with the package; times are predicted, but for `seconds`."""

    name: str  # the model's, and the share
    model: str  # a name of `rockmate.zoo`
    share: float  # of the eager peak: the budget
    budget_bytes: int
    peak_bytes: int | None  # measured; None where no plan was found for that budget
    eager_peak_bytes: int
    overhead: float | None  # extra time relative to eager: 0.11 is +11 %
    gap: float | None  # how much of the time a better plan could save at most
    recomputations: int | None
    solver: str | None
    seconds: float | None  # that planning took
    smallest_budget_bytes: int | None = None  # where no plan was found: the smallest that was
    device: str
    torch: str

    @property
    def exists(self) -> bool:
        """Whether a plan was found for that budget."""
        return self.peak_bytes is not None

    def load(self) -> PlanFile:
        """The plan, checked. Raises `PlanFileError` where there is none, or the package is damaged."""
        if not self.exists:
            raise PlanFileError(
                f"no plan was found for {self.model} within {self.share:.0%} of its eager peak; the smallest budget "
                f"that was found is {self.smallest_budget_bytes} bytes."
            )
        return loads(unpacked(folder().joinpath(f"{self.name}.json.gz").read_bytes()))


def entries() -> tuple[StoredPlan, ...]:
    """All of them, those without a plan included, model by model, the largest budget first."""
    index = folder().joinpath("index.json")
    if not index.is_file():
        return ()
    content = json.loads(index.read_text(encoding="utf-8"))
    return tuple(msgspec.convert(content["plans"], list[StoredPlan]))


def get(model: str, share: float) -> PlanFile:
    """The plan for `model` of the largest budget that is at most `share` of its eager peak.

    Raises `PlanFileError`, which tells what there is, where there is none.
    """
    there = [entry for entry in entries() if entry.model == model and entry.exists]
    fitting = [entry for entry in there if entry.share <= share]
    if not fitting:
        known = ", ".join(f"{entry.share:.2f}" for entry in there) or "nothing"
        raise PlanFileError(f"no plan for {model!r} within {share:.2f} of its eager peak is stored; there is {known}.")
    return max(fitting, key=lambda entry: entry.share).load()


def folder() -> Traversable:
    """Where they are: package data."""
    return files("rockmate.zoo").joinpath("plans")
