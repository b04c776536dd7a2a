"""What training is made of beside the module, on the device: optimizers, scalers, hooks, adapters, `torch.compile`."""

import pytest

from tests.accelerator.shared import shared_from
from tests.module import test_compiled
from tests.trainers import conftest, test_functional, test_hooks, test_optimizers, test_peft

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    test_compiled.pytestmark,
    *test_peft.pytestmark,
]

globals().update(shared_from(conftest))
for source, names in {
    test_optimizers: (
        "test_autocast_with_a_gradient_scaler_is_exact_where_steps_are_skipped_too",
        "test_every_implementation_of_an_optimizer_steps_as_beside_the_module",
    ),
    test_hooks: ("test_hooks_on_the_module_fire_once_in_every_call",),
    test_functional: ("test_a_functional_call_is_exact_though_its_weights_are_gone_in_the_backward",),
    test_peft: ("test_adapters_are_saved_loaded_and_merged_as_those_of_the_model_itself",),
    test_compiled: (
        "test_compiled_layers_stay_compiled_and_exact",
        "test_a_compiled_planned_module_trains_exactly",
    ),
}.items():
    globals().update(shared_from(source, *names))
