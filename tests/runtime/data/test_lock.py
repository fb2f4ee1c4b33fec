"""A waiting process says whom it waits for; a lock is released when its process dies; other files are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.data import store
from runtime.data.files import DataError
from runtime.data.store import hold_lock, hold_lock_if_free

ROOT = Path(__file__).parents[3]
HOLDER = """
import signal, sys
from pathlib import Path
from runtime.data.store import hold_lock
with hold_lock(Path(sys.argv[1]), "runs/other", print):
    print("held", flush=True)
    signal.pause()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock at `path`."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_the_holder_is_named_and_its_death_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with holder(path) as process:
        messages: list[str] = []

        def say(text: str) -> None:
            messages.append(text)
            if len(messages) == 3:
                process.send_signal(signal.SIGKILL)

        with hold_lock_if_free(path) as free:
            assert not free
        with hold_lock(path, "runs/own", say):
            assert process.wait() == -signal.SIGKILL
            with hold_lock_if_free(path) as free:
                assert not free
    expected = f"waiting for process {process.pid}, which prepares data for runs/other (lock: {path})"
    assert len(messages) >= 3 and set(messages) == {expected}
    with hold_lock_if_free(path) as free:
        assert free


def test_a_wait_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SAID_AFTER_S", 0.0)

    def interrupt(_: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    path = tmp_path / ".lock"
    with holder(path), pytest.raises(KeyboardInterrupt), hold_lock(path, "runs/own", interrupt):
        pass


def test_an_invalid_lock_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="pipe: not a regular file"), hold_lock(tmp_path / "pipe", "runs/own", print):
        pass
    with pytest.raises(OSError, match="symbolic links"), hold_lock(tmp_path / "link", "runs/own", print):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_purpose_that_is_not_unicode_is_printed_too(tmp_path: Path) -> None:
    """Runs may be in folders whose names are arbitrary bytes."""
    path = tmp_path / ".lock"
    with hold_lock(path, os.fsdecode(b"runs/\xff"), print):
        assert path.read_bytes().endswith(b" prepares data for runs/\xff")
