"""The properties that surviving training is held to, and the tests that check each.

What the papers claim or take for granted (GEMINI and Oobleck, SOSP 2023), and what users of such systems
found broken. A name like `TestLosses` is a state machine of hypothesis.

1. Killed anywhere in write, copy, commit, persist or restore: a complete, verified step remains, not
    older than the newest committed one
  - elastic/runs/test_runs_losses.py
      test_killed_at_every_point test_recoveries_that_are_hit
      test_the_next_host_goes_as_soon_as_the_next_step_is_saved
  - checkpoint/memory/test_crash_anywhere.py
      TestTwoSlots TestThreeSlots
  - checkpoint/live/test_with_memory_service.py
      test_a_second_loss_while_the_restored_step_lacks_copies
  - checkpoint/live/test_storage_crashes.py
      test_killed_between_any_two_calls
2. No slot is both complete and torn, for concurrent readers either
  - checkpoint/memory/test_slots_in_memory.py
      test_readers_beside_a_writer_never_get_a_torn_slot
      test_a_writer_that_dies_within_a_header_leaves_no_complete_slot
  - checkpoint/memory/test_memory_faults.py
      test_a_holder_that_is_killed_anywhere_has_no_torn_complete_slot
      test_an_owner_that_is_killed_while_it_sends_leaves_nothing_torn
3. Any losses that leave a copy recover from memory; a whole group falls to storage, all ranks to one step
  - checkpoint/policy/test_placement.py
      test_every_loss_of_a_few_hosts
  - checkpoint/policy/test_restore.py
      test_any_loss_that_the_placement_survives_comes_back
      test_a_group_that_is_gone_sends_all_to_storage
  - elastic/runs/test_runs_losses.py
      test_many_at_once
      test_what_is_lost_ends_the_job_or_is_begun_anew_where_that_was_asked_for
4. The rule for reusing slots is safe in every state, and anything weaker is found out
  - checkpoint/policy/test_slots.py
      test_the_shipped_rule_is_safe test_a_weaker_rule_is_found_out
      test_a_second_loss_after_a_restore_of_a_step_that_was_not_committed
      test_who_saves_before_the_restored_step_is_committed_again_is_found_out
  - checkpoint/memory/test_crash_anywhere.py
      test_a_weaker_rule_is_found_out
5. Turned bits are detected, the next source serves, then an older step, loudly
  - elastic/runs/test_runs_services.py
      test_memory_that_is_wiped_or_corrupt
  - checkpoint/memory/test_slots_in_memory.py
      test_any_flipped_bit_is_noticed
  - checkpoint/memory/test_memory_faults.py
      test_a_flipped_bit_in_a_replica_is_noticed_and_mended test_a_flipped_bit_in_a_layout_is_noticed
  - checkpoint/live/test_checkpointer.py
      test_all_copies_bad_begins_anew_and_says_so
      test_corrupt_copies_fall_to_the_next_source_then_to_an_older_step
  - checkpoint/live/test_storage.py
      test_any_flipped_bit_is_found
6. Round trips of every kind of state are equal
  - checkpoint/live/test_state.py
      test_tensors_of_every_kind test_values_of_every_kind test_tied_weights_lie_once_and_stay_tied
      test_optimizers_go_on_bit_identical
  - checkpoint/live/test_parallel_state.py
      test_new_processes_go_on_bit_identical
  - checkpoint/live/test_exchange.py
      test_round_trip_through_dcp
7. Resharding gives the same whole state; other layouts are refused
  - checkpoint/live/test_state.py
      test_resharding_puts_any_grid_together_from_any_other test_other_layouts_are_refused_by_name
  - checkpoint/live/test_parallel_state.py
      test_other_worlds_and_meshes_get_the_same_state
  - elastic/runs/test_runs_services.py
      test_a_job_that_shrinks_and_grows_again
8. What was fenced cannot write
  - checkpoint/memory/test_memory_faults.py
      test_a_stale_generation_cannot_write
  - elastic/supervisor/test_supervisor_membership.py
      test_stale_and_strange_messages_change_nothing
  - elastic/runs/test_runs_services.py
      test_a_partition_and_a_slow_link
9. Storage: killed between any two calls, a full or failing disk: old or new, never neither
  - checkpoint/live/test_storage_crashes.py
      test_killed_between_any_two_calls test_killed_again_at_the_repair
      test_a_disk_that_fails_at_any_call
10. After a loss all copies are there again within one checkpoint
  - checkpoint/memory/test_memory_service.py
      test_lost_replicas_are_made_again_within_one_checkpoint
  - checkpoint/live/test_with_memory_service.py
      test_hosts_are_lost_one_after_the_other
11. The same size of job: losses and all state bit-identical to an undisturbed run
  - elastic/runs/test_runs_losses.py
      test_each_kind_of_loss test_killed_at_every_point test_recoveries_that_are_hit test_many_at_once
      test_two_ranks_a_host_and_spares
  - elastic/runs/test_runs_services.py
      test_services_that_die
12. Another layout: bit-identical with sums in fixed point or a fixed order; close with plain floats
  - pipelines/live/test_pipeline_runs.py
      test_bits_are_kept test_plain_floats_stay_close test_too_large_for_fixed_point test_no_number
  - pipelines/live/test_pipeline_parts.py
      test_sums_in_any_grouping test_range_of_fixed_point
  - elastic/runs/test_runs_services.py
      test_a_job_that_shrinks_and_grows_again
13. Each sample once an epoch, the batch stays, schedules advance once a step
  - pipelines/live/test_pipeline_parts.py
      test_each_sample_once_an_epoch test_skipped_step_moves_only_the_schedule
  - elastic/live/test_determinism.py
      test_a_step_is_a_block_of_the_epochs
  - elastic/runs/test_runs_losses.py
      test_each_kind_of_loss
14. The step in doubt: all apply it or all do it again
  - pipelines/live/test_pipeline_runs.py
      test_step_in_doubt_on_every_subset test_step_that_was_not_decided_is_done_again
  - pipelines/live/test_pipeline_parts.py
      test_step_in_doubt_for_every_subset
15. The planner is optimal and keeps to memory
  - pipelines/policy/test_pipeline_planner.py
      test_one_device_a_host_is_optimal test_twelve_layers_and_every_number_of_stages
      test_memory_moves_the_cut
  - pipelines/policy/test_pipeline_times.py
      test_the_formula_by_hand
16. Templates cover every number of hosts, with as few as can be, closed under merging
  - pipelines/policy/test_pipeline_templates.py
      test_fewest_templates test_sizes_of_a_set
      test_every_number_of_hosts_is_covered_with_the_published_sizes
17. Reconfiguration loses no layer that has a copy, leaves no host idle, keeps sizes feasible
  - pipelines/policy/test_pipeline_reconfigure.py
      test_examples test_joins TestLosses
  - pipelines/live/test_pipeline_runs.py
      test_simple_borrow_merge_and_join test_killed_at_any_time
18. The last copy of a layer: named, and taken from storage
  - pipelines/live/test_pipeline_runs.py
      test_last_copy_is_named test_last_copy_comes_from_storage
19. No hang: peers that freeze, die or are cut off, the store, the supervisor: recovery or a clear error
  - elastic/runs/test_runs_services.py
      test_services_that_die test_a_partition_and_a_slow_link
  - elastic/runs/test_runs_losses.py
      test_each_kind_of_loss test_a_program_that_fails_again_and_again
  - elastic/live/test_group.py
      test_frozen_peer test_killed_peer
  - checkpoint/memory/test_memory_faults.py
      test_connections_that_break_anywhere_are_made_again
  - elastic/supervisor/test_supervisor_membership.py
      test_hosts_that_never_come_fail_the_run test_losses_without_a_step_are_bounded
20. Many recoveries in one process leak nothing
  - elastic/live/test_group.py
      test_many_recoveries_leak_nothing
  - checkpoint/memory/test_memory_faults.py
      test_many_generations_leak_nothing
21. A supervisor may be started again at any moment; two cannot own a run
  - elastic/supervisor/test_supervisor_restart.py
      test_killed_at_any_time_and_started_again test_two_cannot_lead_a_run
      test_an_agent_of_a_later_supervisor_is_none_of_an_older_ones
22. Nothing is left behind: every run looks for processes, memory and networks of the run
  - test_resume.py
      test_a_killed_launcher_is_followed_by_another test_where_nobody_comes_all_ends_by_itself
  - test_host_launch.py
      test_all_dies_but_the_launcher test_what_a_killed_lent_host_leaves_is_swept
  - elastic/agent/test_agent.py
      test_a_dead_agent_takes_its_workers_along test_end_leaves_nothing
  - elastic/runs/test_runs_losses.py
      test_each_kind_of_loss
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TRAINING = Path(__file__).parents[2]
PROPERTIES = re.split(r"^(?=\d+\. )", __doc__ or "", flags=re.MULTILINE)[1:]


def test_all_properties_are_there() -> None:
    assert [int(text.partition(".")[0]) for text in PROPERTIES] == list(range(1, 23))


@pytest.mark.parametrize("text", PROPERTIES, ids=lambda text: text.partition(".")[0])
def test_the_tests_of_a_property_are_there(text: str) -> None:
    for part in text.split("\n  - ")[1:]:
        file, *names = part.split()
        source = (TRAINING / file).read_text()
        there = set(re.findall(r"^(?:def |class )?([Tt]est\w+)(?: =|\()", source, re.MULTILINE))
        assert names
        assert set(names) <= there, f"{file} has no {', '.join(sorted(set(names) - there))}"
