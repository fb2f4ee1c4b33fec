"""The server that forks the ranks of an elastic run: what a rank is given, how it ends, and who ends with whom.

Ranks are small functions instead of trainings. The agent stands for torchrun: a process that starts clients.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.launch import fork_server
from tests.runtime.processes import forked, is_gone, wait_for

# Starts one client for each row of the first argument: the words of its command line. Writes their exit codes.
AGENT = """
import json, os, subprocess, sys
CLIENT = "import sys; from pathlib import Path; from runtime.launch.fork_server import train_in_fork; " \\
    "sys.exit(train_in_fork('train', sys.argv[1:], Path('build')))"
for turn, rows in enumerate(json.loads(sys.argv[1])):
    clients = []
    for number, words in enumerate(rows):
        with open(f"out-{turn}-{number}", "wb") as out:
            own = os.environ | {"NUMBER": str(number)}
            words = [sys.executable, "-c", CLIENT, *words]
            clients.append(subprocess.Popen(words, stdout=out, stderr=out, env=own))
    open(f"clients-{turn}", "w").write(json.dumps([client.pid for client in clients]))
    codes = [client.wait() for client in clients]
    open(f"codes-{turn}.new", "w").write(json.dumps(codes))
    os.rename(f"codes-{turn}.new", f"codes-{turn}")
sys.stdin.read()
"""
# The module that the server imports.
TRAIN = """
import os, signal, sys, time
def import_torch():
    open("imports", "a").write(f"{os.getpid()}\\n")
def main(argv, build, agent):
    what, *words = argv
    print(os.getpid(), os.getppid(), os.getcwd(), os.environ["NUMBER"], words, build, agent, flush=True)
    if what == "exits":
        sys.exit(int(words[0]))
    if what == "raises":
        raise ValueError("a rank that raises")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        open("waits-" + os.environ["NUMBER"], "w").write(str(os.getpid()))
        time.sleep(1000)
    return 0
"""


@dataclass
class Agent:
    """A torchrun of the test, in whose folder its clients work."""

    process: subprocess.Popen[bytes]
    folder: Path

    def codes(self, turn: int = 0) -> list[int]:
        """Wait for the exit codes of the clients of a turn."""
        wait_for((self.folder / f"codes-{turn}").exists, "the end of the clients")
        return list(json.loads((self.folder / f"codes-{turn}").read_text()))

    def said(self, turn: int = 0, number: int = 0) -> list[str]:
        return (self.folder / f"out-{turn}-{number}").read_text().split(maxsplit=4)

    def pid(self, name: str) -> int:
        """Wait for a file with the id of a process."""
        path = self.folder / name
        wait_for(lambda: path.exists() and path.read_text(), name)
        return int(path.read_text())


@contextmanager
def agent(folder: Path, *turns: Sequence[Sequence[str]]) -> Iterator[Agent]:
    (folder / "train.py").write_text(TRAIN)
    words = [sys.executable, "-c", AGENT, json.dumps(turns)]
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}"}
    process = subprocess.Popen(["bash", "-c", 'read; exec "$@"', "", *words], stdin=-1, cwd=folder, env=environment)
    server = subprocess.Popen(
        [sys.executable, "-m", fork_server.__name__, str(process.pid), "train"],
        cwd=folder,
        env=environment | {"PYTHONPATH": f"{folder}:{Path.cwd()}"},
        stderr=(folder / "errors").open("wb"),
    )
    try:
        wait_for((folder / "imports").exists, "the server")
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.flush()
        yield Agent(process, folder)
    finally:
        process.kill()
        process.communicate()
        assert server.wait() == 0, (folder / "errors").read_text()


def test_a_rank_is_given_what_its_client_has(tmp_path: Path) -> None:
    with agent(tmp_path, [["exits", "7", "a b"], ["returns"]]) as first:
        assert first.codes() == [7, 0]
        (pid, parent, folder, number, rest), (other, *_) = first.said(), first.said(number=1)
        assert (folder, number) == (str(tmp_path), "0")
        assert rest.split("\n")[0] == f"['7', 'a b'] build {first.process.pid}"
        assert int(pid) != int(other) and [parent] == (tmp_path / "imports").read_text().split()


def test_each_attempt_is_forked_from_one_process(tmp_path: Path) -> None:
    """torch is imported once, whatever ends the ranks."""
    with agent(tmp_path, [["returns"], ["raises"]], [["dies"], ["exits", "3"]], [["returns"]]) as first:
        assert [first.codes(turn) for turn in range(3)] == [[0, 1], [-signal.SIGKILL, 3], [0]]
        assert {first.said(turn)[1] for turn in range(3)} == {*(tmp_path / "imports").read_text().split()}
        assert "ValueError: a rank that raises" in (tmp_path / "out-0-1").read_text()


def test_a_client_passes_signals_on(tmp_path: Path) -> None:
    with agent(tmp_path, [["waits"]]) as first:
        rank = first.pid("waits-0")
        (client,) = json.loads((tmp_path / "clients-0").read_text())
        os.kill(client, signal.SIGTERM)
        assert first.codes() == [5] and is_gone(rank)


def test_a_rank_ends_with_its_client(tmp_path: Path) -> None:
    """torchrun kills a client that does not end; the other rank stays."""
    with agent(tmp_path, [["waits"], ["waits"]]) as first:
        ranks = [first.pid(f"waits-{number}") for number in range(2)]
        clients = json.loads((tmp_path / "clients-0").read_text())
        os.kill(clients[0], signal.SIGKILL)
        wait_for(lambda: is_gone(ranks[0]), "the end of the rank")
        assert not is_gone(ranks[1])
        os.kill(clients[1], signal.SIGTERM)
        assert first.codes() == [-signal.SIGKILL, 5]


def test_server_and_ranks_end_with_torchrun(tmp_path: Path) -> None:
    with agent(tmp_path, [["waits"]]) as first:
        rank = first.pid("waits-0")
        first.process.kill()
        wait_for(lambda: is_gone(rank), "the end of the rank")
    assert is_gone(int((tmp_path / "imports").read_text()))


def asked_as(user: int, name: str) -> int:
    """Ask for a rank as another user. Returns the number of received bytes."""
    os.setuid(user)
    request = os.memfd_create("request")
    asked = {"argv": ["returns"], "build": "build", "cwd": "/", "environment": {"NUMBER": "9"}}
    os.write(request, json.dumps(asked).encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(ConnectionError):
        connection.connect(name)
        socket.send_fds(connection, [b"\0"], [request, 1, 1, 1])
        return len(connection.recv(4))
    return 0


def test_processes_of_other_users_get_no_rank(tmp_path: Path) -> None:
    """Neither does a process that closes its connection without a request, nor does it end the server."""
    with agent(tmp_path, [["waits"]]) as first:
        first.pid("waits-0")
        name = fork_server._name(first.process.pid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as idle:
            idle.connect(name)
        if os.getuid() == 0:
            with forked(lambda: asked_as(65534, name)) as other:
                assert other.exit_code() == 0
        (client,) = json.loads((tmp_path / "clients-0").read_text())
        os.kill(client, signal.SIGTERM)
        assert first.codes() == [5]


def test_without_a_server_the_client_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert fork_server.train_in_fork("train", [], Path("build")) is None
