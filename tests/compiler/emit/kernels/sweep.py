"""Every kernel of every shipped spec through the gate, on every target: `make kernels`, or

    python -m tests.compiler.emit.kernels.sweep [--format json] [--spec quickstart] [--op rmsnorm] [--target sm_90]

with the Triton that is first on PYTHONPATH. A spec runs in its own precision, in bf16 and in fp32. A launch is compiled
once per target and specialised arguments, even if several specs and ops share it. Passed launches are stored in
.triton/verdicts, so that a stopped run continues, and the next one reuses what did not change. Ends with a
table of ops and targets, and the failures; the exit code is 1 if anything failed. 5,600 launches, 23 minutes on two
cores.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

import triton
from pydantic import TypeAdapter

from compiler.emit.kernels import KernelFile, emit_kernel
from compiler.emit.kernels.calls import KernelCall
from runtime.build import launches as recorded_launches
from runtime.build.launches import Launch, record
from runtime.system import workers
from tests.compiler.emit.kernels import gate, gate_launch, gate_read
from tests.compiler.emit.kernels.gate import SM_90, TARGETS, Target, Verdict, judge, key_of, streams_of
from tests.compiler.emit.kernels.gate_launch import arguments_of, has_eight_bits, load
from tests.compiler.emit.kernels.shapes import VARIANTS, Variant, kernel_calls, rows_of

KEPT = Path(".triton/verdicts")
WORKER = (sys.executable, "-m", "tests.compiler.emit.kernels.sweep_worker")
LIMIT_S = 300.0  # of one launch; the longest takes 5 s
COLUMNS = ("launches", "failed", "registers", "shared")


@dataclass(frozen=True, slots=True)
class Job:
    """One launch to compile: the one at `index` among the launches of a call with a number of rows."""

    key: str
    file: KernelFile
    call: KernelCall
    rows: int
    index: int
    target: str


JOB, VERDICT = TypeAdapter(Job), TypeAdapter(Verdict)


@dataclass(frozen=True, slots=True)
class Row:
    """One launch of one call, for one target."""

    spec: str  # the first that has the call: deepseek-v3.dsc bf16
    op: str
    call: str
    file: str
    key: str  # of its verdict


@dataclass(slots=True)
class Sweep:
    """The launches to compile, each once, and the known verdicts."""

    rows: list[Row] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)  # by key
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def refuse(self, spec: str, call: KernelCall | None, target: str, why: str) -> None:
        """What fails before it is compiled."""
        op, key = call.op if call else "", f"{spec} {call} {target}"
        self.rows.append(Row(spec, op, str(call or ""), "", key))
        self.verdicts[key] = Verdict(op, target, (why,))


def plan(variants: Iterable[Variant], targets: Sequence[Target], ops: str = "") -> Sweep:
    """The launches of each distinct call for each target. Calls that cannot be planned, emitted or launched fail."""
    sweep = Sweep()
    seen: set[tuple[KernelCall, int]] = set()
    for spec, run, values in variants:
        name = " ".join([spec, *values])
        try:
            calls = kernel_calls(spec, run, values)
        except Exception as error:
            sweep.refuse(name, None, "any", f"is not planned: {error!r}")
            continue
        for call, sms in calls:
            if (call, sms) in seen or not re.search(ops, call.op):
                continue
            seen.add((call, sms))
            try:
                file = emit_kernel(call.op, call.arguments, sms)
            except Exception as error:
                sweep.refuse(name, call, "any", f"is not emitted: {error!r}")
                continue
            for target in targets if file else ():
                assert file
                try:
                    jobs = tuple(jobs_of(file, call, target))
                except Exception as error:  # of its wrapper
                    sweep.refuse(name, call, target.name, f"is not launched: {error!r}")
                    continue
                sweep.rows += [Row(name, call.op, str(call), file.name, job.key) for job in jobs]
                sweep.jobs.update((job.key, job) for job in jobs if job.key not in sweep.jobs)
    return sweep


def jobs_of(file: KernelFile, call: KernelCall, target: Target) -> Iterator[Job]:
    """Jobs of one call; for sm_90 there is one for every number of rows to try."""
    streams = streams_of(call.op)
    for rows in rows_of(call) if target is SM_90 else rows_of(call)[:1]:
        for index, launch in enumerate(launches(file, call, rows)):
            if target.eight_bits or not has_eight_bits(launch):
                key = hashlib.sha256(f"{_of_the_gate()} {key_of(launch, target, streams)}".encode()).hexdigest()
                yield Job(key, file, call, rows, index, target.name)


def launches(file: KernelFile, call: KernelCall, rows: int) -> tuple[Launch, ...]:
    """Launches of a call, in order."""
    return record(_module(file), call.op, arguments_of(call, rows))


def verdict_of(job: Job) -> Verdict:
    """Compile one launch and discard the result, as all results together would take gigabytes."""
    target = next(target for target in TARGETS if target.name == job.target)
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        return judge(launches(job.file, job.call, job.rows)[job.index], target, streams_of(job.call.op))


@functools.cache
def _module(file: KernelFile) -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        return load(file, Path(folder))


@functools.cache
def _of_the_gate() -> str:
    text = "".join(
        Path(str(module.__file__)).read_text() for module in (gate, gate_launch, gate_read, recorded_launches)
    )
    return f"{triton.__version__} {text}"


# ---------------------------------------------------------------- stored verdicts


def recall(path: Path) -> dict[str, Verdict]:
    """Verdicts by their keys. The last line may be incomplete, if a run was killed while it wrote the line."""
    verdicts: dict[str, Verdict] = {}
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            key, stored = json.loads(line)
            verdicts[key] = VERDICT.validate_python(stored)
    return verdicts


def written(key: str, verdict: Verdict) -> str:
    return json.dumps([key, asdict(verdict)]) + "\n"


def complete(sweep: Sweep, path: Path, processes: int, done: Callable[[Job, Verdict], None]) -> None:
    """Fills the verdicts that are missing. What passes is kept in a file; what fails is tried again in the next run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    recalled = recall(path)
    sweep.verdicts.update((key, recalled[key]) for key in sweep.jobs if key in recalled)
    order = [target.name for target in TARGETS]  # those that must fit come first
    missing = sorted(
        (job for key, job in sweep.jobs.items() if key not in recalled), key=lambda job: order.index(job.target)
    )
    with path.open("a") as file:
        file.write("\n")  # after an incomplete line

        def answered(task: workers.Task, answer: workers.Answer) -> None:
            job = sweep.jobs[task["key"]]
            if "failed" in answer:
                verdict = Verdict(job.call.op, job.target, (f"does not compile: {answer['failed']}",))
            else:
                verdict = VERDICT.validate_python(answer)
            if not verdict.failures:
                file.write(written(job.key, verdict))
                file.flush()
            sweep.verdicts[job.key] = verdict
            done(job, verdict)

        tasks = [JOB.dump_python(job, mode="json") for job in missing]
        workers.run(WORKER, tasks, processes, LIMIT_S, math.inf, answered)


# ---------------------------------------------------------------- output


def table(sweep: Sweep, colour: bool) -> str:
    """A line for each op: for each target the number of distinct launches, of failed ones, and the maximum that one
    uses: registers per thread, bytes of shared memory per program. Then every failure."""
    keys: dict[str, dict[str, set[str]]] = {}
    for row in sweep.rows:
        keys.setdefault(row.op, {}).setdefault(sweep.verdicts[row.key].target, set()).add(row.key)
    targets = [target.name for target in TARGETS if any(target.name in by_target for by_target in keys.values())]
    lines = [("", *(cell for name in targets for cell in (name, "", "", ""))), ("op", *COLUMNS * len(targets))]
    for op, by_target in sorted(keys.items()):
        cells: list[str] = []
        for name in targets:
            verdicts = [sweep.verdicts[key] for key in by_target.get(name, ())]
            failed = sum(bool(verdict.failures) for verdict in verdicts)
            largest = [
                max((n for n in amounts), default=0) for amounts in zip(*map(_takes, verdicts), strict=True)
            ] or [0, 0]
            cells += [str(n) if n else "-" for n in (len(verdicts), failed, *largest)]
        lines.append((op, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    red, plain = ("\033[31m", "\033[0m") if colour else ("", "")
    callers: dict[str, list[str]] = {}
    for row in sweep.rows:
        verdict = sweep.verdicts[row.key]
        for failure in verdict.failures:
            kernel = f"{row.file}.{verdict.kernel}" if row.file else verdict.kernel or row.spec
            headline = f"{red}{kernel} on {verdict.target} {failure}{plain}"
            callers.setdefault(headline, []).append(f"{row.call or 'all'} of {row.spec}")
    text += [
        f"{headline}: {calls[0]}" + f", and {len(calls) - 1} more" * (len(calls) > 1)
        for headline, calls in callers.items()
    ]
    return "\n".join(line.rstrip() for line in text)


def _takes(verdict: Verdict) -> tuple[int, int]:
    return verdict.registers, verdict.shared_bytes


class Progress:
    """Shows progress on stderr: one line updated in place on a terminal, else a line every 30 s; failures at once."""

    def __init__(self, total: int, done: int, failed: int) -> None:
        self.total, self.done, self.failed = total, done, failed
        self.begun = self.said = time.monotonic()
        self.live = sys.stderr.isatty()
        self.back = "\r" if self.live else ""
        self.say()

    def add(self, job: Job, verdict: Verdict) -> None:
        self.done += 1
        if verdict.failures:
            self.failed += 1
            failures = "; ".join(verdict.failures)
            print(f"{self.back}{verdict.target} {job.file.name}.{verdict.kernel} {failures}", file=sys.stderr)
        if self.live or time.monotonic() - self.said >= 30 or self.done == self.total:
            self.say()

    def say(self) -> None:
        self.said = time.monotonic()
        minutes, seconds = divmod(int(self.said - self.begun), 60)
        text = f"{self.done} of {self.total} launches, {minutes} min {seconds:02} s, {self.failed} failed"
        end = "\r" if self.live and self.done < self.total else "\n"
        print(text, end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.emit.kernels.sweep")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--spec", default="", help="only specs whose file has this in its name")
    parser.add_argument("--op", default="", help="only ops in whose name this regular expression is found")
    parser.add_argument("--target", default="", help="only targets that have this in their name")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; as many as cores")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the folder of verdicts, of this run and the last")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least one process is needed")
    try:
        re.compile(args.op)
    except re.error as error:
        parser.error(f"--op {args.op!r} is no regular expression: {error}")
    begun = time.monotonic()
    variants = [variant for variant in VARIANTS if args.spec in variant[0]]
    targets = [target for target in TARGETS if args.target in target.name]
    sweep = plan(variants, targets, args.op)
    if not sweep.rows:
        parser.error(f"no launch is of --spec {args.spec!r}, --op {args.op!r} and --target {args.target!r}")
    path = args.kept / f"{triton.__version__}.jsonl"
    recalled = recall(path)
    done = sum(key in recalled for key in sweep.jobs)
    progress = Progress(len(sweep.jobs), done, len(sweep.verdicts))
    try:
        complete(sweep, path, args.jobs, progress.add)
    except KeyboardInterrupt:
        print(f"\nstopped; what passed is kept in {path}, and the next run goes on from there", file=sys.stderr)
        return 130
    if not (args.spec or args.op or args.target):  # what no spec has any more is forgotten
        path.write_text(
            "".join(written(job.key, v) for job in sweep.jobs.values() if not (v := sweep.verdicts[job.key]).failures)
        )
    failed = sum(bool(verdict.failures) for verdict in sweep.verdicts.values())
    if args.format == "json":
        rows = [{**asdict(row), "verdict": asdict(sweep.verdicts[row.key])} for row in sweep.rows]
        print(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1))
    else:
        print(table(sweep, sys.stdout.isatty()))
        print(
            f"Triton {triton.__version__}: {len(sweep.verdicts)} distinct launches, {len(sweep.jobs) - done} of them"
            f" compiled in {(time.monotonic() - begun) / 60:.1f} minutes, {failed} failed."
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
