"""`dsc import` of a plan as a command: exit codes, files, and errors in the written spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.cli.main import main
from dsl.load import check
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.exchange.test_import_plans import SCRIPT
from tests.compiler.tools.exchange.test_import_torchtitan import JOB

Capture = pytest.CaptureFixture[str]


def test_a_spec_with_errors_is_written_with_them(tmp_path: Path, capsys: Capture) -> None:
    """671B parameters do not fit on the fewest devices that the degrees allow; the user must edit the cluster."""
    file, spec_file = tmp_path / "job.toml", tmp_path / "mine.dsc"
    file.write_text(JOB)
    assert main(["import", "torchtitan", str(file), "--lossy", "-o", str(spec_file)]) == 1
    stderr = capsys.readouterr().err
    errors = [item for item in check(spec_file) if item.severity == "error"]
    assert errors and all(
        item.message in stderr and f"{spec_file}:{item.span.line}" in stderr for item in errors if item.span
    )
    assert stderr.endswith(
        f"{len(errors)} error{'s' * (len(errors) > 1)} in the written spec: edit it, then run `dsc check`\n"
    )
    spec_file.write_text(spec_file.read_text().replace("memory = 80GB", "memory = 1000GB"))
    assert not [item for item in check(spec_file) if item.severity == "error"]


def test_a_spec_with_errors_on_standard_output(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    assert main(["import", "torchtitan", str(file), "--lossy"]) == 1
    written = capsys.readouterr().out
    assert main(["import", "torchtitan", str(file), "--lossy", "--format", "json"]) == 1
    assert parsed(capsys.readouterr().out, "import")["spec"] == written


@pytest.mark.parametrize("system", ["megatron-bridge", "torchtitan"])
def test_unreadable_files_are_reported_as_json(system: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    (tmp_path / "bad.toml").write_text("[a\n")
    names = {"megatron-bridge": ["bad.py", "bad.yaml", "none.sh"], "torchtitan": ["bad.py", "bad.toml", "none.toml"]}
    for name in names[system]:
        assert main(["import", system, str(tmp_path / name), "--format", "json"]) == 2
        stdout, stderr = capsys.readouterr()
        (item,) = json.loads(stdout)["diagnostics"]
        assert item["message"] in stderr


def test_a_value_given_for_a_variable_may_hold_an_equals_sign(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(SCRIPT.replace("--num-experts", "$EXTRA --num-experts"))
    command = ["import", "megatron-bridge", str(file), "--devices", "2", "-D", "PP=1", "--format", "json", "--lossy"]
    assert main([*command, "-D", "EXTRA=--some-other=3"]) == 0
    keys = {entry["key"]: entry["value"] for entry in parsed(capsys.readouterr().out, "import")["keys"]}
    assert keys["some_other"] == "3"
    assert main([*command, "-D", "EXTRA"]) == 2
    assert "-D takes NAME=VALUE" in capsys.readouterr().err


def test_only_modules_have_functions_to_choose(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(SCRIPT)
    assert main(["import", "megatron-bridge", str(file), "--config", "a"]) == 2
    assert "--config is only for Python modules" in capsys.readouterr().err


def test_text_that_a_spec_string_cannot_hold_is_reported(tmp_path: Path, capsys: Capture) -> None:
    """A string ends with its line: what cannot be seen in a layout is `?`, which is an error at its place."""
    file, spec_file = tmp_path / "args.yaml", tmp_path / "mine.dsc"
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 2, "vocab_size": 512}
    run = {"seq_length": 64, "global_batch_size": 8, "train_iters": 9, "lr": 1e-3, "pipeline_model_parallel_size": 2}
    file.write_text(json.dumps(sizes | run | {"pipeline_model_parallel_layout": 'Et|t\n"L'}))
    assert main(["import", "megatron-bridge", str(file), "--lossy", "-o", str(spec_file)]) == 1
    assert r'layout = "Et|t?\"L"' in spec_file.read_text()
    assert f"{spec_file}:" in capsys.readouterr().err
