"""Convolutions in channels_last: eager training so, our plans that may have them so, and inductor with our partitioner.

On the CPU inductor always takes that layout.
"""

from __future__ import annotations

import functools

from benchmarks.peers import compiled
from benchmarks.peers.case import Built, Case, NotForThisModel, Peer
from benchmarks.peers.families import Family
from rockmate import Rockmate
from rockmate.compile import Partitioner
from rockmate.kernels.option import Kernels
from rockmate.layouts.option import Layout
from rockmate.layouts.weights import lay_out, may_change


def eager(case: Case, eager_peak_bytes: int) -> Built:
    """Eager training of the model as ``model.to(memory_format=torch.channels_last)`` leaves it."""
    model = case.fresh_model()
    paths = [path for path, parameter in model.named_parameters() if may_change(parameter)]
    if not paths:
        raise NotForThisModel("no parameter of it has a layout with channels last")
    lay_out(model, paths)
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


def partitioned(case: Case, eager_peak_bytes: int, *, share: float) -> Built:
    """The whole model compiled by inductor, divided by our partitioner for that share of the eager peak."""
    settings = {"custom_partitioner_fn": Partitioner(int(share * eager_peak_bytes))}
    return compiled.compiled(case, eager_peak_bytes, backend="inductor", budget=1.0, settings=settings)


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


def peers(shares: tuple[float, ...]) -> tuple[Peer, ...]:
    """Eager training in channels_last, and ours at each of these shares: by the usual kernels, by the fastest, and by
    inductor's."""
    ours = (
        Peer(f"rockmate {share:.2f}, layout auto", Family.LAYOUT, functools.partial(planned, share=share), share)
        for share in shares
    )
    others = of_other_kernels(shares, "auto", "layout and kernels auto")
    parts = of_other_kernels(shares, "auto", "layout and kernels auto, parts compiled", parts=True)
    whole = (
        Peer(
            f"compile inductor, our partitioner {share:.2f}",
            Family.COMPILE,
            functools.partial(partitioned, share=share),
            share,
        )
        for share in shares
    )
    return (Peer("eager, channels_last", Family.LAYOUT, eager), *others, *parts, *ours, *whole)
