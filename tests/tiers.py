"""Which tests run when: `make check` in about a minute, `make test` before landing, `make soak` for the rest.

What SOAK names is in `soak`, except for a sample that stays in `test`; everything else is in `test`. `check` is the
part of `test` that pins the language, plans, schedules, proofs and goldens. Rows name tests by the beginning of their
id. `pytest` alone runs all tests, `pytest --tier test` those of one tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

TIERS = ("check", "test", "soak", "all")


class Row(NamedTuple):
    """Tests whose ids begin with `prefix`: one of `every` cases of each function stays in `test`, the first among them.

    `every` 0: none stays, and `sample` is the beginning of the ids of tests in `test` that hold the same for less.
    """

    prefix: str
    every: int
    sample: str = ""


SOAK = (
    Row("tests/kernels/test_program.py::test_a_step", 2),
    Row("tests/proof/test_start.py::test_no_shipped", 20),
    Row("tests/proof/test_start.py::test_each_rank", 20),
    Row("tests/proof/test_start.py::test_without_start_up", 2),
    Row("tests/runs/test_fp8_resume.py", 4),
    Row("tests/schedules/test_steps.py::test_many_ranks", 0, "tests/schedules/test_steps.py::test_auto_is_the_same"),
    Row("tests/runs/test_blend.py", 0, "tests/data/test_blend.py"),
    Row("tests/runs/test_phases.py::test_a_break", 2),
    Row("tests/runs/test_phases.py::test_a_kill", 0, "tests/runs/test_phases.py::test_a_break"),
    Row("tests/runs/test_phases.py::test_a_damaged", 0, "tests/runs/test_phases.py::test_a_break"),
    Row("tests/runs/test_phases.py::test_a_trained_phase", 0, "tests/runs/test_phases.py::test_phases_end_by_tokens"),
    Row("tests/runs/test_phases.py::test_a_phase_is_added", 0, "tests/runs/test_phases.py::test_phases_end_by_tokens"),
    Row("tests/training/test_attention_output.py::test_proven_peak", 4),
    Row("tests/training/test_host_copies.py::test_training", 0, "tests/training/test_host_copies.py::test_proven"),
    Row("tests/training/test_host_copies.py::test_proven_peak", 4),
    Row("tests/proof/test_mutants.py::test_mutants_of_copies", 4),
    Row("tests/training/test_bf16_options.py::test_an_option", 16),
    Row("tests/training/test_bf16_options.py::test_options_together", 2),
    Row("tests/training/test_formats.py::test_a_step_equals", 4),
    Row("tests/training/test_formats.py::test_the_loss", 2),
    Row("tests/training/test_fp8_meshes.py::test_proven_peak", 2),
    Row("tests/training/test_tensor_fp8.py::test_a_step", 6),
    Row("tests/training/test_fp8.py::test_a_step", 12),
    Row("tests/training/test_fp8.py::test_adapters", 2),
    Row("tests/training/test_fp8_meshes.py::test_a_step_on_any_mesh", 3),
    # docs/reliability.md: each row of it has a sample in `test`, most of them elsewhere.
    Row("tests/reliability/test_kills.py", 0, "tests/runs/test_failures.py::test_a_killed_rank"),
    Row("tests/reliability/test_faults.py::test_a", 0, "tests/runtime/test_launch.py::test_a_fault_is_named"),
    Row("tests/reliability/test_surroundings.py", 0, "tests/runtime/test_metrics.py::test_rows_that_a_full"),
    Row("tests/reliability/test_attacks.py::test_code", 16),
    Row("tests/fuzz/test_emitted.py", 60),
    Row("tests/golden/test_golden.py::test_bytes_in", 0, "tests/golden/test_golden.py::test_same_spec"),
    # Runs on real processes: each kind of fault and each schedule once in `test`, all combinations in `soak`.
    Row("tests/runs/test_failures.py::test_ended_while", 3),
    Row("tests/runs/test_builds.py::test_a_build_that_is_replaced", 0, "tests/runs/test_builds.py::test_two_runs"),
    Row("tests/runs/test_failures.py::test_asked_to_stop", 2),
    Row("tests/runs/test_failures.py::test_a_stopped_rank", 0, "tests/runtime/test_launch.py::test_a_stopped_rank"),
    Row("tests/runs/test_failures.py::test_data_that", 0, "tests/runs/test_failures.py::test_a_killed_rank"),
    Row("tests/runs/test_failures.py::test_an_exception", 0, "tests/runtime/test_launch.py::test_the_traceback"),
    Row("tests/runs/test_launch.py::test_a_slurm_job", 0, "tests/launch/test_slurm.py"),
    Row("tests/runs/test_launch.py::test_two_shells", 0, "tests/runs/test_machines.py::test_two_machines"),
    Row("tests/launch/test_scripts.py::test_hostile_names", 4),
    Row("tests/launch/test_scripts.py::test_scripts_pass", 2),
    Row("tests/runs/test_models.py::test_resuming_is_bit_exact", 0, "tests/runs/test_resume.py::test_resuming_is_bit"),
    Row("tests/runs/test_moments.py", 0, "tests/training/test_moments.py"),
    Row("tests/runs/test_results.py::test_a_run_that_goes_on", 0, "tests/runs/test_resume.py::test_resuming_is_bit"),
    Row("tests/runs/test_results.py::test_torchrun", 0, "tests/runs/test_torchrun.py::test_a_killed_rank"),
    Row("tests/runs/test_builds.py::test_two_runs", 3),
    Row("tests/runs/test_builds.py::test_random_edits", 2),
    Row("tests/runs/test_chat.py::test_a_run_goes_on", 0, "tests/runs/test_chat.py::test_packed_rows"),
    Row("tests/runs/test_chat.py::test_a_longer", 0, "tests/runs/test_chat.py::test_packed_rows"),
    Row(
        "tests/runs/test_chat.py::test_data_ranks_divide_packed",
        0,
        "tests/runs/test_chat.py::test_data_ranks_divide_the",
    ),
    Row("tests/runs/test_commands.py::test_a_run_folder_in", 0, "tests/runtime/test_launch.py::test_two_runs"),
    Row("tests/runs/test_commands.py::test_a_spec_from", 0, "tests/runs/test_commands.py::test_a_build_from"),
    Row("tests/runs/test_commands.py::test_shipped_specs_train", 0, "tests/specs/test_trains.py::test_trains"),
    Row("tests/runs/test_commands.py::test_training_does_not_depend", 3),
    Row(
        "tests/runs/test_data.py::test_a_cache_elsewhere", 0, "tests/runs/test_commands.py::test_a_build_from_elsewhere"
    ),
    Row(
        "tests/runs/test_data.py::test_changed_text", 0, "tests/runs/test_data.py::test_a_run_goes_on_without_its_text"
    ),
    Row("tests/runs/test_data.py::test_runs_at_once", 0, "tests/data/test_lock.py"),
    Row("tests/runs/test_debug.py::test_one_of_four_ranks", 0, "tests/runs/test_debug.py::test_one_rank"),
    Row("tests/runs/test_models.py::test_rows_have", 2),
    Row("tests/runs/test_resume.py::test_any_plan_loads", 6),
    Row("tests/runs/test_resume.py::test_plans_of_one_model", 5),
    Row("tests/runs/test_resume.py::test_resuming_is_bit_exact", 8),
    Row("tests/runs/test_resume_position.py", 2),
    Row("tests/runs/test_resume_position.py::test_another_s", 0, "tests/runs/test_resume_position.py::test_another_b"),
    Row("tests/runs/test_resume_position.py::test_a_run_told", 0, "tests/runs/test_resume_position.py::test_a_ramp"),
    Row("tests/runs/test_saves.py::test_a_kill_in", 0, "tests/runtime/test_background_saves.py::test_sigkill"),
    Row("tests/runs/test_saves.py::test_a_kill_at", 8),
    Row("tests/runs/test_saves.py::test_in_the", 0, "tests/runtime/test_background_saves.py::test_in_the"),
    Row("tests/runs/test_saves.py::test_a_save_that_fails", 2),
    Row("tests/runs/test_saves.py::test_failure_stop", 0, "tests/runs/test_saves.py::test_a_run_whose_last_save"),
    Row("tests/runs/test_run_files.py::test_a_resume_by", 0, "tests/training/test_differential.py::test_training_over"),
    Row("tests/runs/test_run_files.py::test_mutated_files", 0, "tests/runs/test_verify.py::test_files_of_a_run"),
    Row("tests/runs/test_saves.py::test_a_shard_of_another", 0, "tests/runtime/test_checkpoint_faults.py"),
    Row("tests/runs/test_skip_batch.py::test_the_command", 0, "tests/runs/test_skip_batch.py::test_a_resume"),
    Row("tests/runs/test_machines.py::test_two_machines", 4),
    Row("tests/runs/test_norms.py", 2),
    Row("tests/runs/test_phases.py::test_torchrun", 0, "tests/launch/test_phases.py"),
    Row("tests/specs/test_trains.py::test_every_phase", 0, "tests/runs/test_phases.py::test_a_break"),
    Row("tests/runs/test_schedules.py::test_any_pairs", 2),
    Row("tests/runs/test_schedules.py::test_on_three_ranks", 0, "tests/runs/test_schedules.py::test_on_four_ranks"),
    Row("tests/runs/test_schedules.py::test_on_two_ranks", 0, "tests/runs/test_schedules.py::test_on_four_ranks"),
    Row("tests/runs/test_torchrun.py::test_a_killed_rank", 2),
    Row("tests/runs/test_torchrun.py::test_a_stop_of_one", 0, "tests/runtime/test_torchrun.py"),
    Row("tests/runs/test_torchrun.py::test_a_killed_torchrun", 0, "tests/runs/test_torchrun.py::test_a_killed_rank"),
    Row("tests/runs/test_torchrun.py::test_a_rollback", 0, "tests/runs/test_health.py::test_a_kill"),
    Row("tests/runs/test_torchrun.py::test_the_setting", 0, "tests/runtime/test_torchrun.py::test_nothing_listens"),
    Row("tests/runs/test_torchrun.py::test_a_second_run", 0, "tests/runtime/test_torchrun.py::test_another_run_folder"),
    Row(
        "tests/runs/test_torchrun.py::test_ranks_that", 0, "tests/runtime/test_torchrun.py::test_ranks_that_are_started"
    ),
    Row("tests/runs/test_elastic.py::test_a_machine", 0, "tests/runs/test_elastic.py::test_data_ranks"),
    Row("tests/runs/test_launch.py::test_an_elastic", 0, "tests/launch/test_elastic.py"),
    Row("tests/runs/test_fewer_devices.py::test_a_rank", 0, "tests/runs/test_fewer_devices.py::test_no_plan"),
    Row("tests/runs/test_store.py", 0, "tests/runs/test_places.py"),
    Row("tests/runs/test_restarts.py::test_a_restart", 0, "tests/runs/test_restarts.py::test_a_rank"),
    Row("tests/runs/test_restarts.py::test_a_rank", 4),
    Row("tests/runs/test_health.py::test_a_batch", 4),
    Row("tests/runs/test_health.py::test_a_kill", 3),
    Row("tests/runs/test_health.py::test_a_flipped", 2),
    Row("tests/runs/test_replay_verdict.py::test_a_rank", 3),
    Row("tests/runs/test_overflow.py", 3),
    Row("tests/runs/test_replay_devices.py::test_what_cannot", 2),
    Row("tests/runs/test_health.py::test_restarts", 0, "tests/runs/test_health.py::test_a_flipped"),
    Row("tests/runs/test_tensor.py", 3),
    Row("tests/runs/test_verify.py", 3),
    Row("tests/weights/test_runs.py::test_damaged", 0, "tests/weights/test_runs.py::test_a_checkpoint_that_ch"),
    Row("tests/test_extending_optimizer.py::test_a_new_optimizer_is", 2),
    Row(
        "tests/test_extending_optimizer.py::test_a_new_optimizer_t",
        0,
        "tests/test_extending_optimizer.py::test_a_new_optimizer_is",
    ),
    Row("tests/test_tutorial.py", 0, "tests/test_readme.py::test_commands_print"),
    # Training held to autograd, transformers and the ledger: each claim once in `test`, every model and plan in `soak`.
    Row("tests/experts/test_trained.py::test_training_equals_autograd", 3),
    Row("tests/predict/test_foldings.py", 5),
    Row("tests/proof/test_alone.py", 2),
    Row("tests/proof/test_any_schedule.py::test_any_schedule", 4),
    Row("tests/proof/test_effects.py", 2),
    Row("tests/proof/test_mutants.py", 4),
    Row("tests/proof/test_mutants.py::test_mutants_that", 3),
    Row("tests/segments/test_bf16.py", 2),
    Row("tests/segments/test_fuse.py", 3),
    Row("tests/segments/test_fused_options.py", 2),
    Row("tests/segments/test_recompute.py", 3),
    Row("tests/specs/test_trains.py::test_trains", 4),
    Row("tests/specs/test_shipped.py::test_is_planned", 2),
    Row("tests/specs/test_counts.py::test_shipped_models", 2),
    Row("tests/training/test_adapters.py::test_training", 8),
    Row("tests/training/test_bf16.py", 6),
    Row("tests/training/test_bf16.py::test_proven", 0, "tests/training/test_memory.py::test_proven"),
    Row("tests/training/test_differential.py", 6),
    Row("tests/training/test_context.py", 6),
    Row("tests/training/test_matrix.py::test_every", 0, "tests/training/test_matrix.py::test_one"),
    Row("tests/training/test_matrix.py::test_one", 14),
    Row("tests/training/test_memory.py", 6),
    Row("tests/training/test_mirrored.py", 8),
    Row("tests/training/test_custom.py", 2),
    Row("tests/training/test_expert_tensor.py", 8),
    Row("tests/training/test_nodes.py::test_forwarded", 4),
    Row("tests/training/test_nodes.py::test_training", 2),
    Row("tests/training/test_layers_again.py", 8),
    Row("tests/training/test_layers_again.py::test_proven", 0, "tests/training/test_recompute.py::test_proven"),
    Row("tests/training/test_layers_again.py::test_seq", 0, "tests/training/test_memory.py::test_sequences_of_context"),
    Row("tests/training/test_layers_again.py::test_rows", 0, "tests/training/test_nodes.py::test_training"),
    Row("tests/training/test_recompute.py", 8),
    Row("tests/training/test_tensor.py", 8),
    Row("tests/training/test_packing.py::test_packed_rows", 4),
    Row("tests/training/test_transformers.py", 2),
    Row("tests/weights/test_training.py", 4),
    # The runtime and its C++: one processor, one device, one transport of each in `test`.
    Row("tests/gpu/test_pretend.py::test_a_device_gives", 6),
    Row("tests/gpu/test_device_path.py::test_what_a_device_sees", 3),
    Row("tests/native/test_forced.py", 3),
    Row("tests/native/test_memory.py", 3),
    Row("tests/runtime/test_counts.py::test_counts_of_a_step", 4),
    Row("tests/runtime/test_exchange.py::test_every_transport_by", 3),
    Row("tests/runtime/test_start.py::test_a_stopped_rank", 6),
    Row("tests/runtime/test_background_saves.py::test_sigkill", 3),
    Row("tests/runtime/test_checkpoint_faults.py", 2),
    Row("tests/ops/test_torch_ops.py", 3),
    Row("tests/ops/test_rules.py", 3),
    Row("tests/runtime/test_profile.py::test_ranks_of_a_run", 2),
    Row("tests/runtime/test_torchrun.py::test_a_hang", 2),
    # Kernels in Triton's interpreter, and compiled and read: a fifth of their shapes in `test`.
    Row("tests/kernels/test_attention.py", 10),
    Row("tests/kernels/test_attention.py::test_bits_of", 0, "tests/kernels/test_attention.py::test_bits_are"),
    Row("tests/kernels/test_attention.py::test_bounded", 9),
    Row("tests/kernels/test_attention.py::test_gqa_of_wide", 0, "tests/kernels/test_attention.py::test_gqa"),
    Row("tests/kernels/test_attention.py::test_a_sink", 0, "tests/kernels/test_attention.py::test_bounded"),
    Row("tests/kernels/test_attention.py::test_mla_of", 0, "tests/kernels/test_attention.py::test_mla_in_tiles"),
    Row("tests/kernels/test_attention_context.py", 5),
    Row("tests/kernels/test_attention_context.py::test_bits", 0, "tests/kernels/test_attention.py::test_bits_are"),
    Row(
        "tests/kernels/test_attention_context.py::test_whole_seq",
        0,
        "tests/kernels/test_attention_context.py::test_mla",
    ),
    Row(
        "tests/kernels/test_attention_context.py::test_whole_blocks",
        0,
        "tests/kernels/test_attention.py::test_mla_in_several",
    ),
    Row("tests/kernels/test_attention_documents.py", 8),
    Row("tests/kernels/test_attention_documents.py::test_bits", 0, "tests/kernels/test_attention.py::test_bits_are"),
    Row(
        "tests/kernels/test_attention_documents.py::test_bounded",
        0,
        "tests/kernels/test_attention_documents.py::test_bounded_in",
    ),
    Row("tests/kernels/test_attention_documents.py::test_bounded_in", 8),
    Row(
        "tests/kernels/test_attention_documents.py::test_one_doc",
        0,
        "tests/kernels/test_attention_documents.py::test_mla",
    ),
    Row(
        "tests/kernels/test_attention_documents.py::test_whole_blocks",
        0,
        "tests/kernels/test_attention.py::test_mla_in_several",
    ),
    Row("tests/kernels/test_attention_sinks.py", 5),
    Row("tests/kernels/test_cross_entropy.py", 5),
    Row("tests/kernels/test_emit.py::test_the_text_is", 3),
    Row("tests/kernels/test_gate.py::test_every_kernel_is_ca", 0, "tests/kernels/test_gate.py::test_every_kernel_is_c"),
    Row("tests/kernels/test_gate.py::test_passes", 20),
    Row("tests/kernels/test_grouped_linear", 5),
    Row("tests/kernels/test_linear", 5),
    Row("tests/kernels/test_norm_gradient.py", 6),
    Row("tests/kernels/test_permute.py", 10),
    Row("tests/kernels/test_program.py::test_a_step_in", 0, "tests/kernels/test_program.py::test_a_step_with"),
    Row("tests/kernels/test_quantise.py", 5),
    Row("tests/kernels/test_quantise_e5m6.py", 3),
    Row("tests/kernels/test_rmsnorm.py", 5),
    Row("tests/kernels/test_rotate.py::test_rotate", 5),
    Row("tests/kernels/test_sweep.py::test_a_sweep", 0, "tests/kernels/test_sweep.py::test_a_failure"),
    Row("tests/kernels/test_swiglu.py", 9),
    # The searches of planner and language, by enumeration: a part of the cases.
    Row("tests/cli/test_edits.py", 2),
    Row("tests/compiler/test_cli.py::test_a_compilation_ends", 4),
    Row("tests/inference/test_generation.py::test_greedy", 6),
    Row("tests/inference/test_commands.py::test_the_ranks_of", 2),
    Row("tests/cli/test_diff.py::test_one_change", 4),
    Row("tests/dsl/test_conflicts.py", 2),
    Row("tests/dsl/test_conflicts.py::test_no_other", 0, "tests/dsl/test_conflicts.py::test_no_fewer"),
    Row("tests/dsl/test_reference.py::test_examples", 4),
    Row("tests/dsl/test_devices.py::test_a_device_of", 4),
    Row("tests/predict/test_memory.py", 4),
    Row("tests/predict/test_memory.py::test_shipped_specs", 7),
    Row("tests/predict/test_plan_command.py::test_no_line", 2),
    Row("tests/predict/test_predict.py", 5),
    Row("tests/predict/test_predict.py::test_a_faster", 0, "tests/predict/test_predict.py::test_faster_is_never"),
    Row(
        "tests/predict/test_memory_state.py::test_the_published", 0, "tests/predict/test_predictions_page.py::test_pred"
    ),
    Row(
        "tests/predict/test_predictions_page.py::test_the_page",
        0,
        "tests/predict/test_predictions_page.py::test_the_tables_of_v3",
    ),
    Row("tests/predict/test_search.py::test_the_best", 4),
    Row("tests/predict/test_search.py::test_the_least", 4),
    Row("tests/predict/test_plan_command.py::test_given_rates", 2),
    Row("tests/predict/test_plan_command.py::test_what_does_not_fit", 2),
    Row("tests/predict/test_why.py", 5),
    Row("tests/schedules/test_optima.py::test_stored", 10),
    Row("tests/schedules/test_known_best.py::test_the_order_takes", 13),
    Row("tests/schedules/test_order.py::test_an_order_takes_less", 3),
    Row("tests/schedules/test_offload.py::test_the_simulator", 5),
    Row("tests/schedules/test_page.py::test_tables", 3),
    Row("tests/schedules/test_page.py::test_one_column", 0, "tests/schedules/test_page.py::test_tables"),
    Row("tests/schedules/test_page.py::test_the_smallest_rows", 3),
    Row("tests/schedules/test_offload.py::test_a_row_of", 0, "tests/schedules/test_offload.py::test_the_page_has"),
    Row("tests/schedules/test_family.py", 4),
    Row("tests/schedules/test_bound.py::test_no_named", 6),
    Row("tests/solver/test_exact.py::test_the_least_is_found_and_proven", 20),
    Row("tests/solver/test_exact.py::test_small_schedules_are_proven", 5),
    Row("tests/solver/test_exact.py::test_the_least_of_mirrored", 4),
    Row("tests/solver/test_least.py", 2),
    Row("tests/solver/test_least.py::test_nothing_is_shorter_with_four", 0, "tests/solver/test_least.py::test_"),
    Row("tests/solver/test_solve.py", 2),
    Row("tests/solver/test_spec.py", 4),
    Row("tests/specs/test_memory.py::test_never_above_a_plan", 0, "tests/predict/test_memory.py::test_peak_is"),
    Row("tests/specs/test_memory.py::test_never_above_the_plan_of_a_shipped", 6),
    Row("tests/topology/test_holding.py", 2),
    Row("tests/topology/test_partition.py", 4),
    # Benchmarks: their tools in `soak`; their pages, and a part of the checks that they run on a GPU, in `test`.
    Row("tests/benchmarks/test_arena.py", 2),
    Row("tests/benchmarks/test_published.py::test_what_is_stored", 4),
    Row("tests/benchmarks/test_published.py::test_what_is_searched", 0, "tests/benchmarks/test_published.py"),
    Row("tests/benchmarks/test_compile_speed.py", 0, "tests/benchmarks/test_page.py"),
    Row("tests/benchmarks/test_gpu.py", 24),
    Row("tests/benchmarks/test_gpu_run.py", 2),
    Row("tests/benchmarks/test_studies.py::test_runs_are", 0, "tests/benchmarks/test_studies.py::test_the_page"),
    Row("tests/benchmarks/test_theirs.py", 0, "tests/training/test_transformers.py"),
    Row("tests/benchmarks/test_work.py", 0, "tests/benchmarks/test_page.py"),
)

# What pins the language, plans, schedules, proofs and goldens.
CHECK = (
    "tests/compiler/test_layout.py",
    "tests/dsl/",
    "tests/golden/",
    "tests/proof/test_deadlocks.py",
    "tests/proof/test_mutants.py",
    "tests/schedules/",
    "tests/segments/",
    "tests/specs/",
    "tests/test_",
    "tests/topology/",
)
NOT_CHECK = (  # slow, and about how far predictions and searches hold
    "tests/dsl/test_conflicts.py",
    "tests/dsl/test_hostile.py",
    "tests/schedules/test_bound.py",
    "tests/schedules/test_optima.py",
    "tests/schedules/test_page.py",
    "tests/segments/test_fuse.py",
    "tests/segments/test_recompute.py",
    "tests/specs/test_memory.py",
    "tests/specs/test_trains.py",
    "tests/test_extending",
    "tests/test_progress.py",
    "tests/test_readme.py",
    "tests/test_tools.py",
    "tests/test_tutorial.py",
    "tests/topology/test_holding.py",
    "tests/topology/test_partition.py",
)


# Where modules take long. What is last are modules of seconds, so that no worker ends long before the other.
SLOW_FIRST = (
    "tests/runs/",
    "tests/training/",
    "tests/kernels/",
    "tests/test_",
    "tests/weights/",
    "tests/predict/",
    "tests/runtime/",
    "tests/gpu/",
    "tests/native/",
    "tests/proof/",
    "tests/fuzz/",
    "tests/modules/",
    "tests/specs/",
    "tests/experts/",
    "tests/solver/",
    "tests/dsl/",
    "tests/cli/",
)


def row_of(test: str) -> Row | None:
    """The row of SOAK that decides on a test: the one with the longest prefix."""
    return max((row for row in SOAK if test.startswith(row.prefix)), key=lambda row: len(row.prefix), default=None)


def may_check(test: str) -> bool:
    """Whether a test, or a file of tests, is of `check` if it is in `test`."""
    return test.startswith(CHECK) and not test.startswith(NOT_CHECK)


def tiers(tests: Iterable[str]) -> list[set[str]]:
    """The tiers of each test, by the ids of all tests in the order of their collection."""
    cases: Counter[str] = Counter()
    found = []
    for test in tests:
        function = test.partition("[")[0]
        row = row_of(test)
        stays = row is None or (row.every > 0 and cases[function] % row.every == 0)
        cases[function] += 1
        if not stays:
            found.append({"soak"})
        elif may_check(test):
            found.append({"check", "test"})
        else:
            found.append({"test"})
    return found
