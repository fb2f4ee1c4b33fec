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
LEFT_OUT = "left_out"  # the reason why a part or a row has no result
FINAL = ("the reference op runs at these sizes",)  # reasons that do not change
SAME = ("device", "torch", "triton", "sources")  # facts of a file whose results are kept


class Report:
    """The results, in a file that is complete at any time. Results of an earlier run with the same facts are kept."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        self.found["parts"] = _earlier_parts(path, found)

    def part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.found["parts"].setdefault(name, {"rows": []})
        return part

    def has(self, name: str) -> bool:
        """Whether a part without rows has its result."""
        return len(self.part(name)) > 1

    def missing(self, name: str, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks without a row in a part."""
        rows = self.part(name)["rows"]
        return [task for task in tasks if not any(task.items() <= row.items() for row in rows)]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n", "utf-8")
        temporary.replace(self.path)


def _earlier_parts(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The parts in the file of an earlier run, without what was left out for lack of time or packages."""
    try:
        earlier = json.loads(path.read_text("utf-8"))
        if any(earlier.get(name) != found.get(name) for name in SAME):
            return {}
        parts: dict[str, Any] = {name: part for name, part in earlier["parts"].items() if LEFT_OUT not in part}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}
    for part in parts.values():
        part["rows"] = [row for row in part["rows"] if LEFT_OUT not in row or row[LEFT_OUT] in FINAL]
    return parts


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


def launch(report: Report, until: float) -> None:
    """One small kernel: whether Triton finds a C compiler and Python's headers, and the driver runs its code."""
    from benchmarks.gpu.launch import tasks

    _run(report, "launch", tasks(), 1, until)
    if any("failed" in row for row in report.part("launch")["rows"]):
        raise StopError("no kernel runs on this machine")


def checks(report: Report, until: float) -> None:
    """DeepSeek-V3's sizes on a few workers, as they fill memory; then small ones on many, as compiling dominates."""
    from benchmarks.gpu.checks import library_tasks, tasks

    noted, command = noting(report, "checks"), worker("checks")
    crowded: list[Task] = []

    def large(task: Task, answer: Answer) -> None:
        if "out of memory" in answer.get("failed", ""):
            crowded.append(task)
        else:
            noted(task, answer)

    run(command, report.missing("checks", tasks("v3")), LARGE_WORKERS, TASK_S, until, large)
    run(command, crowded, 1, TASK_S, until, noted)
    _run(report, "checks", [*library_tasks(), *tasks("even"), *tasks("odd")], COMPILE_WORKERS, until)


def timing(report: Report, until: float) -> None:
    """Timings one at a time; torch.compile runs on many workers before."""
    from benchmarks.gpu.timing import tasks

    command, noted = worker("timing"), noting(report, "timing")
    missing = report.missing("timing", tasks())
    alone = [task for task in missing if task["kind"] != "compiled"]
    compiled = [task for task in missing if task["kind"] == "compiled"]
    run(command, alone, 1, TASK_S, until, noted)
    ready: list[Task] = []

    def warmed(task: Task, answer: Answer) -> None:
        crowded = "out of memory" in answer.get("failed", "")  # it may have enough memory in a separate process
        if LEFT_OUT in answer or ("failed" in answer and not crowded):
            noted({**task, "kind": "compiled"}, answer)
        else:
            ready.append({**task, "kind": "compiled"})

    run(command, [{**task, "kind": "warm"} for task in compiled], COMPILE_WORKERS - 2, TASK_S, until, warmed)
    run(command, sorted(ready, key=lambda task: task["case"]), 1, TASK_S, until, noted)


def split(report: Report, until: float) -> None:
    from benchmarks.gpu.split import tasks

    _run(report, "split", tasks(), 1, until)


def nccl(report: Report, until: float) -> None:
    from benchmarks.gpu.nccl import tasks

    _run(report, "nccl", tasks(), 1, until)


def gaps(report: Report, until: float) -> None:
    from benchmarks.gpu.gaps import tasks

    for name in ("alone", "graphs"):
        build = training.build_of(name)
        if isinstance(build, str):
            report.part("gaps")[LEFT_OUT] = build
        else:
            _run(report, "gaps", tasks(build), 1, until)


def _run(report: Report, part: str, tasks: Sequence[Task], workers: int, until: float) -> None:
    run(worker(part), report.missing(part, tasks), workers, TASK_S, until, noting(report, part))


def training_of(name: str, train: Callable[[float], dict[str, Any]]) -> Callable[[Report, float], None]:
    """Return a part that trains, and keeps its last 5 s for the results."""

    def run_training(report: Report, until: float) -> None:
        if not report.has(name):
            report.part(name).update(train(until - 5))

    return run_training


def bounds(report: Report, until: float) -> None:
    """The tests of the interpreter, run on the device (tests/gpu/plugin.py)."""
    if report.has("bounds"):
        return
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.plugin", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-rf", "--tb=line", "--timeout=60", *interpreted()]
    command += ["-n", str(min(8, os.cpu_count() or 1))] if not training.missing(("xdist",)) else []
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


class StopError(Exception):
    """The other parts cannot run either."""


TRAINING = ("torch", "triton", *training.TRAINS)
PARTS = (
    Part("launch", "a kernel of one line", 20, KERNELS, launch),
    Part("checks", "every kernel against its op", 140, KERNELS, checks),
    Part("alone", "the quickstart in BF16 by one rank", 55, TRAINING, training_of("alone", training.alone)),
    Part("fp8", "the quickstart in FP8 by one rank", 55, TRAINING, training_of("fp8", training.fp8)),
    Part("nccl", "the operations of NCCL on one rank", 15, ("torch", "numpy"), nccl),
    Part("gaps", "the share of a step without a kernel, and CUDA graphs", 25, TRAINING, gaps),
    Part("timing", "every kernel's time beside others'", 180, KERNELS, timing),
    Part("split", "compute and communication side by side", 30, KERNELS, split),
    Part("shared", "the quickstart by four ranks on one GPU", 40, TRAINING, training_of("shared", training.shared)),
    Part("bounds", "the interpreter's checks, within their bounds", 40, (*KERNELS, "pytest", "pytest_timeout"), bounds),
)


def run_parts(report: Report, chosen: Sequence[str], total_s: float) -> None:
    """Run parts, each within its limit and the rest of the total. A failing part does not stop the others, except for
    the first."""
    end = time.monotonic() + total_s
    for part in PARTS:
        if part.name not in chosen:
            continue
        started, entry = time.monotonic(), report.part(part.name)
        until = min(started + part.limit_s, end)
        print(f"{part.name}: {part.says}, at most {until - started:.0f} s", flush=True)
        stops = False
        if lacking := training.missing(part.wants):
            entry[LEFT_OUT] = f"{', '.join(lacking)} not installed"
        elif until - started < 10:
            entry[LEFT_OUT] = "no time was left"
        else:
            try:
                part.run(report, until)
            except StopError as error:
                entry["failed"], stops = str(error), True
            except Exception as error:  # of any kind; go on with the next part
                entry["failed"] = f"{type(error).__name__}: {error}"[:500]
        entry["took_s"] = round(entry.get("took_s", 0.0) + time.monotonic() - started, 1)
        print(f"{part.name}: {entry.get(LEFT_OUT) or entry.get('failed') or 'done'}, {entry['took_s']} s", flush=True)
        report.save()
        if stops:
            return
