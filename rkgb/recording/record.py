"""Module and sample to B graph, by recording the operations that really run below autograd.

Finer than ``torch.jit.trace`` (a linear layer is a transposition and a product), and faithful where
that is not: regions without gradient, autocast, nested checkpoints, numbers read out of the data.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from rkgb.errors import TraceError
from rkgb.ir.bgraph import BNode, Leaf, LeafKind, Source
from rkgb.ir.call import Call, Ref, function_name
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sample import Sample
from rkgb.passes.shape_reads import shape_depends_on_data, without_shape_read
from rkgb.process.autocast import OFF, Autocast
from rkgb.process.turns import replaced_here
from rkgb.process.uncompiled import DispatchMode
from rkgb.recording.custom_functions import (
    applied_by,
    bound_run_by,
    given_to,
    outputs_apart,
    plain_apply,
    version_of,
)
from rkgb.recording.guard import Guard, shape_guard, snapshot
from rkgb.recording.naming import Namer
from rkgb.source import caller_is_torch, python_location
from rkgb.state.generators import GeneratorsMet, MeetingGenerators, OwnGenerator
from rkgb.state.module_state import nothing_packed
from rkgb.state.side_effects import (
    refuse_attribute,
    refuse_collective,
    refuse_drawn,
    refuse_function,
    refuse_storage,
    refuse_unregistered,
    refuse_wrappers,
)
from rkgb.torch_private.autograd import is_of_an_operator
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.modes import dispatch_modes, is_wrapper_subclass, without_dispatch_modes
from rkgb.torch_private.tracers import IS_TRACING, is_tracing
from rkgb.tree import is_tensor, leaves, map_leaves

# What the user's code calls to read a number; within other functions it is PyTorch that reads, mostly to check.
_NUMBER_READS = frozenset(
    "item __bool__ __int__ __float__ __index__ __complex__ __format__ __contains__ equal allclose is_nonzero".split()
)
# Reads that no dispatcher sees.
_PYTHON_READS = ("numpy", "tolist", "__array__", "__repr__")
# Copies that the dispatcher does not see, also of Python data that tensors are a part of.
_COPIES = ("tensor", "new_tensor", "as_tensor", "__deepcopy__")
# Operations that read an argument without the dispatcher's knowledge, by its position; what follows depends on it.
_READ_WITHIN = {"aten::_pack_padded_sequence": 1}
# Functions that read the data of these arguments unseen, on their way to operations that have the numbers in them.
_DATA_WITHIN: dict[str, tuple[int | str, ...]] = {
    "tensor_split": (1, "tensor_indices_or_sections", "indices_or_sections"),
    "ctc_loss": (2, 3, "input_lengths", "target_lengths"),
}
_STORAGES = ("untyped_storage", "storage")


class Recorder(DispatchMode):
    """Notes every operation that runs, and names every tensor that it meets.

    Tensors are held weakly: recording takes no more memory than inference, as long as autograd's
    saved tensors are dropped meanwhile (`recording` sees to that).
    """

    def __init__(self, module: torch.nn.Module, sample: Sample) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[BNode] = []
        self.leaves: dict[str, Leaf] = {}
        self.generators = GeneratorsMet(module)
        self._namer = Namer()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._by_storage: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._detached: set[str] = set()
        self._by_place: dict[tuple[Any, ...], tuple[StorageWeakRef, str]] = {}
        # Storages whose contents depend on data. The weak references keep their addresses from being used again.
        self._from_data: dict[int, StorageWeakRef] = {}
        self._shapes_vary = False  # from here on, shapes may depend on data
        self._drawn: set[int] = set()  # of these, those that depend on nothing but the random numbers of the run
        self._modules = {submodule: path for path, submodule in module.named_modules()}
        # Paths of the modules that are in their forward, and for each the number of nodes when it began.
        self._running: list[tuple[str, int]] = []
        self._grad_enabled: bool | None = None  # as it is where an operator is called that has turned gradients off
        self.python_reads = False  # while the user's own code reads a number
        # Of what the user's code calls now, tensors of one element: where a number is wanted, they are read.
        self.given_numbers: list[torch.Tensor] = []
        for index, tensor in enumerate(sample.tensors):
            self._given(Leaf(self._namer.plain(f"input_{index}"), LeafKind.INPUT, index=index), tensor)
        for kind, named in (
            (LeafKind.PARAMETER, module.named_parameters()),
            (LeafKind.BUFFER, module.named_buffers()),
        ):
            for path, tensor in named:
                self._given(Leaf(self._namer.plain(path.replace(".", "_")), kind, path=path), tensor)

    # ---- what runs ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.generators.meet((args, kwargs))
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        if func.namespace == "c10d":
            refuse_collective(func, str(self.source()))
        tensors = leaves((args, kwargs))
        depends = self._depends_on_data(func, tensors)
        if leaves(result) or any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self._note(func, args, kwargs, result, depends)
            if depends and shape_depends_on_data(func, args):
                self._shapes_vary = True
                for tensor in leaves(result):
                    self._append(
                        "guard", Call(shape_guard(tuple(tensor.shape), str(self.source())), (self.ref(tensor),))
                    )
        elif depends and torch.Tag.data_dependent_output in func.tags:
            given = any(args[0] is tensor for tensor in self.given_numbers)  # a size, a scale: an operation has it
            self.note_read(func, args, result, may_vary=not self.python_reads and not given)
        if func._schema.name in _READ_WITHIN:
            tensor = args[_READ_WITHIN[func._schema.name]]
            self.note_read(torch.Tensor.tolist, (tensor,), tensor.tolist(), may_vary=True)
        return result

    def note_read(self, read: Callable[..., Any], args: Any, value: Any, may_vary: bool = False) -> None:
        """The module has read `value` out of tensors: later runs must read the same, but for checks within PyTorch."""
        if any(self.is_from_data(tensor) for tensor in leaves(args)):
            if not may_vary and self._is_drawn(leaves(args)):
                refuse_drawn(snapshot(value), str(self.source()))
            self._shapes_vary |= may_vary
            arguments = map_leaves(self.ref, tuple(args))
            self._append("guard", Call(Guard(read, snapshot(value), str(self.source()), may_vary), arguments))

    def note_function(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A custom autograd function, which stays one operation: its backward is its own."""
        tensors = leaves((args, kwargs))
        self._note(function, args, kwargs, result, any(self.is_from_data(tensor) for tensor in tensors))

    def note_opaque(self, path: str, function: OpaqueCall, arguments: tuple[Any, ...], result: Any) -> None:
        """A call of an opaque submodule, which is one operation; `arguments` are those of `function`."""
        self._running.append((path, len(self.nodes)))
        self._note(function, arguments, {}, result, True)
        for place in function.traits.written:
            self._mark_from_data(leaves(arguments)[place])
        if function.traits.reads_data:
            self._shapes_vary = True
            for tensor in leaves(result):
                self._append("guard", Call(shape_guard(tuple(tensor.shape), function.place), (self.ref(tensor),)))
        self._running.pop()

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any, depends: bool) -> None:
        arguments, keywords = map_leaves(self._named, (tuple(args), dict(kwargs)), _is_named)
        stem = function_name(function).strip("_") if hasattr(function, "_schema") else _stem(function)
        name = self._namer.numbered(stem)
        produced = leaves(result)
        refuse_wrappers(produced, self.source)
        refs: dict[int, Ref] = {}
        drawn = self._is_drawn(leaves((args, kwargs)))
        for place, tensor in enumerate(produced):
            own = name if len(produced) == 1 else self._namer.plain(f"{name}_{place}")
            refs[id(tensor)] = self._name(tensor, own)
            if function is torch.ops.aten.detach.default:
                self._detached.add(own)
            if depends:
                self._mark_from_data(tensor, drawn)
        self.noted(produced)
        if depends and hasattr(function, "_schema"):
            for target in leaves([args[i] for i in _written_places(function, len(args))]):
                self._mark_from_data(target, drawn)
        pattern = map_leaves(lambda tensor: refs[id(tensor)], list(result) if isinstance(result, tuple) else result)
        call = Call(function, arguments, keywords)
        if produced and not self._shapes_vary:
            call = without_shape_read(call, produced[0])
        grad_enabled = torch.is_grad_enabled() if self._grad_enabled is None else self._grad_enabled
        self.nodes.append(BNode(name, call, pattern, grad_enabled, self.source()))

    @contextlib.contextmanager
    def within_operator(self, grad_enabled: bool) -> Iterator[None]:
        """Meanwhile an operator is on its way through its derivative, which has turned gradients off."""
        before, self._grad_enabled = self._grad_enabled, grad_enabled
        try:
            yield
        finally:
            self._grad_enabled = before

    def _append(self, stem: str, call: Call) -> None:
        self.nodes.append(BNode(self._namer.numbered(stem), call, None, False, self.source()))

    def noted(self, tensors: list[torch.Tensor]) -> None:
        """Told of every operation's results."""

    # ---- tensors and their names -------------------------------------------------------------------------

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The name of `tensor`; one that was never seen is a constant, or another way to reach a known storage."""
        known = self._names.get(id(tensor))
        name = known[1] if known is not None and known[0]() is tensor else None
        if name is None and is_wrapper_subclass(tensor):
            # One that Python has put around a result, unseen by the dispatcher: functional collectives of PyTorch 2.9.
            wrapper: Any = tensor
            if any(self.is_known(getattr(wrapper, inner)) for inner in wrapper.__tensor_flatten__()[0]):
                refuse_wrappers([tensor], self.source)
        if tensor.requires_grad and not tensor.is_leaf and (name is None or name in self._detached):
            # What autograd gives a backward within forward: detached once, but with its part in the graph again.
            saved = self._by_place.get(_place_of(tensor))
            if saved is not None and not saved[0].expired():
                return Ref(saved[1])
        if name is not None:
            return Ref(name)
        base = self._by_storage.get(storage_key(tensor))
        if base is not None and not tensor.requires_grad:
            original = base[0]()
            if original is not None and original.dtype == tensor.dtype and _same_storage(original, tensor):
                return self._alias(base[1], tensor)  # such as `.data`, which the dispatcher does not see
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            refuse_unregistered(tensor, str(self.source()))
        leaf = Leaf(self._namer.numbered("constant"), LeafKind.CONSTANT, constant=tensor.detach())
        self.leaves[leaf.name] = leaf
        return self._name(tensor, leaf.name)

    def alive(self) -> dict[str, torch.Tensor]:
        """By name, the tensors made by operations on data that something still holds."""
        found = {name: reference() for reference, name in self._names.values() if name not in self.leaves}
        return {name: tensor for name, tensor in found.items() if tensor is not None and self.is_from_data(tensor)}

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was given, or an operation made it."""
        known = self._names.get(id(tensor))
        return known is not None and known[0]() is tensor

    def _named(self, thing: torch.Tensor | torch.Generator) -> Ref | OwnGenerator:
        return self.ref(thing) if isinstance(thing, torch.Tensor) else self.generators.own(thing)

    def _alias(self, base: str, tensor: torch.Tensor) -> Ref:
        place = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        name = self._namer.numbered("as_strided")
        call = Call(torch.ops.aten.as_strided.default, (Ref(base), *place))
        self.nodes.append(BNode(name, call, Ref(name), False, self.source()))
        return self._name(tensor, name)

    def _given(self, leaf: Leaf, tensor: torch.Tensor) -> None:
        known = self._names.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return  # tied weights are one leaf
        self.leaves[leaf.name] = leaf
        self._name(tensor, leaf.name)
        self._mark_from_data(tensor)

    def _name(self, tensor: torch.Tensor, name: str) -> Ref:
        reference = weakref.ref(tensor)
        known = self._names.get(id(tensor))
        place = _place_of(tensor)
        at_place = self._by_place.get(place)
        is_written = known is not None and known[0]() is tensor
        if is_written or at_place is None or at_place[0].expired():  # else a view without gradient, or none
            self._by_place[place] = (StorageWeakRef(tensor.untyped_storage()), name)
        self._names[id(tensor)] = (reference, name)
        self._by_storage[storage_key(tensor)] = (reference, name)
        return Ref(name)

    def _depends_on_data(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        return torch.Tag.nondeterministic_seeded in func.tags or any(self.is_from_data(t) for t in tensors)

    def is_from_data(self, tensor: torch.Tensor) -> bool:
        """Whether the contents of `tensor` may differ from run to run."""
        return storage_key(tensor) in self._from_data

    def _is_drawn(self, tensors: list[torch.Tensor]) -> bool:
        """Whether what depends on `tensors` depends on random numbers at most."""
        return all(storage_key(t) in self._drawn for t in tensors if self.is_from_data(t))

    def _mark_from_data(self, tensor: torch.Tensor, drawn: bool = False) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._from_data[reference.cdata] = reference
        (self._drawn.add if drawn else self._drawn.discard)(reference.cdata)

    # ---- where it runs -------------------------------------------------------------------------------------

    def source(self) -> Source:
        """The modules that run now, and the innermost line of the user's code."""
        called = tuple(dict.fromkeys(path for path, _ in self._running if path))
        return Source(self.module_path, python_location(), called)

    @property
    def module_path(self) -> str:
        """The module that runs now."""
        return self._running[-1][0] if self._running else ""

    def path_around(self, tensor: torch.Tensor) -> str:
        """The innermost of the modules that run now in whose call `tensor` was made, by itself or by what it calls."""
        name = self._names[id(tensor)][1] if self.is_known(tensor) else None
        made_at = max((place for place, node in enumerate(self.nodes) if name in node.output_names), default=-1)
        return next((path for path, since in reversed(self._running) if since <= made_at), "")

    def entered(self, submodule: torch.nn.Module, *_: Any) -> None:
        """Hook before every module's forward."""
        if is_recording(self):
            self._running.append((self._modules.get(submodule, self.module_path), len(self.nodes)))

    def left(self, submodule: torch.nn.Module, *_: Any) -> None:
        """Hook after it."""
        if is_recording(self) and self._running:
            self._running.pop()


class _PythonReads(TorchFunctionMode):
    """Sees what leaves the dispatcher's sight: arrays and lists made of tensors, hooks on tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        refuse_function(name, args, self._recorder)
        if name == "__get__":
            refuse_attribute(func, args, self._recorder)
        if name in _NUMBER_READS:
            return self._read_number(func, args, kwargs or {})
        self._note_data_within(name, args, kwargs or {})
        before, self._recorder.given_numbers = self._recorder.given_numbers, _of_one_element((args, kwargs))
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._recorder.given_numbers = before
        if name in _PYTHON_READS:
            self._recorder.note_read(func, args[:1], result)
        elif name == "__dlpack__":
            self._recorder.note_read(torch.Tensor.tolist, args[:1], args[0].tolist())
        elif name in _COPIES and not (name == "as_tensor" and is_tensor(args[0])):
            for tensor in leaves(args):
                self._recorder.note_read(torch.Tensor.tolist, (tensor,), tensor.tolist())
        elif name in _STORAGES and not caller_is_torch(1) and self._recorder.is_from_data(args[0]):
            refuse_storage(str(self._recorder.source()))
        return result

    def _note_data_within(self, name: str, args: Any, kwargs: Any) -> None:
        """Note what is read of the data of arguments where no dispatcher sees it."""
        for place in _DATA_WITHIN.get(name, ()):
            tensor = args[place] if isinstance(place, int) and place < len(args) else kwargs.get(place)
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:  # which nobody could compare
                self._recorder.note_read(torch.Tensor.tolist, (tensor,), tensor.tolist())

    def _read_number(self, func: Any, args: Any, kwargs: Any) -> Any:
        before, self._recorder.python_reads = self._recorder.python_reads, True
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.python_reads = before


@contextlib.contextmanager
def nothing_saved(frugal: bool = True) -> Iterator[None]:
    """Run a forward with gradients on, custom functions staying whole, and nothing saved for a backward.

    A forward that runs a backward of its own raises `BackwardInside`; not `frugal`, it finds what it saved.
    """
    dropped = nothing_packed(_refuse_backward)
    with torch.enable_grad(), dropped if frugal else contextlib.nullcontext(), _whole_functions():
        yield


def call_saving_nothing(module: torch.nn.Module, data: Sample) -> Any:
    """Call `module` as in training, which it may take gradients in, with no more memory than it takes for these."""
    try:
        with nothing_saved():
            return data.call(module)
    except BackwardInside:
        with nothing_saved(frugal=False):
            return data.call(module)


@contextlib.contextmanager
def recording(recorder: Recorder, frugal: bool = True) -> Iterator[None]:
    """Run a module's forward under `recorder`, as `nothing_saved` does."""
    before = torch.nn.modules.module.register_module_forward_pre_hook(recorder.entered)
    after = torch.nn.modules.module.register_module_forward_hook(recorder.left, always_call=True)
    try:
        with nothing_saved(frugal), _PythonReads(recorder), recorder:
            yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def as_if_by_jit() -> Iterator[None]:
    """Let modules believe that ``torch.jit.trace`` runs them: some take another way then."""
    with replaced_here(*IS_TRACING, lambda: True):
        yield


class BackwardInside(TraceError):
    """The forward runs a backward of its own, but nothing was saved for it."""


@contextlib.contextmanager
def _whole_functions() -> Iterator[None]:
    """Meanwhile a custom autograd function runs unseen and is noted as one operation."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        plain = plain_apply(cls)
        if cls is CheckpointFunction and (recorder is not None or is_tracing()):
            return args[0](*args[2:])  # its backward recomputes: what to recompute is for the plan to say
        if recorder is None:
            return plain(*args, **kwargs)
        if is_of_an_operator(cls):  # which is noted itself
            with recorder.within_operator(torch.is_grad_enabled()):
                return plain(*args, **kwargs)
        recorder.generators.meet((args, kwargs))
        with without_dispatch_modes(), MeetingGenerators(recorder.generators):
            result = plain(*args, **kwargs)
        recorder.note_function(_as_called_now(cls), args, kwargs, result)
        return result

    with applied_by(apply), bound_run_by(_run_bound, _unseen):
        yield


def _run_bound(cls: Any, forward: Callable[..., Any], args: tuple[Any, ...], grad_enabled: bool) -> Any:
    """Run the forward of a custom function whose `apply` was bound before, and note the function as one operation."""
    recorder = _recorder()
    if recorder is None:
        return forward(*args)
    if is_of_an_operator(cls):
        with recorder.within_operator(grad_enabled):
            return forward(*args)
    given = given_to(args)
    recorder.generators.meet(given)
    versions = list(map(version_of, given))
    with without_dispatch_modes(), MeetingGenerators(recorder.generators):
        result = outputs_apart(forward(*args), given, versions)
    with torch.set_grad_enabled(grad_enabled):
        recorder.note_function(_as_called_now(cls), given, {}, result)
    return result


def _unseen() -> contextlib.AbstractContextManager[Any]:
    found: contextlib.AbstractContextManager[Any]
    found = contextlib.nullcontext() if _recorder() is None else without_dispatch_modes()
    return found


def _recorder() -> Recorder | None:
    return next((mode for mode in dispatch_modes() if isinstance(mode, Recorder)), None)


def is_recording(recorder: Recorder) -> bool:
    """Whether `recorder` is at work in this thread: the hooks for modules are every thread's."""
    return any(mode is recorder for mode in dispatch_modes())


def _refuse_backward(_: object) -> torch.Tensor:
    raise BackwardInside("forward runs a backward of its own, for which nothing was saved.")


class UnderAutocast:
    """A custom function that was called under autocast, to be called under the same again."""

    def __init__(self, apply: Callable[..., Any], autocast: Autocast) -> None:
        self.apply = apply
        self.autocast = autocast
        self.__name__ = _stem(apply)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as it was called."""
        with self.autocast.entered():
            return self.apply(*args, **kwargs)


def _as_called_now(cls: Any) -> Callable[..., Any]:
    autocast = Autocast.now()
    return cls.apply if autocast == OFF else UnderAutocast(cls.apply, autocast)


def _stem(function: Any) -> str:
    owner = getattr(function, "__self__", function)
    return str(getattr(owner, "__name__", "function")).lower()


def _written_places(func: Any, given: int) -> list[int]:
    arguments = func._schema.arguments[:given]
    return [place for place, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def _of_one_element(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in leaves(tree) if tensor.numel() == 1]


def _is_named(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor | torch.Generator)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where the elements of `tensor` lie: equal for those of one storage that are the same part of it."""
    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
    return (storage_key(tensor), tensor.dtype, *layout)


def _same_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    return storage_key(left) == storage_key(right)
