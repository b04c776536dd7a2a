"""Other kernels on the device: attention. It computes as the CPU does, whose kernels it is said to have.

For `scaled_dot_product_attention` PyTorch picks no fused kernel on devices of this kind, so that the model calls one.
"""

from dataclasses import replace

import pytest

from rockmate import Rockmate, plan_files, verify
from tests.accelerator.shared import shared_from
from tests.kernels import conftest
from tests.kernels.test_attentions import AUTO, attending, rows
from tests.module.models import Layers, built
from tests.module.models import rows as flat_rows
from tests.module.steps import FEW_ROUNDS, assert_same_training, peak_of_step, squares, train

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

globals().update(shared_from(conftest))


@pytest.mark.usefixtures("attends")
@pytest.mark.parametrize("budget", ["2MiB", "300KiB"])
def test_training_is_that_of_these_kernels_without_a_plan(budget):
    found = verify(attending(fused=True), rows(), budget, options=AUTO)
    assert found.exact, found
    assert str(found.plan.kernels) == "3 attentions by products and a softmax, at 0.50 of their time"
    assert 0 < found.from_eager < 1e-5


@pytest.mark.usefixtures("attends")
def test_peaks_are_within_the_budget_and_plans_of_files_have_them(tmp_path):
    model, path = (
        Rockmate(attending(fused=True), rows(), "300KiB", options=replace(AUTO, cache=False)),
        tmp_path / "plan",
    )
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert peak_of_step(model, (rows(),)) <= model.plan.budget_bytes
    plan_files.save(model.plan_file(), path)
    again = Rockmate(attending(fused=True), rows(), plan=path, loss=squares)
    assert again.plan.kernels == model.plan.kernels
    assert verify(again, rows(), loss=squares).exact


@pytest.mark.usefixtures("fresh")
def test_what_is_measured_there_saves_more_and_stays():
    model = Rockmate(attending(fused=True), rows(), 0.9, options=AUTO)
    assert {one.refused for one in model.plan.kernels.trials} == {"it saves more for the backward"}
    assert verify(model, rows(), loss=squares).from_eager is None


def test_products_have_no_others():
    model = Rockmate(built(Layers), flat_rows(), 0.8, loss=squares, limits=FEW_ROUNDS, kernels="auto")
    assert str(model.plan.kernels) == "there are no others for this model"
    assert_same_training(train(model.original, [flat_rows(1)], forward=model), train(built(Layers), [flat_rows(1)]))
