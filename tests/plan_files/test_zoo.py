"""Plans that come with the package: each can be read, is what the index says, and is its model's."""

from __future__ import annotations

import json
import sys
import warnings

import pytest

from rockmate import PlanFileError, PlanFileWarning, Rockmate, plan_files, zoo
from rockmate.plan_files.record import made_here
from tests.module.steps import assert_trains_exactly
from tests.scripts import ROOT, load_script

STORED = plan_files.zoo.entries()


def test_there_are_plans_for_models_people_know():
    models = {entry.model for entry in STORED}
    assert len(models) >= 8
    assert models <= set(zoo.names())
    for model in models:
        of_model = [entry for entry in STORED if entry.model == model]
        assert len(of_model) == 6
        assert len({entry.eager_peak_bytes for entry in of_model}) == 1


def test_each_plan_is_what_the_index_says():
    for entry in STORED:
        if not entry.exists:
            assert (entry.smallest_budget_bytes or 0) > entry.budget_bytes
            with pytest.raises(PlanFileError, match="smallest budget"):
                entry.load()
            continue
        plan = entry.load().plan
        assert plan.budget_bytes == entry.budget_bytes == round(entry.share * entry.eager_peak_bytes)
        assert plan.measured_peak_bytes == entry.peak_bytes <= entry.budget_bytes
        assert (plan.overhead, plan.gap) == (entry.overhead, entry.gap)
        assert (plan.recomputations, plan.solver) == (entry.recomputations, entry.solver)


def test_nothing_is_there_that_the_index_does_not_know():
    found = {path.name for path in (ROOT / "rockmate" / "zoo" / "plans").glob("*.gz")}
    assert found == {f"{entry.name}.json.gz" for entry in STORED if entry.exists}


def test_the_largest_budget_that_is_at_most_the_share_is_found():
    entry = next(entry for entry in STORED if entry.exists)
    assert plan_files.zoo.get(entry.model, 1.0).promise.budget_bytes == entry.budget_bytes
    with pytest.raises(PlanFileError, match=f"within 0.01 .* there is {entry.share:.2f}"):
        plan_files.zoo.get(entry.model, 0.01)
    with pytest.raises(PlanFileError, match="there is nothing"):
        plan_files.zoo.get("no such model", 0.5)


def test_the_page_shows_the_index():
    tables = load_script("docs/make_tables.py")
    page = (ROOT / "docs" / "schedule_zoo.md").read_text("utf-8")
    index = json.loads((ROOT / "rockmate" / "zoo" / "plans" / "index.json").read_text("utf-8"))
    assert page == tables.zoo_page(page, index), "run python docs/make_tables.py"


QUICK = "unet-demo"  # tells whether plans that were stored can be loaded by the code as it is now


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model == QUICK else [pytest.mark.slow])
        for model in sorted({entry.model for entry in STORED})
    ],
)
@pytest.mark.ci
def test_models_train_exactly_by_their_plans(model: str):
    made = made_here(zoo.get("mixer-tiny").sample[0].device)
    stored = [entry for entry in STORED if entry.model == model and entry.exists]
    if not stored or (stored[0].torch, stored[0].device) != (made.torch, made.device):
        pytest.skip("made with another PyTorch, or on another device")
    entry = zoo.get(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanFileWarning)  # taken over as they are, not only followed
        planned = Rockmate(entry.model, entry.sample, plan=stored[-1].load())
    assert planned.plan.peak_bytes == stored[-1].peak_bytes
    assert planned.plan.measured_peak_bytes <= stored[-1].budget_bytes  # of a real step here, on whatever processor
    assert_trains_exactly(planned, [entry.sample], entry.loss)


@pytest.mark.ci
@pytest.mark.slow
def test_the_script_makes_such_a_folder(tmp_path, monkeypatch):
    script = load_script("benchmarks/schedule_zoo.py")
    options = ["--models", "mixer-tiny", "--time-limit", "0.5", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["schedule_zoo.py", *options])
    script.main()
    monkeypatch.setattr(plan_files.zoo, "folder", lambda: tmp_path)
    found = plan_files.zoo.entries()
    assert [entry.share for entry in found] == list(script.SHARES)
    assert found[0].load().plan.measured_peak_bytes == found[0].peak_bytes
