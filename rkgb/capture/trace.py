"""Module and sample to B graph, by one of two front ends.

``torch.jit.trace`` and a walk of its inlined graph: operations stay composite (linear, layer_norm,
scaled_dot_product_attention), half the nodes of a dispatcher-level trace and fewer Python calls. What
that tracer cannot see (regions without gradient, values read from data) is restored or refused.
Recording the operations that really run (`rkgb.recording.record`) sees all of it. The replay check has the
last word on both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch

from rkgb.capture.asked import Asking
from rkgb.capture.jit_walker import JitWalker
from rkgb.capture.left_behind import CarriedState, LeftBehind, tensors_again
from rkgb.capture.outliving import outliving
from rkgb.capture.statistics import with_statistics_hidden
from rkgb.errors import TraceError
from rkgb.ir.bgraph import BGraph
from rkgb.ir.call import Ref, is_ref, opaque_calls
from rkgb.ir.opaque import Interception, OpaqueModules
from rkgb.ir.sample import Sample
from rkgb.opaque.calls import recorded_call, refuse_uncalled, told_of_calls
from rkgb.opaque.jit import JitCalls
from rkgb.process.turns import warnings_collected
from rkgb.recording.digest import digest
from rkgb.recording.draws import refuse_draws_from_objects, told_of_draws
from rkgb.recording.guard import Guard
from rkgb.recording.record import BackwardInside, Recorder, as_if_by_jit, call_saving_nothing, nothing_saved, recording
from rkgb.state.attributes import AttributeWrite, Snapshot, with_refs
from rkgb.state.generators import MeetingGenerators
from rkgb.state.module_state import module_state_kept
from rkgb.state.side_effects import SideEffects
from rkgb.torch_private.tracers import TracerWarning, let_go_of_graphs, unnamed_by_jit
from rkgb.tree import leaves, map_leaves

FrontEnd = Literal["jit", "record"]
Tracer = Literal["auto"] | FrontEnd


class _Flat(torch.nn.Module):
    """The module as the tracer wants it: flat tensors in, a tuple of tensors out."""

    def __init__(self, module: torch.nn.Module, sample: Sample, attributes: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()
        self.wrapped = module
        self.sample = sample
        self._left_behind = attributes  # the tensors that forward has left in attributes
        self.output: Any = None  # what the module returned: the structure to rebuild

    def let_go(self) -> Any:
        """What the module returned. Nothing more is held of it, or of the sample."""
        output, self.output, self.sample = self.output, None, Sample((), {})
        return output

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.output = self.sample.with_tensors(list(tensors)).call(self.wrapped)
        return (*leaves(self.output), *self._left_behind())


def trace(
    module: torch.nn.Module, sample: Sample, tracer: FrontEnd = "jit", opaque: Iterable[torch.nn.Module] = ()
) -> BGraph:
    """What `module` runs on `sample`, as seen by one of the two front ends. The module is left as it was.

    ``"jit"``: composite operations, by ``torch.jit.trace``; refused where forward reads numbers out of its
    data, as nothing in such a trace would check them. ``"record"``: the operations below autograd, with guards
    for such reads. Calls of compiled submodules, and of those given as `opaque`, are one operation each.
    Tracing takes about as much memory as inference: autograd's saved tensors are dropped.

    Raises `TraceError` when the module cannot be traced, naming the operation and what to change.
    """
    submodules = OpaqueModules(module, opaque)
    _refuse_scripted(submodules)
    _refuse_backward_hooks(submodules)
    flags = [tensor.requires_grad for tensor in sample.tensors]
    front_end = _trace_by_jit if tracer == "jit" else _trace_by_recording
    try:
        graph, output = front_end(module, sample, True, submodules)
    except BackwardInside:  # its gradient needs what is saved: this takes more memory
        for tensor, flag in zip(sample.tensors, flags, strict=True):
            tensor.requires_grad_(flag)  # forward may have let it require one
        graph, output = front_end(module, sample, False, submodules)
    if not leaves(output):
        raise TraceError(f"{type(module).__name__}.forward returned no tensor. Return what the loss is made of.")
    graph.tracer = tracer
    graph = with_statistics_hidden(graph)
    graph.verify()
    return graph


def _trace_by_jit(module: torch.nn.Module, sample: Sample, frugal: bool, opaque: OpaqueModules) -> tuple[BGraph, Any]:
    effects, recorder, writes = _refuse_reads(module, sample, frugal, opaque)
    flat = _Flat(module, sample, partial(tensors_again, effects.held, writes))
    flat.training = module.training
    generators = recorder.generators
    with (
        module_state_kept(module, own=generators.found),
        nothing_saved(frugal),
        Interception(opaque, JitCalls(opaque_calls(recorder.nodes))).on(),
        warnings_collected() as caught,
        unnamed_by_jit(),
        Asking(),
    ):
        try:
            traced = torch.jit.trace(flat, tuple(sample.tensors), check_trace=False, strict=False)
        except TraceError:
            raise
        except Exception as error:
            raise _failed(module, error) from error
    # The traced module is part of a cycle: it would hold every activation, and the data, until it is collected.
    output = flat.let_go()
    walker = JitWalker(module, sample, generators)
    try:
        walker.walk(traced)
    finally:
        let_go_of_graphs(traced, flat)
    remaining = iter(walker.output_refs)
    told = [str(warning.message) for warning in caught if issubclass(warning.category, TracerWarning)]
    graph = BGraph(
        nodes=walker.nodes,
        leaves=walker.leaves,
        output=map_leaves(lambda _: next(remaining), output),
        warnings=told,
        side_effects=effects.told,
        generators=generators.found,
        attributes=tuple(with_refs(write, lambda _: next(remaining), is_ref) for write in writes),
        questions=tuple(walker.questions),
    )
    return graph, output


def _refuse_reads(
    module: torch.nn.Module, sample: Sample, frugal: bool, opaque: OpaqueModules
) -> tuple[SideEffects, Recorder, list[AttributeWrite]]:
    """Refuse what reads out of its data on the way that it takes under ``torch.jit.trace``.

    That tracer takes all that Python reads for fixed. Whether it read of shapes or of data shows when the
    same way is recorded; some models only skip an all-true mask where nobody traces them.
    """
    recorder = Recorder(module, sample)
    _, effects, writes = _record(module, sample, recorder, frugal, opaque, as_if_by_jit())
    guards = [node.call.function for node in recorder.nodes if isinstance(node.call.function, Guard)]
    if guards:
        raise TraceError(
            f"{type(module).__name__} reads out of its data: {guards[0]!r} at {guards[0].place}. torch.jit.trace takes "
            'what it read for fixed, and nothing would check it: use tracer="record".'
        )
    # Without the tensors: those of the trace are others, and these would be held meanwhile.
    return effects, recorder, [with_refs(write, lambda _: Ref("")) for write in writes]


def _trace_by_recording(
    module: torch.nn.Module, sample: Sample, frugal: bool, opaque: OpaqueModules
) -> tuple[BGraph, Any]:
    recorder = Recorder(module, sample)
    output, effects, writes = _record(module, sample, recorder, frugal, opaque, contextlib.nullcontext())
    result = map_leaves(recorder.ref, output)
    graph = BGraph(
        recorder.nodes,
        recorder.leaves,
        result,
        side_effects=effects.told,
        generators=recorder.generators.found,
        attributes=tuple(with_refs(write, recorder.ref) for write in writes),
    )
    return graph, output


def _record(
    module: torch.nn.Module,
    sample: Sample,
    recorder: Recorder,
    frugal: bool,
    opaque: OpaqueModules,
    inside: contextlib.AbstractContextManager[None],
) -> tuple[Any, SideEffects, list[AttributeWrite]]:
    effects = SideEffects(opaque.outside)
    calls = Interception(opaque, effects.passed_over(partial(recorded_call, recorder)))
    flags = [tensor.requires_grad for tensor in sample.tensors]
    with module_state_kept(module), recorder.generators.given_back():
        with effects.watched(), inside, recording(recorder, frugal), calls.on():
            try:
                output = sample.call(module)
            except TraceError:
                raise
            except Exception as error:
                raise _failed(module, error) from error
        _refuse_new_gradients(module, sample, flags)
        effects.tell()
        refuse_draws_from_objects(effects.drawn_from_objects)
        if effects.drawn:
            effects.told += told_of_draws(effects.drawn, module, sample)
        _refuse_outliving(recorder, module, (output, sample), effects)
        writes = _left_behind(module, sample, recorder, frugal, effects)
    effects.told += told_of_calls(recorder.nodes)
    refuse_uncalled(module, opaque, calls.called)
    return output, effects, writes


def _refuse_outliving(recorder: Recorder, module: torch.nn.Module, known: Any, effects: SideEffects) -> None:
    """Raise `TraceError` for tensors that are put where no run of the graph puts any; of hooks, that is told."""
    held = [*Snapshot(module.named_modules()).tensors(), *module.parameters(), *module.buffers()]
    found = outliving(recorder.alive(), [*leaves(known), *held])
    if found is None or effects.has_hooks:
        return
    name, holder = found
    node = next(node for node in recorder.nodes if name in node.output_names)
    raise TraceError(
        f"forward puts the tensor %{name} ({node.source}) into {holder}: a planned call would put none there. Keep it "
        "in an attribute of the module, or return it."
    )


def _left_behind(
    module: torch.nn.Module, sample: Sample, recorder: Recorder, frugal: bool, effects: SideEffects
) -> list[AttributeWrite]:
    """What the forward that was recorded has left in attributes, as other calls do."""
    left = LeftBehind(module, effects.held)
    if not left.look(effects.was_set):
        return []
    if effects.made_hooks and _calls_are_alike(module, sample, effects):
        left.first_decides_nothing()

    def run_again() -> None:
        with nothing_saved(frugal), MeetingGenerators(recorder.generators):
            try:
                sample.copy().call(module)
            except TraceError:
                raise
            except Exception as error:
                raise _failed(module, error) from error

    writes = left.writes(run_again, recorder.is_from_data)
    for write in writes:
        for tensor in leaves(write.value):
            if tensor.requires_grad and not recorder.is_known(tensor):
                raise CarriedState("keeps a tensor that none of its operations computes", f"the {write}", write.path)
    return writes


def _calls_are_alike(module: torch.nn.Module, sample: Sample, effects: SideEffects) -> bool:
    """Whether a call after the first gives what the first does, bit by bit."""
    with module_state_kept(module):
        later = [digest(tensor.detach()) for tensor in leaves(call_saving_nothing(module, sample.copy()))]
    with module_state_kept(module):
        effects.take_back()
        first = [digest(tensor.detach()) for tensor in leaves(call_saving_nothing(module, sample.copy()))]
    return first == later


def _failed(module: torch.nn.Module, error: Exception) -> TraceError:
    return TraceError(
        f"{type(module).__name__} cannot be traced: {type(error).__name__}: {error}. The module runs "
        "by itself: replace what depends on Python side effects, or let the submodule be one operation: opaque=[it]."
    )


def _refuse_new_gradients(module: torch.nn.Module, sample: Sample, before: list[bool]) -> None:
    for index, (tensor, flag) in enumerate(zip(sample.tensors, before, strict=True)):
        if tensor.requires_grad and not flag:
            raise TraceError(
                f"forward lets input {index} of {type(module).__name__} require a gradient: a run of the graph would "
                "not do that. Do so before the call (positions.requires_grad_()), or in forward on a tensor of its own "
                "(positions = positions.detach().requires_grad_())."
            )


def _refuse_backward_hooks(opaque: OpaqueModules) -> None:
    for path, submodule in opaque.outside:
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            raise TraceError(
                f"submodule {path or '(root)'!r} has a backward hook: the graph would run without it. Remove the hook, "
                "or put what it does to the gradient into a torch.autograd.Function."
            )


def _refuse_scripted(opaque: OpaqueModules) -> None:
    for path, submodule in opaque.outside:
        if isinstance(submodule, torch.jit.ScriptModule):
            what = f"submodule {path!r}" if path else "the model itself"
            instead = ", or let its call be one operation: opaque=[it]" if path else ""
            raise TraceError(
                f"{what} is compiled by torch.jit ({type(submodule).__name__}): its operations cannot be told apart. "
                f"Use the Python module that it was made from{instead}."
            )
