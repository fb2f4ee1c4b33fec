"""Which machine a process is on, as ranks see it. A container is a machine of its own."""

from __future__ import annotations

import socket
from pathlib import Path


def machine() -> str:
    """This boot, and the namespaces in which processes and interfaces have names.

    Two containers of one host have the same boot and may have the same process ids, which name different processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))])
