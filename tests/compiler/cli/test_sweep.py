"""`dsc sweep`: every combination once, planned before anything runs; combinations that do not fit are skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.cli.commands import sweep
from compiler.cli.commands.sweep_variants import SweepError, Variant, alternatives, variants
from compiler.cli.main import main
from compiler.tools import processes
from tests.compiler.cli.forms import parsed

SPEC = str(Path(__file__).parents[3] / "specs" / "tiny.dsc")
Captured = pytest.CaptureFixture[str]
VALUES = st.lists(
    st.sampled_from(["1", "2.5", "a b", "[x, y]", "(1, 2)", '"p,q"', "x/y", "é"]), min_size=1, unique=True
)


@given(st.dictionaries(st.sampled_from(["train.a", "train.b", "model.a", "x.0"]), VALUES, min_size=1, max_size=3))
def test_every_combination_is_there_once(values: dict[str, list[str]]) -> None:
    settings = [f"{key}={','.join(choices)}" for key, choices in values.items()]
    if all(len(choices) == 1 for choices in values.values()):
        with pytest.raises(SweepError, match="nothing varies"):
            variants(settings)
        return
    try:
        combinations = variants(settings)
    except SweepError as error:
        assert "are more than 256" in str(error)
        return
    wanted: list[list[str]] = [[]]
    for key, choices in values.items():
        wanted = [[*before, f"{key}={value}"] for before in wanted for value in choices]
    assert [list(variant.overrides) for variant in combinations] == wanted
    names = {variant.name for variant in combinations}
    assert len(names) == len(combinations)
    assert all(name and "/" not in name and not name.startswith((".", "-")) and len(name) < 100 for name in names)


def test_values_with_commas() -> None:
    rate = "train.rate=warmup 2 steps to 1e-3, constant at 1e-3"
    assert alternatives(rate) == (rate.partition("=")[2],)
    assert alternatives(f"{rate} | constant at 2e-3") == (rate.partition("=")[2], "constant at 2e-3")
    assert alternatives("recompute=[rmsnorm, swiglu],[]") == ("[rmsnorm, swiglu]", "[]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-s", "train.seed=1"], "nothing varies"),
        (["-s", "train.seed=1,1"], "train.seed has a value twice"),
        (["-s", f"train.seed={','.join(map(str, range(300)))}"], "300 combinations are more than 256"),
        (["-s", "train.seed=1,2", "--train", "--out x"], "--out cannot be given to the runs of a sweep"),
        (["-s", "train.seed=1,2", "--train", "'"], "cannot be read as options"),
        (["-s", "train.seed=1,2", "--launch", ""], "--launch names no launcher"),
        (["-s", "train.seed=1,2", "--launch", "slurm"], "slurm needs --time"),
        (
            ["-s", "train.seed=1,2", "--launch", "torchrun --out x"],
            "a sweep sets the folders and the format of --launch",
        ),
        (["-s", "train.sed=1,2"], "did you mean `seed`?"),
        (["-s", "train.seed=1,no"], "1 of 2 variants cannot be trained"),
    ],
)
def test_invalid_sweeps_are_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", SPEC, *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_combinations_that_do_not_fit_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-s", "cluster.node.device.memory=1MB,2.2MB,4GB", "-s", "train.micro_batch=4", "-s", "model.hidden=64"]
    assert main(["sweep", SPEC, *words, "--plan", "--format", "json"]) == 1
    captured = capsys.readouterr()
    runs = parsed(captured.out, "sweep")["runs"]
    assert [run["fits"] for run in runs] == [False, False, True]
    assert runs[1]["overrides"] == ["cluster.node.device.memory=2.2MB", "train.micro_batch=4", "model.hidden=64"]
    assert "E0812" in captured.err  # the first certainly does not fit, the second by its plan
    assert runs[0]["free_bytes"] is None and runs[1]["free_bytes"] < 0 < runs[2]["free_bytes"]
    assert f"warning: memory=2.2MB does not fit: dsc plan {SPEC} -s " in captured.err
    assert not list(tmp_path.iterdir())


def test_the_table_shows_the_cost_of_each_run_and_the_total() -> None:
    free_bytes = {"fits": 3 * 2**30, "exact": 0, "large": -(2**20), "illegal": None}
    planned = [
        sweep.PlannedVariant(Variant(name, (), ()), Path(name), "", 5_000_000, 1.5, 7200.0, bytes_, usd=12.0)
        if bytes_ is not None
        else sweep.PlannedVariant(Variant(name, (), ()), Path(name))
        for name, bytes_ in free_bytes.items()
    ]
    table = sweep._table(planned)
    assert [re.split("  +", line) for line in table.splitlines()] == [
        ["run", "parameters", "step", "whole run", "memory", "cost"],
        ["fits", "5.000M", "1.500 s", "2.00 hours", "fits, 3.0 GiB free", "$12"],
        ["exact", "5.000M", "1.500 s", "2.00 hours", "fits, 0 bytes free", "$12"],
        ["large", "5.000M", "1.500 s", "2.00 hours", "1.0 MiB too much", "$12"],
        ["illegal", "refused, see above"],
        [""],
        ["2 runs that fit, 4.00 hours one after the other"],
    ]
    assert sweep._table(planned[1:]).endswith("\n\n1 run that fits, 2.00 hours one after the other")
    planned[0].usd = planned[1].usd = planned[2].usd = None
    assert "cost" not in sweep._table(planned) and "$" not in sweep._table(planned)


def test_labels_consist_of_the_differing_words() -> None:
    rates = "train.rate=warmup 15 steps to 1e-3 | warmup 15 steps to 3e-3"
    assert [variant.label for variant in variants([rates])] == ["rate 1e-3", "rate 3e-3"]
    combinations = variants(
        ["train.rate.0=warmup 5 steps to 1e-3,warmup 9 steps to 1e-3", "train.seed=1,2", "train.steps=4"]
    )
    assert [variant.label for variant in combinations] == [
        "rate 5, seed 1",
        "rate 5, seed 2",
        "rate 9, seed 1",
        "rate 9, seed 2",
    ]
    assert [variant.label for variant in variants(["schedule.name=1f1b,zb1p"])] == ["name 1f1b", "name zb1p"]


def test_the_spec_of_the_folder_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "-s", "train.seed=1,2", "--plan"]) == 2
    assert "there is no spec here" in capsys.readouterr().err
    (tmp_path / "mine.dsc").write_text(Path(SPEC).read_text("utf-8"), "utf-8")
    assert main(["sweep", "-s", "train.seed=1,2", "--plan"]) == 0
    assert "2 runs that fit" in capsys.readouterr().out


def test_a_mistake_in_the_spec_is_reported_once(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "wrong.dsc").write_text("run wrong { stepz = 4 }\n")
    assert main(["sweep", str(tmp_path / "wrong.dsc"), "-s", "train.seed=1,2,3"]) == 2
    error = capsys.readouterr().err
    assert error.count("has no key `stepz`") == 1 and "3 of 3 variants cannot be trained" in error


def test_variants_that_break_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", SPEC, "-s", "train.micro_batch=3,4", "--plan"]
    assert main(words) == 2
    assert "1 of 2 variants cannot be trained" in capsys.readouterr().err
    assert main([*words, "--legal", "--format", "json"]) == 1
    assert [run["fits"] for run in parsed(capsys.readouterr().out, "sweep")["runs"]] == [False, True]
    assert main(["sweep", SPEC, "-s", "train.micro_batch=3,5", "--plan", "--legal"]) == 2


def test_variants_that_do_not_train_yet(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sweep, "is_refused", lambda chosen: chosen.spec.train.seed == 2)
    words = ["sweep", SPEC, "-s", "train.seed=1,2", "--plan"]
    assert main(words) == 2
    assert "1 of 2 variants cannot be trained" in capsys.readouterr().err
    assert main([*words, "--legal"]) == 1
    stdout = capsys.readouterr().out
    assert re.search(r"^seed=2 +refused, see above$", stdout, re.MULTILINE) and "1 run that fits" in stdout


def test_a_sweep_continues_after_a_failure_and_stops_at_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    called = []

    def call(words: list[str]) -> int:
        called.append(words[words.index("--out") + 1])
        ended = [run["exit_code"] for run in parsed(Path("sweeps/tiny/sweep.json").read_text(), "sweep")["runs"]]
        before = (len(called) - 1) % 3  # the second sweep begins after three calls
        assert ended == [1, 0, 130][:before] + [None] * (len(ended) - before), "those that have ended have a code"
        return {"seed=1": 1, "seed=2": 0, "seed=3": 130, "seed=4": 0}[Path(called[-1]).name]

    monkeypatch.setattr(processes, "call", call)
    assert main(["sweep", SPEC, "-s", "train.seed=1,2,3,4"]) == 130
    assert called == [f"sweeps/tiny/seed={i}" for i in (1, 2, 3)]
    assert "seed=1 failed with exit code 1" in capsys.readouterr().err
    document = parsed(Path("sweeps/tiny/sweep.json").read_text(), "sweep")
    assert [run["exit_code"] for run in document["runs"]] == [1, 0, 130, None]
    assert main(["sweep", SPEC, "-s", "train.seed=1,2"]) == 1


def test_runs_of_a_sweep_are_compared_on_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(words: list[str]) -> int:
        run = Path(words[words.index("--out") + 1])
        run.mkdir(parents=True)
        if run.name == "seed=3":
            return 1
        rows = [{"step": step, "loss": 3.0 / step, "tokens": 64 * step} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return 0

    monkeypatch.setattr(processes, "call", call)
    assert main(["sweep", SPEC, "-s", "train.seed=1,2,3"]) == 1
    captured = capsys.readouterr()
    assert "\ncompared: sweeps/tiny/compared.html\n" in captured.out and "was not written" not in captured.err
    page = Path("sweeps/tiny/compared.html").read_text("utf-8")
    assert "Sweep tiny" in page and "seed 1" in page and "seed 2" in page and "seed 3" not in page


def test_options_refused_by_sweep_exist_in_train() -> None:
    """Options that name one folder or one checkpoint are refused, and only options that there are."""
    from compiler.cli.main import CommandParser
    from runtime.contract.options import add_options

    parser = CommandParser("dsc train", "")
    add_options(parser)
    assert {*sweep.OF_THE_SWEEP} <= {*parser._option_string_actions}
