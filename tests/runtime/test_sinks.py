"""Exporters on rows without a run: a failing or slow exporter loses and delays nothing; and what readers see."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runtime.build import run_copy
from runtime.contract import LinkTraffic, MetricsSinks, WatchFacts
from runtime.observe.events import Events
from runtime.observe.sinks import __main__ as exporters
from runtime.observe.sinks import beside
from runtime.observe.sinks import worker as workers
from runtime.observe.sinks.otel import OpenTelemetry
from runtime.observe.sinks.prometheus import Prometheus
from runtime.observe.sinks.sink import Point, Sink, SinkContext, numbers
from runtime.observe.sinks.tensorboard import TensorBoard
from runtime.observe.sinks.wandb import WandB
from runtime.observe.sinks.worker import Exports, Worker
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState
from runtime.observe.watch.series import SERIES
from runtime.system.strict_json import tree
from tests.progress import PATIENCE_S
from tests.runtime.processes import wait_for

WATCH = WatchFacts(
    run="mine", model="m", cluster="c", devices=8, phase=1, phases=1, flops_per_token=2e9, peak_flops=8e14, mfu=0.4,
    step_s=0.5, tokens=1000, bubble=0.125, memory_bytes=(10, 20), capacity_bytes=(100, 100),
    links=(LinkTraffic("nvlink", "experts", 5000), LinkTraffic("leaf", "gradients", 70)),
    metrics=MetricsSinks(prometheus=0),
)  # fmt: skip


def row(step: int, **more: Any) -> FollowedItem:
    fields = {"step": step, "time": f"2026-01-31T12:00:{step:02}.000Z", "loss": 5.0 / step, "grad_norm": 1.0}
    fields |= {"tokens": 500 * step, "tokens_per_s": 1000.0, "step_s": 0.5, "spent_s": {"compute": 0.3, "message": 0.1}}
    return FollowedItem("row", {**fields, **more})


class Fake:
    """A sink with a scripted behaviour that records what it was sent."""

    destination = "somewhere"

    def __init__(self, key: str | None = None) -> None:
        self.key, self.sent, self.fails = key, list[int](), set[int]()
        self.events, self.state = list[str](), RunState(Path())
        self.tries, self.opened, self.closed, self.before = 0, list[str | None](), 0, lambda: None

    def open(self, opened: SinkContext) -> None:
        self.opened.append(opened.key)
        self.state = opened.state

    def send(self, points: Sequence[Point]) -> None:
        self.before()
        self.tries += 1
        if self.tries in self.fails:
            raise OSError("no route\nto it")
        self.sent += [point.item.step for point in points if point.item.kind != "event"]
        self.events += [point.item.fields["event"] for point in points if point.item.kind == "event"]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sink], Worker]]:
    monkeypatch.setattr(workers, "RETRY_S", (0.01,))
    started: list[Worker] = []

    def begin(sink: Sink) -> Worker:
        started.append(Worker("fake", sink, tmp_path, WATCH, Exports(tmp_path), Events(tmp_path)))
        started[-1].start()
        return started[-1]

    yield begin
    for worker in started:
        worker.end()
        worker.join(PATIENCE_S)


def ended(worker: Worker) -> None:
    worker.end()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()


def events(run: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    return [(line["event"], line.get("where") or line.get("reason")) for line in lines]


@pytest.mark.parametrize("fails", [set(), {1}, {1, 2, 3}, {2, 4}])
def test_unsent_rows_are_sent_later_and_once(tmp_path: Path, start: Callable[[Sink], Worker], fails: set[int]) -> None:
    sink = Fake()
    sink.fails = fails
    worker = start(sink)
    for first in range(1, 21, 5):
        tried = sink.tries
        for step in range(first, first + 5):
            worker.add([row(step)])
        wait_for(lambda tried=tried: sink.tries > tried, "a try")  # type: ignore[misc]
    ended(worker)
    assert sink.sent == [*range(1, 21)] and sink.closed == 1
    exports = events(tmp_path)
    assert exports[0] == ("export", "somewhere")
    assert exports.count(("export_failed", "no route")) == exports.count(("export", "somewhere again"))
    assert (("export_failed", "no route") in exports) == bool(fails)


def test_a_later_start_sends_the_remaining_rows(tmp_path: Path, start: Callable[[Sink], Worker]) -> None:
    """Recorded rows are not sent again, but rows of steps that are trained again are; the key does not change."""
    first, second = Fake("its key"), Fake("its key")
    worker = start(first)
    worker.add([row(1), row(2), row(3)])
    ended(worker)
    worker = start(second)
    again = row(3, time="2026-01-31T12:30:00.000Z")
    rewind = FollowedItem("rewind", {"step": 2, "time": again.time})
    worker.add([row(1), row(2), row(3), rewind, again, row(4, time=again.time)])
    ended(worker)
    assert (first.sent, second.sent) == ([1, 2, 3], [2, 3, 4])
    assert (first.opened, second.opened) == ([None], ["its key"])


def test_a_blocked_sink_does_not_block_the_run(tmp_path: Path, start: Callable[[Sink], Worker]) -> None:
    sink, gate = Fake(), threading.Event()
    sink.before = gate.wait  # type: ignore[assignment]
    worker = start(sink)
    for step in range(1, 2001):
        worker.add([row(1 + step % 50)])
    assert sink.sent == [], "all was taken while the sink kept the first row"
    gate.set()
    ended(worker)
    assert len(sink.sent) == 2000


def test_the_queue_of_rows_is_limited(
    tmp_path: Path, start: Callable[[Sink], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MOST_KEPT", 10)
    monkeypatch.setattr(workers, "MOST_AT_ONCE", 1)
    sink, gate, waits = Fake(), threading.Event(), threading.Event()
    sink.before, sink.fails = lambda: bool(waits.set() or gate.wait()), {1, 12}  # type: ignore[assignment,return-value]
    worker = start(sink)
    worker.add([row(1)])
    waits.wait()
    worker.add([row(step) for step in range(2, 51)])
    gate.set()
    wait_for(lambda: len(sink.sent) == 11, "the rows that were kept")
    worker.add([row(51)])
    ended(worker)
    assert sink.sent == [1, *range(41, 52)]
    assert events(tmp_path)[-3:] == [
        ("export", "somewhere again; 39 rows and events are lost"),
        ("export_failed", "no route"),
        ("export", "somewhere again"),
    ]
    assert sink.state.trained_tokens == 51 * 500, "what is lost was trained"


def test_a_sink_that_does_not_answer_is_reported_once(
    tmp_path: Path, start: Callable[[Sink], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may retry by itself, as W&B does if its server is unreachable."""
    monkeypatch.setattr(workers, "LATE_S", 0.0)
    sink, answers = Fake(), threading.Event()
    sink.before = answers.wait  # type: ignore[assignment]
    worker = start(sink)
    worker.add([row(1)])
    wait_for(lambda: worker.say_if_late() or ("export_failed", "it has not answered for 0 s") in events(tmp_path), "it")
    monkeypatch.setattr(exporters, "DRAIN_S", 0.0)
    assert exporters._end([worker]) == [worker]
    answers.set()
    ended(worker)
    assert sink.sent == [1] and events(tmp_path).count(("export_failed", "it has not answered for 0 s")) == 1
    assert exporters._end([worker]) == []


def test_a_slow_sink_gets_everything(start: Callable[[Sink], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_KEPT", 10)
    sink, gate = Fake(), threading.Event()
    sink.before = gate.wait  # type: ignore[assignment]
    worker = start(sink)
    worker.add([row(step) for step in range(1, 51)])
    gate.set()
    ended(worker)
    assert sink.sent == [*range(1, 51)]


def test_events_after_the_last_row_are_sent_once(start: Callable[[Sink], Worker]) -> None:
    def event(name: str, at: int) -> FollowedItem:
        return FollowedItem("event", {"event": name, "time": f"2026-01-31T12:00:{at:02}.000Z"})

    items = [event("start", 0), row(1), row(2), event("save", 3), event("end", 4)]
    first, second, third = Fake(), Fake(), Fake()
    for sink, new_items in (
        (first, []), (second, [event("start", 6), event("end", 7)]), (third, [event("start", 8), row(9)])
    ):  # fmt: skip
        items += new_items
        worker = start(sink)
        worker.add(items)
        ended(worker)
    assert (first.events, first.sent) == (["start", "save", "end"], [1, 2])
    assert (second.events, second.sent) == (["start", "end"], [])
    assert (third.events, third.sent) == (["start"], [9])


@pytest.mark.parametrize(("name", "install"), [("otel", "'dsc-trainer[metrics]'"), ("wandb", "wandb")])
def test_a_missing_library_is_reported_once(tmp_path: Path, name: str, install: str) -> None:
    class Missing(Fake):
        def open(self, opened: SinkContext) -> None:
            import a_library_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401

    worker = Worker(name, Missing(), tmp_path, WATCH, Exports(tmp_path), Events(tmp_path))
    worker.start()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    assert events(tmp_path) == [
        ("export_failed", f"a_library_that_is_not_there is not installed: pip install {install}")
    ]


# ---------------------------------------------------------------- what each exporter gives


def sent(sink: Sink, state: RunState, items: Sequence[FollowedItem]) -> None:
    points = []
    for item in items:
        state.take(item)
        points.append(Point(item, numbers(item.fields, state) if item.kind == "row" else {}))
    sink.send(points)


def test_tensorboard_drops_steps_discarded_by_a_resume(tmp_path: Path) -> None:
    files = set[Path]()
    for number, steps in enumerate(([1, 2, 3, 4, 5], [4, 5, 6])):  # the second one a minute later
        state, sink = RunState(tmp_path, WATCH), TensorBoard()
        sink.open(SinkContext(tmp_path, MetricsSinks(), state, step=3 * number))
        sent(sink, state, [row(step, loss=10.0 * number + step) for step in steps])
        sent(sink, state, [row(7, loss=None)])
        sink.close()
        (written,) = set((tmp_path / "tensorboard").iterdir()) - files
        _, seconds, suffix = re.fullmatch(r"(.*tfevents\.)(\d+)(.*)", written.name).groups()  # type: ignore[union-attr]
        files.add(written.rename(written.with_name(f"events.out.tfevents.{int(seconds) + 60 * number}{suffix}")))
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    points = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    assert points[:-1] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0), (5, 15.0), (6, 16.0)]
    assert points[-1][0] == 7 and math.isnan(points[-1][1])
    assert accumulator.Scalars("mfu")[0].value == pytest.approx(1000 * 2e9 / 8e14)


def test_rows_written_before_the_end_of_a_run_are_exported(tmp_path: Path) -> None:
    rows = [{**row(step).fields, "step": step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(fields) + "\n" for fields in rows), "utf-8")
    watch = replace(WATCH, metrics=MetricsSinks(tensorboard=True))
    build = SimpleNamespace(files={run_copy.WATCH: json.dumps(tree(watch)).encode()})
    exporters_of_run = beside.Exporters(build, tmp_path)  # type: ignore[arg-type]
    exporters_of_run.begin()
    assert exporters_of_run._process is not None
    group = os.getpgid(exporters_of_run._process.pid)
    exporters_of_run.close(waits=True)
    assert group != os.getpgid(0), "Ctrl-C in the terminal of the run is not for it"
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2]


def test_a_span_of_a_step_is_as_long_as_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[Any] = []

    class Endpoint:
        """Receives spans instead of a server."""

        def __init__(self, endpoint: str, timeout: float) -> None:
            self.endpoint = endpoint

        def export(self, exported: Sequence[Any]) -> SpanExportResult:
            spans.extend(exported)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", Endpoint)
    state, sink = RunState(tmp_path, WATCH), OpenTelemetry()
    sink.open(SinkContext(tmp_path, MetricsSinks(otel="http://127.0.0.1:1"), state))
    saved = {"event": "save", "step": 1, "written_s": 0.25, "time": "2026-01-31T12:00:02.000Z"}
    sent(sink, state, [row(1, step_s=0.5), FollowedItem("event", saved)])
    end_us = round(datetime(2026, 1, 31, 12, 0, 1, tzinfo=UTC).timestamp()) * 10**6
    assert [(span.name, span.start_time // 1000, span.end_time // 1000) for span in spans] == [
        ("step 1", end_us - 500_000, end_us),
        ("save", end_us + 750_000, end_us + 1_000_000),
    ]


def test_wandb_draws_numbers_over_steps_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own row count differs after a resume, which continues the run of the first start."""
    runs: list[tuple[str, str, str]] = []
    axes, logged, exits = dict[str, str](), list[dict[str, float]](), list[int]()
    library = SimpleNamespace(
        Settings=lambda **_: None,
        init=lambda project, id, name, **_: runs.append((project, id, name)) or run,
    )
    run = SimpleNamespace(
        url="", dir="there", log=logged.append, finish=lambda exit_code: exits.append(exit_code),
        define_metric=lambda name, step_metric: axes.update({name: step_metric}),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", library)
    state, key = RunState(tmp_path, WATCH), None
    for step, end in ((1, "failed"), (2, "finished")):
        sink = WandB()
        sink.open(SinkContext(tmp_path, MetricsSinks(wandb="here"), state, key))
        assert axes == {"*": "step"} and sink.destination == "here, offline in there"
        axes.clear()
        sent(sink, state, [row(step), FollowedItem("event", {"event": "end", "outcome": end})])
        sink.close()
        key = sink.key
    assert key and runs == [("here", key, "mine")] * 2 and exits == [1, 0]
    assert [(values["step"], values["loss"]) for values in logged] == [(1, 5.0), (2, 2.5)]


def scraped(sink: Prometheus) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(sink.destination) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, *(v for k, v in sample.labels.items() if k != "run")): sample.value for sample in samples}


def test_unwritable_notes_are_reported_only_occasionally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exports.json").mkdir()
    clock_s, pause = 1000.0, workers.RETRY_S[-1]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock_s))
    exports = Exports(tmp_path)
    for later, num_reports in ((0, 1), (pause, 0), (pause + 1, 1), (pause + 2, 0), (2 * pause + 2, 1)):
        clock_s = 1000.0 + later
        exports.note("fake", step=3, key=None)
        assert capsys.readouterr().err.count("exports.json: Is a directory") == num_reports, later
    assert exports.entries_of("fake") == {"step": 3}


def test_series_follow_rows_and_events(tmp_path: Path) -> None:
    state, sink = RunState(tmp_path, WATCH), Prometheus()
    sink.open(SinkContext(tmp_path, MetricsSinks(prometheus=0), state))
    try:
        assert scraped(sink)[("dsc_running",)] == 1
        event = {"event": "start", "step": 0, "last_step": 9, "device": "cuda", "build": "0" * 64, "time": "…"}
        sent(sink, state, [FollowedItem("event", event), row(1), row(2, loss=None, layer_imbalance={"layers.3": 1.5})])
        values = scraped(sink)
        assert math.isnan(values[("dsc_loss",)]) and values[("dsc_finite",)] == 0
        assert values[("dsc_mfu_ratio",)] == 1000 * 2e9 / 8e14 and values[("dsc_predicted_mfu_ratio",)] == 0.4
        assert values[("dsc_link_bytes_total", "nvlink", "experts")] == 5000  # two steps of half the largest batch
        assert values[("dsc_link_bytes_total", "leaf", "gradients")] == 140
        assert values[("dsc_expert_load_ratio", "layers.3")] == 1.5
        assert values[("dsc_message_wait_ratio",)] == 0.25 and values[("dsc_predicted_bubble_ratio",)] == 0.125
        assert values[("dsc_predicted_memory_bytes", "1")] == 20
        assert values[("dsc_run_info", "0" * 12, "c", "cuda", "m")] == 1
        endings = [{"event": "save_failed", "step": 2}, {"event": "end", "outcome": "failed", "step": 2}]
        sent(sink, state, [FollowedItem("event", fields) for fields in endings])
        values = scraped(sink)
        row_s = values[("dsc_last_row_timestamp_seconds",)]
        assert row_s == datetime(2026, 1, 31, 12, 0, 2, tzinfo=UTC).timestamp()
        assert values[("dsc_save_failures_total",)] == 1 and values[("dsc_running",)] == 0
        sent(sink, state, [FollowedItem("event", {**event, "time": "2026-02-01T12:00:02.000Z"})])
        assert scraped(sink)[("dsc_last_row_timestamp_seconds",)] == row_s + 86400, "a resume is a sign of the run"
        exported = {name for name, *_ in values}
        slow = {"event": "straggler", "step": 20, "rank": 3, "host": "node7", "part": "data", "factor": 1.31}
        over = {"event": "straggler_over", "step": 40, "rank": 3, "host": "node7"}
        for later, is_slow in ((slow, True), (over, False), ({"event": "straggler"}, False), (slow, True)):
            sent(sink, state, [FollowedItem("event", later)])
            values = scraped(sink)
            assert values.get(("dsc_straggler_ratio", "node7", "data", "3")) == (1.31 if is_slow else None)
            exported |= {name for name, *_ in values}
        unsaid = {"validation_loss", "learning_rate", "memory_bytes", "saved_step", "save_duration_seconds"}
        unsaid |= {"device_fault", "device_temperature_celsius", "device_uncorrected_errors"}  # of GPUs
        unsaid |= {"reward", "completion_tokens", "entropy", "process_memory_bytes", "reserved_memory_bytes"}
        assert exported == {series.name for series in SERIES} - {f"dsc_{name}" for name in unsaid}
    finally:
        sink.close()


def test_the_port_is_on_loopback_and_a_busy_one_is_an_error(tmp_path: Path) -> None:
    first, second, state = Prometheus(), Prometheus(), RunState(tmp_path, WATCH)
    first.open(SinkContext(tmp_path, MetricsSinks(prometheus=0), state))
    port = int(first.destination.rpartition(":")[2].partition("/")[0])
    assert first.destination == f"http://127.0.0.1:{port}/metrics"
    with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1: Address already in use; name another"):
        second.open(SinkContext(tmp_path, MetricsSinks(prometheus=port), state))
    first.close()
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("how", ["stopped", "interrupted"])
def test_a_run_that_has_ended_waits_for_no_exporter_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    monkeypatch.setattr(beside, "QUIET_S", 0.0)
    monkeypatch.setattr(beside, "MOST_S", 0.5)
    watch = json.dumps(tree(WATCH)).encode()
    build = SimpleNamespace(files={run_copy.WATCH: watch})
    beside_run = beside.Exporters(build, tmp_path)  # type: ignore[arg-type]
    beside_run.begin()
    process = beside_run._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        if how == "interrupted":
            monkeypatch.setattr(process, "wait", raises(KeyboardInterrupt))
        beside_run.close(waits=True)
        output = capsys.readouterr().out
        assert ("were killed: " if how == "stopped" else "exported in the background") in output
    finally:
        monkeypatch.undo()
        process.kill()
        assert process.wait() == -signal.SIGKILL


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


def test_a_log_that_is_a_link_is_not_written_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / beside.LOG).symlink_to(tmp_path / "theirs")
    build = SimpleNamespace(files={run_copy.WATCH: json.dumps(tree(WATCH)).encode()})
    exporters_of_run = beside.Exporters(build, tmp_path)  # type: ignore[arg-type]
    exporters_of_run.begin()
    exporters_of_run.close(waits=True)
    assert not (tmp_path / "theirs").exists()
    assert f"nothing is exported: {tmp_path / 'logs' / beside.LOG}: " in capsys.readouterr().out
