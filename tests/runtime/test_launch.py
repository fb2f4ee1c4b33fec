"""Faults in real processes: the rank, its action and the reason are always named, and no process is left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.launch import rank_watch
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_process import _LogFile
from runtime.launch.rank_watch import Stillness, Supervision
from runtime.launch.run_lock import RunFolderBusyError
from runtime.system.outcome import Outcome
from tests.progress import PATIENCE_S, children
from tests.runtime.hangs import from_then_on
from tests.runtime.processes import block, is_gone, listeners, state, wait_for

WORLD = 3
STEP, ACTION = 2, "B3.7"


@pytest.fixture(autouse=True)
def _no_process_left() -> object:
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


@pytest.fixture(autouse=True)
def _late_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not take a lost connection for the cause until all ranks have ended, however long the true cause takes."""
    monkeypatch.setattr(rank_watch, "SETTLE_S", PATIENCE_S)


def train(rank: int, world: int, board: Board, fault: Callable[[], object], at: int) -> None:
    """Three steps with a collective each. Rank `at` runs `fault` in step 2, during B3.7."""
    for step in range(3):
        board.start_step(step)
        board.set_action("F3.7")
        sum_T = torch.ones(8)
        dist.all_reduce(sum_T)
        assert sum_T.tolist() == [world] * 8
        board.set_action(ACTION)
        if (rank, step) == (at, STEP):
            fault()
        board.set_action("reduce head")
        dist.all_reduce(sum_T)


def run(folder: Path, fault: Callable[[], object], at: int, world: int = WORLD, **options: object) -> Outcome:
    return launch(lambda rank, size, board: train(rank, size, board, fault, at), world, folder=folder, **options)  # type: ignore[arg-type]


def raise_(error: BaseException) -> Callable[[], object]:
    def fault() -> object:
        raise error

    return fault


def suicide(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def test_a_run_without_fault_finishes(tmp_path: Path) -> None:
    outcome = run(tmp_path, lambda: None, 0)
    assert (outcome.ok, outcome.exit_code, str(outcome)) == (True, 0, "finished")
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [f"rank_{r}.log" for r in range(WORLD)]
    assert not list(tmp_path.glob(".meeting-*"))


@pytest.mark.parametrize("what", ["gone", "link"])
def test_a_meeting_place_that_cannot_be_removed_changes_no_outcome(tmp_path: Path, what: str) -> None:
    """A cleaner of temporary files may have been there, and any name may be taken."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / ".meeting-theirs").symlink_to(tmp_path / "theirs")

    def target(*_: object) -> None:
        (place,) = tmp_path.glob(".meeting-*")
        shutil.rmtree(place)
        if what == "link":
            place.symlink_to(tmp_path / "theirs")

    outcome = launch(target, 1, folder=tmp_path, backend=None)
    assert outcome.ok, outcome
    assert (tmp_path / "theirs" / "file").exists()


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "exception": (raise_(ValueError("no such expert")), "ValueError: no such expert"),
    "EIO": (raise_(OSError(errno.EIO, "Input/output error")), "OSError: [Errno 5] Input/output error"),
    "SIGKILL": (suicide(signal.SIGKILL), "killed by SIGKILL from outside (the kernel counted no out-of-memory kill)"),
    "SEGV": (suicide(signal.SIGSEGV), "killed by SIGSEGV"),
    "abort": (os.abort, "killed by SIGABRT"),
    "_exit(0)": (lambda: os._exit(0), "left with exit code 0 before its end"),
    "_exit(7)": (lambda: os._exit(7), "left with exit code 7 before its end"),
    "sys.exit": (lambda: sys.exit(0), "SystemExit: 0"),
}


@pytest.mark.parametrize("hang_timeout_s", [1.0, 300.0])
def test_a_finished_rank_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], hang_timeout_s: float
) -> None:
    """The run has finished, and nothing of it is lost."""
    monkeypatch.setattr(rank_watch, "LEAVE_S", 1.5)
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: block() if dist.get_rank() == 1 else destroy())
    done = tmp_path / "done"
    outcome = launch(
        lambda *_: done.touch(), WORLD, folder=tmp_path, supervision=Supervision(hang_timeout_s=hang_timeout_s)
    )
    assert outcome.ok and outcome.exit_code == 0 and done.exists()
    limit = "1" if hang_timeout_s == 1.0 else "1.5"
    assert capfd.readouterr().err == f"warning: rank 1 had finished, but did not end in {limit} s: killed\n"


@pytest.mark.parametrize(("name", "at"), [(name, i % WORLD) for i, name in enumerate(FAULTS)])
def test_a_fault_is_named(tmp_path: Path, name: str, at: int) -> None:
    fault, reason = FAULTS[name]
    outcome = run(tmp_path, fault, at)
    assert (outcome.kind, outcome.exit_code) == ("failed", 1)
    assert (outcome.rank, outcome.step, outcome.action, outcome.reason) == (at, STEP, ACTION, reason)
    assert outcome.log == tmp_path / "logs" / f"rank_{at}.log"
    assert str(outcome).startswith(f"rank {at} failed during B3.7, step 2: {reason}\n")


def test_the_traceback_is_in_the_outcome_and_in_the_log(tmp_path: Path) -> None:
    outcome = run(tmp_path, raise_(ValueError("no such expert")), 1)
    assert outcome.log is not None
    log = outcome.log.read_text()
    for text in (outcome.detail, str(outcome), log):
        assert "in fault" in text and "raise error" in text and "ValueError: no such expert" in text


def test_a_segmentation_fault_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    outcome = run(tmp_path, suicide(signal.SIGSEGV), 1)
    assert outcome.log is not None and "Segmentation fault" in outcome.log.read_text()


def until_all_have_ended() -> Callable[[Board], None]:
    """For `on_poll`: holds the supervisor until all ranks have ended by themselves, so that it finds all at once."""
    existing = set(children(os.getpid()))

    def wait(_: Board) -> None:
        wait_for(
            lambda: all(is_gone(pid) for pid in children(os.getpid()) if pid not in existing), "the end of all ranks"
        )

    return wait


@pytest.mark.parametrize("fault", ["SIGKILL", "exception"])
def test_a_rank_that_lost_its_peer_is_not_blamed_even_if_noticed_first(tmp_path: Path, fault: str) -> None:
    """The fault spreads before the supervisor looks, so it finds all ranks dead at once."""
    outcome = run(tmp_path, FAULTS[fault][0], 1, supervision=Supervision(until_all_have_ended()))
    assert (outcome.rank, outcome.action, outcome.reason) == (1, ACTION, FAULTS[fault][1])


def test_a_broken_connection_with_no_other_cause_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, raise_(ConnectionResetError("Connection reset by peer")), 2)
    assert (outcome.rank, outcome.reason) == (2, "ConnectionResetError: Connection reset by peer")


def test_the_first_line_of_a_message_is_the_reason(tmp_path: Path) -> None:
    outcome = run(tmp_path, raise_(ValueError("no such expert\nthere are 16\n")), 0, world=1)
    assert outcome.reason == "ValueError: no such expert" and "there are 16" in outcome.detail


def test_of_several_failures_the_first_by_time_is_the_cause(tmp_path: Path) -> None:
    def target(rank: int, world: int, board: Board) -> None:
        board.set_action(f"W{rank}.0")
        if rank != 1:
            wait_for(lambda: board.failure(1), "the failure of rank 1")
        raise ValueError(f"from rank {rank}")

    outcome = launch(target, 4, folder=tmp_path, supervision=Supervision(until_all_have_ended()), backend=None)
    assert (outcome.rank, outcome.action, outcome.reason) == (1, "W1.0", "ValueError: from rank 1")


def test_a_chained_connection_error_is_a_lost_peer(tmp_path: Path) -> None:
    def target(rank: int, world: int, board: Board) -> None:
        if rank == 0:
            try:
                raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
            except RuntimeError as error:
                raise ValueError("dispatch F3.0@L17 failed") from error
        wait_for(lambda: board.failure(0), "the failure of rank 0")
        raise KeyError("the cause")

    outcome = launch(target, 2, folder=tmp_path, backend=None)
    assert (outcome.rank, outcome.reason) == (1, "KeyError: 'the cause'")


def test_an_out_of_memory_kill_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 6])
    monkeypatch.setattr("runtime.launch.launcher.oom_kills_so_far", lambda: next(counts))
    monkeypatch.setattr("runtime.launch.rank_watch.oom_kills_so_far", lambda: next(counts))
    outcome = run(tmp_path, suicide(signal.SIGKILL), 0, world=1)
    assert outcome.reason == "killed by SIGKILL, likely out of memory (the kernel counted an out-of-memory kill)"


def test_the_last_actions_of_ranks_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The board is polled once more after all ranks have ended."""
    order = []

    def watched(*_: object) -> Outcome:
        order.append("watched")
        return Outcome("finished")

    monkeypatch.setattr(Supervision, "watch", watched)
    launch(lambda *_: None, 1, folder=tmp_path, backend=None, supervision=Supervision(lambda _: order.append("shown")))
    assert order == ["watched", "shown"]


# ---------------------------------------------------------------- hangs


def counting(monkeypatch: pytest.MonkeyPatch, is_so: Callable[[Board], object], limit_s: float = 1.0) -> Supervision:
    """A supervision whose hang clock is stopped until `is_so(board)` holds."""
    begun = False

    def on_poll(board: Board) -> None:
        nonlocal begun
        begun = begun or bool(is_so(board))

    from_then_on(monkeypatch, lambda: begun)
    return Supervision(on_poll, hang_timeout_s=limit_s)


def in_place(board: Board, at: int) -> bool:
    """Whether rank `at` of `train` has reached its fault, and all others wait for it."""
    beats = [board.read(rank) for rank in range(WORLD)]
    expected = [ACTION if rank == at else "reduce head" for rank in range(WORLD)]
    return [beat.action for beat in beats] == expected and all(beat.step == STEP for beat in beats)


def test_a_stopped_rank_is_named_among_those_that_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(children(os.getpid()))

    def all_rest(board: Board) -> bool:
        ranks = [pid for pid in children(os.getpid()) if pid not in others]
        return in_place(board, 1) and sorted(map(state, ranks)) == ["S", "S", "T"]

    supervision = counting(monkeypatch, all_rest)
    outcome = run(tmp_path, suicide(signal.SIGSTOP), 1, supervision=supervision)
    assert (outcome.kind, outcome.exit_code) == ("hung", 3)
    assert (outcome.rank, outcome.step, outcome.action) == (1, STEP, ACTION)
    assert outcome.reason.endswith("its process is stopped")
    assert [w.rank for w in outcome.waiting] == [0, 1, 2]
    others = [w for w in outcome.waiting if w.rank != 1]
    assert all((w.action, w.state) == ("reduce head", "sleeping") and "all_reduce" in w.where for w in others)


def test_a_rank_that_never_comes_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forever() -> None:
        (tmp_path / "forever").touch()
        while True:
            pass

    supervision = counting(monkeypatch, lambda board: in_place(board, 2) and (tmp_path / "forever").exists())
    outcome = run(tmp_path, forever, 2, supervision=supervision)
    assert (outcome.kind, outcome.rank, outcome.action) == ("hung", 2, ACTION)
    (culprit,) = (w for w in outcome.waiting if w.rank == 2)
    assert (culprit.state, culprit.for_s >= 1.0, "in forever" in culprit.where) == ("running", True, True)
    assert outcome.reason.endswith("it waits for no other rank")
    assert "rank 2: running in B3.7, step 2" in str(outcome)


def test_a_hang_is_named_without_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "rank_0.log"

    def target(rank: int, world: int, board: Board) -> None:
        log.unlink()
        (tmp_path / "removed").touch()
        block()

    supervision = counting(monkeypatch, lambda _: (tmp_path / "removed").exists(), limit_s=0.5)
    outcome = launch(target, 1, folder=tmp_path, supervision=supervision, backend=None)
    assert (outcome.kind, outcome.rank, outcome.action) == ("hung", 0, "start") and not log.exists()


def test_a_hang_is_judged_by_the_stacks_of_that_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by one that stood in the log before."""

    def write_stack(log: Path, file: str, function: str) -> None:
        with log.open("a") as stream:
            stream.write(f'Current thread 0x1 (most recent call first):\n  File "{file}", line 7 in {function}\n')

    board, ranks = (
        Board(2),
        [rank_watch.RankProcess(rank, os.getpid(), rank, tmp_path / f"{rank}.log") for rank in (0, 1)],
    )
    files = {0: ("/runtime/comm/exchange.py", "wait"), 1: ("/work/step.py", "forward")}
    for process in ranks:
        board.bind(process.rank).set_action("F0")
        write_stack(process.log, *files[1 - process.rank])
    monkeypatch.setattr(rank_watch, "STACK_S", 0.0)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda rank, _: write_stack(ranks[rank].log, *files[rank]))
    outcome = rank_watch._outcome_of_hang(ranks, board, 5.0)
    assert (outcome.rank, outcome.reason.rpartition("; ")[2]) == (1, "it waits for no other rank")
    assert [waiter.where for waiter in outcome.waiting] == ["exchange.py:7 in wait", "step.py:7 in forward"]


def test_a_deadlock_is_a_hang_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks receive first."""

    def target(rank: int, world: int, board: Board) -> None:
        board.set_action(f"recv F{rank}.0")
        dist.recv(torch.zeros(1), 1 - rank)

    receives = ["recv F0.0", "recv F1.0"]
    supervision = counting(monkeypatch, lambda board: [board.read(rank).action for rank in range(2)] == receives)
    outcome = launch(target, 2, folder=tmp_path, supervision=supervision)
    assert outcome.kind == "hung"
    assert [w.action for w in outcome.waiting] == receives
    assert outcome.reason.endswith("all wait for one another, this rank the longest")


def test_a_slow_rank_that_reports_is_not_a_hang() -> None:
    """Actions that together take longer than the limit are no hang if none does alone."""
    stillness = Stillness(checked=0.0)
    for number in range(1, 80):  # a look every 0.1 s, and a new action every 0.8 s
        assert stillness.seconds(number / 10, (number // 8,)) < 0.75


def test_suspension_of_the_supervisor_is_not_a_hang() -> None:
    stillness = Stillness(checked=0.0)
    assert stillness.seconds(0.1, (7,)) == 0.0  # something changed
    assert stillness.seconds(0.2, (7,)) == pytest.approx(0.1)
    assert stillness.seconds(3600.0, (7,)) == pytest.approx(0.3)  # an hour asleep counts as two polls
    assert stillness.seconds(3600.1, (8,)) == 0.0


# ---------------------------------------------------------------- environment of a rank


def test_nothing_listens_outside_loopback(tmp_path: Path) -> None:
    addresses_of: dict[int, list[str]] = {}
    existing = set(children(os.getpid()))  # of the tests before this one: the tracker of shared memory, for example

    def on_poll(board: Board) -> None:
        if all(board.read(rank).action == "look" for rank in range(2)) and not addresses_of:
            ranks = [pid for pid in children(os.getpid()) if pid not in existing]
            addresses_of.update({pid: listeners(pid) for pid in [os.getpid(), *ranks]})
            (tmp_path / "seen").touch()

    def target(rank: int, world: int, board: Board) -> None:
        dist.barrier()
        board.set_action("look")
        wait_for((tmp_path / "seen").exists, "the supervisor's look")

    assert launch(target, 2, folder=tmp_path, supervision=Supervision(on_poll)).ok
    assert addresses_of.pop(os.getpid()) == []
    assert len(addresses_of) == 2
    assert all(addresses and set(addresses) == {"0100007F"} for addresses in addresses_of.values())  # 127.0.0.1


def test_a_rank_computes_on_one_thread_and_no_dead_pool(tmp_path: Path) -> None:
    """The supervisor's thread pool must end first, or the second computation of a rank waits for dead threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    x_NN = torch.randn(400, 400)
    (x_NN @ x_NN).exp_()  # starts the pool here
    torch.set_num_threads(threads)

    def target(rank: int, world: int, board: Board) -> None:
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
        (x_NN @ x_NN).exp_()
        torch.set_num_threads(2)
        (x_NN @ x_NN).exp_()

    outcome = launch(target, 2, folder=tmp_path, backend=None, supervision=Supervision(hang_timeout_s=PATIENCE_S))
    assert outcome.ok, str(outcome)


def test_output_goes_to_the_log_of_its_rank(tmp_path: Path) -> None:
    def target(rank: int, world: int, board: Board) -> None:
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)
        os.system(f"echo sub {rank}")
        assert sys.stdin.read() == ""

    assert launch(target, 2, folder=tmp_path, backend=None).ok
    for rank in range(2):
        lines = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert sorted(lines) == sorted(f"{source} {rank}" for source in ("out", "err", "sub"))


def test_a_full_disk_under_the_log_does_not_end_a_print() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with _LogFile(full, "w") as log:
        assert log.write(b"lost") == 4


def test_a_log_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "logs" / "rank_0.log").symlink_to(tmp_path / "elsewhere")
    outcome = launch(lambda *_: None, 1, folder=tmp_path, backend=None)
    assert (outcome.kind, outcome.rank, outcome.action) == ("failed", 0, "start")
    assert "Too many levels of symbolic links" in outcome.reason
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_output_of_a_rank_cannot_control_the_terminal(tmp_path: Path) -> None:
    outcome = run(tmp_path, raise_(ValueError("\x1b]0;owned\x07\x1b[2J")), 0, world=1)
    assert all(c.isprintable() or c == "\n" for c in str(outcome))
    assert r"\x1b]0;owned\x07" in str(outcome)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    refused = []

    def on_poll(board: Board) -> None:
        if not refused:
            with pytest.raises(RunFolderBusyError, match="another run is using") as error:
                launch(lambda *_: None, 1, folder=tmp_path, backend=None)
            refused.append(error)

    assert launch(lambda *_: None, 1, folder=tmp_path, supervision=Supervision(on_poll), backend=None).ok
    assert refused
    assert launch(lambda *_: None, 1, folder=tmp_path, backend=None).ok


def test_an_error_of_the_supervisor_ends_the_ranks(tmp_path: Path) -> None:
    def on_poll(board: Board) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(lambda *_: block(), 2, folder=tmp_path, supervision=Supervision(on_poll), backend=None)
