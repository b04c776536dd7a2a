"""Check a planned module against eager training: the claim of this project, on the user's own model.

On the model itself, not on copies: functions that it holds may hold parts of it, and a copy would share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rkgb import DGraph, RockmateError, Sample, make_sample
from rkgb.process.turns import TURNS
from rkgb.recording.digest import digest
from rkgb.replay.own_checkpoints import random_numbers_restored, told_of_other_numbers
from rkgb.replay.replay import backward_from, first_difference_place, run_graph, seed_streams
from rkgb.replay.step_record import StepRecord, largest_difference
from rkgb.state.attributes import FreshTensors, Snapshot
from rkgb.state.generators import OwnGenerator
from rkgb.state.module_state import (
    for_planning,
    module_devices,
    module_state_kept,
    random_states,
    shadow_parameters,
    training_mode,
)
from rkgb.state.other_random import other_random_states_kept
from rkgb.tree import leaves
from rockmate.errors import ArgumentError
from rockmate.kernels.option import has_others
from rockmate.layouts.weights import give_back, laid_out, layout_kept
from rockmate.memory.budget import Budget
from rockmate.module import Rockmate
from rockmate.nn.chunked_logits import chunks_of, logits_made
from rockmate.options import PlanOptions
from rockmate.planning.costs import LossFunction
from rockmate.planning.measured import Measured
from rockmate.planning.plan import Plan
from rockmate.regions.option import is_compiled
from rockmate.runtime.step import Handle, Step
from rockmate.runtime.tables import StepTables
from rockmate.units import format_bytes

_SEED = 0

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True)
class Verification:
    """What a few training steps under a plan gave, compared bit by bit with eager training."""

    exact: bool
    first_difference: str | None  # the step, the tensor and by how much; None where exact
    largest_gradient_difference: float  # over all steps and gradients; inf where one is there on one side only
    eager_is_deterministic: bool  # eager training, repeated, gives the same bits
    plan: Plan
    where: str | None = None  # the first operation that gives other bits, and its source; None where exact or not found
    eager_difference: str | None = None  # the first difference between two equal runs of eager training
    own_checkpoint: str | None = None  # one of the model's own that makes all the difference: in words
    # In another layout than the given one: how far the first step's gradients are from those in that, as the norm of
    # the difference over the norm of those. Units that rounding flips, as of a ReLU, are in it. None in the given one.
    from_given_layout: float | None = None
    # Where parts are compiled or run by other kernels, the plan is compared with the model so, and without one: how
    # far, in the same way, the first step's gradients are from those of the model as it is.
    from_eager: float | None = None
    # The same of a model whose logits are made a few rows at a time, and one that makes them whole.
    from_whole_logits: float | None = None

    @property
    def _other_code(self) -> str:
        """What rounds otherwise than eager training does, in words."""
        parts, kernels = is_compiled(self.plan.compiled), has_others(self.plan.kernels)
        return " and ".join(text for text, has in (("parts compiled", parts), ("other kernels", kernels)) if has)

    def __str__(self) -> str:
        budget = format_bytes(self.plan.budget_bytes)
        layout = ""
        if self.from_given_layout is not None:
            away = f"{self.from_given_layout:.1e} from those as given"
            layout = f" in their layout, {self.plan.layout}; gradients are {away}"
        if self.from_whole_logits is not None:
            layout += f", with logits in chunks; gradients are {self.from_whole_logits:.1e} from those of whole ones"
        if self.from_eager is not None:
            layout += f", with {self._other_code}; gradients are {self.from_eager:.1e} from eager's"
        if self.exact:
            whose = "eager's" if self.from_eager is None else "those without a plan"
            same = f"outputs, gradients, buffers, random stream and parameters are {whose}"
            return f"exact under {budget}: {same}{layout}"
        repeated = "repeats itself exactly"
        if not self.eager_is_deterministic:
            repeated = f"differs from itself, too: {self.eager_difference}"
        where = f", at {self.where}" if self.where else ""
        return (
            f"not exact under {budget}: {self.first_difference}{where} (gradients off by at most "
            f"{self.largest_gradient_difference:.3g}; eager training {repeated})"
            + (f". That is all the difference: {self.own_checkpoint}" if self.own_checkpoint else "")
        )


def verify(
    model: torch.nn.Module,
    sample: Any,
    budget: Budget = 0.6,
    *,
    loss: LossFunction | None = None,
    steps: int = 3,
    learning_rate: float = 1e-2,
    optimizer: str | MakeOptimizer = "sgd",
    options: PlanOptions | None = None,
) -> Verification:
    """Train `model` for `steps` steps, eagerly twice and under a plan, from the same state each time, and compare all.

    Compared bit by bit: after each step outputs, what forward leaves in attributes, gradients (those that come by these
    attributes, too), buffers and random streams, at the end the parameters. `model` may be a `Rockmate`: then its own
    plan is followed, and `budget` is not used. `optimizer` is one of "sgd", "momentum", "adam", "adamw", used with
    `learning_rate`, or a function from the list of parameters to an optimizer. The steps train copies of the
    parameters, which the model holds meanwhile: hooks on parameters do not fire. The model, the sample and the random
    streams are left as they were. `options` are as for `Rockmate`, in place of `loss`. Planning raises as `Rockmate`
    does.

    Raises:
        ArgumentError: `steps` is less than 1, or no optimizer is called `optimizer`.
    """
    if steps < 1:
        raise ArgumentError(f"verify needs at least 1 step to compare, not {steps}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise ArgumentError(f"no optimizer is called {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}, or give one")
    options = PlanOptions.of(options, {"loss": loss})
    loss = options.loss
    arguments = make_sample(model.original if isinstance(model, Rockmate) else model, sample)
    with contextlib.ExitStack() as stack:
        stack.enter_context(TURNS.planning(model.original if isinstance(model, Rockmate) else model))
        stack.enter_context(_streams_restored(random_states(module_devices(model, arguments.tensors))))
        stack.enter_context(other_random_states_kept())
        original = model.original if isinstance(model, Rockmate) else model
        stack.enter_context(layout_kept(original))
        stack.enter_context(logits_made(original, options.loss_chunks or chunks_of(original)))
        if isinstance(model, Rockmate):
            planned = model._of_an_equal(original)
            if not planned.plans:
                planned.plan_for(sample)
        else:
            planned = Rockmate(original, arguments.copy(), budget, options=replace(options, plan_in_background=False))
        measured = planned._member.measured
        graph = measured.graphs.D_graph
        present = _present(original, measured)
        training = _Training(arguments, loss, steps, learning_rate, optimizer, graph.generators, present)
        eager, is_other = training, measured.rounds_otherwise
        if is_other:
            training = replace(training, replayed=graph)
        expected, repeated = (training.run(original) for _ in range(2))
        itself = _first_difference(expected, repeated)
        found = training.run(planned)
        difference = _first_difference(expected, found)
        has_place = difference is not None and not itself  # one that differs from itself has none
        checkpoint, where = _blamed(difference, found, training, original, planned) if has_place else (None, None)
        from_given = _from_given_layout(expected, training, original)
        from_whole = _from_whole_logits(training, original)
        from_eager = _distance(expected[0], eager.run(original)[0]) if is_other else None
    return Verification(
        exact=difference is None,
        first_difference=None if difference is None else str(difference),
        largest_gradient_difference=_largest_gradient_difference(expected, found),
        eager_is_deterministic=itself is None,
        plan=planned.plan,
        where=where,
        eager_difference=None if itself is None else str(itself),
        own_checkpoint=checkpoint,
        from_given_layout=from_given,
        from_eager=from_eager,
        from_whole_logits=from_whole,
    )


def _present(original: torch.nn.Module, measured: Measured) -> frozenset[str]:
    """Parameters that have a gradient before the step."""
    present = {name for name, parameter in original.named_parameters() if parameter.grad is not None}
    return frozenset(present | {measured.graphs.D_graph.leaves[name].path for name in measured.gradients})


def _blamed(
    difference: Any, found: list[StepRecord], training: _Training, original: torch.nn.Module, planned: Rockmate
) -> tuple[str | None, str | None]:
    """What a difference comes of: a checkpoint of the model's own, or a place in it."""
    checkpoint = _own_checkpoint(found, training, original)
    return checkpoint, None if checkpoint else _place_of(difference, training, original, planned)


def _own_checkpoint(found: list[StepRecord], training: _Training, original: torch.nn.Module) -> str | None:
    """In words: a checkpoint of the model's own without whose other numbers nothing of what was `found` differs."""
    with random_numbers_restored() as places:
        restored = training.run(original)
    return told_of_other_numbers(places[0]) if places and _first_difference(restored, found) is None else None


def _from_given_layout(expected: list[StepRecord], training: _Training, original: torch.nn.Module) -> float | None:
    """How far the gradients of the first step are from those in the given layout; None where `original` is in it."""
    if not laid_out(original):
        return None
    with layout_kept(original):
        give_back(original)
        given = training.run(original)[0]
    return _distance(expected[0], given)


def _from_whole_logits(training: _Training, original: torch.nn.Module) -> float | None:
    """How far the loss's gradients in the first step are from those of whole logits; None where it makes these."""
    if chunks_of(original) is None:
        return None
    of_loss = replace(training, loss=training.loss or _own_loss)
    found = of_loss.run(original)[0]
    with logits_made(original, None):
        return _distance(found, of_loss.run(original)[0])


def _own_loss(output: Any) -> torch.Tensor:
    """That which a model of transformers gives; there are no logits beside it, where they are made in chunks."""
    loss: torch.Tensor = output[0] if isinstance(output, tuple) else output["loss"]
    return loss


def _distance(found: StepRecord, given: StepRecord) -> float:
    """The norm of the difference of all gradients over the norm of those `given`."""
    squares = [0.0, 0.0]
    for name in given.tensors:
        if not name.startswith("gradient of "):
            continue
        ours, theirs = found.tensor(name), given.tensor(name)
        if ours is not None and theirs is not None:
            squares[0] += float((ours.double() - theirs.double()).pow(2).sum())
            squares[1] += float(theirs.double().pow(2).sum())
    return (squares[0] / squares[1]) ** 0.5 if squares[1] else squares[0] ** 0.5


@contextlib.contextmanager
def _streams_restored(states: list[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


# ---- training --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Training:
    """The same steps for every module."""

    sample: Sample
    loss: LossFunction | None
    steps: int
    learning_rate: float
    optimizer: str | MakeOptimizer
    generators: tuple[OwnGenerator, ...]
    present: frozenset[str]  # parameters whose gradients are there before a step, as zeros
    replayed: DGraph | None = None  # by which the module runs, where the plan has compiled parts or other kernels

    def run(self, module: torch.nn.Module) -> list[StepRecord]:
        """What each step left behind; the parameters are in the last record. `module` is left as it was."""
        traced = module.original if isinstance(module, Rockmate) else module
        devices = module_devices(traced, self.sample.tensors)
        with (
            training_mode(traced),
            shadow_parameters(traced, copied=True),
            module_state_kept(traced, devices, self.generators),
        ):
            return self._run(module, traced)

    def _run(self, module: torch.nn.Module, traced: torch.nn.Module) -> list[StepRecord]:
        seed_streams(_SEED, traced, self.generators)
        optimizer = self._optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])
        records: list[StepRecord] = []
        for _ in range(self.steps):
            for name, parameter in module.named_parameters():
                parameter.grad = torch.zeros_like(parameter) if name in self.present else None
            records.append(_step(module, self.sample.copy(), self.loss, self.replayed))
            for one in self.generators:
                records[-1].add(f"state of {one.name}", one.in_module(traced).get_state())
            if optimizer is not None:
                optimizer.step()
        for name, parameter in module.named_parameters():
            records[-1].tensors[f"parameter {name}"] = parameter.detach()
        if len(records) > 1:  # what a first call makes for all others, such as a table of positions, is not compared
            for name in records[0].plain.keys() - records[1].plain.keys():
                records[0].drop_held(name)
        return records

    def _optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
        if not parameters:
            return None
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer](parameters, lr=self.learning_rate)
        return self.optimizer(parameters)


def _step(module: torch.nn.Module, sample: Sample, loss: LossFunction | None, compiled: DGraph | None) -> StepRecord:
    torch.clear_autocast_cache()  # of the weights before the last optimizer step
    traced = module.original if isinstance(module, Rockmate) else module
    before, fresh = Snapshot(traced.named_modules()), FreshTensors(traced)
    with torch.enable_grad():
        is_reference = compiled is not None and traced is module
        output = run_graph(compiled, traced, sample) if compiled and is_reference else sample.call(module)
        outputs = leaves(output)
        record = StepRecord({})
        for index, tensor in enumerate(outputs):
            record.add(f"output {index}", tensor.detach().clone())
        for write in before.writes():
            record.add_held(str(write), write.value)
        left = fresh.now()
        if loss is None:
            backward_from([*outputs, *left])
        else:
            backward_from([loss(output), *left])
    for name, parameter in module.named_parameters():
        record.add(f"gradient of {name}", parameter.grad)
    for index, tensor in enumerate(sample.tensors):
        if tensor.requires_grad:
            record.add(f"gradient of input {index}", tensor.grad)
    for name, buffer in module.named_buffers():
        record.add(f"buffer {name}", buffer.detach().clone())
    devices = module_devices(module, sample.tensors)
    for index, (_, state) in enumerate(random_states(devices)):
        record.add(f"random stream {index}", state)
    return record


# ---- differences -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Difference:
    step: int  # counted from 1
    entry: str  # name of the entry of the step's record
    sentence: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.sentence}"


def _first_difference(expected: list[StepRecord], found: list[StepRecord]) -> _Difference | None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True), start=1):
        difference = one.first_difference_at(other)
        if difference is not None:
            return _Difference(number, *difference)
    return None


def _largest_gradient_difference(expected: list[StepRecord], found: list[StepRecord]) -> float:
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        for name in one.tensors:
            if not name.startswith("gradient of "):
                continue
            gradient, theirs = one.tensor(name), other.tensor(name)
            if gradient is None or theirs is None or gradient.shape != theirs.shape:
                largest = max(largest, 0.0 if gradient is theirs else float("inf"))
            else:
                largest = max(largest, largest_difference(gradient, theirs))
    return largest


class _CheckedStep(Step):
    """Compares every saved tensor that is recomputed with what the forward had; notes the first that differs."""

    __slots__ = ("_digests", "_wrong")

    def __init__(self, tables: StepTables, wrong: list[tuple[str, int]]) -> None:
        super().__init__(tables)
        self._wrong = wrong
        self._digests: dict[tuple[str, int], bytes] = {}

    def unread(self, op: str) -> frozenset[int]:
        return frozenset()

    def accept(self, op: str, handles: list[Handle]) -> None:
        saving = self._tables.saving[op]
        if len(handles) == saving.saved_count:
            for index in saving.forgotten:
                value = handles[index].value
                assert value is not None  # it is forgotten below
                self._digests[op, index] = digest(value)
        super().accept(op, handles)

    def fill(self, op: str, index: int, value: torch.Tensor) -> None:
        super().fill(op, index, value)
        handle = self._forgotten(op, index)
        same = handle is None or handle.value is None or digest(handle.value) == self._digests[op, index]
        if not same and not self._wrong:
            self._wrong.append((op, index))


def _place_of(difference: _Difference, training: _Training, original: torch.nn.Module, planned: Rockmate) -> str | None:
    """The operation where a difference arises: of the recomputations, else of the forward; None if it is not found."""
    wrong: list[tuple[str, int]] = []
    again = Rockmate._following(original, planned._member.measured, planned._member.planned)
    again._member.runner.make_step = lambda tables: _CheckedStep(tables, wrong)
    training.run(again)
    if wrong:
        return _wrong_recomputation(planned, *wrong[0])
    graph = planned._member.measured.graphs.D_graph
    with contextlib.suppress(RockmateError, RuntimeError), for_planning(original):
        place = first_difference_place(graph, original, training.sample.copy(), difference.entry)
        return None if place is None else place.text
    return None


def _wrong_recomputation(planned: Rockmate, op: str, index: int) -> str:
    """In words: the operation that computes a saved tensor, and the one that saved it."""
    graph = planned._member.measured.graphs.D_graph
    slots: Iterable[Any] = planned._member.planned.program.slots[op]
    source = next(slot.tensor.source for slot in slots if slot.index == index)
    source = planned._member.measured.graphs.K_graph.savers().get(source, source)
    node = next((node for node in graph if source in (node.name, *node.output_names)), None)
    made = f"%{node.name} ({node.source})" if node is not None else f"%{source}"
    return f"{made}, recomputed with other bits than the forward's for the backward of %{op}"
