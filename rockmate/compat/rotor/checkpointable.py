"""rotor's module: a Sequential under a limit for its activations."""

from __future__ import annotations

from typing import Any, Literal

import torch

from rockmate.compat.rotor.layers import AlongLayers, chain_of_layers, layers_of
from rockmate.compat.rotor.sequence import Sequence, sequence_of
from rockmate.errors import BudgetError
from rockmate.memory.budget import AboveResidents, Budget
from rockmate.offload.option import Offload
from rockmate.planning.costs import LossFunction
from rockmate.queries.measured_rockmate import MeasuredRockmate
from rockmate.units import parse_bytes

MemLimit = int | float | str | None


class Checkpointable(MeasuredRockmate):
    """`model` as `rockmate.Rockmate` makes it, planned by rotor's dynamic program along the layers of a Sequential.

        model = Checkpointable(model, mem_limit=2 * 2**30)
        loss = criterion(model(inputs), targets)  # the first training batch is measured, and planned for
        loss.backward()

    The stages may be called one by one: `measure`, then `compute_sequence` for one limit after another. In eval mode
    and without gradients the model itself runs. ``output.backward(gradient)`` works for an output of any shape.

    Args:
        model: a Sequential, whose layers are run as wholes, or in part where that is faster; Sequentials within it
            stand for their layers. Another module is planned along the blocks of its graph. Layers may work in
            place: one that does nothing else is a layer together with the one whose output it writes into.
        mem_limit: most bytes of a training step above the parameters, their gradients, buffers and the batch, which
            are there whatever is planned: of activations, their gradients, temporary memory and the loss. A number
            of bytes or a size such as "2GiB". None for the free memory when the first plan is made, less 10 %, the
            gradients, and what else is to come. It is a budget of ``Rockmate(..., scope="total")`` less what
            `memory_split` names beside the step. Batches of another shape are planned within the same limit.
        preserve_rng_state: accepted, and without effect: random numbers are always drawn again as they were, since
            gradients would be wrong otherwise. What that takes is in the limit.
        loss: called on the model's output, returns the scalar of which training takes the backward. It is measured;
            without it, a cross-entropy's needs are assumed.
        slots: units in which the dynamic program counts memory, of the whole limit.
        offload: where data may be moved while nothing reads them, beside recomputation, as for `rockmate.Rockmate`.

    Raises:
        BudgetError: `mem_limit` is no size.

    Beside that it raises what `rockmate.Rockmate` does.
    """

    _given_limit: MemLimit = None
    _preserve_rng_state: bool = True

    def __init__(
        self,
        model: torch.nn.Module,
        mem_limit: MemLimit = None,
        preserve_rng_state: bool = True,
        *,
        loss: LossFunction | None = None,
        slots: int = 500,
        offload: Offload | Literal["auto", "disk", "host"] | None = None,
    ) -> None:
        layers = layers_of(model) if isinstance(model, torch.nn.Module) else ()
        solver = AlongLayers(layers, slots)
        super().__init__(model, None, _budget_of(mem_limit), loss=loss, solver=solver, scope="total", offload=offload)
        self.__dict__["_given_limit"] = mem_limit
        self.__dict__["_preserve_rng_state"] = preserve_rng_state

    def compute_sequence(self, mem_limit: MemLimit = None) -> Sequence:
        """Plan what was measured for this limit, or the one given at first. May be called again for another limit.

        Raises `NotPlanned` before `measure`, and `BudgetTooSmall` for a limit that no sequence is found for: then the
        one before is kept.
        """
        if mem_limit is None:
            mem_limit = self._given_limit
        self.plan_within(_budget_of(mem_limit))
        self.__dict__["_given_limit"] = mem_limit
        return self.sequence

    @property
    def mem_limit(self) -> int | None:
        """Bytes of the limit of the plan used last; before the first plan those given, None where none were."""
        if self._family.members:
            return self.plan.budget_bytes
        budget = _budget_of(self._given_limit)
        return budget.size_bytes if isinstance(budget, AboveResidents) else None

    @property
    def sequence(self) -> Sequence:
        """What the plan used last runs, layer by layer. Raises `NotPlanned` where there is none yet."""
        measured = self._member.measured
        layers = chain_of_layers(measured, layers_of(self.original))
        return sequence_of(measured.problem, self.plan.schedule, layers, self.plan.memory)

    def measure(self, sample: Any) -> None:
        """Measure the times and bytes of calls like `sample`, a batch, for `compute_sequence`. Raises as planning does.

        The sample is kept until another one is measured.
        """
        super().measure(sample)


def _budget_of(mem_limit: MemLimit) -> Budget:
    """Numbers are bytes, whole or not, as rotor takes them. Raises `BudgetError` for what is no size."""
    if mem_limit is None:
        return None
    try:
        if isinstance(mem_limit, str):
            return AboveResidents(parse_bytes(mem_limit))
        if not isinstance(mem_limit, bool):
            return AboveResidents(int(mem_limit))
    except (TypeError, ValueError, OverflowError):
        pass
    raise BudgetError(
        f'mem_limit is {mem_limit!r}; give bytes (2 * 2**30), a size ("2GiB"), or None for the free memory.'
    )
