"""`dsc train` in this process: the processes that it starts, their order and arguments. None of them runs here; the
tests supply their exit codes. tests/runtime/run/test_commands.py starts real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from compiler.cli.main import command_parser, main
from compiler.plan.spec_files import standing_alone
from compiler.tools import training
from compiler.tools.processes import OWN_STREAMS, OutputLines
from compiler.tools.training import Training
from dsl.canonical import canonical
from dsl.load import load
from runtime.checkpoint.shard_manifest import Manifest, render
from runtime.contract.options import EXIT_EARLIER, EXIT_REPLACED
from tests.runtime.run.test_replay_command import write_stand_in

TINY = Path(__file__).parents[3] / "specs" / "tiny.dsc"
PHASED = """
import "tiny.dsc"
run mine extends tiny {
  phase long { train { sequence = 32, steps = 4 } }
  phase last { train { sequence = 64, steps = 4 } }
}
"""
TOKENS = 5 * 4 * 16  # of the first phase
Captured = pytest.CaptureFixture[str]


@dataclass
class Processes:
    """The started processes, and the exit codes of the launchers in turn; 0 after the last."""

    codes: list[int] = field(default_factory=list)
    compiler_code: int = 0
    told: list[tuple[str, ...]] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)  # of compilers that run before the launcher

    def call(self, command: Sequence[str], *, output: OutputLines = OWN_STREAMS) -> int:
        assert output is OWN_STREAMS
        self.told.append(tuple(command))
        assert len(self.told) < 200, "it starts processes without end"
        return self.codes.pop(0) if self.codes else 0

    def run_compiler(self, command: Sequence[str], *, output: OutputLines, quiet: bool = False) -> tuple[int, str]:
        self.told.append(tuple(command))
        self.quiet.append(quiet)
        return self.compiler_code, "" if self.compiler_code else f"digest {len(self.told)}"

    def call_both(
        self, compiler: Sequence[str], launcher: Sequence[str], request: str, *, output: OutputLines
    ) -> tuple[int, bool]:
        assert "\n" not in request and request.startswith("{")
        command = (*compiler, "and", *launcher)
        if self.compiler_code:
            self.told.append(command)
            return self.compiler_code, False
        return self.call(command), True


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    """In a folder with two specs."""
    stand_in = Processes()
    for name in ("call", "run_compiler", "call_both"):
        monkeypatch.setattr(training, name, getattr(stand_in, name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "tiny.dsc").write_text(TINY.read_text("utf-8"), "utf-8")
    (tmp_path / "specs" / "mine.dsc").write_text(PHASED, "utf-8")
    return stand_in


def words(launcher: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, those without a value with ""."""
    options, name = dict[str, str](), ""
    for word in launcher[2:]:
        if word.startswith("--"):
            name = word
        options[name] = "" if word == name else word
    return options


def checkpoint(step: int, tokens: int) -> None:
    folder = Path("runs/mine/checkpoints") / f"step-{step:08d}"
    folder.mkdir(parents=True)
    manifest = Manifest(step, step, {"position": {"tokens": tokens}}, ())
    (folder / "manifest.json").write_text(render(manifest), "utf-8")


def test_default_options_equal_those_of_the_command() -> None:
    args = command_parser("train").parse_args([])
    for option in fields(Training):
        if option.name not in ("changes", "output"):
            assert getattr(args, option.name) == option.default, option.name


def test_a_build_is_started_without_compiling(processes: Processes, capsys: Captured) -> None:
    write_stand_in(Path("elsewhere/mine"))
    assert main(["train", "elsewhere/mine"]) == 0
    (launcher,) = processes.told
    assert launcher[:2] == ("runtime.run.train", "elsewhere/mine")
    options = words(launcher)
    assert (options["--out"], options["--data"]) == ("runs/mine", str(Path.cwd()))
    assert not {"--resume", "--steps", "--debug", "--data-cache", "--skip-batch", "--restarts"} & {*options}
    assert main(["train", "elsewhere/mine", "-s", "train.seed=2"]) == 2
    assert "is compiled already: -s needs the spec" in capsys.readouterr().err and len(processes.told) == 1


def test_options_are_passed_to_the_launcher(processes: Processes) -> None:
    write_stand_in(Path("build/mine"))
    folders, sizes = "--data corpus --out here", "--steps 3 --restarts 2 --device cpu --transport gloo"
    arguments = f"{folders} {sizes} --hang-timeout 9 --start-timeout none".split()
    assert main(["train", "build/mine", *arguments, "--resume", "--skip-batch", "--elastic", "--no-copies"]) == 0
    options = words(processes.told[0])
    assert options["--data"] == "corpus" and options["--out"] == "here" and options["--start-timeout"] == "none"
    assert (options["--steps"], options["--restarts"]) == ("3", "2")
    assert (options["--device"], options["--transport"]) == ("cpu", "gloo")
    assert float(options["--hang-timeout"]) == 9 and options["--data-cache"] == "build/.data"
    assert all(options[name] == "" for name in ("--resume", "--skip-batch", "--elastic", "--no-copies"))
    assert main(["train", "build/mine", "--cache", "shared", "--debug", "--debug-rank", "1"]) == 0
    options = words(processes.told[1])
    assert (options["--data-cache"], options["--debug-rank"]) == ("shared/data", "1")
    assert options["--out"] == "runs/mine-debug"


def test_a_spec_is_compiled_while_its_data_is_prepared(processes: Processes) -> None:
    assert main(["train", "specs/tiny.dsc", "-s", "train.seed=2", "--cache", "shared"]) == 0
    (command,) = processes.told
    index = command.index("and")
    compiler, launcher = command[:index], command[index + 1 :]
    assert " ".join(compiler) == "compiler.cli.main compile specs/tiny.dsc -o build/tiny --cache shared -s train.seed=2"
    options = words(launcher)
    assert launcher[:2] == ("runtime.run.train", "build/tiny") and options["--unbuilt"] == ""
    assert (options["--out"], options["--data"]) == ("runs/tiny", "specs"), "paths of a spec begin beside it"
    processes.told.clear()
    processes.compiler_code = 2
    assert main(["train", "specs/tiny.dsc"]) == 2 and len(processes.told) == 1


def test_a_build_that_is_fresh_is_not_compiled(processes: Processes) -> None:
    digest = write_stand_in(Path("build/tiny"), canonical(standing_alone(load("specs/tiny.dsc"))))
    assert main(["train", "specs/tiny.dsc"]) == 0
    (launcher,) = processes.told
    assert words(launcher)["--compiled"] == digest
    assert main(["train", "specs/tiny.dsc", "-s", "train.seed=2"]) == 0
    assert processes.told[1][:2] == ("compiler.cli.main", "compile") and "and" in processes.told[1]


def test_a_debugger_needs_the_terminal(processes: Processes) -> None:
    assert main(["train", "specs/tiny.dsc", "--debug"]) == 0
    compiler, launcher = processes.told
    assert compiler[:2] == ("compiler.cli.main", "compile") and words(launcher)["--compiled"] == "digest 1"
    assert processes.quiet == [False]
    processes.compiler_code = 2
    assert main(["train", "specs/tiny.dsc", "--debug"]) == 2 and len(processes.told) == 3


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_no_run_is_named_if_the_compiler_fails(
    by_torchrun: bool, processes: Processes, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has an earlier run, which is not the requested one."""
    if by_torchrun:  # the compiler runs before the launcher, not concurrently
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").touch()
    processes.compiler_code = 1
    assert main(["train", "specs/tiny.dsc", "--resume"]) == 1
    assert ["and" in command for command in processes.told] == [not by_torchrun]
    assert "run: " not in capsys.readouterr().out
    processes.compiler_code, processes.codes = 0, [1]
    assert main(["train", "specs/tiny.dsc", "--resume"]) == 1
    assert capsys.readouterr().out == "report: dsc report runs/tiny\nrun: runs/tiny\n"


def test_a_build_that_others_replace_is_compiled_again(processes: Processes, capsys: Captured) -> None:
    processes.codes = [EXIT_REPLACED, EXIT_REPLACED, 1]
    assert main(["train", "specs/tiny.dsc"]) == 1
    assert ["and" in command for command in processes.told] == [True, False, False, False, False]
    assert words(processes.told[4])["--compiled"] == "digest 4" and processes.quiet == [True, True]
    processes.codes = [EXIT_REPLACED] * 99
    assert main(["train", "specs/tiny.dsc"]) == 2
    assert "other processes keep compiling into build/tiny" in capsys.readouterr().err
    assert len(processes.codes) == 99 - training.TRIES


def started(processes: Processes) -> list[tuple[str, bool]]:
    """The started processes: `compile` or `train` of a build, and whether it resumes."""
    starts = []
    for command in processes.told:
        launcher = command[command.index("and") + 1 :] if "and" in command else command
        is_run = launcher[0] == "runtime.run.train"
        build = launcher[1] if is_run else launcher[launcher.index("-o") + 1]
        starts.append((f"{'train' if is_run else 'compile'} {Path(build).name}", "--resume" in launcher))
    return starts


def trained(*phases: str, resume: bool = False) -> list[tuple[str, bool]]:
    return [(f"train {phase}", resume or index > 0) for index, phase in enumerate(phases)]


def test_phases_are_trained_one_after_the_other(processes: Processes) -> None:
    """All later phases are compiled first, so that their errors show before the first is trained."""
    assert main(["train", "specs/mine.dsc"]) == 0
    later = [("compile mine.long", False), ("compile mine.last", False)]
    assert started(processes) == later + trained("mine", "mine.long", "mine.last")
    assert {words(command[command.index("and") + 1 :])["--out"] for command in processes.told[2:]} == {"runs/mine"}
    processes.told.clear()
    processes.codes = [0, 3]
    assert main(["train", "specs/mine.dsc"]) == 3, "what fails is the last"
    assert started(processes) == later + trained("mine", "mine.long")
    processes.told.clear()
    processes.compiler_code = 2
    assert main(["train", "specs/mine.dsc"]) == 2 and started(processes) == later[:1]


@pytest.mark.parametrize(
    ("step", "tokens", "phases"),
    [
        (3, TOKENS - 64, ("mine", "mine.long", "mine.last")),
        (5, TOKENS, ("mine.long", "mine.last")),
        (8, TOKENS + 3 * 128, ("mine.long", "mine.last")),
        (9, TOKENS + 4 * 128, ("mine.last",)),
    ],
)
def test_a_run_goes_on_with_the_phase_it_has_come_to(
    processes: Processes, step: int, tokens: int, phases: tuple[str, ...]
) -> None:
    checkpoint(step, tokens)
    assert main(["train", "specs/mine.dsc", "--resume"]) == 0
    assert [start for start in started(processes) if start[0].startswith("train")] == trained(*phases, resume=True)
    assert len(started(processes)) == 2 * len(phases) - 1
    processes.told.clear()
    processes.codes = [EXIT_EARLIER]
    main(["train", "specs/mine.dsc", "--resume"])
    first = [name for name, _ in started(processes) if name.startswith("train")][:2]
    before = {"mine.long": "mine", "mine.last": "mine.long"}.get(phases[0])
    assert first == [f"train {phases[0]}", *([f"train {before}"] if before else [])], "the newest is damaged"


@pytest.mark.parametrize(
    ("steps", "compiled"), [(5, []), (6, ["mine.long"]), (9, ["mine.long"]), (10, ["mine.long", "mine.last"])]
)
def test_only_phases_that_are_reached_are_compiled(processes: Processes, steps: int, compiled: list[str]) -> None:
    checkpoint(steps, TOKENS)
    assert main(["train", "specs/mine.dsc", "--steps", str(steps)]) == 0
    assert started(processes) == [*((f"compile {build}", False) for build in compiled), ("train mine", False)]


def test_profiling_and_debugging_train_one_phase(processes: Processes) -> None:
    assert main(["train", "specs/mine.dsc", "--profile"]) == 0 and started(processes) == trained("mine")
    processes.told.clear()
    assert main(["train", "specs/mine.dsc", "--debug"]) == 0
    assert started(processes) == [("compile mine", False), ("train mine", False)]
    assert main(["train", "specs/mine.dsc", "--expect", "0" * 64]) == 2, "it names one build"


@pytest.mark.parametrize(("code", "said"), [(0, "report: "), (1, "report: dsc report runs/tiny\n"), (2, ""), (75, "")])
def test_the_folder_of_a_run_is_printed_if_there_is_one(
    processes: Processes, capsys: Captured, code: int, said: str
) -> None:
    processes.codes = [code, code, code]
    assert main(["train", "specs/tiny.dsc"]) == code and capsys.readouterr().out == "", "no row was written"
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").write_text("", "utf-8")
    assert main(["train", "specs/tiny.dsc"]) == code
    stdout = capsys.readouterr().out
    assert stdout.startswith(said) and stdout.endswith("run: runs/tiny\n" if said else "")
    assert main(["train", "specs/tiny.dsc", "--debug"]) == code and "report" not in capsys.readouterr().out
