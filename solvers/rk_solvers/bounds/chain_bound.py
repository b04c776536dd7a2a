"""A lower bound for steps whose operations follow each other: what checkpointing such a chain takes at least.

Every operation reads of the one before it. So to compute one again takes all those after the last one whose outputs are
still there. Relaxed to a game of tokens: the first pass over the operations may leave tokens on any of them; the
backward asks for operations from the last to the first; to serve one, a sweep goes there from the nearest token before
it, pays for what it runs, and may leave tokens on its way. When an operation is served, as many tokens may be before it
as the budget has room for data of the smallest size there is, beside what the backward itself takes. All other bytes,
and all that operations read besides, are left out: every plan of the problem is a play of the game that costs as much.

The least cost of the game is a dynamic program, as some play of least cost does the following (by exchanges that keep
the cost and the number of tokens at each moment, or lower them):

* It sweeps only to serve what is asked for now: another sweep can wait until a token that it leaves is used, while the
  token that it starts from stays in the place of those.
* Tokens are taken away in the reverse order in which they were left. Where one is taken away below another that stays,
  the other could have been left in its place in the first place: the sweep that left the lower one passed there, and
  all that is served in between is behind both.
* Tokens lie on operations that are asked for: others could lie on the next one that they serve, and cost less.

That tokens stay until they are through ("checkpoint persistence") is A. Griewank and A. Walther's, "Evaluating
Derivatives", SIAM 2008, chapter 12, for equal steps and a number of checkpoints that does not change; here steps take
any time, and there may be room for another number at each operation.

Complexity: O(n^3 s) for n operations that are asked for and s tokens.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rk_solvers.liveness import Tables
from rk_solvers.problem import Problem

MOST_SUMS = 5e7  # some tenths of a second

Times = NDArray[np.float64]


def chain_bound_ms(problem: Problem, budget_bytes: int) -> float:
    """A lower bound, in milliseconds, on the time of every plan whose peak is at most `budget_bytes`.

    That of keep-all where the operations are no such chain, or too many.
    """
    keep_all_ms = problem.keep_all_time_ms
    needs = _needs(problem, budget_bytes)
    if needs is None:
        return keep_all_ms
    places, room = needs
    most = min(max(room), len(places))
    if min(room) < 0 or min(room) >= len(places) - 1 or len(places) ** 3 * (most + 1) / 6 > MOST_SUMS:
        return keep_all_ms  # where there is no room at all, others prove that there is no plan
    return keep_all_ms + _least_cost_ms(problem, places, [min(tokens, most) for tokens in room], most)


def _needs(problem: Problem, budget_bytes: int) -> tuple[list[int], list[int]] | None:
    """Operations that are asked for, the first of them first, and for how many tokens there is room before each.

    None where the operations are no chain.
    """
    live = Tables(problem)
    for index, items in enumerate(live.inputs[1:]):
        if all(live.producer[item] != index for item in items):
            return None
    size = min((size for size, uses in zip(live.size, live.uses, strict=True) if uses), default=0)
    if size == 0:
        return None
    room: dict[int, int] = {}
    last = end = live.count
    for needs, peak_bytes in zip(live.needs, live.peak, strict=True):
        asked = max((live.producer[item] for item in needs), default=-1)
        tokens = (budget_bytes - live.held_bytes - peak_bytes) // size
        if asked > last:
            return None
        if asked >= 0:
            last = asked
            # More of them later are no use: a sweep that leaves them can wait for the next place.
            room.setdefault(asked, tokens - 1)
        elif last == end:  # the loss: a place that is served at the end of the forward, and asks for nothing
            room[end] = min(room.get(end, tokens), tokens)
    if not room:
        return None
    places = sorted(room)
    return places, [room[place] for place in places]


def _least_cost_ms(problem: Problem, places: list[int], room: list[int], most: int) -> float:
    """The least cost of the game. Place 0 is the beginning, where there is a token for nothing; others count from 1.

    ``again[b, h, c]`` is the cost of serving places b+1 to h from a token on b, with c tokens left to be used; `first`
    is the same where the first sweep is the forward, which costs nothing.
    """
    until = np.concatenate([[0.0], np.cumsum([op.recompute_ms for op in problem.forward])])
    through = np.minimum(np.array(places) + 1, len(problem.forward))
    at: Times = np.concatenate([[0.0], until[through]])  # time from the beginning through each place
    count = len(places)
    # Served with c tokens left, most - c of them are in use.
    allowed = np.array([[most - left <= tokens for left in range(most + 1)] for tokens in [most, *room]])
    again = np.zeros((count + 1, count + 1, most + 1))
    first = np.zeros((count + 1, count + 1, most + 1))
    for top in range(1, count + 1):
        for base in range(top - 1, -1, -1):
            sweep_ms = at[top] - at[base]
            served = np.where(allowed[top], again[base, top - 1], math.inf)
            once, anew = served, served + sweep_ms
            middle = np.arange(base + 1, top)
            if len(middle) and most:
                # A token on m, which serves all above it; m itself is served by it, with as many tokens below.
                below = np.where(allowed[middle, 1:], again[base, middle - 1, 1:], math.inf)
                anew[1:] = np.minimum(
                    anew[1:], (again[middle, top, :-1] + below + (at[middle] - at[base])[:, None]).min(0)
                )
                once[1:] = np.minimum(once[1:], (first[middle, top, :-1] + below).min(0))
            again[base, top], first[base, top] = anew, once
    return float(first[0, count, most])
