"""Which kernels operations run by: what was measured of others than PyTorch picks, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from rockmate.errors import KernelsError

Kernels = Literal["as given", "auto"]
"""Whether operations run by the kernels that PyTorch picks, or by whichever of its kernels are faster."""

KERNELS: tuple[str, ...] = get_args(Kernels)

WORTH_IT = 0.05  # of an operation's time: it is rounded otherwise, which is to buy something


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Equal operations by another kernel, beside the one that PyTorch picks, forward and backward."""

    operations: tuple[str, ...]  # by their names in the graph
    kernel: str  # the other one, in words
    given_ms: float  # of one of them
    other_ms: float
    refused: str = ""  # why it stays as it is, where that is not for its time

    @property
    def pays(self) -> bool:
        """Whether they run by the other one."""
        return not self.refused and self.other_ms <= (1 - WORTH_IT) * self.given_ms


class KnownKernels(Protocol):
    """What was found of classes of operations before, here and as PyTorch is set now."""

    def get(self, digest: str) -> KernelTrial | None:
        """What was found of that class; None where it was not tried yet."""

    def put(self, digest: str, trial: KernelTrial) -> None:
        """Keep what was found."""


@dataclass(frozen=True, slots=True)
class ChosenKernels:
    """The operations of a model for which there are other kernels."""

    trials: tuple[KernelTrial, ...] = ()
    refused: str = ""  # why none is taken, where one would be faster

    @property
    def chosen(self) -> tuple[KernelTrial, ...]:
        """Those that run by them."""
        return () if self.refused else tuple(trial for trial in self.trials if trial.pays)

    @property
    def kernel_of(self) -> Mapping[str, str]:
        """By the name of an operation that runs by another kernel: that kernel, in words."""
        return {name: trial.kernel for trial in self.chosen for name in trial.operations}

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations that run by them."""
        return frozenset(self.kernel_of)

    @property
    def gained_ms(self) -> float:
        """How much less time they take."""
        return sum(len(trial.operations) * (trial.given_ms - trial.other_ms) for trial in self.chosen)

    @property
    def told(self) -> str:
        """What runs by which, and what that gains, in words."""
        chosen = self.chosen
        if self.refused:
            return self.refused
        if not chosen:
            return "those that PyTorch picks are the fastest" if self.trials else "there are no others for this model"
        of_kernel: dict[str, int] = {}
        for trial in chosen:
            of_kernel[trial.kernel] = of_kernel.get(trial.kernel, 0) + len(trial.operations)
        which = ", ".join(f"{count} {kernel}" for kernel, count in of_kernel.items())
        given_ms, other_ms = (
            sum(len(trial.operations) * getattr(trial, name) for trial in chosen) for name in ("given_ms", "other_ms")
        )
        return f"{which}, at {other_ms / max(given_ms, 1e-9):.2f} of their time"

    def __str__(self) -> str:
        return self.told


def has_others(kernels: ChosenKernels | None) -> bool:
    """Whether operations run by other kernels than PyTorch picks."""
    return kernels is not None and bool(kernels.operations)


def check_kernels(kernels: object) -> None:
    """Raise `KernelsError` for what is no choice of kernels."""
    if kernels not in KERNELS:
        raise KernelsError(
            f'kernels is {kernels!r}; say "as given" for those that PyTorch picks, or "auto" for whichever of its '
            "kernels is measured to be faster."
        )
