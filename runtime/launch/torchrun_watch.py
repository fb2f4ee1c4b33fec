"""A rank's watch over all ranks under torchrun, where no supervisor can see them all.

A thread in every rank publishes the rank's current action in torchrun's store twice a second, and reads those of the
others. So every rank on every machine can name a rank that died or hangs, and its action, and all end by themselves.
For ranks that the same torchrun started, the thread also sees their boards, and their end immediately.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from runtime.launch.heartbeat import Board, size_bytes
from runtime.launch.rank_process import STOP_SIGNALS, is_lost_peer, last_lines
from runtime.launch.rank_watch import POLL_S, REPEAT_S, Stillness, is_communication, process_state
from runtime.launch.torchrun_meet import AgentBeat, Ending, Hello, Peer, SharedBoard, State
from runtime.system.outcome import Waiting, oom_kills_so_far

BEAT_S = 0.5
LOST_S = 20.0  # a rank without beats for this long counts as dead, if its process cannot be watched
GONE_S = 8.0  # the same, if all ranks of its machine train and none has a beat: more than a busy process is silent
SUSPECT_S = 3.0  # the same, if another rank has lost a connection
SETTLE_S = 5.0  # how long to wait after a broken connection for the death that caused it
LINGER_S = 3.0  # how long an ending rank waits until the others have read the reason


@dataclass
class TorchrunWatch:
    """The watch of one rank. `begin` starts it; from then on it may end this process.

    `store`: a connection for keys of the session that only this thread uses. `hang_timeout_s`: as in `Supervision`.
    """

    rank: int
    board: SharedBoard
    store: dist.Store
    agent: int
    hang_timeout_s: float | None
    state: State = "prepare"
    _number: int = 0
    _peers: dict[int, Peer] = field(default_factory=dict)
    _endings: list[Ending] = field(default_factory=list)
    _unsaid: list[tuple[str, str]] = field(default_factory=list)  # (key, line) to append in the store
    _signals: list[tuple[int, float]] = field(default_factory=list)
    _lost_at: float | None = None
    _published_hang: bool = False
    _store_is_gone: bool = False
    _trains: threading.Event = field(default_factory=threading.Event)  # published that this rank trains
    _ended: threading.Event = field(default_factory=threading.Event)  # published that this rank is done
    _oom_kills: int = field(default_factory=oom_kills_so_far)

    # -------------------------------------------------------- called by the main thread

    def enter(self) -> None:
        """Publish the first beat, before the session is agreed on."""
        self._set_beat()

    def begin(self, hellos: Sequence[Hello]) -> None:
        """Start to watch. Requires that every rank has called `enter`, and that the lists are in the store."""
        own_hello = hellos[self.rank]
        self._wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)  # the wakeup pipe works even if this thread is blocked
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        for hello in hellos:
            if hello.rank != self.rank:
                peer = Peer(hello.rank, AgentBeat(-1, "prepare", 0, "start", 0, 0.0, "", "", False), hello.agent)
                self._peers[hello.rank] = peer
                if (hello.machine, hello.agent) == (own_hello.machine, own_hello.agent):
                    self._watch_peer(peer, hello)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def fail(self, error: BaseException) -> NoReturn:
        """Publish that this rank failed. Does not return: the watch ends the process."""
        beat = self.board.read(self.rank)
        summary = "".join(traceback.format_exception_only(error)).partition("\n")[0]
        lost_peer = is_lost_peer(error)
        self.end(Ending("failed", self.rank, beat.step, beat.action, summary, last_lines(error), lost_peer))

    def end(self, ending: Ending) -> NoReturn:
        """Tell all ranks to end for this reason. Does not return."""
        self._unsaid.append(("endings", json.dumps(asdict(ending))))
        os.write(self._write, b"\0")
        while True:
            signal.pause()

    def begin_training(self) -> None:
        """Publish that this rank trains: from now on a stop waits for a whole step, and hangs are detected."""
        self.state = "train"
        os.write(self._write, b"\0")
        self._trains.wait()

    def finish(self) -> None:
        """Publish that this rank is done, and stop watching."""
        self.state = "done"
        self.board.finish()
        os.write(self._write, b"\0")
        self._ended.wait()

    # -------------------------------------------------------- the thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        stillness, checked, beat_at = Stillness(time.monotonic()), time.monotonic(), 0.0
        try:
            while not self._ended.is_set():
                woken = self._wait_for_event()
                now_s = time.monotonic()
                self._age_peers(now_s - checked)
                checked = now_s
                if (woken or now_s >= beat_at) and not self._store_is_gone:
                    beat_at = now_s + BEAT_S
                    self._exchange_beats()
                if ending := self._ending(now_s):
                    self._leave(ending)
                stamps = tuple(peer.beat.since_ns for peer in self._peers.values() if not peer.is_over)
                still_s = stillness.seconds(now_s, (self.board.read(self.rank).since_ns, *stamps))
                self._judge_hang(still_s)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _age_peers(self, passed_s: float) -> None:
        """Count time in which no beat came; not all of it if this process was suspended."""
        for peer in self._peers.values():
            peer.heard_s += min(passed_s, 2 * POLL_S)

    def _wait_for_event(self) -> bool:
        """Wait for a signal, a death or POLL_S. Return whether there was an event."""
        events = [descriptor for descriptor, _ in self._poll.poll(POLL_S * 1000)]
        for descriptor in events:
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    for number in os.read(self._wake, 64):
                        self._receive(number)
            else:
                self._poll.unregister(descriptor)
                next(peer for peer in self._peers.values() if peer.pidfd == descriptor).has_ended = True
        return bool(events)

    def _receive(self, number: int) -> None:
        if number not in STOP_SIGNALS:  # 0: the main thread has a message
            return
        now_s = time.monotonic()
        name = signal.Signals(number).name
        if not self._signals:
            self._unsaid.append(("stops", json.dumps({"signal": number, "rank": self.rank})))
        elif now_s - self._signals[0][1] > REPEAT_S:
            ending = Ending("killed", self.rank, reason=f"{name} came to rank {self.rank} a second time", signal=number)
            self._unsaid.append(("endings", json.dumps(asdict(ending))))
        self._signals.append((number, now_s))

    def _exchange_beats(self) -> None:
        """Publish the beat of this rank and read those of the others. A lost store is a reason to end."""
        try:
            with _limit_time(self.hang_timeout_s):
                beat = self._set_beat()
                while self._unsaid:
                    key, line = self._unsaid[0]
                    self.store.append(key, line + "\n")  # type: ignore[attr-defined]  # torch's stub has none
                    self._unsaid.pop(0)
                ranks = list(self._peers)
                keys = ["stops", "endings", *(f"beat/{rank}" for rank in ranks)]
                stops, endings, *beats = (text.decode() for text in self.store.multi_get(keys))
        except RuntimeError as error:  # includes torch's errors
            self._store_is_gone = True
            self._lose_store(error)
            return
        if beat.state == "train":
            self._trains.set()
        if beat.state == "done":
            self._ended.set()
        for rank, text in zip(ranks, beats, strict=True):
            self._peers[rank].hear(AgentBeat(**json.loads(text)))
        self._endings = [Ending.read(line) for line in endings.splitlines()]
        if stops and not self.board.stop_request():
            first = json.loads(stops.splitlines()[0])
            self.board.request_stop(first["signal"], first["rank"])

    def _beat(self) -> AgentBeat:
        """Return the current status of this rank."""
        beat = self.board.read(self.rank)
        for_s = (time.monotonic_ns() - beat.since_ns) / 1e9
        location, waits = _main_frame()
        process = process_state(os.getpid())
        return AgentBeat(
            self._number, self.state, beat.step, beat.action, beat.since_ns, for_s, process, location, waits
        )

    def _set_beat(self) -> AgentBeat:
        self._number += 1
        beat = self._beat()
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
        return beat

    def _check_store(self) -> None:
        """Raise RuntimeError if the store is gone: another request would print torch's stack again."""
        if self._store_is_gone:
            raise RuntimeError("the store is gone")

    def _lose_store(self, error: RuntimeError) -> None:
        if self.state == "done" or all(peer.is_over for peer in self._peers.values()):
            self._ended.set()
            return
        self._endings += [Ending.read(line) for key, line in self._unsaid if key == "endings"]
        if all(ending.lost_peer for ending in self._endings):
            step, action = self._peers[0].last() if 0 in self._peers else (self.board.step, "leave")
            why = str(error).splitlines()[0]
            reason = f"the store of torchrun is gone, so its torchrun or its machine has ended ({why})"
            self._endings.append(Ending("failed", 0, step, action, reason))

    # -------------------------------------------------------- judging

    def _ending(self, now_s: float) -> Ending | None:
        """Return the reason to end now, or None. After a lost connection, wait for the death that caused it."""
        causes = [ending for ending in self._endings if not ending.lost_peer]
        if causes:
            return causes[0]
        if self._endings and self._lost_at is None:
            self._lost_at = now_s
        if self.state == "prepare" and (request := self.board.stop_request()):
            return self._ending_by_signal(request.signal, request.rank)
        for peer in self._peers.values():
            if peer.has_ended and peer.beat.state not in ("done", "leaving") and not self._has_finished(peer):
                self._blame(peer, self._death_of(peer))
                return None
        silent = max((peer for peer in self._peers.values() if not peer.is_over), key=lambda p: p.heard_s, default=None)
        if silent is not None and silent.heard_s > (SUSPECT_S if self._lost_at is not None else self._limit_s(silent)):
            reason = f"no sign of life for {silent.heard_s:.0f} s: it was killed or stopped, or its machine is gone"
            self._blame(silent, reason, self._waiting_ranks(besides=silent.rank))
            return None
        if self._lost_at is not None and now_s - self._lost_at > SETTLE_S:
            first = self._endings[0]
            return replace(first, waiting=self._waiting_ranks(besides=first.rank))
        return None

    def _limit_s(self, silent: Peer) -> float:
        """Return after how many seconds without beats a rank counts as dead."""
        machine = [peer for peer in self._peers.values() if peer.agent == silent.agent and not peer.is_over]
        is_gone = len(machine) > 1 and silent.agent != self.agent
        is_gone = is_gone and all(peer.heard_s > GONE_S and peer.beat.state == "train" for peer in machine)
        return GONE_S if is_gone else LOST_S

    def _has_finished(self, peer: Peer) -> bool:
        return peer.board is not None and peer.board.has_finished(peer.rank)

    def _death_of(self, peer: Peer) -> str:
        if oom_kills_so_far() > self._oom_kills:
            return "its process has ended, likely out of memory (the kernel counted an out-of-memory kill)"
        return "its process was killed or left before its end (torchrun says by what)"

    def _blame(self, peer: Peer, reason: str, waiting: tuple[Waiting, ...] = ()) -> None:
        peer.has_ended = True
        self._publish(Ending("failed", peer.rank, *peer.last(), reason, waiting=waiting))

    def _publish(self, ending: Ending) -> None:
        self._unsaid.append(("endings", json.dumps(asdict(ending))))
        if self._store_is_gone:
            self._endings.append(ending)
        else:
            self._exchange_beats()

    def _ending_by_signal(self, number: int, rank: int) -> Ending:
        reason = f"rank {rank} received {signal.Signals(number).name}"
        return Ending("stopped", rank, reason=reason, signal=number)

    def requested_ending(self) -> Ending | None:
        """Return the ending after a stop request, once the target has returned; None without a request."""
        request = self.board.stop_request()
        return self._ending_by_signal(request.signal, request.rank) if request else None

    def _judge_hang(self, still_s: float) -> None:
        """Blame a silent rank, else one outside communication, else the longest waiting. List all actions."""
        states = {self.state, *(peer.beat.state for peer in self._peers.values() if not peer.is_over)}
        if self.hang_timeout_s is None or self._published_hang or self._store_is_gone or states != {"train"}:
            return
        if still_s < max(self.hang_timeout_s, 2 * BEAT_S):
            return
        beats = self._beats()

        def suspicion(rank: int) -> tuple[bool, bool, float]:
            beat, silent_s = beats[rank]
            return silent_s < SUSPECT_S, beat.waits, -(beat.for_s + silent_s)

        cause = min(beats, key=suspicion)
        alive, waits, _ = suspicion(cause)
        why = "all wait for one another, this rank the longest" if waits else "it waits for no other rank"
        if not alive:
            why = "its process is stopped, or its machine is gone"
        reason = f"no rank has changed its action for {still_s:.1f} s; {why}"
        self._published_hang = True
        beat, _ = beats[cause]
        self._publish(Ending("hung", cause, beat.step, beat.action, reason, waiting=self._waiting_ranks()))

    def _beats(self) -> dict[int, tuple[AgentBeat, float]]:
        """Return the status of each rank that has not ended, and the seconds since its last beat."""
        statuses = {self.rank: (self._beat(), 0.0)}
        for rank, peer in self._peers.items():
            if not peer.is_over:
                step, action = peer.last()
                statuses[rank] = replace(peer.beat, step=step, action=action), peer.heard_s
        return dict(sorted(statuses.items()))

    def _waiting_ranks(self, *, besides: int | None = None) -> tuple[Waiting, ...]:
        """Return where the ranks that have not ended wait."""
        return tuple(
            Waiting(rank, b.step, b.action, b.for_s + s, b.process if s < SUSPECT_S else "silent", b.where)
            for rank, (b, s) in self._beats().items()
            if rank != besides
        )

    # -------------------------------------------------------- leaving

    def _leave(self, ending: Ending) -> NoReturn:
        """Print the reason once per machine, wait until the others have read it, and end this process."""
        self.state = "leaving"
        first = True
        with suppress(RuntimeError):
            self._check_store()
            self._set_beat()
            first = self.store.add(f"said/{self.agent}", 1) == 1
        if first:
            with suppress(OSError, ValueError):
                print(ending, file=sys.stderr, flush=True)
        blamed = [peer for peer in self._peers.values() if peer.has_ended]
        for peer in (*self._linger(ending), *blamed):  # a stopped one would keep its torchrun waiting for 30 s
            if peer.pidfd is not None and ending.kind in ("failed", "hung", "killed"):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(ending.exit_code)

    def _linger(self, ending: Ending) -> list[Peer]:
        """Wait until all ranks have read the reason. Return those that have not after LINGER_S."""
        checked = time.monotonic()
        until = checked + LINGER_S
        while unread_peers := [peer for peer in self._peers.values() if not peer.is_over]:
            now_s = time.monotonic()
            self._age_peers(now_s - checked)
            checked = now_s
            if now_s > until:
                return unread_peers
            if all(self._cannot_read(peer, ending) for peer in unread_peers):
                return []
            self._wait_for_event()
            try:
                self._check_store()
                for peer in unread_peers:
                    peer.hear(AgentBeat(**json.loads(self.store.get(f"beat/{peer.rank}"))))
            except RuntimeError:
                return []
        return []

    def _cannot_read(self, peer: Peer, ending: Ending) -> bool:
        """Whether a rank of another machine has ended, or its machine is gone."""
        return peer.pidfd is None and (peer.rank == ending.rank or peer.heard_s > SUSPECT_S)

    def _watch_peer(self, peer: Peer, hello: Hello) -> None:
        """Watch the process of a rank and its board, if it has not ended already."""
        try:
            peer.pidfd = os.pidfd_open(hello.pid)
            with Path(f"/proc/{hello.pid}/fd/{hello.board}").open("r+b", buffering=0) as file:
                memory = mmap.mmap(file.fileno(), size_bytes(self.board.world))
            peer.board = Board(self.board.world, _memory=memory)
            self._poll.register(peer.pidfd, select.POLLIN)
        except ProcessLookupError:
            peer.has_ended = True
        except OSError:  # for example of another user: only its beats are available
            pass


@contextmanager
def _limit_time(limit_s: float | None) -> Iterator[None]:
    """End the process and dump its stacks if the store does not answer, because the watch itself is stuck."""
    if limit_s is not None:
        faulthandler.dump_traceback_later(max(limit_s, LOST_S), exit=True)
    try:
        yield
    finally:
        if limit_s is not None:
            faulthandler.cancel_dump_traceback_later()


def _main_frame() -> tuple[str, bool]:
    """Return the position of the main thread, `file.py:12 in function`, and whether it is communication code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    path = Path(frame.f_code.co_filename)
    if path == Path(__file__):  # the rank has failed, and waits here for the end
        return "", True
    return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}", is_communication(path)
