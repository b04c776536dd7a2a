"""Rockmate under budgets, with its default solver and with others."""

from __future__ import annotations

from benchmarks.peers.case import Built, Case, Peer, at_each
from benchmarks.peers.families import Family
from rockmate import Rockmate

SOLVERS = ("greedy", "chen", "knapsack")


def planned(case: Case, eager_peak_bytes: int, *, share: float, solver: str = "auto") -> Built:
    """A plan for that share of the eager peak, made anew."""
    weights = case.fresh_model()
    budget_bytes = int(share * eager_peak_bytes)
    model = Rockmate(
        weights, case.sample, budget_bytes, loss=case.loss, solver=solver, cache=False, plan_in_background=False
    )
    return Built(weights, model, plan=model.plan)


def peers(shares: tuple[float, ...], others_at: float = 0.5) -> tuple[Peer, ...]:
    """Ours at each of these shares, and our other solvers at one."""
    return (
        *at_each(shares, "rockmate {share}", Family.OURS, planned),
        *(
            peer
            for solver in SOLVERS
            for peer in at_each(
                (others_at,), f"rockmate {{share}}, {solver}", Family.OTHER_SOLVERS, planned, solver=solver
            )
        ),
    )
