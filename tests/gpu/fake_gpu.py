"""A worker of a rehearsal of `make gpu`: `python -m tests.gpu.fake_gpu MODULE FILE` answers at once for any task.

It appends the module to FILE, a line for each task.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.system.workers import serve

ANSWERS: Mapping[str, dict[str, Any]] = {
    "launch": {"seconds": 1.0},
    "checks": {"error": 0.5, "seconds": 1.0},
    "timing": {"seconds": {"ours": 1e-3}, "bytes": 1, "flops": None, "rate": "bf16", "why_not": {}},
    "split": {"product_s": 1.0},
    "nccl": {"seconds": 1e-3},
    "gaps": {"busy": 0.9},
    "broken": {"failed": "RuntimeError: no code; there is no compiler"},
}


def handle(_: Mapping[str, Any]) -> dict[str, Any]:
    module, asked = sys.argv[1:]
    with Path(asked).open("a") as file:
        print(module, file=file)
    return dict(ANSWERS[module])


if __name__ == "__main__":
    sys.exit(serve(handle))
