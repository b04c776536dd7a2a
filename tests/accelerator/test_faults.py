"""Whatever fails in a step on the device: afterwards the module trains exactly, and the memory is free again."""

import pytest

from tests.accelerator.shared import shared_from
from tests.module import conftest, test_failures, test_faults, test_leaks

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

ELSEWHERE = "test_threads has it"
LOADERS = "a process that is forked may not use a device that its parent uses; loaders work on the host"
globals().update(shared_from(conftest))
globals().update(
    shared_from(
        test_faults,
        but={
            "test_a_fault_in_one_thread_leaves_a_module_in_another_alone": ELSEWHERE,
            "test_threads_that_share_a_random_stream_repeat_each_its_own_numbers": ELSEWHERE,
            "test_a_data_loader_may_fork_between_a_forward_and_its_backward": LOADERS,
            "test_workers_run_while_the_module_trains": LOADERS,
        },
    )
)
globals().update(shared_from(test_failures))
globals().update(
    shared_from(
        test_leaks,
        but={
            "test_two_modules_train_in_two_threads": ELSEWHERE,
            "test_one_module_runs_in_two_threads_at_once": ELSEWHERE,
            "test_the_backward_may_run_in_another_thread_than_the_forward": ELSEWHERE,
        },
    )
)
