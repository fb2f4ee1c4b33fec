"""`dsc schedule`: output, errors, and light imports."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import costs_of_json, shipped_costs
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]
QUICK = str(ROOT / "specs" / "quickstart.dsc")
EIGHT = ("--ranks", "8", "--micro-batches", "20")
DUALPIPE = ("--name", "dualpipe", *EIGHT)
NAMES = ", ".join(SCHEDULES)
Captured = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    return main(["schedule", *words])


def test_prints_text_and_json(capsys: Captured) -> None:
    assert run(*DUALPIPE) == 0
    assert capsys.readouterr() == (dualpipe(8, 20).to_text(), "")
    assert run(*DUALPIPE, "--format", "json") == 0
    stdout, stderr = capsys.readouterr()
    assert Schedule.from_json(stdout) == dualpipe(8, 20) and stderr == ""
    parsed(stdout, "schedule")


def test_chunks(capsys: Captured) -> None:
    assert run("--name", "interleaved", "--ranks", "2", "--micro-batches", "4", "--chunks", "3") == 0
    assert capsys.readouterr().out == SCHEDULES["interleaved"].generate(2, 4, 3).to_text()


# ---------------------------------------------------------------- costs


def test_costs_give_makespan_bubble_and_peak(capsys: Captured) -> None:
    assert run(*DUALPIPE, "--costs", "F=1,I=1,W=1,FB=3", "--latency", "0", "--cap", "9", "--format", "json") == 0
    document = parsed((printed := capsys.readouterr()).out, "simulated")
    assert printed.err == "" and document["makespan"] == 66 and document["bubble"] == [6] * 8
    assert document["peak_activations"] == [9] * 8 and document["lower_bound"] == 63
    assert document["gap"] == pytest.approx(3 / 63) and document["excess"] == 6 and document["actions"][0][0] == "F0.0"


def test_text_on_stdout_reads_back_and_measures_go_to_stderr(capsys: Captured) -> None:
    assert run(*DUALPIPE, "--costs", "FB=1.8") == 0
    assert Schedule.from_text((printed := capsys.readouterr()).out) == dualpipe(8, 20)
    assert printed.err.splitlines() == [
        "makespan 50.4 · bubble 5.4% · 9 activations on the fullest rank",
        "lower bound 48.2 for placement bidirectional and at most 9 activations · gap 4.6%",
        "excess 14.4 over 20 F&B of 1.8",
    ]


def test_latency_and_any_pairs(capsys: Captured) -> None:
    makespans = {}
    for words in ((), ("--latency", "0.5"), ("--pairs", "any")):
        assert run("--name", "zbv", *EIGHT, "--costs", "FB=1.8", *words, "--format", "json") == 0
        document = parsed(capsys.readouterr().out, "simulated")
        makespans[words] = document["makespan"]
        assert len(document["costs"]["pairs"]) == (6 if "any" in words else 1)
    assert makespans["--latency", "0.5"] > makespans[()]
    assert run("--name", "1f1b", *EIGHT, "--latency", "1", "--format", "json") == 0
    assert parsed(capsys.readouterr().out, "simulated")["costs"]["latency"] == 1


def test_a_table_in_a_file_and_a_shipped_one(capsys: Captured, tmp_path: Path) -> None:
    sizes = ("--name", "dualpipe", "--ranks", "16", "--micro-batches", "120", "--format", "json")
    assert run(*sizes, "--costs", "deepseek-v3-low") == 0
    first = parsed(capsys.readouterr().out, "simulated")
    assert first["makespan"] == 17_978.3 and first["excess"] == pytest.approx(17_978.3 - 120 * 129)
    table = tmp_path / "mine=1.json"
    table.write_text(json.dumps(first["costs"]))  # the printed text is read back
    assert costs_of_json(table.read_text()).pair_time("FF") == shipped_costs("deepseek-v3-low").pair_time("FF")
    assert run(*sizes, "--costs", str(table)) == 0
    assert parsed(capsys.readouterr().out, "simulated") == first | {"unit": None}  # a file has no default schedule


def test_compare(capsys: Captured) -> None:
    words = ("--compare", "dualpipe,1f1b,interleaved,dualpipev", *EIGHT, "--costs", "FB=1.8")
    assert run(*words, "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "compared")
    rows = {row["schedule"]: row for row in document["schedules"]}
    assert list(rows) == ["dualpipe", "1f1b", "interleaved", "dualpipev"]
    assert rows["dualpipe"]["makespan"] == 50.4 and rows["dualpipe"]["copies"] == 2
    assert rows["1f1b"]["makespan"] == 81 and rows["1f1b"]["peak_activations"] == 8
    assert rows["interleaved"]["makespan"] == 70.5 and rows["interleaved"]["peak_activations"] == 12.5  # half of 25
    assert rows["dualpipev"]["copies"] == 1
    assert run(*words) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == "" and "dualpipe         50.4    5.4%            9       2   48.2   4.6%    14.4" in stdout


def test_compare_reports_unknown_schedules(capsys: Captured) -> None:
    words = ("--compare", "dualpipe,1f1b", "--ranks", "7", "--micro-batches", "20", "--costs", "F=1")
    assert run(*words, "--format", "json") == 0
    rows = parsed(capsys.readouterr().out, "compared")["schedules"]
    assert "even number of ranks" in rows[0]["fault"] and rows[0]["makespan"] is None and rows[1]["fault"] is None
    assert run(*words) == 0
    assert f"\ndualpipe  {rows[0]['fault']}\n" in capsys.readouterr().out
    assert run("--compare", "dualpipe,zb1p,zbv", *EIGHT, "--cap", "3") == 2  # none at all
    assert "--cap 9 or more" in capsys.readouterr().err


def test_comparison_counts_the_cap_in_shares_of_the_model(capsys: Captured) -> None:
    assert run("--compare", "zbv,1f1b", *EIGHT, "--cap", "8", "--format", "json") == 0
    assert [row["fault"] for row in parsed(capsys.readouterr().out, "compared")["schedules"]] == [None, None]
    assert run("--name", "zbv", *EIGHT, "--cap", "8") == 2  # 16 half ones
    assert "holds 16 activations: use --cap 16 or more" in capsys.readouterr().err


def test_auto_is_searched_for_and_always_measured(capsys: Captured) -> None:
    assert run("--name", "auto", *EIGHT, "--cap", "8", "--placement", "bidirectional", "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "simulated")
    assert document["schedule"] == "auto" and max(document["peak_activations"]) <= 8
    assert document["makespan"] == document["lower_bound"] == 63 and document["gap"] == 0  # DualPipe's is 66
    assert run("--compare", "auto,dualpipe", *EIGHT, "--cap", "8", "--format", "json") == 0
    auto, named = parsed(capsys.readouterr().out, "compared")["schedules"]
    assert auto["makespan"] <= 63 and "holds 9 activations" in named["fault"]


def test_auto_with_two_stages_per_rank_reports_them(capsys: Captured) -> None:
    """Costs and cap are those of 1/P of the model, and so are the printed measures."""
    sizes = ("--ranks", "3", "--micro-batches", "7", "--costs", "F=2,I=2,W=2", "--cap", "3")
    words = ("--name", "auto", "--placement", "v", *sizes)
    assert run(*words, "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "simulated")
    assert (document["placement"], document["parts"], document["costs"]["F"]) == ("v", 2, 1)
    assert document["makespan"] == document["lower_bound"] == simulated(document) == 44
    assert max(document["peak_activations"]) <= 3
    assert run(*words) == 0
    stdout, stderr = capsys.readouterr()
    assert str(Schedule.from_text(stdout).stage_placement) == "v"
    assert "at most 3 activations" in stderr and "2 stages per rank: an action costs 1/2 of the costs of 1/P" in stderr


def test_auto_is_never_slower_in_a_comparison(capsys: Captured) -> None:
    """Also if another placement is the best, such as that of the requested number of chunks."""
    words = ("--ranks", "3", "--micro-batches", "7", "--format", "json")
    for names, chunks in (("zbv,dualpipev,1f1b,auto", ()), ("interleaved,auto", ("--chunks", "24"))):
        assert run("--compare", names, *words, *chunks) == 0
        *named, auto = parsed(capsys.readouterr().out, "compared")["schedules"]
        assert auto["makespan"] <= min(row["makespan"] for row in named) <= 22
    assert auto["placement"] == "loop(24)"


def test_too_large_comparisons_suggest_fewer_micro_batches(capsys: Captured) -> None:
    """The limit applies to the time of all compared schedules together."""
    names = "gpipe,1f1b,zb1p,zbv,dualpipev,vmin,auto"
    assert run("--compare", names, "--ranks", "128", "--micro-batches", "6000") == 2
    assert "use --micro-batches 2048 or fewer, to finish within a minute\n" in capsys.readouterr().err  # for auto
    names = "gpipe,1f1b,zb1p,zbh2,interleaved,interleaved_pairs,interleaved_zb,zbv,dualpipev,vmin,vhalf"
    assert run("--compare", names, "--ranks", "128", "--micro-batches", "3641") == 2
    assert "use --micro-batches 3640 or fewer, to finish within a minute, or compare fewer" in capsys.readouterr().err


def test_unequal_micro_batches_have_a_lower_limit(tmp_path: Path, capsys: Captured) -> None:
    """They repeat no period, so every step is timed."""
    (costs := tmp_path / "costs.json").write_text(json.dumps({"F": 1, "I": 1, "W": 1, "micro_batches": [1, 2] * 300}))
    assert run("--name", "1f1b", "--ranks", "512", "--micro-batches", "600", "--costs", str(costs)) == 2
    assert "512 ranks x 600 micro-batches is too large: use --micro-batches 512 or fewer" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_search_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A terminal shows the progress of a search until it is done."""
    words = ("--ranks", "2", "--micro-batches", "2", "--costs", "FB=1.8", "--cap", "3", "--format", "json")
    for option in ("--name", "--compare"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Terminal())
            assert run(option, "auto", *words) == 0
            updates = sys.stderr.getvalue().split("\r\x1b[K")  # type: ignore[attr-defined]
        assert updates[0] == updates[-1] == "" and updates[-2] == "schedule: search for auto: 100%"
    capsys.readouterr()
    assert run("--name", "auto", *words) == 0
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- a spec


THREE = ("cluster.node.devices=3", "parallel.pipeline=3", "parallel.expert=1", "schedule.name=auto", "train.batch=4")
ON_THREE = [word for setting in THREE for word in ("-s", setting)]


def test_auto_of_a_spec_counts_shares_of_the_model(capsys: Captured) -> None:
    """Six stages on three ranks: the schedule of the run, and the one under another cap."""
    for cap in (1.5, 1.25):
        documents = [capped_at(words, capsys) for words in (("-s", f"schedule.cap={cap}"), ("--cap", f"{cap}"))]
        assert max(documents[0]["peak_activations"]) == max(documents[1]["peak_activations"]) == cap // 0.5 * 0.5


def capped_at(words: tuple[str, ...], capsys: Captured) -> dict[str, Any]:
    """The output of `dsc schedule` for three folded ranks under a cap."""
    assert run(QUICK, *ON_THREE, *words, "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "simulated")
    assert (document["placement"], document["parts"], len(document["costs"]["stages"])) == ("v", 2, 6)
    assert document["lower_bound"] <= document["makespan"] == pytest.approx(simulated(document))
    return document


def test_schedule_of_a_spec(capsys: Captured) -> None:
    assert run(QUICK) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == dualpipe(2, 4).to_text() and "makespan" in stderr and " ms" in stderr
    assert run(QUICK, "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "simulated")
    assert document["schedule"] == "dualpipe" and document["unit"] == "ms"
    assert document["makespan"] == pytest.approx(simulated(document))
    assert run(QUICK, "-s", "schedule.name=1f1b", "--costs", "F=1", "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "simulated")
    assert (document["schedule"], document["unit"], document["makespan"]) == ("1f1b", None, 3 * (4 + 1))


def test_a_picture_explains_rows_of_several_tensor_ranks(capsys: Captured) -> None:
    for overrides, wanted in (((), False), (("-s", "parallel.tensor=2", "-s", "cluster.node.devices=4"), True)):
        assert run(str(ROOT / "specs" / "laptop-gqa.dsc"), *overrides, "--format", "svg") == 0
        assert ("a pipeline rank: 2 devices that run one program (tensor 2)." in capsys.readouterr().out) == wanted


def simulated(document: dict[str, object]) -> float:
    """The makespan computed from the printed, rounded costs."""
    schedule = Schedule.from_json(json.dumps({key: document[key] for key in list(document)[:5]}))
    return float(simulate(schedule, costs_of_json(json.dumps(document["costs"]))).makespan)


def test_several_schedules_of_a_spec(capsys: Captured) -> None:
    assert run(QUICK, "--compare", "dualpipe,zbv", "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "compared")
    assert document["unit"] == "ms" and [row["fault"] for row in document["schedules"]] == [None, None]
    assert run(QUICK, "--compare", "dualpipe,zbv", "--costs", "F=1", "--format", "json") == 0
    document = parsed(capsys.readouterr().out, "compared")
    assert document["unit"] is None and document["schedules"][0]["makespan"] == 12


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "message"),
    [
        ("dualpipe", "7", "20", "use 6 or 8"),
        ("dualpipe", "8", "14", "use 16, or 1f1b"),
        ("dualpipe", "8", "21", "use 20 or 22"),
        ("dualpipe", "0", "20", "--ranks 0 is out of bounds: use 1 to 512"),
        ("1f1b", "1", "-1", "--micro-batches -1 is out of bounds: use 1 to 65536"),
        ("1f1b", "1000000000", "1", "--ranks 1000000000 is out of bounds"),
        ("1f1b", "512", "2049", "512 ranks x 2049 micro-batches is too large: use --micro-batches 2048 or fewer"),
        ("interleaved", "512", "1025", "1024 stages x 1025 micro-batches is too large: use --micro-batches 1024"),
        ("zbv", "512", "1025", "1024 stages x 1025 micro-batches is too large: use --micro-batches 1024"),
        ("auto", "512", "513", "512 ranks x 513 micro-batches is too large: use --micro-batches 512"),
        ("dualpip", "8", "20", f"unknown schedule 'dualpip': use one of {NAMES}"),
    ],
)
def test_invalid_sizes_suggest_valid_ones(
    name: str, ranks: str, micro_batches: str, message: str, capsys: Captured
) -> None:
    assert run("--name", name, "--ranks", ranks, "--micro-batches", micro_batches) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert message in stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (EIGHT, f"--name is missing: use one of {NAMES}"),
        (("--name", "1f1b", "--ranks", "8"), "--micro-batches is missing"),
        (("--name", "1f1b", "--micro-batches", "8"), "--ranks is missing"),
        ((*DUALPIPE, "--compare", "1f1b"), "leave --name out"),
        (("--compare", "1f1b,", *EIGHT), "unknown schedule ''"),
        ((*DUALPIPE, "--cap", "8"), "holds 9 activations: use --cap 9 or more"),
        ((*DUALPIPE, "--cap", "0"), "--cap 0 is out of bounds"),
        ((*DUALPIPE, "--cap", "9,9"), "--cap has 2 caps, and there are 8 ranks: write one for each, or one for all"),
        ((*DUALPIPE, "--cap", "9,9,9,9,9,9,9,8.5"), "use --cap 9,9,9,9,9,9,9,9 or more, or auto"),
        ((*DUALPIPE, "--chunks", "65"), "--chunks 65 is out of bounds"),
        ((*DUALPIPE, "--costs", "Q=1"), "--costs Q=1: unknown cost 'Q'"),
        ((*DUALPIPE, "--costs", "deepseek-v3"), "write F=1,I=1,W=1 or deepseek-v3-high or deepseek-v3-low"),
        ((*DUALPIPE, "--costs", "F=0"), "F costs nothing"),
        ((*DUALPIPE, "--latency", "-1"), "is not a number of 0 or more"),
        ((*DUALPIPE, "--pairs", "any"), "--pairs any applies the factor of FB to all pairs"),
        ((*DUALPIPE, "--pairs", "any", "--costs", "deepseek-v3-low"), "give --costs with FB and no other pair"),
        ((QUICK, *DUALPIPE), "leave --ranks and --micro-batches out\n = hint: -s parallel.pipeline=8"),
        ((QUICK, "--ranks", "8"), "has its own ranks and micro-batches: leave --ranks out\n"),
        ((*DUALPIPE, "--costs", "FB=100"), "--costs FB=100: the pair BF takes 100"),
        ((*DUALPIPE, "--costs", "F=1e16"), "--costs F=1e16: F: '1e16' is too large: at most 1e15"),
        ((*DUALPIPE, "--latency", "1e16"), "--latency '1e16' is too large: at most 1e15"),
        ((*DUALPIPE, "--costs", "."), "--costs . is not a regular file, but a folder"),
        ((*DUALPIPE, "--costs", "/dev/null"), "--costs /dev/null is not a regular file"),
        ((*DUALPIPE, "--costs", "9" * 300), "no such file or cost table"),
        ((*DUALPIPE, "-s", "train.seed=1"), "-s overrides keys of a spec, and no spec is named"),
        ((QUICK, "--name", "dualpip"), f"unknown schedule 'dualpip': use one of {NAMES}"),
        ((QUICK, "--compare", ""), "unknown schedule ''"),
        ((QUICK, "--compare", "1f1b", "--name", "1f1b"), "leave --name out"),
        ((QUICK, "--chunks", "3"), "change `schedule.chunks`"),
        ((QUICK, "--cap", "1", "--name", "dualpipe"), "--cap 3 or more"),
    ],
)
def test_mistakes_suggest_a_correction(words: tuple[str, ...], message: str, capsys: Captured) -> None:
    assert run(*words) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("error: ") and message in stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "costs.json is not text in UTF-8"),
        (b'{"F": 1, "I": 1, "W": 1,\n"I": 2}', "costs.json:2:1: `I` is given twice"),
        (b'{"F": 1, "I": 1, "W": 1, "stages": [1, 2]}', "weights of 2 stages, but the schedule has 8"),
        (b" " * ((1 << 20) + 1), "costs.json is larger than 1 MiB"),
    ],
)
def test_invalid_tables_are_refused_with_the_reason(
    data: bytes, message: str, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "costs.json").write_bytes(data)
    assert run(*DUALPIPE, "--costs", str(tmp_path / "costs.json")) == 2
    assert message in capsys.readouterr().err


def test_output_goes_to_a_file(capsys: Captured, tmp_path: Path) -> None:
    assert run(*DUALPIPE, "-o", str(tmp_path / "mine.schedule")) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "mine.schedule").read_text() == dualpipe(8, 20).to_text()


def test_imports_neither_torch_nor_networkx() -> None:
    code = (
        "import sys; from compiler.cli.main import main;"
        "main('schedule --name dualpipe --ranks 2 --micro-batches 4 --costs FB=2'.split());"
        "assert not {'torch', 'networkx', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_times_are_exact(capsys: Captured) -> None:
    assert run("--name", "1f1b", *EIGHT, "--costs", "F=0.1,I=0.1,W=0.1", "--format", "json") == 0
    assert Fraction(str(parsed(capsys.readouterr().out, "simulated")["makespan"])) == Fraction("8.1")


def test_input_files_are_not_overwritten(tmp_path: Path, capsys: Captured) -> None:
    spec, schedule_file = tmp_path / "train.dsc", tmp_path / "mine.schedule"
    spec.write_bytes(Path(QUICK).read_bytes())
    assert run(str(spec), "-o", str(schedule_file)) == 0
    for words in ((str(spec), "-o", str(spec)), (str(schedule_file), "--format", "json", "-o", str(schedule_file))):
        before = [path.read_bytes() for path in (spec, schedule_file)]
        assert run(*words) == 2 and "name another file" in capsys.readouterr().err
        assert before == [path.read_bytes() for path in (spec, schedule_file)]


def test_missing_sizes_are_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("--name", "1f1b"), ("--compare", "1f1b,zbv", "--costs", "FB=1.8")):
        assert run(*words) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith(
            "error: --ranks and --micro-batches are missing, and there is no spec here: a .dsc file"
        )
    (tmp_path / "train.dsc").write_bytes(Path(QUICK).read_bytes())
    assert run("--name", "1f1b") == 0, "of the sizes of the spec that is here"
    (tmp_path / "mine.schedule").write_text(capsys.readouterr().out)
    assert run("mine.schedule", "--ranks", "8") == 2
    stderr = capsys.readouterr().err
    assert "mine.schedule has its own ranks and micro-batches: leave --ranks out" in stderr
    assert "dsc schedule --name 1f1b --ranks 8 --micro-batches 20" in stderr
    assert run("x" * 300) == 2 and "Errno" not in capsys.readouterr().err


def test_a_folder_named_like_a_spec_is_not_a_spec(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "my.dsc.d"
    folder.mkdir()
    (folder / "mine.schedule").write_text(dualpipe(2, 4).to_text())
    assert run(str(folder / "mine.schedule")) == 0
    assert capsys.readouterr().out == dualpipe(2, 4).to_text()


def test_long_costs_are_not_taken_for_a_file_name(capsys: Captured) -> None:
    costs = ",".join(
        f"{kinds}=1.{'1' * 20}" for kinds in ("F", "I", "W", "B", "FB", "FF", "BB", "FI", "II", "IW", "FW")
    )
    assert len(costs) > 255 and run(*DUALPIPE, "--costs", costs) == 0
    assert "makespan" in capsys.readouterr().err


def test_small_times_are_drawn_quickly(capsys: Captured) -> None:
    assert run("--name", "1f1b", "--ranks", "2", "--micro-batches", "2", "--costs", "F=1e-9,I=1e-9,W=1e-9",
               "--format", "terminal") == 0  # fmt: skip
    assert "rank 1" in capsys.readouterr().out
