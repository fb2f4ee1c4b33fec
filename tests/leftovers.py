"""A guard at the end of a session: a run fails if processes, shared-memory segments or temporary folders are left.

A session has its own folder with TMPDIR and HOME, which is removed at the end. So leftovers in TMPDIR belong to this
session, however many others run at the same time. A process belongs to this session if it descends from pytest, if its
environment names the folder, or if it has a file in the folder open, as each fork of pytest has. Workers of xdist
inherit all of that; the controlling process checks.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from weakref import finalize

import pytest

from tests import progress
from tests.runtime.processes import is_gone, open_files

CACHES = ("torchinductor_", "torchelastic_")  # torch's compile cache, and logs that torchrun never removes
OF_TRITON = (".ptx", ".ptx.o")  # remain if a process ends while Triton compiles in it
PATIENCE_S = 60.0  # how long to wait for ending processes, counted from the last one that ended
WORKER_ENDS_S = 600.0  # until xdist kills a worker, which would then leave its folders (xdist's default is 10 s)
SEGMENTS = Path("/dev/shm")
NOT_READABLE = (FileNotFoundError, ProcessLookupError, PermissionError)


def guard(config: pytest.Config, patience_s: float = PATIENCE_S) -> None:
    """Give this session a folder, and check for leftovers at its end. An xdist worker uses its controller's folder."""
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where pytest keeps its own folders
        folder = Path(tempfile.mkdtemp(prefix="dsc-tests-")).resolve()
        # Called at the end of this process, after the finalizers of libraries, which remove their files in it.
        Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
        Finalize(None, _remove_folder_of_pytest, (Path(os.environ["PYTEST_DEBUG_TEMPROOT"]),), exitpriority=-200)
        for name, variable in (("tmp", "TMPDIR"), ("home", "HOME"), ("blame", None)):
            (folder / name).mkdir()
            if variable is not None:
                os.environ[variable] = str(folder / name)
        tempfile.tempdir = None  # read TMPDIR again
        os.open(folder / "mark", os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC)  # open in each fork
        config.pluginmanager.register(Guard(folder, patience_s))
        if config.pluginmanager.hasplugin("xdist"):
            from xdist.workermanage import NodeManager

            NodeManager.EXIT_TIMEOUT = WORKER_ENDS_S
    config.pluginmanager.register(Blame(Path(os.environ["TMPDIR"])))


def _remove_folder_of_pytest(root: Path) -> None:
    """Remove pytest's folder for the files of failed tests, if none failed."""
    with suppress(OSError, KeyError):  # not empty; a user without a name
        (root / f"pytest-of-{getpass.getuser()}").rmdir()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Blame:
    """Records which test created each entry of TMPDIR."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.known.update(_names(self.folder))
        yield
        for name in _names(self.folder) - self.known:
            (self.folder.parent / "blame" / name).write_text(item.nodeid)


@dataclass
class Guard:
    """Finds what a session left behind, and fails the session for it."""

    folder: Path
    patience_s: float
    begun: float = field(default_factory=time.time)
    found: list[str] = field(default_factory=list)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        staying = self._processes_that_stay()
        self.found = [f"process {pid}: {_said(pid)}" for pid in staying]
        for pid in staying:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.found += [f"temporary {self._said_of(path)}" for path in sorted(self._temporaries())]
        self.found += [f"shared-memory segment {path}" for path in sorted(segments(self.begun))]
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("left behind", red=True)
            for line in self.found:
                terminalreporter.line(f"LEFT BEHIND {line}", red=True)

    def _processes_that_stay(self) -> list[int]:
        """The processes of this session that do not end by themselves."""
        staying, since = processes(self.folder), time.monotonic()
        while staying and time.monotonic() - since < self.patience_s:
            time.sleep(0.05)
            before, staying = staying, processes(self.folder)
            since = since if staying == before else time.monotonic()
        return staying

    def _temporaries(self) -> Iterator[Path]:
        """Entries of TMPDIR, except caches and entries that are removed at the end of this process: the folder of
        multiprocessing, and each TemporaryDirectory that a library keeps."""
        owned = {process.current_process()._config.get("tempdir")}  # type: ignore[attr-defined]
        owned |= {str(info.args[0]) for info in finalize._registry.values() if info.args}  # type: ignore[attr-defined]
        entries = (self.folder / "tmp").iterdir()
        return (
            path
            for path in entries
            if str(path) not in owned and not path.name.startswith(CACHES) and not path.name.endswith(OF_TRITON)
        )

    def _said_of(self, path: Path) -> str:
        inside = ", ".join(sorted(_names(path))[:3]) if path.is_dir() else "a file"
        blame = self.folder / "blame" / path.name
        return f"{path.name} ({inside or 'empty'}), of {blame.read_text() if blame.exists() else 'no test alone'}"


def processes(folder: Path) -> list[int]:
    """Processes of the session with a folder, but for this one and the two that multiprocessing ends with it."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    mine = {os.getpid(), server, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    descendants = [os.getpid()]
    for pid in descendants:
        descendants += [child for child in progress.children(pid) if child not in mine]
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid not in mine and not is_gone(pid) and (pid in descendants or _is_of(pid, folder))]


def _is_of(pid: int, folder: Path) -> bool:
    """Whether the environment of a process names the folder, or the process has a file of it open."""
    with suppress(*NOT_READABLE):
        if os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes():
            return True
    return any(file.startswith(str(folder)) for file in open_files(pid))


def _said(pid: int) -> str:
    """The command of a process, and the test that started it if its environment names one."""
    command = variables = b""
    with suppress(*NOT_READABLE):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    name = b"PYTEST_CURRENT_TEST="
    tests = [f", of {line[len(name) :].decode()}" for line in variables.split(b"\0") if line.startswith(name)]
    return command.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200] + "".join(tests)


def segments(since: float) -> Iterable[Path]:
    """Segments of this user, made since a time, that no process has mapped: its owner has left it."""
    unmapped = set()
    for path in SEGMENTS.iterdir():
        with suppress(FileNotFoundError):
            is_new = path.stat().st_ctime >= since and path.stat().st_uid == os.getuid()
            unmapped |= {path} if is_new else set()
    for entry in Path("/proc").iterdir() if unmapped else ():
        if entry.name.isdigit():
            with suppress(*NOT_READABLE):
                maps, files = (entry / "maps").read_text(errors="replace"), open_files(int(entry.name))
                unmapped = {path for path in unmapped if str(path) not in maps and str(path) not in files}
    return [path for path in unmapped if path.exists()]
