"""`dsc launch` with the builds of a run's phases: one job that starts them one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.tools.launch.job import LaunchError, needs_of_phases
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.launch.conftest import NODE, TINY, compiled

Captured = pytest.CaptureFixture[str]
TWO = NODE.replace("devices = 1", "devices = 2")
PHASES = (
    """
run long extends tiny {
  phase to_64 { train { sequence = 64, batch = 4, steps = 4 } }
  phase wide  { cluster = wider, parallel { data = 2 } }
}
"""
    + f"cluster wider {{ nodes = 1, {TWO} }}"
)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("phases")
    return {name: compiled(folder, TINY + PHASES, name) for name in ("long", "long.to_64", "long.wide")}


def test_a_job_has_the_builds_of_its_phases(builds: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    words = [str(builds["long"]), str(builds["long.to_64"]), "--out", str(tmp_path), "--format", "json"]
    assert main(["launch", "torchrun", *words]) == 0
    captured = capsys.readouterr()
    document, script = parsed(captured.out, "launch"), (tmp_path / "node.sh").read_text("utf-8")
    assert document["run"] == "long" and len(document["builds"]) == 2
    places = [script.index(f"{build} {digest}") for build, digest in zip(words, document["builds"], strict=False)]
    assert places == sorted(places) and f"--out {Path.cwd()}/runs/long\n" in script
    assert captured.err == "note: the files end with phase 2 of 3: append the builds of the later phases\n"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["long.to_64", "long"], "long is not the phase after phase 2 of run long"),
        (["long", "long.wide"], "long.wide is not the phase after phase 1 of run long"),
        (["long.to_64", "long.wide"], "phase 3 needs 1 × 2 devices cpu, and phase 2 1 × 1 devices cpu"),
    ],
)
def test_builds_that_do_not_form_a_job_are_refused(names: list[str], said: str, builds: dict[str, Path]) -> None:
    with pytest.raises(LaunchError) as refused:
        needs_of_phases([builds[name] for name in names])
    assert said in str(refused.value) and refused.value.hint
