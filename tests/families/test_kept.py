"""Families in plan files, pickles and copies: a new process trains on any size at once, to the bit."""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings

import msgspec
import pytest
import torch

from rockmate import PlanFileError, PlanFileMismatch, PlanFileWarning, Rockmate, plan_files
from rockmate.plan_files.content import PolynomialRecord
from tests.families.test_lengths import WIDTH, Attention, Convolutions
from tests.module.steps import assert_same_step, squares

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")


def attention():
    return Attention(positions=128).train()


CASES = {
    "lengths": (attention, [(2, 96, WIDTH), (2, 61, WIDTH)], [(2, 50, WIDTH), (2, 96, WIDTH), (2, 35, WIDTH)]),
    "batches": (Convolutions, [(9, 3, 32, 32), (7, 3, 32, 32), (5, 3, 32, 32)], [(4, 3, 32, 32), (8, 3, 32, 32)]),
    "images": (
        Convolutions,
        [(2, 3, 48, 64), (2, 3, 64, 48), (2, 3, 32, 40), (2, 3, 56, 40), (2, 3, 40, 40)],
        [(2, 3, 32, 64), (2, 3, 24, 56)],
    ),
}


def trained(name):
    """A model, the same planned, with a family, and shapes that it has not met."""
    make, shapes, others = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    planned = Rockmate(copy.deepcopy(model), torch.randn(shapes[0]), 0.6, loss=squares)
    for shape in shapes[1:]:
        assert_same_step(planned, model, torch.randn(shape))
    assert planned._family._by_size.saved(planned._family.members, planned._family.request) is not None
    return model, planned, others


@pytest.fixture(scope="module")
def lengths():
    return trained("lengths")


@pytest.fixture
def nothing_measured(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("this is to be neither measured nor solved")

    monkeypatch.setattr("rkgb.profile.measure._measure", refuse)
    monkeypatch.setattr("rockmate.planning.planner._solve", refuse)


@pytest.mark.parametrize("kept_by", ["file", "pickle", "copy"])
@pytest.mark.parametrize("name", CASES)
def test_calls_of_any_size_have_plans_at_once(name, kept_by, tmp_path, request):
    model, planned, shapes = trained(name)
    planned.save_plan(tmp_path / "plan.json.gz")
    saved = pickle.dumps(planned)
    request.getfixturevalue("nothing_measured")
    if kept_by == "file":
        again = Rockmate(copy.deepcopy(model), plan=tmp_path / "plan.json.gz", loss=squares)
    else:
        again = pickle.loads(saved) if kept_by == "pickle" else copy.deepcopy(planned)
    with warnings.catch_warnings(action="error"):
        for shape in (*shapes, *shapes):
            assert_same_step(again, model, torch.randn(shape))
    assert len(again._family.members) == (len(planned._family.members) if kept_by == "copy" else 1)
    assert all((plan.measured_peak_bytes or plan.peak_bytes) <= plan.budget_bytes for plan in again.plans)
    assert {plan.budget_bytes for plan in again.plans} == {planned.plan.budget_bytes}


def test_what_is_read_is_written_again(lengths, tmp_path):
    _, planned, _ = lengths
    file = planned.plan_file()
    assert plan_files.loads(plan_files.dumps(file)) == file
    for other in (Attention(positions=64), Attention(positions=128, layers=3)):
        with pytest.raises(PlanFileMismatch, match="does not take|was made for"):
            Rockmate(other.train(), plan=file, loss=squares)(torch.randn(2, 40, WIDTH))
    again = Rockmate(copy.deepcopy(planned.original), plan=file, loss=squares)
    again(torch.randn(2, 40, WIDTH)).sum().backward()
    assert again._family.plan_file_of(again._family.members[0]).family == file.family


def test_a_plan_of_one_size_says_nothing_of_others(tmp_path):
    planned = Rockmate(Attention().train(), torch.randn(2, 40, WIDTH), 0.7, loss=squares)
    assert planned.plan_file().family is None
    assert "family" not in json.loads(plan_files.dumps(planned.plan_file()))


@pytest.mark.slow
def test_the_cache_keeps_families_for_a_first_batch_of_any_size(tmp_path, monkeypatch, request):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = attention()
    budget = Rockmate(copy.deepcopy(model), torch.randn(2, 96, WIDTH), 0.6, loss=squares).plan.budget_bytes
    first = Rockmate(copy.deepcopy(model), budget=budget, loss=squares)
    for length in (96, 61):
        assert_same_step(first, model, torch.randn(2, length, WIDTH))
    request.getfixturevalue("nothing_measured")
    second = Rockmate(copy.deepcopy(model), budget=budget, loss=squares)
    for length in (50, 96, 35):
        assert_same_step(second, model, torch.randn(2, length, WIDTH))
    assert len(second._family.members) == 1
    others = [
        Rockmate(copy.deepcopy(model), budget=budget + 4096, loss=squares),
        Rockmate(copy.deepcopy(model), budget=budget, loss=lambda output: output.sum()),
        Rockmate(copy.deepcopy(model), budget=budget, loss=squares, cache=False),
        Rockmate(Attention(positions=128, layers=3).train(), budget=budget, loss=squares),
    ]
    for other in others:
        with pytest.raises(AssertionError, match="neither measured nor solved"):
            other(torch.randn(2, 44, WIDTH))


def test_of_a_plan_made_elsewhere_other_sizes_are_not_believed(lengths):
    model, planned, _ = lengths
    file = planned.plan_file()
    elsewhere = msgspec.structs.replace(file, made=msgspec.structs.replace(file.made, processor="another"))
    again = Rockmate(copy.deepcopy(model), plan=elsewhere, loss=squares)
    with pytest.warns(PlanFileWarning, match="measured anew"):
        assert_same_step(again, model, torch.randn(2, 96, WIDTH))
    assert not again._family._by_size._given


def test_a_pickle_that_does_not_hold_here_is_planned_anew(lengths, monkeypatch):
    model, planned, _ = lengths
    saved = pickle.dumps(planned)
    monkeypatch.setattr("rockmate.plan_files.restore.graph_record", _another_graph)
    again = pickle.loads(saved)
    assert_same_step(again, model, torch.randn(2, 40, WIDTH))
    assert [plan.calls for plan in again.plans] == [f"float32[2, 40, {WIDTH}] on cpu"]


def _another_graph(*arguments):
    from rockmate.plan_files.record import graph_record

    return msgspec.structs.replace(graph_record(*arguments), digest="0" * 64)


@pytest.mark.slow
def test_a_record_of_another_call_is_refused(lengths):
    """Each number that is changed in a place that the file's call has is seen, or changes nothing of that call."""
    model, planned, _ = lengths
    file = planned.plan_file()
    record = file.family
    draw = random.Random(0)
    refused = 0
    for _ in range(40):
        changed = _changed(record, draw)
        again = Rockmate(copy.deepcopy(model), plan=msgspec.structs.replace(file, family=changed), loss=squares)
        try:
            assert_same_step(again, model, torch.randn(2, 96, WIDTH))
            assert_same_step(again, model, torch.randn(2, 40, WIDTH))
        except (PlanFileError, PlanFileMismatch):
            refused += 1
    assert refused > 20


def _changed(record, draw):
    """The record with one number, place or name in it changed."""
    kind = draw.choice(["expression", "place", "point", "schedule", "position"])
    if kind == "expression":
        index = draw.choice([n for n, one in enumerate(record.expressions) if isinstance(one, PolynomialRecord)])
        one = record.expressions[index]
        terms = tuple((exponents, over + draw.choice([-1, 1]), under) for exponents, over, under in one.terms)
        changed = (*record.expressions[:index], msgspec.structs.replace(one, terms=terms))
        return msgspec.structs.replace(record, expressions=changed + record.expressions[index + 1 :])
    if kind == "place":
        part = draw.choice(["traits", "calls", "layouts", "saved", "problem"])
        places = list(getattr(record, part))
        number = draw.randrange(len(places))
        steps, index = places[number]
        places[number] = draw.choice(
            [((*steps, 0), index), (steps[:-1], index), (("nothing", *steps[1:]), index), (steps, 10**6)]
        )
        return msgspec.structs.replace(record, **{part: tuple(places)})
    if kind == "point":
        return msgspec.structs.replace(record, point=tuple(size + 1 for size in record.point))
    if kind == "schedule":
        schedules = tuple(msgspec.structs.replace(one, stages=(("nothing", ("at all",)),)) for one in record.schedules)
        return msgspec.structs.replace(record, schedules=schedules)
    return msgspec.structs.replace(record, positions=(((7, 7),),))
