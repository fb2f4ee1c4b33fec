"""Limits against hangs: who waits for nothing is ended, who works slowly or prints seldom is not. Where forks serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.progress import HangError, run
from tests.runtime.processes import is_gone, wait_for

# A child that would live on, and a parent that waits for it and looks for news, as supervisors do.
HUNG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
while child.poll() is None:
    time.sleep(0.05)
"""
WORKING = """
import time
while time.process_time() < 2.5:
    sum(range(1000))
"""
PRINTING = """
import time
for index in range(6):
    time.sleep(1)
    print(index, flush=True)
"""


def python(code: str, patience_s: float, work_s: float) -> subprocess.CompletedProcess[str]:
    return run((sys.executable, "-c", code), Path.cwd(), patience_s=patience_s, work_s=work_s)


def test_what_hangs_is_ended_with_its_children() -> None:
    with pytest.raises(HangError, match=r"(?s)^nothing printed and less than 1 s of work in 3 s: .*\n\d+\n$") as caught:
        python(HUNG, patience_s=3, work_s=1)
    child = int(str(caught.value).split()[-1])
    wait_for(lambda: is_gone(child), "the end of the child")


@pytest.mark.parametrize("code", [WORKING, PRINTING])
def test_what_goes_on_is_not(code: str) -> None:
    """A process that works for longer than the patience is not ended."""
    done = python(code, patience_s=2 if code is WORKING else 5, work_s=0.02 if code is WORKING else 1000)
    assert done.returncode == 0


def test_a_module_is_run_in_a_fork_unless_libraries_would_read_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing, which names a folder in the environment of this process, does not end that."""

    def started() -> forks.Started:
        process = forks.start("compiler.cli", ["--help"], tmp_path, tmp_path / "out", tmp_path / "err")
        assert process.wait(60) == 0 and (tmp_path / "out").read_text("utf-8").startswith("usage: dsc")
        return process

    for name in ("out", "err"):
        (tmp_path / name).touch()
    forks.server()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert isinstance(started(), forks.Fork)
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert isinstance(started(), subprocess.Popen)
