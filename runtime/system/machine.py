"""Identifies the machine of a process. A container is a separate machine."""

from __future__ import annotations

import socket
from pathlib import Path


def machine() -> str:
    """Return an identifier of this boot and of the namespaces of processes and network interfaces.

    Two containers of one host have the same boot and may use the same process ids for different processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))])
