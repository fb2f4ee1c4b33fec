"""`dsc check` reports data sources that match no file; `dsc train` refuses them before training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.cli.main import main
from runtime.data import corpus, template_process
from runtime.data.files import DataError
from tests.runtime.data import megatron
from tests.runtime.data.chats import CHATML, UNMARKED, said, write_model, write_rows

ROOT = Path(__file__).parents[3]


def dsc(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "compiler.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def spec(folder: Path, source: str) -> None:
    text = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
    (folder / "mine.dsc").write_text(text.replace("source = python_stdlib", f'source = "{source}"'), "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "deep" / "one.txt").write_text("one", "utf-8")
    (tmp_path / "text" / "two.md").write_text("two", "utf-8")
    (tmp_path / "text" / "bytes.txt").write_bytes(b"\xff")
    (tmp_path / "text" / "link.txt").symlink_to(tmp_path / "text" / "two.md")
    return tmp_path


MATCHES = ["text/**/*.txt", "text/two.md", "text/*", "text", "text/", "python_stdlib"]
NOTHING = ["nowhere/*.txt", "text/*.rst", "text/bytes.txt", "text/link.txt", "text/*/../two.md", "text/**.md"]


@pytest.mark.parametrize("source", [*MATCHES, *NOTHING])
def test_check_warns_exactly_where_training_refuses(source: str, folder: Path) -> None:
    try:
        corpus.find(source, folder)
        refused = ""
    except DataError as error:
        refused = str(error)
    assert corpus.reason_for_no_files(source, folder) == refused and bool(refused) == (source in NOTHING)


def test_the_warning_names_the_source_and_is_not_an_error(folder: Path) -> None:
    spec(folder, "text/*.rst")
    code, stdout, _ = dsc(folder, "check", "mine.dsc")
    assert code == 0 and "mine.dsc: right: run tiny" in stdout
    assert "warning[D0101]: data source 'text/*.rst': no" in stdout and "--> mine.dsc:19:" in stdout
    assert "dsc train --data DIR" in stdout and "cannot be compiled" not in stdout
    code, stdout, _ = dsc(folder, "check", "mine.dsc", "--format", "json")
    document = json.loads(stdout)
    assert (code, document["errors"], document["warnings"]) == (0, 0, 1) and document["specs"][0]["right"]
    assert dsc(folder, "check", "mine.dsc", "--format", "github")[1].startswith("::warning file=mine.dsc,line=19,")
    (folder / "long.txt").write_text("word " * 100, "utf-8")
    spec(folder, "*.txt")
    assert "warning" not in "".join(map(str, dsc(folder, "check", "mine.dsc")))


def test_warns_of_unread_and_too_short_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only `dsc data prepare` also counts files that are not UTF-8, as `dsc check` opens no file."""
    (folder / "text" / ".notes.txt").write_text("hidden", "utf-8")
    for number in range(7):
        (folder / "text" / f"{number}.html").write_text("text", "utf-8")
    spec(folder, "text")
    assert main(["check", str(folder / "mine.dsc")]) == 0
    stdout = capsys.readouterr().out
    names = "1 hidden; {}7 other suffix (.html); 1 symbolic link"
    assert f"warning[D0104]: 9 of 12 files of 'text' are not read: {names.format('')}" in stdout
    assert "cannot be compiled" not in stdout and "D0106" in stdout, "3 bytes are fewer than a sample"
    words = ["--jobs", "1", "--cache", str(folder / "cache"), "--format", "json"]
    words += ["-s", "data.tokenizer=train(257)", "-s", "data.validation=0%", "-s", "train.validate=none"]
    assert main(["data", "prepare", str(folder / "mine.dsc"), *words]) == 0
    listed = names.format("1 not UTF-8; ")
    assert f"data: warning: 10 of 12 files of 'text' are not read: {listed}\n" in capsys.readouterr().err


def test_warns_of_text_shorter_than_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample has 16 tokens and the two after them; a byte is at most one token, and so is the end of a document."""
    spec(folder, "short.txt")
    message = "'short.txt': its files have at most 17 tokens, and a sample takes 18"
    for size, warning in ((16, f"warning[D0106]: {message}"), (17, "")):
        (folder / "short.txt").write_text("a" * size, "utf-8")
        assert main(["check", str(folder / "mine.dsc")]) == 0
        stdout = capsys.readouterr().out
        assert warning in stdout and ("warning" in stdout) == bool(warning)


def test_warns_of_a_file_in_two_sources(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "long.txt").write_text("word " * 100, "utf-8")
    sources = """sources {
      one { files = "*.txt", weight = 1 }, all { files = "**/l*g.txt", weight = 1 }
    }"""
    tiny = (ROOT / "specs/tiny.dsc").read_text("utf-8").replace("source = python_stdlib", sources)
    (folder / "mine.dsc").write_text(tiny, "utf-8")
    assert main(["check", str(folder / "mine.dsc")]) == 0
    stdout = capsys.readouterr().out
    assert "warning[D0105]: files in several sources of the blend: 1, such as " in stdout
    assert "long.txt in one and all" in stdout and stdout.count("warning") == 1


def test_token_ids_that_would_be_filtered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron.write(folder / "ids", [[[1, 2, 0] * 40], [[3, 0]]])
    (folder / "long.txt").write_text("word " * 100, "utf-8")
    tiny = (ROOT / "specs/tiny.dsc").read_text("utf-8")
    single_source = 'source = "ids", filters { shortest = 9 }'
    blend = """sources {
      ids { files = "ids", weight = 1 }, text { files = "long.txt", weight = 1 }
    }
    filters { shortest = 9 }"""
    for source, hint, line in (
        (single_source, "remove `filters`", 19),
        (blend, "write `filters { }` in this source", 20),
    ):
        (folder / "mine.dsc").write_text(tiny.replace("source = python_stdlib", source), "utf-8")
        assert main(["check", str(folder / "mine.dsc")]) == 0
        stdout = capsys.readouterr().out
        assert "warning[D0103]: 'ids' has token ids, which have no text to filter" in stdout
        assert f"mine.dsc:{line}:" in stdout and hint in stdout
    no_filters = blend.replace('files = "ids",', 'files = "ids", filters { },')
    for source in (no_filters, 'source = "ids"', 'source = "ids", filters { }'):
        (folder / "mine.dsc").write_text(tiny.replace("source = python_stdlib", source), "utf-8")
        assert main(["check", str(folder / "mine.dsc")]) == 0
        assert "warning" not in capsys.readouterr().out


CHAT_ROWS = {
    "messages": {"messages": [said("user", "a"), said("assistant", "b")]},
    "prompt": {"prompt": [said("user", "a")], "completion": [said("assistant", "b")]},
    "texts": {"prompt": "a", "completion": "b"},
}


@pytest.mark.parametrize(
    ("template", "row", "warning"),
    [
        (CHATML, "messages", ""),
        (UNMARKED, "messages", "the chat template does not mark what the assistant says"),
        (UNMARKED, "prompt", ""),
        (None, "prompt", "there is no chat template"),
        (None, "texts", ""),
        ("{% for %}", "messages", "chat_template.jinja: not a chat template, line 1"),
        ("{{ 9 ** (9 ** 9) }}", "messages", "chat_template.jinja: not a chat template: it takes more than 1 s"),
    ],
)
def test_a_template_that_training_would_refuse_is_a_warning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    row: str,
    warning: str,
) -> None:
    if "takes more" in warning:
        monkeypatch.setattr(template_process, "COMPILE_S", 1.0)
    write_model(tmp_path / "model", template)
    write_rows(tmp_path / "rows.jsonl", [CHAT_ROWS[row]])
    text = (ROOT / "specs" / "tiny.dsc").read_text("utf-8")
    before, _, after = text.partition("  data {")
    data = '  data { source = "rows.jsonl", tokenizer = "model/tokenizer.json", validation = 5%, chat { } }'
    path = tmp_path / "mine.dsc"
    path.write_text(before + data + after.partition("}")[2], "utf-8")
    assert main(["check", str(path)]) == 0
    stdout = capsys.readouterr().out
    assert ("warning[D0102]" in stdout) == bool(warning) and warning in stdout
    place = f"mine.dsc:{before.count(chr(10)) + 1}:"
    assert not warning or place in stdout
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert main(["check", str(path)]) == 0
    assert "D0102" not in capsys.readouterr().out, "it may be elsewhere"


def test_files_that_vanish_while_they_are_looked_at_are_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec(folder, "text/**/*.txt")

    def vanished(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/7/a.txt")

    monkeypatch.setattr(corpus, "find_by_name", vanished)
    assert main(["check", str(folder / "mine.dsc")]) == 0
    assert "/proc/7/a.txt" in capsys.readouterr().out


def test_train_reports_an_unmatched_source_as_an_error(folder: Path) -> None:
    spec(folder, "text/*.rst")
    code, _, stderr = dsc(folder, "train", "mine.dsc")
    assert code == 2 and "error: data source 'text/*.rst'" in stderr and not (folder / "runs").exists()


def test_the_language_server_does_not_look_for_text(folder: Path) -> None:
    """The folder may be on a network drive, so diagnostics while typing do not depend on it."""
    code = "import sys, compiler.tools.editor.server; sys.exit('runtime.data.corpus' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_code_is_explained() -> None:
    code, stdout, _ = dsc(ROOT, "explain", "D0101")
    assert code == 0 and "--data" in stdout
