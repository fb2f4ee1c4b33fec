"""`dsc show`: its output parses as the same spec, and every value has its origin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compiler.cli.main import main
from dsl.canonical import canonical, text_lines
from dsl.leaves import leaves, origin_of
from dsl.load import analyse, load, resolve
from dsl.messages.diagnostics import Diagnostic, Source
from dsl.resolve.chosen import runs_in
from dsl.resolve.files import read
from tests.compiler.cli.forms import parsed

ROOT = Path(__file__).parents[3]
SPECS = sorted((ROOT / "specs").glob("*.dsc"))
TINY = str(ROOT / "specs" / "tiny.dsc")
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_output_reads_back_as_the_same_spec(path: Path, tmp_path: Path, capsys: Captured) -> None:
    for run in runs_in(path):
        assert main(["show", f"{path}:{run}"]) == 0
        plain = capsys.readouterr().out
        assert main(["show", f"{path}:{run}", "--origin"]) == 0
        commented = capsys.readouterr().out
        for text in (plain, commented):
            (tmp_path / "shown.dsc").write_text(text, "utf-8")
            assert load(tmp_path / "shown.dsc") == load(path, run)
        assert re.sub(r" +# .*", "", commented) == plain


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_printed_lines_and_leaves_agree(path: Path) -> None:
    """Each printed value is a leaf with that text; a leaf without a line is a name or a kind. Attention
    that overrides another one (of a layer or of MTP) prints `none` for missing keys, which are not leaves."""
    spec = resolve(path, runs_in(path)[0]).spec
    texts = {leaf.path: leaf.text for leaf in leaves(spec)}
    assert len(texts) == len(leaves(spec))
    lines = {line.path: line.text.strip() for line in text_lines(spec) if line.text.strip(" }")}
    for path_of_line, text in lines.items():
        if text.endswith(" = none") and re.match(r"model\.(layers\.\d+|mtp)\.attention\.", path_of_line):
            assert texts.get(path_of_line, "none") == "none", path_of_line
        elif not text.endswith("{"):
            assert text.endswith(texts[path_of_line]), path_of_line
    silent = {name for name in texts if name not in lines}
    assert all(name.endswith((".kind", "name")) or name.startswith("precision.") for name in silent)


def test_origins_are_where_the_values_are(tmp_path: Path) -> None:
    """Changing the number at a value's origin changes the value at its path, and otherwise only derived values."""
    path = str(ROOT / "specs" / "quickstart.dsc")
    resolved = resolve(path)
    before = {leaf.path: leaf.text for leaf in leaves(resolved.spec)}
    changed = 0
    for leaf in leaves(resolved.spec):
        origin = origin_of(leaf.path, resolved.spec, resolved.origins)
        span = origin.span
        if origin.kind != "written" or span is None or not re.fullmatch(r"[\d_]+(\.\d+)?(e-\d+)?", span.text):
            continue
        text = resolved.sources[0].text
        number = float(span.text)
        number = number * 2 + 1 if number.is_integer() else number / 2
        edited = f"{text[: span.start]}{number:g}{text[span.end :]}"

        def reader(name: str, text: str = edited) -> tuple[Source, tuple[Diagnostic, ...]]:
            return (Source(path, text), ()) if name == path else read(name)

        (view,) = analyse(path, None, (), reader).views
        try:
            after = {new_leaf.path: new_leaf.text for new_leaf in leaves(view.spec)}
        except AttributeError:  # it, or what follows from it, is out of bounds and absent
            assert view.context.failed
            continue
        different = {name for name in before if after.get(name) != before[name]}
        derived = {"parallel.data", "train.tokens"} | {f"train.rate.{index}" for index in range(2)}
        assert leaf.path in different and different <= {leaf.path, *derived}
        changed += 1
    assert changed > 30


def test_every_value_has_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lib.dsc").write_bytes((ROOT / "specs" / "quickstart.dsc").read_bytes())
    child = 'import "lib.dsc"\nrun child extends quickstart {\n  train { steps = 20 }\n  schedule { }\n}\n'
    Path("spec.dsc").write_text(child, "utf-8")
    resolved = resolve("spec.dsc", "child", ["parallel.expert=1"])

    def text(path: str) -> str:
        return str(origin_of(path, resolved.spec, resolved.origins))

    assert text("parallel.expert") == "-s parallel.expert=1"
    assert text("parallel.data") == "derived: 4 devices / 2 pipeline ranks, lib.dsc:16:16"
    assert text("train.tokens") == "derived: 20 steps, spec.dsc:3:19"
    assert text("train.seed").startswith("lib.dsc:")  # inherited
    assert text("parallel.tensor") == "default"
    assert text("model.attention.kind").startswith("lib.dsc:")
    assert text("model.layers.1.ffn.kind") == text("model.layers.1").strip() != "default"
    assert text("precision.master") == "built-in"
    assert text("name") == "spec.dsc:2:1"
    kinds = {origin_of(leaf.path, resolved.spec, resolved.origins).kind for leaf in leaves(resolved.spec)}
    assert kinds == {"written", "override", "derived", "default", "built-in"}


def test_an_unnamed_schedule_is_derived(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "quickstart.dsc").read_text("utf-8")
    (tmp_path / "a.dsc").write_text(re.sub(r"\n  schedule .*", "", text), "utf-8")
    resolved = resolve(tmp_path / "a.dsc")
    assert str(origin_of("schedule.name", resolved.spec, resolved.origins)) == "derived: pipeline = 2"


def test_keys(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "specs")
    assert main(["show", "quickstart.dsc", "parallel.data", "-s", "parallel.expert=1", "train.seed"]) == 0
    assert capsys.readouterr().out == "2\n1\n"
    assert main(["show", "quickstart.dsc", "model.attention.head_dim"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"model.attention.head_dim.{name} = {width}" for name, width in (("nope", 32), ("rope", 16), ("value", 32))
    ]
    assert main(["show", "quickstart.dsc", "paralel.data"]) == 2
    assert "did you mean `parallel.data`?" in capsys.readouterr().err
    assert main(["show", "quickstart.dsc", "beta1"]) == 2
    assert "did you mean `train.optimizer.beta1`?" in capsys.readouterr().err


def test_a_key_without_a_spec_uses_the_spec_of_the_folder(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.dsc").write_bytes((ROOT / "specs" / "tiny.dsc").read_bytes())
    assert main(["show", "train.seed"]) == 0
    assert capsys.readouterr().out.strip().isdigit()
    assert main(["show"]) == 0
    assert capsys.readouterr().out == canonical(load("a.dsc"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_json(path: Path, capsys: Captured) -> None:
    assert main(["show", f"{path}:{runs_in(path)[0]}", "--format", "json", "-s", "train.seed=7"]) == 0
    document = parsed(capsys.readouterr().out, "show")
    seed = document["values"]["train.seed"]
    assert seed["value"] == 7 and seed["origin"]["kind"] == "override" and seed["origin"]["file"] == "-s"
    memory = document["values"]["cluster.node.device.memory"]
    assert memory["unit"] == "byte" and isinstance(memory["value"], int)
    assert document["values"]["train.sequence"]["text"].endswith(" tokens")


@pytest.mark.parametrize(("cap", "value"), [("9", 9), ("17/2", 8.5), ("[3,2.5]", [3, 2.5])])
def test_json_of_exact_numbers(cap: str, value: object, capsys: Captured) -> None:
    words = ["-s", "schedule.name=auto", "-s", f"schedule.cap={cap}"]
    assert main(["show", str(ROOT / "specs" / "quickstart.dsc"), "--format", "json", *words]) == 0
    assert parsed(capsys.readouterr().out, "show")["values"]["schedule.cap"]["value"] == value


def test_mistakes_are_reported(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.dsc").write_text("run a { }\n", "utf-8")
    assert main(["show", str(tmp_path / "a.dsc")]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and "error[E0203]" in stderr


@pytest.mark.parametrize(
    ("words", "error", "codes"),
    [
        (["show", "nope.dsc"], None, ["E0101"]),
        (["show", TINY, "-s", "train.btch=3", "-s", "train.seed=x"], None, ["E0201", "E0401"]),
        (["show", TINY, "parallel.dat"], "tiny has no value `parallel.dat`", []),
        (["show", "parallel.data"], None, ["E0404"]),
        (["diff", "nope.dsc", TINY], None, ["E0101"]),
        (["diff", TINY, TINY, "-s", "train.btch=3"], None, ["E0201"]),
        (["diff", TINY], "there is nothing to compare A with", []),
        (["explain", "zzz"], "there is no code, key or word `zzz`", []),
    ],
)
def test_json_reports_why_there_is_no_spec(
    words: list[str],
    error: str | None,
    codes: list[str],
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--format", "json"]) == 2
    stdout, stderr = capsys.readouterr()
    document = parsed(stdout, "failure")
    assert (document["error"], [item["code"] for item in document["diagnostics"]]) == (error, codes)
    assert all(item["message"] in stderr for item in document["diagnostics"]) and (error or "") in stderr


def test_several_values_give_one_json_document(capsys: Captured) -> None:
    assert main(["show", TINY, "train.seed", "parallel", "--format", "json"]) == 0
    paths = [*parsed(capsys.readouterr().out, "show")["values"]]
    assert "train.seed" in paths and "parallel.pipeline" in paths
    assert all(path == "train.seed" or path.startswith("parallel.") for path in paths)
