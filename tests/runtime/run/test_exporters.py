"""The numbers of one run, started twice, as readers of each exporter see them, and the life of exporters."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlflow.tracking import MlflowClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from compiler.pipeline import compile_spec
from dsl.load import load
from runtime.contract import MetricsSinks, WatchFacts
from runtime.observe.sinks.mlflow import MLflow
from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.sinks.wandb import WandB
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState
from runtime.observe.watch.series import SERIES
from runtime.system.strict_json import tree
from tests import progress
from tests.runtime.processes import is_gone, polls, wait_for
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, TORCHRUN, Place, rows, untimed
from tests.runtime.run.place import run as run_command

STEPS, PAUSE, BACK = 20, 8, 15  # the first start ends at STEPS, the second resumes from BACK
WANTED = ("tensorboard", "prometheus", "wandb", "mlflow", "otel")


class Receiver(BaseHTTPRequestHandler):
    """An OTLP endpoint over HTTP."""

    requests: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        type(self).requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class Exported(NamedTuple):
    place: Place
    run: Path
    scraped: tuple[str, list[dict[str, Any]]]  # while the run was paused, and the rows it had by then
    gone: list[dict[str, Any]]  # rows of steps that were repeated
    spans: list[ExportTraceServiceRequest]


def exports(run: Path) -> dict[str, str]:
    """The target of each exporter, from the run's output."""
    if not (run / "events.jsonl").exists():
        return {}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    assert not [event for event in events if event["event"] == "export_failed"], events
    return {event["exporter"]: event["where"] for event in events if event["event"] == "export"}


@pytest.fixture(scope="module")
def exported(new_place: Callable[[], Place]) -> Iterator[Exported]:
    receiver = type("Here", (Receiver,), {"requests": []})
    server = HTTPServer(("127.0.0.1", 0), receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    block = f"""metrics {{
      tensorboard = true, prometheus = 0, wandb = "here", mlflow = "mine"
      otel = "http://127.0.0.1:{server.server_port}"
    }}"""
    place = new_place()
    settings = dict(ONE_RANK, steps=STEPS, batch=4, metrics=block)
    build, run = place.compile(settings), place.folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with place.started("train", build, "--out", "run", anew=True) as running:
            running.wait_for_step(run, PAUSE)
            (rank,) = running.ranks(run).values()
            os.kill(rank, signal.SIGSTOP)
            wait_for(lambda: exports(run).keys() == {*WANTED}, "all exporters")
            scraped_rows = rows(run)

            def scrape() -> str:
                with urllib.request.urlopen(exports(run)["prometheus"]) as answer:
                    return str(answer.read().decode())

            wait_for(lambda: f'dsc_step{{run="tiny"}} {float(scraped_rows[-1]["step"])}' in scrape(), "the last row")
            text = scrape()
            os.kill(rank, signal.SIGCONT)
            assert running.ends() == 0
        before = rows(run)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > BACK:
                shutil.rmtree(checkpoint)
        place.dsc("train", build, "--out", "run", "--resume", anew=True)
    server.shutdown()
    yield Exported(place, run, (text, scraped_rows), before[BACK:], receiver.requests)
    server.server_close()


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row, by the names that exporters use."""
    numbers = {}
    for name, value in row.items():
        parts = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        numbers |= {path: float(n) for path, n in parts.items() if isinstance(n, int | float) and path != "step"}
    return numbers


def single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_tensorboard_has_each_step_once(exported: Exported) -> None:
    """Also repeated steps: EventAccumulator purges the rows that a start discarded."""
    accumulator = EventAccumulator(str(exported.run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in rows(exported.run):
        for name, value in scalars(row).items():
            expected.setdefault(name, []).append((row["step"], single(value)))
    assert len(exported.gone) == STEPS - BACK and len(expected["loss"]) == STEPS
    assert {*accumulator.Tags()["scalars"]} == expected.keys()
    for name, points in expected.items():
        assert [(event.step, event.value) for event in accumulator.Scalars(name)] == points, name


def test_prometheus_reads_the_last_row_while_the_run_trains(exported: Exported) -> None:
    text, scraped_rows = exported.scraped
    row, families = scraped_rows[-1], {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == {series.name.removesuffix("_total") for series in SERIES}
    values = {}
    for series in SERIES:
        family = families[series.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (series.kind, series.help)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "tiny" and labels.keys() == {*series.labels}
            if not sample.name.endswith("_created"):
                assert sample.name == series.name
                values[(sample.name, *labels.values())] = sample.value
    for name, key in (
        ("dsc_loss", "loss"),
        ("dsc_gradient_norm", "grad_norm"),
        ("dsc_process_memory_bytes", "process_bytes"),
    ):
        assert values[(name,)] == row[key]
    assert values[("dsc_last_step",)] == STEPS and values[("dsc_running",)] == values[("dsc_finite",)] == 1
    for layer, ratio in row["layer_imbalance"].items():
        assert values[("dsc_expert_load_ratio", layer)] == ratio
    for part in row["spent_s"]:
        total = math.fsum(step_row["spent_s"][part] for step_row in scraped_rows)
        assert values[("dsc_spent_seconds_total", part)] == pytest.approx(total, rel=1e-9)
    assert values[("dsc_trained_tokens_total",)] == row["tokens"]
    assert ("dsc_mfu_ratio",) not in values, "a CPU has no peak"
    assert exports(exported.run)["prometheus"].startswith("http://127.0.0.1:")


def test_mlflow_has_every_number(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((exported.run / "mlruns").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "tiny"
    for name in ("loss", "validation_loss", "layer_imbalance/layers.1"):
        points = {(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)}
        written = [*rows(exported.run), *exported.gone]
        assert points == {(row["step"], scalars(row)[name]) for row in written if name in scalars(row)}


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a W&B file: a header of 7 bytes, then a LevelDB log, which has blocks of 32 KiB with pieces of
    records (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    assert data[:4] == b":W&B"
    offset, block, record = 7, 32768, b""
    while offset + 7 <= len(data):
        if block - offset % block < 7:
            offset += block - offset % block
            continue
        size, kind = struct.unpack_from("<HB", data, offset + 4)
        record += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def wandb_records(run: Path, kind: str) -> Iterator[Any]:
    for path in run.glob("wandb/offline-run-*/run-*.wandb"):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def test_wandb_has_every_number(exported: Exported) -> None:
    keys = {(record.project, record.run_id) for record in wandb_records(exported.run, "run")}
    points = set()
    for record in wandb_records(exported.run, "history"):
        named = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.item)
        items = {name: json.loads(value) for name, value in named}
        points.add((items["step"], items["loss"]))
    assert [record.exit_code for record in wandb_records(exported.run, "exit")] == [0, 0]
    assert points == {(row["step"], row["loss"]) for row in (*rows(exported.run), *exported.gone)}
    assert [project for project, _ in keys] == ["here"], "both starts are of one run"


def test_spans_match_the_steps(exported: Exported) -> None:
    spans = [
        span
        for request in exported.spans
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    starts = {span.span_id: span for span in spans if span.name == "start"}
    assert len(starts) == 2 and len({span.trace_id for span in starts.values()}) == 2
    steps = [span for span in spans if span.name.startswith("step ")]
    written = [*exported.gone, *rows(exported.run)]
    assert sorted(span.name for span in steps) == sorted(f"step {row['step']}" for row in written)
    lengths = {round(row["step_s"] * 1e9) for row in written}
    for span in steps:
        parent = starts[span.parent_span_id]
        assert span.trace_id == parent.trace_id
        length = span.end_time_unix_nano - span.start_time_unix_nano
        assert min(abs(length - step_length) for step_length in lengths) < 1_000, "a time of a row has milliseconds"
    losses = {next(a.value.double_value for a in span.attributes if a.key == "dsc.loss") for span in steps}
    assert losses == {row["loss"] for row in written}
    assert {span.name for span in spans} - {f"step {n}" for n in range(1, STEPS + 1)} == {"start", "save"}


def test_exporters_do_not_change_training(exported: Exported, tmp_path: Path) -> None:
    """Builds differ only in the targets of numbers; a run resumed with another block has the same bits."""
    spec = exported.place.write(dict(ONE_RANK, steps=STEPS, batch=4))
    plain = dict(compile_spec(load(spec), segments=exported.place.segments).files)
    (exported.place.folder / "build/tiny").is_dir()
    with_block = {
        str(path.relative_to(exported.place.folder / "build/tiny")): path.read_text("utf-8")
        for path in (exported.place.folder / "build/tiny").rglob("*")
        if path.is_file()
    }
    differ = {name for name, text in plain.items() if with_block[name] != text and not name.startswith("segments/")}
    assert differ == {"spec.resolved", "watch.json", "manifest.json"} and plain.keys() == with_block.keys()
    exported.place.compile(dict(ONE_RANK, steps=STEPS, batch=4))
    shutil.copytree(exported.run, tmp_path / "run")
    for checkpoint in (tmp_path / "run/checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > BACK:
            shutil.rmtree(checkpoint)
    done = exported.place.dsc("train", "build/tiny", "--out", tmp_path / "run", "--resume")
    assert "not bit for bit" not in done.stdout + done.stderr
    assert untimed(tmp_path / "run") == untimed(exported.run)
    again = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text("utf-8").splitlines()]
    starts = [index for index, event in enumerate(again) if event["event"] == "start"]
    assert not [event for event in again[starts[-1] :] if event["event"] == "export"]


def scalar_steps(run: Path) -> list[int]:
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("loss")]


def test_a_killed_supervisor_leaves_its_numbers_and_no_exporter(place: Place) -> None:
    block = "metrics { tensorboard = true, prometheus = 0 }"
    build, run = place.compile(dict(ONE_RANK, steps=5000, batch=4, metrics=block)), place.folder / "run"
    with place.started("train", build, "--out", "run", anew=True) as running:
        running.wait_for_step(run, 3)
        wait_for(lambda: exports(run).keys() == {"tensorboard", "prometheus"}, "the exporters")
        pids = running.seen()
        (exporter,) = (pid for pid in pids if b"runtime.observe.sinks" in Path(f"/proc/{pid}/cmdline").read_bytes())
        (supervisor,) = (pid for pid in pids if b"runtime.run.train" in parent_command(exporter, pid))
        os.kill(supervisor, signal.SIGKILL)
        assert running.ends() != 0
        assert is_gone(exporter)
    assert scalar_steps(run) == [row["step"] for row in rows(run)]


def parent_command(child: int, pid: int) -> bytes:
    """The command of process `pid` if it is the parent of `child`, else empty."""
    parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{pid}/cmdline").read_bytes() if int(parent) == pid else b""


def test_under_torchrun_rank_0_exports(place: Place) -> None:
    block = "metrics { tensorboard = true }"
    build = place.compile(dict(FOUR_RANKS, steps=4, metrics=block))
    run_command((*TORCHRUN, "--nproc-per-node", "4", str(build / "train.py"), "--out", "run"), 0, place.folder)
    assert scalar_steps(place.folder / "run") == [1, 2, 3, 4]
    assert exports(place.folder / "run") == {"tensorboard": "run/tensorboard"}


# ---------------------------------------------------------------- the process, without a run


@pytest.mark.parametrize(
    ("outcomes", "exit_code", "status"),
    [
        (["finished"], 0, "FINISHED"),
        (["failed"], 1, "FAILED"),
        ([], 1, "KILLED"),
        (["finished", ""], 1, "KILLED"),  # after its first phase
        (["failed", "finished"], 0, "FINISHED"),
    ],
)
def test_the_end_of_a_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[str], exit_code: int, status: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    points = []
    for outcome in outcomes or [""]:
        ends = [{"event": "end", "outcome": outcome}] if outcome else []
        points += [Point(FollowedItem("event", event), {}) for event in ({"event": "start"}, *ends)]
    sinks = WandB(), MLflow()
    for sink in sinks:
        sink.open(SinkContext(tmp_path, MetricsSinks(wandb="here", mlflow="mine"), RunState(tmp_path)))
        sink.send(points)
        sink.close()
    assert [record.exit_code for record in wandb_records(tmp_path, "exit")] == [exit_code]
    assert MlflowClient().get_run(str(sinks[1].key)).info.status == status


@contextmanager
def exporting(run: Path, metrics: MetricsSinks) -> Iterator[subprocess.Popen[bytes]]:
    """The exporter process of a run that has one row."""
    watch = WatchFacts(
        run="mine", model="m", cluster="c", devices=1, phase=1, phases=1, flops_per_token=1.0, step_s=1.0,
        peak_flops=None, mfu=None, tokens=1, bubble=0.0, memory_bytes=(), capacity_bytes=(), links=(), metrics=metrics,
    )  # fmt: skip
    (run / "logs").mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": "2026-01-31T12:00:01.000Z", "loss": 5.0}) + "\n")
    command = [sys.executable, "-P", "-m", "runtime.observe.sinks", str(run), ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(tree(watch)).encode() + b"\n")
        process.stdin.flush()
        yield process
        process.stdin.close()
        assert progress.end(process) == 0


def test_a_failing_exporter_retries_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with exporting(tmp_path, MetricsSinks(tensorboard=True)):
        log = tmp_path / "events.jsonl"
        wait_for(lambda: log.exists() and "export_failed" in log.read_text("utf-8"), "the first failure")
        (tmp_path / "tensorboard").unlink()
    assert scalar_steps(tmp_path) == [1]


def test_exporters_wait_for_those_of_the_previous_start(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lock = os.open(tmp_path / "logs", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with exporting(tmp_path, MetricsSinks(tensorboard=True)) as process:
        looked = polls(process.pid)
        wait_for(lambda: polls(process.pid) > looked + 10, "looks of a process that waits")
        assert not (tmp_path / "exports.json").exists()
        os.close(lock)
        wait_for(lambda: "step" in exports_of(tmp_path, "tensorboard"), "the row")


def exports_of(run: Path, name: str) -> dict[str, Any]:
    path = run / "exports.json"
    return dict(json.loads(path.read_text("utf-8")).get(name, {})) if path.exists() else {}
