"""Calls compiled code in a module's place: checks the call, runs the forward, rebuilds the output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rkgb import DGraph, GuardError, LeafKind, RockmateError, Sample
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.ir.call import is_ref
from rkgb.ir.dgraph import leaf_tensors
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sample import Binding
from rkgb.process.autocast import Autocast, without_autocast
from rkgb.process.surroundings import hooks_allowed
from rkgb.recording.guard import Guard
from rkgb.state.attributes import AttributeGone, Snapshot, Writing
from rkgb.state.generators import generators_for
from rkgb.state.module_state import BufferValues, random_states
from rkgb.state.other_random import OtherRandomStates
from rkgb.torch_private.autograd import saved_hooks_are_allowed
from rkgb.tree import map_leaves
from rockmate.errors import InputMismatch, PlanMismatch, SizeMismatch
from rockmate.guards.attributes import BoundSettings
from rockmate.guards.flags import BackEndFlags, flags_difference
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits, TraitsReader
from rockmate.guards.numbers import RunTimeNumbers
from rockmate.guards.transforms import refuse_transforms
from rockmate.resting.tensor import changes
from rockmate.runtime.codegen import CompiledProgram
from rockmate.runtime.double_backward import DoubleBackward
from rockmate.runtime.lowering import is_whole
from rockmate.runtime.resting import LeavesOfStep, OrderOfUses
from rockmate.runtime.step import Step
from rockmate.runtime.tables import StepTables


class Runner:
    """A planned forward, called like the module that it stands for."""

    def __init__(
        self,
        module: torch.nn.Module,
        graph: DGraph,
        pattern: CallPattern,
        traits: ModuleTraits,
        settings: BoundSettings,
        compiled: CompiledProgram,
        numbers: RunTimeNumbers | None = None,
        may_be_refused: bool = False,
    ) -> None:
        self._module = module
        self._graph = graph
        self._compiled = compiled
        self._numbers = numbers
        self._binding = Binding(module)
        self._pattern = pattern
        self._traits = traits
        self.settings = settings
        self._output_names = graph.output_names
        self._devices = {parameter.device for parameter in module.parameters()} | pattern.devices
        self._flags = BackEndFlags(self._devices)
        self._input_outputs = {name for name in self._output_names if name in graph.leaves}
        self._may_be_refused = may_be_refused  # the first call of its sizes: they may be none of the code's
        self._is_guarded = may_be_refused or any(isinstance(op.call.function, Guard) or is_whole(op) for op in graph)
        self._opaque = {op.call.function.path for op in graph if isinstance(op.call.function, OpaqueCall)}
        self._written = _written_buffers(graph)
        self._double_backward = DoubleBackward(module)
        self.make_step: Callable[[StepTables], Step] = Step  # another one may watch what a step does
        self._resting = None if compiled.rests is None else OrderOfUses(compiled.rests)
        self._changes = changes()

    @property
    def original(self) -> torch.nn.Module:
        """The module that it stands for."""
        return self._module

    def on_lack(self, tell: Callable[[BaseException], None]) -> None:
        """Have `tell` told of errors with which memory runs out in a forward, or in what a backward recomputes."""
        self._compiled.tables.on_lack = tell

    @property
    def is_of_now(self) -> bool:
        """Whether the parameters that rest are those for which the code was written."""
        return self._changes == changes()

    @property
    def source(self) -> str:
        """The generated code."""
        return self._compiled.code.source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, as the module would. Raises `InputMismatch` or `PlanMismatch` before anything runs."""
        call = self._binding.sample(args, kwargs)
        refuse_transforms(self._module, call.tensors)
        mismatch = self.mismatch(call, TraitsReader(self._module).read())
        if mismatch is not None:
            raise mismatch
        return self.run(call)

    def mismatch(self, call: Sample, traits: ModuleTraits) -> RockmateError | None:
        """Why the plan does not hold for `call` on the module as it is, with `traits`; None where it does."""
        return (
            self._pattern.mismatch(call)
            or self._autocast_mismatch()
            or self._flags_mismatch()
            or traits.mismatch(self._traits)
            or self._settings_mismatch()
            or self._attributes_mismatch()
            or self._numbers_mismatch(call)
        )

    def run(self, call: Sample, double_backward: DoubleBackward | None = None) -> Any:
        """Forward of a call for which there is no mismatch; a module of several plans tells of all by one object.

        Raises `GuardError` where the data would take another branch of the module: then nothing has happened.
        """
        tensors = call.tensors
        step = self.make_step(self._compiled.tables)
        step.double_backward = double_backward or self._double_backward
        if self._resting is not None and self._compiled.rests is not None:
            step.resting = LeavesOfStep(self._compiled.rests, self._resting)
        if self._numbers is not None:
            known = self._numbers.known(call, self._module)
            assert known is not None, "a call is compared with the plan before"
            step.numbers = self._numbers.values(known)
        with (
            without_autocast() if self._pattern.autocast.regions else contextlib.nullcontext(),
            contextlib.nullcontext() if saved_hooks_are_allowed() else hooks_allowed(),
            self._undone_if_refused() if self._is_guarded else contextlib.nullcontext(),
        ):
            try:
                results = self._compiled.forward(step, *tensors)
            except Exception as error:
                self._compiled.tables.tell_of_lack(error)
                raise
        values = dict(zip(self._output_names, results, strict=True))
        if self._input_outputs:
            values |= {n: leaf_tensors(self._graph.leaves, self._module, tensors)[n] for n in self._input_outputs}
        if self._graph.attributes:
            Writing(self._graph.attributes, self._module).write(lambda ref: values[ref.name], is_ref)
        return map_leaves(lambda ref: values[ref.name], self._graph.output, is_ref)

    @contextlib.contextmanager
    def _undone_if_refused(self) -> Iterator[None]:
        """Where a guard refuses the data, streams, buffers and attributes are as if the call had not been made."""
        opaque = [self._module.get_submodule(path) for path in self._opaque]  # of others, nothing is written before
        held = [Snapshot(submodule.named_modules()) for submodule in opaque]
        others = None
        if opaque:  # which alone draw from them
            others = OtherRandomStates(stream for before in held for _, stream in before.streams().values())
        streams = random_states(self._devices)
        streams += [(one, one.get_state()) for one in generators_for(self._module, self._graph.generators)]
        buffers = BufferValues(self._module.get_buffer(path) for path in self._written)
        try:
            yield
        except Exception as error:
            is_refusal = isinstance(error, GuardError | PlanMismatch)
            if not is_refusal and (not self._may_be_refused or is_out_of_memory(error)):
                raise
            for before in held:
                before.restore()
            for generator, state in streams:
                generator.set_state(state)
            buffers.give_back()
            if others is not None:
                others.give_back()
            if isinstance(error, GuardError):
                raise
            if isinstance(error, PlanMismatch):  # something of which nothing is known has handed on other tensors
                raise GuardError(str(error)) from error
            told = f"{type(error).__name__}: {error}"
            raise SizeMismatch(f"the code does not hold for calls of such sizes: {told}") from error

    def _settings_mismatch(self) -> PlanMismatch | None:
        difference = self.settings.difference()
        return None if difference is None else PlanMismatch(f"{difference}. Put it back, or plan the module again.")

    def _attributes_mismatch(self) -> PlanMismatch | None:
        """Why the forward may leave something else in attributes than when it was planned."""
        if not self._graph.attributes:
            return None
        try:
            refusal = Writing(self._graph.attributes, self._module).refusal()
        except AttributeGone as error:
            refusal = str(error)
        return None if refusal is None else PlanMismatch(f"{refusal}. Put it back, or plan the module again.")

    def _numbers_mismatch(self, call: Sample) -> InputMismatch | None:
        if self._numbers is None:
            return None
        known = self._numbers.known(call, self._module)
        if known is not None and self._numbers.holds(known):
            return None
        told = "no numbers" if known is None else ", ".join(f"{number} = {value}" for number, value in known.items())
        return InputMismatch(
            f"with {told} the module goes another way than when it was planned, or runs other operations. Plan the "
            "module again with such a sample."
        )

    def _flags_mismatch(self) -> PlanMismatch | None:
        """Other implementations may run under other flags: they may compute, save and take something else."""
        then = self._pattern.flags
        if then is None or (now := self._flags.now()) == then:
            return None
        return PlanMismatch(
            f"{flags_difference(self._flags.texts(now), self._flags.texts(then))} when the module was planned. Put it "
            "back, or plan the module again."
        )

    def _autocast_mismatch(self) -> PlanMismatch | None:
        cast = Autocast.now()
        if cast == self._pattern.autocast:
            return None
        return PlanMismatch(
            f"autocast is {cast}, but was {self._pattern.autocast} when the module "
            "was planned: planned code casts as it did then. Call and plan the module under the same autocast."
        )


def _written_buffers(graph: DGraph) -> list[str]:
    """Paths of the buffers that the forward writes into."""
    owners = dict.fromkeys(graph.owner(name) for op in graph for name in op.written)
    leaves = [graph.leaves[owner] for owner in owners if owner in graph.leaves]
    return [leaf.path for leaf in leaves if leaf.kind is LeafKind.BUFFER]
