"""Data that move to pinned memory of the host: the plans that a CPU has with a disk, on the device."""

import pytest

from tests.accelerator.shared import shared_from
from tests.module import test_offload

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

globals().update(
    shared_from(
        test_offload,
        "test_real_models_train_exactly_within_both_budgets",
        "test_most_of_a_chain_moves_where_the_disk_is_quick",
        "test_real_links_and_real_steps_decide",
    )
)
