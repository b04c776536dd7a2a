"""Replay check: a trace is believed only when it gives what the module gives, on data it has not seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.errors import GuardError, ReplayMismatch, RockmateError, TraceError
from rkgb.ir.bgraph import BGraph
from rkgb.ir.call import is_ref, opaque_calls
from rkgb.ir.dgraph import DGraph, leaf_tensors, run_nodes
from rkgb.ir.sample import Sample
from rkgb.recording.digest import computed_digests, digest
from rkgb.replay.fresh import Offer, offers, refused
from rkgb.replay.order import are_orderly, differ_by_order_alone
from rkgb.replay.own_checkpoints import random_numbers_restored, told_of_other_numbers
from rkgb.replay.spool import Spool, gradients_taken, saved_on
from rkgb.replay.step_record import RANDOM_STREAM, StepRecord
from rkgb.state.attributes import AttributeWrite, Writing
from rkgb.state.generators import OwnGenerator, is_own_generator
from rkgb.state.module_state import module_devices, module_state_kept, random_states, seed_default_streams
from rkgb.state.private_streams import PrivateStreams
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.modules import BatchNorm
from rkgb.tree import leaves, map_leaves

_MORE_RUNS = 20  # of a module that differs from itself, before that is said to be its own doing
_RETRIES = 5  # of a comparison in which another thread drew random numbers
_SHOWN = 3  # submodules named in a message
# Their values are whatever was in memory: not even those of two equal runs are the same.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


class How(NamedTuple):
    """In which circumstances a step is recorded."""

    private: bool = False  # with random streams of its own: numbers that other threads draw meanwhile change nothing
    is_still: bool = False  # calls leave the module as it was: none is made to change its state first


_USUAL = How()


def record_step(
    module: torch.nn.Module,
    sample: Sample,
    forward: Callable[[Sample], Any],
    seed: int = 0,
    spool: Spool | None = None,
    own: Sequence[OwnGenerator] = (),
    attributes: Sequence[AttributeWrite] = (),
    how: How = _USUAL,
) -> StepRecord:
    """Forward and backward by `forward`, from a seed; `module` and the generators `own` are given back unchanged.

    The backward starts from fixed random gradients, so that no cancellation hides a difference, at the outputs and at
    what is left in `attributes`. With a `spool`, what autograd saves and every gradient go to disk: it takes little
    more memory than inference.
    """
    devices = module_devices(module, sample.tensors)
    record = StepRecord({}, spool)
    streams = PrivateStreams([generator for generator, _ in random_states(devices)]) if how.private else None
    with module_state_kept(module, devices, own), streams or contextlib.nullcontext():
        # From a later state than the trace's: what the forward reads out of buffers and attributes has changed.
        if not how.is_still:
            with torch.enable_grad(), _set_aside(module, sample, record):
                _move_on(module, sample, seed + 1)
        torch.clear_autocast_cache()
        seed_streams(seed, module, own, streams)
        with torch.enable_grad(), _set_aside(module, sample, record):
            outputs = leaves(forward(sample))
            for index, tensor in enumerate(outputs):
                record.add(f"output {index}", tensor.detach().clone())
                record.has_nan |= bool(tensor.isnan().any())
            left = [record.add_attribute(write, module) for write in attributes]
            backward_from([*outputs, *(tensor for tensors in left for tensor in tensors)])
        for name, parameter in module.named_parameters():
            record.add(f"gradient of {name}", _dense(name, parameter.grad), again=False)
        for index, tensor in enumerate(sample.tensors):
            if tensor.requires_grad:
                record.add(f"gradient of input {index}", tensor.grad)
        for name, buffer in module.named_buffers():
            record.add(f"buffer {name}", buffer.detach().clone())
        states = streams.states if streams is not None else [state for _, state in random_states(devices)]
        for index, state in enumerate(states):
            record.add(f"{RANDOM_STREAM} {index}", state)
        for one in own:
            record.add(f"state of {one.name}", one.in_module(module).get_state())
    for tensor in sample.tensors:
        tensor.grad = None
    return record


def seed_streams(
    seed: int, module: torch.nn.Module, own: Sequence[OwnGenerator], private: PrivateStreams | None = None
) -> None:
    """Start every random stream anew, those of the generators `own` too: what forward itself seeds does not follow.

    Where there are `private` streams, these, and not PyTorch's own.
    """
    if private is None:
        seed_default_streams(seed)
    else:
        private.seed(seed)
    for place, one in enumerate(own):
        one.in_module(module).manual_seed(seed + place + 1)


def _move_on(module: torch.nn.Module, sample: Sample, seed: int) -> None:
    """One call on other data, for the sake of the state that it leaves behind."""
    for offer in offers(sample):
        try:
            offer.of(sample, seed).call(module)
        except Exception as error:  # noqa: BLE001  whatever a user's module raises
            refused(error)
        else:
            return


@contextlib.contextmanager
def _set_aside(module: torch.nn.Module, sample: Sample, record: StepRecord) -> Iterator[None]:
    if record.spool is None:
        yield
        return
    resident = {storage_key(t) for t in (*module.parameters(), *module.buffers(), *sample.tensors)}
    with (
        saved_on(record.spool, resident),
        gradients_taken(module, lambda name, gradient: record.add(f"gradient of {name}", _dense(name, gradient))),
    ):
        yield


def _dense(name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is not None and gradient.layout is not torch.strided:
        raise TraceError(
            f"the gradient of {name} is {gradient.layout}: only dense gradients can be planned. "
            "Build the embedding with sparse=False."
        )
    return gradient


def backward_from(outputs: list[torch.Tensor], seed: int = 0) -> None:
    """Backward from every differentiable output, with fixed random gradients."""
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = [torch.randn(root.shape, generator=generator, device="cpu") for root in roots]
    gradients = [one.to(root.device, root.dtype) for one, root in zip(drawn, roots, strict=True)]
    if roots:
        # Not given to `backward`, which loads symbolic shapes to compare theirs: half a second of a first plan.
        _Seeded.apply(gradients, *roots).backward()  # type: ignore[no-untyped-call]


class _Seeded(torch.autograd.Function):
    """Stands for a loss: hands given gradients to what it is of."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *roots: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return roots[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *ctx.gradients


def run_graph(graph: BGraph | DGraph, module: torch.nn.Module, sample: Sample) -> Any:
    """The module's output, computed by the graph's operations; attributes are left as by the module."""
    values = given(graph, module, sample.tensors)
    run_nodes(graph.nodes, values, graph.output_names)
    Writing(graph.attributes, module).write(lambda ref: values[ref.name], is_ref)
    return map_leaves(lambda ref: values[ref.name], graph.output, is_ref)


def given(graph: BGraph | DGraph, module: torch.nn.Module, inputs: list[torch.Tensor]) -> dict[str, Any]:
    """What a run of the graph on `module`, or on a copy of it, starts from."""
    values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, inputs))
    calls = {call.name: call.in_module(module) for call in opaque_calls(graph.nodes)}
    return values | {one.name: one.in_module(module) for one in graph.generators} | calls


def replay_check(
    graph: BGraph | DGraph,
    module: torch.nn.Module,
    sample: Sample,
    low_memory: bool = False,
    may_branch: bool = False,
    is_still: bool = False,
) -> str | None:
    """Compare outputs, gradients, buffers and random stream of graph and module on data that the trace has not seen.

    These are the first that the module takes of what `rkgb.replay.fresh.offers` makes of the sample: random numbers,
    if it takes them. Where a guard refuses them, because the module would take another branch on them, and the graph
    `may_branch`, the two are compared on fresh floating-point data beside the sample's integers, or on the sample's
    own: guards hold every later run to that branch. Returns what is to be told of that.

    Raises `ReplayMismatch` naming the first difference and the first operation that gives another result. A
    module that differs from itself between two equal runs is compared all the same: it cannot be exact, and the
    message says so; but where a device adds in another order each time, the order alone may differ
    (`rkgb.replay.order`). A module that `is_still` is left by calls as it was: none is made to change its state first.
    `low_memory` sets what autograd saves and all gradients aside on disk.
    """
    with Spool() if low_memory else contextlib.nullcontext() as spool:
        steps = _Steps(graph, module, spool, is_still)
        reference = _reference(module, sample, steps.eagerly)
        fresh, expected, told = reference.data, reference.record, reference.told(module)
        # Integers and masks mostly choose the way, which beside other floating-point data is the same.
        others = [offer for offer in reference.left if offer.integers_as_given] if may_branch else []
        try:
            while True:
                try:
                    found = steps.by_graph(fresh)
                    break
                except GuardError as error:
                    if not others:
                        raise
                    read = str(error).partition(": it would go")[0]
                    told = told or f"{read}: data that take another branch than the sample are traced by themselves."
                    taken = _reference(module, sample, steps.eagerly, others)
                    fresh, expected, others = taken.data, taken.record, taken.left
        except GuardError as error:
            raise ReplayMismatch(
                f"the trace of {type(module).__name__} does not hold for other data: {error}{_count_read(module)}"
            ) from error
        except RockmateError:
            raise
        except Exception as error:  # such as a write into a leaf, which the module made where the trace cannot tell
            if is_out_of_memory(error):
                raise
            raise ReplayMismatch(f"the trace of {type(module).__name__} fails on other data: {error}") from error
        difference = expected.first_difference_at(found)
        if difference is None:
            return told
        cause = steps.cause(fresh, expected, found)
    if isinstance(cause, _Excused):
        return " ".join(filter(None, (cause.before, f"{told}." if told and cause.after else told, cause.after))) or None
    # Looking for the place takes what a whole forward saves.
    place = None if low_memory else first_difference_place(graph, module, fresh, difference[0])
    raise _inexact(module, difference[1], place, cause)


@dataclass(frozen=True, slots=True)
class _Excused:
    """A difference that is none of the trace, and what is to be told of it, around what is told of the data."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of a module and of its graph. Each has its own copy of the data: a module may write into its inputs."""

    graph: BGraph | DGraph
    module: torch.nn.Module
    spool: Spool | None
    is_still: bool

    def eagerly(self, data: Sample, private: bool = False) -> StepRecord:
        """One of the module."""
        return self._recorded(data, partial(Sample.call, module=self.module), private)

    def by_graph(self, data: Sample, private: bool = False) -> StepRecord:
        """One of the graph."""
        return self._recorded(data, partial(run_graph, self.graph, self.module), private)

    def _recorded(self, data: Sample, run: Callable[[Sample], Any], private: bool) -> StepRecord:
        own, left, how = self.graph.generators, self.graph.attributes, How(private, self.is_still)
        return record_step(self.module, data.copy(), run, 0, self.spool, own, left, how)

    def cause(self, data: Sample, expected: StepRecord, found: StepRecord) -> _Excused | str:
        """Why steps on the same data differ, in words."""
        other_numbers = _of_other_numbers(found, lambda: self.eagerly(data))
        if other_numbers is not None:
            return _Excused(before=other_numbers)
        again, replayed = self.eagerly(data), self.by_graph(data)
        itself, orderly = again.first_difference(expected), are_orderly(module_devices(self.module, data.tensors))
        disturbed = again.streams_differ(expected) or replayed.streams_differ(found)
        if not disturbed and orderly and (itself or replayed.first_difference(found)):
            # By chance, others may have drawn as much in both runs, but at other moments: then not in all runs.
            disturbed = any(self.eagerly(data).streams_differ(expected) for _ in range(_MORE_RUNS))
        if disturbed:
            for _ in range(_RETRIES):
                if self.eagerly(data, private=True).first_difference(self.by_graph(data, private=True)) is None:
                    return _Excused(after=_others_draw(self.module))
        elif itself is not None and not orderly:
            if differ_by_order_alone(lambda: self.eagerly(data), lambda: self.by_graph(data)):
                return _Excused()
        return _cause(disturbed, itself)


def _cause(disturbed: bool, itself: str | None) -> str:
    """Why a trace may differ from its module, which differs from `itself` so."""
    if disturbed:
        return (
            "Besides, equal runs leave PyTorch's random stream in different states: another thread draws from it, or "
            "seeds it, while the module is planned, or the module does not draw as often in each run. Plan before such "
            "threads start (Rockmate(model, sample, ...), plan_for(sample))."
        )
    if itself is not None:
        return f"The module differs from itself between two runs, too ({itself}): it is not deterministic."
    return "Control flow that depends on data, or side effects in forward, are the usual causes."


def _inexact(module: torch.nn.Module, difference: str, place: Place | None, cause: str) -> ReplayMismatch:
    cause = f"The first operation that differs is {place.text}. {cause}" if place else cause
    return ReplayMismatch(
        f"the trace of {type(module).__name__} is not exact on fresh data: {difference}. {cause} "
        "Rewrite that part with tensor operations, or keep it outside the module.",
        place.path if place else "",
    )


def _others_draw(module: torch.nn.Module) -> str:
    return (
        f"another thread draws PyTorch's random numbers, or seeds them, while {type(module).__name__} is planned. "
        "Planning puts the random stream back where it was, so that such numbers may come again: plan "
        "before such threads start, or give them generators of their own"
    )


def _of_other_numbers(found: StepRecord, run: Callable[[], StepRecord]) -> str | None:
    """What to tell where the module's `run` gives what was `found`, but for checkpoints that draw other numbers."""
    with random_numbers_restored() as places:
        restored = run()
    return told_of_other_numbers(places[0]) if places and restored.first_difference(found) is None else None


def _count_read(module: torch.nn.Module) -> str:
    """What to do about normalisations that read in Python how many batches they have averaged over."""
    counting = [
        repr(path or "(root)")
        for path, submodule in module.named_modules()
        if isinstance(submodule, BatchNorm) and submodule.momentum is None and submodule.training
        if submodule.track_running_stats
    ]
    if not counting:
        return ""
    return (
        f" Submodule {', '.join(counting[:_SHOWN])} averages over all batches (momentum=None), and reads their count "
        "for that: give it a number as momentum, or keep it in eval mode."
    )


@dataclass(frozen=True, slots=True)
class _Reference:
    """Data that a module takes, its own step on them, and what it did not take."""

    data: Sample
    record: StepRecord
    offer: Offer
    tried: list[tuple[Offer, str]]  # offers that it refused, and its words
    left: list[Offer]  # those that prove less

    def told(self, module: torch.nn.Module) -> str | None:
        """What the user is to know of it: nothing where random data were taken."""
        if self.offer.is_random:
            return None
        names = "; ".join(f"{offer.words} ({words})" for offer, words in self.tried)
        return (
            f"{type(module).__name__} takes no random data: its trace was compared with it on {self.offer.words}. "
            f"Tried before: {names}. That the trace holds for other batches is shown by less than usual: what Python "
            "reads out of the data is still checked at every run. rockmate.verify compares on a batch that you choose."
        )


def _reference(
    module: torch.nn.Module,
    sample: Sample,
    eagerly: Callable[[Sample], StepRecord],
    among: list[Offer] | None = None,
) -> _Reference:
    """Of what is offered, the data that prove most of those that the module takes.

    Raises `TraceError` where it takes none, not even the sample.
    """
    remaining, tried = list(offers(sample)) if among is None else list(among), list[tuple[Offer, str]]()
    blind: _Reference | None = None
    while remaining:
        offer = remaining.pop(0)
        try:
            data = offer.of(sample, 0)
            record = eagerly(data)
        except RockmateError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a user's module raises
            tried.append((offer, refused(error)))
            continue
        found = _Reference(data, record, offer, list(tried), list(remaining))
        if not record.has_nan:
            return found
        blind = blind or found  # of a model that gives NaN for all data, this is as good as any
        tried.append((offer, "gives NaN"))
    if blind is not None:
        return blind
    names = "; ".join(f"{offer.words} ({words})" for offer, words in tried)
    raise TraceError(
        f"{type(module).__name__} ran on the sample when it was traced, but now fails on all data that were tried: "
        f"{names}. Run a forward and a backward twice on the sample: if the second fails, its first call changes it. "
        "On a GPU, an index out of range ends every later call, so plan once on the CPU to see which."
    )


class Place(NamedTuple):
    """Of an operation."""

    text: str
    path: str  # of the submodule that it calls, if it calls one


def first_difference_place(graph: BGraph | DGraph, module: torch.nn.Module, fresh: Sample, entry: str) -> Place | None:
    """The first operation whose result the module does not compute on `fresh` data, and its place in the source.

    Where all results are right and a gradient is not, the operation that reads that parameter.
    """
    with module_state_kept(module, own=graph.generators):
        with torch.enable_grad():
            _move_on(module, fresh, 1)  # as in `record_step`
        seed_streams(0, module, graph.generators)
        with module_state_kept(module):  # the graph is to start from the same buffers
            digests = computed_digests(module, fresh.copy(), [call.path for call in opaque_calls(graph.nodes)])
        seed_streams(0, module, graph.generators)
        wrong: list[Any] = []

        def observe(node: Any, values: dict[str, Any]) -> None:
            if node.call.op_name in _UNINITIALISED:
                return
            if not wrong and any(digest(values[name]) not in digests for name in node.output_names):
                wrong.append(node)

        values = given(graph, module, fresh.copy().tensors)
        with torch.no_grad():
            run_nodes(graph.nodes, values, [], observe)
    if not wrong:
        path = entry.removeprefix("gradient of ")
        names = {leaf.name for leaf in graph.leaves.values() if leaf.path == path}
        wrong = [node for node in graph.nodes if not names.isdisjoint(node.call.inputs)][:1]
    if not wrong:
        return None
    place = f"%{wrong[0].name} ({wrong[0].source})"
    if leaves((wrong[0].call.args, wrong[0].call.kwargs), is_own_generator):
        place += (
            ", which draws from a generator that must be made before the first call, and be seeded outside of forward"
        )
    called = opaque_calls(wrong)
    return Place(place, called[0].path if called else "")
