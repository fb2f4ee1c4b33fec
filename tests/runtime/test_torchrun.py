"""Ranks in torchrun's environment, as real processes: how they connect, and how any fault of one ends all."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from runtime.comm.connect import Endpoint
from runtime.comm.transport import WantedChannels
from runtime.contract import Mesh, Opening
from runtime.launch import torchrun, torchrun_watch
from runtime.launch.heartbeat import Board
from runtime.launch.rank_process import Target
from runtime.launch.run_lock import lock_folder
from runtime.launch.torchrun import RefusedError, attach
from runtime.launch.torchrun_meet import AgentBeat, Hello, Peer, TorchrunRank, make_board
from runtime.system.outcome import EXIT_RETRY
from tests.runtime.hangs import from_then_on
from tests.runtime.processes import Fork, block, forked, listeners, wait_for

WORLD = 2
REFUSED = 40  # added to the code of a refusal, to distinguish it from the code of a rank that trained


@dataclass
class Ranks:
    """Ranks of a test, forked like torchrun's. `agents`: the torchrun agent of each rank."""

    folder: Path
    port: int
    agents: tuple[int, ...] = (0, 0)
    environment: Mapping[str, object] = field(default_factory=dict)

    @contextmanager
    def started(self, target: Target, **options: object) -> Iterator[list[Fork]]:
        with ExitStack() as stack:
            yield [stack.enter_context(forked(self._rank(rank, target, options))) for rank in range(WORLD)]

    def codes(self, target: Target, **options: object) -> list[int]:
        """Run until all ranks have ended. Returns their exit codes."""
        with self.started(target, **options) as ranks:
            return [rank.exit_code() for rank in ranks]

    def _rank(self, rank: int, target: Target, options: Mapping[str, object]) -> Callable[[], int]:
        def run() -> int:
            names = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": self.agents[:rank].count(self.agents[rank])}
            names |= {"GROUP_RANK": self.agents[rank], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            names |= {"LOCAL_WORLD_SIZE": WORLD, **self.environment}
            os.environ.update({name: str(value) for name, value in names.items()})
            for name, value in options.items():
                if callable(value):
                    options_of_rank[name] = value(rank)
            sys.stderr = (self.folder / f"errors_{rank}").open("w")
            settings = {"run": self.folder / "run", "digest": "d", "hang_timeout_s": 300.0} | options_of_rank
            try:
                attached = attach(TorchrunRank.of(os.environ), **settings)  # type: ignore[arg-type]
            except RefusedError as error:
                print(error, file=sys.stderr, flush=True)
                return REFUSED + error.code
            (self.folder / f"restarted_{rank}").write_text(str(attached.was_restarted))
            return attached.train(target, "gloo")

        options_of_rank = dict(options)
        return run

    def errors(self, rank: int) -> str:
        return (self.folder / f"errors_{rank}").read_text()


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Ranks(tmp_path, free.getsockname()[1])


@pytest.fixture(autouse=True)
def heard(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What ranks have heard from one another: each writes a file for each action and function that another was in."""
    hear = Peer.hear

    def noting(self: Peer, beat: AgentBeat) -> None:
        hear(self, beat)
        (ranks.folder / f"heard {beat.action} {beat.where.rpartition(' ')[2]}").touch()

    monkeypatch.setattr(Peer, "hear", noting)

    def is_heard(action: str, function: str = "*") -> bool:
        return any(ranks.folder.glob(f"heard {action} {function}"))

    return is_heard


Heard: TypeAlias = Callable[..., bool]


def train(fault: Callable[[], object], folder: Path, at: int = 1) -> Target:
    """A collective in step 4; then rank `at` runs a fault during W1.5, and another collective follows."""

    def target(rank: int, world: int, board: Board) -> None:
        board.start_step(4)
        sum_1 = torch.full((1,), float(rank + 1))
        dist.all_reduce(sum_1)
        board.set_action("W1.5")
        if rank == at:
            fault()
        board.set_action("reduce head")
        dist.all_reduce(sum_1)
        (folder / f"sum_{rank}").write_text(str(sum_1.item()))

    return target


def raise_() -> None:
    raise ValueError("no such expert")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forever() -> None:
    while True:
        pass


def test_ranks_run_in_their_own_processes(ranks: Ranks) -> None:
    assert ranks.codes(train(lambda: None, ranks.folder)) == [0, 0]
    assert [(ranks.folder / f"sum_{rank}").read_text() for rank in range(2)] == ["6.0", "6.0"]
    assert [ranks.errors(rank) for rank in range(2)] == ["", ""]


@pytest.mark.parametrize("agents", [(0, 0), (0, 1)])
def test_an_exception_is_named_by_both(ranks: Ranks, agents: tuple[int, int]) -> None:
    ranks.agents = agents
    assert ranks.codes(train(raise_, ranks.folder)) == [1, 1]
    message = "error: rank 1 failed during W1.5, step 4: ValueError: no such expert\n"
    texts = [ranks.errors(rank) for rank in range(2)]
    assert sum(text.count(message) for text in texts) == len(set(agents)), "once for each machine"
    assert "in raise_" in "".join(texts), "with the traceback"


@pytest.mark.parametrize("agents", [(0, 0), (0, 1)])
def test_a_killed_rank_is_named_with_its_action(
    ranks: Ranks, heard: Heard, agents: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one torchrun see the end of a process; another machine hears nothing more."""
    monkeypatch.setattr(torchrun_watch, "SUSPECT_S", 1.0)
    ranks.agents = agents

    def fault() -> None:
        wait_for(lambda: heard("W1.5"), "the other machine to hear of W1.5")
        die()

    assert ranks.codes(train(fault, ranks.folder)) == [1, -signal.SIGKILL]
    reason = "its process was killed or left before its end" if agents == (0, 0) else "no sign of life for 1 s"
    assert f"error: rank 1 failed during W1.5, step 4: {reason}" in ranks.errors(0)


def test_a_rank_that_died_before_it_was_watched_is_named_at_once() -> None:
    """No timeout is needed to notice it."""
    board, descriptor = make_board(WORLD, 0)
    os.close(descriptor)
    peer = Peer(1, AgentBeat(-1, "prepare", 0, "start", 0, 0.0, "", "", False), agent=0)
    store: Any = None
    watch = torchrun_watch.TorchrunWatch(0, board, store, 0, None, _peers={1: peer}, _store_is_gone=True)
    watch._watch_peer(peer, Hello("", 1, "here", agent=0, pid=2**22 + 1, board=3, restarts=0, digest="d"))
    assert watch._ending(0.0) is None, "it is told to the others first"
    ending = watch._ending(0.0)
    assert ending and str(ending).startswith(
        "error: rank 1 failed during start, step 0: its process was killed or left"
    )


def test_a_vanished_machine_is_named_without_a_broken_connection(ranks: Ranks, heard: Heard) -> None:
    """Rank 0 is not in a collective when the other stops: only the silence shows it."""
    ranks.agents = (0, 1)

    def target(rank: int, world: int, board: Board) -> None:
        board.set_action("W1.5" if rank == 1 else "F0.0")
        wait_for(lambda: heard("W1.5"), "the other machine to hear of W1.5")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        torchrun_watch.LOST_S = 2.0  # only of this process, and from now on
        block()

    with ranks.started(target) as (first, _second):
        assert first.exit_code() == 1
    assert "error: rank 1 failed during W1.5, step 0: no sign of life for 2 s" in ranks.errors(0)
    assert re.search(r"\n  rank 0: \w+ in F0.0, step 0, for \d+.\d s at processes.py", ranks.errors(0))


@pytest.mark.parametrize("at", [0, 1])
def test_a_hang_is_named(ranks: Ranks, heard: Heard, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from_then_on(monkeypatch, lambda: heard("W1.5", "forever") and heard("reduce head"))
    assert ranks.codes(train(forever, ranks.folder, at), hang_timeout_s=1.5) == [3, 3]
    errors = ranks.errors(0) + ranks.errors(1)
    assert f"error: rank {at} hung during W1.5, step 4: no rank has changed its action for" in errors
    assert "it waits for no other rank" in errors and "in forever" in errors
    assert f"rank {1 - at}: " in errors and "in reduce head, step 4" in errors


def test_a_stopped_rank_is_named_and_does_not_stay(ranks: Ranks, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    from_then_on(monkeypatch, lambda: heard("reduce head"))

    def fault() -> None:
        wait_for(lambda: heard("reduce head"), "the other rank to wait for this one")
        os.kill(os.getpid(), signal.SIGSTOP)

    stop = train(fault, ranks.folder)
    assert ranks.codes(stop, hang_timeout_s=4.0) == [3, -signal.SIGKILL]
    assert "error: rank 1 hung during W1.5, step 4: " in ranks.errors(0)
    assert "its process is stopped" in ranks.errors(0)


def test_a_finished_rank_that_does_not_end_ends_itself(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "LEAVE_S", 1.0)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: block() if dist.get_rank() == 1 else destroy())
    assert ranks.codes(lambda *_: None) == [0, 0]
    assert ranks.errors(0) == "" and "had finished, but did not end in 1 s" in ranks.errors(1)


# ---------------------------------------------------------------- the start


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    with forked(ranks._rank(0, connecting, {"start_timeout_s": 1.5})) as first:
        assert first.exit_code() == REFUSED + EXIT_RETRY
    assert "rank 1 did not come within 1.5 s: look at the output of torchrun" in ranks.errors(0)


def test_a_rank_that_is_stopped_before_its_channels_are_open_is_named(ranks: Ranks, heard: Heard) -> None:
    """By its silence, and not as a hang."""

    def target(rank: int, world: int, board: Board) -> None:
        board.set_action("start")
        wait_for(lambda: heard("start"), "a beat of the start")
        if rank == 1:
            (ranks.folder / "stops").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for((ranks.folder / "stops").exists, "the stop of rank 1")
        connecting(rank, world, board)

    assert ranks.codes(target) == [1, -signal.SIGKILL]
    assert "error: rank 1 failed during start, step 0: " in ranks.errors(0)
    assert "no sign of life" in ranks.errors(0)
    assert re.search(r"\n  rank 0: \w+ in connect, step 0, for \d+.\d s\n", ranks.errors(0))


def test_a_late_rank_is_named_with_its_action(ranks: Ranks, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is alive, so the message has its own action, and not the channel in which the others wait for it."""
    monkeypatch.setattr(torchrun_watch, "SETTLE_S", 1.0)

    def target(rank: int, world: int, board: Board) -> None:
        if rank == 1:
            board.set_action("load data")
            block()
        wait_for(lambda: heard("load data", "block"), "what rank 1 does")
        connecting(rank, world, board)

    assert ranks.codes(target) == [1, 1]
    errors = ranks.errors(0) + ranks.errors(1)
    assert "error: rank 0 failed during connect, step 0: " in errors
    assert "rank 1 did not come within 1.5 s: this rank waits in `connect`" in errors
    assert re.search(r"\n  rank 1: sleeping in load data, step 0, for \d+.\d s at processes.py", errors)


def connecting(rank: int, world: int, board: Board) -> None:
    """Open the channel of the world, for which rank 1 is missing."""
    wanted = WantedChannels(Mesh(pp=1, dp=world, ep=1, tp=1, cp=1), (Opening("world", (0,), "all"),), {})
    Endpoint(start_timeout_s=1.5).connect(rank, wanted, board.set_action)


# ---------------------------------------------------------------- stops


def steps(folder: Path) -> Target:
    def target(rank: int, world: int, board: Board) -> None:
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        step = 0
        while not board.should_stop(step):
            step += 1
            board.start_step(step)
            dist.all_reduce(torch.ones(1))
            if step == 3:
                (folder / f"ready_{rank}").touch()
        (folder / f"end_{rank}").write_text(str(step))

    return target


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_both_after_the_same_step(ranks: Ranks, to: int, number: signal.Signals) -> None:
    ranks.agents = (0, 1)
    with ranks.started(steps(ranks.folder)) as processes:
        wait_for(lambda: all((ranks.folder / f"ready_{rank}").exists() for rank in range(2)), "three steps")
        processes[to].send(number)
        assert [process.exit_code() for process in processes] == [128 + number] * 2
    ends = [(ranks.folder / f"end_{rank}").read_text() for rank in range(2)]
    assert ends[0] == ends[1] and int(ends[0]) > 3
    assert ranks.errors(0) == ranks.errors(1) == f"stopped: rank {to} received {number.name}; go on with --resume\n"


def test_a_signal_that_comes_again_kills(ranks: Ranks, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main threads are in a step that does not end, so only their watches can hear it."""
    receive = torchrun_watch.TorchrunWatch._receive

    def noting(self: torchrun_watch.TorchrunWatch, number: int) -> None:
        receive(self, number)
        (ranks.folder / f"signals_{len(self._signals)}").touch()

    monkeypatch.setattr(torchrun_watch.TorchrunWatch, "_receive", noting)
    monkeypatch.setattr(torchrun_watch, "REPEAT_S", 0.0)
    with ranks.started(train(forever, ranks.folder)) as processes:
        wait_for(lambda: heard("W1.5", "forever"), "the step")  # before, the first signal ends the ranks
        processes[0].send(signal.SIGTERM)
        wait_for((ranks.folder / "signals_1").exists, "the first signal to be heard")
        processes[0].send(signal.SIGTERM)
        assert [process.exit_code() for process in processes] == [128 + signal.SIGTERM] * 2


# ---------------------------------------------------------------- refusals


def test_a_folder_in_use_is_refused_for_now(ranks: Ranks) -> None:
    (ranks.folder / "run").mkdir()
    lock = lock_folder(ranks.folder / "run")
    assert ranks.codes(train(lambda: None, ranks.folder)) == [REFUSED + 75] * 2
    assert ranks.errors(0) == ranks.errors(1) == f"another run is using {ranks.folder}/run\n"
    os.close(lock)
    assert ranks.codes(train(lambda: None, ranks.folder)) == [0, 0]


def test_a_run_holds_its_folder(ranks: Ranks) -> None:
    def target(rank: int, world: int, board: Board) -> None:
        (ranks.folder / f"ready_{rank}").touch()
        wait_for((ranks.folder / "seen").exists, "the other run")

    with ranks.started(target) as processes:
        wait_for((ranks.folder / "ready_0").exists, "the run")
        with pytest.raises(RuntimeError, match="another run is using"):
            lock_folder(ranks.folder / "run")
        (ranks.folder / "seen").touch()
        assert [process.exit_code() for process in processes] == [0, 0]


def test_another_build_is_refused(ranks: Ranks) -> None:
    codes = ranks.codes(train(lambda: None, ranks.folder), digest=lambda rank: "da"[rank])
    assert codes == [REFUSED + 2] * 2
    assert ranks.errors(1) == "rank 1 opened another build than rank 0: copy one build to all machines\n"


def test_another_run_folder_is_refused(ranks: Ranks) -> None:
    codes = ranks.codes(train(lambda: None, ranks.folder), run=lambda rank: ranks.folder / f"run_{rank}")
    assert codes == [2, 2]
    message = f"error: {ranks.folder}/run_1 of rank 1 is not the folder that rank 0 trains in"
    assert message in ranks.errors(0) + ranks.errors(1)


def test_an_invalid_environment_is_refused() -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert TorchrunRank.of(good).rank == 1
    for wrong in ({"RANK": "first"}, {"RANK": "2"}, {"RANK": "-1"}, {"MASTER_PORT": ""}):
        with pytest.raises(ValueError, match="start with torchrun"):
            TorchrunRank.of(good | wrong)


# ---------------------------------------------------------------- the store


def test_nothing_listens_outside_loopback(ranks: Ranks) -> None:
    """Runs on one machine use no store that a torchrun opened itself."""

    def target(rank: int, world: int, board: Board) -> None:
        (ranks.folder / f"listeners_{rank}").write_text("\n".join(listeners(os.getpid())) + "\n")

    assert ranks.codes(target) == [0, 0]
    addresses = "".join((ranks.folder / f"listeners_{rank}").read_text() for rank in range(2)).split()
    assert addresses and set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_restarted_ranks_meet_in_the_previous_store(ranks: Ranks) -> None:
    """torchrun keeps its store with the addresses of dead ranks, and after a failure of the other machine it does not
    count a restart."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.port = store.port
    ranks.environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    restarted = [ranks.folder / f"restarted_{rank}" for rank in range(2)]
    for attempt in range(3):
        assert ranks.codes(train(die, ranks.folder)) == [1, -signal.SIGKILL]
        assert [path.read_text() for path in restarted] == [str(attempt > 0)] * 2
    assert ranks.codes(train(lambda: None, ranks.folder)) == [0, 0]
    assert [(ranks.folder / f"sum_{rank}").read_text() for rank in range(2)] == ["6.0", "6.0"]
