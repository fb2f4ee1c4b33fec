"""Trains the quickstart on a GPU with its emitted kernels: on one rank in BF16 and FP8, and on four that share the GPU.

A build only runs with the versions that compiled it, so it is compiled here. Compiling needs lark and pydantic, which a
machine without network gets as wheels (carried.py).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.system.lines import read_rows

ROOT = Path(__file__).parents[2]
BUILDS = ROOT / "build" / "gpu"
RUNS = ROOT / "runs" / "gpu"
COMPILES = ("lark", "pydantic", "jinja2", "networkx", "rich")
TRAINS = ("numpy", "safetensors", "tokenizers", "rich")
STEPS, FP8_STEPS, SHARED_STEPS = 40, 20, 20
SPEC = "specs/quickstart.dsc"
MEMORY = ("memory_bytes", "reserved_bytes")  # of a device, in the rows of metrics
ONE_RANK = ("parallel.pipeline=1", "parallel.expert=1", "cluster.node.devices=1", "schedule.name=1f1b")
OVERRIDES: Mapping[str, Sequence[str]] = {
    "alone": ("precision=bf16", *ONE_RANK),
    "fp8": ("precision=fp8_block", *ONE_RANK),
    "graphs": (
        "precision=bf16",
        "kernels.graphs=true",
        *ONE_RANK,
        *(f"cluster.node.device.{rate}" for rate in ("bf16=989TFLOPS", "hbm=3.35TB/s", "sms=132", "memory=80GB")),
    ),
    "four": ("precision=bf16",),  # pipeline 2, experts over 2 ranks, DualPipe
}


@dataclass(frozen=True)
class Run:
    """A training run in its own process."""

    name: str
    build: Path
    device: str
    steps: int

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "runtime.run.train", str(self.build), "--out", str(self.folder)]
        command += ["--data", str(ROOT / "specs"), "--device", self.device, "--steps", str(self.steps)]
        self.folder.mkdir(parents=True)
        environment = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl").rows

    def log_tail(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace").strip()[-600:]


def missing(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def build_of(name: str) -> Path | str:
    """The build folder, compiled now; or the reason why there is none."""
    folder = BUILDS / name
    if lacking := missing(COMPILES):
        return f"{', '.join(lacking)} not installed: carry wheels from another machine (--carry)"
    command = [sys.executable, "-m", "compiler.cli.main", "compile", SPEC, "-o", str(folder)]
    command += [word for override in OVERRIDES[name] for word in ("-s", override)]
    environment = os.environ | {"PYTHONPATH": search_path()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return f"it does not compile: {done.stderr[-600:]}" if done.returncode else folder


def search_path() -> str:
    """PYTHONPATH of a child process: this tree, then carried packages."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def trained(runs: Sequence[Run], until: float) -> dict[str, int | None]:
    """Run all concurrently. Returns exit codes, None for a run that was stopped at the time limit."""
    codes: dict[str, int | None] = {}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for run in runs:
            processes.append(run.start())
        for run, process in zip(runs, processes, strict=True):
            try:
                codes[run.name] = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                codes[run.name] = None
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes


def curve(run: Run, code: int | None) -> dict[str, Any]:
    """The loss of each step, and tokens/s of the second half, as the first steps compile kernels."""
    rows = run.rows()
    speeds = [row["tokens_per_s"] for row in rows[len(rows) // 2 :]]
    result: dict[str, Any] = {
        "losses": [row["loss"] for row in rows],
        "tokens_per_s": statistics.median(speeds) if speeds else None,
    }
    result |= {key: max(row[key] for row in rows) for key in MEMORY if rows and key in rows[-1]}
    if code not in (0, None):
        result["failed"] = run.log_tail()
    return result


def apart(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The largest absolute difference of two curves, over their common length; None if there is none."""
    return max((abs(x - y) for x, y in zip(a, b, strict=False)), default=None)


def alone(until: float, device: str = "cuda", steps: int = STEPS) -> dict[str, Any]:
    """Train one rank on the device, and the same build on the CPU at the same time."""
    return _beside_cpu("alone", until, device, steps)


def fp8(until: float, device: str = "cuda", steps: int = FP8_STEPS) -> dict[str, Any]:
    """Train one rank in FP8 on the device, and the same build on the CPU at the same time."""
    return _beside_cpu("fp8", until, device, steps)


def shared(until: float, device: str = "shared", steps: int = SHARED_STEPS) -> dict[str, Any]:
    """Train four ranks on one device, which communicate through the host, and the same build on the CPU."""
    return _beside_cpu("four", until, device, steps)


def _beside_cpu(name: str, until: float, device: str, steps: int) -> dict[str, Any]:
    if lacking := missing(TRAINS):
        return {"left_out": f"{', '.join(lacking)} not installed"}
    build = build_of(name)
    if isinstance(build, str):
        return {"left_out": build}
    stamp = f"{os.getpid()}-{time.monotonic_ns()}"
    ours, cpu = Run(f"{name}-{stamp}", build, device, steps), Run(f"{name}-{stamp}-beside", build, "cpu", steps)
    codes = trained((ours, cpu), until)
    result: dict[str, Any] = {
        "device": curve(ours, codes[ours.name]),
        "cpu": curve(cpu, codes[cpu.name]),
        "kernels": len(list((build / "kernels").glob("*.py"))),
        "planned_bytes": max(json.loads((build / "watch.json").read_text("utf-8"))["memory_bytes"]),
    }
    result["apart"] = apart(result["device"]["losses"], result["cpu"]["losses"])
    if "failed" in result["device"]:
        result["failed"] = result["device"]["failed"]
    return result
