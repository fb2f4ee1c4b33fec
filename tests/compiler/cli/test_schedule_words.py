"""`dsc schedule` in the user's words: caps of 1/P of the model, names of other systems, what torch's CSV can say."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import peak_activations
from compiler.schedule.torch_csv import from_torch_csv
from dsl.facts.schedules import NAMES
from dsl.resolve.context import suggest
from tests.compiler.cli.forms import parsed

Captured = pytest.CaptureFixture[str]
QUICK = str(Path(__file__).parents[3] / "specs" / "quickstart.dsc")
SIZES = ["--ranks", "4", "--micro-batches", "9"]


def test_each_rank_has_a_cap(capsys: Captured) -> None:
    caps = (4, 3.5, 3, 1.5)
    words = ["--ranks", "4", "--micro-batches", "6", "--cap", ",".join(map(str, caps)), "--placement", "v"]
    assert main(["schedule", "--name", "auto", *words, "--format", "json"]) == 0
    peaks = parsed(capsys.readouterr().out, "simulated")["peak_activations"]
    assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True)) and max(peaks) > min(caps)
    assert main(["schedule", "--compare", "auto,1f1b", *words, "--format", "json"]) == 0
    assert parsed(capsys.readouterr().out, "compared")["cap"] == [*caps]
    assert main(["schedule", "--name", "auto", *words]) == 0
    assert "and at most the caps of the ranks" in capsys.readouterr().err
    assert main(["schedule", "--name", "1f1b", *SIZES, "--cap", "9,9,9,0.5"]) == 2
    assert "--cap 1/2 is out of bounds" in capsys.readouterr().err


def test_compare_advises_caps_of_the_model(capsys: Captured) -> None:
    """DualPipeV on 4 ranks holds 9 halves, so 4.5: the message advises a cap of 5, which is accepted."""
    command = ["schedule", "--compare", "1f1b,dualpipev", *SIZES, "--costs", "F=1", "--cap"]
    assert main([*command, "4"]) == 0
    assert "dualpipev on 4 ranks with 9 micro-batches holds 4.5 activations: use --cap 5" in capsys.readouterr().out
    assert main([*command, "5"]) == 0
    assert "use --cap" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "name"),
    [("1F1B", "1f1b"), ("zb-h1", "zb1p"), ("ZB-H1", "zb1p"), ("zb_v", "zbv"), ("V-Half", "vhalf"), ("ZB-H2", "zbh2")],
)
def test_names_used_by_other_systems_are_understood(word: str, name: str, capsys: Captured) -> None:
    assert suggest(word, NAMES) == f"did you mean `{name}`?"
    assert main(["schedule", "--name", word, *SIZES]) == 2
    assert f"did you mean `{name}`?" in capsys.readouterr().err


AUTO = ["schedule", "--name", "auto", "--ranks", "2", "--micro-batches", "3", "--costs", "F=1,I=1,W=1"]


@pytest.mark.parametrize(
    ("more", "placements"),
    [
        (["--copies", "1"], {"v", "loop(1)", "loop(2)", "loop(3)", "loop(4)"}),
        (["--copies", "1", "--chunks", "3"], {"v", "loop(1)", "loop(3)"}),
        (["--placement", "bidirectional"], {"bidirectional"}),
        (["--placement", "loop(3)", "--cap", "1.5"], {"loop(3)"}),
        (["--placement", "v", "--cap", "1"], {"v"}),
    ],
)
def test_placements_of_auto_are_chosen(more: list[str], placements: set[str], capsys: Captured) -> None:
    assert main([*AUTO, *more, "--format", "text"]) == 0
    schedule = Schedule.from_text(capsys.readouterr().out)
    schedule.check()
    assert str(schedule.stage_placement) in placements
    cap = Fraction(more[-1]) if "--cap" in more else 3
    assert Fraction(max(peak_activations(schedule)), schedule.stage_placement.stages_per_rank) <= cap


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--copies", "1", "--placement", "bidirectional"], "bidirectional has 2 copies: leave --copies out, or use v"),
        (["--placement", "loop(2)", "--chunks", "3"], "--placement fixes the stages per rank"),
        (["--placement", "w"], "--placement: unknown placement 'w'"),
        (["--placement", "loop(65)"], "--placement loop(65) is out of bounds: use at most loop(64)"),
    ],
)
def test_invalid_placements_are_refused(more: list[str], said: str, capsys: Captured) -> None:
    assert main([*AUTO, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_bound_that_is_reached_is_reported(capsys: Captured) -> None:
    assert main([*AUTO[:-3], "4", *AUTO[-2:]]) == 0
    assert "gap 0.0%: no schedule on these placements within that cap is shorter" in capsys.readouterr().err


def test_auto_for_torch_searches_only_schedules_that_torch_can_express(capsys: Captured) -> None:
    """On even sizes too, where `auto` has two copies else; pairs that torch has no word for do not count."""
    flags = ["--ranks", "2", "--micro-batches", "2", "--costs", "FB=1.8", "--pairs", "any", "--cap", "3"]
    assert main(["schedule", "--name", "auto", *flags, "--format", "torch-csv"]) == 0
    schedule = from_torch_csv(capsys.readouterr().out)
    schedule.check()
    assert schedule.stage_placement.copies == 1


def test_both_ends_are_refused_for_torch_before_a_search(capsys: Captured) -> None:
    run = ["specs/quickstart.dsc", "-s", "schedule.name=auto", "-s", "parallel.pipeline=2"]
    assert main(["schedule", *run, "--format", "torch-csv"]) == 2
    assert "torch has no bidirectional placement: use dualpipev" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compare", "auto,zbv", *SIZES, "--format", "torch-csv"], "--format torch-csv is for a single schedule"),
        (["specs/quickstart.dsc", "--compare", "auto", "--format", "torch-csv"], "leave --compare out"),
        (
            ["--name", "auto", *SIZES, "--format", "megatron-layout"],
            "a layout needs the layers of a model: name a SPEC",
        ),
    ],
)
def test_a_single_schedule_format_is_refused_before_a_search(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["schedule", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "for placements bidirectional, v, loop(2), loop(3) and loop(4) and at most"),
        (
            ["--placement", "v"],
            "for placement v and at most 2 activations · gap 0.0%: no schedule on this placement within",
        ),
        (["--copies", "1", "--chunks", "3"], "for placements v, loop(1) and loop(3) and at most"),
    ],
)
def test_a_bound_states_its_placements(more: list[str], said: str, capsys: Captured) -> None:
    assert main([*AUTO, *more]) == 0
    assert said in capsys.readouterr().err


def test_a_placement_takes_weights_of_its_stages(tmp_path: Path, capsys: Captured) -> None:
    """Costs of 1/P of the model, with a weight for each of the 2P stages of a V: for each half of a rank's share."""
    file, words = tmp_path / "costs.json", ["--ranks", "2", "--micro-batches", "4", "--format", "json"]

    def shown(costs: str, form: str, *words: str) -> Any:
        file.write_text(costs)
        assert main(["schedule", *words, "--costs", str(file)]) == 0
        return parsed(capsys.readouterr().out, form)

    of_halves = '{"F": 2, "I": 2, "W": 2, "stages": [0.8, 1, 1, 1.4]}'
    compared = shown(of_halves, "compared", "--compare", "1f1b,zbv,auto", "--placement", "v", *words)
    whole, zbv, auto = compared["schedules"]
    assert compared["costs"]["stages"] == [0.8, 1, 1, 1.4]
    assert auto["placement"] == "v" and auto["makespan"] == auto["lower_bound"] == 26.4  # rank 0: 4 (0.8 + 1.4) 3

    own = shown('{"F": 1, "I": 1, "W": 1, "stages": [0.8, 1, 1, 1.4]}', "simulated", "--name", "zbv", *words)
    assert zbv["makespan"] == own["makespan"]
    means = shown('{"F": 2, "I": 2, "W": 2, "stages": [0.9, 1.2]}', "simulated", "--name", "1f1b", *words)
    assert whole["makespan"] == means["makespan"]

    file.write_text('{"F": 2, "I": 2, "W": 2, "stages": [0.8, 1, 1.4]}')
    assert main(["schedule", "--name", "auto", "--placement", "v", *words, "--costs", str(file)]) == 2
    assert "the costs have weights of 3 stages, but the schedule has 2" in capsys.readouterr().err


def test_a_bound_of_unequal_micro_batches_holds_for_their_order(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"F": 1, "I": 1, "W": 1, "micro_batches": [1, 1]}')
    words = ["schedule", "--name", "1f1b", "--ranks", "1", "--micro-batches", "2", "--costs", str(file)]
    assert main(words) == 0
    assert (
        "no schedule on this placement within that cap and in this order of micro-batches is shorter"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), ("the plan of a spec assumes equal ones", "-s schedule.order=cost, where documents = masked")),
        (
            ("-s", "schedule.order=cost", "-s", "data.documents=masked"),
            ("with order = cost, each step of the run orders its own micro-batches", "leave --order out"),
        ),
    ],
)
def test_ordering_a_spec_needs_given_costs(more: tuple[str, ...], said: tuple[str, ...], capsys: Captured) -> None:
    assert main(["schedule", QUICK, "--order", *more]) == 2
    stderr = capsys.readouterr().err
    assert all(fragment in stderr for fragment in said)


def test_a_placement_with_chunks_suggests_the_key(tmp_path: Path, capsys: Captured) -> None:
    """A spec writes `loop(3)` of `dsc schedule` as two keys; the edit in the hint is valid."""
    (tmp_path / "quick.dsc").write_text(Path(QUICK).read_text("utf-8"))
    text = 'import "quick.dsc"\nrun mine extends quickstart { schedule { name = auto, placement = loop(3) } }\n'
    (tmp_path / "mine.dsc").write_text(text)
    assert main(["check", str(tmp_path / "mine.dsc")]) == 2
    assert "hint: write `loop, chunks = 3`" in capsys.readouterr().err
    (tmp_path / "mine.dsc").write_text(text.replace("loop(3)", "loop, chunks = 3"))
    assert main(["check", str(tmp_path / "mine.dsc")]) == 0


@pytest.mark.parametrize(("costs", "code"), [("FB=1.8", 0), ("Q=1", 2)])
def test_unwritable_stderr_changes_no_exit_code(costs: str, code: int) -> None:
    """A disk that is full under stderr."""
    words = [sys.executable, "-m", "compiler.cli.main", "schedule", "--name", "zbv", *SIZES, "--costs", costs]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            words, cwd=Path(QUICK).parents[1], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)
