"""The whole run on a GPU: isolated failures of workers, skipped parts, timings, results and their page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import carried, checks, facts, gaps, limits, nccl, parts, rates, timing, training
from benchmarks.gpu.arguments import reference
from benchmarks.gpu.cases import CASES, Case, Goal
from benchmarks.gpu.facts import digest, emitted
from benchmarks.gpu.page import FACTS, PAGE, RESULTS, compiled, current, families, floor, launches, page, reached
from benchmarks.gpu.parts import PARTS, Report, run_parts
from benchmarks.side_by_side import WHY
from runtime.system.workers import run
from tests.progress import PATIENCE_S

ROOT = Path(__file__).parents[2]
AGAIN = "run: python -m benchmarks.gpu --facts"
WORKER = [sys.executable, "-m", "tests.gpu.fake_worker"]

# ---------------------------------------------------------------- workers


def answers(
    tasks: list[dict[str, Any]], workers: int, each_s: float = PATIENCE_S, total_s: float = 1e4
) -> list[dict[str, Any]]:
    pairs: list[tuple[Any, dict[str, Any]]] = []
    run(WORKER, tasks, workers, each_s, time.monotonic() + total_s, lambda task, answer: pairs.append((task, answer)))
    assert sorted(task["n"] for task, _ in pairs) == [task["n"] for task in tasks]
    return [answer for _, answer in sorted(pairs, key=lambda pair: pair[0]["n"])]


def test_a_worker_answers_one_task_after_the_other() -> None:
    first, second, third = answers([{"n": n, "do": "it", "length": 300_000 * n} for n in range(3)], 1)
    assert first["pid"] == second["pid"] == third["pid"] != os.getpid() and len(third["long"]) == 600_000


def test_a_failed_task_does_not_affect_the_others() -> None:
    actions = ["raise", "it", "break", "it", "die", "it"]
    raised, after, broke, fresh, died, last = answers([{"n": n, "do": do} for n, do in enumerate(actions)], 1)
    assert raised["failed"] == "ValueError: of its own" and "CUDA error" in broke["failed"]
    assert "code 3: last words" in died["failed"]
    assert len({after["pid"], fresh["pid"], last["pid"]}) == 3


def test_a_task_that_hangs_is_stopped() -> None:
    hung, next_one = answers([{"n": 0, "do": "hang"}, {"n": 1, "do": "it"}], 1, each_s=2)
    assert "took more than 2 s" in hung["failed"]
    assert "pid" in next_one or "took more than 2 s" in next_one["failed"]  # as on a busy machine


def test_a_run_that_is_interrupted_ends_its_workers() -> None:
    """SIGINT comes to all processes of a terminal."""
    code = f"""
from runtime.system.workers import run
from tests.progress import PATIENCE_S
def say(task, answer): print(task, answer, flush=True)
run({WORKER!r}, [{{"do": "it"}}] * 2 + [{{"do": "hang"}}] * 8, 2, 1e6, float("inf"), say)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    answered = [process.stdout.readline() for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()  # which waits for workers that hold its pipes
    assert all("pid" in line for line in answered) and not out and "KeyboardInterrupt" in err
    assert process.returncode


def test_an_error_while_handling_an_answer_ends_the_run() -> None:
    def full(task: Any, answer: Any) -> None:
        raise OSError("a full disk")

    with pytest.raises(OSError, match="a full disk"):  # if `run` waited for hanging workers, the test would not end
        run(WORKER, [{"do": "it"}, *[{"do": "hang"}] * 4], 2, 1e6, float("inf"), full)


def test_no_task_starts_when_no_time_is_left() -> None:
    assert answers([{"n": n, "do": "it"} for n in range(3)], 2, total_s=-1) == [{"left_out": "no time was left"}] * 3


# ---------------------------------------------------------------- parts


def fake(name: str, work: Callable[[Report, float], None], wants: tuple[str, ...] = (), limit_s: float = 30) -> Any:
    return parts.Part(name, "of a test", limit_s, wants, work)


def test_results_of_each_part_are_saved_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(report: Report, until: float) -> None:
        report.part("fails")["rows"].append({"kept": True})
        raise RuntimeError("midway")

    def works(report: Report, until: float) -> None:
        assert json.loads(report.path.read_text())["parts"]["fails"]["rows"] == [{"kept": True}]
        assert until - time.monotonic() <= 30

    fakes = (
        fake("lacks", works, wants=("torch", "no_such_package")),
        fake("fails", fails),
        fake("works", works),
        fake("late", works, limit_s=5),
    )
    monkeypatch.setattr(parts, "PARTS", fakes)
    report = Report(tmp_path / "deep" / "h1.json", {"device": "NVIDIA H1"})
    run_parts(report, ["lacks", "fails", "works", "late"], 100)
    saved = json.loads(report.path.read_text())
    assert saved["parts"]["lacks"]["left_out"] == "no_such_package not installed"
    assert saved["parts"]["fails"]["failed"] == "RuntimeError: midway"
    assert set(saved["parts"]["works"]) == {"rows", "took_s"}
    assert saved["parts"]["late"]["left_out"] == "no time was left"
    assert command.failed(saved) and not command.failed({"parts": {"works": saved["parts"]["works"]}})


def test_the_parts_fit_into_ten_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 600 and command.TOTAL_S < 600


# Assumed seconds of a task, compilation included. No GPU has run them yet.
TASKS_S = {"v3": 2.0, "even": 2.0, "odd": 2.0, "libraries": 0.6, "warm": 8.0, "compiled": 0.6}


def test_the_tasks_of_a_part_fit_into_its_time() -> None:
    """By their numbers, so that new kernels show here when a part needs more time."""
    limits = {part.name: part.limit_s for part in PARTS}
    small = (
        len([*checks.library_tasks(), *checks.tasks("even"), *checks.tasks("odd")])
        * TASKS_S["even"]
        / parts.COMPILE_WORKERS
    )
    large = len(checks.tasks("v3")) * TASKS_S["v3"] / parts.LARGE_WORKERS
    assert large + small <= 1.5 * limits["checks"], "DeepSeek-V3's sizes come first; the rest is for a second call"
    assert large <= limits["checks"]
    compiled = [task for task in timing.tasks() if task["kind"] == "compiled"]
    warm = len(compiled) * TASKS_S["warm"] / (parts.COMPILE_WORKERS - 2)
    assert warm + len(timing.tasks()) * TASKS_S["compiled"] <= limits["timing"]


FAKE_GPU = [sys.executable, "-m", "tests.gpu.fake_gpu"]
TRAINED = {
    "device": {"losses": [8.0], "tokens_per_s": 1.0},
    "cpu": {"losses": [8.0], "tokens_per_s": 1.0},
    "apart": 0.0,
}


def test_a_rehearsal_runs_all_parts_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers answer at once. A second run asks for nothing that the first has, and again for what it left out."""
    (tmp_path / "test_one.py").write_text("def test_one() -> None: ...")
    trained: list[str] = []

    def beside_cpu(name: str, *_: object) -> dict[str, Any]:
        trained.append(name)
        return dict(TRAINED)

    monkeypatch.setattr(parts, "worker", lambda module: [*FAKE_GPU, module, str(tmp_path / "asked")])
    monkeypatch.setattr(parts, "interpreted", lambda: [str(tmp_path / "test_one.py")])
    monkeypatch.setattr(training, "_beside_cpu", beside_cpu)
    monkeypatch.setattr(training, "missing", lambda names: [name for name in names if name == "xdist"])
    monkeypatch.setattr(training, "build_of", lambda name: tmp_path / name)
    monkeypatch.setattr(parts, "PARTS", tuple(replace(part, limit_s=PATIENCE_S) for part in PARTS))
    about = {"device": "NVIDIA H1", "torch": "2", "triton": "3", "sources": "abc"}
    names, path = [part.name for part in PARTS], tmp_path / "h1.json"
    run_parts(Report(path, dict(about)), names, 1e5)
    whole, asked = json.loads(path.read_text()), (tmp_path / "asked").read_text().split()
    assert [*whole["parts"]] == names and not command.failed(whole)
    assert not any("left_out" in part for part in whole["parts"].values())
    assert trained == ["alone", "fp8", "four"]
    assert whole["parts"]["bounds"]["counts"] == {}, "the plugin deselects tests without a kernel"
    assert len(whole["parts"]["checks"]["rows"]) == asked.count("checks") > 500

    stopped = json.loads(path.read_text())
    del stopped["parts"]["checks"]["rows"][200:], stopped["parts"]["split"]
    stopped["parts"]["timing"]["rows"][3] = stopped["parts"]["timing"]["rows"][3] | {"left_out": "no time was left"}
    stopped["parts"]["fp8"] = {"rows": [], "left_out": "no time was left"}
    path.write_text(json.dumps(stopped))
    (tmp_path / "asked").unlink()
    trained.clear()
    run_parts(Report(path, dict(about)), names, 1e5)
    again, asked_again = json.loads(path.read_text()), (tmp_path / "asked").read_text().split()
    assert trained == ["fp8"]
    assert asked_again.count("checks") == asked.count("checks") - 200
    assert asked_again.count("split") == asked.count("split") and asked_again.count("timing") in (1, 2)
    for name, part in whole["parts"].items():
        assert len(again["parts"][name]["rows"]) == len(part["rows"]), name

    Report(path, about | {"sources": "other"}).save()  # of other sources nothing is kept
    assert json.loads(path.read_text())["parts"] == {}


def test_nothing_else_runs_where_no_kernel_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "worker", lambda module: [*FAKE_GPU, "broken", str(tmp_path / "asked")])
    report = Report(tmp_path / "h1.json", {"device": "NVIDIA H1"})
    run_parts(report, [part.name for part in PARTS], 600)
    saved = json.loads(report.path.read_text())["parts"]
    assert [*saved] == ["launch"] and saved["launch"]["failed"] == "no kernel runs on this machine"
    assert "no compiler" in saved["launch"]["rows"][0]["failed"]


OVER_GLOO = [task for task in nccl.tasks() if task["name"] != "sums to owners"]  # NCCL alone has this one


@pytest.mark.parametrize("task", OVER_GLOO, ids=lambda task: f"{task['name']}-{task['ctas']}")
def test_operations_of_nccl_keep_the_numbers_of_one_rank(task: dict[str, Any]) -> None:
    assert nccl.handle(task, "cpu") == {}


def test_gaps_are_those_of_all_streams() -> None:
    """Two kernels overlap; between 30 and 60 µs none runs."""
    assert gaps.busy([(60.0, 90.0), (0.0, 20.0), (10.0, 30.0)]) == {
        "step_ms": 0.03,
        "busy": round(60 / 90, 4),
        "kernels": 1,
        "longest_gap_us": 30.0,
    }


def test_carried_wheels_are_installed_where_packages_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried_one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_one.py", "")
        wheel.writestr("carried_one-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried-one\nVersion: 1.0\n")
        wheel.writestr(
            "carried_one-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("carried_one-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(carried, "WHEELS", wheels)
    monkeypatch.setattr(carried, "SITE", site)
    monkeypatch.setattr(carried, "WANTED", ("carried_one",))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    carried.install()
    assert training.missing(("carried_one",)) == [] and os.environ["PYTHONPATH"] == f"before{os.pathsep}{site}"


def test_without_a_gpu_nothing_is_written() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    before = sorted(RESULTS.iterdir())
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "No CUDA device here" in process.stdout and sorted(RESULTS.iterdir()) == before


def test_kernels_import_no_packages_of_the_compiler() -> None:
    """A machine with a GPU may have torch and little else."""
    code = f"""
import importlib, sys
sys.modules |= dict.fromkeys({["lark", "pydantic", "networkx"]})  # None: not to be found
for name in ("launch", "checks", "nccl", "gaps", "timing", "split", "parts", "page", "facts", "carried", "__main__"):
    importlib.import_module("benchmarks.gpu." + name)
import runtime.run.train, runtime.run.loop, tests.gpu.plugin
tests.gpu.plugin.stand_in()
from tests.compiler.emit.kernels.shapes import describe
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_kernel_checks_need_only_pytest() -> None:
    code = f"""
import sys
sys.modules |= dict.fromkeys({["lark", "pydantic", "networkx", "hypothesis", "rich", "safetensors", "tokenizers"]})
import pytest
from benchmarks.gpu.parts import interpreted
sys.exit(pytest.main(["-p", "tests.gpu.plugin", "-p", "no:cacheprovider", "--collect-only", *interpreted()]))
"""
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=plain, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-2000:]
    assert int(re.findall(r"^(\d+)(?:/\d+)? tests collected", process.stdout, re.MULTILINE)[0]) > 300


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4", "a100"), ("Tesla", "tesla")],
)
def test_results_are_named_by_the_device(device: str, name: str) -> None:
    assert command.short_name(device) == name


def test_a_run_that_cannot_be_compiled_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BUILDS", tmp_path)
    monkeypatch.setattr(training, "COMPILES", ("no_such_package",))
    assert "--carry" in str(training.build_of("alone"))


def test_a_loss_curve_has_the_steps_that_were_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "RUNS", tmp_path)
    training_run = training.Run("one", tmp_path, "cpu", 4)
    training_run.folder.mkdir()
    rows = [{"step": n, "loss": 8.0 - n, "tokens_per_s": 10.0 * n} for n in range(1, 5)]
    (training_run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5')
    (training_run.folder / "log").write_text("error: it broke")
    assert training.curve(training_run, 0) == {"losses": [7.0, 6.0, 5.0, 4.0], "tokens_per_s": 35.0}
    assert training.curve(training_run, 1)["failed"] == "error: it broke"
    assert training.apart([7.0, 6.0], [7.0, 6.5, 5.0]) == 0.5 and training.apart([], [1.0]) is None


# ---------------------------------------------------------------- timing


def test_calls_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = iter([3.0, 30.0, 1.0, 10.0, 2.0, 20.0]), []

    def seconds(call: Callable[[], Any]) -> float:
        order.append(call())
        return next(clock)

    monkeypatch.setattr(limits, "seconds", seconds)
    assert limits.in_turn({"a": lambda: "a", "b": lambda: "b"}) == {"a": 2.0, "b": 20.0}
    assert "".join(order) == "ababab"


def test_short_calls_are_replayed_from_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> str:
            return "graph"

    captures: list[Any] = []
    monkeypatch.setattr(
        limits, "captured", lambda call: captures.append(call) or (None if call() == "waits" else Graph())
    )
    times = {"short": 9e-5, "graph": 3e-5, "waits": 8e-5, "long": 1e-3}
    monkeypatch.setattr(limits, "seconds", lambda call: times[call()])
    calls = {name: (lambda name=name: name) for name in ("short", "waits", "long")}
    assert limits.in_turn(calls) == {"short": 3e-5, "waits": 8e-5, "long": 1e-3}
    assert len(captures) == 2


@pytest.mark.parametrize("name", ["rmsnorm", "grouped_linear_wgrad_ up", "linear_fp8 out-projection", "adamw"])
def test_a_kernel_is_timed_beside_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The op stands for the kernel, and its time is a constant, so that this runs without a GPU."""

    def first(call: Callable[[], Any]) -> float:
        call()
        return 0.25

    def each(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return {name: first(call) for name, call in calls.items()}

    monkeypatch.setattr(timing, "emitted", lambda op, arguments, num_sms: reference(op))
    monkeypatch.setattr(timing, "first", first)
    monkeypatch.setattr(timing, "in_turn", each)
    task = next(task for task in timing.tasks() if task.get("name") == name)
    answer = json.loads(json.dumps(timing.timed(task, "even", "cpu")))
    assert answer["seconds"]["ours"] == 0.25 and "torch" in answer["seconds"] and answer["bytes"] > 0
    if name == "rmsnorm":
        assert set(answer["why_not"]) == {"Liger", "QuACK"} and "No module named" in answer["why_not"]["Liger"]
    assert (answer["flops"] is None) == (name in ("rmsnorm", "adamw"))


def test_every_kernel_is_timed_and_formulas_compiled_after() -> None:
    tasks = timing.tasks()
    assert tasks[0] == {"kind": "limits"}
    assert [task["name"] for task in tasks if task["kind"] == "libraries"] == [case.name for case in CASES]


def test_timed_libraries_are_rows_of_a_rate_table() -> None:
    """A row for each library that was timed, whose rate is the work over its time."""
    names = [case.name for case in CASES]
    ops = {case.op: names.index(case.name) for case in reversed(CASES)}

    def timed(op: str, rate: str, **seconds: float) -> dict[str, Any]:
        case = ops[op]
        by = {f"by {name}": value for name, value in seconds.items()}
        task = {"kind": "libraries", "case": case, "name": names[case]}
        return {**task, "seconds": {"ours": 1e-3, **by}, "flops": 4e11, "rate": rate}

    found = [
        timed("mla_attention_dgrad", "bf16", flash_attn=1e-3),
        timed("linear_fp8", "fp8", deep_gemm=4e-4),
        timed("grouped_linear", "bf16"),
        {"kind": "limits", "copy": 4e12},
    ]
    document = {"device": "NVIDIA H1", "torch": "2", "date": "2026-11-30", "parts": {"timing": {"rows": found}}}
    rows = [(row.kind, row.dtype, row.rate, row.by) for row in rates.rows(document)]
    assert rows == [("attention_backward", "bf16", 4e14, "flash_attn"), ("gemm", "e4m3", 1e15, "deep_gemm")]
    assert not [*rates.rows({**document, "parts": {}})]


# ---------------------------------------------------------------- the page

LIMITS = {"kind": "limits", "copy": 4e12, "bf16": 800e12, "fp8": 1600e12}


def found() -> dict[str, Any]:
    def timed(name: str, ours: float, **more: Any) -> dict[str, Any]:
        seconds = {"ours": ours, **more.pop("others", {})}
        return {"kind": "libraries", "name": name, "seconds": seconds, "flops": None, "rate": "bf16", **more}

    rows = [
        LIMITS,
        timed("rmsnorm", 50e-6, bytes=160_000_000, others={"torch": 200e-6}, why_not={"Liger": "absent"}),
        {**timed("rmsnorm", 50e-6, bytes=160_000_000, others={"compiled": 60e-6}), "kind": "compiled"},
        timed("grouped_linear up", 1e-3, bytes=1, flops=400e9, others={"_grouped_mm": 1.1e-3}),
        timed("route", 8e-6, bytes=4_000_000),
        {"kind": "libraries", "name": "swiglu", "failed": "took | more\nthan 60 s"},
    ]
    checks = [
        {"name": "rmsnorm", "error": 0.8, "dtype": "bfloat16", "sizes": "odd"},
        {"name": "swiglu", "error": 3.0, "failed": "3 times", "dtype": "bfloat16", "sizes": "odd"},
    ]
    curve = {"losses": [8.5, 8.0], "tokens_per_s": 12345.6}
    split = {"name": "112 + 20 SMs", "product_s": 2e-3, "copy_s": 1.9e-3, "serial_s": 3.9e-3, "two_streams_s": 2.5e-3}
    return {
        "device": "NVIDIA H200",
        "sms": 132,
        "torch": "2.11.0",
        "date": "2000-01-02",
        "parts": {
            "checks": {"rows": checks},
            "timing": {"rows": rows},
            "alone": {
                "rows": [],
                "device": {**curve, "memory_bytes": 3 << 29, "reserved_bytes": 1 << 31},
                "cpu": {**curve, "losses": [8.4]},
                "apart": 0.1,
                "planned_bytes": 1 << 30,
            },
            "nccl": {
                "rows": [{"name": "all-reduce", "ctas": 0, "seconds": 2e-5}, {"name": "b", "ctas": 16, "failed": "no"}]
            },
            "gaps": {"rows": [{"name": "alone", "step_ms": 4.0, "busy": 0.62, "kernels": 900, "longest_gap_us": 80.0}]},
            "shared": {"rows": [], "left_out": "lark not installed"},
            "split": {"rows": [split | {"green_product_s": 2e-3, "green_copy_s": 2e-3, "green_contexts_s": 2.1e-3}]},
            "bounds": {"rows": [], "counts": {"passed": 300, "failed": 1}, "failures": ["FAILED a | b"]},
        },
    }


def test_the_page_shows_the_measurements() -> None:
    text = page([found()], {"triton": "3.9.0", "cases": {}})
    lines = text.splitlines()
    assert "| rmsnorm | 50.0 µs | 80% | ≥ 0.85 of the limit | no | torch 4.00, compiled 1.20 | 0.80 |" in lines
    assert "| grouped_linear up | 1,000.0 µs | 50% | ≥ 1.20× _grouped_mm | no | _grouped_mm 1.10 |  |" in lines
    assert "| route | 8.0 µs | 12% | ≤ 10 µs | yes |  |  |" in lines
    assert "| swiglu | took \\| more than 60 s | | ≥ 0.85 of the limit | | | **1 failed** |" in lines
    assert "| one rank, BF16 | 12,346 | 12,346 | 2 | 8.5000 | 8.0000 | 0.1000 | 1.00, 1.50, 2.00 |" in lines
    assert "| four ranks on the one GPU | not measured | | | | | | |" in lines
    assert "| all-reduce | default | 20 µs |" in lines and "| b | 16 | no |" in lines
    assert "a kernel runs for 62% of 4.0 ms: 900 kernels, the longest gap 80 µs." in text
    assert any(line.startswith("| 112 + 20 SMs |") and "0.80; 0.95 in green contexts" in line for line in lines)
    assert "- shared: lark not installed" in lines and "300 passed, 1 failed" in text
    assert sum(line.startswith("| quantise |") for line in lines) == 1  # not measured
    assert sum(line.startswith("| quantise |") for line in launches({"cases": {}}).splitlines()) == 1  # not compiled


def test_a_page_without_results_says_so() -> None:
    text = page([], {"triton": "3.9.0", "cases": {}})
    counts = re.findall(r"^\| [≥≤] .* \| (\d+) \| `", text, re.MULTILINE)
    assert "No GPU has run these yet" in text and sum(map(int, counts)) == len(CASES)


def test_every_launch_is_in_one_family() -> None:
    cases = compiled()["cases"]
    launches_by_family = families(compiled())
    assert sum(map(len, launches_by_family.values())) == sum(len(case["launches"]) for case in cases.values())


def test_reasons_have_the_registers_of_the_facts() -> None:
    """The page states the registers of E4M3 products and of the query gradient for one head."""
    eight = [row["registers"] for row in families(compiled())["FP8 products"]]
    assert f"{min(eight)} to {max(eight)} of 255 registers" in WHY["result of a product"]
    rows = compiled()["cases"]["dequantise_mla_attention_dgrad_quantise_both_e5m6"]["launches"]
    (queries,) = {row["registers"] for row in rows if row["kernel"] == "_query_gradient"}
    assert f"one head takes {queries}." in WHY["attention"]


@pytest.mark.parametrize(
    ("goal", "seconds", "said"),
    [
        (Goal("share", 0.5), 2.0, True),
        (Goal("share", 0.6), 2.0, False),
        (Goal("TFLOPS", 1), 2.0, True),
        (Goal("TFLOPS", 1.1), 2.0, False),
        (Goal("µs", 10), 11e-6, False),
        (Goal("ratio", 1.2, "x"), 1.0, True),
        (Goal("ratio", 1.2, "y"), 1.0, None),
    ],
)
def test_goals_are_reached_or_not(goal: Goal, seconds: float, said: bool | None) -> None:
    assert reached(goal, seconds, 1.0, 2 * 10**12, {"x": 1.2}) is said


def test_the_limit_is_the_slower_of_moving_and_computing() -> None:
    assert floor({"bytes": 8e12, "flops": 800e12, "rate": "bf16"}, LIMITS) == 2.0
    assert floor({"bytes": 4e12, "flops": 4800e12, "rate": "fp8"}, LIMITS) == 3.0
    assert floor({"bytes": 4e12, "flops": None}, LIMITS) == 1.0 and floor({}, None) is None


def test_the_page_is_current(bless: bool) -> None:
    text = current()
    if bless:
        PAGE.write_text(text, "utf-8")
    assert PAGE.read_text("utf-8") == text, "run: python -m benchmarks.gpu --page"


def test_stored_facts_match_the_current_kernels() -> None:
    cases = json.loads(FACTS.read_text("utf-8"))["cases"]
    assert list(cases) == [case.name for case in CASES], AGAIN
    assert [name for name, stored in cases.items() if stored["text"] != digest(emitted(by_name(name))[0])] == [], AGAIN
    launches = [row for stored in cases.values() for row in stored["launches"]]
    assert launches and not any(row["failures"] for row in launches)


def test_facts_of_the_same_text_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads(FACTS.read_text("utf-8"))
    monkeypatch.setattr(facts, "CASES", (by_name("rmsnorm"),))
    monkeypatch.setattr(facts.Gate, "verdicts", lambda *_, **__: ())
    monkeypatch.setattr(facts.triton, "__version__", before["triton"])
    text = digest(emitted(by_name("rmsnorm"))[0])
    stored = {"text": text, "launches": ["kept"]}
    updated = facts.facts({"triton": before["triton"], "cases": {"rmsnorm": stored}})
    assert updated["cases"] == {"rmsnorm": stored}
    for stale in ({"triton": "0", "cases": {"rmsnorm": stored}}, {"triton": before["triton"], "cases": {}}, {}):
        assert facts.facts(stale)["cases"] == {"rmsnorm": {"text": text, "launches": []}}


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
