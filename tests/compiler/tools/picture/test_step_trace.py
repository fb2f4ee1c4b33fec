"""`dsc trace --again`: exit codes tell a rank that failed from a step that has other numbers now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from compiler.cli.commands import step_trace
from compiler.cli.commands.replay import SHOWN, TRAINED
from compiler.cli.main import main


@pytest.mark.parametrize(
    ("code", "is_compared", "exit_code"), [(0, True, 0), (1, True, 4), (1, False, 1), (2, False, 2), (3, False, 3)]
)
def test_exit_codes(
    code: int, is_compared: bool, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete trace of a failed rank is not written as the trace of the step."""

    def call(command: Sequence[str], *, quiet: bool) -> int:
        folder = Path(command[command.index("--out") + 1])
        (folder / TRAINED / "trace").mkdir(parents=True)
        (folder / TRAINED / "trace" / "rank_0.jsonl").write_text("")
        if is_compared:
            (folder / SHOWN).write_text("{}")
        return code

    def step_of(folder: Path, step: int) -> list[object]:
        if folder == tmp_path:
            raise step_trace.TraceError("not traced")
        return [{"program": "p", "rank": 0, "step": 7, "actions": []}]

    monkeypatch.setattr(step_trace, "call", call)
    monkeypatch.setattr(step_trace, "step_of", step_of)
    output = tmp_path / "step.json"
    assert main(["trace", str(tmp_path), "7", "--again", "-o", str(output)]) == exit_code
    assert output.exists() == is_compared
