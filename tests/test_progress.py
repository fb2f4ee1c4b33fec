"""Limits against hangs: a process without progress is killed, one that works slowly or prints seldom is not; forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import forks, progress
from tests.progress import HangError, run
from tests.runtime.processes import is_gone, wait_for

# A child that would live on, and a parent that waits for it and looks for news, as supervisors do.
HUNG = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
while child.poll() is None:
    try:
        child.wait(0.05)
    except subprocess.TimeoutExpired:
        pass
"""


def python(code: str, patience_s: float, work_s: float) -> subprocess.CompletedProcess[str]:
    return run((sys.executable, "-c", code), Path.cwd(), patience_s=patience_s, work_s=work_s)


def test_a_hanging_process_is_killed_with_its_children() -> None:
    with pytest.raises(HangError, match=r"(?s)^nothing printed and less than 1 s of work in 3 s: .*\n\d+\n$") as caught:
        python(HUNG, patience_s=3, work_s=1)
    child = int(str(caught.value).split()[-1])
    wait_for(lambda: is_gone(child), "the end of the child")


def test_a_process_that_prints_or_works_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, worked = SimpleNamespace(now=0.0), SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(progress, "processor_s", lambda *_: worked.seconds)
    watch = progress.Watch(1, patience_s=3, work_s=1)
    for second in range(1, 20):  # it prints a line every three seconds
        clock.now = second
        watch.look(printed_bytes=second // 3)
    for second in range(20, 40):  # it works for a third of the time
        clock.now, worked.seconds = second, (second - 19) / 3
        watch.look(printed_bytes=6)
    clock.now, worked.seconds = 40.0, 10.0
    watch.look(printed_bytes=6)
    clock.now, worked.seconds = 42.0, 10.5
    watch.look(printed_bytes=6)
    clock.now = 43.5
    with pytest.raises(HangError, match="less than 1 s of work in 3 s"):
        watch.look(printed_bytes=6)


def test_a_module_is_run_in_a_fork_unless_libraries_would_read_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing, which names a folder in the environment of this process, does not end that."""

    def started() -> forks.Started:
        process = forks.start("compiler.cli.main", ["--help"], tmp_path, tmp_path / "out", tmp_path / "err")
        assert process.wait(60) == 0 and (tmp_path / "out").read_text("utf-8").startswith("usage: dsc")
        return process

    for name in ("out", "err"):
        (tmp_path / name).touch()
    forks.server()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert isinstance(started(), forks.Fork)
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert isinstance(started(), subprocess.Popen)
