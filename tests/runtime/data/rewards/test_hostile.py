"""Rewards that attack: behind their boundary they reach no network, no files of the user, no process and no end of
memory. Each attack is real, and what it could have changed is looked at from outside.

Where the kernel allows no boundary, the last tests are left: the run says so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import runtime
from runtime.contract import RewardRecipe
from runtime.data.rewards import scoring
from runtime.data.rewards.scoring import Case, RewardError, Rewards
from runtime.system import boundary
from tests.progress import PATIENCE_S
from tests.runtime.data.rewards.test_scoring import NO_BOUNDARY, python, sleeping
from tests.runtime.processes import wait_for

NO_REASON = boundary.problem()
behind = pytest.mark.skipif(bool(NO_REASON), reason=f"no boundary: {NO_REASON}")
CASE = Case("", "", {})
LITTLE_BYTES = 256 << 20  # allowed memory in tests


def reward(body: str) -> str:
    """Return the text of a reward with a body, which may call `refused` with an action."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"""
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(action, *arguments):
    try:
        result = action(*arguments)
    except OSError as error:
        return error.strerror
    raise AssertionError(f"it did {{action}}{{arguments}}: {{result!r}}")
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def reward(completions, **_):
{indented}
    return [1.0]
"""


def score(body: str, seconds: float = PATIENCE_S) -> None:
    """Score with a reward that must return 1."""
    recipe = RewardRecipe("own", "python", 1.0, file="rewards/own.py", seconds=seconds)
    with Rewards((recipe,), {"own": reward(body)}) as rewards:
        assert rewards.no_boundary == ""
        assert rewards.score([CASE]).tolist() == [[1.0]]


def refusal(body: str, seconds: float = PATIENCE_S) -> str:
    with pytest.raises(RewardError) as caught:
        score(body, seconds)
    return str(caught.value)


@pytest.fixture
def little_memory() -> Iterator[None]:
    with patch.object(scoring, "DATA_BYTES", LITTLE_BYTES):
        yield


# ---------------------------------------------------------------- network


@behind
def test_no_socket_connects() -> None:
    """Not to this host, not to another one, not to a socket of this host that has only a name."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        name = f"\0dsc-{os.getpid()}"
        named.bind(name)
        named.listen()
        body = f"""
port = {server.getsockname()[1]}
refused(socket.create_connection, ("127.0.0.1", port), 5)
refused(socket.create_connection, ("192.0.2.1", 80), 5)
refused(socket.getaddrinfo, "example.org", 80)
refused(socket.socket(socket.AF_UNIX).connect, {name!r})
refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
"""
        score(body)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


# ---------------------------------------------------------------- files


@behind
def test_files_of_the_user_and_of_the_host_are_not_there(tmp_path: Path) -> None:
    """Nor is the clone that dsc is started from: a run may lie there. Its packages of Python are there."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}")
    clone = Path(runtime.__file__).parents[1]
    hidden = [run / "metrics.jsonl", run, Path.home() / ".ssh", Path.home() / ".bashrc", clone / "README.md"]
    hidden += [Path(name) for name in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/var/log", "/run", "/sys")]
    hidden += [Path(name) for name in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/pts", "/proc/kcore", "/proc/keys")]
    hidden += [Path("/old"), Path("/proc/sys/kernel"), Path("/proc/1/root/etc/passwd"), Path("/proc/1/cwd/etc/passwd")]
    body = f"""
for path in {list(map(str, hidden))!r}:
    refused(os.stat, path)
refused(os.listdir, "/root/.ssh")
import numpy, json, sqlite3  # what Python needs is there
assert os.listdir("/tmp") == {[clone.parts[2]] if clone.parts[1] == "tmp" else []!r}
"""
    score(body)


@behind
def test_nothing_can_be_written_but_a_private_tmp(tmp_path: Path) -> None:
    mark = f"dsc-{os.getpid()}-{time.monotonic_ns()}"
    body = f"""
tried = 0
for folder, folders, files in os.walk("/"):
    if folder.startswith(("/proc", "/tmp", "/dev/shm")) or folder.count("/") > 4:
        folders.clear()
        continue
    refused(open, folder + "/{mark}", "w")
    for file in files[:3]:
        if not os.path.islink(folder + "/" + file) and not folder.startswith("/dev"):
            refused(open, folder + "/" + file, "r+")
            refused(os.remove, folder + "/" + file)
    tried += 1
assert tried > 20, tried
refused(open, sys.executable, "r+")
refused(open, os.__file__, "r+")
refused(os.makedirs, {str(tmp_path)!r} + "/new") if not {str(tmp_path)!r}.startswith("/tmp") else None
refused(open, "/proc/self/uid_map", "w")
refused(os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0))
for place in (os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm"):
    with open(place + "/{mark}", "w") as file:
        file.write("x")
"""
    score(body)
    assert not [place for place in ("/tmp", "/dev/shm", str(Path.home())) if Path(place, mark).exists()]
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- rights


@behind
def test_no_rights_can_be_won() -> None:
    body = """
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}, status
assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2") and os.getuid() == os.geteuid() == 65534
for flag in (0x10000000, 0x20000, 0x40000000):  # a user, mount and network namespace
    assert libc.unshare(flag) == -1 and ctypes.get_errno() == 1
stack = ctypes.create_string_buffer(1 << 16)  # the kernel refuses clone, too
assert libc.clone(None, ctypes.addressof(stack) + (1 << 15), 0x10000000 | 17, None) == -1
assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == -1 and ctypes.get_errno() == 1
assert libc.umount2(b"/proc", 2) == -1 and libc.ptrace(16, 1, 0, 0) == -1 and libc.ptrace(16, os.getppid(), 0, 0) == -1
refused(os.setuid, 0)
refused(os.setgroups, [0])
refused(os.chroot, "/tmp")
refused(socket.sethostname, "x")
refused(os.open, "/proc/1/mem", os.O_RDWR)
refused(os.readlink, "/proc/1/fd/2")
refused(os.listdir, "/proc/1/map_files")
for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
    except ValueError:
        continue
    raise AssertionError("a limit was raised")
for fd in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{fd}"):
        path = os.readlink(f"/proc/self/fd/{fd}")
        assert path.startswith(("pipe:", "/dev/null", "/proc/")), path
"""
    score(body)


# ---------------------------------------------------------------- other processes


@behind
def test_other_processes_are_not_there() -> None:
    """Not in /proc, not for signals; process 1 is immune, and the asking process outside has another number."""
    other = subprocess.Popen(["sleep", "600"])
    body = f"""
assert [pid for pid in os.listdir("/proc") if pid.isdigit()] == ["1", "2"] and os.getpid() == 2
for pid in ({os.getpid()}, {os.getppid()}, {other.pid}):
    refused(os.kill, pid, 9)
    refused(os.sched_setaffinity, pid, [0])
for number in (1, 2, 9, 11, 15, 19):
    os.kill(1, number)
refused(os.kill, -1, 9)  # there is nobody but process 1 and this one
refused(os.killpg, {os.getpgid(0)}, 9)
"""
    try:
        score(body)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@behind
@pytest.mark.parametrize("how", ["returns", "hangs"])
def test_nothing_stays_alive(how: str) -> None:
    """A process that leaves its session and its parent, and ignores signals, ends with the reward."""
    seconds = f"600.{os.getpid()}{time.monotonic_ns()}"
    body = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        os.execvp("sleep", ["sleep", "{seconds}"])
    os._exit(0)
def commands():
    return [open(f"/proc/{{pid}}/cmdline", "rb").read() for pid in os.listdir("/proc") if pid.isdigit()]
while not any(command.startswith(b"sleep") for command in commands()):
    pass
{"" if how == "returns" else "signal.pause()"}
"""
    if how == "returns":
        score(body)
    else:
        assert "takes more than 2 s" in refusal(body, seconds=2)
    wait_for(lambda: not sleeping(seconds), "the end of a process that hides")


# ---------------------------------------------------------------- limits


@behind
def test_a_fork_bomb_ends_with_all_its_processes() -> None:
    """The kernel refuses more processes, or process 1 ends all of them, whichever is first."""
    mark = f"600.{os.getpid()}{time.monotonic_ns()}"
    body = f"""
subprocess.Popen(["sleep", "{mark}"])
while True:
    try:
        os.fork()
    except BlockingIOError:
        time.sleep(0.01)
"""
    message = refusal(body, seconds=20)
    assert "it has more than 256 processes and threads" in message or "takes more than 20 s" in message, message
    wait_for(lambda: not sleeping(mark), "the end of the fork bomb")


@behind
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = bytearray(1 << 30)", "it needs more than 0.25 GiB of memory"),
        (
            """
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b"x" * (100 << 20))
        signal.pause()
signal.pause()
""",
            "its processes need more than 0.25 GiB of memory together",
        ),
        (
            """
x = mmap.mmap(-1, 8 << 30)
for start in range(0, 8 << 30, 1 << 20):
    x[start : start + (1 << 20)] = b"x" * (1 << 20)
""",
            "its processes need more than 0.25 GiB of memory together",
        ),
    ],
    ids=["one process", "many processes", "shared memory"],
)
def test_a_memory_bomb_ends(body: str, said: str) -> None:
    assert said in refusal(body)


@behind
@pytest.mark.usefixtures("little_memory")
def test_pages_that_processes_share_count_once() -> None:
    """Sixteen processes that share 150 MiB hold less than 256 MiB."""
    body = """
x = bytearray(150 << 20)
for start in range(0, len(x), 4096):
    x[start] = 1
children = []
for _ in range(16):
    if not (pid := os.fork()):
        time.sleep(0.5)
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 16
"""
    score(body)


@behind
def test_memory_in_files_is_bounded() -> None:
    body = """
refused(os.memfd_create, "x")
assert libc.shmget(0, 1 << 20, 0o1600) == -1
with open("/tmp/x", "wb") as file:
    refused(os.posix_fallocate, file.fileno(), 0, (1 << 30) + 1)
"""
    score(body)


@behind
@pytest.mark.parametrize("stream", [1, 2])
def test_endless_output_is_not_kept(stream: int) -> None:
    body = f"while True:\n    os.write({stream}, b'x' * 65536)"
    recipe = RewardRecipe("own", "python", 1.0, file="rewards/own.py", seconds=1)
    with Rewards((recipe,), {"own": reward(body)}) as rewards, pytest.raises(RewardError, match="takes more than 1 s"):
        rewards.score([CASE])


@behind
@pytest.mark.parametrize(
    "answer",
    ['{"values": [1e300]}', '{"values": ["1"]}', '{"values": [1.0, 2.0]}', "{}", '{"values": [NaN]}', "[" * 9**5],
)
def test_answers_that_the_code_writes_itself_are_checked(answer: str) -> None:
    body = f"""
for fd in range(3, 30):
    try:
        os.write(fd, {answer!r}.encode() + b"\\n")
    except OSError:
        pass
"""
    assert "its process wrote an invalid answer" in refusal(body)


@behind
def test_an_endless_answer_ends() -> None:
    body = """
while True:
    for fd in range(3, 30):
        try:
            os.write(fd, b"x" * 65536)
        except OSError:
            pass
"""
    assert "its process wrote an answer of more than 64 MiB" in refusal(body)


# ---------------------------------------------------------------- a boundary that cannot be


def test_without_a_boundary_the_reason_is_told_and_rewards_work() -> None:
    code = f"""
{NO_BOUNDARY}
from runtime.system import boundary
from tests.runtime.data.rewards.test_scoring import CASES, LENGTHS, started
with started(LENGTHS) as rewards:
    print(rewards.score(CASES).tolist(), "|", rewards.no_boundary, "|", boundary.problem())
"""
    done = python(code)
    scores, reason, problem = done.stdout.split(" | ")
    assert scores == "[[9.0], [1.0]]" and reason.startswith("unshare: Operation not permitted"), done.stderr
    assert reason == problem.strip()


def test_the_code_cannot_say_that_it_has_a_boundary() -> None:
    text = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, b'{"open": ""}\\n')
    except OSError:
        pass
def reward(completions, **_):
    return [1.0] * len(completions)
"""
    question = {"path": "own.py", "text": text, "function": "reward", "imports_from": None}
    code = f"""
{NO_BOUNDARY}
from contextlib import suppress
from runtime.system.limited import DeadError, LimitedProcess
process = LimitedProcess("runtime.data.rewards.worker", 1 << 30)
with suppress(DeadError):  # too many answers
    process.answer({question!r}, {PATIENCE_S})
print(process.no_boundary)
process.close()
"""
    done = python(code)
    assert done.stdout.startswith("unshare: Operation not permitted"), done.stdout + done.stderr


def test_a_run_without_functions_has_nothing_to_tell() -> None:
    with Rewards((RewardRecipe("shape", "regex", 1.0, pattern="x"),), {}) as rewards:
        assert rewards.no_boundary is None


def test_the_boundary_of_this_host_is_reported_as_it_is() -> None:
    recipe = RewardRecipe("own", "python", 1.0, file="rewards/own.py", seconds=PATIENCE_S)
    with Rewards((recipe,), {"own": reward("pass")}) as rewards:
        assert rewards.no_boundary == NO_REASON
