"""`dsc replay` in this process: what it starts, where a training begins, and the reports on its results. No rank runs
here; the results of ranks are written instead. tests/runtime/run/test_replay.py has real ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.commands import replay
from compiler.cli.main import main
from compiler.emit.build_files import manifest
from runtime.build.files import _ALWAYS
from runtime.checkpoint.shard_manifest import Manifest, render
from runtime.observe.slots import Slots
from tests.compiler.cli.forms import parsed

Captured = pytest.CaptureFixture[str]

FILES = dict.fromkeys(_ALWAYS, "")
BUILD = hashlib.sha256(manifest(FILES).encode()).hexdigest()


def write_stand_in(build: Path, spec: str = "") -> str:
    """Write a complete build whose files are empty except for its spec. Returns its digest."""
    files = FILES | {"spec.resolved": spec}
    build.mkdir(parents=True)
    for name, text in {**files, "manifest.json": manifest(files)}.items():
        (build / name).write_text(text, "utf-8")
    return hashlib.sha256(manifest(files).encode()).hexdigest()


def written(folder: Path, name: str, rows: Sequence[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def row_of(step: int, loss: float | None = None) -> dict[str, Any]:
    return {"step": step, "loss": step / 8 if loss is None else loss, "grad_norm": 1.0, "step_s": 0.1}


def start(step: int = 0, **other: Any) -> dict[str, Any]:
    return {"event": "start", "step": step, "build": BUILD, "torch": "2", "device": "cpu", "ranks": 3, **other}


@dataclass
class Ranks:
    """A stand-in for the processes that a replay starts: records their arguments, and writes what ranks write.

    `errs`: the device that computes wrong results, as the ranks `errs_as`. `losses`: of the trainings in order; None
    means as in the run. `codes`: the exit codes of the processes in order, then 0.
    """

    errs: int | None = None
    errs_as: Sequence[int] = (0, 1, 2)
    losses: list[float | None] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=start)
    leaves_rows: bool = True
    told: list[list[str]] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)
    found: list[dict[str, str]] = field(default_factory=list)

    def call(self, command: Sequence[str], *, quiet: bool = False) -> int:
        self.told.append([*command])
        self.quiet.append(quiet)
        code = self.codes.pop(0) if self.codes else 0
        if command[0] == "compiler.cli.main":
            write_stand_in(Path(command[command.index("-o") + 1]))
        else:
            words = dict(pairwise(command))
            self.train(Path(words["--out"]), int(words["--steps"]), words["--replay"])
        return code

    def train(self, folder: Path, step: int, slots: str) -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        self.found.append({str(path.relative_to(folder)): path.read_text("utf-8") for path in files})
        begun = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("*")), default=0)
        loss = self.losses.pop(0) if self.losses else None
        if self.leaves_rows:
            rows = [row_of(row_step, loss if row_step == step else None) for row_step in range(begun + 1, step + 1)]
            written(folder, "metrics.jsonl", rows)
        written(folder, "events.jsonl", [self.start, *([{"event": "resume", "step": begun}] if begun else [])])
        for rank in range(3):
            device = Slots.parse(slots).device_of(rank, 3)
            errs = device == self.errs and rank in self.errs_as
            computed = {"step": step, "last_sample": 8 * step, "numbers": f"{errs}", "not_finite": []}
            prints = f"{rank:016x}{errs:016x}"
            head = {"rank": rank, "host": "node", "device": f"core {device}"}
            names = ["< weights", "> send 1"]
            written(folder / "witness", f"rank_{rank}.jsonl", [head, {**computed, "names": names, "prints": prints}])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr(replay, "call", ranks.call)
    return ranks


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of seven steps on three ranks, with checkpoints of steps 3 and 6, and prepared data."""
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    written(run, "metrics.jsonl", [row_of(step) for step in range(1, 8)])
    written(run, "events.jsonl", [start()])
    for serial, step in enumerate((3, 6)):
        checkpoint(run, step, serial)
    (run / "data" / "corpus").mkdir(parents=True)
    (run / "data" / "corpus" / "tokens").write_text("tokens", "utf-8")
    (run / "data" / ".lock").write_text("", "utf-8")
    return run


def checkpoint(run: Path, step: int, serial: int, **meta: Any) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(render(Manifest(step, serial, meta, ())), "utf-8")


def document(capsys: Captured, *words: object, code: int = 0) -> Any:
    assert main(["replay", "run", *map(str, words), "--format", "json"]) == code
    return parsed(capsys.readouterr().out, "replay")


def said(capsys: Captured, *words: object, code: int = 0) -> tuple[str, str]:
    assert main(["replay", "run", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_step_is_compiled_and_trained_from_the_checkpoint_before(run: Path, ranks: Ranks, capsys: Captured) -> None:
    stdout, stderr = said(capsys, 5)
    assert stdout == "steps 4 to 5: equal to the run, bit for bit\n"
    assert stderr == "training step 5 again\n"
    compiled, trained = ranks.told
    assert compiled == ["compiler.cli.main", "compile", "run/spec.resolved", "-o", "run/replay-5/build"]
    words = "--out run/replay-5/run --data . --steps 5 --resume --device cpu --replay any"
    assert trained == ["runtime.run.train", "run/replay-5/build", *words.split()]
    assert ranks.quiet == [True, False], "text shows what the ranks print"
    assert [*ranks.found[0]] == ["checkpoints/step-00000003/manifest.json", "data/corpus/tokens"]
    assert not (run / "replay-5").exists() and (run / "data" / "corpus" / "tokens").read_text("utf-8") == "tokens"


@pytest.mark.parametrize(
    ("step", "steps", "checkpoints"),
    [(1, "step 1", []), (3, "steps 1 to 3", []), (4, "step 4", [3]), (7, "step 7", [3, 6])],
)
def test_only_checkpoints_before_the_step_are_taken(
    run: Path, ranks: Ranks, capsys: Captured, step: int, steps: str, checkpoints: list[int]
) -> None:
    assert said(capsys, step)[0] == f"{steps}: equal to the run, bit for bit\n"
    names = {name for name in ranks.found[0] if name.startswith("checkpoints/")}
    assert names == {f"checkpoints/step-{saved_step:08d}/manifest.json" for saved_step in checkpoints}


def test_json_output_is_one_document(run: Path, ranks: Ranks, capsys: Captured) -> None:
    nothing: dict[str, list[object]] = {name: [] for name in ("differs", "ranks", "surroundings", "suspects", "faults")}
    result = document(capsys, 5, "--device", "shared", "--data", "corpus")
    assert result == {"version": 1, "from_step": 3, "step": 5, "equal": True, "verdict": None, **nothing}
    assert ranks.quiet == [True, True], "ranks print no lines between"
    words = ranks.told[1]
    assert words[words.index("--device") + 1] == "shared" and words[words.index("--data") + 1] == "corpus"


@pytest.mark.parametrize(("device", "taken"), [("cuda", "cuda"), ("shared", "shared"), ("tpu", "cpu"), (None, "cpu")])
def test_a_replay_uses_the_device_of_the_run(run: Path, ranks: Ranks, device: str | None, taken: str) -> None:
    written(run, "events.jsonl", [start(device=device), start(5, device="cuda" if taken == "cpu" else "cpu")])
    assert main(["replay", "run", "5"]) == 0
    assert ranks.told[1][ranks.told[1].index("--device") + 1] == taken, "the start at step 5 trained step 6 and on"


def test_a_number_that_differs_is_kept_and_named(run: Path, ranks: Ranks, capsys: Captured) -> None:
    ranks.losses = [9.0]
    stdout, stderr = said(capsys, 5, code=1)
    assert stdout == "steps 4 to 5: the first difference is in step 5\n  loss: 0.625 in the run, 9.0 now\n"
    assert stderr.endswith("the new trainings are in run/replay-5\n")
    stored = json.loads((run / "replay-5" / "replay.json").read_text("utf-8"))
    assert stored["equal"] is False and stored["differs"][0]["step"] == 5
    assert "run/replay-5 already exists" in said(capsys, 5, code=2)[1]
    ranks.losses = [9.0]
    assert document(capsys, 5, "--out", "why/not", code=1)["equal"] is False
    assert Path("why/not/run/metrics.jsonl").exists()
    assert document(capsys, 5, "--out", "equal")["equal"] is True
    assert Path("equal").is_dir(), "a folder that was asked for stays"


def test_differing_environments_are_reported(run: Path, ranks: Ranks, capsys: Captured) -> None:
    written(run, "events.jsonl", [start(build="other"), {"event": "fault", "step": 5, "reason": "sums"}])
    ranks.start = start(torch="3")
    stdout, stderr = said(capsys, 5)
    lines = [f"  build: other in the run, {BUILD} now", "  torch: 2 in the run, 3 now"]
    lines.append("the run computed this step again because of sums: a transient error")
    assert stdout.splitlines() == ["steps 4 to 5: equal to the run, bit for bit", *lines]
    assert f"the run trained step 5 with build other, and this is {BUILD}: rounding may differ" in stderr
    stdout, stderr = said(capsys, 4)
    assert "sums" not in stdout, "that was at another step"


def test_the_same_bits_on_other_devices_are_real(run: Path, ranks: Ranks, capsys: Captured) -> None:
    stdout, stderr = said(capsys, 5, "--swap", "all")
    assert "verdict: real: the same bits with each rank on the device of another, so" in stdout
    placements = [", each rank on the device 1 further on", ", each rank on its own device"]
    assert stderr == "".join(f"training step 5 again{placement}\n" for placement in placements)
    assert [words[words.index("--out") + 1] for words in ranks.told[1:]] == ["run/replay-5/swapped", "run/replay-5/run"]
    assert not (run / "replay-5").exists()
    stdout, stderr = said(capsys, 5, "--swap", "0,1")
    assert "real: the same bits with the devices of ranks 0 and 1 exchanged, so" in stdout
    assert stderr.startswith("training step 5 again, with the devices of ranks 0 and 1 exchanged\n")


def test_an_error_that_passed_is_transient(run: Path, ranks: Ranks, capsys: Captured) -> None:
    written(run, "metrics.jsonl", [row_of(step, 9.0 if step == 5 else None) for step in range(1, 8)])
    stdout, stderr = said(capsys, 5, "--swap", "all", code=4)
    assert "not reproduced on the devices of the run, nor with each rank on the device of another" in stdout
    assert "the new trainings are in run/replay-5" in stderr
    written(run, "events.jsonl", [start(torch="1")])
    assert "unknown: the run cannot be compared" in said(capsys, 5, "--swap", "all", "--out", "other", code=1)[0]


def test_a_third_training_tells_which_device_is_wrong(run: Path, ranks: Ranks, capsys: Captured) -> None:
    """A third training only runs if two leave the question open."""
    ranks.errs = 1
    stdout, stderr = said(capsys, 5, "--swap", "all", code=5)
    named = "verdict: device: core 1 of node (rank 1) computes other bits from the same inputs than another device"
    assert stdout.splitlines()[1:] == [named, "  first as rank 0, in 'send 1' of step 5"]
    assert [words[-1] for words in ranks.told[1:]] == ["+1", "+0"]
    ranks.errs_as = [1]
    stdout, stderr = said(capsys, 5, "--swap", "all", "--out", "again", code=5)
    assert stdout.splitlines()[1:] == [named, "  first as rank 1, in 'send 1' of step 5"]
    assert [words[-1] for words in ranks.told[4:]] == ["+1", "+0", "+2"]
    assert stderr.splitlines()[2] == "training step 5 again, each rank on the device 2 further on"
    assert Path("again/third/witness").is_dir()
    (suspect,) = document(capsys, 5, "--swap", "0,1", "--out", "pair", code=5)["suspects"]
    assert suspect == {"rank": 1, "host": "node", "device": "core 1", "as": 1, "step": 5, "first": "send 1"}
    assert [words[-1] for words in ranks.told[8:]] == ["0,1", "+0", "1,2"]


@pytest.mark.parametrize(
    ("codes", "trainings", "keeps"),
    [
        ([2], 0, False),  # from the compiler
        ([0, 1], 1, True),
        ([0, 2], 1, False),
        ([0, 3], 1, True),
        ([0, 130], 1, False),
        ([0, 0, 3], 2, True),
        ([0, 0, 75], 2, False),
        ([0, 0, 0, 1], 3, True),
        ([0, 0, 0, 2], 3, False),
    ],
)
def test_a_failed_replay_keeps_its_folder_if_it_has_results(
    run: Path, ranks: Ranks, codes: list[int], trainings: int, keeps: bool
) -> None:
    ranks.codes, ranks.errs, ranks.errs_as = [*codes], 1, [1]
    assert main(["replay", "run", "5", "--swap", "all"]) == codes[-1]
    assert len(ranks.found) == trainings and (run / "replay-5").exists() == keeps


def test_missing_results_of_a_training_are_an_error(run: Path, ranks: Ranks, capsys: Captured) -> None:
    ranks.leaves_rows = False
    result = document(capsys, 5, code=1)
    assert result["differs"][0]["keys"] == {"step": {"run": 4, "replay": None}}, "ranks that saw nothing good"
    ranks.train = lambda *_: None  # type: ignore[method-assign]
    assert "run/metrics.jsonl" in said(capsys, 5, "--out", "why", code=2)[1]


def test_an_attempt_that_was_rolled_back_is_replayed(run: Path, ranks: Ranks, capsys: Captured) -> None:
    """With the rollbacks before the attempt, and from checkpoints before it."""
    rollbacks = [{"step": 2}, {"step": 7}, {"step": 7}, {"step": 9}]
    written(run, "health.json", [{"rollbacks": rollbacks, "window": 4}])
    checkpoint(run, 4, 2, health={"rollbacks": 2})
    checkpoint(run, 5, 3, health={"rollbacks": 3})
    document(capsys, 7)
    health = json.loads(ranks.found[0]["health.json"])
    assert health == {"rollbacks": rollbacks[:2], "window": 4}, "the last attempt at the step was the third rollback"
    assert [name for name in sorted(ranks.found[0]) if "checkpoints" in name] == [
        f"checkpoints/step-{step:08d}/manifest.json" for step in (3, 4, 6)
    ]
    document(capsys, 6)
    assert json.loads(ranks.found[1]["health.json"])["rollbacks"] == rollbacks, "it was not rolled back there"
    assert "checkpoints/step-00000005/manifest.json" in ranks.found[1]
    for damaged in ("[]", '{"rollbacks": 3}', '{"rollbacks": [3]}', "{"):
        (run / "health.json").write_text(damaged, "utf-8")
        document(capsys, 7)
        assert "health.json" not in ranks.found[-1]


def test_the_phase_of_the_step_is_compiled(run: Path, ranks: Ranks) -> None:
    for phase in (0, 1):
        written(run / f"phase.{phase}", "spec.resolved", [])
    written(run, "metrics.jsonl", [row_of(step) | {"phase": int(step > 4)} for step in range(1, 8)])
    for step, phase in ((4, 0), (5, 1)):
        main(["replay", "run", str(step)])
        assert ranks.told[-2][2] == f"run/phase.{phase}/spec.resolved"


def test_invalid_replays_are_refused(run: Path, ranks: Ranks, capsys: Captured) -> None:
    assert "run has no row for step 8: its steps are 1 to 7" in said(capsys, 8, code=2)[1]
    assert "Not a directory" in said(capsys, 5, "--out", "/dev/null/x", code=2)[1]
    assert main(["replay", "none", "5"]) == 2 and "there is no folder none" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("", "utf-8")
    assert "it has trained no step" in said(capsys, 5, code=2)[1]
    (run / "metrics.jsonl").unlink()
    assert "metrics.jsonl" in said(capsys, 5, code=2)[1]
    for step in ("0", "-1", "1.5", "٣", "1" + 19 * "0"):
        with pytest.raises(SystemExit):
            main(["replay", "run", "--", step])
        assert "is not a step: steps count from 1" in capsys.readouterr().err
    assert not ranks.told
