"""Compiled code of regions: one for each class of equal ones, or one for all classes that differ in sizes alone.

The first class of a form is compiled for its own sizes. When others come, all that were seen are compiled as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from rkgb import Block, DGraph
from rkgb.ir.compiled import CompiledCall, Kernels
from rkgb.ir.values import ValueInfo
from rkgb.passes.equivalence import canonical_form, form_of_any_size
from rockmate.regions.find import Region
from rockmate.regions.function import function_of, normalisations
from rockmate.regions.sizes import OfPattern, Pattern, RegionSizes, sizes_of

_NAMED = 3  # operations of a region in its name
_MOST_PATTERNS = 4  # of one form: beyond them each class is compiled by itself


@dataclass(eq=False, slots=True)
class _Form:
    """What classes of regions have in common that differ in sizes alone."""

    seen: dict[str, RegionSizes] = field(default_factory=dict)  # by digest of the class
    kernels: list[list[Kernels]] = field(default_factory=list)  # of a region, each for all sizes of a pattern
    refused: bool = False  # by the compiler: each class is compiled by itself


# Of this process, by digest and threads.
CALLS: dict[tuple[str, int], CompiledCall] = {}
FORMS: dict[tuple[str, int], _Form] = {}


def call_of(graph: DGraph, region: Region) -> CompiledCall:
    """The one of all regions like this one, compiled or not yet."""
    digest = canonical_form(graph, _block_of(region)).digest
    key = (digest, torch.get_num_threads())
    if key not in CALLS:
        names = dict.fromkeys(op.call.op_name.strip("_") for op in region.ops)
        name = "_".join(["compiled", *list(names)[:_NAMED]])
        statistics = 2 * len(normalisations(region))
        function, outputs = function_of(graph, region), len(region.outputs) + statistics
        CALLS[key] = CompiledCall(name, digest, function, outputs, statistics=statistics)
        _form_of(graph, region).seen[digest] = sizes_of(graph, region)
    return CALLS[key]


def _block_of(region: Region) -> Block:
    return Block([], list(region.ops), [], list(region.inputs), list(region.outputs))


def _form_of(graph: DGraph, region: Region) -> _Form:
    key = (form_of_any_size(graph, _block_of(region)), torch.get_num_threads())
    return FORMS.setdefault(key, _Form())


def has_code(graph: DGraph, region: Region) -> bool:
    """Whether code that was compiled before holds for it."""
    known = CALLS.get((canonical_form(graph, _block_of(region)).digest, torch.get_num_threads()))
    if known is not None and known.kernels:
        return True
    sizes = sizes_of(graph, region)
    return any(_numbers_for(kernels, sizes) is not None for kernels in _form_of(graph, region).kernels)


def _numbers_for(kernels: list[Kernels], sizes: RegionSizes) -> tuple[int, ...] | None:
    """What code for any size is given at these; None where it does not hold for them."""
    any_size = kernels[0].any_size
    assert isinstance(any_size, OfPattern)
    return any_size.numbers_at(sizes)


def build(graph: DGraph, region: Region, call: CompiledCall) -> None:
    """Compile a class of regions: by itself, or with those that differ in sizes alone, where some were seen before."""
    # Importing it imports the compiler.
    from rockmate.regions.build import kernels_of

    form, sizes = _form_of(graph, region), sizes_of(graph, region)
    for kernels in _kernels_of_any_size(graph, region, call, form):
        numbers = _numbers_for(kernels, sizes)
        if numbers is not None:
            call.build(kernels, numbers)
            return
    taking = _differentiable(graph, region, call)
    call.build(kernels_of(call.eager, _inputs(graph, region), taking, call.statistics))


def _kernels_of_any_size(graph: DGraph, region: Region, call: CompiledCall, form: _Form) -> Iterator[list[Kernels]]:
    """Code of the form of a region: what there is, then what is compiled for all regions of it that were seen."""
    from rockmate.regions.build import kernels_for

    yield from form.kernels
    if len(form.seen) < 2 or form.refused or len(form.kernels) >= _MOST_PATTERNS:
        return
    others = [sizes for digest, sizes in form.seen.items() if digest != call.digest]
    try:
        pattern = Pattern.of([*others, form.seen[call.digest]])
        with_arguments = partial(function_of, graph, region)
        inputs, taking = _inputs(graph, region), _differentiable(graph, region, call)
        made = kernels_for(pattern, with_arguments, inputs, taking, call.statistics)
    except Exception:  # noqa: BLE001  what is compiled for its own sizes alone tells what else is wrong
        form.refused = True
        return
    form.kernels.append(made)
    yield made


def _inputs(graph: DGraph, region: Region) -> list[ValueInfo]:
    return [graph.values[name] for name in region.inputs]


def _differentiable(graph: DGraph, region: Region, call: CompiledCall) -> list[bool]:
    """Of its outputs, which have gradients: statistics of a batch have none."""
    found = [graph.values[name].requires_grad for name in region.outputs]
    return found + [False] * (call.outputs - len(found))
