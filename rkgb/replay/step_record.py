"""What a training step left behind, and how two of them differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.replay.spool import Spool, Spooled
from rkgb.state.attributes import AttributeWrite, outline, written
from rkgb.tree import leaves

RANDOM_STREAM = "random stream"  # what entries of random streams are called


@dataclass(slots=True)
class StepRecord:
    """What one forward and backward left behind, by name: everything that training can see."""

    tensors: dict[str, torch.Tensor | Spooled | None]
    spool: Spool | None = None
    has_nan: bool = False  # in an output: what a NaN comes to is a NaN, whatever an operation does
    plain: dict[str, Any] = field(default_factory=dict)  # outlines of what is left in attributes

    def add(self, name: str, tensor: torch.Tensor | None, again: bool = True) -> None:
        """Keep `tensor`, in the spool where there is one; `again` to replace what has been kept before."""
        if not again and name in self.tensors:
            return
        self.tensors[name] = tensor if tensor is None or self.spool is None else self.spool.put(tensor)

    def add_attribute(self, write: AttributeWrite, module: torch.nn.Module) -> list[torch.Tensor]:
        """Keep what there is in the place of `write` now; the tensors in it."""
        return self.add_held(str(write), written([write], module)[0])

    def add_held(self, name: str, value: Any) -> list[torch.Tensor]:
        """Keep what an attribute holds: its tensors, which of them require gradients, and its plain values."""
        tensors: list[torch.Tensor] = leaves(value)
        self.plain[name] = (outline(value, by_identity=False), [tensor.requires_grad for tensor in tensors])
        for index, tensor in enumerate(tensors):
            self.add(name if len(tensors) == 1 else f"{name}, tensor {index}", tensor.detach().clone())
        return tensors

    def drop_held(self, name: str) -> None:
        """Forget what an attribute held."""
        del self.plain[name]
        for entry in [entry for entry in self.tensors if entry == name or entry.startswith(f"{name}, tensor ")]:
            del self.tensors[entry]

    def tensor(self, name: str) -> torch.Tensor | None:
        """What was kept under `name`; None where there was nothing."""
        kept = self.tensors.get(name)
        if isinstance(kept, Spooled):
            assert self.spool is not None
            return self.spool.get(kept)
        return kept

    def streams_differ(self, other: StepRecord) -> bool:
        """Whether another one of two equal steps left a random stream of PyTorch's own in another state."""
        names = [name for name in self.tensors if name.startswith(RANDOM_STREAM)]
        pairs = [(self.tensor(name), other.tensor(name)) for name in names]
        return any(mine is None or theirs is None or not torch.equal(mine, theirs) for mine, theirs in pairs)

    def first_difference(self, other: StepRecord) -> str | None:
        """Name and size of the first entry that is not bitwise equal, or None."""
        found = self.first_difference_at(other)
        return found and found[1]

    def first_difference_at(self, other: StepRecord) -> tuple[str, str] | None:
        """Name of the first entry that is not bitwise equal, and the sentence that says so; or None."""
        for name in {**self.plain, **other.plain}:
            value = self.plain.get(name)
            if value != other.plain.get(name):
                return name, f"the {name} is {_shown(other.plain.get(name))} instead of {_shown(value)}"
        for name in self.tensors:
            mine, theirs = self.tensor(name), other.tensor(name)
            if mine is None and theirs is None:
                continue
            if mine is None or theirs is None:
                return name, f"{name} exists on one side only"
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return (
                    name,
                    f"{name} is {theirs.dtype}{list(theirs.shape)} instead of {mine.dtype}{list(mine.shape)}",
                )
            if not bitwise_equal(mine, theirs):
                return name, f"{name} differs by up to {largest_difference(mine, theirs):.3g}"
        return None


def _shown(held: Any) -> str:
    """What an attribute held, in words."""
    if held is None:
        return "nothing"
    found, gradients = held
    return f"{found}{' requiring a gradient' if any(gradients) else ''}"


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of every element, a NaN being equal to a NaN."""
    if left.is_floating_point() or left.is_complex():
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return torch.equal(left, right)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference between two tensors of one shape; 0.0 for empty ones."""
    if left.numel() == 0:
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    return float((left.to(wide) - right.to(wide)).abs().nan_to_num().max())
