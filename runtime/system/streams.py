"""Standard streams of a process that starts other processes. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def open_streams() -> None:
    """Redirect closed standard streams to /dev/null, so that no file opened later gets their descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def tell(text: str) -> None:
    """Print a line. After an error (closed pipe, full disk) later lines are dropped."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
