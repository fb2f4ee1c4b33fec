"""`dsc import hf` from the outside: files, names, hostile input."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compiler.cli.commands.import_ import CONFIG
from compiler.cli.main import main
from compiler.tools.importers import huggingface
from compiler.tools.importers.first_run import run_text
from compiler.tools.importers.json_text import parse
from compiler.tools.importers.write import identifier, model_text
from dsl.load import check, load
from dsl.messages.diagnostics import Source, SpecError, render_all
from dsl.text.formatter import format_source
from dsl.text.parser import MAX_BYTES

ROOT = Path(__file__).parents[4]
CONFIGS = [json.loads(path.read_text("utf-8")) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))]
LLAMA: dict[str, Any] = next(config for config in CONFIGS if config["model_type"] == "llama")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a config in `Some-Model.1`."""
    (tmp_path / "Some-Model.1").mkdir()
    (tmp_path / "Some-Model.1" / CONFIG).write_text(json.dumps(LLAMA), "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def import_(*arguments: str) -> int:
    return main(["import", "hf", *arguments])


def test_a_folder_becomes_a_spec_that_is_right(folder: Path, capsys: Capture) -> None:
    assert import_("Some-Model.1", "-o", "m.dsc") == 0
    assert capsys.readouterr() == ("", "wrote m.dsc\n")
    assert check("m.dsc") == ()
    assert load("m.dsc").model.name == "some_model_1"
    text = Path("m.dsc").read_text("utf-8")
    assert format_source(Source("m.dsc", text)) == text
    assert import_("Some-Model.1") == 0
    assert capsys.readouterr() == (text, "")


def test_only_the_model(folder: Path, capsys: Capture) -> None:
    assert import_("Some-Model.1/config.json", "--model-only", "--name", "mine", "-o", "m.dsc") == 0
    text = Path("m.dsc").read_text("utf-8")
    assert "model mine {" in text and "run " not in text and "cluster " not in text
    assert check("m.dsc") == ()


def test_nothing_is_overwritten(folder: Path, capsys: Capture) -> None:
    Path("m.dsc").write_text("mine", "utf-8")
    Path("link.dsc").symlink_to("nowhere.dsc")
    Path("folder.dsc").mkdir()
    os.mkfifo("pipe.dsc")
    for name in ("m.dsc", "link.dsc", "folder.dsc", "pipe.dsc"):
        assert import_("Some-Model.1", "-o", name) == 2
        assert capsys.readouterr().err.startswith(f"error: {name} exists")
    for name in ("link.dsc", "folder.dsc", "pipe.dsc"):
        assert import_("Some-Model.1", "-o", name, "--force") == 2
        assert capsys.readouterr().err == f"error: {name} is not a regular file\n"
    assert Path("m.dsc").read_text("utf-8") == "mine" and not Path("nowhere.dsc").exists()
    assert import_("Some-Model.1", "-o", "m.dsc", "--force") == 0
    assert load("m.dsc").model.name == "some_model_1"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("config.json", "config.json is not a .dsc file"),
        ("no/m.dsc", "no/m.dsc cannot be written: No such file or directory"),
        ("m\0.dsc", "cannot be written: the path is not valid"),
        ("m" * 300 + ".dsc", "cannot be written: File name too long"),
    ],
)
def test_unwritable_outputs_are_refused(folder: Path, capsys: Capture, out: str, message: str) -> None:
    before = sorted(folder.rglob("*"))
    assert import_("Some-Model.1", "-o", out) == 2
    assert message in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_refused_config_writes_nothing(folder: Path, capsys: Capture) -> None:
    Path("c.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.1, "partial_rotary_factor": 0.5}), "utf-8")
    assert import_("c.json", "-o", "m.dsc") == 2
    assert capsys.readouterr().err.endswith("2 errors; --lossy writes the spec without what it cannot express\n")
    assert not Path("m.dsc").exists()
    assert import_("c.json", "-o", "m.dsc", "--lossy") == 0
    assert check("m.dsc") == ()


def test_invalid_configs_are_refused(folder: Path, capsys: Capture) -> None:
    os.mkfifo("pipe.json")
    Path("empty").mkdir()
    Path("large.json").write_text(" " * MAX_BYTES + "{}", "utf-8")
    Path("latin.json").write_bytes(b'{"a": "\xe9"}')
    Path("nul.json").write_bytes(b'{"a": "\0"}')
    for name, message in {
        "absent.json": "there is no file absent.json",
        "empty": "there is no file empty/config.json",
        "pipe.json": "pipe.json is not a regular file",
        "/dev/zero": "/dev/zero is not a regular file",
        "large.json": "bytes",
        "latin.json": "byte 0xe9 is not UTF-8",
        "nul.json": "a NUL byte",
    }.items():
        assert import_(name) == 2
        stdout, stderr = capsys.readouterr()
        assert stdout == "" and message in stderr


def test_a_config_may_be_a_link(folder: Path, capsys: Capture) -> None:
    """A cache of the hub has links: models--org--name/snapshots/<hash>/config.json → blobs."""
    snapshot = folder / "models--org--Deep-Model" / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (snapshot / CONFIG).symlink_to(folder / "Some-Model.1" / CONFIG)
    assert import_(str(snapshot), "--model-only") == 0
    assert "model deep_model {" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "meta_llama_3_8b"),
        ("/home/me/models/V3/", "v3"),
        ("x {} run y { # \n}", "x_run_y"),
        ("7B", "model_7b"),
        ("auto", "model_auto"),
        ("model", "model_model"),
        ("Ünï", "n"),
        ("\u202e\u0000", "llama"),
        ("a" * 500, "a" * 48),
        ("__import__('os')", "import_os"),
    ],
)
def test_names(folder: Path, capsys: Capture, written: str, name: str) -> None:
    Path("c.json").write_text(json.dumps(LLAMA | {"_name_or_path": written}), "utf-8")
    assert import_("c.json", "-o", "m.dsc") == 0
    assert load("m.dsc").model.name == name


def test_names_are_identifiers(folder: Path, capsys: Capture) -> None:
    assert import_("Some-Model.1", "--name", "x } run y {") == 2
    assert "write `--name x_run_y`" in capsys.readouterr().err


@given(st.text(max_size=60))
def test_identifiers(text: str) -> None:
    name = identifier(text)
    assert name.isascii() and name.isidentifier() and len(name) <= 60
    assert identifier(name) == name


# ---------------------------------------------------------------- mutated configs

NUMBERS = (0, 1, -1, 2, 7, 64, 10**6, 10**39, 0.5, -0.0, 1e308)
TEXTS = ("", "64", "x" * 100, "\n}\0{")
PARTS = ({}, {"rope_theta": 1}, {"type": "yarn", "factor": "x"}, {"full_attention": {}}, [[]], [0], ["full_attention"])
VALUES: tuple[object, ...] = (None, True, False, *NUMBERS, *TEXTS, *PARTS)


def mutated(seed: int) -> dict[str, Any]:
    """A published config with some values changed, taken from another model, dropped, or added."""
    choose = random.Random(seed)
    values = dict(choose.choice(CONFIGS))
    for _ in range(choose.randint(1, 6)):
        key = choose.choice([*values, *choose.choice(CONFIGS), "text_config", "rope_parameters", "x\n} model y {"])
        match choose.randrange(4):
            case 0:
                values.pop(key, None)
            case 1:
                donor = choose.choice(CONFIGS)
                values[key] = donor.get(key, choose.choice(list(donor.values())))
            case _:
                values[key] = choose.choice(VALUES)
    return values


@example(89844746)  # rotates no column of a head
@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_mutated_configs(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A spec that is right and says what was read, or located mistakes; the same twice."""
    text = json.dumps(mutated(seed))
    for lossy in (False, True):
        imported_config = huggingface.read(parse(Source("c.json", text)), "m", lossy=lossy)
        assert imported_config == huggingface.read(parse(Source("c.json", text)), "m", lossy=lossy)
        render_all(imported_config.diagnostics)
        errors = [item for item in imported_config.diagnostics if item.severity == "error"]
        assert (imported_config.model is None) == bool(errors)
        assert all(item.span is not None for item in errors)
        if imported_config.model is not None:
            begin = run_text(imported_config.model, imported_config.context)
            spec = f"{begin}\n{model_text(imported_config.model, imported_config.model_type, imported_config.remarks)}"
            assert format_source(Source("m.dsc", spec))
            path = tmp_path_factory.getbasetemp() / "mutated.dsc"
            path.write_text(spec, "utf-8")
            assert check(path) == ()
            if begin:
                assert load(path).model == imported_config.model


@pytest.mark.parametrize(
    ("sizes", "device", "devices"),
    [
        ({"vocab_size": 96}, "cpu", 1),  # smaller than a trained vocabulary
        ({"vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 12}, "h100", 1),
        ({"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 16}, "h100", 8),
        ({"vocab_size": 151936, "hidden_size": 8192, "num_hidden_layers": 48}, "h100", 32),
    ],
)
def test_the_cluster_fits_the_model(tmp_path: Path, sizes: dict[str, int], device: str, devices: int) -> None:
    """It is the smallest that is thought to hold it, and the run on it has no mistake."""
    width = sizes.get("hidden_size", 64)
    config = {"num_hidden_layers": 2, "hidden_size": width, "intermediate_size": 3 * width, "head_dim": 64}
    heads = width // 64
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 2048} | sizes
    text = json.dumps({"model_type": "qwen3", **config})
    imported_config = huggingface.read(parse(Source("c.json", text)), "m")
    assert imported_config.model is not None
    begin = run_text(imported_config.model, imported_config.context)
    path = tmp_path / "m.dsc"
    path.write_text(
        f"{begin}\n{model_text(imported_config.model, imported_config.model_type, imported_config.remarks)}", "utf-8"
    )
    assert check(path) == ()
    cluster = load(path).cluster
    assert (cluster.node.device.name, cluster.nodes * cluster.node.devices) == (device, devices)


@given(st.binary(max_size=40), st.integers(0, 2**32))
@settings(max_examples=200)
def test_damaged_text(noise: bytes, seed: int) -> None:
    text = json.dumps(CONFIGS[seed % len(CONFIGS)], indent=2)
    offset = seed % len(text)
    damaged = text[:offset] + noise.decode("latin-1") + text[offset + seed % 7 :]
    try:
        imported_config = huggingface.read(parse(Source("c.json", damaged)), "m")
    except SpecError as error:
        assert all(item.span is not None for item in error.diagnostics)
        assert str(error)
    else:
        render_all(imported_config.diagnostics)


def test_many_keys_stay_a_short_spec(folder: Path, capsys: Capture) -> None:
    Path("c.json").write_text(json.dumps(LLAMA | {f"key{i}": "x" * 1000 for i in range(900)}), "utf-8")
    assert import_("c.json", "-o", "m.dsc") == 0
    assert len(Path("m.dsc").read_text("utf-8")) < 20_000
    assert "and 850 more" in Path("m.dsc").read_text("utf-8")
    assert check("m.dsc") == ()


def test_importing_needs_no_torch() -> None:
    code = (
        "import sys; from compiler.cli.main import main;"
        "code = main(['import', 'hf', 'tests/compiler/tools/importers/configs/deepseek-v3.json']);"
        "sys.exit(code or bool({'torch', 'transformers', 'networkx', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True).returncode == 0


def test_the_name_of_the_file_cannot_write_on_the_terminal(folder: Path, capsys: Capture) -> None:
    assert import_("Some-Model.1", "-o", "a\x1b[31m\u202e.dsc") == 0
    assert "wrote a\N{SYMBOL FOR ESCAPE}[31m\N{REPLACEMENT CHARACTER}.dsc\n" in capsys.readouterr().err
