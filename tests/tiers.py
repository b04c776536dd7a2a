"""Which tests run when: `make test` the quick ones, `make test-ci` those of some seconds, too, `make test-all` all.

A test is quick unless it is marked `ci` or `slow`. Of a test with many sets of parameters, the quick tier and the tier
of CI run as many as `SETS` says for its file, evenly spread from the first to the last: neighbours are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import pytest

EVERY = 1_000_000


class Sets(NamedTuple):
    """How many sets of parameters of one test a tier runs at most."""

    quick: int
    ci: int


# By file or folder; the longest that matches counts, and all sets are quick where none does.
SETS = {
    "tests/accelerator/test_distributed.py": Sets(1, 2),
    "tests/accelerator/test_host_tier.py": Sets(1, 2),
    "tests/accelerator/test_families.py": Sets(1, 3),
    "tests/accelerator/test_faults.py": Sets(1, 1),
    "tests/accelerator/test_front_doors.py": Sets(1, 1),
    "tests/accelerator/test_layout.py": Sets(1, 1),
    "tests/accelerator/test_modules.py": Sets(1, 16),
    "tests/accelerator/test_offload.py": Sets(1, 1),
    "tests/accelerator/test_out_of_memory.py": Sets(1, 1),
    "tests/accelerator/test_planned.py": Sets(1, 2),
    "tests/accelerator/test_promises.py": Sets(1, 1),
    "tests/accelerator/test_reserved.py": Sets(1, 1),
    "tests/accelerator/test_threads.py": Sets(1, 1),
    "tests/accelerator/test_trainers.py": Sets(1, 2),
    "tests/accelerator/test_verify.py": Sets(1, 1),
    "tests/cli/": Sets(2, 6),
    "tests/compile/test_partitioner.py": Sets(1, 3),
    "tests/distributed/": Sets(2, 2),
    "tests/families/test_kept.py": Sets(1, 2),
    "tests/families/test_transformers.py": Sets(1, 1),
    "tests/families/test_random_lengths.py": Sets(1, 1),
    "tests/families/test_recorded.py": Sets(1, 1),
    "tests/forecast/test_autocast.py": Sets(3, 6),
    "tests/forecast/test_convolutions.py": Sets(12, 24),
    "tests/forecast/test_layers.py": Sets(10, 20),
    "tests/forecast/test_recurrent.py": Sets(6, 12),
    "tests/front_doors/": Sets(2, 5),
    "tests/graph/": Sets(2, 8),
    "tests/graph/test_attention.py": Sets(EVERY, EVERY),
    "tests/graph/test_products.py": Sets(EVERY, EVERY),
    "tests/graph/test_json_refusals.py": Sets(EVERY, EVERY),
    "tests/graph/test_render.py": Sets(2, 12),
    "tests/graph/test_render_files.py": Sets(2, 12),
    "tests/graph/test_show.py": Sets(2, 12),
    "tests/graph/test_torch_private.py": Sets(EVERY, EVERY),
    "tests/graph/test_undetected.py": Sets(EVERY, EVERY),
    "tests/kernels/test_random_lengths.py": Sets(1, 8),
    "tests/loops/": Sets(1, 3),
    "tests/module/": Sets(1, 2),
    "tests/module/test_exactness.py": Sets(4, 4),
    "tests/module/test_layers_left_out.py": Sets(12, 24),
    "tests/module/test_layout.py": Sets(1, 1),
    "tests/module/test_moves.py": Sets(2, 3),
    "tests/module/test_offload.py": Sets(1, 2),
    "tests/module/test_two_forwards.py": Sets(4, 8),
    "tests/module/test_varying_saves.py": Sets(4, 8),
    "tests/offload/": Sets(1, 2),
    "tests/plan_files/": Sets(1, 2),
    "tests/regions/": Sets(3, 8),
    "tests/solver/": Sets(2, 8),
    "tests/test_docs.py": Sets(1, 4),
    "tests/test_hf_families.py": Sets(1, 4),
    "tests/test_notebooks.py": Sets(1, 1),
    "tests/test_peers.py": Sets(2, 4),
    "tests/trainers/": Sets(1, 1),
}


# Tests of many seconds each, beside quicker ones of the same code: the tier of CI runs them.
LONG = frozenset(
    {
        "tests/cli/test_verify_command.py::test_budgets_that_nothing_fits_or_that_are_none_end_with_status_2",
        "tests/compile/test_partitioner.py::test_sizes_that_vary_are_divided_by_those_of_the_sample",
        "tests/distributed/test_agreement.py::test_all_ranks_are_told_that_the_budget_is_too_small",
        "tests/distributed/test_agreement.py::test_an_error_of_the_planning_rank_reaches_all_and_is_not_for_ever",
        "tests/families/test_background.py::test_a_search_that_fails_is_no_failure_of_training",
        "tests/families/test_background.py::test_python_ends_while_a_search_goes_on",
        "tests/families/test_background.py::test_the_process_runs_when_nothing_else_has_to_be_done",
        "tests/families/test_kept.py::test_a_plan_of_one_size_says_nothing_of_others",
        "tests/families/test_lengths.py::test_a_last_short_batch_and_lengths_vary_together",
        "tests/families/test_lengths.py::test_odd_sizes_of_what_is_halved_are_planned_by_themselves",
        "tests/families/test_lengths.py::test_one_row_and_no_row_are_as_eager_has_them",
        "tests/families/test_lengths.py::test_whatever_a_first_step_of_new_sizes_ends_with_the_call_is_planned_by_itself",
        "tests/families/test_loss_seen.py::test_where_no_schedule_fits_that_either_it_is_told_once",
        "tests/families/test_moving.py::test_a_plan_file_tells_what_moves_at_other_sizes",
        "tests/families/test_moving.py::test_few_schedules_do_for_many_sizes",
        "tests/families/test_moving.py::test_sizes_that_were_not_measured_move_data_too",
        "tests/families/test_moving.py::test_the_second_memory_has_its_limit_at_all_sizes",
        "tests/families/test_moving.py::test_what_is_predicted_of_a_size_is_what_its_step_takes",
        "tests/families/test_random_lengths.py::test_steps_that_move_data_are_exact_and_within_the_budget",
        "tests/families/test_siblings.py::test_a_second_length_has_a_plan_by_its_size_and_is_told_of_once",
        "tests/forecast/test_autocast.py::test_what_is_told_of_a_plan_is_what_it_takes",
        "tests/forecast/test_estimate.py::test_a_plan_for_the_memory_that_there_is_holds_in_real_steps",
        "tests/forecast/test_estimate.py::test_nothing_moves_over_a_link_that_is_slower_than_recomputation",
        "tests/forecast/test_estimate.py::test_what_is_in_the_second_memory_is_limited",
        "tests/forecast/test_estimate.py::test_what_moves_are_told_to_meet_they_meet_on_what_is_measured",
        "tests/graph/test_chain.py::test_t5_of_six_layers_has_the_encoder_s_output_and_the_position_biases",
        "tests/graph/test_context.py::test_predictions_are_exact_where_gradients_come_from_several_blocks",
        "tests/graph/test_deep.py::test_modules_nested_as_deep_as_python_runs_them_are_traced",
        "tests/graph/test_model_zoo.py::test_a_graph_without_one_gradient_is_not_that_of_the_model",
        "tests/graph/test_partition.py::test_leaves_run_one_after_another_from_what_they_are_handed",
        "tests/graph/test_render_files.py::test_opening_shows_the_first_page",
        "tests/graph/test_render_files.py::test_same_graph_gives_same_bytes_whatever_the_time_and_settings",
        "tests/graph/test_render_files.py::test_settings_and_graphs_are_left_as_they_were",
        "tests/graph/test_scaling.py::test_work_grows_at_most_as_n_log_n",
        "tests/kernels/test_choose.py::test_where_they_take_more_memory_answers_are_those_of_the_usual_ones",
        "tests/module/test_budget.py::test_a_fraction_under_autocast_is_of_a_step_whose_backward_is_outside",
        "tests/module/test_changes.py::test_a_module_planned_under_autocast_wants_it_in_every_call",
        "tests/module/test_compiled.py::test_a_compiled_training_step_leaves_the_backward_of_the_plan_alone",
        "tests/module/test_guarantee.py::test_the_bytes_that_a_refusal_names_are_enough_though_more_is_predicted",
        "tests/module/test_hooks_on_tensors.py::test_others_of_the_model_are_recomputed",
        "tests/module/test_inverse.py::test_each_way_through_the_module_is_compared_with_it_once",
        "tests/module/test_inverse.py::test_only_batches_that_may_be_tried_are",
        "tests/module/test_leaks.py::test_planning_collects_its_own_garbage_and_leaves_frozen_what_was",
        "tests/module/test_lifecycles.py::test_a_part_that_was_replaced_is_not_kept_by_the_plans",
        "tests/module/test_offload.py::test_a_module_that_is_gone_leaves_no_file_and_no_thread",
        "tests/module/test_offload.py::test_a_second_budget_is_solved_with_moves",
        "tests/module/test_offload.py::test_calls_of_other_sizes_are_within_the_same_budget",
        "tests/module/test_offload.py::test_measuring_real_links_within_a_first_call_draws_nothing",
        "tests/module/test_offload.py::test_several_steps_under_one_limit_keep_what_is_beyond_it",
        "tests/module/test_offload_queries.py::test_a_sweep_has_plans_that_move_beside_others",
        "tests/module/test_offload_queries.py::test_the_smallest_budget_is_smaller_where_data_may_move_at_once",
        "tests/module/test_offload_queries.py::test_what_may_be_moved_is_limited_there_too",
        "tests/module/test_options.py::test_queries_take_the_same_record",
        "tests/module/test_second_budget.py::test_the_cache_serves_another_budget_in_another_process",
        "tests/nn/test_chunked_logits.py::test_it_may_be_asked_for_by_every_question_and_is_given_back",
        "tests/observing/test_peak_command.py::test_a_plan_is_told_of_a_model_that_the_script_lets_go",
        "tests/offload/test_file_tier.py::test_a_file_may_not_grow_beyond_what_the_system_allows",
        "tests/offload/test_file_tier.py::test_ctrl_c_while_it_is_waited_for_leaves_all_usable",
        "tests/regions/test_choose.py::test_it_moves_data_too",
        "tests/regions/test_random_lengths.py::test_steps_of_any_length_are_near_eager_s_and_those_of_any_budget",
        "tests/reports/test_reports.py::test_points_of_memory_against_time_are_plans_of_the_problem",
        "tests/reports/test_reports.py::test_the_same_plan_gives_the_same_bytes",
        "tests/solver/test_auto.py::test_never_slower_than_its_parts",
        "tests/solver/test_bound.py::test_cases_are_below_the_oracle_wherever_they_are_told",
        "tests/solver/test_bound.py::test_cases_are_told_for_a_plan_only_where_they_prove_enough_of_it",
        "tests/solver/test_bound.py::test_cases_raise_the_bound_where_a_loss_leaves_little_room",
        "tests/solver/test_bound.py::test_narrow_stages_apart_raise_the_bound_of_the_integer_program",
        "tests/solver/test_bound.py::test_near_the_best_plan_on_real_structures",
        "tests/solver/test_bound.py::test_refinement_with_spans_goes_on_from_where_it_is",
        "tests/solver/test_checkmate.py::test_blocks_are_proven",
        "tests/solver/test_checkmate.py::test_the_sweep_and_the_program_find_the_same_times",
        "tests/solver/test_exact_windows.py::test_a_window_is_looked_at_once_until_the_plan_near_it_is_another",
        "tests/solver/test_hiremate.py::test_a_u_shape_is_planned_with_its_skips_down_to_the_smallest_budget_known",
        "tests/solver/test_hiremate.py::test_divided_problems_have_plans_that_fit_and_never_beat_the_oracle",
        "tests/solver/test_hiremate.py::test_the_same_numbers_give_the_same_plan",
        "tests/solver/test_rockmate.py::test_plans_fit_what_they_say_and_lie_between_the_oracle_and_greedy_options",
        "tests/solver/test_rockmate.py::test_too_small_a_budget_names_one_that_works",
        "tests/solver/test_rotor.py::test_a_hundred_blocks_are_quick",
        "tests/solver/test_search.py::test_a_relaxation_that_raises_is_told_once_and_the_search_ends_with_a_valid_plan",
        "tests/solver/test_search.py::test_the_gap_asked_for_is_reached_and_proven",
        "tests/solver/test_sweeping.py::test_a_sweep_comes_first_where_the_narrowest_stage_is_late_and_again_for_a_faster_plan",
        "tests/solver/test_sweeping.py::test_the_bound_with_sweeps_is_below_a_plan_of_a_network_for_images",
        "tests/solver/test_transfer_bound.py::test_it_is_near_a_plan_that_was_found_and_the_time_limit_holds",
        "tests/test_first_hour.py::test_no_step_is_begun_without_time_left",
        "tests/test_peers.py::test_decisions_of_a_policy_are_followed_in_order",
        "tests/test_peers.py::test_eager_alone_needs_no_sitting",
        "tests/test_peers.py::test_models_of_monet_s_table_have_its_batches_and_images",
        "tests/test_peers.py::test_who_is_not_ready_in_time_is_out",
        "tests/trainers/test_transformers_callback.py::test_a_callback_that_comes_late_is_told_what_to_do",
        "tests/trainers/test_transformers_callback.py::test_a_second_training_keeps_the_plans",
        "tests/trainers/test_transformers_callback.py::test_the_largest_batch_trains_as_if_it_had_been_given",
        "tests/trainers/test_trl.py::test_fine_tuning_is_that_of_the_trainer_itself",
    }
)


def assign_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark those `ci` and `slow` that are neither by themselves and that `SETS` leaves to these tiers."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for name, sets in tests.items():
        quick, ci = sets_of(name)
        quick = 0 if name in LONG else quick
        for tier, most in (("ci", quick), ("slow", ci)):
            taken = spread(len(sets), most)
            for place, item in enumerate(sets):
                if place not in taken:
                    item.add_marker(tier)


def sets_of(name: str) -> Sets:
    """What `SETS` says for the test of that name."""
    found = [folder for folder in SETS if name.startswith(folder)]
    return SETS[max(found, key=len)] if found else Sets(EVERY, EVERY)


def spread(number: int, most: int) -> set[int]:
    """At most `most` places of `number`, evenly spread from the first to the last."""
    if number <= most:
        return set(range(number))
    return {round(index * (number - 1) / max(most - 1, 1)) for index in range(most)}
