"""R1 to R17 and R19: the claim of each row, its tests and programs, and the goal.

`reached` is formatted with the records of a row's tests and programs (`record_property`, groups of `Program.figures`):
`{detected_s.most:.2f}` is the largest of a figure, `.total` the sum, `{cases}` how many cases of tests passed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """`python -m module words …`. `figures`: a pattern of a line it prints, whose groups are numbers."""

    module: str
    words: tuple[str, ...]
    figures: str

    @property
    def name(self) -> str:
        return f"python -m {self.module} {' '.join(self.words)}"


@dataclass(frozen=True)
class Figure:
    """Numbers that tests recorded under one name."""

    values: tuple[float, ...] = ()

    count = property(lambda self: len(self.values))
    total = property(lambda self: sum(self.values))
    most = property(lambda self: max(self.values, default=0.0))
    median = property(lambda self: statistics.median(self.values) if self.values else 0.0)


Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Row:
    """`shown_by`: test functions by file. `sample`: the beginning of the ids of tests of the tier `test` that show it
    for less. `holds`: whether the figures reach the bar, where all cases pass."""

    number: str
    claim: str
    bar: str
    reached: str
    shown_by: Mapping[str, tuple[str, ...]]
    sample: str
    programs: tuple[Program, ...] = ()
    holds: Callable[[Figures], bool] = lambda _: True

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(f"{file}::{name}" for file, names in self.shown_by.items() for name in names)


KILLS, FAULTS = "tests/reliability/test_kills.py", "tests/reliability/test_faults.py"
HEALTH = "tests/runtime/run/test_health.py"
SURROUNDINGS = "tests/reliability/test_surroundings.py"
SAVES, BACKGROUND = "tests/runtime/run/test_saves.py", "tests/runtime/test_background_saves.py"
CHECKPOINT, DISK = "tests/runtime/test_checkpoint.py", "tests/runtime/test_checkpoint_faults.py"
LAUNCH, FAILURES = "tests/runtime/test_launch.py", "tests/runtime/run/test_failures.py"
SIGNALS, RESUME = "tests/runtime/test_launch_signals.py", "tests/runtime/run/test_resume.py"

ROWS = (
    Row(
        "R1",
        "SIGKILL of the first, middle, last or all ranks in 16 phases (init, data, F, B, W, send, recv, reduce,"
        " optimizer, the copy for a save, each step of a save, purge), then `--resume`",
        "64 of 64 bit-exact (weights, optimizer, data order), 0 checkpoints lost",
        "{bit_exact.total:.0f} of 64 bit-exact; 0 checkpoints lost in {cases} cases",
        {
            KILLS: ("test_a_kill",),
            SAVES: ("test_a_kill_at_any_file_of_a_save_loses_nothing", "test_a_kill_in_the_first_save"),
            BACKGROUND: ("test_sigkill_while_a_rank_trains_on",),
            DISK: ("test_sigkill_of_a_rank_in_a_save", "test_a_kill_at_any_call_leaves_a_checkpoint"),
        },
        f"{FAILURES}::test_a_killed_rank",
        holds=lambda f: f["bit_exact"].total == 64,
    ),
    Row(
        "R2",
        "signals, crashes, exceptions, out of memory, EIO, ENOSPC, and a slow rank, each in a backward (B) and in a"
        " gradient reduction; a loss that is not finite; data that disappears",
        "dsc names each fault, nothing hangs",
        "{cases} cases: rank and action named, nothing hangs",
        {
            FAULTS: (
                "test_a_failure",
                "test_a_stopped_rank",
                "test_a_rank_that_is_asked_to_stop",
                "test_a_slow_rank_is_no_hang",
            ),
            LAUNCH: ("test_a_fault_is_named",),
            FAILURES: ("test_a_loss_that_is_not_finite", "test_data_that_goes_away"),
        },
        f"{LAUNCH}::test_a_fault_is_named",
    ),
    Row(
        "R3",
        "time from a fault until `dsc train` names rank and action",
        "crash ≤ 0.5 s; hang ≤ timeout + 0.5 s; rank and action named every time",
        "{detected_s.count} crashes: median {detected_s.median:.2f} s, at most {detected_s.most:.2f} s;"
        " {hang_after_timeout_s.count} hangs: timeout + {hang_after_timeout_s.most:.2f} s at most. With `--restarts`"
        " the next step is done after {recovered_s.most:.1f} s at most",
        {
            KILLS: ("test_a_kill",),
            FAULTS: ("test_a_failure", "test_a_stopped_rank", "test_a_restart_recovers"),
        },
        f"{LAUNCH}::test_a_stopped_rank",
        holds=lambda f: max(f["detected_s"].most, f["hang_after_timeout_s"].most) <= 0.5,
    ),
    Row(
        "R4",
        "processes, ports and shared memory that are left after R1, R2, and SIGKILL of the launcher or the command",
        "0",
        "0 after each of {cases} cases",
        {
            KILLS: ("test_a_killed_supervisor", "test_a_kill"),
            FAULTS: ("test_a_failure", "test_a_stopped_rank", "test_a_rank_that_is_asked_to_stop"),
            SIGNALS: ("test_no_rank_survives_the_supervisor",),
            FAILURES: ("test_a_killed_command_leaves_nothing", "test_a_killed_launcher_leaves_nothing"),
        },
        f"{SIGNALS}::test_no_rank_survives",
    ),
    Row(
        "R5",
        "power loss after every system call of four saves, with each loss of unsynced data that a file system may"
        " cause",
        "≥ 1,000 states, all with a loadable checkpoint",
        "{states.total:,.0f} states, each with a loadable checkpoint; the test fails if syncs are left out",
        {DISK: ("test_a_loss_of_power_at_any_point_leaves_a_checkpoint", "test_that_loss_would_be_noticed")},
        f"{DISK}::test_a_loss_of_power",
        holds=lambda f: f["states"].total >= 1000,
    ),
    Row(
        "R6",
        "damaged checkpoints: files with flipped bits or zeros; truncated, lengthened and swapped files; files of"
        " another run; missing files",
        "500 of 500 refused, file named, previous checkpoint used",
        "{corruptions.total:.0f} refused, file named, previous checkpoint used",
        {CHECKPOINT: ("test_a_damaged_checkpoint_is_refused_and_the_previous_one_used",)},
        f"{CHECKPOINT}::test_a_damaged_checkpoint_is",
        holds=lambda f: f["corruptions"].total >= 500,
    ),
    Row(
        "R7",
        "checkpoints read by other plans: pp × ep × dp, `zero`, tensor ranks, precisions, world sizes",
        "bitwise equal logical tensors",
        "{loads.total:.0f} pairs of writer and reader bitwise equal",
        {
            RESUME: ("test_any_plan_loads_any_checkpoint",),
            CHECKPOINT: ("test_any_plan_reads_what_any_plan_saved",),
        },
        f"{RESUME}::test_any_plan_loads",
    ),
    Row(
        "R8",
        "ENOSPC or EIO, once or lasting, at every system call of a save; a full file system",
        "a clean error, previous checkpoint kept, training continues",
        "{failed_saves.total:.0f} failed saves: a clean error, previous checkpoint kept, training continues",
        {
            DISK: ("test_a_failing_disk_is_an_error_of_all_ranks_and_the_previous_checkpoint_stays",),
            SAVES: ("test_a_save_that_fails_is_said_and_the_next_one_succeeds",),
            BACKGROUND: ("test_a_save_that_fails_in_the_background_is_said_and_the_run_goes_on",),
            SURROUNDINGS: ("test_a_disk_that_is_full_for_a_while",),
        },
        f"{DISK}::test_a_failing_disk",
    ),
    Row(
        "R9",
        "compiling one spec with other hash seeds, folders, locales, time zones and umasks",
        "identical bytes",
        "{builds.total:.0f} builds with identical bytes",
        {"tests/golden/test_golden.py": ("test_same_spec_same_bytes", "test_bytes_in_other_surroundings")},
        "tests/golden/test_golden.py::test_same_spec",
    ),
    Row(
        "R10",
        "the proof on programs with swapped, dropped, doubled or changed instructions; an independent executor judges"
        " them",
        "≥ 2,000 mutants, ≥ 99% of the wrong ones rejected",
        "{rejected.total:,.0f} of {different.total:,.0f} wrong ones rejected; {accepted.total:,.0f} of"
        " {equivalent.total:,.0f} equivalent ones accepted",
        {},
        "tests/compiler/program/proof/test_mutants.py",
        (
            Program(
                "tests.compiler.program.proof.census",
                ("--count", "2100"),
                r"in all: (?P<different>\d+) end otherwise, (?P<rejected>\d+) of them rejected; (?P<equivalent>\d+) end"
                r" alike, (?P<accepted>\d+) of them",
            ),
        ),
        holds=lambda f: f["rejected"].total >= max(2000, 0.99 * f["different"].total),
    ),
    Row(
        "R11",
        "fuzzed specs: random bytes, texts of the grammar, well-typed specs, mutated specs, random overrides",
        "10^5, no traceback, none over 2 s or 256 MiB",
        "{inputs.total:,.0f} inputs, {failed.total:.0f} failed; instead of 2 s, the test limits each input to 10"
        " million function calls",
        {},
        "tests/fuzz/test_fuzz.py::test_inputs_end",
        (Program("tests.fuzz.run", ("--count", "100000"), r"^(?P<inputs>[\d,]+) inputs, (?P<failed>\d+) failed"),),
        holds=lambda f: f["inputs"].total >= 100_000 and f["failed"].total == 0,
    ),
    Row(
        "R12",
        "attacks: code in specs, paths out of the folder, symbolic links, named pipes, decompression bombs, edited"
        " builds, hostile checkpoints and weights, terminal escapes",
        "≥ 150 inputs, 0 succeed",
        "{cases} inputs, 0 succeed",
        {
            "tests/reliability/test_attacks.py": ("test_code_in_a_spec_stays_text", "test_an_edited_build_is_refused"),
            CHECKPOINT: (
                "test_a_hostile_manifest_is_refused",
                "test_a_manifest_that_is_none_is_refused",
                "test_links_and_pipes_are_refused",
                "test_a_checkpoint_that_is_a_link_is_refused",
                "test_a_bad_name_is_refused_before_anything_is_written",
            ),
            "tests/compiler/tools/weights/test_hostile.py": ("test_it_is_refused",),
        },
        f"{CHECKPOINT}::test_a_hostile",
        holds=lambda f: f["cases"].total >= 150,
    ),
    Row(
        "R13",
        "emitted stages, read by an independent reader, against the program: ops, values, order",
        "equal on every valid fuzzed spec",
        "{specs.total:.0f} specs of at most 64 ranks, {instructions.total:,.0f} instructions: equal",
        {"tests/fuzz/test_emitted.py": ("test_emitted_bodies_are_the_program",)},
        "tests/fuzz/test_emitted.py",
    ),
    Row(
        "R14",
        "NaN on one rank, and a loss that jumps, on every mesh: skip, rollback or stop; kills within a rollback",
        "same decision on all ranks, counted, resumable",
        "{cases} cases: same decision, counted, bits of a run without that batch",
        {
            HEALTH: (
                "test_a_batch_that_one_rank_makes_nan_is_skipped_by_all",
                "test_a_spike_rolls_back",
                "test_a_kill_within_a_rollback_changes_no_bit",
                "test_what_passes_is_told_from_what_is_real",
                "test_what_does_not_help_ends_the_run",
                "test_a_skip_takes_no_collective",
            ),
        },
        f"{HEALTH}::test_a_spike",
    ),
    Row(
        "R15",
        "one flipped bit in weights that several ranks hold, under `health { hash }`",
        "found within one interval, rank and tensor named",
        "{cases} cases: found within an interval, ranks and tensor named",
        {
            HEALTH: ("test_a_flipped_bit_is_found_within_an_interval", "test_restarts_heal_a_flipped_bit"),
            "tests/runtime/test_health.py": (
                "test_any_flipped_bit_changes_a_fingerprint",
                "test_who_has_other_bits_is_named",
            ),
        },
        "tests/runtime/test_health.py::test_any_flipped",
    ),
    Row(
        "R16",
        "a clock that jumps, a full disk under logs, metrics and events, closed or full standard streams",
        "training unaffected",
        "{cases} cases: unaffected",
        {
            SURROUNDINGS: (
                "test_a_clock_that_jumps",
                "test_logs_on_a_full_disk",
                "test_a_disk_that_is_full_for_a_while",
            ),
            "tests/runtime/run/test_commands.py": ("test_training_does_not_depend_on_who_reads",),
            "tests/runtime/test_metrics.py": (
                "test_rows_that_a_full_disk_refused_are_written_when_it_has_room",
                "test_rows_that_the_system_refused_are_written_when_it_takes_them",
            ),
        },
        "tests/runtime/test_metrics.py::test_rows_that_a_full",
    ),
    Row(
        "R17",
        "a machine of two is lost in an elastic run under torchrun, by SIGKILL or by a cut cable, and returns",
        "≤ 15 s without a step after a loss, ≤ 10 s until a machine that returns trains; no sample twice or left out",
        "after a loss {lost_s.most:.1f} s without a step; {returned_s.most:.1f} s until a machine that returns trains,"
        " of which the other pauses {paused_s.most:.1f} s; no sample twice or left out",
        {"tests/runtime/run/test_lost_machine.py": ("test_a_lost_machine",)},
        "tests/runtime/test_fork_server.py::test_each_attempt",
        holds=lambda f: f["lost_s"].most <= 15 and f["returned_s"].most <= 10,
    ),
    Row(
        "R19",
        "a rank that takes 1.3 times as long, in real runs and in simulated runs of 2 to 16 ranks with noise; the same"
        " without a slow rank; leaving its device out",
        "named within 20 steps; never reported without a slow rank",
        "{quiet_runs.total:.0f} of {quiet_of.total:.0f} simulated runs with 3% noise within 20 steps, all within 40;"
        " {runs_without.total:,.0f} runs without one, with 3% to 11% noise: none reported; {cases} cases",
        {
            "tests/runtime/observe/test_stragglers.py": (
                "test_noise_alone_is_never_reported",
                "test_a_rank_that_takes_thirty_percent_longer_is_found",
            ),
            "tests/runtime/run/test_stragglers.py": (
                "test_a_slow_rank_is_named_within_twenty_steps",
                "test_equal_ranks_are_not_reported",
                "test_the_run_goes_on_without_the_device_of_a_slow_rank",
                "test_a_device_stays_if_no_smaller_plan_is_faster",
                "test_a_run_goes_on_if_its_state_cannot_be_saved",
            ),
        },
        "tests/runtime/run/test_stragglers.py::test_a_slow_rank_is_named",
        holds=lambda f: f["runs_without"].total >= 300 and f["quiet_runs"].total >= 0.97 * f["quiet_of"].total,
    ),
)
