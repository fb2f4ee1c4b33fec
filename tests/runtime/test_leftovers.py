"""The guard against leftovers, in pytest runs whose tests leave something or nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.leftovers import PATIENCE_S, SEGMENTS, processes
from tests.progress import run
from tests.runtime.processes import is_gone

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.leftovers import guard
def pytest_configure(config):
    guard(config, {patience_s})
"""
FORK = """
import os, signal
pid = os.fork()
if pid == 0:
    signal.pause()
print("pid", pid)
"""
STARTED = """
import subprocess, sys
code = "import signal; print('up', flush=True); signal.pause()"
process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, {how})
assert process.stdout.readline() == b"up\\n"
print("pid", process.pid, flush=True)
process.returncode = 0
"""
ORPHAN = """
import os, signal
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.write(writing, b"%d" % pid)
    os._exit(0)
print("pid", int(os.read(reading, 9)))
os.wait()
"""
SEGMENT = """
from pathlib import Path
from tests.leftovers import SEGMENTS
(SEGMENTS / "dsc-tests-{pid}").write_bytes(b"x")
"""
IN_USE = """
import atexit, os
from tests.leftovers import SEGMENTS
file = os.kept = (SEGMENTS / "dsc-tests-{pid}").open("w")
atexit.register(os.unlink, file.name)
"""
FORK_SERVER = """
import multiprocessing, time
process = multiprocessing.get_context("forkserver").Process(target=time.time)
process.start()
process.join()
"""
WORKS = "import time; end = time.process_time() + 0.3; all(iter(lambda: time.process_time() < end, False))"


class Left(NamedTuple):
    """The body of a test, the expected message, and whether workers run it."""

    body: str
    said: str
    words: tuple[str, ...] = ()


LEFT = {
    "a child": Left(STARTED.format(how=""), r"process \d+: .*-c import signal.*, of test_it\.py::test_it"),
    "of a worker": Left(STARTED.format(how=""), r"process \d+: .*test_it\.py::test_it", ("-n", "1")),
    "in a session of its own": Left(STARTED.format(how="start_new_session=True"), r"process \d+: .*import signal"),
    "a fork": Left(FORK, r"process \d+: .*pytest"),
    "an orphan": Left(ORPHAN, r"process \d+: .*pytest"),
    "a folder": Left(
        "import tempfile; tempfile.mkdtemp(prefix='mine')", r"temporary mine\w+ \(empty\), of .*::test_it"
    ),
    "a file": Left("import tempfile; tempfile.mkstemp()", r"temporary \w+ \(a file\), of .*::test_it", ("-n", "1")),
    "a segment": Left(SEGMENT.format(pid=os.getpid()), rf"shared-memory segment {SEGMENTS}/dsc-tests-{os.getpid()}"),
}


def session(folder: Path, body: str, *words: str, patience_s: float = 0.5) -> CompletedProcess[str]:
    """A run of pytest with the guard and one test. The limit of half a second is for processes that never end."""
    (folder / "conftest.py").write_text(CONFTEST.format(patience_s=patience_s))
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "test_it.py").write_text(f"def test_it(tmp_path):\n{lines}")
    command = (sys.executable, "-m", "pytest", "-s", "-c", os.devnull, "--rootdir", str(folder), *words, str(folder))
    places = {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}  # all that it leaves goes with the folder
    return run(command, folder, os.environ | {"PYTHONPATH": str(ROOT)} | places)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the address of a socket has 108 characters."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("what", LEFT)
def test_leftovers_fail_the_run_and_are_named_and_removed(folder: Path, what: str) -> None:
    leftover = LEFT[what]
    done = session(folder, leftover.body, *leftover.words)
    with suppress(FileNotFoundError):
        (SEGMENTS / f"dsc-tests-{os.getpid()}").unlink()
    assert re.search(rf"^LEFT BEHIND {leftover.said}", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert done.returncode == 1 and done.stdout.count("LEFT BEHIND") == 1 and "1 passed" in done.stdout
    for pid in re.findall(r"^pid (\d+)$", done.stdout, re.MULTILINE):
        assert is_gone(int(pid))
    assert not [*folder.glob("dsc-tests-*")]


NOT_LEFT = {
    "in its folder": Left("import tempfile; tempfile.mkdtemp(dir=tmp_path)", ""),
    "in HOME": Left("import pathlib; (pathlib.Path.home() / 'cache').mkdir()", ""),
    "of multiprocessing": Left(FORK_SERVER, ""),
    "of multiprocessing, in a worker": Left(FORK_SERVER, "", ("-n", "1")),
    "an orphan that ends": Left(ORPHAN.replace("signal.pause()", WORKS), ""),
    "a folder that is kept": Left("import os, tempfile; os.kept = tempfile.TemporaryDirectory()", ""),
    "a segment in use": Left(IN_USE.format(pid=os.getpid()), ""),
}


@pytest.mark.parametrize("what", NOT_LEFT)
def test_resources_that_are_released_are_no_fault(folder: Path, what: str) -> None:
    done = session(folder, NOT_LEFT[what].body, *NOT_LEFT[what].words, patience_s=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert not [*folder.glob("dsc-tests-*")]


def test_processes_of_another_session_are_not_judged(folder: Path) -> None:
    """A living process of another session, in its own folder."""
    body = STARTED.format(how="env={}, stderr=-3, start_new_session=True")
    (folder / "up").write_text(body)
    done = run((sys.executable, str(folder / "up")), Path("/"), {})
    pid = int(done.stdout.split()[-1])
    try:
        assert pid not in processes(folder) and not is_gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
