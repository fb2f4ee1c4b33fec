"""`dsc watch` on finished, running and killed runs, and on a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyte
import pytest
from rich.console import Console

from compiler.cli.commands import watch
from compiler.cli.main import main
from runtime.contract import WatchFacts as Forecast
from runtime.launch.run_lock import lock_folder
from runtime.observe.events import Events
from runtime.observe.metrics import MetricsWriter
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState
from runtime.observe.watch.series import SERIES
from runtime.observe.watch.view import panel
from runtime.system.lines import utc_now
from tests.compiler.cli.forms import FORMS, faults
from tests.progress import Watch
from tests.runtime.processes import wait_for

FORECAST = dict(
    run="mine", model="m", cluster="c", devices=4, phase=1, phases=1, flops_per_token=2e9, peak_flops=8e14, mfu=0.4,
    step_s=0.5, tokens=1000, bubble=0.125, memory_bytes=[2**30, 3 * 2**30], capacity_bytes=[2**33, 2**33], links=[],
)  # fmt: skip
ROW = dict(
    loss=5.1234, grad_norm=0.83, rate=2.2e-4, tokens_per_s=1e5, step_s=0.25, memory_bytes=2**31, imbalance=1.5,
    layer_imbalance={"layers.1": 1.0, "layers.2": 1.5, "layers.3": 2.5},
    spent_s={"compute": 0.6, "message": 0.2, "sum": 0.2},
)  # fmt: skip


def next_millisecond() -> None:
    """Rows and events are ordered by their times, which have milliseconds."""
    before = utc_now()
    wait_for(lambda: utc_now() > before, "the next millisecond")


class Clock:
    """The clock of `dsc watch`: it advances when the command sleeps, and the run advances with it."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.later: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.slept_s

    def time(self) -> float:
        return time.time() + self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        if self.later:
            self.later.pop(0)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`later`: what happens between the first looks of the command, one after the other."""
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


class Run:
    """The folder of a run of 9 steps, which a test writes."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.events = folder, Events(folder)
        (folder / "watch.json").write_text(json.dumps(FORECAST))
        self.events.write("start", step=resume_step, last_step=9, ranks=4, device="cpu", transport="memory", build="b")
        self.metrics = MetricsWriter(folder, resume_step)

    def steps(self, *steps: int, **more: Any) -> None:
        for step in steps:
            next_millisecond()
            self.metrics.write({"step": step, **ROW, **more})

    def end(self, outcome: str = "finished", code: int = 0, reason: str = "") -> None:
        self.events.write("end", outcome=outcome, exit_code=code, step=9, reason=reason)

    def silent_for(self, seconds: float) -> None:
        for name in ("metrics.jsonl", "events.jsonl"):
            os.utime(self.folder / name, (time.time() - seconds,) * 2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "mine")


def watched(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(["watch", str(run), *words])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("outcome", "code", "reason"),
    [("finished", 0, ""), ("failed", 1, "rank 2 left"), ("hung", 3, "all wait"), ("stopped", 143, "x")],
)
def test_a_run_that_is_over_is_shown_with_its_exit_code(
    run: Run, capsys: pytest.CaptureFixture[str], outcome: str, code: int, reason: str
) -> None:
    run.steps(1, 2, validation_loss=4.5)
    run.steps(3)
    run.end(outcome, code, reason)
    exit_code, lines = watched(run.folder, capsys)
    assert exit_code == code
    assert lines == [
        "step 3/9  loss 5.1234  validation 4.5000 at step 2  100,000 tokens/s  expert load 1.50x",
        f"{outcome} after step 9" + (f": {reason}" if reason else ""),
    ]


def test_a_resumed_run_is_shown_as_running_again(run: Run, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps(1, 2, 3)
    run.end("failed", 1, "rank 0 left")
    resumed = Run(run.folder, resume_step=3)
    clock.later = [lambda: (resumed.steps(4), resumed.end("finished"))]  # type: ignore[func-returns-value]
    with_lock = lock_folder(run.folder)
    code, lines = watched(run.folder, capsys)
    os.close(with_lock)
    assert code == 0 and [line[:8] for line in lines] == ["step 3/9", "finished", "step 4/9"]


@pytest.mark.parametrize("is_held", [False, True])
def test_killed_processes_are_distinguished_from_slow_ones(
    run: Run, clock: Clock, capsys: pytest.CaptureFixture[str], is_held: bool
) -> None:
    run.steps(1, 2)
    run.silent_for(3600)
    lock = lock_folder(run.folder) if is_held else -1
    if is_held:
        clock.later = [run.end]
    code = main(["watch", str(run.folder)])
    captured = capsys.readouterr()
    assert code == (0 if is_held else 1)
    assert ("its processes were killed" in captured.err) == (not is_held)
    if is_held:
        os.close(lock)


@pytest.mark.parametrize("silent_s", [60, 3600])
def test_the_next_phase_is_waited_for(
    run: Run, clock: Clock, capsys: pytest.CaptureFixture[str], silent_s: float
) -> None:
    """While it compiles, no process holds the folder. The end of the last phase is the end of the run."""
    (run.folder / "watch.json").write_text(json.dumps(FORECAST | {"phases": 2}))
    run.steps(1, 2)
    run.end("finished", 0)
    run.silent_for(silent_s)

    def go_on() -> None:
        resumed = Run(run.folder, resume_step=2)
        resumed.steps(3)
        resumed.end("failed", 1, "rank 0 left")

    code, end = 0, "finished after step 9"
    if silent_s < 600:
        code, end = 1, "failed after step 9: rank 0 left"
        clock.later = [go_on]
    exit_code, lines = watched(run.folder, capsys)
    assert exit_code == code and end in lines


@pytest.mark.parametrize("event", ["channels", "start"])
def test_a_run_that_was_killed_before_its_first_step_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event: Literal["channels", "start"]
) -> None:
    events = Events(tmp_path)
    events.write(event)
    os.utime(tmp_path / "events.jsonl", (time.time() - 3600,) * 2)
    assert main(["watch", str(tmp_path)]) == 1
    assert "its processes were killed" in capsys.readouterr().err


@pytest.mark.parametrize("phases", [1, 2])
def test_an_end_without_an_exit_code_is_a_failure(run: Run, capsys: pytest.CaptureFixture[str], phases: int) -> None:
    (run.folder / "watch.json").write_text(json.dumps(FORECAST | {"phases": phases}))
    run.steps(1)
    run.events.write("end", outcome="finished", exit_code="none", step=1, reason="")
    run.silent_for(3600)
    assert watched(run.folder, capsys)[0] == 1


def test_json_has_every_row_and_event(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps(1, 2)
    MetricsWriter(run.folder, 1).write({"step": 2, **ROW, "loss": float("nan")})
    next_millisecond()
    run.end()
    code, lines = watched(run.folder, capsys, "--format", "json")
    items = [json.loads(line) for line in lines]
    assert code == 0 and items[0]["kind"] == "event" and items[-1]["fields"]["event"] == "end"
    rows = [item["fields"] for item in items if item["kind"] == "row"]
    assert [row["step"] for row in rows] == [1, 2] and rows[-1]["loss"] is None
    for item in items:
        assert not faults(item, FORMS["watch"])


@pytest.mark.parametrize(("form", "said"), [("json", '"step": 2'), ("text", "step 2/9")])
def test_rows_are_shown_while_the_run_continues(
    run: Run, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, said: str
) -> None:
    """Also where the output is a file, which Python buffers."""
    output_path, before_the_end = tmp_path / "shown", list[str]()

    def go_on() -> None:
        before_the_end.append(output_path.read_text())
        run.end()

    run.steps(1, 2)
    clock.later = [go_on]
    lock = lock_folder(run.folder)
    with output_path.open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["watch", str(run.folder), "--format", form]) == 0
        monkeypatch.undo()
    os.close(lock)
    assert said in before_the_end[0]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, reason in ((tmp_path / "no", "does not exist"), (tmp_path, "has no run")):
        assert main(["watch", str(folder)]) == 2
        assert f"{reason}\n = hint: `dsc train` writes" in capsys.readouterr().err


def test_waits_for_a_run_that_has_not_begun(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        run = Run(tmp_path / "later")
        run.steps(1)
        run.end()

    clock.later = [lambda: None, begin]
    code, lines = watched(tmp_path / "later", capsys, "--wait")
    assert code == 0 and any(line.startswith("step 1/9") for line in lines)


# ---------------------------------------------------------------- the live view


def seen(run: Run, columns: int, act: Callable[[], None], until: str) -> tuple[list[str], list[str], int]:
    """The screen of a terminal running `dsc watch` when it first shows `until`, the final screen, and the exit code."""
    screen = pyte.Screen(columns, 24)
    stream, pid_fd = pyte.ByteStream(screen), os.forkpty()
    pid, terminal = pid_fd
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", "PYTHONUTF8": "1"}
        os.execv(sys.executable, [sys.executable, "-P", "-m", "compiler.cli.main", "watch", str(run.folder)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    first_shown, lines, hangs = list[str](), list[str](), Watch(pid)
    while True:
        if not select.select([terminal], [], [], 1.0)[0]:
            hangs.look()
            continue
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # how a terminal signals that all writers have closed it
            break
        stream.feed(data)
        lines = [line.rstrip() for line in screen.display if line.strip()]
        if not first_shown and any(until in line for line in lines):
            first_shown = lines
            act()
    os.close(terminal)
    return first_shown, lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("held", "calibrated", "speed", "memory"),
    [
        ("memory_bytes", True, "(planned 500 ms)", "2.0 GiB at most in a rank"),
        ("process_bytes", False, "(planned 500 ms, not calibrated for this machine)",
         "2.0 GiB at most in a process with its libraries"),
    ],
)  # fmt: skip
def test_measurements_are_compared_with_the_same_kind_of_forecast(
    held: str, calibrated: bool, speed: str, memory: str
) -> None:
    """A CPU process holds more than tensors, and times of another CPU are not a forecast."""
    forecast = Forecast.from_json(json.dumps(FORECAST | ({} if calibrated else {"calibrated": False})))
    state, row = RunState(Path("mine"), forecast), {key: value for key, value in ROW.items() if key != "memory_bytes"}
    state.take(FollowedItem("row", {"step": 1, "time": "", **row, held: 2**31}))
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(state, 9))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any(f"step 250 ms {speed}  MFU" in line for line in lines)
    assert f"memory  {memory}  tensors planned 3.0 GiB of 8.0 GiB" in [line.rstrip() for line in lines]
    series = {metric.name: list(metric.read(state)) for metric in SERIES}
    assert bool(series["dsc_predicted_step_duration_seconds"]) == calibrated
    assert bool(series["dsc_memory_bytes"]) != bool(series["dsc_process_memory_bytes"])


def test_a_terminal_gets_a_live_view(run: Run) -> None:
    run.steps(1, 2, validation_loss=4.5)
    run.events.write("save", step=2, checkpoint="step-00000002", bytes=1, seconds=0.1, written_s=0.1)
    lock = lock_folder(run.folder)

    def go_on() -> None:
        run.steps(3, 4)
        run.events.write("save_failed", step=4, reason="the disk is full\x1b]0;owned\x07")
        run.end("failed", 1, "rank 2 was killed")

    (*lines, saved), last, code = seen(run, 100, go_on, "saved")
    os.close(lock)
    assert lines[0].endswith("step 2/9  22%  0:00:00 left  mine") and lines[0].startswith("━")
    assert lines[1:] == [
        "loss    5.1234  validation 4.5000  gradient norm 0.83  rate 0.00022",
        "speed   100,000 tokens/s  step 250 ms (planned 500 ms)  MFU 25.0% (planned 40.0%)",
        "time    compute 60%  messages 20% (bubble planned 12%)  sums 20%",
        "load    ▁▅█  1.00x to 2.50x, most in layers.3",
        "memory  2.0 GiB at most in a rank  tensors planned 3.0 GiB of 8.0 GiB",
    ]
    assert re.fullmatch(r"saved   step 2  0:\d\d:\d\d ago", saved)
    assert code == 1
    assert last[1] == last[-1].removeprefix("now     ") and last[0].endswith(r"the disk is full\x1b]0;owned\x07")
    assert "step 4/9  44%" in last[2] and last[-1] == "now     failed after step 9: rank 2 was killed"
    assert len(last) == 10, "nothing of an earlier picture is left"
