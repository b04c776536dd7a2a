"""A partitioner for `torch.compile` that is given bytes, and keeps to them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.fx import GraphModule

from rkgb.torch_private.compiler.partitioners import CustomPartitionerFn, partitioned
from rockmate.compile import choose
from rockmate.compile.choose import Chooser
from rockmate.division import cut, joint, liveness, rates
from rockmate.division.joint import JointGraph
from rockmate.errors import BudgetError, BudgetTooSmall
from rockmate.memory.budget import read_budget
from rockmate.units import format_bytes

_ASKED_OF: tuple[ModuleType, ...] = (joint, cut, liveness, rates, choose)  # whose code decides what is chosen


@dataclass(frozen=True, slots=True)
class Division:
    """How one compiled graph was divided."""

    saved_bytes: int  # that its forward hands to its backward
    predicted_peak_bytes: int  # of its step, above what the caller holds; what computes the loss outside is left out
    repeated: int  # operations of the forward that the backward computes again
    repeated_ms: float  # what these take, roughly


class Partitioner(CustomPartitionerFn):
    """Divides what `torch.compile` traced so that a step's peak is within a budget of bytes, in the least time.

        model = torch.compile(model, options={"custom_partitioner_fn": rockmate.compile.Partitioner("2GiB")})

    The budget is of the step, above what is there before it: activations, gradients, scratch memory; as that of
    `Rockmate`, but in bytes only, as nobody has seen the eager step. Each graph that is compiled has it by itself, so
    that a model is to be one graph: ``fullgraph=True``. Random numbers are never drawn twice. What the compiler makes
    of the graphs is predicted, and not proven: `check` measures a step, `compile_within` compiles until one fits.

    `divisions` tells how each graph was divided, in order, without those that the compiler has found in its cache.

    Args:
        budget: bytes, or a size such as "2GiB".

    Raises:
        BudgetError: the budget is none in bytes.
        BudgetTooSmall: when a graph is compiled, and no division of it was found within the budget; the message has the
            least that was. The compiler passes it on as the cause of an error of its own.
    """

    def __init__(self, budget: int | str) -> None:
        read = read_budget(budget)
        if not isinstance(read, int):
            raise BudgetError(
                f"a partitioner is given bytes, and not {budget!r}: it has seen no eager step of which that could be a "
                'part. Give bytes, or a size such as "2GiB".'
            )
        self.budget_bytes = read
        self.divisions: list[Division] = []

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward of the joint graph `gm`; called by the compiler."""
        gm.graph.eliminate_dead_code()
        graph = JointGraph.of(gm, kwargs["num_fwd_outputs"])
        inputs = [node for node in graph.nodes if node.op == "placeholder" and node not in graph.tangents]
        static = set(kwargs.get("static_lifetime_input_indices") or ())
        batch = frozenset(node for number, node in enumerate(inputs) if number not in static)
        chosen, least_bytes = Chooser(graph, batch).within(self.budget_bytes)
        if chosen is None:
            raise BudgetTooSmall(
                f"no division of the graph that is compiled was found within {format_bytes(self.budget_bytes)}: the "
                f"least takes {least_bytes} bytes ({format_bytes(least_bytes)}). Give that much, a smaller batch, or "
                "plan the model itself: Rockmate(model, sample, budget) goes lower.",
                smallest_budget_bytes=least_bytes,
                binding_op="",
                proven_bytes=0,
            )
        self.divisions.append(
            Division(chosen.peaks.saved_bytes, chosen.peaks.step_bytes, len(chosen.repeated), chosen.repeated_ms)
        )
        # PyTorch would save masks in place of what they are made of: loops that write or read bytes beside numbers of
        # another layout are slow.
        return partitioned(gm, joint_inputs, chosen.saved, chosen.repeated | graph.apart, **kwargs)

    def uuid(self) -> object:
        """What decides how graphs are divided: the compiler keeps what it compiled under that."""
        sources = "".join(inspect.getsource(module) for module in _ASKED_OF)
        return hashlib.sha256(sources.encode()).hexdigest(), self.budget_bytes
