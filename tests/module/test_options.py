"""One record of options at every entrance: it says what keywords say, and is handed on."""

import dataclasses

import pytest
import torch
from torch import nn

import rockmate
from rockmate import ArgumentError, Limits, PlanOptions, Rockmate, ShapesError, SolverError
from rockmate.queries.sweep import sweep
from tests.where import placed


def network():
    torch.manual_seed(0)
    return placed(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)))


def squares(output):
    return output.square().sum()


SAMPLE = torch.zeros(64, 16)
OPTIONS = PlanOptions(loss=squares, solver="greedy", limits=Limits(search_s=1.0, extra_s=0.0), cache=False)


def test_options_say_what_keywords_say():
    keywords = Rockmate(network(), placed(SAMPLE), 0.9, loss=squares, solver="greedy", time_limit=1, cache=False)
    record = Rockmate(network(), placed(SAMPLE), 0.9, options=OPTIONS)
    assert record.plan.schedule == keywords.plan.schedule
    assert record.plan.measured_peak_bytes == keywords.plan.measured_peak_bytes
    requests = [dataclasses.replace(one._family.request, budget=None) for one in (record, keywords)]
    assert requests[0] == requests[1]


@pytest.mark.parametrize(
    "said",
    [{"loss": squares}, {"solver": "rotor"}, {"time_limit": 1}, {"gap": 0.1}, {"shapes": "error"}],
    ids=lambda said: next(iter(said)),
)
def test_options_and_a_keyword_beside_them_are_refused_by_the_keyword_s_name(said):
    with pytest.raises(ArgumentError, match=f"options are given, and {next(iter(said))} beside them"):
        Rockmate(network(), SAMPLE, 0.9, options=OPTIONS, **said)


def test_a_keyword_of_its_usual_value_is_none_beside_options():
    assert Rockmate(network(), budget=0.9, options=OPTIONS, solver="auto", pin=(), shapes="replan").plans == ()


def test_options_are_frozen_and_checked_where_they_are_used():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPTIONS.solver = "rotor"
    with pytest.raises(SolverError, match="'fastest'"):
        Rockmate(network(), budget=0.9, options=dataclasses.replace(OPTIONS, solver="fastest"))
    with pytest.raises(ShapesError, match="'whatever'"):
        Rockmate(network(), budget=0.9, options=dataclasses.replace(OPTIONS, shapes="whatever"))


def test_queries_take_the_same_record():
    assert rockmate.verify(network(), torch.randn(64, 16), 0.9, options=OPTIONS, steps=1).exact
    cheapest = rockmate.smallest_budget(network(), SAMPLE, 1.5, options=OPTIONS)
    assert cheapest.plan_file.promise.solver in ("greedy", "keep-all")
    assert rockmate.max_batch(network(), SAMPLE, "1 MiB", options=OPTIONS).batch > 1
    assert sweep(network(), SAMPLE, [0.9], solvers=["greedy"], options=OPTIONS).rows
    with pytest.raises(ArgumentError, match="loss beside them"):
        rockmate.max_batch(network(), SAMPLE, "1 MiB", options=OPTIONS, loss=squares)


def test_blocks_take_the_same_record():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
    plans = rockmate.distributed.plan_blocks(model, 1.0, SAMPLE, blocks=list(model), options=OPTIONS)
    assert sum(len(names) for names, _ in plans.plans) == 2


@pytest.mark.parametrize(
    "said",
    [{"pin": ("Linear",)}, {"scope": "training"}, {"shapes": "eager"}, {"progress": True}],
    ids=lambda s: next(iter(s)),
)
def test_options_that_blocks_do_not_follow_are_refused_by_name(said):
    model, name = nn.Sequential(network(), network()), next(iter(said))
    with pytest.raises(ArgumentError, match=f"{name} is an option of whole models"):
        rockmate.distributed.plan_blocks(model, 1.0, SAMPLE, options=dataclasses.replace(OPTIONS, **said))
    assert not any(isinstance(module, Rockmate) for module in model.modules())
