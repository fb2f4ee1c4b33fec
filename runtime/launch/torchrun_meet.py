"""Rendezvous of ranks that torchrun started: its store, and one meeting of all ranks per attempt.

torchrun keeps one store over all attempts of `--max-restarts`, which still has the addresses of dead ranks. So all
ranks of an attempt agree on a session first, and all other keys of the attempt are prefixed with that session.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from runtime.launch.heartbeat import Board, size_bytes
from runtime.system.outcome import EXIT_USAGE, Kind, Outcome, Waiting, printable

# --- Messages between ranks through the store: their actions, endings, and the step to stop after

State = Literal["prepare", "train", "done", "leaving"]


@dataclass(frozen=True, slots=True)
class AgentBeat:
    """The published status of a rank. `number` increases; `since_ns` is of its machine's clock."""

    number: int
    state: State
    step: int
    action: str
    since_ns: int
    for_s: float
    process: str  # state of the process: "running", "sleeping", …
    where: str  # innermost Python frame of its main thread
    waits: bool  # whether that frame is communication code


@dataclass(frozen=True, slots=True)
class Ending:
    """Why all ranks end, published by the rank that found it. `kind`: as of Outcome, or "refused" before training."""

    kind: Kind | Literal["refused"]
    rank: int
    step: int = 0
    action: str = ""
    reason: str = ""
    detail: str = ""
    lost_peer: bool = False
    code: int = EXIT_USAGE  # of "refused"
    signal: int = 0  # of "stopped" and "killed"
    waiting: tuple[Waiting, ...] = ()  # where the other ranks wait; for "hung", where all do

    @property
    def exit_code(self) -> int:
        return self.code if self.kind == "refused" else self._outcome.exit_code

    @property
    def _outcome(self) -> Outcome:
        assert self.kind != "refused"
        if self.kind in ("stopped", "killed"):
            return Outcome(self.kind, self.reason, signal=self.signal)
        return Outcome(
            self.kind,
            self.reason,
            self.rank,
            self.step,
            self.action,
            detail=self.detail,
            waiting=self.waiting,
        )

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"error: {printable(self.reason)}"
        return f"{self._outcome}; go on with --resume" if self.kind == "stopped" else f"error: {self._outcome}"

    @staticmethod
    def read(line: str) -> Ending:
        row = json.loads(line)
        return Ending(**row | {"waiting": tuple(Waiting(**fields) for fields in row["waiting"])})


class SharedBoard(Board):
    """The board of a rank under torchrun: the memory has this rank alone, and stops are agreed on in the store."""

    __slots__ = ("_last", "_store")

    def share(self, store: dist.Store) -> None:
        """Set the connection in which stops are agreed on. Only the main thread uses it."""
        self._store, self._last = store, 0

    def should_stop(self, step: int) -> bool:
        """Decide as Board does: rank 0 decides one step ahead, and each step has a collective before the next call."""
        if not self._last and self.rank == 0:
            if request := self.stop_request():
                self._last = step + 1
                decision = {"last": self._last, "signal": request.signal, "rank": request.rank}
                self._store.set("last", json.dumps(decision))
                self._store.check(["last"])  # waits until `set` has taken effect
        elif not self._last and self._store.check(["last"]):
            decision = json.loads(self._store.get("last"))
            self._last = decision["last"]
            self.request_stop(decision["signal"], decision["rank"])
        return bool(self._last) and step >= self._last


def make_board(world: int, rank: int) -> tuple[SharedBoard, int]:
    """Create a board in a memory file. Return it with the descriptor by which other ranks of the machine open it."""
    descriptor = os.memfd_create("dsc-board", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes(world))
    return SharedBoard(world, _memory=mmap.mmap(descriptor, size_bytes(world)), _rank=rank), descriptor


@dataclass
class Peer:
    """Another rank, as this one sees it. `agent`: number of its torchrun. `pidfd` and `board`: only for ranks that the
    same torchrun started."""

    rank: int
    beat: AgentBeat
    agent: int
    heard_s: float = 0.0  # since its last beat, without time in which this process was suspended
    pidfd: int | None = None
    board: Board | None = None
    has_ended: bool = False

    def hear(self, beat: AgentBeat) -> None:
        if beat.number != self.beat.number:
            self.heard_s = 0.0
        self.beat = beat

    @property
    def is_over(self) -> bool:
        """Whether the rank has ended, so that no beat is expected."""
        return self.beat.state in ("done", "leaving") or self.has_ended

    def last(self) -> tuple[int, str]:
        """Return its latest step and action."""
        if self.board is None:
            return self.beat.step, self.beat.action
        beat = self.board.read(self.rank)
        return beat.step, beat.action


# --- torchrun meet

ANSWER_S = 120.0  # time limit for an answer of the store
SEE_OFF_S = 5.0
POLL_S = 0.05
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: get the address of an interface


class MeetingError(RuntimeError):
    """The ranks did not meet. The message names the missing ranks or services."""


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """A rank as described by the environment. `agent`: number of the torchrun that started it; `agent_pid`: its process
    on this machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    agent: int
    restarts: int
    host: str
    port: int
    agent_has_store: bool
    agent_pid: int = 0

    @staticmethod
    def of(environment: Mapping[str, str], agent_pid: int = 0) -> TorchrunRank:
        """Read the environment. ValueError if a variable is missing or is no number."""

        def number(name: str, default: int | None = None) -> int:
            text = environment.get(name, "" if default is None else str(default))
            if not (text.isascii() and text.isdecimal()):
                raise ValueError(f"{name}={text!r} in the environment is not a number: start with torchrun")
            return int(text)

        rank, world = number("RANK"), number("WORLD_SIZE")
        if rank >= world:
            raise ValueError(f"RANK={rank} in the environment is not below WORLD_SIZE={world}: start with torchrun")
        return TorchrunRank(
            rank,
            world,
            number("LOCAL_RANK", rank),
            number("LOCAL_WORLD_SIZE", world),
            number("GROUP_RANK", 0),
            number("TORCHELASTIC_RESTART_COUNT", 0),
            environment.get("MASTER_ADDR", LOOPBACK),
            number("MASTER_PORT"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent_pid,
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's introduction. `nonce`: identifies its process, so that no rank of an earlier attempt is met."""

    nonce: str
    rank: int
    machine: str
    agent: int
    pid: int
    board: int  # descriptor of the memory of its board
    restarts: int
    digest: str  # of its build


@dataclass(frozen=True)
class MeetSession:
    """One attempt: the prefix of its keys, its ranks, and the decision of rank 0 for all."""

    name: str
    hellos: Sequence[Hello]
    decided: Mapping[str, Any]

    @property
    def machines(self) -> int:
        return len({hello.machine for hello in self.hellos})


class Stores:
    """Connections to the store. Each thread needs its own, because a waiting call blocks its connection."""

    def __init__(self, place: TorchrunRank) -> None:
        self._place = place
        one_machine = place.local_world == place.world
        self.host = LOOPBACK if one_machine and not place.agent_has_store else place.host
        self._hosted: dist.TCPStore | None = None
        if not place.agent_has_store and place.rank == 0:
            self._hosted = self._host(one_machine)

    def connect(self, prefix: str) -> dist.Store:
        """Return a new connection for keys with `prefix`. MeetingError if the store does not answer."""
        place = self._place
        try:
            store = dist.TCPStore(
                self.host, place.port, place.world, False, timedelta(seconds=ANSWER_S), wait_for_workers=False
            )
        except RuntimeError as error:
            raise MeetingError(
                f"the store of torchrun at {self.host}:{place.port} does not answer: {str(error).splitlines()[0]}"
            ) from None
        return dist.PrefixStore(f"dsc/{prefix}", store)

    def _host(self, one_machine: bool) -> dist.TCPStore:
        """Host the store, if torchrun does not; on loopback if all ranks are on this machine."""
        try:
            listening = socket.create_server((LOOPBACK if one_machine else "", self._place.port))
        except OSError as error:
            raise MeetingError(f"MASTER_PORT={self._place.port} cannot be listened on: {error.strerror}") from None
        return dist.TCPStore(
            self.host,
            self._place.port,
            self._place.world,
            True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def meet(
    store: dist.Store,
    world: int,
    mine: Hello,
    enter: Callable[[str], None],
    decide: Callable[[str, Sequence[Hello], bool], Mapping[str, Any]],
    timeout_s: float,
) -> MeetSession:
    """Agree with all ranks on a session. `store`: a connection without a session.

    Each rank writes a hello. Rank 0 invites all ranks by their nonces, and again if a nonce changes, because it may see
    ranks of an earlier attempt first. An invited rank calls `enter(session)` and confirms. When all have confirmed,
    rank 0 calls `decide(session, hellos, restarted)` and publishes the result. MeetingError after `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    store.set(f"hello/{mine.rank}", json.dumps(asdict(mine)))
    entered = ""
    invited: list[str] = []
    keys = [f"hello/{rank}" for rank in range(world)]
    session, go = "", ""
    while True:
        if mine.rank == 0 and store.check(keys):
            hellos = [Hello(**json.loads(text)) for text in store.multi_get(keys)]
            if (nonces := [hello.nonce for hello in hellos]) != invited:
                session, invited = secrets.token_hex(8), nonces
                store.set("invitation", json.dumps({"session": session, "hellos": [asdict(h) for h in hellos]}))
        if store.check(["invitation"]):
            invitation = json.loads(store.get("invitation"))
            hellos = [Hello(**row) for row in invitation["hellos"]]
            if len(hellos) == world and hellos[mine.rank].nonce == mine.nonce:
                session = invitation["session"]
                go = f"go/{session}"
                if entered != session:
                    enter(session)
                    store.set(f"entered/{session}/{mine.rank}", "")
                    entered = session
                if mine.rank == 0 and store.check([f"entered/{session}/{rank}" for rank in range(world)]):
                    restarted = store.add("sessions", 1) > 1 or any(hello.restarts for hello in hellos)
                    store.set(go, json.dumps(decide(session, hellos, restarted)))
                if store.check([go]):
                    joined = MeetSession(session, hellos, json.loads(store.get(go)))
                    _wait_for_readers(store, f"met/{session}", world, mine.rank)
                    return joined
        if time.monotonic() > until:
            raise MeetingError(_missing_ranks_message(store, world, entered, timeout_s))
        time.sleep(POLL_S)


def _wait_for_readers(store: dist.Store, key: str, world: int, rank: int) -> None:
    """On rank 0, wait until all ranks have read the decision: rank 0 may host the store, which ends with it."""
    until = time.monotonic() + SEE_OFF_S
    count = store.add(key, 1)
    while rank == 0 and count < world and time.monotonic() < until:
        time.sleep(POLL_S)
        count = store.add(key, 0)


def _missing_ranks_message(store: dist.Store, world: int, session: str, timeout_s: float) -> str:
    key = f"entered/{session}" if session else "hello"
    missing = [str(rank) for rank in range(world) if not store.check([f"{key}/{rank}"])]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "rank 0"
    return f"{ranks} did not come within {timeout_s:g} s: look at the output of torchrun on every machine"


def new_nonce() -> str:
    return secrets.token_hex(8)


def interface_to(host: str) -> str:
    """Return the IPv4 interface through which this machine reaches another; "" if unknown.

    The name of the first machine may resolve to loopback there: then return its only other interface, if any.
    """
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[socket.inet_ntoa(request[20:24])] = name
        with suppress(OSError):
            probe.connect((host, 9))  # sends nothing
            address_here = probe.getsockname()[0]
            if not address_here.startswith("127."):
                return addresses.get(address_here, "")
    names = [name for address, name in addresses.items() if not address.startswith("127.")]
    return names[0] if len(names) == 1 else ""
