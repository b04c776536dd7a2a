"""Ways in, on the device: the class of the model, plan files, the cache, and the names of other systems."""

import pytest

from tests.accelerator.shared import shared_from
from tests.front_doors import test_monet, test_rockmate1, test_rockmate2, test_rotor
from tests.module import test_transparent
from tests.plan_files import test_cache, test_restore

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
]

for source, name in {
    test_transparent: "test_it_is_an_instance_of_both_classes",
    test_restore: "test_the_same_plan_runs_and_trains_exactly",
    test_cache: "test_a_second_start_finds_the_plan_and_trains_exactly",
    test_rotor: "test_training_is_eager_s_and_stays_within_the_limit",
    test_rockmate1: "test_all_stages_at_once_train_with_the_calls_of_old_code",
    test_rockmate2: "test_modules_are_planned_by_the_solver_of_their_name",
    test_monet: "test_a_plan_of_a_file_trains_exactly",
}.items():
    globals().update(shared_from(source, name))
