"""A boundary of the kernel around untrusted code: namespaces of Linux, without a program that must be installed.

Inside, there is no network and no other process. Files are those that Python needs, read-only, and a private /tmp in
memory. All processes inside end together, and have limits together (docs/adr/0083-a-reward-is-behind-namespaces.md).

`enter` makes three processes of one. The first stays outside, and ends as the second. The second is process 1 inside:
if it ends, the kernel kills all others. It counts their memory and their number. The third returns, and runs the code.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.system import kernel
from runtime.system.limits import cap, ends_with_parent_by

MAX_TASKS = 256  # processes and threads inside
TMP_BYTES = 1 << 30  # of /tmp, and of /dev/shm
LOOK_S = 0.05  # between two counts of memory and tasks
EXIT_LIMIT = 1
SIGNALLED = 128  # process 1 ends with this plus the signal that has ended the code
USER = 65534  # the user inside; outside it is the user of the run
PID_MAX_RELEASE = (6, 14)  # Linux from which each PID namespace has its own pid_max. Before, the host has the only one.
CLOSED = b"closed"  # what a boundary reports that stands
ROOT = Path(__file__).parents[2]  # of the packages

# Besides Python: shared libraries, programs that code may start, the time zone. They have no secrets.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
OLD = "/old"  # the files of the host, while mounts are made


@dataclass(frozen=True)
class Limits:
    """Limits of all processes inside together. `memory`: bytes, without those of files in /tmp."""

    memory: int
    tasks: int = MAX_TASKS


def enter(limits: Limits, folder: Path | None, report: int) -> None:
    """Enter a boundary, and return in the process that runs the code, whose working folder is `folder` or /tmp.

    `folder`: can be read, with all that is in it. `report`: a pipe that gets `CLOSED`, or else why there is no
    boundary; then the process ends. Call it in a process with one thread.
    """
    user, group = os.geteuid(), os.getegid()
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if user == 0:  # the kernel does not limit processes of root: process 1 must get its turn to count them
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        kernel.unshare(
            kernel.NEW_USER
            | kernel.NEW_PIDS
            | kernel.NEW_NET
            | kernel.NEW_IPC
            | kernel.NEW_UTS
            | kernel.NEW_CGROUP
            | kernel.NEW_MOUNTS
        )
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{USER} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{USER} {group} 1")
        if first := os.fork():
            os.close(report)
            _end_as(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        ends_with_parent_by(signal.SIGKILL)
        _make_root([*python_files(), *([folder] if folder else [])])
        if child := os.fork():
            os.close(report)
            _watch(child, limits)
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        cap(resource.RLIMIT_NPROC, limits.tasks)
        kernel.drop_capabilities()
        kernel.refuse_calls()
        os.environ |= {"HOME": "/tmp", "TMPDIR": "/tmp"}
        os.chdir(folder or "/tmp")
    except OSError as error:
        _report(report, problem_text(error).encode())
        os._exit(1)
    _report(report, CLOSED)


def problem() -> str:
    """Return why this process can have no boundary, or "". Call it in a process with one thread."""
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        enter(Limits(1 << 30), None, report)
        os._exit(0)
    os.close(report)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read()
    os.waitpid(child, 0)
    return "" if reported == CLOSED else reported.decode("utf-8", "replace")


def problem_text(error: OSError) -> str:
    """Return why there is no boundary, and a setting of the host that allows it."""
    reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    for setting, allows in (
        ("kernel/apparmor_restrict_unprivileged_userns", 0),
        ("kernel/unprivileged_userns_clone", 1),
    ):
        with suppress(OSError, ValueError):
            if (int(Path("/proc/sys", setting).read_text()) != 0) != bool(allows):
                return f"{reason}; sysctl {setting.replace('/', '.')}={allows} allows it"
    if reason.startswith("mount_setattr") and error.errno == 38:
        return f"{reason}; Linux 5.12 has it"
    if reason.startswith("unshare"):
        return f"{reason}; a container needs a seccomp profile that allows user namespaces"
    return reason


def _report(pipe: int, content: bytes) -> None:
    os.write(pipe, content)
    os.close(pipe)


# ---------------------------------------------------------------- files inside
def python_files() -> Iterator[Path]:
    """Yield the files and folders that this Python needs: its libraries, and modules of sys.path.

    Of other folders in sys.path, such as a clone, only packages and modules: a run may lie beside them.
    """
    own = {path for name, path in sysconfig.get_paths().items() if "lib" in name} | {*site.getsitepackages()}
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        own |= {f"{prefix}/{name}" for name in ("bin", "lib", "lib64", "share", "pyvenv.cfg")}
    yield from map(Path, sorted(own))
    yield from map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    yield Path(os.path.realpath(sys.executable))
    yield ROOT / "runtime"
    for entry in map(Path, filter(None, sys.path)):
        if entry.name.endswith("-packages") or entry.suffix == ".zip":
            yield entry
        elif entry != ROOT and entry.is_dir() and own.isdisjoint(map(str, (entry, *entry.parents))):
            yield from (path for path in sorted(entry.iterdir()) if _is_module(path))


def _is_module(path: Path) -> bool:
    return path.suffix in (".py", ".so") or (path / "__init__.py").is_file()


def _make_root(files: Iterable[Path]) -> None:
    """Give this process, the first of its PID namespace, a root that has only `files`, /dev, /proc and /tmp."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.SLAVE)  # the host sees no mount of here
    _mount_memory("/tmp", "size=4m,mode=755")
    Path("/tmp" + OLD).mkdir()
    kernel.pivot_root("/tmp", "/tmp" + OLD)
    os.chdir("/")
    for folder in ("/tmp", "/proc", "/dev", "/dev/shm"):
        Path(folder).mkdir()
    _mount_memory("/tmp", f"size={TMP_BYTES},mode=1777")
    wanted = {path.absolute() for path in (*map(Path, (*SYSTEM, *SYSTEM_FILES)), *files)}
    placed: set[Path] = set()
    for path in sorted(wanted):  # a folder comes before those in it
        _place(path, placed)
    for name in DEVICES:
        _bind(Path("/dev", name))
    for name, target in {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        Path("/dev", name).symlink_to(target)
    _mount_memory("/dev/shm", f"size={TMP_BYTES},mode=1777")
    _mount_processes()
    kernel.unmount(OLD)
    Path(OLD).rmdir()
    kernel.make_read_only("/", below=False)


def _mount_processes() -> None:
    """Mount /proc with the processes inside, and without settings of the kernel, which a process of root could write.
    Before, with these settings, limit what is inside."""
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    kernel.mount("proc", "/proc", "proc", flags)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no capabilities in a namespace of its own
    if _release() >= PID_MAX_RELEASE:
        Path("/proc/sys/kernel/pid_max").write_text(str(300 + MAX_TASKS))  # the first 300 are given only once
    kernel.unmount("/proc")
    kernel.mount("proc", "/proc", "proc", flags, "subset=pid")
    kernel.make_read_only("/proc")


def _place(path: Path, placed: set[Path]) -> None:
    """Show a file or folder of the host at its path, read-only, with the symbolic links that lead to it."""
    for step in (*reversed(path.parents), path):
        if step in placed:
            return
        source = Path(OLD, step.relative_to("/"))
        if source.is_symlink():
            target = source.readlink()
            if not step.is_symlink():
                step.symlink_to(target)
            rest = path.relative_to(step)
            _place(Path(os.path.normpath(step.parent / target / rest)), placed)
            return
        if not source.exists():
            return
        if step == path:
            _bind(path)
            kernel.make_read_only(str(path))
            placed.add(path)
        else:
            step.mkdir(exist_ok=True)


def _bind(path: Path) -> None:
    source = Path(OLD, path.relative_to("/"))
    if source.is_dir():
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    kernel.mount(str(source), str(path), None, kernel.BIND | kernel.RECURSIVE)


def _mount_memory(place: str, options: str) -> None:
    kernel.mount("tmpfs", place, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, options)


def _release() -> tuple[int, ...]:
    return tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])


# ---------------------------------------------------------------- process 1
def _watch(child: int, limits: Limits) -> None:
    """Wait for the child, and end as it does. End early, with a reason, if a limit is exceeded. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # so the asking process notices when the child closes its own
        os.dup2(nowhere, descriptor)
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else SIGNALLED - code)  # a signal of its own does not end process 1
        if reason := _excess(limits):
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all others inside
            if select.select([], [2], [], 1)[1]:
                os.write(2, f"\n{reason}\n".encode())
            os._exit(EXIT_LIMIT)


def _excess(limits: Limits) -> str:
    """Return which limit the processes inside exceed, or ""."""
    tasks, resident = 0, 0
    for pid in _inside():
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            tasks += int(fields[17])
            resident += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    if tasks > limits.tasks:
        return f"it has more than {limits.tasks} processes and threads"
    # Shared pages count in each process that has them, so that the sum is only a bound. The exact one takes longer.
    if resident > limits.memory and _needs_more(limits.memory):
        return f"its processes need more than {limits.memory / 2**30:.3g} GiB of memory together"
    return ""


def _needs_more(memory: int) -> bool:
    """Whether the processes inside hold more bytes; looks at no more of them than it must."""
    needed = 0
    for pid in _inside():
        needed += _proportional(pid)
        if needed > memory:
            return True
    return False


def _inside() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and folder.name != "1"]


def _proportional(pid: int) -> int:
    """Return the bytes of a process, each page divided by the number of processes that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))
    except (OSError, StopIteration):  # it has ended, or hides its memory: then all of it counts
        with suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _end_as(code: int) -> None:
    """End this process as process 1 says that the code has ended. Never returns."""
    if code > SIGNALLED:
        if code - SIGNALLED != signal.SIGKILL:
            signal.signal(code - SIGNALLED, signal.SIG_DFL)
        os.kill(os.getpid(), code - SIGNALLED)
    os._exit(code if code >= 0 else 1)
