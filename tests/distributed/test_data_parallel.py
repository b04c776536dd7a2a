"""DistributedDataParallel around a planned module: gradients, buckets and their times are those around the original."""

import pytest

from tests.distributed import data_parallel
from tests.distributed.ranks import Ranks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout", {}),
        ("dropout", data_parallel.SMALL_BUCKETS | {"gradient_as_bucket_view": True}),
        ("dropout", data_parallel.SMALL_BUCKETS | {"static_graph": True}),
        ("tied", data_parallel.SMALL_BUCKETS),
        ("tied", data_parallel.SMALL_BUCKETS | {"static_graph": True}),
        ("unused", data_parallel.SMALL_BUCKETS | {"find_unused_parameters": True}),
        ("unused", {"static_graph": True, "gradient_as_bucket_view": True}),
        ("batch norm", {"broadcast_buffers": True}),
        ("batch norm", {"broadcast_buffers": False}),
    ],
    ids=str,
)
def test_training_is_equal_to_eager(two: Ranks, name, options):
    two.run(data_parallel.assert_equal_to_eager, name, options)


@pytest.mark.parametrize("name", ["dropout", "batch norm"])
def test_a_module_planned_in_its_first_step_trains_as_eager_ones(two: Ranks, name):
    first, second = two.run(
        data_parallel.assert_planned_in_training_equal_to_eager, name, data_parallel.SMALL_BUCKETS
    )  # fmt: skip
    assert first == second
    assert first[1] == 1


@pytest.mark.parametrize(
    ("layout", "options"), [("auto", {}), ("channels_last", {"gradient_as_bucket_view": True})], ids=str
)
def test_all_ranks_train_in_one_layout(two: Ranks, layout, options):
    first, second = two.run(data_parallel.assert_laid_out_equal_to_eager, layout, options)
    assert first == second
    assert layout == "auto" or first == ("first.weight", "second.weight")


def test_within_data_parallel_the_layout_stays_as_it_was(two: Ranks):
    for told, refused in two.run(data_parallel.assert_layout_stays_within_data_parallel):
        assert told.startswith("as given, as DistributedDataParallel holds it, which has noted how its parameters lie")
        assert refused.startswith("Convolutions stays in its layout: DistributedDataParallel holds it")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "tied"])
@pytest.mark.ci
def test_training_on_four_ranks_is_equal_to_eager(four: Ranks, name):
    four.run(data_parallel.assert_equal_to_eager, name, data_parallel.SMALL_BUCKETS)
    four.run(data_parallel.assert_ranks_agree, name)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_gradients_accumulate_without_communication(two: Ranks, options):
    two.run(data_parallel.assert_accumulates, options)


def test_buckets_are_ready_as_early_as_in_eager(two: Ranks):
    for buckets, recomputations in two.run(data_parallel.assert_buckets_ready_as_early):
        assert buckets > 3
        assert recomputations


def test_synchronised_batch_normalisation_is_refused(two: Ranks):
    for message in two.run(data_parallel.sync_batch_norm_is_refused):
        assert "SyncBatchNorm" in message


def test_a_module_whose_forward_waits_for_other_ranks_is_refused_at_once(two: Ranks):
    assert "allreduce_.default, a collective" in two.run(data_parallel.collectives_are_refused)[1]
