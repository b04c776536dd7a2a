"""What a call of an opaque submodule does besides computing, and whether it may be repeated: seen on copies."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.errors import TraceError
from rkgb.ir.bgraph import BGraph
from rkgb.ir.opaque import Traits, as_written, held_by, is_compiled, outline
from rkgb.ir.sample import Sample
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.d_to_s import d_to_s
from rkgb.process.uncompiled import never_compiled
from rkgb.recording.digest import digest
from rkgb.recording.guard import Guard
from rkgb.recording.record import Recorder, recording
from rkgb.state.attributes import Snapshot
from rkgb.state.generators import GeneratorsMet
from rkgb.state.module_state import module_devices, module_state_kept, random_states
from rkgb.state.side_effects import has_hooks_of_its_own
from rkgb.torch_private.identity import storage_key
from rkgb.tree import leaves, map_leaves


def examine(submodule: torch.nn.Module, path: str, arguments: Sample, generators: GeneratorsMet) -> Traits:
    """The traits of ``submodule(*args, **kwargs)``, called a few times on copies; everything is left as it was.

    Generators of the user's own that it draws from are noted in `generators`.
    """
    inside = _look_inside(submodule, arguments, generators)
    devices = module_devices(submodule, arguments.tensors)
    with module_state_kept(submodule, devices), generators.as_now():
        states = [*random_states(devices), *((own.generator, own.generator.get_state()) for own in generators.found)]
        first = _run(submodule, arguments, states)
        for generator, state in states:
            generator.set_state(state)
        second = _run(submodule, arguments, states)
    parts = (first.outline, first.saved, first.written, is_compiled(submodule), torch.is_grad_enabled(), inside.text)
    return Traits(
        fingerprint=hashlib.sha256(repr(parts).encode()).hexdigest() if inside.text else f"{path} {id(submodule)}",
        written=first.written,
        keep_reason=_keep_reason(submodule, path, inside, first, second),
        reads_data=inside.reads_data,
    )


def _keep_reason(submodule: torch.nn.Module, path: str, inside: _Inside, first: _Seen, second: _Seen) -> str:
    if inside.reads_data:
        return f"what {path} runs depends on its data"
    if first.written or second.written:
        return f"{path} writes into {'the state of the module' if first.writes_state else 'its inputs'}"
    if second.attributes:
        return f"{path} sets attributes"
    if second.other_random:
        return f"{path} draws from random numbers of Python or NumPy"
    if any(has_hooks_of_its_own(part) for part in submodule.modules()):
        return f"{path} has hooks, which would fire again"
    if second.foreign_random:
        return f"{path} draws from a random generator of its own, or of another device than its output"
    if not first.equals(second):
        return f"{path} gives something else when it is repeated"
    return inside.keep_reason and f"{inside.keep_reason}, within {path}"


def _copied(arguments: Sample) -> Sample:
    """A copy of which what takes gradients may be written in place, as values within a forward may."""
    copy = arguments.copy()
    with torch.enable_grad():
        return copy.with_tensors([tensor.clone() if tensor.requires_grad else tensor for tensor in copy.tensors])


# ---- what it runs inside ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Inside:
    """The operations that run inside, as far as they can be told apart."""

    text: str  # empty where they cannot
    keep_reason: str
    reads_data: bool


def _look_inside(submodule: torch.nn.Module, arguments: Sample, generators: GeneratorsMet) -> _Inside:
    given = _copied(arguments)
    recorder = Recorder(submodule, given)
    recorder.generators = generators
    try:
        with module_state_kept(submodule, module_devices(submodule, given.tensors)), generators.as_now(), as_written():
            with recording(recorder, frugal=False), torch.set_grad_enabled(torch.is_grad_enabled()):
                output = given.call(submodule)
            graph = BGraph(recorder.nodes, recorder.leaves, map_leaves(recorder.ref, output))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _Inside("", "", True)  # what cannot be followed may do anything
    reads_data = any(isinstance(node.call.function, Guard) for node in graph.nodes)
    lines = [f"{n.call.function!r} {n.call.args} {n.call.kwargs} {n.outputs} {n.grad_enabled}" for n in graph.nodes]
    lines += [f"{leaf.name} {leaf.kind} {leaf.path} {_constant(leaf.constant)}" for leaf in graph.leaves.values()]
    reason = ""
    if not reads_data:
        try:
            with generators.as_now():
                simplified = d_to_s(b_to_d(graph, submodule, _copied(arguments)))
            reason = next((node.keep_reason for node in simplified if node.keep_reason), "")
        except (TraceError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = f"its operations cannot be told apart ({type(error).__name__})"
    return _Inside("\n".join(lines), reason, reads_data)


def _constant(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor).hex()}"


# ---- what it does when it runs ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """What one call did."""

    outputs: list[torch.Tensor]
    outline: Any
    saved: list[tuple[Any, ...]]  # what autograd packs, in order: its place in a storage, and whose that is
    written: tuple[int, ...]
    writes_state: bool
    attributes: bool  # sets some
    other_random: bool  # draws from Python's or NumPy's random numbers
    foreign_random: bool  # draws from a generator that is not that of the device of its first output
    ends: list[torch.Tensor]  # states of all random streams afterwards

    def equals(self, other: _Seen) -> bool:
        """Whether another call gave the same, bit by bit, and saved the same."""
        if self.outline != other.outline or self.saved != other.saved:
            return False
        pairs = [*zip(self.outputs, other.outputs, strict=True), *zip(self.ends, other.ends, strict=True)]
        return all(
            (one.shape, one.dtype, one.requires_grad) == (two.shape, two.dtype, two.requires_grad)
            and digest(one) == digest(two)
            for one, two in pairs
        )


def _run(submodule: torch.nn.Module, arguments: Sample, states: list[tuple[torch.Generator, torch.Tensor]]) -> _Seen:
    given = _copied(arguments)
    held = held_by(submodule)
    tensors = [*given.tensors, *held.values()]
    # Written parameters show by their versions; copies of them all would be too much.
    copies = [None if isinstance(t, torch.nn.Parameter) else t.detach().clone() for t in tensors]
    versions = [tensor._version for tensor in tensors]
    attributes = Snapshot(submodule.named_modules())  # through lists and objects: what is appended to counts, too
    others = random.getstate(), np.random.get_state()
    packed: list[tuple[torch.Tensor, StorageWeakRef]] = []

    @never_compiled  # it is no part of what is compiled inside
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()  # an operation that saved its own output would be in a cycle that nobody sees
        packed.append((detached, StorageWeakRef(tensor.untyped_storage())))
        return detached

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = given.call(submodule)
    if any(now is not held.get(name) for name, now in held_by(submodule).items()):
        raise TraceError(
            f"{type(submodule).__name__}, whose call is one operation of the graph, puts another tensor in the place "
            "of a buffer or parameter when it is called. Write into the one that is there, by copy_."
        )
    outputs = leaves(output)
    written = tuple(
        place
        for place, (tensor, copy, version) in enumerate(zip(tensors, copies, versions, strict=True))
        if tensor._version != version or (copy is not None and digest(copy) != digest(tensor))
    )
    ends = [generator.get_state() for generator, _ in states]
    moved = [place for place, (_, start) in enumerate(states) if not ends[place].equal(start)]
    own = len(random_states(module_devices(submodule, given.tensors)))
    device = outputs[0].device if outputs else torch.device("cpu")
    return _Seen(
        outputs=[tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs],
        outline=outline(output),
        saved=_described(packed, tensors, outputs),
        written=written,
        writes_state=any(place >= len(given.tensors) for place in written),
        attributes=bool(attributes.writes()),
        other_random=random.getstate() != others[0] or not _same_numpy(others[1]),
        foreign_random=any(place >= own or states[place][0].device != device for place in moved),
        ends=ends,
    )


def _same_numpy(before: Any) -> bool:
    now: Any = np.random.get_state()
    return all(np.array_equal(one, other) for one, other in zip(before, now, strict=True))


def _described(
    packed: list[tuple[torch.Tensor, StorageWeakRef]], tensors: list[torch.Tensor], outputs: list[torch.Tensor]
) -> list[tuple[Any, ...]]:
    known: dict[int, str] = {}
    for kind, given in (("given", tensors), ("output", outputs)):
        for place, tensor in enumerate(given):
            known.setdefault(storage_key(tensor), f"{kind} {place}")
    described = []
    for tensor, storage in packed:
        source = known.setdefault(storage.cdata, f"inner {len(known)}")
        described.append((source, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype))
    return described
