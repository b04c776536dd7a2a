"""Which parts of a model are compiled under a plan: what was measured of each, and how that is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rockmate.units import format_bytes

WORTH_IT = 0.02  # of a region's time: it is rounded otherwise, which is to buy something


@dataclass(frozen=True, slots=True)
class RegionTrial:
    """A region beside its operations one by one, forward and backward."""

    operations: tuple[str, ...]  # by their names in the graph
    eager_ms: float
    compiled_ms: float
    eager_bytes: int  # that autograd saves, parameters apart
    compiled_bytes: int
    refused: str = ""  # why it stays as it is, where that is not for its time

    @property
    def pays(self) -> bool:
        """Whether it is compiled: it takes less time, or fewer bytes in no more time."""
        if self.refused:
            return False
        if self.compiled_ms <= (1 - WORTH_IT) * self.eager_ms:
            return True
        return self.compiled_bytes < 0.9 * self.eager_bytes and self.compiled_ms <= self.eager_ms


class KnownTrials(Protocol):
    """What was found of classes of regions before, here and as PyTorch is set now."""

    def get(self, digest: str) -> RegionTrial | None:
        """What was found of that class; None where it was not tried yet."""

    def put(self, digest: str, trial: RegionTrial) -> None:
        """Keep what was found."""


@dataclass(frozen=True, slots=True)
class CompiledRegions:
    """The regions of a model that were tried."""

    trials: tuple[RegionTrial, ...] = ()
    refused: str = ""  # why nothing is compiled, where it cannot be
    seconds: float = 0.0  # of compiling and trying

    @property
    def chosen(self) -> tuple[RegionTrial, ...]:
        """Those that are compiled."""
        return () if self.refused else tuple(trial for trial in self.trials if trial.pays)

    @property
    def gained_ms(self) -> float:
        """How much less time they take compiled."""
        return sum(trial.eager_ms - trial.compiled_ms for trial in self.chosen)

    @property
    def told(self) -> str:
        """What is compiled and what that gains, or why nothing is, in words."""
        chosen = self.chosen
        failed = [trial for trial in self.trials if trial.refused]
        why = f"; {len(failed)} could not be: {failed[0].refused}" if failed else ""
        if not chosen:
            return self.refused or ("no part of it is faster compiled" + why if self.trials else "nothing to compile")
        eager_ms, compiled_ms = (sum(getattr(one, name) for one in chosen) for name in ("eager_ms", "compiled_ms"))
        eager, now = (sum(getattr(one, name) for one in chosen) for name in ("eager_bytes", "compiled_bytes"))
        count = sum(len(one.operations) for one in chosen)
        parts = "1 part" if len(chosen) == 1 else f"{len(chosen)} parts"
        return (
            f"{parts} of {count} operations, at {compiled_ms / max(eager_ms, 1e-9):.2f} of their time, saving "
            f"{format_bytes(now)} where that was {format_bytes(eager)}{why}"
        )

    def __str__(self) -> str:
        return self.told


def is_compiled(regions: CompiledRegions | None) -> bool:
    """Whether parts of a model are compiled."""
    return regions is not None and bool(regions.chosen)
