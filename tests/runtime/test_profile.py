"""`dsc train --profile`: every nanosecond of a step is in one row, no result changes, and all patches are undone."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec, lower_spec
from compiler.tools.report.profile import write_run_profile
from compiler.tools.report.profile_text import text
from dsl.load import load
from runtime.build.build import Build
from runtime.comm import collective, memory
from runtime.launch.heartbeat import Board
from runtime.run import profile
from runtime.run.profile import WARM_UP, CallKey, CallTime, Overhead, Profile, Stopwatch, without_overhead
from runtime.state import optimizer
from runtime.step.trainer import Trainer
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, Place
from tests.runtime.step.samples import RandomSamples

TINY = Path(__file__).parents[2] / "specs" / "tiny.dsc"
MICRO_BATCHES = 4
COMMUNICATION = {"copy", "wait"}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Build:
    folder = tmp_path_factory.mktemp("build") / "tiny"
    write_build(folder, compile_spec(load(TINY), segments=segments).files)
    return Build.open(folder)


def trainer_of(build: Build) -> Trainer:
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    return Trainer(build, 0, samples, None, Board(1).bind(0))


def total(rows: list[dict[str, Any]], field: str = "clock_ns") -> int:
    return sum(row[field] for row in rows)


def sums_up(rank: dict[str, Any]) -> None:
    """Assert that a rank's rows add up to its steps, and an action's to its ops, its communication and Python."""
    rows, actions = rank["rows"], set(rank["actions"])
    for field in ("clock_ns", "processor_ns"):
        bubble = total([row for row in rows if row["kind"] == "bubble"], field)
        inside = [row for row in rows if row["place"] in actions and row["kind"] != "bubble"]
        tail = [row for row in rows if row["place"] not in actions and row["kind"] != "bubble"]
        assert total(inside, field) + total(tail, field) + bubble == rank[field] > 0
        kinds: Counter[str] = Counter()
        for row in inside:
            kinds[row["kind"]] += row[field]
        assert set(kinds) <= {"op", "python", "profile", *COMMUNICATION} and kinds["op"] > 0
    assert all(row["clock_ns"] >= 0 and row["calls"] > 0 for row in rows)
    assert len({tuple(row[name] for name in CallKey._fields) for row in rows}) == len(rows)


# ---------------------------------------------------------------- the clock


class Clock:
    """A clock whose CPU time runs at a tenth of the speed."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def thread_time_ns(self) -> int:
        return self.now // 10


def test_times_exclude_inner_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch = Clock(), Stopwatch()
    monkeypatch.setattr(profile, "time", clock)

    def takes(ns: int) -> None:
        clock.now += ns

    def fails() -> None:
        takes(70)
        raise ValueError

    wait, op, failing = (
        watch.with_timer(takes, "wait"),
        watch.with_timer(takes, "op", "linear"),
        watch.with_timer(fails, "op", "bad"),
    )

    def received() -> None:
        takes(10)
        wait(100)

    def body() -> None:
        takes(1000)
        watch.with_timer(lambda: (op(20_000), op(20_000)), "python", segment="dense", function="F")()
        watch.with_timer(received, "copy", "message")()
        watch.with_timer(received, "copy", "dispatch")()
        wait(500_000)
        with pytest.raises(ValueError):
            failing()

    watch.with_timer(body, "python", place="F0")()
    assert {tuple(key): (row.calls, row.clock, row.inside) for key, row in watch.rows.items()} == {
        ("F0", "", "", "python", ""): (1, 1000, 5),
        ("F0", "dense", "F", "python", ""): (1, 0, 2),
        ("F0", "dense", "F", "op", "linear"): (2, 40_000, 0),
        ("F0", "", "", "copy", "message"): (1, 10, 1),
        ("F0", "", "", "bubble", "message"): (2, 500_100, 0),
        ("F0", "", "", "copy", "dispatch"): (1, 10, 1),
        ("F0", "", "", "wait", "dispatch"): (1, 100, 0),
        ("F0", "", "", "op", "bad"): (1, 70, 0),
    }
    assert watch.clock == clock.now and watch.processor == clock.now // 10
    assert sum(row.processor for row in watch.rows.values()) == watch.processor


def test_calls_of_other_threads_are_not_timed() -> None:
    watch = Stopwatch()
    op = watch.with_timer(lambda: 7, "op", "linear")
    with ThreadPoolExecutor(1) as thread:
        assert watch.with_timer(lambda: thread.submit(op).result(), "python", place="F0")() == 7
    assert [key.kind for key in watch.rows] == ["python"] and op() == 7 and len(watch.rows) == 2


def test_the_overhead_of_the_profile_is_a_separate_row() -> None:
    python, op, tail = (
        CallKey("F0", "", "", "python", ""),
        CallKey("F0", "", "", "op", "add"),
        CallKey("norm", "", "", "op", "norm"),
    )
    rows = {python: CallTime(1, 5000, 500, 3), op: CallTime(3, 9000, 20, 0), tail: CallTime(1, 100, 0, 0)}
    corrected = without_overhead(rows, Overhead(within=(200.0, 10.0), around=(1000.0, 100.0)))
    assert corrected[python] == CallTime(1, 5000 - 3200, 500 - 310, 3)
    assert corrected[op] == CallTime(3, 9000 - 600, 0, 0), "never below zero"
    assert corrected[CallKey("F0", "", "", "profile", "profile")] == CallTime(4, 3800, 330, 0)
    for place in ("F0", "norm"):
        assert sum(row.clock for key, row in corrected.items() if key.place == place) == sum(
            row.clock for key, row in rows.items() if key.place == place
        )


# ---------------------------------------------------------------- one rank


def attributes(trainer: Trainer) -> list[dict[str, Any]]:
    """Callable attributes of all objects that a profile patches."""
    stage = next(iter(trainer.bodies.values())).__globals__
    modules = [value for value in stage.values() if isinstance(value, ModuleType)]
    owners = (*modules, optimizer, memory, collective, trainer.executor, trainer.links, trainer)
    return [{name: id(value) for name, value in vars(owner).items() if callable(value)} for owner in owners]


def test_profiling_does_not_change_a_step(build: Build, tmp_path: Path) -> None:
    plain, watched = trainer_of(build), trainer_of(build)
    profiler = Profile(watched, 2, tmp_path)
    before, bodies = attributes(watched), watched.bodies
    times = {"step_s", "tokens_per_s", "spent_s", "spent_most_s", "slowest_rank", "process_bytes"}
    for _ in range(WARM_UP + 2):
        row, watched_row = plain.train_step(), profiler.train(watched.train_step)
        assert {k: v for k, v in row.items() if k not in times} == {
            k: v for k, v in watched_row.items() if k not in times
        }
    assert attributes(watched) == before and watched.bodies is bodies, "all is as it was"

    rank = json.loads(json.dumps(profiler.document()))
    sums_up(rank)
    calls = Counter({(row["segment"], row["function"], row["name"]): row["calls"] for row in rank["rows"]})
    for path in (build.folder / "segments").glob("*.py"):
        module = build.module(f"segments.{path.stem}")
        for function in "FIW":
            called = Counter(vars(module)[function].__code__.co_names) if hasattr(module, function) else Counter()
            for op in called - Counter({"torch": 1}):
                name = getattr(vars(module).get(op), "__name__", op)
                assert calls[path.stem, function, name] > 0, (path.stem, function, op)
    phases = {row["place"] for row in rank["rows"]} - set(rank["actions"])
    assert phases == {
        *("metrics", "zero", "between actions", "load data", "count targets", "records", "sums", "norm", "update"),
        "balance",
    }

    # The FLOPs of all rows equal the op rules for every call of every segment.
    profiler.close()
    (tmp_path / "spec.resolved").write_text((build.folder / "spec.resolved").read_text("utf-8"), "utf-8")
    document = write_run_profile(tmp_path)
    lowered = lower_spec(load(TINY))
    received = {site: rows / calls for site, (calls, rows) in rank["received"].items()}
    assert set(received.values()) == {2 * 16}  # top_k of each token: on one rank all come back
    flops = [
        cost.flops + cost.flops_row * received.get(use.site.partition(".")[0], 0.0)
        for use in lowered.plan.uses
        for _, cost in lowered.plan.cuts[use.site].costs
    ]
    (written,) = document["ranks"]
    assert total([row for row in written["rows"] if "flops" in row], "flops") == 2 * MICRO_BATCHES * sum(flops) > 0
    assert json.loads((tmp_path / "profile.json").read_text("utf-8")) == document


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_ranks_of_a_run(tmp_path: Path, segments: Segments, transport: str) -> None:
    place = Place(tmp_path, segments)
    place.compile(FOUR_RANKS)
    done = place.dsc("train", "tiny.dsc", "--profile", 2, "--transport", transport)
    run = tmp_path / "runs" / "tiny"
    document = json.loads((run / "profile.json").read_text("utf-8"))
    assert document["steps"] == 2 and [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    names = {"counts", "dispatch", "combine", "message", "sum", "reduce"}
    for rank in document["ranks"]:
        sums_up(rank)
        waits = {row["name"] for row in rank["rows"] if row["kind"] in ("wait", "bubble")}
        assert waits == names and {row["name"] for row in rank["rows"] if row["kind"] == "bubble"} == {"message"}
        assert {row["name"] for row in rank["rows"] if row["kind"] == "copy"} == names
    output = done.stdout
    assert "of the processor  2 steps, 4 ranks, their mean" in output and "GFLOP/s" in output and "\x1b" not in output
    assert not (run / "checkpoints").exists(), "the run can be trained afterwards"
    assert len((run / "metrics.jsonl").read_text("utf-8").splitlines()) == WARM_UP + 2


def test_a_profile_has_its_own_number_of_steps(tmp_path: Path, segments: Segments) -> None:
    """A profile runs its own steps after the newest checkpoint, which stays the newest."""
    place, run = Place(tmp_path, segments), tmp_path / "runs" / "tiny"
    place.compile(ONE_RANK)
    refused = place.dsc("train", "tiny.dsc", "--profile", "--steps", 9, code=2)
    assert "error: --profile N ends after the steps that it profiles: leave --steps out" in refused.stderr
    place.dsc("train", "tiny.dsc", "--steps", 2)
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    place.dsc("train", "tiny.dsc", "--resume", "--profile", 1)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == saved
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 2 + WARM_UP + 1 + 1))


# ---------------------------------------------------------------- the text


def row(place: str, kind: str, name: str, ms: float, calls: int = 2, **more: Any) -> dict[str, Any]:
    ns = round(ms * 1e6)
    labels = {"place": place, "segment": "", "function": "", "kind": kind, "name": name, "calls": calls}
    return {**labels, "clock_ns": ns, "processor_ns": ns // 2, **more}


def test_the_text_says_where_the_time_went() -> None:
    labels = {"segment": "dense", "function": "F"}
    rows = [
        row("metrics", "python", "", 2.0),
        row("F0", "python", "", 2.0, **labels),
        row("F0", "op", "linear", 10.0, **labels, flops=1_000_000_000),
        row("F0", "bubble", "message", 4.0),
        row("norm", "wait", "sum", 2.0),
    ]
    rank = {"rank": 0, "clock_ns": 20_000_000, "processor_ns": 10_000_000, "actions": ["F0"]}
    rank |= {"plain": {"clock_ns": 9_000_000, "processor_ns": 4_500_000}}
    document = {"steps": 2, "device": "cpu", "gemm_flops_s": 400e9, "ranks": [{**rank, "rows": rows}]}
    lines = [" ".join(line.split()) for line in text(document).splitlines()]
    assert lines[:3] == [
        "10.0 ms per step, 5.0 of the processor 2 steps, 1 rank",
        "without the profile: 9.0 and 4.5, the better of two steps",
        "Python: 20.0% by the clock, 20.0% of the processor; the profile itself: 0.0 ms",
    ]
    for line in (
        "0 10.0 5.0 6.0 2.0 2.0 5.0 0.0 1.0 2.0",
        "F0 8.00 4.00 80.0% █████████████ 62% · 25% 12%",
        "linear 1 5.00 2.50 50.0% ████████ 200.0 50%",
        "message 0 0.00 2.00 1.00",
        "dense.F 1 6.00 60.0% ██████████ 5.00 1.00",
    ):
        assert line in lines, text(document)
