"""What generated code calls while it runs.

A handle stands in the autograd graph for a saved tensor that the plan forgets. The first handle
that is asked for its tensor runs the segment of recomputation that fills it, and its fellows. All
state belongs to one call of the module (`Step`) and is owned by that call's handles: it lives
exactly as long as the autograd graph does.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch

from rkgb.normalisation import normalised
from rkgb.state import autocast_is_on, without_autocast
from rkgb.uncompiled import never_compiled
from rockmate.errors import PlanMismatch
from rockmate.running.tables import ForgottenTensor, SegmentCode, StepTables, saved_key

# The random streams belong to the process, and so does the lock on them: while one thread repeats an operation with
# the numbers of its forward, or notes where a stream is before it draws, no other may draw or put the stream elsewhere.
_streams = threading.RLock()


class Handle:
    """Stands for one saved tensor. Empty until its segment has run, if it is a forgotten one."""

    __slots__ = ("__weakref__", "segment", "step", "value", "version")

    def __init__(self, value: torch.Tensor | None, version: int) -> None:
        self.value = value
        self.version = version
        self.step: Step | None = None
        self.segment = -1


# Hooks run where compiled submodules run, and in the backward of a compiled training step: they are not to be compiled.
@never_compiled
def _unpack(handle: Handle) -> torch.Tensor:
    if handle.value is None:
        assert handle.step is not None
        handle.step.run(handle.segment)
        if handle.value is None:
            raise PlanMismatch("a recomputation did not give back the tensor asked for: plan the module again.")
    elif handle.value._version != handle.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an in-place operation: "
            f"a tensor of shape {list(handle.value.shape)} is at version {handle.value._version}; expected version "
            f"{handle.version} instead. Do not change what the forward used before the backward has run."
        )
    return handle.value


class Step:
    """One call of the module: what it keeps for recomputation, and the handles that it has given out."""

    __slots__ = (
        "__weakref__",
        "_handles",
        "_leaves",
        "_places",
        "_ran",
        "_random",
        "_rewound",
        "_tables",
        "_values",
        "_versions",
    )

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables
        self._values: dict[str, torch.Tensor] = {}
        self._random: dict[str, torch.Tensor] = {}
        self._rewound: list[tuple[torch.Generator, torch.Tensor]] = []  # by the segment that runs: states to give back
        self._ran: set[int] = set()  # segments that have run, or run now
        self._leaves = {name: place[key] for name, (place, key) in tables.places.items()}
        self._versions = {name: leaf._version for name, leaf in self._leaves.items()}
        # `.data =` moves no version, but another storage in. The storage itself may be freed, and filled again at
        # another address: so does FSDP between the forward and the backward.
        self._places = {name: _place_of(leaf) for name, leaf in self._leaves.items()}
        # Weak: the autograd graph owns the handles, and frees each one with the node that saved it.
        self._handles: dict[str, dict[int, weakref.ref[Handle]]] = {}

    # ---- forward -------------------------------------------------------------------------------

    def forgets(self, op: str) -> _Forgetting:
        """Context of an operation some of whose saved tensors are forgotten."""
        return _Forgetting(self, op, self.unread(op))

    def unread(self, op: str) -> frozenset[int]:
        """The places of those forgotten tensors of `op` at which `accept` does not look."""
        return self._tables.unread[op]

    def keep(self, key: str, value: torch.Tensor) -> None:
        """Keep `value` for a later segment."""
        self._values[key] = value.detach()
        self._versions[key] = value._version

    def pack(self, key: str, value: torch.Tensor) -> None:
        """Keep the smaller form of `value` for segments that need it again."""
        self._values[key] = self._tables.forms[key].pack(value)

    @contextlib.contextmanager
    def draws(self, op: str, stream: str | torch.Generator = "") -> Iterator[None]:
        """Context of a random operation; with a `stream`, it will be repeated from the state of now.

        The stream is PyTorch's own of a device, given by that, or a generator of the user's.
        """
        with _streams:
            if stream != "":
                self._random[op] = self._generator(op, stream).get_state()
            yield

    def accept(self, op: str, handles: list[Handle]) -> None:
        """Take over what `op` packed: forget what the plan forgets."""
        if not handles:
            return  # nothing was saved: gradients are off for this operation
        expected = self._tables.saved_counts[op]
        if len(handles) != expected:
            raise PlanMismatch(
                f"%{op} saved {len(handles)} tensors for its backward, but {expected} when it was planned: "
                "requires_grad flags have changed since. Plan the module again."
            )
        for place in self._tables.statistics.get(op, ()):
            value = handles[place].value
            assert value is not None
            self._values[saved_key(op, place)] = value
        references = self._handles[op] = {}
        for index, forgotten in self._tables.forgotten[op].items():
            handle = handles[index]
            if op in self._tables.whole and not _is_at(handle.value, forgotten):
                raise PlanMismatch(
                    f"%{op} saved another tensor for its backward than when it was planned: the submodule runs other "
                    "code now, such as what torch.compile made for other shapes. Plan the module again, or compile it "
                    "with dynamic=False."
                )
            handle.value = None
            handle.step = self
            handle.segment = forgotten.segment
            references[index] = weakref.ref(handle)

    # ---- recomputation --------------------------------------------------------------------------

    def run(self, segment: int) -> None:
        """Run a segment now: under no_grad, on its own random numbers, leaving the streams as they were."""
        code = self._tables.segments[segment]
        self._ran.add(segment)
        replaced = [name for name in code.reads if self._is_replaced(name)]
        # There may be autocast around the backward, and a graph of it may be wanted. Contexts are entered where they
        # have something to do: between the operations of a backward none of their code is in a cache.
        if replaced or code.is_random or torch.is_grad_enabled() or autocast_is_on():
            with torch.no_grad(), without_autocast(), self._streams_kept(code), self._leaves_of_the_forward(replaced):
                code.run(self)
        else:
            code.run(self)

    @contextlib.contextmanager
    def _leaves_of_the_forward(self, names: list[str]) -> Iterator[None]:
        """Put the tensors of the forward in their places, where others are now."""
        places = [self._tables.places[name] for name in names]
        others = [place[key] for place, key in places]
        for name, (place, key) in zip(names, places, strict=True):
            place[key] = self._leaves[name]
        try:
            yield
        finally:
            for (place, key), other in zip(places, others, strict=True):
                place[key] = other

    @contextlib.contextmanager
    def _streams_kept(self, code: SegmentCode) -> Iterator[None]:
        """Give the random streams that `code` rewinds back as they are now."""
        if not code.is_random:
            yield
            return
        with _streams:
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

    def _is_replaced(self, name: str) -> bool:
        """Whether there is another tensor now where the forward found the leaf `name`: as after a functional call.

        Recomputation reads parameters and inputs again, also those that eager autograd would not save: they must be as
        they were.
        """
        if name not in self._leaves:
            leaf = self._values[name]
            changed, replaced = leaf._version != self._versions[name], False
        else:
            leaf = self._leaves[name]
            place, key = self._tables.places[name]
            replaced = place.get(key) is not leaf
            changed = leaf._version != self._versions[name] or _place_of(leaf) != self._places[name] or key not in place
        if changed:
            raise RuntimeError(
                f"{name}, a tensor of shape {list(leaf.shape)}, has been modified by an in-place operation, or taken "
                "out, since the forward, but the backward recomputes from it. Change it after the backward."
            )
        return replaced

    def take(self, key: str, last: bool) -> torch.Tensor:
        """A kept value; forgotten after its last use, unless the graph will be walked again."""
        if key not in self._values:
            self._make(key)
        if last and self._is_over(self._tables.takers[key]):
            return self._values.pop(key)
        return self._values[key]

    def unpack(self, key: str, last: bool) -> torch.Tensor:
        """What was packed under `key`, made anew; its form is forgotten after the last use."""
        return self._tables.forms[key].unpack(self.take(key, last))

    def normalised(
        self, op: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The batch normalisation `op` again, and the mean and the inverse deviation that it saves."""
        mean, inverse = (self.take(saved_key(op, place), last) for place in self._tables.statistics[op])
        return normalised(x, weight, bias, mean, inverse), mean, inverse

    def _is_over(self, segments: frozenset[int]) -> bool:
        """Whether none of `segments` is still to run: single outputs' backwards may come in another order."""
        return not torch._C._autograd._get_current_graph_task_keep_graph() and self._ran.issuperset(segments)

    def _make(self, key: str) -> None:
        """A partial backward may skip the stage whose segment makes `key`: run that segment first."""
        if key not in self._tables.makers:
            raise PlanMismatch(
                f"the kept value {key} is gone: the backward ran a second time. Pass retain_graph=True to the first."
            )
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
        """Give a forgotten tensor back: `value` shares its storage."""
        reference = self._handles[op][index]
        handle = reference()
        if handle is None:
            return  # its node has run already, or was never reached
        place = self._tables.forgotten[op][index]
        handle.value = value if _is_at(value, place) else value.as_strided(place.size, place.stride, place.offset)
        handle.version = handle.value._version

    def captures(self, op: str) -> _Capturing:
        """Context in which `op` is repeated for the sake of what autograd saves for it."""
        return _Capturing(op, self._tables.saved_counts[op] if op in self._tables.whole else None)


def _place_of(leaf: torch.Tensor) -> tuple[torch.UntypedStorage, int | torch.SymInt]:
    # A storage equals itself alone, and is held: no other one can come by its address meanwhile.
    return leaf.untyped_storage(), leaf.storage_offset()


def _is_at(value: torch.Tensor | None, place: ForgottenTensor) -> bool:
    """Whether `value` looks at its storage as the tensor did that was forgotten when the module was planned."""
    assert value is not None
    return (value.shape, value.stride(), value.storage_offset()) == (place.size, place.stride, place.offset)


class _Forgetting:
    """Packs handles instead of tensors while one operation runs."""

    __slots__ = ("_handles", "_hooks", "_op", "_step")

    def __init__(self, step: Step, op: str, unread: frozenset[int]) -> None:
        self._step = step
        self._op = op
        self._handles: list[Handle] = []
        # The hooks know the list, not this object: a cycle would keep tensors until the collector runs.
        pack = partial(_pack, self._handles, unread)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        if error is None:
            self._step.accept(self._op, self._handles)
        self._handles.clear()


@never_compiled
def _pack(handles: list[Handle], unread: frozenset[int], tensor: torch.Tensor) -> Handle:
    # Detached, or an output would own the graph node that owns the handle that owns it.
    handle = Handle(None if len(handles) in unread else tensor.detach(), tensor._version)
    handles.append(handle)
    return handle


@never_compiled
def _note(saved: list[torch.Tensor], tensor: torch.Tensor) -> None:
    saved.append(tensor.detach())


class _Capturing:
    """Records what autograd would save, in packing order, and builds a graph that holds nothing."""

    __slots__ = ("_expected", "_grad", "_hooks", "_op", "_saved")

    def __init__(self, op: str, expected: int | None) -> None:
        self._op = op
        self._expected = expected  # how many tensors it is to save, where that may change
        saved: list[torch.Tensor] = []
        self._saved = saved
        self._hooks = torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), _discarded)
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
        saved, self._saved = len(self._saved), []
        if error is None and self._expected not in (None, saved):
            raise PlanMismatch(
                f"%{self._op} saved {saved} tensors for its backward when it was recomputed, but {self._expected} when "
                "it was planned: the submodule runs other code now. Plan the module again."
            )


def _discarded(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of a repeated operation is never walked")


def differentiable(value: torch.Tensor) -> torch.Tensor:
    """`value` as autograd saw it in the forward: requiring a gradient."""
    return value.detach().requires_grad_()
