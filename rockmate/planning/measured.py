"""From a module and a sample to what planning needs: graphs, costs, and the eager step beside them."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from rk_solvers import Chain, KeepAll, Problem
from rkgb import AllGraphs, BGraph, DGraph, KGraph, Sample, SGraph, d_to_s, make_sample
from rkgb.ir.sample import refuse_devices, refuse_without_data
from rkgb.kernels import KERNELS, saved_ms
from rkgb.passes.d_to_s import run_once
from rkgb.pipeline import exact_trace, losses_left, measured_graphs, trace_like, with_trained_outputs
from rkgb.process.autocast import Autocast
from rkgb.profile.measure import MeasuredBlocks
from rkgb.sizes import SizeQuestion
from rkgb.state.module_state import for_planning, main_device, module_devices, module_state_kept
from rockmate.errors import NothingToTrain
from rockmate.guards.asked_sizes import AskingForward
from rockmate.guards.attributes import Settings
from rockmate.guards.checkpointing import as_it_was, is_switched_off
from rockmate.guards.flags import BackEndFlags
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits, TraitsReader
from rockmate.guards.numbers import RunTimeNumbers
from rockmate.guards.sharded import refuse_collectives
from rockmate.kernels.choose import as_chosen as kernels_as_chosen
from rockmate.kernels.choose import with_faster_kernels
from rockmate.kernels.option import ChosenKernels, has_others
from rockmate.memory.allocators import refuse_uncounted
from rockmate.memory.optimizer_state import StateRests, optimizer_state_bytes
from rockmate.memory.split import (
    Residents,
    Scope,
    above_gradients,
    count_residents,
    gradients_made,
    gradients_there,
    put_gradients,
)
from rockmate.planning.costs import LossCost, assumed_loss_cost, build_problem, measure_loss
from rockmate.planning.pins import check_pins, pinned_operations, reading_what_is_written
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import eager_peak_bytes
from rockmate.regions.choose import as_chosen, with_compiled_regions
from rockmate.regions.option import CompiledRegions, is_compiled
from rockmate.runtime.windows import parameters_that_may_rest


@dataclass(eq=False, slots=True)
class Measured:
    """A module ready to be planned for any budget: graphs, costs, and the eager step beside them.

    `eager_peak_bytes` was measured, or is what keep-all is predicted to take where the eager step does not fit the
    device. Where the budget is for all of training there are `residents`, gradients of parameters among them: then
    `problem` and `eager_peak_bytes` are of a step above them; so they are, without, above the `gradients` that were
    there before the step.
    """

    sample: Sample | None  # None once planned: its tensors are the user's to free
    pattern: CallPattern
    graphs: AllGraphs
    problem: Problem
    chain: Chain
    eager_peak_bytes: int
    device: torch.device
    measuring_s: float
    traits: ModuleTraits  # of the module, in the mode in which it was measured
    settings: Settings  # plain values that its forward reads
    residents: Residents | None = None
    pinned: tuple[str, ...] = ()  # operations that the user wants to be saved
    loss: LossCost | None = None  # None where no loss was given
    # Parameters, by their names in the graph, whose gradients are there before the step: it adds to them.
    gradients: frozenset[str] = frozenset()
    numbers: RunTimeNumbers | None = None  # those of the calls and the settings with which the code computes
    # Peak of the step with the model's own checkpointing, which is switched on; None where there is none.
    checkpointed_peak_bytes: int | None = None
    reserved_now_bytes: int | None = None  # by the step as the user has the model; None where nobody asked
    asked_sizes: tuple[SizeQuestion, ...] | None = None  # what forward asks of sizes; None where that is not known
    # Bytes of parameters that may be in a second memory until they are read, by name; none where nobody asked.
    may_rest: Mapping[str, int] = field(default_factory=dict)
    regions: CompiledRegions | None = None  # its parts that are compiled; None where nobody asked
    kernels: ChosenKernels | None = None  # of its operations; None where nobody asked for others
    drawn_sooner_ms: float = 0.0  # than by the eager step: random numbers, by kernels of our own
    threads: int = field(default_factory=torch.get_num_threads)  # of the CPU's operations: each has scratch memory

    def was_measured_as_now(self) -> bool:
        """Whether flags of PyTorch's back ends and the number of threads are as they were."""
        flags = BackEndFlags({self.device, *self.pattern.devices}).now()
        return self.pattern.flags == flags and self.threads == torch.get_num_threads()

    @property
    def eager_time_ms(self) -> float:
        """Of a step that repeats nothing, of which nothing is compiled, and in which all kernels are PyTorch's."""
        compiled_ms = 0.0 if self.regions is None else self.regions.gained_ms
        kernels_ms = 0.0 if self.kernels is None else self.kernels.gained_ms
        return self.problem.keep_all_time_ms + compiled_ms + kernels_ms + self.drawn_sooner_ms

    @property
    def rounds_otherwise(self) -> bool:
        """Whether what it computes is rounded otherwise than by the module itself."""
        return is_compiled(self.regions) or has_others(self.kernels)

    @property
    def peak_now_bytes(self) -> int:
        """What a step takes as the user has the model: a fraction is of that."""
        return self.eager_peak_bytes if self.checkpointed_peak_bytes is None else self.checkpointed_peak_bytes

    def step_now_bytes(self, scope: Scope) -> int:
        """What a fraction of a step's budget is of: most of all that the step allocates now, or reserves."""
        return max(self.peak_now_bytes, self.reserved_now_bytes or 0) if scope == "reserved" else self.peak_now_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are there before the step."""
        made = gradients_made(self.graphs)
        return sum(made[name] for name in self.gradients)


class Trained(NamedTuple):
    """Outputs that the loss hands a gradient to, where that is known before it runs; see `DGraph`."""

    outputs: frozenset[str]
    assumed: frozenset[str]


@dataclass(eq=False, slots=True)
class Traced:
    """A module traced and checked, and nothing of it measured yet but what its loss takes."""

    sample: Sample
    pattern: CallPattern
    basic: BGraph
    graph: SGraph  # pinned operations in it run once
    device: torch.device
    traits: ModuleTraits
    settings: Settings
    pinned: tuple[str, ...]
    loss: LossCost | None
    state_bytes: (
        tuple[int, int] | None
    )  # of the optimizer, in all and already there, where the budget is for all of training
    tracing_s: float
    gradients: frozenset[str]  # parameters whose gradients are there now; none where the budget counts all gradients
    asked_sizes: tuple[SizeQuestion, ...] | None = None  # what forward asks of sizes; None where that is not known
    regions: CompiledRegions | None = None  # its parts that are compiled; None where nobody asked
    kernels: ChosenKernels | None = None  # of its operations; None where nobody asked for others


def measure(model: torch.nn.Module, sample: Any, request: PlanRequest, sibling: Measured | None = None) -> Measured:
    """Trace and measure `model`; leaves it as it was. Beside a `sibling`, of other sizes, the trace is not checked.

    Raises `SampleError`, `TraceError`, `PinError`, `LossError`, `NothingToTrain` for a module without any gradient, and
    what the allocator raises, with a note, where the memory does not suffice for planning.
    """
    return measure_traced(model, trace_model(model, sample, request, sibling=sibling), request)


def trace_model(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    trained: Trained | None = None,
    pinned: dict[str, str] | None = None,
    sibling: Measured | None = None,
) -> Traced:
    """Trace `model`, and check the trace. Raises as `measure`, whose first half it is.

    The outputs that are `trained` may be given: else the loss tells, if there is one. So may the operations that are
    `pinned` beside those that are asked for, and why.
    """
    started = time.perf_counter()
    arguments = make_sample(model, sample)
    refuse_devices(model, arguments)
    refuse_without_data(model, arguments)
    check_pins(model, request.pin)
    place, state_bytes = main_device(module_devices(model, arguments.tensors)), None  # known before what takes minutes
    if request.scope == "reserved":
        refuse_uncounted(place)
    elif request.scope == "total":
        state_bytes = optimizer_state_bytes(request.optimizer, model.parameters(), place)
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *arguments.tensors)):
        raise NothingToTrain(
            f"no parameter of {type(model).__name__} and no tensor of the sample requires a gradient: there is no "
            "training step to plan. Unfreeze a parameter, or use the module as it is."
        )
    refuse_collectives(model, arguments)
    with for_planning(model):
        traits = TraitsReader(model).read()
        basic, dataflow = _trace(model, arguments, request, sibling)
        asked_for = pinned_operations(model, dataflow, request.pin)  # what is none is refused before more is run
        settings, asked_sizes, returned = _read(model, arguments, basic)
        dataflow, loss_cost = _with_loss(dataflow, model, arguments, request, trained, returned)
        del returned
        pinned = {**asked_for, **reading_what_is_written(dataflow, loss_cost), **(pinned or {})}
        dataflow, kernels = _with_kernels(dataflow, request)
        dataflow, regions = _with_regions(dataflow, model, arguments, request, pinned)
        graph = run_once(d_to_s(dataflow), pinned)
    devices = module_devices(model, arguments.tensors)
    return Traced(
        arguments,
        CallPattern.of(arguments, Autocast.now(), BackEndFlags(devices).now()),
        basic,
        graph,
        main_device(info.device for info in dataflow.values.values()),
        traits,
        settings,
        tuple(pinned),
        loss_cost,
        state_bytes,
        time.perf_counter() - started,
        frozenset() if request.scope == "total" else gradients_there(model, dataflow),
        asked_sizes,
        regions,
        kernels,
    )


def measure_traced(
    model: torch.nn.Module, traced: Traced, request: PlanRequest, known: MeasuredBlocks | None = None
) -> Measured:
    """Measure what was traced of `model`; see `measure`."""
    started = time.perf_counter()
    drawn_ms = drawn_sooner_ms(traced.graph.dgraph)
    with for_planning(model):
        graphs = measured_graphs(traced.basic, traced.graph, model, traced.sample, request.progress, known)
    refuse_without_backward(model, graphs.K_graph)
    residents = None
    if traced.state_bytes is not None:
        leaves = graphs.D_graph.leaves.values()
        constants = [leaf.constant for leaf in leaves if leaf.constant is not None]
        gradients_go = isinstance(request.optimizer, StateRests) and request.optimizer.in_backward
        residents = count_residents(
            model, traced.sample.tensors, constants, traced.device, traced.state_bytes, gradients_go
        )
    measured = joined(traced, graphs, residents)
    measured.drawn_sooner_ms = drawn_ms
    if residents is not None and request.tiers is not None:
        trains = isinstance(request.optimizer, StateRests)  # others' steps would ask for all at once
        measured.may_rest = parameters_that_may_rest(model, graphs.K_graph, trains)
    _measure_eager(model, measured, request)
    measured.measuring_s = traced.tracing_s + time.perf_counter() - started
    return measured


def drawn_sooner_ms(graph: DGraph) -> float:
    """What our kernels save of the time of PyTorch's draws. They are proven here if need be, and not within a step."""
    drawn = (graph.values[op.output_names[0]] for op in graph if op.call.function in KERNELS)
    return sum(saved_ms(math.prod(info.shape), info.device) for info in drawn)


def measured_above(
    model: torch.nn.Module, measured: Measured, sample: Sample, request: PlanRequest, gradients: frozenset[str]
) -> Measured:
    """What was `measured` of calls like `sample`, for steps before which other gradients are there.

    Nothing is traced, and nothing measured anew but the eager step.
    """
    started = time.perf_counter()
    problem, chain = problem_of(measured.graphs, measured.loss, None, gradients)
    other = replace(measured, sample=sample, problem=problem, chain=chain, gradients=gradients)
    _measure_eager(model, other, request)
    other.measuring_s = time.perf_counter() - started
    return other


def _measure_eager(model: torch.nn.Module, measured: Measured, request: PlanRequest) -> None:
    """Fill in what the eager step takes."""
    request.progress("eager step", 0, 1)
    assert measured.sample is not None
    with for_planning(model):
        keep_all_peak = KeepAll().solve(measured.problem, sys.maxsize).peak_bytes
        if isinstance(request.budget, int) and not is_switched_off():
            measured.eager_peak_bytes = keep_all_peak  # nothing depends on it
            return
        graph = measured.graphs.D_graph
        borrow = partial(borrowed_with_gradients, model, {measured.device}, graph, measured.gradients)
        step = partial(eager_peak_bytes, model, measured.sample, request.loss, measured.device)
        eager = now = step(keep_all_peak, measured.residents, borrow)
        if is_switched_off():
            with as_it_was():
                now = step(0, measured.residents, borrow)
            measured.checkpointed_peak_bytes = None if now is None else now.allocated_bytes
    if eager is None:
        request.progress("eager step (predicted: it does not fit the memory)", 0, 1)
    measured.eager_peak_bytes = keep_all_peak if eager is None else eager.allocated_bytes
    measured.reserved_now_bytes = None if now is None else now.reserved_bytes
    request.progress("eager step", 1, 1)


@contextlib.contextmanager
def borrowed_with_gradients(
    model: torch.nn.Module, devices: set[torch.device], graph: DGraph, gradients: frozenset[str]
) -> Iterator[None]:
    """`module_state_kept`, where the named parameters of `graph` have gradients, as before the step that is planned."""
    with module_state_kept(model, devices, graph.generators):
        put_gradients(model, graph, gradients)
        yield


def refuse_without_backward(model: torch.nn.Module, graph: KGraph) -> None:
    """Raise `NothingToTrain` where no gradient comes to anything."""
    if not graph.backward:
        raise NothingToTrain(
            f"no gradient reaches an output of {type(model).__name__}: the output does not depend on anything that "
            "requires one. Return the tensor that the loss is made of."
        )


def problem_of(
    graphs: AllGraphs, loss: LossCost | None, residents: Residents | None, gradients: frozenset[str] = frozenset()
) -> tuple[Problem, Chain]:
    """What the solvers are given: a step with that loss, above the gradients that are there.

    Those are all where there are `residents`, which they belong to, and else those named.
    """
    problem, chain = build_problem(graphs, loss or assumed_loss_cost(graphs.K_graph))
    if residents is not None:
        return above_gradients(problem, graphs), chain
    return (above_gradients(problem, graphs, gradients) if gradients else problem), chain


def joined(
    traced: Traced,
    graphs: AllGraphs,
    residents: Residents | None,
    eager_peak_bytes: int = 0,  # 0 until it is measured
) -> Measured:
    """What was traced, with what was measured of it."""
    gradients = traced.gradients.intersection(gradients_made(graphs))
    problem, chain = problem_of(graphs, traced.loss, residents, gradients)
    return Measured(
        traced.sample,
        traced.pattern,
        graphs,
        problem,
        chain,
        eager_peak_bytes,
        traced.device,
        traced.tracing_s,
        traced.traits,
        traced.settings,
        residents,
        traced.pinned,
        traced.loss,
        gradients,
        asked_sizes=traced.asked_sizes,
        regions=traced.regions,
        kernels=traced.kernels,
    )


def _trace(
    model: torch.nn.Module, sample: Sample, request: PlanRequest, sibling: Measured | None
) -> tuple[BGraph, DGraph]:
    opaque = [model.get_submodule(path) for path in request.opaque]
    if sibling is not None:
        return trace_like(sibling.graphs.B_graph, model, sample, opaque)
    return exact_trace(
        model,
        sample,
        on_stage=request.progress,
        may_branch=request.may_branch,
        is_still=request.is_still,
        opaque=opaque,
        low_memory="or none" if request.is_checked else None,
    )


def _with_kernels(graph: DGraph, request: PlanRequest) -> tuple[DGraph, ChosenKernels | None]:
    """The graph with other kernels, as was asked for or as another plan has them."""
    if request.chosen_kernels is not None:
        return kernels_as_chosen(graph, request.chosen_kernels), request.chosen_kernels
    if request.kernels == "as given":
        return graph, None
    return with_faster_kernels(graph, request.progress, request.known_kernels)


def _with_regions(
    graph: DGraph, model: torch.nn.Module, sample: Sample, request: PlanRequest, apart: Mapping[str, str]
) -> tuple[DGraph, CompiledRegions | None]:
    """The graph with parts compiled, as was asked for or as another plan has them."""
    if request.chosen_regions is not None:
        return as_chosen(graph, request.chosen_regions, request.progress, request.of_any_size)
    if not request.compile:
        return graph, None
    trials, anew = request.trials, request.compiles_anew
    return with_compiled_regions(graph, model, sample, apart, request.progress, trials, anew)


def _read(
    model: torch.nn.Module, sample: Sample, basic: BGraph
) -> tuple[Settings, tuple[SizeQuestion, ...] | None, list[torch.Tensor]]:
    """What a forward reads of attributes, what it asks of sizes, if that can be seen, and the tensors it returns."""
    # What an operation is given is followed by one front end, and to be found from a few calls by the other.
    asking = AskingForward(polynomial=basic.questions is None)
    try:
        settings = Settings.read_by(model, sample, basic.attributes, asking)
    except Exception:  # noqa: BLE001  a number that is watched is not always taken for one
        return Settings.read_by(model, sample, basic.attributes), None, []
    return settings, asking.questions, asking.outputs


def _with_loss(
    graph: DGraph,
    model: torch.nn.Module,
    sample: Sample,
    request: PlanRequest,
    trained: Trained | None,
    returned: list[torch.Tensor],
) -> tuple[DGraph, LossCost | None]:
    """The graph with the outputs that are trained, if that is known, and what the loss takes."""
    request.progress("loss", 0, 1)
    loss, costs = request.loss, list[LossCost]()
    if trained is not None:
        graph = replace(graph, trained=trained.outputs, assumed=trained.assumed)
    elif loss is None:
        graph = replace(graph, assumed=losses_left(graph))
    else:
        graph = with_trained_outputs(
            graph, model, sample, lambda output: costs.append(measure_loss(loss, output)), returned
        )
    request.progress("loss", 1, 1)
    return graph, costs[0] if costs else None
