"""Problems: what is refused, and the JSON round trip."""

from __future__ import annotations

import pytest

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Problem
from tests.solver.instances import chain_of, random_problem


def test_json_round_trips():
    for seed in range(20):
        problem = random_problem(seed)
        assert Problem.from_json(problem.to_json()) == problem


def test_json_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 0"):
        Problem.from_json('{"version": 0}')


def test_keep_all_time_is_the_sum_of_all_times():
    assert chain_of(3, time_ms=1.5).keep_all_time_ms == pytest.approx(3 * 1.5 + 3 * 3.0)


@pytest.mark.parametrize(
    ("data", "forward", "backward", "message"),
    [
        ((Data("a b", 1, 0),), (ForwardOp("f", 1, (), (0,)),), (), "white space"),
        ((Data("a", -1, 0),), (ForwardOp("f", 1, (), (0,)),), (), "a has -1 bytes"),
        ((Data("a", 1, 3),), (ForwardOp("f", 1, (), (0,)),), (), "a has producer 3"),
        ((Data("a", 1, 0),), (ForwardOp("f", 1, (), ()),), (), "not among the outputs of its producer f"),
        ((Data("a", 1, 0),), (ForwardOp("f", 1, (0,), (0,)),), (), "f reads a before it is produced"),
        ((), (ForwardOp("f", -1, (), ()),), (), "f takes -1 ms"),
        (
            (),
            (ForwardOp("f", 1, (), ()), ForwardOp("f", 1, (), ())),
            (),
            "two forward operations are named f",
        ),
        ((), (), (BackwardOp("b", 1, (2,), 0, 0),), "b: there is no data 2"),
        ((), (), (BackwardOp("b", 1, (), 3, 2),), "b has resident_bytes 3 and peak_bytes 2"),
    ],
)
def test_numbers_that_are_no_step_are_refused_by_name(data, forward, backward, message):
    with pytest.raises(ValueError, match=message):
        Problem(data, forward, backward)


def test_a_chain_is_contiguous_and_its_backward_goes_back():
    Chain((range(0, 2), range(2, 3)), (2, 1, 0)).check(chain_of(3))
    with pytest.raises(ValueError, match="block 1"):
        Chain((range(0, 2), range(3, 4)), (2, 1, 0))
    with pytest.raises(ValueError, match="go back through the blocks"):
        Chain((range(0, 1), range(1, 2)), (0, 1))
    with pytest.raises(ValueError, match="cover 2"):
        Chain((range(0, 2),), (0, 0, 0)).check(chain_of(3))
