"""A worker of runtime/system/workers.py whose tasks tell it how to behave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from runtime.system.workers import serve


def handle(task: Mapping[str, Any]) -> dict[str, Any]:
    print("this goes nowhere")
    match task["do"]:
        case "die":
            print("last words", file=sys.stderr)
            os._exit(3)
        case "hang":
            signal.pause()
        case "raise":
            raise ValueError("of its own")
        case "break":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"pid": os.getpid(), "long": "x" * task.get("length", 0)}


if __name__ == "__main__":
    sys.exit(serve(handle))
