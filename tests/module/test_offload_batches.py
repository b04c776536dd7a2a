"""The largest batch where plans may also move data."""

import copy

import pytest
import torch

from rockmate import Rockmate, max_batch
from tests.module.models import WIDTH, Layers, built
from tests.module.steps import BRIEFLY, assert_same_training, squares, train
from tests.where import elsewhere, placed

pytestmark = pytest.mark.ci

BUDGET_BYTES = 512 << 10


def made(batch):
    return placed(built(Layers, 6)), placed(torch.zeros(batch, WIDTH)), squares


def largest(**options):
    return max_batch(made, None, BUDGET_BYTES, limits=BRIEFLY, start=700, measurements=4, **options)


def test_more_fits_where_data_may_move(quick_disk, tmp_path):
    alone, moved = largest(), largest(offload=elsewhere(tmp_path))
    plan = moved.plan_file.plan
    assert moved.batch > 1.1 * alone.batch
    assert plan.moves > 0
    assert all(trial.plan.measured_peak_bytes <= BUDGET_BYTES for trial in moved.trials if trial.fits)
    assert len(moved.trials) <= 4
    model, sample, loss = made(moved.batch)
    eager = copy.deepcopy(model)
    module = Rockmate(model, sample, plan=moved.plan_file, offload=elsewhere(tmp_path))
    batches = [(torch.randn_like(sample),) for _ in range(2)]
    assert_same_training(train(module, batches, loss), train(eager, batches, loss))
    assert module.plan.moves == plan.moves


def test_the_second_memory_has_a_limit_there_too(quick_disk, tmp_path):
    some, more = (largest(offload=elsewhere(tmp_path, limit)) for limit in ("200KiB", "2MiB"))
    assert (some.plan_file.plan.measured_stored_bytes or 0) <= 200 << 10
    assert some.batch < more.batch
    assert all((trial.plan.stored_bytes or 0) <= 200 << 10 for trial in some.trials if trial.fits)
