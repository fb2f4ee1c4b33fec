"""One small kernel, compiled and run. A worker. It fails within seconds on a machine where no kernel can run."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from runtime.system.workers import serve


@triton.jit
def _double(x, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < size) * 2, mask=i < size)


def tasks() -> list[dict[str, Any]]:
    return [{"name": "x · 2"}]


def handle(_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the C compiler, whether Python's headers are there, and the seconds until the kernel has run."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    answer: dict[str, Any] = {
        "compiler": next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None),
        "headers": headers.is_file(),
    }
    started, x = time.monotonic(), torch.arange(1000.0, device="cuda")
    try:
        _double[(triton.cdiv(1000, 256),)](x, 1000, 256)
        if not torch.equal(x.cpu(), 2 * torch.arange(1000.0)):
            answer["failed"] = "it computes other numbers"
    except Exception as error:
        lacks = [name for name in ("compiler", "headers") if not answer[name]]
        words = f"; there is no {' and no '.join(lacks)}" if lacks else ""
        answer["failed"] = f"{type(error).__name__}: {error}"[:400] + words
    return answer | {"seconds": round(time.monotonic() - started, 2)}


if __name__ == "__main__":
    sys.exit(serve(handle))
