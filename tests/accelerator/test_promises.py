"""What README promises, on the device: the tests of tests/test_promises.py, all but those that are about no device.

This file and those beside it (`test_families`, `test_front_doors`, `test_trainers`) run them; `ELSEWHERE` has the rest.
"""

import gc
import importlib
from pathlib import Path

import pytest
import torch

from rockmate import FallbackWarning, Rockmate
from rockmate.memory.budget import RESERVE
from tests.accelerator.shared import shared_from
from tests.module import (
    conftest,
    test_called_whole,
    test_guarantee,
    test_module,
    test_options,
    test_pin,
    test_scope,
    test_shapes,
    test_zoo_training,
)
from tests.module.models import Layers, built, rows
from tests.module.steps import FEW_ROUNDS, assert_same_training, peak_of_step, squares, train
from tests.nn import test_chunked_logits
from tests.test_promises import PROMISES

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning"),
    pytest.mark.filterwarnings("ignore::rockmate.TraceWarning"),  # as test_goes_on has it
]

_CHOOSES_ITSELF = "it chooses the device itself, from kinds that it knows: tests/trainers has it on the CPU"

# Promises that have other tests on the device, or none: why.
ELSEWHERE = {
    "Hugging Face Trainer, TRL": _CHOOSES_ITSELF,
    "Accelerate": _CHOOSES_ITSELF,
    "Lightning": _CHOOSES_ITSELF,
    "DDP, FSDP2": "tests/accelerator/test_distributed.py",
    '`"2GiB"`, `"500 MB"`, `"2G"`, `"1e9"`': "reading a text runs nothing on a device",
    '`None`, `"auto"`': "test_without_a_budget_it_is_what_the_device_has_free, below",
    "`kernels`": "products by oneDNN are on the CPU alone: tests/accelerator/test_kernels.py has attention",
    "`compile`": "inductor compiles for no device of this kind: tests/accelerator/test_compiled_parts.py",
    "Training goes on.": "test_what_no_plan_fits_runs_by_the_least_plan_and_is_told, below: the CPU's has its numbers",
    "`plan_in_background`": "whether it is wanted is no matter of a device; test_families has that it works there",
}

globals().update(shared_from(conftest))
for source, names in {
    test_zoo_training: ("test_the_default_solver_trains_exactly_on_batches_it_has_not_seen",),
    test_guarantee: (),
    test_module: (
        "test_names_and_objects_are_the_model_s_own",
        "test_budgets_come_in_several_forms",
        "test_a_solver_may_be_named",
        "test_a_search_that_is_interrupted_leaves_its_best_plan",
        "test_a_plan_tells_how_far_from_the_best_it_may_be",
        "test_progress_is_told_the_stages_in_order",
    ),
    test_shapes: (
        "test_a_batch_of_another_shape_is_planned_when_it_first_comes_and_the_plan_is_kept",
        "test_the_plan_next_in_size_is_followed",
        "test_other_shapes_run_eagerly_if_so_wanted_and_say_so_once",
        "test_other_shapes_are_refused_if_so_wanted",
    ),
    test_scope: ("test_the_parts_add_up_and_the_step_is_what_is_left",),
    test_called_whole: ("test_training_is_exact",),
    test_pin: ("test_a_plan_under_a_small_budget_repeats_only_what_is_not_pinned",),
    test_options: ("test_options_say_what_keywords_say",),
    test_chunked_logits: ("test_logits_are_never_whole", "test_a_plan_is_to_the_bit_the_model_with_chunks"),
}.items():
    globals().update(shared_from(source, *names))


def test_without_a_budget_it_is_what_the_device_has_free(extension):
    memory = torch.accelerator.memory
    gc.collect()  # what is garbage now would be free later
    memory.empty_cache()
    limit_bytes = memory.memory_reserved() + (64 << 20)
    extension.limit(0, limit_bytes)
    for budget in (None, "auto"):
        model = Rockmate(built(Layers), rows(), budget, loss=squares)
        # Segments of tests before may be given back meanwhile: more is free then, and never more than there is.
        least_bytes, most_bytes = (int((1 - RESERVE) * free) for free in (62 << 20, limit_bytes))
        assert least_bytes <= model.plan.budget_bytes <= most_bytes
        extension.limit(0, 1 << 30)
        squares(model(rows(1))).backward()  # what is free later does not matter
        assert model.plan.budget_bytes <= most_bytes
        limit_bytes = memory.memory_reserved() + (64 << 20)
        extension.limit(0, limit_bytes)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_what_no_plan_fits_runs_by_the_least_plan_and_is_told():
    """As tests/module/test_goes_on.py has it with the CPU's numbers."""
    model = Rockmate(built(Layers), rows()[:100].contiguous(), 1.0, loss=squares, limits=FEW_ROUNDS)
    batches = [rows(1), rows(2)]
    with pytest.warns(FallbackWarning, match="no plan was found within the budget of .*, and the least that was found"):
        ours = train(model.original, batches, forward=model)
    assert_same_training(ours, train(built(Layers), batches))
    assert model.plan.budget_bytes < model.plan.measured_peak_bytes < model.plan.baseline_peak_bytes
    assert peak_of_step(model, (rows(3),)) <= model.plan.measured_peak_bytes


def test_every_promise_is_shown_on_the_device_or_says_why_not():
    here = [
        importlib.import_module(f"tests.accelerator.{path.stem}") for path in Path(__file__).parent.glob("test_*.py")
    ]
    shared = {id(value) for module in here for value in vars(module).values()}
    assert set(ELSEWHERE) <= set(PROMISES)
    for promise, names in PROMISES.items():
        for file, _, name in (one.partition("::") for one in names.split()):
            test = getattr(importlib.import_module(f"tests.{file.removesuffix('.py').replace('/', '.')}"), name)
            assert (id(test) in shared) != (promise in ELSEWHERE), promise
