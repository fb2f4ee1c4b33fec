"""The parts of a run, each with a time limit, the most valuable first. Results are stored as soon as they are there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import training
from runtime.system.workers import Answer, Task, run

ROOT = Path(__file__).parents[2]
KERNELS = ("torch", "triton", "jinja2", "numpy")  # packages for parts that emit kernels
TASK_S = 60.0  # time limit of one check or timing, compilation included
COMPILE_WORKERS, LARGE_WORKERS = 10, 3


class Report:
    """The results, in a file that is complete at any time."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        self.found["parts"] = {}

    def part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.found["parts"].setdefault(name, {"rows": []})
        return part

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n", "utf-8")
        temporary.replace(self.path)


@dataclass(frozen=True)
class Part:
    name: str
    says: str
    limit_s: float
    wants: Sequence[str]
    run: Callable[[Report, float], None]


def worker(module: str) -> list[str]:
    """The command of a worker, without torch.compile's own process pool: there are many workers already."""
    return ["env", "TORCHINDUCTOR_COMPILE_THREADS=1", sys.executable, "-m", f"benchmarks.gpu.{module}"]


def noting(report: Report, part: str) -> Callable[[Task, Answer], None]:
    """Return a callback that adds a row for an answer, prints it and saves the report."""

    def answered(task: Task, answer: Answer) -> None:
        report.part(part)["rows"].append({**task, **answer})
        words = " ".join(str(value) for key, value in task.items() if key != "case")
        outcome = answer.get("failed") or answer.get("left_out") or _brief(answer)
        print(f"  {words}: {outcome}", flush=True)
        report.save()

    return answered


def _brief(answer: Answer) -> str:
    if "seconds" in answer and isinstance(answer["seconds"], dict):
        times = "  ".join(f"{name} {s * 1e6:.0f} µs" for name, s in answer["seconds"].items())
        return times + "".join(f"  {name}: {why}" for name, why in answer["why_not"].items())
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in answer.items()
    )


# ---------------------------------------------------------------- parts


def checks(report: Report, until: float) -> None:
    """Small sizes on many workers, as compiling dominates; then DeepSeek-V3's on a few, as they fill memory."""
    from benchmarks.gpu.checks import tasks

    noted, command = noting(report, "checks"), worker("checks")
    run(command, [*tasks("even"), *tasks("odd")], COMPILE_WORKERS, TASK_S, until, noted)
    crowded: list[Task] = []

    def large(task: Task, answer: Answer) -> None:
        if "out of memory" in answer.get("failed", ""):
            crowded.append(task)
        else:
            noted(task, answer)

    run(command, tasks("v3"), LARGE_WORKERS, TASK_S, until, large)
    run(command, crowded, 1, TASK_S, until, noted)


def timing(report: Report, until: float) -> None:
    """Timings one at a time; torch.compile runs on many workers before."""
    from benchmarks.gpu.timing import tasks

    command, noted = worker("timing"), noting(report, "timing")
    alone = [task for task in tasks() if task["kind"] != "compiled"]
    compiled = [task for task in tasks() if task["kind"] == "compiled"]
    run(command, alone, 1, TASK_S, until, noted)
    ready: list[Task] = []

    def warmed(task: Task, answer: Answer) -> None:
        crowded = "out of memory" in answer.get("failed", "")  # it may have enough memory in a separate process
        if "left_out" in answer or ("failed" in answer and not crowded):
            noted({**task, "kind": "compiled"}, answer)
        else:
            ready.append({**task, "kind": "compiled"})

    run(command, [{**task, "kind": "warm"} for task in compiled], COMPILE_WORKERS - 2, TASK_S, until, warmed)
    run(command, sorted(ready, key=lambda task: task["case"]), 1, TASK_S, until, noted)


def split(report: Report, until: float) -> None:
    from benchmarks.gpu.split import tasks

    run(worker("split"), tasks(), 1, TASK_S, until, noting(report, "split"))


def alone(report: Report, until: float) -> None:
    report.part("alone").update(training.alone(until - 5))


def shared(report: Report, until: float) -> None:
    report.part("shared").update(training.shared(until - 5))


def bounds(report: Report, until: float) -> None:
    """The tests of the interpreter, run on the device (tests/gpu/plugin.py)."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.plugin", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-rf", "--tb=line", "--timeout=60", *interpreted()]
    command += ["-n", "8"] if not training.missing(("xdist",)) else []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            report.part("bounds")["failed"] = "stopped at the end of its time"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text[-400:])}
    failures = [line[:300] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    report.part("bounds").update({"counts": counted, "failures": failures[:60]})


def interpreted() -> list[str]:
    """The test files that check a kernel in the interpreter; they need only the packages of kernels."""
    paths = (ROOT / "tests/compiler/emit/kernels").glob("test_*.py")
    return sorted(str(path) for path in paths if "interpret: Interpret" in path.read_text("utf-8"))


PARTS = (
    Part("checks", "every kernel against its op", 150, KERNELS, checks),
    Part("timing", "every kernel's time beside others'", 220, KERNELS, timing),
    Part("alone", "the quickstart by one rank", 75, ("torch", "triton", *training.TRAINS), alone),
    Part("split", "compute and communication side by side", 30, KERNELS, split),
    Part("shared", "the quickstart by four ranks on one GPU", 45, ("torch", "triton", *training.TRAINS), shared),
    Part("bounds", "the interpreter's checks, within their bounds", 50, (*KERNELS, "pytest", "pytest_timeout"), bounds),
)


def run_parts(report: Report, chosen: Sequence[str], total_s: float) -> None:
    """Run parts, each within its limit and the rest of the total. A failing part does not stop the others."""
    end = time.monotonic() + total_s
    for part in PARTS:
        if part.name not in chosen:
            continue
        started, entry = time.monotonic(), report.part(part.name)
        until = min(started + part.limit_s, end)
        print(f"{part.name}: {part.says}, at most {until - started:.0f} s", flush=True)
        if lacking := training.missing(part.wants):
            entry["left_out"] = f"{', '.join(lacking)} not installed"
        elif until - started < 10:
            entry["left_out"] = "no time was left"
        else:
            try:
                part.run(report, until)
            except Exception as error:  # of any kind; go on with the next part
                entry["failed"] = f"{type(error).__name__}: {error}"[:500]
        entry["took_s"] = round(time.monotonic() - started, 1)
        print(f"{part.name}: {entry.get('left_out') or entry.get('failed') or 'done'}, {entry['took_s']} s", flush=True)
        report.save()
