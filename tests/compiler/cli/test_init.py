"""`dsc init`: a valid spec in one file that can be trained unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.tools.templates import STARTER, inline_imports, names, run_name
from dsl.load import load
from dsl.messages.diagnostics import Source, SpecError
from dsl.resolve.chosen import runs_in
from dsl.rules import train_refusals
from dsl.text.formatter import format_source
from tests import forks

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "specs").glob("*.dsc"))
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_starter_is_valid_and_prints_next_commands(capsys: Captured) -> None:
    assert main(["init"]) == 0
    stdout = capsys.readouterr().out
    commands = [line.split("   ")[0].split() for line in stdout.splitlines() if line.startswith("  dsc ")]
    assert [command[1] for command in commands] == ["check", "show", "train"]
    for command in commands[:2]:
        assert main(command[1:]) == 0
    assert main(["check"]) == 0  # it is the one spec of the folder
    spec = load("train.dsc")
    assert spec.cluster.world == 2 and not train_refusals(spec)


def test_templates_are_listed_by_name_behind_the_starter() -> None:
    assert names() == (STARTER, *sorted(path.stem for path in SHIPPED))


@pytest.mark.parametrize("text", [b"run a { model = \xff }\n", b"run a {\n", b"run a { b = = 1 }\n"])
def test_mistakes_in_inlined_files_are_reported_at_their_place(text: bytes) -> None:
    Path("part.dsc").write_bytes(text)
    Path("whole.dsc").write_bytes(b'import "part.dsc"\n')
    with pytest.raises(SpecError, match=r"error\[E\d{4}\]: (.|\n)*part\.dsc:1"):
        inline_imports(Path("whole.dsc"))


def test_a_text_is_inlined_once() -> None:
    Path("last.dsc").write_text("cluster c { }\n", "utf-8")
    Path("part.dsc").write_text('# of the model\nimport "last.dsc"\nmodel m { }\n', "utf-8")
    Path("whole.dsc").write_text('import "part.dsc"\nimport "last.dsc"\n\nrun r { }\n', "utf-8")
    text = inline_imports(Path("whole.dsc"))
    assert " ".join(text.split()) == "# of the model cluster c { } model m { } run r { }"


def test_the_starter_is_formatted_and_names_its_file() -> None:
    assert main(["init", "my-run 2.dsc"]) == 0
    text = Path("my-run 2.dsc").read_text("utf-8")
    assert text == format_source(Source("x", text)) and STARTER not in text
    assert runs_in("my-run 2.dsc") == ("my_run_2",)
    for line in text.splitlines():
        if line.startswith("#   dsc "):
            assert " my-run 2.dsc" in line


def test_the_starter_trains() -> None:
    """Two steps, in processes. The whole run takes less than a minute on two cores."""
    assert main(["init", "tiny.dsc"]) == 0
    done = forks.run("compiler.cli.main", ["train", "tiny.dsc", "--steps", "2"], Path.cwd())
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert Path("runs/tiny/report.html").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_spec_is_a_template_in_one_file(path: Path) -> None:
    assert path.stem in names()
    assert main(["init", "mine.dsc", "--from", path.stem]) == 0
    text = Path("mine.dsc").read_text("utf-8")
    assert "import" not in [line.split(" ")[0] for line in text.splitlines()]
    assert f"specs/{path.name}" not in text
    for run in runs_in(path):
        assert load("mine.dsc", run) == load(path, run)
    comments = [line for line in path.read_text("utf-8").splitlines() if line.startswith("#") and "dsc " not in line]
    assert set(comments) <= set(text.splitlines())


def test_imports_are_written_once_and_cycles_end(tmp_path: Path) -> None:
    Path("sub").mkdir()
    Path("a.dsc").write_text('import "sub/b.dsc"\nimport "c.dsc"\nrun a { }\n', "utf-8")
    Path("sub/b.dsc").write_text('import "../c.dsc"\nmodel b { }\n', "utf-8")
    Path("c.dsc").write_text('import "sub/b.dsc"\n# of c\nmodel c { }', "utf-8")
    text = inline_imports(Path("a.dsc"))
    assert [text.count(part) for part in ("run a", "model b", "model c", "# of c", "import")] == [1, 1, 1, 1, 0]
    assert text.index("model c") < text.index("model b") < text.index("run a")  # with the values that are read


@pytest.mark.parametrize("text", ["run a { \n", 'import "none.dsc"\nrun a { }\n'])
def test_specs_with_errors_are_not_inlined(text: str) -> None:
    Path("a.dsc").write_text(text, "utf-8")
    Path("b.dsc").write_text('import "a.dsc"\nrun b { }\n', "utf-8")
    for name in ("a.dsc", "b.dsc"):
        with pytest.raises(SpecError):
            inline_imports(Path(name))


def test_existing_files_are_not_overwritten(capsys: Captured) -> None:
    Path("train.dsc").write_text("mine\n", "utf-8")
    Path("link.dsc").symlink_to("elsewhere.dsc")
    Path("folder.dsc").mkdir()
    assert main(["init"]) == 2 and Path("train.dsc").read_text("utf-8") == "mine\n"
    hint = " = hint: --force replaces it; or name another file: dsc init mine.dsc\n"
    assert capsys.readouterr().err == f"error: train.dsc exists\n{hint}"
    for name in ("link.dsc", "folder.dsc"):
        assert main(["init", name]) == 2 and main(["init", name, "--force"]) == 2
        errors = f"error: {name} exists\n{hint}error: {name} is not a regular file\n"
        assert capsys.readouterr().err == errors
    assert not Path("elsewhere.dsc").exists() and list(Path("folder.dsc").iterdir()) == []
    assert main(["init", "--force"]) == 0 and load("train.dsc")
    assert sorted(path.name for path in Path().iterdir()) == ["folder.dsc", "link.dsc", "train.dsc"]


@pytest.mark.parametrize("name", ["notes.txt", "no/such/folder.dsc", "a\0b.dsc", "x" * 300 + ".dsc", ""])
def test_invalid_paths_are_refused(name: str, capsys: Captured) -> None:
    assert main(["init", name]) == 2
    assert capsys.readouterr().err.startswith("error: ") and list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train", "first"),
        ("8gpu", "run_8gpu"),
        ("a b-c", "a_b_c"),
        ("größe", "gr_e"),
        ("___", "first"),
        ("x" * 99, "x" * 40),
    ],
)
def test_names_of_runs(file: str, name: str) -> None:
    assert run_name(Path(f"{file}.dsc")) == name
