"""Files of rewards that a spec names: they are parsed and not run, and a build has copies beside its spec."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compiler.model.modules import named
from compiler.plan.read_files import load_with_files, mistakes_of, with_files
from compiler.plan.spec_files import standing_alone, texts_of_files
from dsl.canonical import canonical
from dsl.load import analyse, resolve
from dsl.messages.diagnostics import SpecError
from dsl.schema import Spec
from tests import copies

SPECS = Path(__file__).parents[4] / "specs"
SPEC = """import "tiny.dsc"
model small extends tiny { mtp = none }
run mine extends tiny {
  model = small
  train {
    grpo {
      group = 4, prompt = 8, completion = 8
      rewards {
        own  { check = python, file = "own.py" }
        more { check = python, file = "own.py", function = "other", weight = 0.5 }
      }
    }
  }
  data { source = "prompts.jsonl", tokenizer = "tokenizer.json", prompts { } }
}
"""
OWN = "def reward(prompts, **columns):\n    return [0.0] * len(prompts)\n\n\nother = reward\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A spec with the file of its rewards beside it."""
    copies.copy(SPECS / "tiny.dsc", tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "spec.dsc").write_text(SPEC)
    return tmp_path / "spec.dsc"


def read(path: Path, *overrides: str) -> Spec:
    resolved = resolve(str(path), None, overrides)
    return with_files(resolved.spec, resolved.origins, path.parent)


def mistakes(path: Path, *overrides: str) -> list[tuple[str, str, str]]:
    """(place, message, hint) of each error, which planning and checking report alike."""
    with pytest.raises(SpecError) as raised:
        read(path, *overrides)
    assert raised.value.diagnostics == mistakes_of(analyse(str(path), None, overrides), str(path))
    assert {diagnostic.code for diagnostic in raised.value.diagnostics} == {"M0102"}
    return [
        (f"{diagnostic.span.line}:{diagnostic.span.text}", diagnostic.message, diagnostic.hint)
        for diagnostic in raised.value.diagnostics
        if diagnostic.span is not None
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (None, "there is no file own.py", "write function {} into own.py"),
        ("def reward(\n", "own.py:1 is not valid Python: '(' was never closed", "correct the file"),
        ("def mine(): ...\n", "own.py has no function {}", 'write `function = "mine"`'),
        ("class Mine: ...\n", "own.py has no function {}", "write `def {}(…): …` into own.py"),
        ("-" * 90_000 + "1", "own.py is not valid Python: it is nested too deep", "correct the file"),
        ("1" + "+1" * 6_000, "own.py is not valid Python: it is nested too deep", "correct the file"),
        ("a = 1\0", "own.py is not valid Python: source code string cannot contain null bytes", "correct the file"),
        ("#" * (named.MAX_BYTES + 1), "own.py is larger than 4 MiB", "write function {} into own.py"),
        (Path("/dev/null"), "own.py is not a regular file", "write function {} into own.py"),
    ],
    ids=["missing", "open", "other", "class", "signs", "sum", "nul", "large", "device"],
)
def test_each_reward_without_its_function_is_reported(
    text: str | Path | None, message: str, hint: str, path: Path
) -> None:
    file = path.parent / "own.py"
    file.unlink()
    if isinstance(text, Path):
        file.symlink_to(text)
    elif text is not None:
        file.write_text(text)
    places = {"reward": '9:"own.py"', "other": '10:"own.py"'}
    assert mistakes(path) == [(place, message.format(name), hint.format(name)) for name, place in places.items()]


def test_a_function_has_a_name_of_python(path: Path) -> None:
    (path.parent / "own.py").write_text("from mine import *\n")
    assert read(path).train.grpo is not None, "anything may come from there"
    ((place, message, _),) = mistakes(path, 'train.grpo.rewards.own.function="a b"')
    assert (place, message) == ('9:"own.py"', "own.py has no function a b")


def test_reward_files_are_not_run(path: Path) -> None:
    ran = path.parent / "ran"
    (path.parent / "own.py").write_text(f"open({str(ran)!r}, 'w')\n{OWN}")
    assert mistakes_of(analyse(str(path), None, []), str(path)) == ()
    read(path)
    assert not ran.exists()


def test_a_file_is_beside_the_spec_that_names_it(path: Path) -> None:
    """An imported spec names a file in its own folder."""
    inner = path.parent / "inner"
    inner.mkdir()
    for name in ("spec.dsc", "tiny.dsc", "own.py"):
        shutil.move(path.parent / name, inner / name)
    outer = path.parent / "outer.dsc"
    outer.write_text('import "inner/spec.dsc"\nrun outer extends mine { }\n')
    grpo = read(outer).train.grpo
    assert grpo is not None and [reward.file for reward in grpo.rewards] == ["inner/own.py"] * 2


def test_a_build_contains_its_reward_files(path: Path) -> None:
    """A build has a file for each reward, and its spec names these files."""
    spec = read(path)
    build = path.parent / "build"
    texts = {name: text for name, text in texts_of_files(spec).items() if name.startswith("rewards/")}
    assert texts == {"rewards/own.py": OWN, "rewards/more.py": OWN}
    (build / "rewards").mkdir(parents=True)
    for name, text in texts.items():
        (build / name).write_text(text)
    (build / "spec.resolved").write_text(canonical(standing_alone(spec)))
    again = load_with_files(build / "spec.resolved")
    assert again.train.grpo is not None
    assert [reward.file for reward in again.train.grpo.rewards] == [*texts]
    assert texts_of_files(again) == texts_of_files(spec)
    assert standing_alone(again) == again
    (build / "rewards" / "more.py").unlink()
    with pytest.raises(SpecError, match=r"there is no file rewards/more\.py"):
        load_with_files(build / "spec.resolved")
