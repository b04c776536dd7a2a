"""All else that moves data: the tests of the CPU with a disk, on the device with its host."""

import pytest

from tests.accelerator.shared import shared_from
from tests.module import test_offload, test_offload_batches, test_offload_queries

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

NOT_HERE = {
    "test_places_that_do_not_go_with_the_device_are_told": "there is another place for it",
    "test_auto_without_a_disk_warns_and_recomputes": "it goes to the host",
    "test_a_second_folder_is_taken_where_the_first_is_in_memory": "it goes to the host",
    "test_the_limit_is_kept_when_links_are_measured_too": "it asks for a disk",
    "test_a_full_disk_keeps_data_in_memory_and_training_goes_on": "it goes to the host",
    "test_a_module_that_is_gone_leaves_no_file_and_no_thread": "there is none",
    "test_what_is_no_second_memory_is_refused_before_anything_is_traced": "nothing of it is of a device",
}
globals().update(shared_from(test_offload, but=NOT_HERE))
globals().update(shared_from(test_offload_batches))
globals().update(shared_from(test_offload_queries))
