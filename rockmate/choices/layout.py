"""Which regions of a module are faster in channels_last: its operations are measured in both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rkgb import AllGraphs, DGraph, KGraph, d_to_s
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.pipeline import measured_graphs, trace_like
from rkgb.profile.measure import MeasuredBlocks
from rkgb.state.module_state import for_planning
from rockmate.choices.by_steps import eager_steps_ms
from rockmate.errors import LayoutError
from rockmate.layouts.option import ChosenLayout, Layout, RegionLayout
from rockmate.layouts.regions import Region, convolution_weights, regions_of, times_ms
from rockmate.layouts.weights import give_back, lay_out, may_change
from rockmate.plan_files import cache
from rockmate.plan_files.rank_agreement import default_exchange
from rockmate.plan_files.reuse import digest_of, key_of_measuring
from rockmate.planning.measured import Traced, trace_model
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest

_WORTH_IT = 0.02  # of a region's time: gradients are rounded otherwise, which is to buy something
_WAIT_S = 600.0  # for another rank, which traces and measures in two layouts
_NO_CONVOLUTIONS = "no convolution of the model has a weight of its own that may lie otherwise"


def choose_layout(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    asked: Layout,
    known: MeasuredBlocks,
    use_cache: bool = False,
) -> ChosenLayout:
    """The layout of each region of `model` on `sample`, which leaves the module as it was given.

    Under "auto" a region is in channels_last if its operations take less time so, forward and backward, those at its
    borders included, where tensors are converted, and if steps by turns confirm it. Under "channels_last" all are. The
    ranks of a process group have one layout: the first to come chooses. What was chosen is kept in the user's cache.

    Raises `LayoutError` where "channels_last" is asked for, and the model does not run so; and as tracing does.
    """
    exchange = default_exchange(_WAIT_S)
    if exchange is None:
        return _chosen_alone(model, sample, request, asked, known, use_cache)
    shapes = [(path, list(parameter.shape)) for path, parameter in model.named_parameters()]
    alone = partial(_chosen_alone, model, sample, request, asked, known, use_cache=False)
    found: ChosenLayout = exchange.agree_on(["layout", asked, type(model).__qualname__, shapes], ChosenLayout, alone)
    return found


def _chosen_alone(
    model: torch.nn.Module,
    sample: Any,
    request: PlanRequest,
    asked: Layout,
    known: MeasuredBlocks,
    use_cache: bool,
) -> ChosenLayout:
    give_back(model)
    request = replace(request, kernels="as given", chosen_kernels=None)  # they are chosen in the layout, which is first
    with planning(model):
        traced = trace_model(model, sample, request)
        key = _kept_under(model, traced, request, asked) if use_cache and cache.is_enabled() else None
        return cache.noted(key, ChosenLayout, partial(_measured_in_both, model, traced, request, asked, known))


def _kept_under(model: torch.nn.Module, traced: Traced, request: PlanRequest, asked: Layout) -> str:
    return digest_of(["layout", asked, key_of_measuring(model, traced, request)])


def _measured_in_both(
    model: torch.nn.Module, traced: Traced, request: PlanRequest, asked: Layout, known: MeasuredBlocks
) -> ChosenLayout:
    weights = dict.fromkeys(convolution_weights(traced.graph.dgraph).values())
    paths = [path for path in weights if may_change(model.get_parameter(path))]
    if not paths:
        return ChosenLayout(refused=_NO_CONVOLUTIONS)
    given, measuring = None, asked == "auto"
    with for_planning(model):
        if measuring:
            given = measured_graphs(traced.basic, traced.graph, model, traced.sample, request.progress, known)
        request.progress("layout", 0, 1)
        try:
            lay_out(model, paths)
            graph, costs = _in_channels_last(model, traced, request, known, measuring)
        except Exception as error:
            if measuring:
                return ChosenLayout(refused=_reason(error))
            raise LayoutError(
                f"{type(model).__name__} does not run in channels_last: {_reason(error)}. Where that is a view of a "
                'tensor that does not lie as it was, reshape or flatten does without; or say layout="as given".'
            ) from error
        finally:
            give_back(model)
        request.progress("layout", 1, 1)
        regions = [(region, weights) for region, weights in _regions(traced.graph.dgraph, graph, paths) if weights]
        if given is None or costs is None:
            every = (RegionLayout(weights, len(one.operations), channels_last=True) for one, weights in regions)
            return ChosenLayout(tuple(every))
        found = ChosenLayout(tuple(_faster(given.K_graph, costs, *region) for region in regions))
        return _confirmed(found, model, traced, given, request)


def _in_channels_last(
    model: torch.nn.Module, traced: Traced, request: PlanRequest, known: MeasuredBlocks, measuring: bool
) -> tuple[DGraph, KGraph | None]:
    """The module as it is laid out: its graph, and what that takes if it is to be measured."""
    opaque = [model.get_submodule(path) for path in request.opaque]
    basic, graph = trace_like(traced.basic, model, traced.sample, opaque)
    if not measuring:
        return graph, None
    given = traced.graph.dgraph
    simplified = d_to_s(replace(graph, trained=given.trained, assumed=given.assumed))
    return graph, measured_graphs(basic, simplified, model, traced.sample, request.progress, known).K_graph


def _regions(given: DGraph, laid: DGraph, paths: list[str]) -> Iterator[tuple[Region, tuple[str, ...]]]:
    """Each region of the laid out graph, with those of its weights that may change."""
    regions = regions_of(laid)
    names = [{op.name for op in graph} for graph in (given, laid)]
    if names[0] != names[1]:  # what is a view in one of them is more than one operation in the other
        every = frozenset().union(*names)
        regions = [Region(tuple(path for region in regions for path in region.weights), every)]
    for region in regions:
        yield region, tuple(path for path in region.weights if path in paths)


def _faster(given: KGraph, laid: KGraph, region: Region, weights: tuple[str, ...]) -> RegionLayout:
    """The region in the layout in which it takes less time."""
    given_ms, laid_ms = times_ms(given, region), times_ms(laid, region)
    return RegionLayout(weights, len(region.operations), laid_ms <= (1 - _WORTH_IT) * given_ms, given_ms, laid_ms)


def _confirmed(
    found: ChosenLayout, model: torch.nn.Module, traced: Traced, given: AllGraphs, request: PlanRequest
) -> ChosenLayout:
    """What was found, all regions in channels_last, or none: as steps of the module itself take least time.

    Operations are measured one after the other, in one layout long after the other: what the machine did beside may
    have been another then. Where no step of the module itself fits the device, they are all that is known.
    """
    every = tuple(path for region in found.regions for path in region.weights)
    layouts = list(dict.fromkeys([(), found.weights, every]))
    times_ms = eager_steps_ms(model, traced, given, request, layouts)
    if times_ms is None:
        return found
    best = min(range(len(layouts)), key=times_ms.__getitem__)
    ratio = times_ms[best] / times_ms[0]
    if ratio > 1 - _WORTH_IT:
        best, ratio = 0, 1.0
    regions = tuple(
        replace(region, channels_last=layouts[best] == every or (best > 0 and region.channels_last))
        for region in found.regions
    )
    return ChosenLayout(regions, step_ratio=ratio)


def _reason(error: Exception) -> str:
    """Of an error, in one line."""
    if is_out_of_memory(error):
        return "memory ran out while it was traced and measured so"
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
