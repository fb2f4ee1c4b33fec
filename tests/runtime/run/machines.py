"""Two machines on one host, with a cable: namespaces with their own network, processes, memory, mounts and name."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ALONE = ("unshare", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
NAMES = ("a", "b")
# In a machine, its own folder is at /mnt/own and the shared one at /mnt/shared. The parent of these folders is hidden,
# and so is the shared memory of the host's other processes.
ENTER = """
set -eu
mount -t tmpfs none /mnt
mkdir /mnt/own /mnt/shared
mount --bind "$1" /mnt/own
mount --bind "$2" /mnt/shared
mount -t tmpfs none "$3"
mount -t tmpfs none /dev/shm
mount --bind /mnt/shared/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf  # nobody answers on the cable
ip link set lo up
shift 3
echo "machine-$1" > /proc/sys/kernel/hostname  # torchrun tells nodes apart by their names and process ids
for kind in net pid ipc mnt; do readlink "/proc/self/ns/$kind"; done > "/mnt/shared/namespaces-$1"
shift
cd /mnt/shared
exec "$@"
"""


def why_not() -> str:
    """Why this host does not support such machines, or ""."""
    for command in (
        (*ALONE, "true"),
        ("ip", "netns", "list"),
        ("unshare", "--net", "ip", "link", "add", "type", "veth"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if done.returncode:
            return f"{shlex.join(command)}: {done.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Machines:
    """Two machines. `folder` has their own folders, `a` and `b`, and the shared one, `shared`."""

    folder: Path
    prefix: str
    addresses: tuple[str, str] = ("10.213.77.1", "10.213.77.2")

    def start(self, index: int, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine. Its output goes to `out-a` or `out-b` in the folder."""
        name = NAMES[index]
        folders = [str(self.folder / name), str(self.folder / "shared"), str(self.folder)]
        words = [
            "ip",
            "netns",
            "exec",
            self.prefix + name,
            *ALONE,
            "bash",
            "-c",
            ENTER,
            "enter",
            *folders,
            name,
            *command,
        ]
        with (self.folder / f"out-{name}").open("wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)

    def output(self, index: int) -> str:
        return (self.folder / f"out-{NAMES[index]}").read_text("utf-8", "replace")


@contextmanager
def machines(folder: Path) -> Iterator[Machines]:
    """Two machines with a cable between them, removed afterwards."""
    for name in (*NAMES, "shared"):
        (folder / name).mkdir(parents=True)
    pair = Machines(folder, f"dsc{os.getpid()}")
    named = [f"{address} machine-{name}\n" for address, name in zip(pair.addresses, NAMES, strict=True)]
    (folder / "shared" / "hosts").write_text("127.0.0.1 localhost\n" + "".join(named), "utf-8")
    namespaces: list[str] = []
    try:
        for name in NAMES:
            _ip("netns", "add", pair.prefix + name)
            namespaces.append(pair.prefix + name)
        a, b = namespaces
        _ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in zip(namespaces, pair.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield pair
    finally:
        for name in namespaces:
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)
