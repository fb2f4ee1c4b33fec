"""A process on each machine that has imported torch, and forks the ranks of each attempt of an elastic run.

torchrun starts new processes whenever a machine leaves or returns. Each is a client here: it sends its command line,
environment and streams to the server, which forks a rank with them. So torch is imported once, and the server's pages
are shared by its ranks. The client passes signals on, and ends as its rank ends.

A client starts the server if there is none, and the server ends with its torchrun. They find each other by an abstract
Unix socket that has the name of the torchrun process; both check that the other belongs to the same user. If no server
can be started, the client trains in its own process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

START_S = 60.0  # until a server listens
AGAIN_S = 2.0  # until a client starts a server again, as that of another client may have failed
LOOK_S = 0.05
ASK_S = 10.0  # until a client that has connected asks for its rank
EXIT_SECOND = 3  # of a server that finds another one
_STATUS = struct.Struct("@i")  # exit code of a rank, or minus the signal that ended it
_STREAMS = 3
_CREDENTIALS = struct.Struct("@iII")  # process, user and group at the other end of a socket
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


def train_in_fork(module: str, argv: Sequence[str], build: Path) -> int | None:
    """Train in a rank that the server of this machine forks. Return its exit code, or end by the signal that ended it.

    The server imports `module`, calls its import_torch(), and in each rank its main(argv, build, agent). Returns None
    if there is no server.
    """
    agent = os.getppid()
    connection = _connect(agent, module)
    if connection is None:
        return None
    with connection:
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _frame: _send_signal(connection, number))
        request = {"argv": [*argv], "build": str(build), "cwd": str(Path.cwd()), "environment": {**os.environ}}
        with os.fdopen(os.memfd_create("dsc-request", os.MFD_CLOEXEC), "w+b") as file:
            file.write(json.dumps(request).encode("utf-8", "surrogateescape"))
            file.flush()
            socket.send_fds(connection, [b"\0"], [file.fileno(), *range(_STREAMS)])
        answer = connection.recv(_STATUS.size)
    if not answer:
        print("error: the process that forks the ranks of this machine was killed", file=sys.stderr)
        return 1
    (code,) = _STATUS.unpack(answer)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return int(code)


def _send_signal(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the rank has ended
        connection.send(bytes([number]))


def _connect(agent: int, module: str) -> socket.socket | None:
    """Return a connection to the server of a torchrun process, started if there is none; None if that fails."""
    name, until, server, started_at = _name(agent), time.monotonic() + START_S, None, 0.0
    while (now_s := time.monotonic()) < until:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(name)
        except OSError:
            connection.close()
        else:
            if _is_own(connection):
                return connection
            connection.close()
            return None
        code = server.poll() if server is not None else EXIT_SECOND
        if code not in (None, EXIT_SECOND):
            return None
        if code == EXIT_SECOND and now_s - started_at > AGAIN_S:
            words = (sys.executable, "-P", "-m", __name__, str(agent), module)
            server, started_at = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True), now_s
        time.sleep(LOOK_S)
    return None


def _name(agent: int) -> str:
    """Return the address of the server of a torchrun process: its id and start, as an id may come again."""
    fields = Path(f"/proc/{agent}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return f"\0dsc-ranks-{os.getuid()}-{agent}-{fields[19]}"


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


# ---------------------------------------------------------------- the server


def main() -> int:
    agent, module = int(sys.argv[1]), sys.argv[2]
    agent_pidfd = os.pidfd_open(agent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_name(agent))
        except OSError:
            return EXIT_SECOND
        trainer = importlib.import_module(module)
        trainer.import_torch()
        listener.listen()
        _Server(agent, agent_pidfd, listener, trainer.main).serve()
    return 0


@dataclass
class _ForkedRank:
    pid: int
    pidfd: int
    connection: socket.socket  # to its client


@dataclass
class _Server:
    agent: int
    agent_pidfd: int
    listener: socket.socket
    train: Callable[[Sequence[str], Path, int], int]
    ranks: list[_ForkedRank] = field(default_factory=list)

    def serve(self) -> None:
        """Fork a rank for each client until torchrun has ended."""
        while True:
            poll = select.poll()
            connections = {rank.connection.fileno(): rank for rank in self.ranks}
            processes = {rank.pidfd: rank for rank in self.ranks}
            for descriptor in (self.agent_pidfd, self.listener.fileno(), *connections, *processes):
                poll.register(descriptor, select.POLLIN)
            events = {descriptor for descriptor, _ in poll.poll()}
            if self.agent_pidfd in events:
                return  # the ranks are killed with this process
            for descriptor in events & processes.keys():
                self._answer(processes[descriptor])
            for descriptor in events & connections.keys():
                if connections[descriptor] in self.ranks:
                    self._pass_on(connections[descriptor])
            if self.listener.fileno() in events:
                self._accept()

    def _answer(self, rank: _ForkedRank) -> None:
        """Tell the client how its rank has ended."""
        _, status = os.waitpid(rank.pid, 0)
        with suppress(OSError):  # the client was killed
            rank.connection.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(rank.pidfd)
        rank.connection.close()
        self.ranks.remove(rank)

    def _pass_on(self, rank: _ForkedRank) -> None:
        """Pass a signal on to a rank, which is killed if its client is gone."""
        with suppress(ProcessLookupError):
            try:
                number = rank.connection.recv(1)
            except ConnectionError:
                number = b""
            signal.pidfd_send_signal(rank.pidfd, number[0] if number else signal.SIGKILL)
        if not number:
            os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
            self._answer(rank)

    def _accept(self) -> None:
        """Fork a rank for a client. Another user's process, or one that asks for nothing, is left alone."""
        connection, _ = self.listener.accept()
        connection.settimeout(ASK_S)
        try:
            descriptors = socket.recv_fds(connection, 1, 1 + _STREAMS)[1] if _is_own(connection) else []
        except OSError:
            descriptors = []
        if len(descriptors) != 1 + _STREAMS:
            connection.close()
            return
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            request = json.loads(file.read().decode("utf-8", "surrogateescape"))
        pid = os.fork()
        if pid == 0:
            self._become_rank(request, descriptors[1:])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self.ranks.append(_ForkedRank(pid, os.pidfd_open(pid), connection))

    def _become_rank(self, request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
        """Train in this fork as the client would, and end it."""
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            self.listener.close()
            for rank in self.ranks:
                rank.connection.close()
                os.close(rank.pidfd)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["cwd"])
            code = self.train(request["argv"], Path(request["build"]), self.agent)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
