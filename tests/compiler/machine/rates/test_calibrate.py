"""`dsc calibrate`: the measurements, the table made from them, and specs that name a table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.cli.commands import calibrate as calibrate_command
from compiler.cli.commands.common import load_spec
from compiler.cli.main import main
from compiler.emit.segment_cache import Segments
from compiler.machine.rates import Rates, read_table
from compiler.machine.rates.calibration import CalibrationTask, job, table_of, tasks_of
from compiler.machine.rates.table import TABLES, MeasuredDevice
from compiler.plan.plan import make_plan
from compiler.plan.read_files import load_with_files, with_files
from compiler.plan.spec_files import rate_table_of, with_rate_table
from compiler.plan.spec_rates import rates_of
from compiler.plan.split_blocks import balanced_rows
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from runtime.launch.heartbeat import Board
from runtime.observe import calibrate
from runtime.system.outcome import Kind, Outcome
from tests.specs.shipped import SPECS, shipped

TRACE = TABLES.parent / "traces" / "deepseek-pair.json"


def tasks(file: str) -> tuple[CalibrationTask, ...]:
    spec = shipped(file)
    op_tasks, large = tasks_of(make_plan(spec), rates_of(spec), balanced_rows(spec))
    assert not large
    return op_tasks


# ---------------------------------------------------------------- measurements


def test_every_op_of_a_spec_is_measured_once_as_it_is_called() -> None:
    op_tasks = tasks("quickstart.dsc")
    assert len({(task.op, task.args) for task in op_tasks}) == len(op_tasks)
    assert {task.op for task in op_tasks} >= {"linear", "linear_dgrad", "linear_wgrad", "grouped_linear_wgrad", "route"}
    products = [task for task in op_tasks if task.op == "linear" and task.shape == (256, 4096, 192)]
    assert [task.count for task in products] == [2], "the head, of the model and of its MTP module"
    job_text = json.dumps(job(op_tasks, "cpu", 2, 2, 1.0))
    weights = next(task for task in json.loads(job_text)["tasks"] if task["op"] == "embedding_wgrad")
    assert [arg["shape"] for arg in weights["args"]] == [[4096, 192], [256, 192], [256]]
    assert weights["args"][2]["holds"] == "below" and weights["args"][2]["bound"] == 4096


def measured(found: tuple[CalibrationTask, ...], rate: float, launch_s: float) -> dict[str, object]:
    transfers = [(4096, 1e-4), (1 << 20, 1e-4 + (1 << 20) / 1e9)]
    return {
        "ops_s": [launch_s + task.work / rate for task in found],
        "launch_s": launch_s,
        "copy_bytes": 4e10,
        "optimizer_bytes": 5e10,
        "all_to_all": transfers,
        "message": transfers,
        "all_reduce": transfers,
    }


def test_a_table_predicts_what_was_measured() -> None:
    """Were every op to run at 10 GFLOP/s or GB/s, a micro-batch is its work over that, and a launch for each op."""
    spec, op_tasks = shipped("quickstart.dsc"), tasks("quickstart.dsc")
    table = table_of(measured(op_tasks, 1e10, 2e-6), op_tasks, MeasuredDevice(name="c", cores=2), "here", "2025-01-01")
    assert table.device.cores == 2 and all(row.when == "paired" for row in table.rows)
    rates = rates_of(spec, table)
    assert rates.cores == 2 and rates.launch_s == 2e-6
    plan = make_plan(spec)
    calls = sum(task.count for task in op_tasks)
    expected = sum(task.count * task.work for task in op_tasks) / 1e10 + calls * 2e-6
    assert predicted_s(rates, plan, balanced_rows(spec)) == pytest.approx(expected, rel=2e-3)
    message = next(stage.output.fixed_bytes for stage in plan.stages if stage.output)
    assert rates.fabric.message_s(0, 2, message) == pytest.approx(1e-4 + message / 1e9, rel=1e-2)
    assert rates.fabric.reduce_s(2**22, range(2)) == pytest.approx(2e-4 + 2**22 / 1e9, rel=1e-2), "sums of two ranks"


def predicted_s(rates: Rates, plan, rows: int) -> float:  # type: ignore[no-untyped-def]
    cuts = plan.cuts
    uses = [step for stage in plan.stages for step in stage.steps if hasattr(step, "segment")]
    return sum(rates.compute_s(use.segment.kind, cost, rows) for use in uses for _, cost in cuts[use.site].costs)


def test_ops_of_one_shape_share_a_row_that_gives_their_sum() -> None:
    forward = CalibrationTask("rmsnorm", "norm", "any", (8, 8), 100.0, (), 1)
    backward = replace(forward, op="rmsnorm_dgrad", work=300.0, count=3)
    timings = measured((forward, backward), 1.0, 1e-9) | {"ops_s": [1.0, 5.0]}
    table = table_of(timings, (forward, backward), MeasuredDevice(name="c"), "here", "2025")
    assert [row.rate for row in table.rows if row.kind == "norm"] == [1000.0 / 16]


def test_ops_that_are_too_large_are_skipped() -> None:
    spec = shipped("deepseek-v3.dsc", "pretrain")
    op_tasks, large = tasks_of(make_plan(spec), rates_of(spec), balanced_rows(spec))
    assert large > 10 and all(task.work <= 2e11 for task in op_tasks)


class Clock:
    """A clock that advances at each reading."""

    def __init__(self, *read: float) -> None:
        self.left = list(read)

    def monotonic(self) -> float:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    thread_time = monotonic


@pytest.mark.parametrize(("read", "rounds"), [((0, 9), 4), ((0, 1), 60), ((0, 1, 1, 1, 1, 1, 1.5), 6)])
def test_calls_are_timed_in_turn_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, read: tuple[float, ...], rounds: int
) -> None:
    """A round is always complete; there are at least four, and the first is not counted."""
    called, board = list[str](), Board(1).bind(0)
    durations_s = {"a": iter(range(99)), "b": iter(range(0, 990, 10))}

    def timed(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
        called.append(function(*args))
        return next(durations_s[called[-1]]), None

    monkeypatch.setattr(calibrate, "time", Clock(*read))
    monkeypatch.setattr(calibrate, "_processor_s", timed)
    medians_s = calibrate.time_in_turn([(str, ("a",)), (str, ("b",))], torch.device("cpu"), 1.0, board)
    assert called == ["a", "b"] * rounds and medians_s == [rounds / 2, 10 * rounds / 2]


def test_time_is_measured_on_the_cpu_or_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "time", Clock(2.0, 5.0))
    assert calibrate._processor_s(max, (3, 4)) == (3.0, 4)
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            return 1500.0 if self is not end else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert calibrate._cuda_s(happened.append, ("call",)) == (1.5, None)
    assert happened == ["record", "call", "record", "synchronize"]


def test_operands_suit_their_ops() -> None:
    def operand(shape: list[int], dtype: str, **more: Any) -> torch.Tensor:
        task = {"args": [{"shape": shape, "dtype": dtype, **more}, 3]}
        tensor, constant = calibrate.arguments(task, torch.Generator().manual_seed(1), torch.device("cpu"))
        assert constant == 3 and list(tensor.shape) == shape and tensor.dtype == getattr(torch, dtype)
        return tensor

    assert set(operand([500], "int64", holds="below", bound=3).tolist()) == {0, 1, 2}
    chosen = operand([50, 2], "int64", holds="choices", bound=3).tolist()
    assert all(len({*row}) == 2 for row in chosen) and {choice for row in chosen for choice in row} == {0, 1, 2}
    assert sorted(operand([9], "int32", holds="order").tolist()) == [*range(9)]
    assert operand([4], "int32", holds="ends", bound=10).tolist() == [2, 5, 7, 10]
    values = operand([4000], "bfloat16").float()
    assert abs(float(values.mean())) < 0.05 and abs(float(values.std()) - 0.5) < 0.05


@pytest.mark.parametrize(
    ("ends", "transfers"), [(["finished"] * 2, 2), (["finished"], 1), (["failed"], 2), (["finished", "failed"], 2)]
)
def test_parts_are_reported_and_the_first_failure_ends_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: list[Kind],
    transfers: int,
) -> None:
    """The time of an op is the median over its processes; a single process skips transfers."""
    outcomes = iter(ends)

    def launched(target: Callable[..., None], world: int, **_: Any) -> Any:
        for rank in range(world):
            target(rank, world, Board(world).bind(rank))
        return Outcome(next(outcomes), "no memory", 0)

    ops = iter([1.0, 5.0, 2.0])
    monkeypatch.setattr(calibrate, "launch", launched)
    monkeypatch.setattr(calibrate, "measure_ops", lambda *_: {"ops_s": [next(ops)], "launch_s": 1.0})
    monkeypatch.setattr(calibrate, "measure_transfers", lambda *_: {"message": [[4096, 0.5]]})
    question, answer = tmp_path / "question.json", tmp_path / "answer.json"
    question.write_text(json.dumps(job(tasks("tiny.dsc")[:1], "cpu", 3, transfers, 1.0)), "utf-8")
    code = calibrate.main([str(question), str(answer)])
    begun = ["calibrate: 1 ops on 3 processes at a time", "calibrate: transfers between 2 processes"][: len(ends)]
    lines = capsys.readouterr().err.splitlines()
    assert lines[: len(begun)] == begun
    if "failed" in ends:
        assert code == 1 and not answer.exists() and "no memory" in lines[-1]
        return
    expected = {"ops_s": [2.0], "launch_s": 1.0, "device": "cpu"}
    assert (code, lines) == (0, begun)
    assert json.loads(answer.read_text("utf-8")) == expected | ({"message": [[4096, 0.5]]} if transfers > 1 else {})


# ---------------------------------------------------------------- the command


def test_measures_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.json"
    assert main(["calibrate", str(SPECS / "tiny.dsc"), "-o", str(path)]) == 0
    printed = capfd.readouterr()
    assert "ops on 1 processes" in printed.err and f'cluster one {{ rates = "{path}" }}' in printed.out
    table = read_table(path)
    assert {row.kind for row in table.rows} >= {"gemm", "wgrad", "attention", "norm", "copy", "optimizer", "launch"}
    assert {row.kind for row in table.rows} >= {"dispatch_node", "message_node", "all_reduce_node", "latency_node"}
    assert table.device.cores and all(row.source.startswith("measured on ") for row in table.rows)
    assert all(1e5 < row.rate < 1e13 for row in table.rows if row.rate)


def test_a_trace_gives_class_factors(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    assert main(["calibrate", str(SPECS / "deepseek-v3.dsc"), "--trace", str(TRACE), "-o", str(path)]) == 0
    assert path.read_text("utf-8") == (TABLES / "h800-calibrated.json").read_text("utf-8")


def test_skipped_ops_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_command, "tasks_of", lambda *_: ((), 3))
    assert main(["calibrate", str(SPECS / "tiny.dsc"), "-o", str(tmp_path / "rates.json")]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first == "calibrate: skipped as too large to measure here: 3 ops"
    assert second == "error: every op of this spec is too large to measure here: use a smaller model"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "h800"], "--table needs --trace"),
        (["--trace", "none.json"], "there is no file"),
        (["--trace", str(TRACE), "--table", "none"], "there is no file"),
        (["--trace", str(TRACE)], "the spec has no layer L10"),
        (["--device", "cuda"], "error: --device cuda: 1 ranks need a device each, and this machine has 0"),
    ],
)
def test_invalid_command_lines_are_refused(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["calibrate", *arguments, "-o", str(tmp_path / "r.json")]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "r.json").exists()


# ---------------------------------------------------------------- cluster { rates = … }


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A spec whose cluster names a table in another folder."""
    text = (SPECS / "quickstart.dsc").read_text("utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "lib").mkdir()
    spec = tmp_path / "run" / "spec.dsc"
    cluster = text[text.index("cluster laptop") :].replace("nodes = 1\n", 'nodes = 1, rates = "rates.json"\n')
    (tmp_path / "lib" / "cluster.dsc").write_text(cluster, "utf-8")
    spec.write_text('import "../lib/cluster.dsc"\n' + text[: text.index("cluster laptop")], "utf-8")
    return spec


def write(named: Path, rate: float) -> None:
    op_tasks = tasks("quickstart.dsc")
    table = table_of(measured(op_tasks, rate, 1e-6), op_tasks, MeasuredDevice(name="c", cores=2), "here", "2025-01-01")
    (named.parents[1] / "lib" / "rates.json").write_text(table.to_json(), "utf-8")


def test_a_spec_uses_the_table_relative_to_the_file_that_names_it(named: Path) -> None:
    write(named, 1e9)
    chosen = load_spec(str(named), [])
    assert chosen is not None and chosen.spec.cluster.rates == "../lib/rates.json"
    assert rates_of(chosen.spec).table == "measured" and rates_of(chosen.spec, "cpu").table == "cpu"
    table = rate_table_of(chosen.spec)
    assert table is not None and table == rate_table_of(load_with_files(named))
    assert with_rate_table(load(named), table) == chosen.spec, "the table is a part of the spec's value"
    write(named, 2e9)
    faster = load_spec(str(named), [])
    assert faster is not None and faster.spec != chosen.spec
    shape = (256, 4096, 192)
    slow, fast = (rates_of(c.spec).rate("gemm", "fp32", shape) for c in (chosen, faster))
    assert fast == pytest.approx(2 * slow, rel=1e-3)


def test_an_invalid_file_is_reported_where_it_is_named(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "show", "plan"):
        assert main([command, str(named)]) == 2
        printed = capsys.readouterr()
        assert "error[R0101]: there is no file" in printed.err + printed.out
        assert "cluster.dsc:2:22" in printed.err + printed.out
    (named.parents[1] / "lib" / "rates.json").write_text('{"name": "x",\n "rows": 1}', "utf-8")
    assert main(["check", str(named)]) == 2
    printed = capsys.readouterr()
    assert "rates.json: device: field required (and 1 more)" in printed.err + printed.out


def test_a_spec_without_its_table_is_not_planned_by_another() -> None:
    spec = load(SPECS / "quickstart.dsc", None, ['cluster.rates="r.json"'])
    with pytest.raises(AssertionError, match="read with it"):
        rates_of(spec)
    with pytest.raises(SpecError, match="there is no file"):
        with_files(spec, {}, SPECS)


def test_tables_of_two_specs_are_compared(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(named, 1e9)
    second = named.parents[1] / "other"
    shutil.copytree(named.parents[1] / "lib", second / "lib")
    shutil.copytree(named.parent, second / "run")
    assert main(["diff", str(named), str(second / "run" / "spec.dsc")]) == 0
    write(named, 2e9)
    capsys.readouterr()
    assert main(["diff", str(named), str(second / "run" / "spec.dsc")]) == 1
    assert "rows" in capsys.readouterr().out


def test_a_build_contains_its_table(named: Path) -> None:
    from compiler.pipeline import compile_spec  # imports torch

    write(named, 1e9)
    chosen = load_spec(str(named), [])
    assert chosen is not None
    segments = Segments()  # traced once
    build = dict(compile_spec(chosen.spec, segments=segments).files)
    table = rate_table_of(chosen.spec)
    assert table is not None and build["rates.json"] == table.to_json()
    folder = named.parent / "build"
    folder.mkdir()
    for name in ("spec.resolved", "rates.json"):
        (folder / name).write_text(build[name], "utf-8")
    alone = load_spec(str(folder / "spec.resolved"), [])
    assert alone is not None and alone.spec.cluster.rates == "rates.json" and rate_table_of(alone.spec) == table
    assert dict(compile_spec(alone.spec, segments=segments).files) == build, (
        "the same spec and table give the same bytes"
    )
