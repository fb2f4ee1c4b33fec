"""Checks that this machine has the memory and disk space for a run of a build. No torch."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from runtime.checkpoint.durable_files import num_published
from runtime.contract import RunPlan
from runtime.system.outcome import EXIT_RETRY, refusal_code

GB = 10**9
UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def memory_shortage(
    plan: RunPlan, ranks: range | None = None, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> str:
    """Return why `ranks`, the ranks on this machine (None: all), do not fit into its memory, or "".

    Compares the sum of their peaks with the free memory, without the interpreters. Host copies for background
    checkpoints are as large as a checkpoint in total, and may all be on this machine.
    """
    ranks = range(plan.mesh.world) if ranks is None else ranks
    of_stage = plan.mesh.world // plan.mesh.pp
    needed = sum(plan.memory[rank // of_stage] for rank in ranks)
    needed += checkpoint_bytes(plan) if plan.train.checkpoint and plan.train.checkpoint.background else 0
    free = free_bytes(proc, cgroup)
    if needed <= free:
        return ""
    return (
        f"the {len(ranks):,} ranks of this run hold {_gb(needed)} together, and this machine has {_gb(free)}"
        " free: train a smaller model here, with fewer ranks or shorter sequences (-s model.hidden=…, see dsc show)"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.{1 if num_bytes >= GB else 3}f}GB"


def free_bytes(proc: Path, cgroup: Path) -> int:
    """Return the bytes that processes may still allocate: of the machine, or of this control group if less."""
    rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text("ascii").splitlines() if ":" in line)
    free = int(rows["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
    except (OSError, ValueError):  # no group, or no limit: it reads "max"
        return free
    return min(free, max(0, limit - used))


# ---------------------------------------------------------------- disk


TABLE_BYTES = 4  # per element


def checkpoint_bytes(plan: RunPlan) -> int:
    """Return the bytes of a checkpoint's tensors: master weights, their average, optimizer state, balancing biases.

    If adapters are trained, of the adapters alone."""
    average = [plan.train.ema.dtype] if plan.train.ema else []
    of_bias = BITS[plan.precision.gradients] // 8
    untrained = () if plan.frozen else ((plan.biases, of_bias), (plan.tables, TABLE_BYTES))
    total = sum(math.prod(tensor.shape) * size for rows, size in untrained for tensor in rows)
    for bucket in plan.buckets:
        dtypes = (plan.precision.master, *(tensor.dtype for tensor in plan.optimizer.state_of(bucket)), *average)
        total += sum(parameter.held_elements for parameter in bucket.parameters) * sum(
            BITS[dtype] // 8 for dtype in dtypes
        )
    return total


def cannot_save(plan: RunPlan, run: Path, steps: int) -> tuple[str, int] | None:
    """Return why the checkpoints of a run of `steps` steps cannot be written below the folder `run`, and the exit code.

    None if they can.

    Tests the folder with a file. An old checkpoint is removed after a new one is written, so for a moment there is one
    more than are kept; those kept forever (`keep_every`) are not counted.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    try:
        _try_to_write(folder)
        state = os.statvfs(folder)
        num_saved = num_published(run / "checkpoints")
    except OSError as error:
        reason = (
            f"{error.filename or folder}: {error.strerror}: checkpoints cannot be written; name a folder with --out"
        )
        return reason, refusal_code(error)
    free, size = state.f_bavail * state.f_frsize, checkpoint_bytes(plan)
    spec = plan.train.checkpoint
    saves = -(-steps // spec.every) if spec else 1
    at_once = spec.keep + spec.best + len(spec.to) if spec else 2  # one for each place, during the copy
    count = max(1, min(saves, at_once) - num_saved)
    if count * size <= free:
        return None
    reason = (
        f"{folder} has {_size(free)} free, and {count} checkpoint{'s'[: count > 1]} of {_size(size)} will be written"
        " there: make room, name another folder with --out, or keep fewer (checkpoint { keep = 1 })"
    )
    return reason, EXIT_RETRY


def _try_to_write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".probe"
    file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.write(file, b"\n")
        os.fsync(file)
    finally:
        os.close(file)
        with suppress(OSError):  # another rank's check has removed it
            probe.unlink()


def _size(num_bytes: int) -> str:
    unit, scale = next(((unit, scale) for unit, scale in UNITS if num_bytes >= scale), ("KB", 1000))
    return f"{num_bytes / scale:,.1f}{unit}"
