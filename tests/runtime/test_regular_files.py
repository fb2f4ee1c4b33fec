"""Files of a run folder are never written through a link, and all code that writes there uses the same functions."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from runtime.system.regular_files import open_regular, read_bytes, write

RUNTIME = Path(__file__).parents[2] / "runtime"
# Modules that write to a folder that they have just made, or that others may not write to, or to files of /proc.
ELSEWHERE = {
    "observe/calibrate.py",
    "observe/doctor/probe.py",
    "ops/native/compile_cpp.py",
    "run/evaluate.py",
    "state/huggingface/exporting.py",
    "system/boundary.py",
}


@pytest.mark.parametrize("name", ["report.html", ".report.html.tmp"])
def test_a_link_is_replaced_and_its_target_stays(name: str, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    theirs.write_text("theirs")
    run.mkdir()
    (run / name).symlink_to(theirs)
    write(run / "report.html", "ours")
    assert theirs.read_text() == "theirs"
    assert [(path.name, path.is_symlink(), path.read_text()) for path in run.iterdir()] == [
        ("report.html", False, "ours")
    ]


def test_a_failed_replacement_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(tmp_path / "report.html", "ours")
    assert [*tmp_path.iterdir()] == [tmp_path / "report.html"]


def test_only_regular_files_of_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(path)
    path.unlink()
    path.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="larger"):
        read_bytes(path, 10)
    assert read_bytes(path, 11) == b"x" * 11
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        os.close(open_regular(tmp_path / "link", os.O_WRONLY | os.O_TRUNC))
    assert path.stat().st_size == 11


def test_nothing_of_the_runtime_writes_through_links() -> None:
    """`write` and `open_regular` are what writes to a run folder; a new file that must not exist follows none."""
    writes = []
    for path in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
                opens = node.func.attr == "open" and words & {"w", "wb", "a", "ab"} and len(node.args) == 1
                if opens or node.func.attr in ("write_text", "write_bytes"):
                    writes.append((str(path.relative_to(RUNTIME)), node.lineno))
    writes = [(name, line) for name, line in writes if name not in ELSEWHERE]
    assert [name for name, _ in writes] == ["system/streams.py"], f"{writes}: only where /dev/null is opened"
