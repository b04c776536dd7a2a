"""Convolutions in channels_last: eager training so, our plans that may have them so, and models that are compiled so.

On the CPU inductor always computes convolutions in that layout. Where the model's weights are not in it, it copies them
and, of depthwise ones, what their backward reads.
"""

from __future__ import annotations

import functools

from torch import nn

from benchmarks.peers import compiled
from benchmarks.peers.case import Built, Case, NotForThisModel, Peer
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


def of_other_kernels(shares: tuple[float, ...], layout: Layout, label: str, parts: bool = False) -> tuple[Peer, ...]:
    """Ours at each of these shares, by the kernels that are measured to be faster, and with compiled `parts`."""
    return tuple(
        Peer(
            f"rockmate {share:.2f}, {label}",
            Family.KERNELS,
            functools.partial(planned, share=share, layout=layout, kernels="auto", parts=parts),
            share,
        )
        for share in shares
    )


def of_partitioner(shares: tuple[float, ...], label: str, as_given: bool) -> tuple[Peer, ...]:
    """The model compiled by inductor at each of these shares, divided by our partitioner."""
    return tuple(
        Peer(
            f"compile inductor, {label} {share:.2f}",
            Family.COMPILE,
            functools.partial(partitioned, share=share, as_given=as_given),
            share,
        )
        for share in shares
    )


def peers(shares: tuple[float, ...]) -> tuple[Peer, ...]:
    """Eager training in channels_last; ours at each of these shares, by the usual kernels, by the fastest, and by
    inductor's; and what inductor compiles of the model in channels_last."""
    ours = (
        Peer(f"rockmate {share:.2f}, layout auto", Family.LAYOUT, functools.partial(planned, share=share), share)
        for share in shares
    )
    others = of_other_kernels(shares, "auto", "layout and kernels auto")
    parts = of_other_kernels(shares, "auto", "layout and kernels auto, parts compiled", parts=True)
    inductor = (
        Peer(
            f"compile inductor, channels_last, budget {budget:.1f}",
            Family.COMPILE,
            functools.partial(compiled_so, budget=budget),
        )
        for budget in compiled.BUDGETS
    )
    return (
        Peer("eager, channels_last", Family.LAYOUT, eager),
        *others,
        *parts,
        *ours,
        *of_partitioner(shares, "our partitioner", as_given=True),
        *of_partitioner(shares, "channels_last, our partitioner", as_given=False),
        *inductor,
    )
