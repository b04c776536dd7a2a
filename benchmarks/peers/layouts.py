"""Convolutions in channels_last: eager training so, our plans that may have them so, and models that are compiled so.

On the CPU inductor always computes convolutions in that layout. Where the model's weights are not in it, it copies them
and, of depthwise ones, what their backward reads.
"""

from __future__ import annotations

import functools

from torch import nn

from benchmarks.peers import compiled
from benchmarks.peers.case import Built, Case, NotForThisModel, Peer, at_each
from benchmarks.peers.families import Family
from rockmate import Rockmate
from rockmate.compile import Partitioner
from rockmate.kernels.option import Kernels
from rockmate.layouts.option import Layout
from rockmate.layouts.weights import lay_out, may_change


def in_channels_last(case: Case) -> nn.Module:
    """The model as ``model.to(memory_format=torch.channels_last)`` leaves it."""
    model = case.fresh_model()
    paths = [path for path, parameter in model.named_parameters() if may_change(parameter)]
    if not paths:
        raise NotForThisModel("no parameter of it has a layout with channels last")
    lay_out(model, paths)
    return model


def eager(case: Case, eager_peak_bytes: int) -> Built:
    """Eager training of the model in channels_last."""
    model = in_channels_last(case)
    return Built(model, model, own_numbers=True)


def planned(
    case: Case,
    eager_peak_bytes: int,
    *,
    share: float,
    layout: Layout = "auto",
    kernels: Kernels = "as given",
    parts: bool = False,
) -> Built:
    """A plan for that share of the eager peak as given, in that layout, by those kernels, and with compiled `parts`.

    What is "auto" is as was measured to be faster, and parts are compiled where that is.
    """
    weights = case.fresh_model()
    model = Rockmate(
        weights,
        case.sample,
        int(share * eager_peak_bytes),
        loss=case.loss,
        layout=layout,
        kernels=kernels,
        compile=parts,
        cache=False,
        plan_in_background=False,
    )
    chosen = [str(one) for one in (model.plan.layout, model.plan.kernels, model.plan.compiled) if one is not None]
    return Built(weights, model, plan=model.plan, note="; ".join(chosen), own_numbers=True)


def compiled_so(case: Case, eager_peak_bytes: int, *, budget: float) -> Built:
    """The whole model in channels_last, compiled by inductor with that budget of its own."""
    return compiled.compiled_model(in_channels_last(case), backend="inductor", budget=budget)


def partitioned(case: Case, eager_peak_bytes: int, *, share: float, as_given: bool) -> Built:
    """The whole model compiled by inductor, divided by our partitioner for that share of the eager peak as given."""
    settings = {"custom_partitioner_fn": Partitioner(int(share * eager_peak_bytes))}
    model = case.fresh_model() if as_given else in_channels_last(case)
    return compiled.compiled_model(model, backend="inductor", budget=1.0, settings=settings)


def peers(shares: tuple[float, ...]) -> tuple[Peer, ...]:
    """Eager training in channels_last; ours at each of these shares, by the usual kernels, by the fastest, and by
    inductor's; and what inductor compiles of the model in channels_last."""
    inductor = (
        Peer(
            f"compile inductor, channels_last, budget {budget:.1f}",
            Family.COMPILE,
            functools.partial(compiled_so, budget=budget),
        )
        for budget in compiled.BUDGETS
    )
    by_kernels = "rockmate {share}, layout and kernels auto"
    by_parts = f"{by_kernels}, parts compiled"
    divided = "compile inductor, our partitioner {share}"
    divided_so = "compile inductor, channels_last, our partitioner {share}"
    return (
        Peer("eager, channels_last", Family.LAYOUT, eager),
        *at_each(shares, by_kernels, Family.KERNELS, planned, kernels="auto"),
        *at_each(shares, by_parts, Family.KERNELS, planned, kernels="auto", parts=True),
        *at_each(shares, "rockmate {share}, layout auto", Family.LAYOUT, planned),
        *at_each(shares, divided, Family.COMPILE, partitioned, as_given=True),
        *at_each(shares, divided_so, Family.COMPILE, partitioned, as_given=False),
        *inductor,
    )
