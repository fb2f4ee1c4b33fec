"""Which tests run when: `make check` in a minute and a half, `make test` before landing, `make soak` for the rest.

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
    # Runs on real processes: each kind of fault and each schedule once in `test`, all combinations in `soak`.
    Row("tests/runs/test_failures.py::test_ended_while", 3),
    Row("tests/runs/test_models.py::test_resuming_is_bit_exact", 2),
    Row("tests/runs/test_moments.py", 2),
    Row("tests/runs/test_resume.py::test_resuming_is_bit_exact", 2),
    Row("tests/runs/test_resume_position.py", 2),
    Row("tests/runs/test_resume_position.py::test_a_run_told", 0, "tests/runs/test_resume_position.py::test_a_ramp"),
    Row("tests/runs/test_saves.py::test_a_save_that_fails", 2),
    Row("tests/runs/test_schedules.py::test_any_pairs", 2),
    Row("tests/runs/test_schedules.py::test_on_three_ranks", 0, "tests/runs/test_schedules.py::test_on_four_ranks"),
    Row("tests/runs/test_schedules.py::test_on_two_ranks", 0, "tests/runs/test_schedules.py::test_on_four_ranks"),
    Row("tests/runs/test_torchrun.py::test_a_killed_rank", 2),
    Row("tests/runs/test_torchrun.py::test_a_killed_torchrun", 0, "tests/runs/test_torchrun.py::test_a_killed_rank"),
    Row("tests/runs/test_torchrun.py::test_a_second_run", 0, "tests/runtime/test_torchrun.py::test_another_run_folder"),
    Row("tests/runs/test_torchrun.py::test_ranks_that", 2),
    Row("tests/runs/test_verify.py", 3),
    Row("tests/test_tutorial.py::test_the_model_learns", 0, "tests/runs/test_commands.py::test_shipped_specs_train"),
    # Training held to autograd, transformers and the ledger: each claim once in `test`, every model and plan in `soak`.
    Row("tests/experts/test_trained.py::test_training_equals_autograd", 3),
    Row("tests/proof/test_alone.py", 2),
    Row("tests/proof/test_any_schedule.py::test_any_schedule", 4),
    Row("tests/proof/test_effects.py", 2),
    Row("tests/proof/test_mutants.py", 3),
    Row("tests/specs/test_trains.py::test_trains", 2),
    Row("tests/training/test_bf16.py", 3),
    Row("tests/training/test_differential.py", 3),
    Row("tests/training/test_memory.py", 3),
    Row("tests/training/test_recompute.py", 4),
    Row("tests/training/test_transformers.py", 2),
    # The runtime and its C++: one processor, one device, one transport of each in `test`.
    Row("tests/gpu/test_pretend.py::test_a_device_gives", 3),
    Row("tests/native/test_forced.py", 3),
    Row("tests/native/test_memory.py", 3),
    Row("tests/runtime/test_counts.py::test_counts_of_a_step", 4),
    Row("tests/runtime/test_profile.py::test_ranks_of_a_run", 2),
    # Kernels in Triton's interpreter, and compiled and read: a third of their shapes in `test`.
    Row("tests/kernels/test_attention.py", 3),
    Row("tests/kernels/test_cross_entropy.py", 3),
    Row("tests/kernels/test_gate.py::test_passes", 3),
    Row("tests/kernels/test_grouped_linear", 3),
    Row("tests/kernels/test_linear", 3),
    Row("tests/kernels/test_permute.py", 3),
    Row("tests/kernels/test_quantise.py", 3),
    Row("tests/kernels/test_rmsnorm.py", 3),
    Row("tests/kernels/test_swiglu.py", 3),
    # The planner's searches, by enumeration: a part of the cases.
    Row("tests/predict/test_memory.py", 2),
    Row("tests/predict/test_predict.py", 2),
    Row("tests/predict/test_search.py::test_the_best", 3),
    Row("tests/predict/test_why.py", 2),
    Row("tests/schedules/test_page.py::test_the_smallest_rows", 3),
    Row("tests/solver/test_least.py", 2),
    Row("tests/solver/test_spec.py", 2),
    Row("tests/topology/test_holding.py", 2),
    Row("tests/topology/test_partition.py", 2),
    # Benchmarks: their tools in `soak`; their pages, and a part of the checks that they run on a GPU, in `test`.
    Row("tests/benchmarks/test_arena.py", 2),
    Row("tests/benchmarks/test_compile_speed.py", 0, "tests/benchmarks/test_page.py"),
    Row("tests/benchmarks/test_gpu.py", 3),
    Row("tests/benchmarks/test_gpu_run.py", 2),
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
NOT_CHECK = ("tests/specs/test_trains.py", "tests/test_progress.py", "tests/test_readme.py", "tests/test_tutorial.py")


SLOW_FIRST = tuple(f"tests/{folder}/" for folder in ("runs", "training", "runtime", "gpu", "native", "proof"))


def row_of(test: str) -> Row | None:
    """The row of SOAK that decides on a test: the one with the longest prefix."""
    return max((row for row in SOAK if test.startswith(row.prefix)), key=lambda row: len(row.prefix), default=None)


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
        elif test.startswith(CHECK) and not test.startswith(NOT_CHECK):
            found.append({"check", "test"})
        else:
            found.append({"test"})
    return found
