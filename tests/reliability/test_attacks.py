"""Code, paths and escapes in files from others: they stay text or are refused. A canary would show code
that ran, and an audit hook its other effects."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.load import load
from dsl.messages.diagnostics import SpecError, render_all
from runtime.build.files import BuildError, read
from tests import copies
from tests.runtime.run.place import ONE_RANK, spec_text
from tests.watched import watch

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "tests" / "golden" / "tiny"
CANARY = "canary_that_sings"
CODE = f"__import__('pathlib').Path('{CANARY}').touch()"
PAYLOADS = {
    "code": CODE,
    "code in quotes": f'"{CODE}"',
    "end of a string": f'x"; {CODE}; y="',
    "end of a docstring": f'""" \n{CODE}\n"""',
    "a line more": f"x\n{CODE}\n",
    "template": "{{ " + CODE + " }}",
    "statement of a template": "{% set x = " + CODE + " %}",
    "line of a template": f"#% set x = {CODE}",
    "format": "{0.__class__.__mro__}",
    "name of a class": "__class__",
    "keyword": "import",
    "shell": f"$(touch {CANARY})`touch {CANARY}`",
    "script": f"</script><script>{CANARY}</script>",
    "escape": "\x1b]0;owned\x07\x1b[2J",
    "NUL": "x\x00y",
    "turned": "\u202egpj.\u202c",
    "folded": "\uff29\uff2d\uff30\uff2f\uff32\uff34",
    "path": "../../../../etc/passwd",
    "absolute path": "/etc/passwd",
}
SLOTS = {  # where the text is written, in a spec that is otherwise right
    "run": ("run tiny", "run {}"),
    "model": ("tiny", "{}"),
    "cluster": ("here", "{}"),
    "device": ("device cpu", "device {}"),
    "source": ('source = "corpus/*.py"', 'source = "{}"'),
    "tokenizer": ("tokenizer = train(300)", 'tokenizer = "{}"'),
    "precision": ("precision = fp32", "precision = {}"),
    "import": ("run tiny", 'import "{}"\nrun tiny'),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_before(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> None:
    """Let torch create its files at first use, so that they do not count as an attack."""
    path = tmp_path_factory.mktemp("before") / "spec.dsc"
    path.write_text(spec_text(ONE_RANK), "utf-8")
    compile_spec(load(path), segments=segments)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("slot", SLOTS)
def test_code_in_a_spec_stays_text(
    tmp_path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch, slot: str, payload: str
) -> None:
    """The spec is refused with a message that no terminal obeys, or compiled to code that has the text as text."""
    monkeypatch.chdir(tmp_path)
    old, new = SLOTS[slot]
    text = spec_text(ONE_RANK).replace(old, new.replace("{}", PAYLOADS[payload]))
    path = tmp_path / "spec.dsc"
    path.write_text(text, "utf-8")
    with watch(tmp_path.parent) as attacks:
        try:
            spec = load(path)
        except SpecError as error:
            message = render_all(error.diagnostics)
            assert message and all(letter == "\n" or letter.isprintable() for letter in message)
        else:
            check_is_text(dict(compile_spec(spec, segments=segments).files))
    assert attacks == [] and not list(tmp_path.rglob(CANARY))


def check_is_text(files: dict[str, str]) -> None:
    """No emitted Python has the payload but within strings, nor has the report."""
    for name, text in files.items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                assert not (isinstance(node, ast.Name) and node.id in (CANARY, "__import__")), name
        assert not (name.endswith(".html") and f"<script>{CANARY}" in text), name
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", text), name


# ---------------------------------------------------------------- builds

FILES = ("manifest.json", "plan.json", "train.py", "stages/rank_0.py", "spec.resolved", "kernels.json", "report.html")


def link(file: Path, place: Path) -> None:
    file.unlink()
    file.symlink_to(place)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def with_code(file: Path) -> None:
    file.write_text(f"{CODE}\n{file.read_text('utf-8')}", "utf-8")


EDITS: dict[str, Callable[[Path], object]] = {
    "code": with_code,
    "link": lambda file: link(file, BUILD / "plan.txt"),
    "link out": lambda file: link(file, Path("/etc/passwd")),
    "pipe": pipe,
    "gone": Path.unlink,
    "nested": lambda file: file.write_text("[" * 200_000),
    "another file": lambda file: (file.parent / "sitecustomize.py").write_text(CODE),
    "a byte": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("file", FILES)
def test_an_edited_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, edit: str) -> None:
    """Before any of its code is imported."""
    monkeypatch.chdir(tmp_path)
    build = tmp_path / "build"
    copies.copytree(BUILD, build, ignore=shutil.ignore_patterns("__pycache__"))
    digest = read(build).digest
    EDITS[edit](build / file)
    with watch(tmp_path) as attacks, pytest.raises(BuildError):
        read(build, digest)
    assert attacks == [] and not (tmp_path / CANARY).exists()


# ---------------------------------------------------------------- the watch itself


def test_the_watch_detects_attacks(tmp_path: Path) -> None:
    with watch(tmp_path) as attacks:
        os.system("true")
        (tmp_path / "mine").write_text("x")
        Path("/etc/passwd").read_text()
        with pytest.raises(OSError):
            (ROOT / "no such folder" / "x").write_text("x")
    assert [attack.partition(" ")[0] for attack in attacks] == ["os.system", "open", "open"]
