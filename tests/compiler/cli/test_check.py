"""`dsc check`: several files, every format, exit codes, and words corrected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cli.commands.check import annotation
from compiler.cli.main import main
from dsl.load import check
from dsl.messages.diagnostics import Diagnostic, Note, Source, Span
from tests.compiler.cli.forms import FORMS, faults, parsed

ROOT = Path(__file__).parents[3]
TINY = ROOT / "specs" / "tiny.dsc"
UI = ROOT / "tests" / "ui"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.dsc").write_bytes(TINY.read_bytes())
    (tmp_path / "wrong.dsc").write_text(TINY.read_text("utf-8").replace("steps ", "stpes "), "utf-8")
    return tmp_path


def test_a_valid_spec_prints_what_was_checked(folder: Path, capsys: Captured) -> None:
    assert main(["check", "right.dsc"]) == 0
    stdout, stderr = capsys.readouterr()
    counts = r"[\d.]+K parameters, [\d.]+K active, [\d.]+K more of MTP"
    assert re.fullmatch(rf"right\.dsc: right: run tiny; model tiny with {counts}\n", stdout)
    assert stderr == ""


def test_a_library_names_its_models(capsys: Captured) -> None:
    assert main(["check", str(ROOT / "specs" / "models" / "deepseek-v3.dsc"), "--format", "json"]) == 0
    (spec,) = parsed(capsys.readouterr().out, "check")["specs"]
    assert spec["runs"] == [] and spec["right"]
    assert {"name": "deepseek_v3", "parameters": 671_026_419_200}.items() <= spec["models"][0].items()


def test_a_run_may_start_from_an_untrained_run_of_the_same_file(folder: Path, capsys: Captured) -> None:
    """It can be checked before that one is trained. Once there is a folder, it must have its weights."""
    spec, run_template = folder / "right.dsc", 'run more extends tiny {{ train {{ initial = "runs/{}" }} }}\n'
    text = TINY.read_text("utf-8")
    spec.write_text(text + run_template.format("other"), "utf-8")
    assert main(["check", "right.dsc"]) == 2
    assert "error[W0101]: there is no folder runs/other" in capsys.readouterr().err
    spec.write_text(text + run_template.format("tiny"), "utf-8")
    assert main(["check", "right.dsc"]) == 0
    assert "right.dsc: right: runs tiny, more;" in capsys.readouterr().out
    assert main(["compile", "right.dsc:more"]) == 2
    stderr = capsys.readouterr().err
    assert "error[W0101]: there is no folder runs/tiny yet\n" in stderr
    assert " = hint: train run `tiny` of this file first\n" in stderr
    (folder / "runs" / "tiny").mkdir(parents=True)
    assert main(["check", "right.dsc"]) == 2
    assert "error[W0101]: " in capsys.readouterr().err


def test_several_files_are_counted(folder: Path, capsys: Captured) -> None:
    assert main(["check", "right.dsc", "wrong.dsc", "right.dsc"]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith("right.dsc: right") and stdout.count("\n") == 1
    assert "did you mean `steps`?" in stderr and stderr.endswith("\n1 error in 1 of 2 specs\n")


def test_the_default_is_the_spec_of_the_folder(folder: Path, capsys: Captured) -> None:
    assert main(["check", "--format", "json"]) == 2  # there are two
    document = parsed(capsys.readouterr().out, "check")
    assert document["specs"] == [] and document["diagnostics"][0]["code"] == "E0404"
    (folder / "wrong.dsc").unlink()
    assert main(["check", "--format", "json"]) == 0
    assert [spec["spec"] for spec in parsed(capsys.readouterr().out, "check")["specs"]] == ["right.dsc"]


def test_a_mistake_in_an_import_is_reported_once(folder: Path, capsys: Captured) -> None:
    (folder / "lib.dsc").write_text("model broken { vocab = 64, hiden = 8 }\n", "utf-8")
    for name in ("a", "b"):
        (folder / f"{name}.dsc").write_text('import "lib.dsc"\nrun a { }\n', "utf-8")
    (folder / "c.dsc").write_text('import "lib.dsc"\nmodel child extends broken { }\n', "utf-8")
    (folder / "d.dsc").write_text('import "lib.dsc"\nmodel child extends broken { }\n', "utf-8")
    assert main(["check", "c.dsc", "d.dsc", "--format", "json"]) == 2
    items = parsed(capsys.readouterr().out, "check")["diagnostics"]
    assert [item["message"] for item in items].count("`model child` has no key `hiden`") <= 1
    assert sum(item["file"] == "lib.dsc" and item["code"] == "E0201" for item in items) == 1


@pytest.mark.parametrize("path", sorted(UI.glob("*.dsc")), ids=lambda path: path.stem)
def test_every_message_has_the_form_of_the_page(path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(UI)
    first = path.read_bytes().split(b"\n")[0].decode(errors="replace")
    overrides = first.removeprefix("# -s ").split(" -s ") if first.startswith("# -s ") else []
    arguments = [part for text in overrides for part in ("-s", text)]
    code = main(["check", path.name, *arguments, "--format", "json"])
    document = parsed(capsys.readouterr().out, "check")
    assert code == (2 if document["errors"] else 0)
    assert document["errors"] + document["warnings"] == len(document["diagnostics"])
    if document["errors"]:
        expected = check(path.name, overrides=overrides)
        assert [item["message"] for item in document["diagnostics"]] == [item.message for item in expected]
    for item in document["diagnostics"]:
        if item["file"] and item["file"] != "-s":
            lines = Path(item["file"]).read_text("utf-8-sig").split("\n")
            assert 1 <= item["line"] <= item["end_line"] <= len(lines)
            assert 1 <= item["column"] <= len(lines[item["line"] - 1]) + 1


def test_the_form_of_messages_detects_faults() -> None:
    """The form checker itself refuses wrong documents."""
    good = {"file": "a", "line": 1, "column": 1, "end_line": 1, "end_column": 2, "text": ""}
    assert faults(good, FORMS["edit"]) == []
    assert faults(good | {"line": "1"}, FORMS["edit"]) == ["$.line: '1' is no int"]
    assert faults(good | {"line": True}, FORMS["edit"]) == ["$.line: True is no int"]
    assert faults(good | {"more": 1}, FORMS["edit"]) == ["$: more is not described"]
    assert faults([{"file": "a"}], ["place"]) != []


def test_limits_of_training_are_reported_as_warnings(capsys: Captured) -> None:
    spec = str(ROOT / "specs" / "deepseek-v3.dsc")
    assert main(["check", spec, "--format", "json"]) == 0
    document = parsed(capsys.readouterr().out, "check")
    assert document["errors"] == 0 and {item["severity"] for item in document["diagnostics"]} == {"warning"}
    assert main(["check", spec, "--format", "github"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == document["warnings"] and all(line.startswith("::warning file=") for line in lines)


# ---------------------------------------------------------------- github


def test_annotations_read_back(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The CI runner parses the intended properties and text from each line."""
    monkeypatch.chdir(UI)
    assert main(["check", "several.dsc", "--format", "github"]) == 2
    lines = capsys.readouterr().out.splitlines()
    expected = check("several.dsc")
    assert len(lines) == len(expected) > 3
    for line, item in zip(lines, expected, strict=True):
        level, properties, text = _read(line)
        assert level == "error" and item.span is not None
        assert properties["file"] == "several.dsc" and properties["title"] == item.code
        assert (int(properties["line"]), int(properties["col"])) == (item.span.line, item.span.column)
        assert int(properties["endColumn"]) - int(properties["col"]) == item.span.end - item.span.start
        assert text.split("\n")[0] == item.message
        assert not item.hint or f"\nhint: {item.hint.splitlines()[0]}" in text


def test_hostile_text_stays_in_its_annotation() -> None:
    source = Source("a,b:c%0A\n::error::x.dsc", "one\ntwo\n")
    item = Diagnostic("E0201", "50%\r\n::stop-commands::x\x1b[31m", Span(source, 0, 7), "a, b: 5%", (Note("n"),))
    text = annotation(item)
    assert "\n" not in text and "\r" not in text and "\x1b" not in text
    _, properties, message = _read(text)
    assert properties == {"file": source.name, "line": "1", "endLine": "2", "title": "E0201"}  # no columns: two lines
    assert message.startswith("50%") and message.endswith("\nhint: a, b: 5%\nnote: n")
    assert annotation(Diagnostic("E0404", "no spec")) == "::error title=E0404::no spec"


def _read(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner parses it (actions/runner, ActionCommand.cs)."""
    match = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line)
    assert match, line
    escapes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}

    def unescaped(text: str, codes: tuple[str, ...]) -> str:
        return re.sub("|".join(codes), lambda escape: escapes[escape[0]], text)

    pairs = (part.split("=", 1) for part in match[2].split(","))
    properties = {key: unescaped(value, tuple(escapes)) for key, value in pairs}
    return match[1], properties, unescaped(match[3], ("%0D", "%0A", "%25"))


def test_a_workflow_does_not_change_the_default(folder: Path) -> None:
    def out(**environment: str) -> tuple[str, str]:
        done = subprocess.run(
            (sys.executable, "-m", "compiler.cli.main", "check", str(folder / "wrong.dsc")),
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        return done.stdout, done.stderr

    assert out(GITHUB_ACTIONS="true") == out(GITHUB_ACTIONS="") == ("", out(NO_COLOR="1")[1])


# ---------------------------------------------------------------- names and colours


def test_a_name_cannot_write_on_the_terminal(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a\x1b[31m\u202e.dsc"
    path.write_bytes(TINY.read_bytes())
    assert main(["check", str(path)]) == 0
    path.write_text("run a { }\nrun a {", "utf-8")
    assert main(["check", str(path)]) == 2
    stdout, stderr = capsys.readouterr()
    assert not {"\x1b", "\u202e"} & set(stdout + stderr)


def test_colours_are_for_terminals(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["check", "wrong.dsc"])
    plain = capsys.readouterr().err
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["check", "wrong.dsc"])
    coloured = capsys.readouterr().err
    assert "\x1b[1;31merror[E0201]\x1b[0m: " in coloured and re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    main(["check", "wrong.dsc"])
    assert capsys.readouterr().err == plain


# ---------------------------------------------------------------- --fix


def test_fix_changes_only_misspelt_words(folder: Path, capsys: Captured) -> None:
    wrong = folder / "wrong.dsc"
    text = wrong.read_text("utf-8").replace("parallel {", "paralel {").replace("\n", "\r\n")
    wrong.write_bytes(b"\xef\xbb\xbf" + text.encode())
    wrong.chmod(0o640)
    assert main(["check", "wrong.dsc", "--fix"]) == 0
    expected = text.replace("paralel", "parallel").replace("stpes", "steps")
    assert wrong.read_bytes() == b"\xef\xbb\xbf" + expected.encode()
    assert wrong.stat().st_mode & 0o777 == 0o640
    err = capsys.readouterr().err
    assert err.count("fixed wrong.dsc:") == 2 and "`stpes` → `steps`" in err


def test_fix_leaves_unknown_words_and_unnamed_files(folder: Path, capsys: Captured) -> None:
    (folder / "lib.dsc").write_text("model broken { vocab = 64, hiden = 8 }\n", "utf-8")
    text = 'import "lib.dsc"\nmodel child extends broken { learning = 3, vocb = 4 }\n'
    (folder / "a.dsc").write_text(text, "utf-8")
    assert main(["check", "a.dsc", "--fix"]) == 2
    assert (folder / "lib.dsc").read_text("utf-8") == "model broken { vocab = 64, hiden = 8 }\n"
    assert (folder / "a.dsc").read_text("utf-8").count("learning = 3") == 1


def test_fix_makes_no_edit_that_causes_another_mistake(folder: Path, capsys: Captured) -> None:
    """Corrections are safe: no duplicate key, no change of architecture, no guess between two words."""
    lines = {
        "train { batch = 8, micro_batch = 2, global_batch = 16 }": None,
        "train { micro_batch = 2, global_batch_size = 16 }": "train { micro_batch = 2, batch = 16 }",
        "train { optimizer adamw { betas = [0.9, 0.95] } }": None,
        "train { optimizer adamw { beta = 0.95 } }": None,
        "train { optimizer adam { } }": None,
        "train { lr = 1e-4 }": None,
        "parallel { pipelin = x }": None,
        "recompute = [], recomput = rmsnorm": None,
        "schedul { nam = dualpip }": "schedule { nam = dualpip }",
        "parallel { pipelin = 1, expret = 1 }": "parallel { pipeline = 1, expert = 1 }",
    }
    for line, wanted in lines.items():
        text = 'import "right.dsc"\nrun a extends tiny {\n  LINE\n}\n'
        (folder / "a.dsc").write_text(text.replace("LINE", line), "utf-8")
        main(["check", "a.dsc", "--fix"])
        assert (folder / "a.dsc").read_text("utf-8") == text.replace("LINE", wanted or line), line
    model = 'import "right.dsc"\nmodel a extends tiny { attention mha { heads = 4, kv_heads = 4 } }\n'
    (folder / "a.dsc").write_text(model, "utf-8")
    assert main(["check", "a.dsc", "--fix"]) == 2
    assert (folder / "a.dsc").read_text("utf-8") == model
    assert "fixed" not in capsys.readouterr().err.splitlines()[-1]


def test_fix_corrects_a_word_whose_value_breaks_a_rule(folder: Path) -> None:
    """The word is corrected first; then a message reports that its value conflicts with others."""
    (folder / "a.dsc").write_text('import "right.dsc"\nrun a extends tiny { parallel { expret = 7 } }\n', "utf-8")
    assert main(["check", "a.dsc", "--fix"]) == 2
    assert "expert = 7" in (folder / "a.dsc").read_text("utf-8")


def test_fix_of_a_link_is_refused(folder: Path, capsys: Captured) -> None:
    (folder / "link.dsc").symlink_to("wrong.dsc")
    before = (folder / "wrong.dsc").read_bytes()
    assert main(["check", "link.dsc", "--fix"]) == 2
    assert (folder / "wrong.dsc").read_bytes() == before and (folder / "link.dsc").is_symlink()
    assert "error: link.dsc" in capsys.readouterr().err


def test_fix_handles_different_paths_of_one_file(folder: Path) -> None:
    (folder / "d").mkdir()
    text = 'import "../right.dsc"\nrun mine extends tiny { parallel { pipelin = 1 } }\n'
    (folder / "d" / "x.dsc").write_text(text, "utf-8")
    assert main(["check", "d/../d/x.dsc", "./d//x.dsc", str(folder / "d" / "x.dsc"), "--fix"]) == 0
    assert (folder / "d" / "x.dsc").read_text("utf-8") == text.replace("pipelin ", "pipeline ")


@pytest.mark.parametrize("command", [["check", "--fix"], ["fmt"]])
def test_read_only_and_hard_linked_files_are_not_replaced(command: list[str], folder: Path, capsys: Captured) -> None:
    """Read-only files and files with several hard links stay unchanged, and so do the files next to them."""
    wrong, linked = folder / "wrong.dsc", folder / "linked.dsc"
    linked.write_bytes(wrong.read_bytes().replace(b"  ", b"   ") + b"\n\n")
    wrong.write_bytes(linked.read_bytes())
    wrong.chmod(0o444)
    (folder / "other.dsc").hardlink_to(linked)
    before = {path: (path.read_bytes(), path.stat().st_ino, path.stat().st_mode) for path in folder.glob("*.dsc")}
    for name, why in (
        ("wrong.dsc", "it is read-only"),
        ("linked.dsc", "it has 2 hard links; the others would keep the old content"),
    ):
        assert main([command[0], name, *command[1:]]) == 2
        assert f"{name} cannot be written: {why}" in capsys.readouterr().err
    if command == ["fmt"]:
        (folder / "beside.dsc").write_text("let  a=1\n", "utf-8")
        before[folder / "beside.dsc"] = (b"let  a=1\n", *(folder / "beside.dsc").stat()[1::-1])
        assert main(["fmt", "."]) == 2
    after = {path: (path.read_bytes(), path.stat().st_ino, path.stat().st_mode) for path in folder.glob("*.dsc")}
    assert after == before
