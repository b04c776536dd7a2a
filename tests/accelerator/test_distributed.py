"""Planned training on several test accelerators, one for each rank: equal to eager training there, bit by bit."""

from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import group
from tests.distributed import data_parallel, sharded
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.ci
can_shard = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="fully_shard has no kernels for devices of this kind: eager does not run"
)


@pytest.fixture(scope="module")
def two(device: torch.device) -> Iterator[Ranks]:
    ranks = Ranks(2, begin=group.begin)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout", {}),
        ("dropout", data_parallel.SMALL_BUCKETS | {"gradient_as_bucket_view": True}),
        ("dropout", data_parallel.SMALL_BUCKETS | {"static_graph": True}),
        ("tied", data_parallel.SMALL_BUCKETS),
        ("unused", data_parallel.SMALL_BUCKETS | {"find_unused_parameters": True}),
        ("batch norm", {"broadcast_buffers": True}),
    ],
    ids=str,
)
def test_data_parallel_training_is_equal_to_eager(two: Ranks, name, options):
    two.run(data_parallel.assert_equal_to_eager, name, options)


def test_ranks_agree_and_gradients_accumulate(two: Ranks):
    two.run(data_parallel.assert_ranks_agree, "dropout")
    two.run(data_parallel.assert_accumulates, {})


def test_a_module_is_planned_in_its_first_data_parallel_step(two: Ranks):
    first, second = two.run(
        data_parallel.assert_planned_in_training_equal_to_eager, "dropout", data_parallel.SMALL_BUCKETS
    )  # fmt: skip
    assert first == second


@can_shard
@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_blocks_train_as_eager_ones(two: Ranks, reshard):
    two.run(sharded.assert_blocks_equal_to_eager, {"reshard_after_forward": reshard})


@can_shard
@pytest.mark.parametrize("policy", ["none", "bf16"])
def test_sharded_blocks_may_be_planned_in_their_first_step(two: Ranks, policy):
    two.run(sharded.assert_planned_in_training_equal_to_eager, policy)


@can_shard
@pytest.mark.slow
def test_a_sharded_step_takes_as_much_less_as_was_planned(two: Ranks):
    for eager_bytes, planned_bytes, promised_bytes in two.run(sharded.step_peaks, 0.6):
        assert promised_bytes > 0.3 * eager_bytes
        assert eager_bytes - planned_bytes >= 0.9 * promised_bytes
