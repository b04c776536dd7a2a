"""Convolutions in channels_last on the device."""

import pytest

from tests.accelerator.shared import shared_from
from tests.module import test_layout

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

globals().update(
    shared_from(
        test_layout,
        "test_training_is_eagers_in_that_layout_to_the_bit",
        "test_each_region_is_in_the_layout_in_which_it_is_quicker",
        "test_steps_leave_the_module_as_it_was",
        "test_it_is_undone_by_as_given_and_the_first_plan_has_it_back",
        "test_gradients_that_are_there_follow",
    )
)
