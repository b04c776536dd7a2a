"""FSDP2 around planned modules: gradients are those around the originals, and what cannot be is refused."""

import pytest

from tests.distributed import sharded
from tests.distributed.ranks import Ranks


@pytest.mark.parametrize("reshard", [True, False, None])
def test_planned_blocks_train_as_eager_ones(two: Ranks, reshard):
    two.run(sharded.assert_blocks_equal_to_eager, {"reshard_after_forward": reshard})


def test_planned_blocks_beside_tied_weights_train_as_eager_ones(two: Ranks):
    two.run(sharded.assert_blocks_equal_to_eager, {}, 2, True)


def test_gradients_of_planned_blocks_accumulate(two: Ranks):
    two.run(sharded.assert_blocks_equal_to_eager, {}, 2, False, 2)


@pytest.mark.slow
@pytest.mark.ci
def test_planned_blocks_train_as_eager_ones_on_four_ranks(four: Ranks):
    four.run(sharded.assert_blocks_equal_to_eager, {})


def test_checkpoints_of_eager_and_planned_models_are_interchangeable(two: Ranks):
    two.run(sharded.assert_checkpoints_are_interchangeable)


@pytest.mark.parametrize("policy", ["none", "bf16"])
def test_sharded_blocks_may_be_planned_in_their_first_step(two: Ranks, policy):
    first, second = two.run(sharded.assert_planned_in_training_equal_to_eager, policy)
    assert first == second
    assert all(first)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_planned_model_may_be_sharded_whole(two: Ranks, reshard):
    two.run(sharded.assert_whole_model_equal_to_eager, {"reshard_after_forward": reshard})


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (1.0, {}),
        (0.6, {"reshard_after_forward": False}),
        (0.6, {"policy": "bf16"}),
        (0.65, {"policy": "bf16 inside", "reshard_after_forward": True}),
    ],
    ids=str,
)
def test_blocks_planned_by_apply_train_as_eager_ones(two: Ranks, budget, options):
    first, second = two.run(sharded.assert_applied_equal_to_eager, budget, options)
    assert first == second
    assert first["fits"]
    assert first["classes"] == [tuple(f"blocks.{index}" for index in range(4))]
    assert (first["recomputations"] > 0) == (budget < 1)


def test_a_sharded_step_takes_as_much_less_as_was_planned(two: Ranks):
    """Beside activations it holds what FSDP gathers and sends, in eager and planned training alike."""
    for eager_bytes, planned_bytes, promised_bytes in two.run(sharded.step_peaks, 0.6):
        assert promised_bytes > 0.3 * eager_bytes
        # Equal but for a rounded ratio, unless no step was without one block's gradients that were still being sent.
        assert eager_bytes - planned_bytes == pytest.approx(promised_bytes, rel=0.06)


def test_what_cannot_be_planned_or_run_is_refused(two: Ranks):
    for told in two.run(sharded.refusals):
        assert "'blocks.1.scale' of Stack is a DTensor" in told["planning a model with a sharded block"]
        assert "'blocks.1.scale' of Stack is a DTensor" in told["planning the blocks of a model with a sharded one"]
        assert "rockmate.distributed.apply" in told["planning a model with a sharded block"]
        assert "Stack runs by itself" in told["calling a planned model with a sharded block"]
        assert "modified by an in-place operation" in told["changing a parameter after the forward"]
