"""A run says which library its ops use, and can be resumed with another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ops.native import library
from tests.runtime.run.place import ONE_RANK, Place, rows, saved


def test_a_run_on_torch_reports_it_once_and_resumes_in_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.missing() is None, "this test needs the C++ of the ops"
    place = Place(tmp_path, {})
    place.compile(ONE_RANK)
    monkeypatch.setenv("DSC_OPS", "torch")
    output = place.dsc("train", "--out", "run", "--steps", 1).stdout.splitlines()
    notice = "ops run on torch, which takes about twice as long: DSC_OPS is torch; unset it"
    assert output.count(notice) == 1
    assert output.index(notice) < next(index for index, line in enumerate(output) if line.startswith("step"))
    assert saved(tmp_path / "run", 1).meta["ops"] == "torch"
    monkeypatch.delenv("DSC_OPS")
    output = place.dsc("train", "--out", "run", "--steps", 2, "--resume").stdout.splitlines()
    note = "not bit for bit as without the break, because this differs: ops torch → "
    assert note + library.identity() in output and not any("run on torch" in line for line in output)
    assert saved(tmp_path / "run", 2).meta["ops"] == library.identity()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
