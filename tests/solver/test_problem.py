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


def test_options_say_what_each_way_to_have_a_data_takes():
    forward = (
        ForwardOp("f", 2.0, (), (0, 1), replay_bytes=5, repeat_ms=0.5),
        ForwardOp("g", 3.0, (0,), (2,), recomputable=False),
        ForwardOp("h", 4.0, (2,), (3,)),
    )
    data = (Data("y", 8, 0), Data("mask", 4, 0, "phantom"), Data("z", 16, 1), Data("out", 32, 2))
    problem = Problem(data, forward, (BackwardOp("b", 1.0, (0, 1, 2, 3), 0, 0),), frozenset({3}))
    kept = [options[0] for options in problem.options]
    assert [(option.name, option.kept_bytes, dict(option.costs)) for option in kept] == [
        ("kept", 8, {}), ("kept", 4, {}), ("kept", 16, {}), ("kept", 32, {})
    ]  # fmt: skip
    again = [options[1:] for options in problem.options]
    assert [[(one.name, one.kept_bytes, one.costs) for one in options] for options in again] == [
        [("recomputed", 5, {"compute": 0.5})], [("recomputed", 5, {"compute": 0.5})], [], []
    ]  # fmt: skip
    assert again[0][0] is again[1][0]  # had together, for one cost
