"""From a module and a sample to all its graphs: the whole story on one screen."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rkgb.capture.trace import FrontEnd, Tracer, trace
from rkgb.devices.out_of_memory import collect_failed, is_out_of_memory, out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.errors import ReplayMismatch, RockmateError, TraceError, TraceWarning
from rkgb.ir.bgraph import BGraph, LeafKind
from rkgb.ir.blocks import Block
from rkgb.ir.call import is_ref, ref_names
from rkgb.ir.dgraph import DGraph, run_nodes
from rkgb.ir.kgraph import KGraph
from rkgb.ir.profiles import BlockProfile
from rkgb.ir.sample import Sample, make_sample, refuse_devices
from rkgb.ir.sgraph import SGraph
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.cut import chain, cut
from rkgb.passes.d_to_s import d_to_s
from rkgb.passes.equivalence import equivalent_classes
from rkgb.passes.expand import expand_composites
from rkgb.passes.partition import SubGraph, partition
from rkgb.passes.s_to_k import s_list_to_k_list, s_to_k
from rkgb.process.autocast import Autocast
from rkgb.profile.in_context import measure_in_context
from rkgb.profile.measure import MeasuredBlocks, measure_blocks
from rkgb.replay.first_call import left_as_it_was
from rkgb.replay.replay import given, replay_check
from rkgb.replay.unsteady import unsteady_submodules
from rkgb.replay.varying import without_varying_guards
from rkgb.state.attributes import Writing, is_a_loss
from rkgb.state.generators import GeneratorsMet, MeetingGenerators
from rkgb.state.module_state import for_planning, module_devices, module_state_kept
from rkgb.state.side_effects import Unrepeatable
from rkgb.tree import leaves, map_leaves

Stage = Callable[[str, int, int], None]
"""Told of progress: the stage's name, how many of its parts are done, and how many there are."""

OrNone = Literal["or none"]
"""A trace is compared with its module where there is the memory for it."""


_DEEPEST_BY_JIT = 100  # levels of modules: torch.jit.trace takes the cube of their number
_ADVICE = (
    "Planning takes what a forward without gradients takes, and the step of the largest block: give a sample with a "
    "smaller batch, or free memory first."
)

Backward = Callable[[Any], object]
"""Called with an output like the model's: runs a backward into its tensors, as a loss does."""


@dataclass(eq=False)
class AllGraphs:
    """Every graph of one module on one sample."""

    B_graph: BGraph
    D_graph: DGraph
    S_graph: SGraph
    S_graph_list: list[Block]
    equivalent_classes: list[list[int]]  # indices of blocks that are the same but for names
    K_graph: KGraph
    profiles: list[BlockProfile]  # of each block: what was measured

    @functools.cached_property
    def K_graph_list(self) -> list[KGraph]:  # noqa: N802, as all graphs are called
        """The K graph of each block by itself."""
        return s_list_to_k_list(self.S_graph, self.S_graph_list, self.profiles)

    @functools.cached_property
    def sub_graphs(self) -> list[SubGraph]:
        """Each block as a tree: one that is too large to be solved at once has parts, and these have parts."""
        return [partition(self.S_graph, block) for block in self.S_graph_list]

    @property
    def blocks(self) -> list[Block]:
        """The chain: `S_graph_list`."""
        return self.S_graph_list


def make_all_graphs(
    model: torch.nn.Module,
    sample: Any,
    model_kwargs: dict[str, Any] | None = None,
    verbose: bool | Stage = False,
    *,
    tracer: Tracer = "auto",
    low_memory: bool | None = None,
    backward: Backward | None = None,
    opaque: Sequence[torch.nn.Module] = (),
) -> AllGraphs:
    """Trace, inspect, simplify, cut and measure `model` in training mode on `sample`.

    `sample` is a tensor, a tuple of positional arguments or a dict of keyword arguments. `verbose` says on the
    standard error stream what is being done; a function is told of it instead. `tracer` is
    ``"jit"``, ``"record"`` or ``"auto"``: the first of the two whose trace proves exact. `low_memory`
    checks the trace with autograd's saved tensors on disk; None does so where a whole training step might
    not fit, or did not; False never. `backward`, called once with an output like the model's, does what the loss
    does: what it hands no gradient to has none in the K graph; without it, every differentiable output has one.
    Calls of the submodules in `opaque`, and of those that `torch.compile` has compiled, are one operation each. The
    model is left as it was: modes, buffers, gradients, random streams.

    Raises `SampleError` for a sample that does not fit, `TraceError` for a module that cannot be traced exactly, and
    what the allocator raises, with a note, where there is less memory than a forward without gradients and the step
    of the largest block take.
    """
    tell = verbose if callable(verbose) else _say if verbose else _say_nothing
    arguments = make_sample(model, sample, model_kwargs)
    refuse_devices(model, arguments)
    with left_as_it_was(model, arguments) as first, first.told(), for_planning(model):
        tell("trace", 0, 4)
        basic, dataflow = exact_trace(
            model, arguments, tracer, low_memory=low_memory, on_stage=tell, is_still=first.is_still, opaque=opaque
        )
        if backward is not None:
            dataflow = with_trained_outputs(dataflow, model, arguments, backward)
        return measured_graphs(basic, d_to_s(dataflow), model, arguments, tell)


def measured_graphs(
    basic: BGraph,
    simplified: SGraph,
    model: torch.nn.Module,
    sample: Sample,
    on_stage: Stage | None = None,
    known: MeasuredBlocks | None = None,
) -> AllGraphs:
    """All graphs of a trace and its S graph: blocks, their times and bytes measured on `sample`, and what they join to.

    `model` is to be in the mode in which it was traced. `known` blocks are not measured again.
    """
    tell = on_stage or _say_nothing
    blocks = cut(simplified, chain(simplified).skip_values)
    with out_of_memory_told(f"while the blocks of {type(model).__name__} were measured", _ADVICE):
        profiles = measure_blocks(simplified, blocks, model, sample, tell, known)
    whole = s_to_k(simplified, blocks, profiles)
    measure_in_context(whole, profiles, model, sample)
    classes = equivalent_classes(simplified.dgraph, blocks)
    return AllGraphs(basic, simplified.dgraph, simplified, blocks, classes, whole, profiles)


def with_trained_outputs(
    graph: DGraph,
    model: torch.nn.Module,
    sample: Sample,
    backward: Backward,
    returned: Sequence[torch.Tensor] = (),
) -> DGraph:
    """The same graph with `trained` filled in: the loss runs on an output, to see which tensors get a gradient.

    Single numbers that forward leaves in attributes are losses by themselves, whether or not `backward` knows of them:
    where it does not, they are `assumed`.
    The tensors that a call of the module on the sample has `returned` may be given: else the graph is run for them.
    """
    doing = f"while the loss ran on the output of {type(model).__name__}, to see what it takes"
    with out_of_memory_told(doing, _ADVICE), module_state_kept(model, own=graph.generators):
        names = [ref.name for ref in leaves(graph.output, is_ref)]
        known = [(tuple(tensor.shape), tensor.dtype) for tensor in returned]
        if not graph.attributes and known == [(graph.values[name].shape, graph.values[name].dtype) for name in names]:
            values: dict[str, Any] = dict(zip(names, returned, strict=True))
        else:
            values = given(graph, model, sample.copy().tensors)
            with torch.no_grad():
                run_nodes(graph.nodes, values, graph.output_names)
        outputs = {
            name: values[name].detach().requires_grad_(graph.values[name].requires_grad) for name in graph.output_names
        }
        del values
        Writing(graph.attributes, model).write(lambda ref: outputs[ref.name], is_ref)  # the loss may read them there
        with torch.enable_grad():
            backward(map_leaves(lambda ref: outputs[ref.name], graph.output, is_ref))
    reached = {name for name, tensor in outputs.items() if tensor.grad is not None}
    losses = losses_left(graph)
    return replace(graph, trained=losses | reached, assumed=losses - reached)


def losses_left(graph: DGraph) -> frozenset[str]:
    """Single numbers that forward leaves in attributes, and that take gradients."""
    left = ref_names([write.value for write in graph.attributes])
    return frozenset(name for name in left if graph.values[name].requires_grad and is_a_loss(graph.values[name].shape))


def _say_nothing(name: str, done: int, total: int) -> None:
    """Nobody asked to be told."""


def _say(name: str, done: int, total: int) -> None:
    sys.stderr.write(f"rkgb: {name} {done}/{total}\n")


def exact_trace(
    model: torch.nn.Module,
    sample: Sample,
    tracer: Tracer = "auto",
    *,
    low_memory: bool | OrNone | None = None,
    on_stage: Stage | None = None,
    may_branch: bool = False,
    is_still: bool = False,
    opaque: Sequence[torch.nn.Module] = (),
) -> tuple[BGraph, DGraph]:
    """The trace of one front end, or under ``"auto"`` of the first, that the replay check accepts.

    A graph that `may_branch` is also accepted where it holds for data like the sample's alone, which its guards check.
    With `low_memory` "or none" any is where not even the check on disk has the memory that it takes, with a warning: it
    is to be compared with a trace of the same module that was checked.

    Raises `TraceError` or `ReplayMismatch` with what the last one failed at, or the module's own error where it does
    not run on the sample; warns (`TraceWarning`) of side effects of forward that no run of the graph repeats. Where
    autocast is on, its casts are operations of the graph, which is run without it.
    """
    tell = on_stage or _say_nothing
    refuse_devices(model, sample)
    cast = Autocast.now().regions
    if cast and tracer == "jit":
        raise TraceError(
            f'autocast is on for {cast[0][0]}, whose casts torch.jit.trace does not record. Use tracer="record".'
        )
    tracer = "record" if cast else tracer
    with out_of_memory_told(f"while {type(model).__name__} was traced, and the trace checked", _ADVICE):
        has_data = all(device_of(device).has_data for device in module_devices(model, sample.tensors))
        asked, or_none = (None, True) if low_memory == "or none" else (low_memory, False)
        check = _Check(asked, may_branch, is_still, tell, tuple(opaque), has_data, or_none)
        basic, dataflow = _believed_trace(model, sample, tracer, check)
    for told in basic.side_effects:
        warnings.warn(told, TraceWarning, stacklevel=2)
    return basic, dataflow


def trace_like(
    known: BGraph, model: torch.nn.Module, sample: Sample, opaque: Sequence[torch.nn.Module] = ()
) -> tuple[BGraph, DGraph]:
    """A trace by the front end of a `known` one, which nobody has compared with the module.

    For calls of other sizes, where whoever takes what it says of these compares it with what then is found. Raises
    `TraceError`.
    """
    tracer: FrontEnd = "record" if known.tracer == "record" else "jit"
    check = _Check(None, may_branch=False, is_still=True, tell=_say_nothing, opaque=tuple(opaque), is_needed=False)
    with out_of_memory_told(f"while {type(model).__name__} was traced", _ADVICE):
        return _front_end(model, sample, tracer, check)


def _believed_trace(model: torch.nn.Module, sample: Sample, tracer: Tracer, check: _Check) -> tuple[BGraph, DGraph]:
    if tracer == "auto" and max(path.count(".") for path, _ in model.named_modules()) >= _DEEPEST_BY_JIT:
        tracer = "record"
    try:
        return _front_end(model, sample, "jit" if tracer == "auto" else tracer, check)
    except TraceError as first:
        if tracer != "auto" or is_out_of_memory(first):
            raise
        try:
            return _front_end(model, sample, "record", check)
        except TraceError as error:
            error.add_note(f"(torch.jit.trace, tried first: {first})")
            if is_out_of_memory(error):
                raise
            raise error from None


def _raise_the_models_own(model: torch.nn.Module, sample: Sample) -> None:
    """Run the module as it is: what it raises on the sample is its own error, and no reason against a trace."""
    met = GeneratorsMet(model)
    try:
        with module_state_kept(model), met.given_back(), MeetingGenerators(met):
            sample.copy().call(model)
    except Exception as own:
        own.add_note(f"(raised by {type(model).__name__} itself on the sample with which it was to be planned)")
        raise own from None


def _with_one_operation_more(
    model: torch.nn.Module, sample: Sample, tracer: FrontEnd, check: _Check, error: Unrepeatable
) -> tuple[BGraph, DGraph]:
    """The same where the submodule that no graph repeats is one operation. Raises `error` where none can be.

    What else no graph repeats is the reason then, with a note of the first.
    """
    whole = check.with_opaque(filter(None, [error.path]), model)
    if tracer == "jit" or len(whole.opaque) == len(check.opaque):
        raise error
    try:
        basic, dataflow = _front_end(model, sample, tracer, whole)
    except TraceError as other:
        if other.__cause__ is not None and not isinstance(other.__cause__, RockmateError):  # it does not run so
            raise error from other
        if isinstance(other, ReplayMismatch) and other.path == error.path:  # it does something else each time
            raise error from other
        other.add_note(f"(with submodule {error.path!r} as one operation, because {error})")
        raise other from None
    basic.side_effects.append(
        f"submodule {error.path!r} is one operation of the graph, and is never recomputed: {error}"
    )
    return basic, dataflow


def _front_end(model: torch.nn.Module, sample: Sample, tracer: FrontEnd, check: _Check) -> tuple[BGraph, DGraph]:
    """The finest trace of one front end that the replay check accepts."""
    tell = check.tell
    # On copies: a forward that writes into its input would change the user's data at each run.
    tell("trace", 0, 4)
    try:
        basic = trace(model, sample.copy(), tracer, check.opaque)
    except Unrepeatable as error:
        return _with_one_operation_more(model, sample, tracer, check, error)
    except TraceError as error:
        if error.__cause__ is not None and not is_out_of_memory(error):
            _raise_the_models_own(model, sample)
        raise
    tell("trace", 1, 4)
    fine = basic
    try:
        if tracer == "jit":
            fine = expand_composites(basic, model, sample.copy())
        dataflow = b_to_d(fine, model, sample)
    except Exception as error:
        raise TraceError(
            f"what {tracer!r} traced of {type(model).__name__} does not run: {type(error).__name__}: {error}"
        ) from error
    _refuse_input_writes(model, dataflow)
    tell("trace", 2, 4)
    if check.low_memory is None and _step_is_too_large(model, dataflow):
        check = replace(check, low_memory=True)
    if tracer == "jit":
        tell("trace", 3, 4)
        if fine.nodes != basic.nodes:
            with contextlib.suppress(ReplayMismatch):
                told = check.accept(dataflow, model, sample)
                fine.side_effects += [told] if told else []
                tell("trace", 4, 4)
                return fine, dataflow
            dataflow = b_to_d(basic, model, sample)
    else:
        basic, dataflow = without_varying_guards(basic, dataflow, model, sample, check.opaque)
        whole = check.with_opaque(unsteady_submodules(basic, model, sample), model)
        if len(whole.opaque) > len(check.opaque):
            with contextlib.suppress(TraceError):  # then it is refused for what it reads, or branches
                return _front_end(model, sample, tracer, whole)
    try:
        told = check.accept(dataflow, model, sample)
    except ReplayMismatch as error:
        raise ReplayMismatch(
            " ".join([f"{error}", *(f"Besides, {effect}" for effect in basic.side_effects)]), error.path
        ) from error
    if told is not None:
        basic.side_effects.append(told)
    tell("trace", 4, 4)
    return basic, dataflow


@dataclass(frozen=True, slots=True)
class _Check:
    """How a module is traced, and the trace compared with it."""

    low_memory: bool | None
    may_branch: bool
    is_still: bool  # calls leave the module as it was
    tell: Stage
    opaque: tuple[torch.nn.Module, ...] = ()
    is_needed: bool = True  # else any trace that runs is accepted
    or_none: bool = False  # so it is where there is not the memory for a comparison

    def with_opaque(self, paths: Iterable[str], model: torch.nn.Module) -> _Check:
        """The same with these submodules of `model` opaque as well."""
        parts = [model.get_submodule(path) for path in paths]
        more = [part for part in parts if all(part is not other for other in self.opaque)]
        return replace(self, opaque=(*self.opaque, *more))

    def accept(self, graph: DGraph, model: torch.nn.Module, sample: Sample) -> str | None:
        """The replay check in memory, or, where that may not or does not suffice, on disk."""
        if not self.is_needed:
            return None
        if not self.low_memory:
            try:
                return replay_check(graph, model, sample, False, self.may_branch, self.is_still)
            except Exception as error:
                if self.low_memory is False or not is_out_of_memory(error):
                    raise
            collect_failed()
        self.tell("trace (checked on disk: a whole step may not fit the memory)", 3, 4)
        try:
            return replay_check(graph, model, sample, True, self.may_branch, self.is_still)
        except Exception as error:
            if not self.or_none or not is_out_of_memory(error):
                raise
        collect_failed()
        return (
            f"there was not the memory to compare the trace of {type(model).__name__} with it on data of this size. It "
            "was compared when its plan was made; rockmate.verify compares on a smaller batch"
        )


_STEP_OVER_VALUES = 3  # a step holds gradients and what operations save beside the values that the graph names


def _step_is_too_large(model: torch.nn.Module, graph: DGraph) -> bool:
    """Whether a whole training step might not fit the device."""
    for device in {info.device for info in graph.values.values()}:
        own = [info for name, info in graph.values.items() if info.owner == name and info.device == device]
        values_bytes = sum(info.storage_bytes for info in own)
        gradients_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.device == device)
        if _STEP_OVER_VALUES * values_bytes + 2 * gradients_bytes > device_of(device).available_bytes():
            return True
    return False


def _refuse_input_writes(model: torch.nn.Module, graph: DGraph) -> None:
    for op in graph:
        for name in op.written:
            leaf = graph.leaves.get(graph.owner(name))
            if leaf is not None and leaf.kind is LeafKind.INPUT:
                raise TraceError(
                    f"{op.name} ({op.source}) writes into input {leaf.index} of {type(model).__name__} in place: "
                    "running it again would start from changed data. Clone the input first in forward."
                )
