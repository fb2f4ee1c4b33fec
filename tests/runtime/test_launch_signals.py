"""Signals to the supervisor and to ranks, and the death of the supervisor."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.launch import debug, rank_process, rank_watch
from runtime.launch.heartbeat import Board, RankBeat
from runtime.launch.launcher import launch
from runtime.launch.rank_process import Target
from runtime.launch.rank_watch import REPEAT_S, Interrupts, ReceivedSignal, Supervision
from tests.runtime.processes import block, forked, is_gone, wait_for

WORLD = 3


def train_until_told(folder: Path) -> Target:
    """Endless steps. Each rank writes its process id, and the step after which it ended."""

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


def supervise(folder: Path, target: Target) -> int:
    outcome = launch(target, WORLD, folder=folder)
    (folder / "outcome").write_text(str(outcome))
    return outcome.exit_code


def pids(folder: Path) -> list[int]:
    """Wait until all ranks train. Returns their process ids."""
    wait_for(lambda: len(list(folder.glob("ready_*"))) == WORLD, "all ranks to train")
    return [int((folder / f"pid_{rank}").read_text()) for rank in range(WORLD)]


def assert_gone(ranks: list[int]) -> None:
    wait_for(lambda: all(is_gone(pid) for pid in ranks), "the ranks to end")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_ranks_after_the_same_step(tmp_path: Path, number: int, code: int) -> None:
    with forked(lambda: supervise(tmp_path, train_until_told(tmp_path))) as supervisor:
        ranks = pids(tmp_path)
        supervisor.send(number)
        assert supervisor.exit_code() == code
    assert_gone(ranks)
    assert len({(tmp_path / f"end_{rank}").read_text() for rank in range(WORLD)}) == 1
    assert (tmp_path / "outcome").read_text() == f"stopped: the supervisor received {signal.Signals(number).name}"


def test_a_signal_to_a_rank_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    with forked(lambda: supervise(tmp_path, train_until_told(tmp_path))) as supervisor:
        ranks = pids(tmp_path)
        os.kill(ranks[1], signal.SIGTERM)
        assert supervisor.exit_code() == 143
    assert len({(tmp_path / f"end_{rank}").read_text() for rank in range(WORLD)}) == 1
    assert (tmp_path / "outcome").read_text() == "stopped: rank 1 received SIGTERM"


def test_a_signal_to_all_processes_is_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal or a batch system sends a signal to all processes; here the supervisor gets it twice."""
    monkeypatch.setattr(rank_watch, "REPEAT_S", 3600.0)  # however late the second one comes
    with forked(lambda: supervise(tmp_path, train_until_told(tmp_path))) as supervisor:
        ranks = pids(tmp_path)
        for pid in (supervisor.pid, *ranks, supervisor.pid):
            os.kill(pid, signal.SIGTERM)
        assert supervisor.exit_code() == 143
    assert len({(tmp_path / f"end_{rank}").read_text() for rank in range(WORLD)}) == 1
    assert (tmp_path / "outcome").read_text().startswith("stopped: ")


def ignoring(folder: Path) -> Target:
    def target(rank: int, world: int, board: Board) -> None:
        (folder / f"pid_{rank}").write_text(str(os.getpid()))
        (folder / f"ready_{rank}").touch()
        wait_for(board.stop_request, "the first signal")
        (folder / f"asked_{rank}").touch()
        block()

    return target


def test_a_second_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "REPEAT_S", 0.0)
    with forked(lambda: supervise(tmp_path, ignoring(tmp_path))) as supervisor:
        ranks = pids(tmp_path)
        supervisor.send(signal.SIGTERM)
        wait_for(lambda: len(list(tmp_path.glob("asked_*"))) == WORLD, "the supervisor's request")
        supervisor.send(signal.SIGTERM)
        assert supervisor.exit_code() == 143
    assert_gone(ranks)
    assert (tmp_path / "outcome").read_text() == "killed: SIGTERM came a second time"


def test_signal_handlers_are_restored_after_a_launch() -> None:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before = signal.set_wakeup_fd(theirs)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: interrupts.received, "the signal")
        assert signal.set_wakeup_fd(theirs) == theirs, "whoever was woken by signals is woken again"
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)
        os.close(theirs)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [number for number, _ in interrupts.received] == [signal.SIGTERM]


def test_a_signal_that_comes_again_at_once_does_not_insist() -> None:
    interrupts = Interrupts([ReceivedSignal(signal.SIGTERM, 7.0), ReceivedSignal(signal.SIGTERM, 7.0 + REPEAT_S)])
    assert interrupts.repeated_signal() == 0
    interrupts.received.append(ReceivedSignal(signal.SIGINT, 7.01 + REPEAT_S))
    assert interrupts.repeated_signal() == signal.SIGINT


@pytest.mark.parametrize("when", ["running", "stopped"])
def test_no_rank_survives_the_supervisor(tmp_path: Path, when: str) -> None:
    with forked(lambda: supervise(tmp_path, train_until_told(tmp_path))) as supervisor:
        ranks = pids(tmp_path)
        if when == "stopped":
            os.kill(ranks[0], signal.SIGSTOP)
        supervisor.send(signal.SIGKILL)
        assert supervisor.exit_code() == -signal.SIGKILL
        assert_gone(ranks)
    # Its leftovers do not disturb the next run in the same folder.
    assert list(tmp_path.glob(".meeting-*"))
    assert launch(lambda *_: None, 2, folder=tmp_path).ok
    assert not list(tmp_path.glob(".meeting-*"))


def test_a_kill_from_outside_names_rank_and_action(tmp_path: Path) -> None:
    def on_poll(board: Board) -> None:
        beats = [board.read(rank) for rank in range(WORLD)]
        if all(beat.action == f"B{rank}.0" for rank, beat in enumerate(beats)) and not killed:
            killed.append(int((tmp_path / "pid_2").read_text()))
            os.kill(killed[0], signal.SIGKILL)

    def target(rank: int, world: int, board: Board) -> None:
        (tmp_path / f"pid_{rank}").write_text(str(os.getpid()))
        board.start_step(11)
        board.set_action(f"B{rank}.0")
        block()

    killed: list[int] = []
    outcome = launch(target, WORLD, folder=tmp_path, supervision=Supervision(on_poll), backend=None)
    assert (outcome.rank, outcome.step, outcome.action) == (2, 11, "B2.0")


# ---------------------------------------------------------------- the board


def test_a_board_reads_back() -> None:
    board = Board(3)
    mine = board.bind(1)
    mine.start_step(7)
    for number in range(5):
        mine.set_action(f"dispatch F3.{number}@L17")
        beat = board.read(1)
        assert (beat.step, beat.action) == (7, f"dispatch F3.{number}@L17")
    assert board.read(0) == RankBeat(0, "", 0)
    mine.set_action("x" * 200)
    assert board.read(1).action == "x" * 112
    assert not board.has_finished(1)
    mine.finish()
    assert board.has_finished(1) and not board.has_finished(0)


def test_a_long_failure_keeps_its_end_and_its_neighbours() -> None:
    board = Board(2)
    board.bind(1).set_action("F0.0")
    board.bind(0).fail("x" * 10_000 + "\nmore", "y" * 10_000 + " the end", lost_peer=True)
    failure = board.failure(0)
    assert failure is not None and failure.lost_peer and failure.summary == "x" * 1000
    assert set(failure.detail) == set("y the end") and failure.detail.endswith("y the end")
    assert board.failure(1) is None and board.read(1).action == "F0.0"


def test_only_rank_0_decides_the_last_step_and_one_step_ahead() -> None:
    board = Board(2)
    rank_0, rank_1 = board.bind(0), board.bind(1)
    assert not rank_0.should_stop(4) and not rank_1.should_stop(4)
    board.request_stop(signal.SIGTERM)
    rank_1.request_stop(signal.SIGINT)  # later: not heard
    assert not rank_1.should_stop(5)
    assert not rank_0.should_stop(5)  # decides: after step 6
    assert not rank_1.should_stop(5)
    rank_1.request_stop(signal.SIGINT)
    assert rank_0.should_stop(6) and rank_1.should_stop(6)
    request = board.stop_request()
    assert request is not None and (request.signal, request.rank) == (signal.SIGTERM, -1)


# ---------------------------------------------------------------- without processes


@pytest.mark.parametrize(("rank", "who"), [(-1, "the supervisor"), (0, "rank 0"), (1, "rank 1")])
def test_the_receiver_of_the_signal_is_reported(rank: int, who: str) -> None:
    board = Board(2)
    watch = Supervision().watch
    assert str(watch([], board, SimpleNamespace(wake=0), 0)) == "finished"
    (board.bind(rank) if rank >= 0 else board).request_stop(signal.SIGTERM)
    (board.bind(1 - max(rank, 0))).request_stop(signal.SIGINT)  # the first one holds
    assert str(watch([], board, SimpleNamespace(wake=0), 0)) == f"stopped: {who} received SIGTERM"


def test_ranks_meet_before_their_process_group_and_leave_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing rank is named; the process group alone would wait for it silently."""
    happened: list[object] = []
    seat: Any = SimpleNamespace(backend="gloo", world=3, rank=1, rendezvous=tmp_path / "store", start_timeout_s=5.0)
    board: Any = SimpleNamespace(set_action=print)

    def meeting(store: object, rank: int, timeout_s: float, say: object) -> object:
        assert (store, rank, timeout_s, say) == (f"{tmp_path}/store", 1, 5.0, print)
        return SimpleNamespace(arrive=lambda name, ranks: happened.append((name, [*ranks])))

    group = {"store": f"{tmp_path}/store", "rank": 1, "world_size": 3, "timeout": rank_process.NO_TIMEOUT}
    fake = SimpleNamespace(
        FileStore=lambda path, world: path,
        init_process_group=lambda backend, **options: happened.append(backend) if options == group else None,
        is_initialized=lambda: True,
        barrier=lambda: happened.append("barrier"),
        destroy_process_group=lambda: happened.append("left"),
    )
    monkeypatch.setattr(rank_process, "Meeting", meeting)
    monkeypatch.setattr(rank_process, "dist", fake)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth0")
    with rank_process._process_group(seat, board):
        assert happened == [("start", [0, 1, 2]), "gloo"]
        assert {os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} == {"lo"}
    assert happened[2:] == ["barrier", "left"]
    with rank_process._process_group(SimpleNamespace(backend=None), board):
        assert len(happened) == 4


def test_a_rank_with_the_terminal_notes_it_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, object] = {}
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(debug, "signal", SimpleNamespace(signal=handlers.__setitem__, SIGINT=2, default_int_handler=7))
    debug.take_terminal(tmp_path / "log")
    assert (tmp_path / "log").read_text("utf-8") == f"process {os.getpid()} had the terminal: its output is there\n"
    assert handlers == {2: 7} and sys.stdin.fileno() == 0
