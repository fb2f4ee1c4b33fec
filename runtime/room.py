"""Whether this machine has the memory that the ranks of a build will fill. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GB = 10**9


def lack(plan: Mapping[str, Any], proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> str:
    """Why the ranks of plan.json cannot all run in this machine's memory, or "".

    What they hold at their peak, all together, against what is free: pages of the interpreter are not counted.
    """
    needed = sum(plan["memory"]) * plan["mesh"]["dp"]
    free = free_bytes(proc, cgroup)
    if needed <= free:
        return ""
    ranks = plan["mesh"]["pp"] * plan["mesh"]["dp"]
    return (
        f"the {ranks:,} ranks of this run hold {_gb(needed)} together, and this machine has {_gb(free)}"
        " free: train a smaller model here, with fewer ranks or shorter sequences (-s model.hidden=…, see dsc show)"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.{1 if num_bytes >= GB else 3}f}GB"


def free_bytes(proc: Path, cgroup: Path) -> int:
    """Bytes that processes may still take: of the machine, or of this control group if it has less."""
    rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text("ascii").splitlines() if ":" in line)
    free = int(rows["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
    except (OSError, ValueError):  # no group, or no limit: it reads "max"
        return free
    return min(free, max(0, limit - used))
