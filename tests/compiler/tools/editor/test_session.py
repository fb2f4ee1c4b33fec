"""Sessions of an editor with `dsc lsp` in a process of its own, over stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp

from compiler.tools.editor.server import guard_handler
from dsl import load
from dsl.messages.diagnostics import Source
from dsl.text.formatter import format_source
from tests import copies, progress
from tests.compiler.tools.editor.client import CAPABILITIES, Editor, applied
from tests.compiler.tools.editor.texts import QUICKSTART, ROOT

SPEC = "quickstart.dsc"


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    copies.copytree(ROOT / "specs", tmp_path / "specs")
    with Editor(tmp_path / "specs") as client:
        yield client


def edits_of(action: dict[str, Any]) -> list[dict[str, Any]]:
    (change,) = action["edit"]["documentChanges"]
    return list(change["edits"])


def here(editor: Editor, name: str, text: str, marked: str) -> dict[str, Any]:
    """The parameters of a request for code actions."""
    params = editor.at(name, text, marked)
    place = {"start": params["position"], "end": params["position"]}
    return {"textDocument": params["textDocument"], "range": place, "context": {"diagnostics": []}}


def test_a_session(editor: Editor) -> None:
    """Errors appear, quick fixes remove them, and the other features answer in between."""
    assert editor.answer["capabilities"]["positionEncoding"] == "utf-16"
    bad = QUICKSTART.replace("pipeline = 2", "pipelin = 2").replace("hidden = 192", "hidden = 0")
    editor.open(SPEC, bad)
    spelling, bounds = editor.codes(SPEC, ["E0201", "E0303"])
    assert "did you mean `pipeline`?" in spelling["message"] and spelling["severity"] == 1
    line = next(i for i, text_line in enumerate(bad.split("\n")) if "pipelin =" in text_line)
    assert spelling["range"] == {"start": {"line": line, "character": 4}, "end": {"line": line, "character": 11}}
    assert (bounds["code"], bounds["source"]) == ("E0303", "dsc")

    (action,) = editor.request("textDocument/codeAction", here(editor, SPEC, bad, "pip|elin = 2"))
    assert action["isPreferred"] and action["diagnostics"] == [spelling]
    better = applied(bad, edits_of(action))
    assert better == bad.replace("pipelin = 2", "pipeline = 2")
    editor.change(SPEC, better)
    editor.codes(SPEC, ["E0303"])
    editor.change(SPEC, QUICKSTART)
    editor.codes(SPEC, [])

    tooltip = editor.request("textDocument/hover", editor.at(SPEC, QUICKSTART, "data     = au|to"))
    assert "= 2" in tooltip["contents"]["value"] and tooltip["contents"]["kind"] == "markdown"
    target = editor.request("textDocument/definition", editor.at(SPEC, QUICKSTART, "model     = qu|ick"))
    defined = QUICKSTART.split("\n").index("model quick {")
    assert target["uri"] == editor.uri(SPEC) and target["range"]["start"] == {"line": defined, "character": 6}
    references = editor.request(
        "textDocument/references",
        {**editor.at(SPEC, QUICKSTART, "model     = qu|ick"), "context": {"includeDeclaration": False}},
    )
    assert [reference["range"]["start"]["line"] for reference in references] == [8]
    outline = editor.request("textDocument/documentSymbol", {"textDocument": {"uri": editor.uri(SPEC)}})
    assert [entry["name"] for entry in outline] == ["run quickstart", "model quick", "cluster laptop"]
    assert editor.logged == []
    assert editor.stop() == 0
    assert editor.process.stderr is not None and editor.process.stderr.read() == b""


def proposals(editor: Editor, text: str, marked: str) -> list[dict[str, Any]]:
    result = editor.request("textDocument/completion", editor.at(SPEC, text, marked))
    assert [item["sortText"] for item in result["items"]] == sorted(item["sortText"] for item in result["items"])
    return list(result["items"])


def test_completion_while_typing(editor: Editor) -> None:
    """Keys, kinds, names, units and files, in a text cut off at the cursor."""
    editor.open(SPEC, "")
    head = 'import "models/deepseek-v3.dsc"\nimport "clus"\nrun a {\n  model = deep\n'
    typed = head + "  parallel { pipeline = 2, ex"
    editor.change(SPEC, typed)
    proposed = proposals(editor, typed, "pipeline = 2, ex|")
    keys = [
        "expert",
        "expert_tensor",
        "data",
        "tensor",
        "context",
        "layout",
        "placement",
        "route",
        "zero",
        "shard",
        "overlap_reduce",
    ]
    assert [item["label"] for item in proposed] == keys
    assert applied(typed, [proposed[0]["textEdit"]]) == head + "  parallel { pipeline = 2, expert = ${1:64}"
    assert proposed[0]["insertTextFormat"] == 2 and "experts" in proposed[0]["documentation"]["value"]
    names = proposals(editor, typed, "model = deep|")
    assert {"deepseek_v3", "deepseek_v3_mini"} <= {item["label"] for item in names}
    files = [item["label"] for item in proposals(editor, typed, '"clus|"')]
    assert '"clusters/"' in files and '"deepseek-v3.dsc"' in files and f'"{SPEC}"' not in files
    assert editor.stop() == 0


def test_columns_are_utf_16(editor: Editor) -> None:
    """A 😀 counts as two columns, in requests and in answers."""
    text = QUICKSTART.replace("hidden = 192", "hidden = 1024 * 0") + '\nlet a = "😀", let b = 10 * 2'
    text = text.replace("vocab = 4096, hidden", 'let x = "😀😀", vocab = 4096, hidden')
    editor.open(SPEC, text)
    (mistake,) = editor.codes(SPEC, ["E0303"])
    line = next(text_line for text_line in text.split("\n") if "hidden = 1024" in text_line)
    start = line.index("1024 * 0") + 2
    assert mistake["range"]["start"]["character"] == start
    tooltip = editor.request("textDocument/hover", editor.at(SPEC, text, "hid|den = 1024"))
    assert tooltip["range"]["start"]["character"] == line.index("hidden") + 2
    assert editor.stop() == 0


def test_another_encoding_is_agreed_on(tmp_path: Path) -> None:
    (tmp_path / SPEC).write_text("", "utf-8")
    with Editor(tmp_path, {**CAPABILITIES, "general": {"positionEncodings": ["utf-8"]}}) as editor:
        assert editor.answer["capabilities"]["positionEncoding"] == "utf-8"
        editor.open(SPEC, 'let x = "é", vocab = 4\n')
        _, mistake = editor.codes(SPEC, ["E0404", "E0204"])
        assert mistake["range"]["start"]["character"] == len(b'let x = "\xc3\xa9", ')


def test_an_unsaved_import_shows_in_its_importer(editor: Editor) -> None:
    """Errors and definitions in an importing file follow the unsaved text; closing it restores the file on disk."""
    importer, library = "deepseek-v3.dsc", "models/deepseek-v3.dsc"
    text, model = ((editor.folder / name).read_text("utf-8") for name in (importer, library))
    editor.open(importer)
    editor.codes(importer, [])
    target = editor.request("textDocument/definition", editor.at(importer, text, "= deep|seek_v3"))
    assert target["uri"] == editor.uri(library)
    editor.open(library)
    renamed = model.replace("model deepseek_v3 {", "model deepseek_v4 {").replace(
        "extends deepseek_v3 ", "extends deepseek_v4 "
    )
    editor.change(library, renamed)
    (unknown,) = editor.codes(importer, ["E0401"])
    assert "deepseek_v3" in unknown["message"]
    broken = re.sub(r"heads( +)= 128", r"heads\1= 128GB", model)
    editor.change(library, broken)
    editor.codes(importer, [])
    (unit,) = editor.codes(library, ["E0301"])
    assert "128GB" in broken.split("\n")[unit["range"]["start"]["line"]]
    editor.close(library)
    editor.codes(library, [])
    editor.codes(importer, [])
    assert editor.stop() == 0


def test_a_mistake_in_an_unopened_file_is_reported_there(editor: Editor) -> None:
    library = "models/deepseek-v3.dsc"
    path = editor.folder / library
    good = path.read_text("utf-8")
    path.write_text(re.sub(r"heads( +)= 128", r"heads\1= 70_000", good), "utf-8")
    editor.open("deepseek-v3.dsc")
    editor.codes(library, ["E0303"])
    path.write_text(good, "utf-8")
    editor.notify("workspace/didChangeWatchedFiles", {"changes": [{"uri": editor.uri(library), "type": 2}]})
    editor.codes(library, [])


def test_notes_lead_to_the_other_place(editor: Editor) -> None:
    text = QUICKSTART.replace("    seed       = 1\n", "    seed       = 1\n    seed       = 2\n")
    editor.open(SPEC, text)
    (duplicate,) = editor.codes(SPEC, ["E0202"])
    (related,) = duplicate["relatedInformation"]
    first = next(i for i, line in enumerate(text.split("\n")) if "seed" in line)
    assert related["location"]["uri"] == editor.uri(SPEC)
    assert related["location"]["range"]["start"]["line"] == first


def test_formatting_equals_that_of_fmt(editor: Editor) -> None:
    ugly = QUICKSTART.replace("  parallel {", "     parallel   {").replace("batch       = 16", "batch=16  ") + "\n\n\n"
    editor.open(SPEC, ugly)
    options = {"options": {"tabSize": 8, "insertSpaces": False}}
    params = {"textDocument": {"uri": editor.uri(SPEC)}, **options}
    edits = editor.request("textDocument/formatting", params)
    wanted = format_source(Source(SPEC, ugly))
    assert applied(ugly, edits) == wanted != ugly
    spec = editor.folder / "ugly.dsc"
    spec.write_text(ugly, "utf-8")
    command = [sys.executable, "-m", "compiler.cli.main", "fmt", str(spec)]
    assert progress.run(command, ROOT).returncode == 0
    assert spec.read_text("utf-8") == wanted
    editor.change(SPEC, wanted)
    assert editor.request("textDocument/formatting", params) == []
    editor.change(SPEC, wanted + "}")
    assert editor.request("textDocument/formatting", params) is None


def test_hostile_documents_leave_the_server_alive(editor: Editor) -> None:
    """Bombs, broken characters and missing positions are answered, and so is the next request."""
    bombs = [
        "{" * 5000,
        "[" * 5000,
        "x = " + "9" * 5000,
        "\0",
        "\ud800 = 1",
        "a " * 50_000,
        "import " * 100,
        "# 😀" * 9,
    ]
    editor.open(SPEC, "")
    for bomb in bombs:
        editor.change(SPEC, bomb)
        params = {"textDocument": {"uri": editor.uri(SPEC)}, "position": {"line": 10**6, "character": 10**6}}
        for method in ("completion", "hover", "definition"):
            editor.request(f"textDocument/{method}", params)
        editor.request("textDocument/documentSymbol", params)
    editor.notify("textDocument/nothing", {"what": 1})
    editor.change(SPEC, 'import "/etc/passwd"\nimport "../../../x.txt"\n')
    editor.codes(SPEC, ["E0503", "E0503"])
    editor.change(SPEC, QUICKSTART)
    editor.codes(SPEC, [])
    assert editor.logged == []
    assert editor.stop() == 0


BAD_URIS = [
    "file:///tmp/%00x.dsc", "file://[x", "file:///tmp/\ud800.dsc", "untitled:\0", "file:///%ff%fe.dsc", "", "http://x/y",
    "file:///" + "a" * 5000 + ".dsc",
]  # fmt: skip


def test_documents_with_invalid_paths_do_not_affect_others(editor: Editor) -> None:
    text = 'import "a\0.dsc"\nimport "\ud800.dsc"\nrun a { '
    for uri in BAD_URIS:
        document = {"uri": uri, "languageId": "dsc", "version": 1, "text": text}
        editor.notify("textDocument/didOpen", {"textDocument": document})
    editor.open(SPEC, QUICKSTART.replace("zero     = 0", "zero = 7"))
    editor.codes(SPEC, ["E0303"])
    for uri in BAD_URIS:
        params = {"textDocument": {"uri": uri}, "position": {"line": 2, "character": 5}}
        editor.request("textDocument/hover", params)
        editor.notify("textDocument/didClose", {"textDocument": {"uri": uri}})
    editor.change(SPEC, QUICKSTART)
    editor.codes(SPEC, [])
    assert editor.logged == []
    assert editor.stop() == 0


def test_documents_without_a_file(editor: Editor) -> None:
    uri = "untitled:Untitled-1"
    document = {"uri": uri, "languageId": "dsc", "version": 1, "text": QUICKSTART.replace("zero     = 0", "zero = 7")}
    editor.versions[uri] = 1
    editor.notify("textDocument/didOpen", {"textDocument": document})
    while not editor.diagnostics.get(uri):
        editor._until(lambda message: "method" in message)
    assert [item["code"] for item in editor.diagnostics[uri]] == ["E0303"]
    assert editor.stop() == 0


def test_diagnostics_equal_those_of_check(editor: Editor) -> None:
    """Every bad spec of tests/ui in the editor."""
    copies.copytree(ROOT / "tests/ui", editor.folder / "ui")
    for path in sorted((editor.folder / "ui").glob("*.dsc"))[::4]:
        analysis = load.analyse(str(path))
        messages = analysis.diagnostics or load.refusals(analysis)
        expected = [item for item in messages if item.span is None or item.span.source.name == str(path)]
        name = f"ui/{path.name}"
        editor.open(name)
        codes = [item.code for item in expected]
        assert {item["code"] for item in editor.codes(name, codes)} == set(codes)
        editor.close(name)


def test_an_editor_that_leaves_takes_the_server_with_it(editor: Editor) -> None:
    editor.stdin.close()
    assert progress.end(editor.process) == 0


def test_exit_without_shutdown_is_a_failure(editor: Editor) -> None:
    editor.notify("exit", None)
    assert progress.end(editor.process) == 1


def test_an_error_in_a_feature_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    messages: list[lsp.LogMessageParams] = []

    class Server:
        def window_log_message(self, params: lsp.LogMessageParams) -> None:
            messages.append(params)

    async def hover(params: int) -> int:
        return 1 // params

    safe = guard_handler(Server(), hover)  # type: ignore[arg-type]
    assert asyncio.run(safe(1)) == 1
    assert asyncio.run(safe(0)) is None
    assert "hover failed: ZeroDivisionError" in messages[0].message and "hover failed" in caplog.text


def test_without_pygls_reports_what_to_install() -> None:
    code = (
        "import sys, importlib.util; real = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'pygls' else real(name, *rest);"
        "from compiler.cli.main import main; sys.exit(main(['lsp']))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install 'dsc-trainer[lsp]'" in result.stderr


def test_the_server_needs_no_torch() -> None:
    code = (
        "import sys, compiler.tools.editor.server;"
        "print([n for n in ('torch', 'networkx', 'numpy') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.replace("'", '"')) == []
