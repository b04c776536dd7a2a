"""Calls of many sizes on the device: planned in milliseconds, within the budget, and eager's to the bit."""

import pytest

from tests.accelerator.shared import shared_from
from tests.families import test_lengths

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

globals().update(shared_from(test_lengths, "test_three_sizes_are_planned_and_hold_for_others"))
