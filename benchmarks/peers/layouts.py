"""Convolutions in channels_last: eager training so, and our plans that may have them so."""

from __future__ import annotations

import functools

from benchmarks.peers.case import Built, Case, NotForThisModel, Peer
from benchmarks.peers.families import Family
from rockmate import Rockmate
from rockmate.layouts.weights import lay_out, may_change


def eager(case: Case, eager_peak_bytes: int) -> Built:
    """Eager training of the model as ``model.to(memory_format=torch.channels_last)`` leaves it."""
    model = case.fresh_model()
    paths = [path for path, parameter in model.named_parameters() if may_change(parameter)]
    if not paths:
        raise NotForThisModel("no parameter of it has a layout with channels last")
    lay_out(model, paths)
    return Built(model, model, own_numbers=True)


def planned(case: Case, eager_peak_bytes: int, *, share: float) -> Built:
    """A plan for that share of the eager peak as given, in the layout that is measured to be faster."""
    weights = case.fresh_model()
    budget_bytes = int(share * eager_peak_bytes)
    model = Rockmate(
        weights, case.sample, budget_bytes, loss=case.loss, layout="auto", cache=False, plan_in_background=False
    )
    return Built(weights, model, plan=model.plan, note=str(model.plan.layout), own_numbers=True)


def peers(shares: tuple[float, ...]) -> tuple[Peer, ...]:
    """Eager training in channels_last, and ours at each of these shares."""
    ours = (
        Peer(f"rockmate {share:.2f}, layout auto", Family.LAYOUT, functools.partial(planned, share=share), share)
        for share in shares
    )
    return (Peer("eager, channels_last", Family.LAYOUT, eager), *ours)
