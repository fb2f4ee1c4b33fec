"""The extension for VS Code, without node: its manifest, and its colours. `make extension` tests and packages it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compiler.tools.editor import block_keys as schema_keys
from compiler.tools.editor.outline import tokens
from dsl.facts.units import SUFFIXES, WORDS
from dsl.reference.keys import blocks
from dsl.resolve.forms import CLAUSES, SHAPES
from tests.compiler.tools.editor.textmate import Grammar

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "compiler/tools/editor/vscode"
SPECS = sorted((ROOT / "specs").rglob("*.dsc"))


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


@pytest.fixture
def grammar() -> Grammar:
    return Grammar(read("syntaxes/dsc.tmLanguage.json"))


def scopes_of(grammar: Grammar, line: str, word: str) -> tuple[str, ...]:
    return grammar.tokenize(line)[0][line.index(word)][1]


@pytest.mark.parametrize(("line", "wanted"), read("test/scopes.json"), ids=lambda value: str(value)[:40])
def test_colours_of_a_line(grammar: Grammar, line: str, wanted: dict[str, str]) -> None:
    for word, scope in wanted.items():
        scopes = scopes_of(grammar, line, word)
        assert any(name.startswith(scope) for name in scopes), (word, scopes)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_word_of_the_shipped_specs_has_a_colour(grammar: Grammar, path: Path) -> None:
    lines = grammar.tokenize(path.read_text("utf-8") + "\nrun x {")
    plain = ["".join(character for character, scopes in line if len(scopes) == 1) for line in lines]
    assert not "".join(plain).split(), [line for line in plain if line.strip()]
    assert lines[-1][0][1] == ("source.dsc", "storage.type.block.dsc"), "a region is left open"


def test_every_key_and_block_of_the_schema_is_coloured(grammar: Grammar) -> None:
    count = 0
    for block in blocks():
        head = block.head.replace("NAME", "mine").replace("FIRST..LAST", "0..3")
        assert scopes_of(grammar, f"{head} {{", head)[1].startswith(("storage.type", "entity.name.tag")), head
        for key in block.keys:
            for example in key.examples:
                name = example.split()[0]
                scope = scopes_of(grammar, f"  {example}", name)[1]
                assert scope.startswith(("support.type.property-name", "entity.name.tag")), example
            for word, _ in key.choices:
                scope = scopes_of(grammar, f"  KEY = {word}", word)[-1]
                assert scope in ("support.constant.word.dsc", "constant.language.dsc"), (key.path, word)
            count += 1
    assert count > 60


def test_every_word_of_the_language_is_coloured(grammar: Grammar) -> None:
    for shape in SHAPES:
        assert scopes_of(grammar, f"    {shape} to 1e-4", shape)[-1] == "keyword.control.phase.dsc"
    for clause in CLAUSES:
        assert scopes_of(grammar, f"    cosine {clause} 1e-4", clause)[-1] == "keyword.other.clause.dsc"
    for word in WORDS:
        assert scopes_of(grammar, f"  every = 10 {word}", word)[-1] == "keyword.other.unit.dsc"
    for suffix, _ in (entry for suffixes in SUFFIXES.values() for entry in suffixes):
        assert scopes_of(grammar, f"  every = 10{suffix}", suffix.split()[0])[-1] == "keyword.other.unit.dsc", suffix
    assert set(schema_keys.PHASES) == set(SHAPES)


def test_colours_match_the_tokens_of_the_server(grammar: Grammar) -> None:
    """Strings and comments begin and end where the language says."""
    for path in SPECS:
        text = path.read_text("utf-8")
        painted = [scopes for line in grammar.tokenize(text) for _, scopes in [*line, ("\n", ())]]
        for token in tokens(text):
            kinds = {"comment": "comment.line", "string": "string.quoted"}
            for kind, scope in kinds.items():
                has = any(painted_scope.startswith(scope) for painted_scope in painted[token.start])
                assert has == (token.kind == kind), (path.name, token)


def test_the_manifest_names_files_that_are_there() -> None:
    manifest = read("package.json")
    contributed = manifest["contributes"]
    paths = [manifest["main"], *(syntax["path"] for syntax in contributed["grammars"])]
    paths += [language["configuration"] for language in contributed["languages"]]
    assert all((FOLDER / path).is_file() for path in paths)
    assert contributed["languages"][0]["extensions"] == [".dsc"]
    assert contributed["grammars"][0]["scopeName"] == read("syntaxes/dsc.tmLanguage.json")["scopeName"]


def test_an_untrusted_workspace_cannot_set_the_path_of_dsc() -> None:
    manifest = read("package.json")
    trust = manifest["capabilities"]["untrustedWorkspaces"]
    assert trust["supported"] == "limited" and "dsc.path" in trust["restrictedConfigurations"]
    assert manifest["contributes"]["configuration"]["properties"]["dsc.path"]["scope"] == "machine-overridable"


def test_dependencies_are_pinned_in_both_files_without_a_host() -> None:
    manifest, lock = read("package.json"), read("package-lock.json")
    for kind in ("dependencies", "devDependencies"):
        for name, version in manifest[kind].items():
            assert re.fullmatch(r"\d+\.\d+\.\d+", version), name
            assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert all(
        "resolved" not in package and (not name or "integrity" in package) for name, package in lock["packages"].items()
    )


INDENTING = [("run x {", True), ('  source = "{"', False), ("  a = 1 # {", False), ("  node { devices = 8 }", False)]
INDENTING += [
    ("  optimizer adamw { beta1 = 0.9,", True),
    ("  recompute = [", True),
    ("  }", False),
    ("train {  # x", True),
]


@pytest.mark.parametrize(("line", "indents"), INDENTING)
def test_indentation(line: str, indents: bool) -> None:
    rules = read("language-configuration.json")["indentationRules"]
    assert bool(re.search(rules["increaseIndentPattern"], line)) == indents
    assert bool(re.search(rules["decreaseIndentPattern"], line)) == line.strip().startswith("}")
