"""Calls of the Linux kernel that Python 3.11 has no function for: namespaces, mounts, capabilities, filters of calls.

Each function raises OSError with the name of the call. The numbers of calls are those of x86-64 and of 64-bit Arm
(asm/unistd.h); `unshare` and others would be in `os` from Python 3.12 on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

# --- Namespaces (unshare(2))

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000

# --- Mounts (mount(2), umount(2), mount_setattr(2))

BIND, RECURSIVE, SLAVE = 0x1000, 0x4000, 0x80000
NO_SUID, NO_DEVICES, NO_EXEC = 0x2, 0x4, 0x8
_DETACH = 0x2
_ATTR_READ_ONLY, _ATTR_NO_SUID = 0x1, 0x2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

# --- prctl(2)

_SET_SECCOMP, _DROP_BOUNDING, _NO_NEW_PRIVILEGES = 22, 24, 38

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process to new namespaces; for NEW_PIDS its next child."""
    _check("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system of a kind, or with BIND a folder or file, at a place."""
    data = options.encode() if options else None
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags), data)
    _check("mount", result, target)


def unmount(target: str) -> None:
    """Remove a mount and those below it from this namespace."""
    _check("umount2", _libc.umount2(os.fsencode(target), _DETACH), target)


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root of this namespace, and move the root to `old`, a folder below `new`."""
    _check("pivot_root", _libc.syscall(_number("pivot_root"), os.fsencode(new), os.fsencode(old)), new)


def make_read_only(target: str, *, below: bool = True) -> None:
    """Make a mount read-only and without set-user-ID programs; with `below` also the mounts below it. Linux 5.12."""
    value = struct.pack("=QQQQ", _ATTR_READ_ONLY | _ATTR_NO_SUID, 0, 0, 0)
    size, flags = ctypes.c_size_t(len(value)), _AT_RECURSIVE if below else 0
    result = _libc.syscall(_number("mount_setattr"), _AT_FDCWD, os.fsencode(target), flags, value, size)
    _check("mount_setattr", result, target)


def drop_capabilities() -> None:
    """Give up all capabilities, also for programs that this process executes."""
    for capability in range(64):
        if _libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EINVAL:
            break  # the kernel has no more
    _check("prctl", _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this thread
    _check("capset", _libc.capset(header, bytes(24)))


# --- Filters of calls (seccomp(2))

# Calls that no reward needs. Two hold memory that no limit of a process counts (memfd_create, shmget); the others reach
# other processes, keys of the user, or much of the kernel. A row has the numbers of x86-64 and Arm.
_NUMBERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of _NUMBERS, AUDIT_ARCH_*
_X32 = 0x40000000  # calls of x86-64 with this bit have other numbers
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # opcodes of classic BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1: EPERM


def refuse_calls() -> None:
    """Let the kernel refuse the calls of `_NUMBERS` to this process and to its children. Needs drop_capabilities."""
    column, architecture = _processor()
    refused = sorted(numbers[column] for numbers in _NUMBERS.values())
    program = [
        (_LOAD, 0, 0, 4),  # the processor
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, len(refused) + 1, 0, _X32),
        *((_EQUAL, len(refused) - row, 0, number) for row, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    value = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check("seccomp", _libc.prctl(_SET_SECCOMP, 2, value, 0, 0))


def _processor() -> Sequence[int]:
    machine = os.uname().machine
    if machine not in _PROCESSORS:
        raise OSError(0, f"the numbers of calls are not known for {machine}")
    return _PROCESSORS[machine]


def _number(call: str) -> int:
    return _NUMBERS[call][_processor()[0]]


def _check(call: str, result: int, place: str = "") -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}{place and ' '}{place}: {os.strerror(error)}")
