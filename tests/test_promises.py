"""What README promises, each by a test that `make test` runs: whoever takes one away sees here what it stood for."""

import ast
import re
from pathlib import Path

import pytest

from tests.tiers import LONG

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

PROMISES = {
    # guarantees
    "The same values.": "module/test_zoo_training.py"
    "::test_the_default_solver_trains_exactly_on_batches_it_has_not_seen",
    "The peak.": "module/test_guarantee.py::test_each_of_fifty_steps_is_within_the_budget",
    "The same module.": "module/test_module.py::test_names_and_objects_are_the_model_s_own",
    "The same class.": "module/test_transparent.py::test_it_is_an_instance_of_both_classes",
    "Training goes on.": "module/test_goes_on.py"
    "::test_what_no_plan_fits_runs_by_the_least_plan_and_is_told_with_both_numbers",
    "Any length.": "families/test_lengths.py::test_three_sizes_are_planned_and_hold_for_others",
    "No silent change.": "module/test_shapes.py"
    "::test_a_batch_of_another_shape_is_planned_when_it_first_comes_and_the_plan_is_kept",
    # used with
    "Hugging Face Trainer, TRL": "trainers/test_transformers_callback.py::test_one_line_trains_as_without_it",
    "Accelerate": "trainers/test_accelerate.py::test_prepared_modules_train_as_the_module_itself",
    "PEFT": "trainers/test_peft.py::test_adapters_are_saved_loaded_and_merged_as_those_of_the_model_itself",
    "Lightning": "trainers/test_lightning.py::test_a_fit_is_that_of_the_module_itself",
    "DDP, FSDP2": "distributed/test_data_parallel.py::test_training_is_equal_to_eager "
    "distributed/test_sharded.py::test_planned_blocks_train_as_eager_ones",
    "torch.compile": "module/test_compiled.py::test_compiled_layers_stay_compiled_and_exact "
    "module/test_compiled.py::test_a_compiled_planned_module_trains_exactly",
    "autocast, optimizers, hooks, torch.func": "trainers/test_optimizers.py"
    "::test_autocast_with_a_gradient_scaler_is_exact_where_steps_are_skipped_too "
    "trainers/test_optimizers.py::test_every_implementation_of_an_optimizer_steps_as_beside_the_module "
    "trainers/test_hooks.py::test_hooks_on_the_module_fire_once_in_every_call "
    "trainers/test_functional.py::test_a_functional_call_is_exact_though_its_weights_are_gone_in_the_backward",
    "rotor, Rockmate 1 and 2, MONeT": "front_doors/test_rotor.py::test_training_is_eager_s_and_stays_within_the_limit "
    "front_doors/test_rockmate1.py::test_all_stages_at_once_train_with_the_calls_of_old_code "
    "front_doors/test_rockmate2.py::test_modules_are_planned_by_the_solver_of_their_name "
    "front_doors/test_monet.py::test_a_plan_of_a_file_trains_exactly",
    # budgets
    "`2_000_000_000`": "module/test_module.py::test_budgets_come_in_several_forms",
    '`"2GiB"`, `"500 MB"`, `"2G"`, `"1e9"`': "module/test_budget.py::test_every_form_means_bytes",
    '`0.5`, `"50%"`': "module/test_module.py::test_budgets_come_in_several_forms",
    '`None`, `"auto"`': "module/test_budget.py"
    "::test_a_module_planned_without_a_budget_gets_what_was_free_when_it_was_planned",
    # arguments
    "`scope`": "module/test_scope.py::test_the_parts_add_up_and_the_step_is_what_is_left",
    "`optimizer`": "module/test_guarantee.py::test_fifty_steps_are_within_a_budget_for_all_of_training",
    "`loss`": "module/test_guarantee.py"
    "::test_gradients_of_several_losses_are_within_the_budget_where_some_are_there_and_some_are_not",
    "`solver`": "module/test_module.py::test_a_solver_may_be_named",
    "`time_limit`": "module/test_module.py::test_a_search_that_is_interrupted_leaves_its_best_plan",
    "`gap`": "module/test_module.py::test_a_plan_tells_how_far_from_the_best_it_may_be",
    "`compile`": "regions/test_choose.py::test_training_is_that_of_the_parts_compiled_without_a_plan",
    "`kernels`": "kernels/test_choose.py::test_training_is_that_of_these_kernels_without_a_plan",
    "`layout`": "module/test_layout.py::test_each_region_is_in_the_layout_in_which_it_is_quicker",
    "`loss_chunks`": "nn/test_chunked_logits.py::test_logits_are_never_whole",
    "`offload`": "module/test_offload.py::test_most_of_a_chain_moves_where_the_disk_is_quick",
    "`opaque`": "module/test_called_whole.py::test_training_is_exact",
    "`pin`": "module/test_pin.py::test_a_plan_under_a_small_budget_repeats_only_what_is_not_pinned",
    "`plan`": "plan_files/test_restore.py::test_the_same_plan_runs_and_trains_exactly",
    "`cache`": "plan_files/test_cache.py::test_a_second_start_finds_the_plan_and_trains_exactly",
    "`plan_in_background`": "families/test_background.py::test_where_it_is_not_wanted",
    "`shapes`": "module/test_shapes.py::test_the_plan_next_in_size_is_followed "
    "module/test_shapes.py::test_other_shapes_run_eagerly_if_so_wanted_and_say_so_once "
    "module/test_shapes.py::test_other_shapes_are_refused_if_so_wanted",
    "`options`": "module/test_options.py::test_options_say_what_keywords_say",
    "`progress`": "module/test_module.py::test_progress_is_told_the_stages_in_order",
}


def first_cells(heading: str) -> list[str]:
    """Of the rows of tables below a heading of README, links taken for their texts."""
    part = README.split(f"\n{heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", part, re.MULTILINE)
    cells = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row) for row in rows)
    return [cell for cell in cells if cell not in ("with", "budget", "argument") and not cell.startswith("--")]


def test_every_promise_of_the_readme_has_a_test():
    guarantees = re.findall(r"^\* \*\*(.+?)\*\*", README, re.MULTILINE)
    budgets = [re.sub(r", in powers.*", "", cell) for cell in first_cells("## Budgets")]
    assert {*guarantees, *first_cells("## Use it with what you have"), *budgets} == set(PROMISES)


@pytest.mark.parametrize("name", sorted({name for names in PROMISES.values() for name in names.split()}))
def test_a_test_of_a_promise_is_quick(name: str):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in functions
    of_file = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    of_all = {node.attr for line in of_file for node in ast.walk(line) if isinstance(node, ast.Attribute)}
    own = {mark.attr for mark in functions[function].decorator_list if isinstance(mark, ast.Attribute)}
    assert not (own | of_all) & {"ci", "slow", "cuda"}


def test_long_tests_are_there_and_no_promise():
    for name in LONG:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), name
        assert not any(function in promise for promise in PROMISES.values()), name
