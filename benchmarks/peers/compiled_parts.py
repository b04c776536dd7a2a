"""Our plans of models whose parts are compiled, or whose operations run by other kernels, where that pays."""

from __future__ import annotations

from benchmarks.peers import layouts
from benchmarks.peers.case import Built, Case, Peer, at_each
from benchmarks.peers.families import Family
from rockmate import Rockmate


def planned(case: Case, eager_peak_bytes: int, *, share: float) -> Built:
    """A plan for that share of the eager peak, in the layout and with those parts compiled that take least time."""
    weights = case.fresh_model()
    model = Rockmate(
        weights,
        case.sample,
        int(share * eager_peak_bytes),
        loss=case.loss,
        layout="auto",
        compile=True,
        cache=False,
        plan_in_background=False,
    )
    note = str(model.plan.compiled)
    if model.plan.layout is not None and model.plan.layout.weights:
        note = f"{model.plan.layout}; {note}"
    return Built(weights, model, plan=model.plan, note=note, own_numbers=True)


def peers(shares: tuple[float, ...]) -> tuple[Peer, ...]:
    """Ours at each of these shares, by other kernels and with compiled parts."""
    return (
        *at_each(
            shares, "rockmate {share}, kernels auto", Family.KERNELS, layouts.planned, layout="as given", kernels="auto"
        ),
        *at_each(shares, "rockmate {share}, compiled parts", Family.PARTS, planned),
    )
