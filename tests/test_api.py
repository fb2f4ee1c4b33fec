"""dsc from Python: functions return the results of the commands, and the example notebook runs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler import api, pipeline
from compiler.cli.main import main
from compiler.pipeline import CompiledBuild
from tests import copies, progress

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
TINY = str(ROOT / "specs" / "tiny.dsc")


def test_check_returns_every_mistake() -> None:
    assert api.check(TINY) == ()
    mistakes = api.check(TINY, {"train.steps": 0, "model.layers.1.ffn.top_k": 40})
    assert len(mistakes) >= 2 and {mistake.severity for mistake in mistakes} == {"error"}
    assert api.check(TINY, {"train.seed": 2}) == ()


def test_plan_equals_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    planned = api.plan(TINY, {"train.micro_batch": 2})
    assert main(["plan", TINY, "-s", "train.micro_batch=2"]) == 0
    assert str(planned) == capsys.readouterr().out
    assert planned.spec.train.micro_batch == 2 and planned.prediction.fits
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.spec = planned.spec  # type: ignore[misc]


def test_losses_skip_steps_without_one() -> None:
    run = api.Trained(Path("runs/mine"), ({"step": 1, "loss": 2.5}, {"step": 2}, {"step": 3, "loss": 2.0}))
    assert run.losses == (2.5, 2.0)


def test_values_are_written_as_in_a_spec() -> None:
    changed = api.plan(TINY, {"model.layers.1.ffn.normalize": False, "model.attention.query_rank": None}).spec
    assert changed.model.attention.query_rank is None and not changed.model.layers[1].ffn.normalize  # type: ignore[union-attr]


def test_a_wrong_spec_is_raised(tmp_path: Path) -> None:
    for act in (api.plan, api.compile, api.train):
        with pytest.raises(api.SpecError) as raised:
            act(TINY, {"train.steps": 0})
        assert raised.value.diagnostics and "steps" in str(raised.value)
    with pytest.raises(ValueError, match="changes to compile"):
        api.train(api.Compiled(tmp_path, "", "", ""), {"train.steps": 1})


@pytest.mark.parametrize("act", [api.compile, api.train])
def test_a_spec_that_does_not_train_is_refused_before_any_work(
    act: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.SpecError, match="E1001"):
        act(ROOT / "tests" / "ui" / "train_refuses.dsc")
    assert list(tmp_path.iterdir()) == []


def test_a_build_is_written_to_the_requested_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default to build/RUN, as that of `dsc compile`."""
    monkeypatch.chdir(tmp_path)
    build = CompiledBuild((("manifest.json", '{"files": {}}'),), "what it is\n", "", (("segments/one", "traced"),))
    monkeypatch.setattr(pipeline, "compile_spec", lambda *_, **__: build)
    for wanted, compiled in (("build/tiny", api.compile(TINY)), ("a/mine", api.compile(TINY, out="a/mine"))):
        assert compiled == api.Compiled(Path(wanted), build.digest, build.summary, "")
        assert (tmp_path / wanted / "manifest.json").is_file()
        assert (tmp_path / wanted / "cache" / "segments" / "one").read_text() == "traced"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "build"]


def test_a_run_that_fails_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.RunError, match="nothing") as raised:
        api.train(TINY, {"data.source": '"nothing/*.py"', "train.steps": 1})
    assert raised.value.code == 2
    assert "nothing" in capsys.readouterr().out, "lines are printed as they come"


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells, in order, in one process that takes the name under which the distribution gives dsc."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "outputs are not stored"
    text = "\n".join(code).replace("import dsc_trainer as dsc", "import compiler.cli.dsc_trainer as dsc")
    (tmp_path / "cells.py").write_text(text)
    copies.copy(TINY, tmp_path)
    process = progress.run([sys.executable, "cells.py"], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.returncode == 0, process.stdout + process.stderr
    assert "top_k" in process.stdout


def test_the_distribution_has_the_module() -> None:
    """A wheel puts compiler/cli/dsc_trainer.py at the top; it gives all that compiler/api.py has."""
    import tomllib

    from compiler.cli import dsc_trainer

    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["force-include"]["compiler/cli/dsc_trainer.py"] == "dsc_trainer.py"
    assert dsc_trainer.__all__ == api.__all__
    assert all(getattr(dsc_trainer, name) is getattr(api, name) for name in api.__all__)
