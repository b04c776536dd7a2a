"""What generated code calls while it runs.

A handle stands in the autograd graph for a saved tensor that the plan forgets. The first handle
that is asked for its tensor runs the segment of recomputation that fills it, and its fellows. All
state belongs to one call of the module (`Step`) and is owned by that call's handles: it lives
exactly as long as the autograd graph does.

Between other operations none of what is called here is in a cache, and each call and attribute takes its time, which
benchmarks/calls.py measures: functions of C++ are imported by name, once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

import torch

from rkgb.errors import GuardError
from rkgb.process.autocast import without_autocast
from rkgb.process.surroundings import hooks_allowed
from rkgb.process.turns import STREAMS
from rkgb.process.uncompiled import never_compiled
from rkgb.state.module_state import never_unpacked
from rkgb.torch_private.asked import nobody_asked
from rkgb.torch_private.autograd import (
    graph_is_kept,
    pop_saved_hooks,
    push_saved_hooks,
    running_backward,
    saved_hooks_are_allowed,
    top_saved_hooks,
)
from rkgb.torch_private.flags import autocast_is_on
from rkgb.torch_private.identity import storage_key
from rockmate.errors import PlanMismatch, SizeMismatch
from rockmate.resting.tensor import rested_of
from rockmate.runtime.double_backward import DoubleBackward
from rockmate.runtime.resting import LeavesOfStep, modified
from rockmate.runtime.tables import ForgottenTensor, SavingOp, SegmentCode, StepTables, saved_key
from rockmate.runtime.tables import Handle as Handle


# Hooks run where compiled submodules run, and in the backward of a compiled training step: they are not to be compiled.
@never_compiled
def _unpack(handle: Handle) -> torch.Tensor:
    value = handle.value
    if value is None:
        handle.step.run(handle.segment)
        value = handle.value
        if value is None:
            raise PlanMismatch("a recomputation did not give back the tensor asked for: plan the module again.")
    elif value._version != handle.version:
        raise modified(value.shape, value._version, handle.version)
    return value


@never_compiled
def _unpack_through(hooks: UserHooks, handle: Handle) -> torch.Tensor:
    """Within hooks of the user's: they have had what is kept, and may change what is recomputed as eager's saved."""
    if hasattr(handle, "packed"):
        return hooks.unpack(handle.packed)
    value = _unpack(handle)
    return hooks.unpack(hooks.pack(value)) if hooks.may_change else value


class UserHooks:
    """The hooks on saved tensors that the user has put around a forward: its saved tensors are theirs to pack."""

    __slots__ = ("may_change", "pack", "unpack")

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self.pack = pack
        self.unpack = unpack
        # PyTorch's own give back what they were given, and those of its checkpointing know the tensors of the forward
        # alone.
        self.may_change = not str(getattr(pack, "__module__", "")).startswith("torch.")

    @staticmethod
    def around() -> UserHooks | None:
        """Those in force here; None where there are none."""
        top = top_saved_hooks(True)
        return None if top is None else UserHooks(*top)


class Step:
    """One call of the module: what it keeps for recomputation, and the handles that it has given out."""

    __slots__ = (
        "__weakref__",
        "_awaiting",
        "_handles",
        "_leaves",
        "_ran",
        "_random",
        "_rewound",
        "_tables",
        "_values",
        "_versions",
        "double_backward",
        "hooks",
        "numbers",
        "resting",
        "sizes",
    )

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables
        self.hooks = UserHooks.around()
        self.double_backward: DoubleBackward | None = None  # whom to tell that a graph of the backward is wanted
        self.numbers: dict[str, int | float] = {}  # what this call gives for expressions of arguments and settings
        self.sizes = tables.sizes
        self.resting: LeavesOfStep | None = None  # parameters that are in a second memory until they are read
        self._values: dict[str, torch.Tensor] = {}
        self._random: dict[str, torch.Tensor] = {}
        self._rewound: list[tuple[torch.Generator, torch.Tensor]] = []  # by the segment that runs: states to give back
        self._ran: set[int] = set()  # segments that have run, or run now
        self._leaves = {name: _Leaf(place[key], place, key) for name, (place, key) in tables.places.items()}
        self._versions: dict[str, int] = {}  # of inputs and outputs that are kept
        # Weak: the autograd graph owns the handles, and frees each one with the node that saved it.
        self._handles: dict[str, dict[int, ref[Handle]]] = {}
        self._awaiting: dict[str, tuple[list[Handle], list[torch.Tensor]]] = {}  # see `settle`

    # ---- forward -------------------------------------------------------------------------------

    def forgets(self, op: str) -> _Forgetting:
        """Context of an operation some of whose saved tensors are forgotten."""
        return _Forgetting(self, op)

    def unread(self, op: str) -> frozenset[int]:
        """The places of those forgotten tensors of `op` at which `accept` does not look."""
        return self._tables.saving[op].unread

    def keep(self, key: str, value: torch.Tensor) -> None:
        """Keep `value` for a later segment."""
        self._values[key] = value.detach()

    def keep_input(self, name: str, value: torch.Tensor) -> None:
        """Keep an input, which the user may change, for a later segment."""
        self._values[name] = value.detach()
        self._versions[name] = value._version

    def keep_output(self, name: str, value: torch.Tensor) -> None:
        """Keep what is returned, which the user may change, for a later segment."""
        self.keep_input(name, value)

    def pack(self, key: str, value: torch.Tensor) -> None:
        """Keep what stands for `value` for segments that need it again."""
        self._values[key] = self._tables.packs[key](value.detach())

    def draws(self, op: str, stream: str | torch.Generator = "") -> AbstractContextManager[object]:
        """Context of a random operation; with a `stream`, it will be repeated from the state of now.

        The stream is PyTorch's own of a device, given by that, or a generator of the user's.
        """
        return STREAMS if stream == "" else self._noting(op, stream)

    @contextlib.contextmanager
    def _noting(self, op: str, stream: str | torch.Generator) -> Iterator[None]:
        with STREAMS:
            self._random[op] = self._generator(op, stream).get_state()
            yield

    def check_shape(self, name: str, value: torch.Tensor) -> None:
        """Raise `SizeMismatch` where a value has another shape than it was computed to have in a call of such sizes."""
        shape = self._tables.shapes.get(name)
        if shape is not None and tuple(value.shape) != shape:
            raise SizeMismatch(
                f"%{name} has the shape {list(value.shape)} in a call for whose sizes {list(shape)} was computed: the "
                "module goes another way than in calls of other sizes."
            )

    def check_gradient(self, name: str, value: torch.Tensor, takes_one: bool) -> None:
        """Raise `GuardError` where what code of the user's has made takes a gradient and took none when it was planned.

        Or the other way round. What follows would save other tensors, or a backward would come where none was planned.
        """
        if torch.is_grad_enabled() and value.requires_grad is not takes_one:
            raise GuardError(
                f"%{name} requires {'a gradient' if value.requires_grad else 'no gradient'} in this call, and did "
                f"{'not ' if value.requires_grad else ''}when the module was planned."
            )

    def packed(self, op: str, handles: list[Handle], given: list[torch.Tensor]) -> None:
        """Take what `op` has packed, and, within hooks of the user's, the tensors that it was `given` to pack."""
        if self._tables.saving[op].is_whole:
            self._awaiting[op] = list(handles), list(given)
            return
        self.accept(op, handles)
        if given:
            self.hand_on(op, handles, given)

    def settle(self, op: str, sources: dict[int, torch.Tensor]) -> None:
        """Accept what an operation of the user's code has packed, or keep all that is not as planned.

        Such code may go another way in each call, and save other tensors then. Those in a storage of the graph's must
        be in that of these `sources`, by place: from there they would be had again.
        """
        handles, given = self._awaiting.pop(op)
        saving = self._tables.saving[op]
        if handles and not self._is_as_planned(saving, handles, sources):
            self._handles[op] = {}
            self._tables.tell_of_others(op)
        else:
            self.accept(op, handles)
        if given:
            self.hand_on(op, handles, given)

    @staticmethod
    def _is_as_planned(saving: SavingOp, handles: list[Handle], sources: dict[int, torch.Tensor]) -> bool:
        if len(handles) != saving.saved_count:
            return False
        if not all(_is_at(handles[place].value, forgotten) for place, forgotten in saving.forgotten.items()):
            return False
        with nobody_asked():
            return all(_is_in(handles[place].value, source) for place, source in sources.items())

    def accept(self, op: str, handles: list[Handle]) -> None:
        """Take over what `op` packed: forget what the plan forgets."""
        if not handles:
            return  # nothing was saved: gradients are off for this operation
        saving = self._tables.saving[op]
        if len(handles) != saving.saved_count:
            raise PlanMismatch(
                f"%{op} saved {len(handles)} tensors for its backward, but {saving.saved_count} when it was planned: "
                "what it reads requires a gradient where that did not, or none where that did. Plan the module again."
            )
        for place in saving.kept:
            value = handles[place].value
            assert value is not None
            self._values[saved_key(op, place)] = value
        references = self._handles[op] = {}
        for index, forgotten in saving.forgotten.items():
            handle = handles[index]
            if saving.is_checked and not _is_at(handle.value, forgotten):
                raise PlanMismatch(f"%{op} saved another tensor for its backward than in calls of other sizes.")
            handle.value = None
            handle.step = self
            handle.segment = forgotten.segment
            references[index] = ref(handle)
        if self.resting is not None:
            self.resting.accept(op, handles)

    def reads(self, event: str) -> AbstractContextManager[object]:
        """Context of an operation that reads parameters which rest: they are here inside."""
        assert self.resting is not None
        return self.resting.reads(event)

    def hand_on(self, op: str, handles: list[Handle], tensors: list[torch.Tensor]) -> None:
        """Let the user's hooks pack those of the `tensors` saved by `op` that are kept."""
        assert self.hooks is not None
        forgotten = self._handles[op]
        for index, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
            if index not in forgotten:
                handle.packed = self.hooks.pack(tensor)
                handle.value = None

    # ---- recomputation --------------------------------------------------------------------------

    def run(self, segment: int) -> None:
        """Run a segment now: under no_grad, on its own random numbers, leaving the streams as they were."""
        try:
            self._run(segment)
        except Exception as error:
            self._tables.tell_of_lack(error)
            raise

    def _run(self, segment: int) -> None:
        code = self._tables.segments[segment]
        self._ran.add(segment)
        if torch.is_grad_enabled() and self.double_backward is not None and running_backward() != -1:
            self.double_backward.tell()
        replaced = [leaf for name in code.reads if (leaf := self._replaced(name)) is not None] if code.reads else []
        # There may be autocast around the backward, and a graph of it may be wanted. Contexts are entered where they
        # have something to do: between the operations of a backward none of their code is in a cache.
        if replaced or code.is_random or torch.is_grad_enabled() or autocast_is_on() or not saved_hooks_are_allowed():
            streams, leaves = self._streams_kept(code), self._leaves_of_the_forward(replaced)
            with torch.no_grad(), without_autocast(), hooks_allowed(), streams, leaves:
                code.run(self)
        else:
            code.run(self)

    @contextlib.contextmanager
    def _leaves_of_the_forward(self, leaves: list[_Leaf]) -> Iterator[None]:
        """Put the tensors of the forward in their places, where others are now."""
        others = [leaf.place[leaf.key] for leaf in leaves]
        for leaf in leaves:
            leaf.place[leaf.key] = leaf.tensor
        try:
            yield
        finally:
            for leaf, other in zip(leaves, others, strict=True):
                leaf.place[leaf.key] = other

    @contextlib.contextmanager
    def _streams_kept(self, code: SegmentCode) -> Iterator[None]:
        """Give the random streams that `code` rewinds back as they are now."""
        if not code.is_random:
            yield
            return
        with STREAMS:
            outer, self._rewound = self._rewound, []
            try:
                yield
            finally:
                states, self._rewound = self._rewound, outer
                for generator, state in reversed(states):  # of two names for one generator, the state noted first
                    generator.set_state(state)

    def _generator(self, op: str, stream: str | torch.Generator) -> torch.Generator:
        generator = self._tables.generators[stream] if isinstance(stream, str) else stream
        if not isinstance(generator, torch.Generator):
            raise PlanMismatch(
                f"%{op} drew from a generator of the module's own when it was planned, in whose place there is a "
                f"{type(generator).__name__} now. Put a generator there, or plan the module again."
            )
        return generator

    def _replaced(self, name: str) -> _Leaf | None:
        """The leaf `name`, if there is another tensor now where the forward found it: as after a functional call.

        Recomputation reads parameters and inputs again, also those that eager autograd would not save: `RuntimeError`
        if this one is not as it was.
        """
        leaf = self._leaves.get(name)
        if leaf is None:
            tensor, replaced = self._values[name], False
            changed = tensor._version != self._versions[name]
        else:
            tensor = leaf.tensor
            replaced = leaf.place.get(leaf.key) is not tensor
            gone = replaced and leaf.key not in leaf.place
            changed = gone or tensor._version != leaf.version or leaf.is_elsewhere()
        if changed:
            raise RuntimeError(
                f"{name}, a tensor of shape {list(tensor.shape)}, has been modified by an in-place operation, or taken "
                "out, since the forward, but the backward recomputes from it. Change it after the backward."
            )
        return leaf if replaced else None

    def take(self, key: str, last: bool) -> torch.Tensor:
        """A kept value; forgotten after its last use, unless the graph will be walked again."""
        value = self._values.get(key)
        if value is None:
            self._make(key)
            value = self._values[key]
        elif value._version != self._versions.get(key, value._version):
            raise RuntimeError(
                f"%{key}, a tensor of shape {list(value.shape)} that the module has returned, has been modified by an "
                "in-place operation since, but the backward recomputes from it. If the loss does so, give it when the "
                "module is planned (loss=...); else change a copy."
            )
        if last and self._is_over(self._tables.takers[key]):
            del self._values[key]
        return value

    def unpack(self, key: str, *read: Any, last: bool) -> Any:
        """What was packed or saved, made anew of that and of what is `read`; what was kept is forgotten after the last
        use."""
        unpack, kept = self._tables.unpacks[key]
        # A list comprehension would be a call of its own (benchmarks/calls.py).
        return unpack(*map(self.take, kept, itertools.repeat(last)), *read)

    def _is_over(self, segments: frozenset[int]) -> bool:
        """Whether none of `segments` is still to run: single outputs' backwards may come in another order."""
        return not graph_is_kept() and self._ran.issuperset(segments)

    def _make(self, key: str) -> None:
        """A partial backward may skip the stage whose segment makes `key`: run that segment first."""
        if key not in self._tables.makers:
            raise PlanMismatch(
                f"the kept value {key} is gone: the backward ran a second time. Pass retain_graph=True to the first."
            )
        self._versions.pop(key, None)  # a tensor of its own, which nobody else has
        self.run(self._tables.makers[key])

    def rewind(self, op: str, stream: str | torch.Generator, last: bool) -> None:
        """Put the random stream where it was when `op` first ran: that of the generator which is in place now."""
        generator = self._generator(op, stream)
        if not any(known is generator for known, _ in self._rewound):
            self._rewound.append((generator, generator.get_state()))
        generator.set_state(self._random[op])
        if last and self._is_over(self._tables.repeaters[op]):
            del self._random[op]

    def fill(self, op: str, index: int, value: torch.Tensor) -> None:
        """Give a forgotten tensor back."""
        handle = self._forgotten(op, index)
        if handle is not None:
            handle.value = value
            handle.version = value._version

    def _forgotten(self, op: str, index: int) -> Handle | None:
        """Who waits for it; None where its node has run already or was never reached, or where `settle` has kept it."""
        found = self._handles[op].get(index)
        return None if found is None else found()

    def captures(self, op: str) -> _Capturing:
        """Context in which `op` is repeated for the sake of what autograd saves for it."""
        saving = self._tables.saving.get(op)
        if saving is None or not saving.is_whole:
            return _Capturing(op, None)
        return _Capturing(op, saving.saved_count, is_wanted=bool(self._handles.get(op)))


class _Leaf:
    """A parameter or buffer as the forward found it."""

    __slots__ = ("key", "offset", "place", "replaced", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, place: dict[str, Any], key: str) -> None:
        self.tensor = tensor
        self.place = place
        self.key = key
        self.version = tensor._version
        # `.data =` moves no version, but another storage in. The storage itself may be freed, and filled again at
        # another address: so does FSDP between the forward and the backward.
        rested = rested_of(tensor)
        self.storage = None if rested is not None else tensor.untyped_storage()  # of what rests it comes and goes
        self.replaced = 0 if rested is None else rested.replaced
        self.offset = tensor.storage_offset()

    def is_elsewhere(self) -> bool:
        """Whether the tensor has another storage now. A storage is held, so that no other comes by its address."""
        if self.storage is None:
            rested = rested_of(self.tensor)
            return rested is None or rested.replaced != self.replaced
        return self.tensor.untyped_storage() != self.storage or self.tensor.storage_offset() != self.offset


def _is_at(value: torch.Tensor | None, place: ForgottenTensor) -> bool:
    """Whether `value` looks at its storage as the tensor did that was forgotten when the module was planned."""
    assert value is not None
    return (value.shape, value.stride(), value.storage_offset()) == (place.size, place.stride, place.offset)


def _is_in(value: torch.Tensor | None, source: torch.Tensor) -> bool:
    return value is not None and storage_key(value) == storage_key(source)


class _Forgetting:
    """Packs handles instead of tensors while one operation runs."""

    __slots__ = ("_given", "_handles", "_op", "_step")

    def __init__(self, step: Step, op: str) -> None:
        self._step = step
        self._op = op
        self._handles: list[Handle] = []
        self._given: list[torch.Tensor] = []  # within hooks of the user's: the tensors themselves

    def __enter__(self) -> None:
        # The hooks know the list, not this object: a cycle would keep tensors until the collector runs.
        pack = partial(_pack, self._handles, self._step.unread(self._op))
        if self._step.hooks is None:
            push_saved_hooks(pack, _unpack)
        else:
            push_saved_hooks(partial(_pack_noted, pack, self._given), partial(_unpack_through, self._step.hooks))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pop_saved_hooks()
        try:
            if error is None:
                self._step.packed(self._op, self._handles, self._given)
        finally:
            self._handles.clear()
            self._given.clear()


@never_compiled
def _pack(handles: list[Handle], unread: frozenset[int], tensor: torch.Tensor) -> Handle:
    handle = Handle()
    # Detached, or an output would own the graph node that owns the handle that owns it.
    handle.value = None if len(handles) in unread else tensor.detach()
    handle.version = tensor._version
    handles.append(handle)
    return handle


@never_compiled
def _pack_noted(pack: Callable[[torch.Tensor], Handle], given: list[torch.Tensor], tensor: torch.Tensor) -> Handle:
    given.append(tensor)
    return pack(tensor)


@never_compiled
def _note(saved: list[torch.Tensor], tensor: torch.Tensor) -> None:
    saved.append(tensor.detach())


class _Capturing:
    """Records what autograd would save, in packing order, and builds a graph that holds nothing."""

    __slots__ = ("_expected", "_grad", "_hooks", "_is_wanted", "_op", "_saved")

    def __init__(self, op: str, expected: int | None, is_wanted: bool = True) -> None:
        self._op = op
        self._is_wanted = is_wanted  # else what the forward saved was kept
        self._expected = expected  # how many tensors it is to save, where that may change
        saved: list[torch.Tensor] = []
        self._saved = saved
        self._hooks = torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), never_unpacked)
        self._grad = torch.enable_grad()

    def __enter__(self) -> list[torch.Tensor]:
        self._grad.__enter__()
        self._hooks.__enter__()
        return self._saved

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        self._grad.__exit__(kind, error, traceback)
        found, self._saved = self._saved, []
        saved = len(found)
        if not self._is_wanted and self._expected is not None:
            # Each place is read by the code that comes, and nobody takes it.
            found += [torch.empty(0, device="cpu")] * (self._expected - saved)
        elif error is None and self._expected not in (None, saved):
            raise PlanMismatch(
                f"%{self._op} saved {saved} tensors for its backward when it was recomputed, but {self._expected} when "
                "it was planned: the submodule runs other code now. Plan the module again."
            )
