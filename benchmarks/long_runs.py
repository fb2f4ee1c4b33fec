"""Whether a long run stays as fast and as small as it began, and how long its metrics take to be drawn.

    python -m benchmarks.long_runs [--steps 5000] [--rows 1000000] [--out benchmarks/results/long-runs.txt]

Two ranks train specs/tiny.dsc, and `dsc watch` follows them. Memory and processor time of each process are read from
/proc while they run; the first and the last tenth of the steps are compared, behind the first checkpoint. Then a copy
of the run gets as many rows as --rows says, which `dsc report` and `dsc watch` draw. The exit code is 1 if a command
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.speed.processes import anonymous_bytes, processor_s, tree
from runtime.observe.metrics import FILE, MetricsWriter

ROOT = Path(__file__).parents[1]
SPEC = "specs/tiny.dsc"
RANKS = 2
CHANGES = (
    *(f"cluster.node.devices={RANKS}", f"parallel.data={RANKS}"),
    *("train.checkpoint.every=500", "train.checkpoint.keep=2", "train.validate.every=500", "train.validate.batches=2"),
)
WARM_UP = 600  # steps: until the first checkpoint is saved
SAMPLE_S = 0.25
DSC = (sys.executable, "-m", "compiler.cli.main")
MB = 1e6


@dataclass(frozen=True)
class Sample:
    """A process when `step` was the last one that was written: its memory without files, and its processor time."""

    step: int
    num_bytes: int
    processor_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsc-long-") as folder:
        run = Path(folder) / "run"
        samples = trained(run, args.steps)
        many = Path(folder) / "many"
        lines = [*table(samples, run, args.steps), "", *drawn(run, many, args.rows)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, "utf-8")
    return 0


# ---------------------------------------------------------------- a run


def trained(run: Path, steps: int) -> dict[str, list[Sample]]:
    """Train, and follow the run with `dsc watch`. Returns the samples of each rank and of the watch."""
    words = [word for change in (*CHANGES, f"train.steps={steps}") for word in ("-s", change)]
    train = [*DSC, "train", SPEC, "--out", str(run), *words]
    watch = [*DSC, "watch", str(run), "--wait"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "cwd": ROOT, "env": environment}
    samples: dict[int, list[Sample]] = {}
    with subprocess.Popen(train, **quiet) as trainer, subprocess.Popen(watch, **quiet) as watcher:  # type: ignore[call-overload]
        counter = lines_of(run / FILE)
        while trainer.poll() is None:
            step = next(counter)
            pids = [*tree(trainer.pid), watcher.pid] if step else []
            used = processor_s(pids)
            for pid in used:
                samples.setdefault(pid, []).append(Sample(step, anonymous_bytes([pid]), used[pid]))
            time.sleep(SAMPLE_S)
        watcher.wait()
    if trainer.returncode:
        raise SystemExit(f"dsc train ended with exit code {trainer.returncode}")
    watched = samples.pop(watcher.pid)
    busiest = sorted(samples.values(), key=lambda found: -found[-1].processor_s)[:RANKS]
    return {**{f"rank {i}" if RANKS > 1 else "rank": found for i, found in enumerate(busiest)}, "dsc watch": watched}


def lines_of(path: Path) -> Iterator[int]:
    """Yield the number of lines of a file that grows."""
    count = offset = 0
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            count, offset = count + data.count(b"\n"), offset + len(data)
        yield count


def table(samples: Mapping[str, Sequence[Sample]], run: Path, steps: int) -> list[str]:
    """Memory and processor time a step of each process in both tenths, and the clock of the steps."""
    rows = [json.loads(line) for line in (run / FILE).read_bytes().splitlines()]
    tenth = steps // 10
    spans = {"first tenth": (WARM_UP, WARM_UP + tenth), "last tenth": (steps - tenth, steps)}
    lines = [f"{SPEC}, {RANKS} ranks, {steps:,} steps", ""]
    lines.append(f"{'':24}" + "".join(f"{name:>16}" for name in spans))
    clock = [[row["step_s"] for row in rows if a < row["step"] <= b] for a, b in spans.values()]
    lines.append(line("step, ms of the clock", [1e3 * statistics.median(part) for part in clock]))
    for name, found in samples.items():
        parts = [[s for s in found if a <= s.step <= b] for a, b in spans.values()]
        lines.append(line(f"{name}, MB", [statistics.median(s.num_bytes for s in part) / MB for part in parts]))
        lines.append(line(f"{name}, core ms a step", [1e3 * rate(part) for part in parts]))
    lines.append("")
    written_s, row_bytes = writing(rows)
    used_s = sum(rate([s for s in found if s.step >= WARM_UP]) for name, found in samples.items() if "rank" in name)
    lines.append(f"metrics: {row_bytes:,.0f} bytes a step, written in {1e6 * written_s:.0f} µs of a core,")
    lines.append(f"{written_s / used_s:.2%} of the processor time of a step")
    return lines


def rate(samples: Sequence[Sample]) -> float:
    """Processor seconds a step between the first and the last sample."""
    first, last = samples[0], samples[-1]
    return (last.processor_s - first.processor_s) / max(last.step - first.step, 1)


def line(name: str, values: Sequence[float]) -> str:
    return f"{name:24}" + "".join(f"{value:16.2f}" for value in values)


def writing(rows: Sequence[Mapping[str, object]]) -> tuple[float, float]:
    """Processor seconds and bytes of a row of metrics, written again."""
    with tempfile.TemporaryDirectory() as folder:
        writer = MetricsWriter(Path(folder))
        begin = time.process_time()
        for row in rows:
            writer.write(row)
        used_s = time.process_time() - begin
        writer.close()
        return used_s / len(rows), (Path(folder) / FILE).stat().st_size / len(rows)


# ---------------------------------------------------------------- many rows


def drawn(run: Path, many: Path, num_rows: int) -> list[str]:
    """Draw a copy of the run with many rows."""
    shutil.copytree(run, many, ignore=shutil.ignore_patterns("checkpoints", "trace", FILE))
    multiply(run / FILE, many / FILE, num_rows)
    size = (many / FILE).stat().st_size
    lines = [f"{num_rows:,} rows, {size / MB:,.0f} MB", "", f"{'':24}{'clock s':>16}{'core s':>16}{'most MB':>16}"]
    for name, command in {"dsc report": ("report", str(many)), "dsc watch": ("watch", str(many))}.items():
        begin = time.perf_counter()
        process = subprocess.Popen([*DSC, *command], stdout=subprocess.DEVNULL, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        clock_s = time.perf_counter() - begin
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{name} failed")
        figures = (clock_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MB)
        lines.append(line(name, figures))
    return lines


def multiply(source: Path, target: Path, num_rows: int) -> None:
    """Write the rows of a run again and again, with steps and times that go on."""
    rows = [json.loads(text) for text in source.read_bytes().splitlines()]
    begin = datetime.fromisoformat(rows[0]["time"]).astimezone(UTC)
    with target.open("w", encoding="utf-8") as file:
        for step in range(1, num_rows + 1):
            time_of = (begin + timedelta(milliseconds=10 * step)).isoformat(timespec="milliseconds")
            row = rows[(step - 1) % len(rows)] | {"step": step, "time": time_of.replace("+00:00", "Z")}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
