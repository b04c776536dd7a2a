"""Parts of the local search."""

import pytest

from rk_solvers import peak_and_time
from rk_solvers.groups import normalise
from rk_solvers.liveness import PlanState, Tables
from rk_solvers.local.local_search import take_out
from tests.solver.instances import chain_of


@pytest.mark.ci
@pytest.mark.slow
def test_what_only_led_to_a_recomputation_goes_with_it_or_moves_to_its_next_use_in_a_chain_of_thousands():
    problem = chain_of(3000)
    state = PlanState(Tables(problem), (tuple(range(2999)), *((),) * 2999))  # all again for the first backward
    take_out(state, state.tables.key(0, 2998))
    moved = [state.tables.split(key) for key in state.recomputations()]
    plan = state.recompute()
    assert plan == normalise(problem, plan)
    assert peak_and_time(problem, plan) == (state.peak_bytes, problem.keep_all_time_ms + state.time_ms)
    assert all(stage > 0 for stage, _ in moved)  # each as late as its value is needed
