"""Probes the facts of this node. Each probe has its own process with a time limit: a driver or a disk may hang."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.launch.room import free_bytes
from runtime.observe.doctor.checks import (
    CheckProblem,
    Clock,
    CudaDevice,
    Disk,
    Drivers,
    HostMemory,
    HostNetwork,
    LinkSpeeds,
    NodeFacts,
    ProcessLimits,
)
from runtime.observe.health import nvml
from runtime.observe.health.devices import DeviceHealth, PcieLink
from runtime.ops.native.library import missing
from runtime.system import boundary

# --- Measuring the links of a node for a fraction of a second each: between processes, to a device, between devices

SIZE_BYTES = 32 << 20
FOR_S = 0.25  # a measurement
DEVICE_BYTES = 256 << 20
ROUNDS = 8


def measure() -> LinkSpeeds:
    """Measure all links of this node."""
    count = torch.cuda.device_count()
    processes = between_processes()
    if not count:
        return LinkSpeeds(processes)
    to_device = _copies(torch.empty(DEVICE_BYTES, dtype=torch.uint8).pin_memory(), torch.device("cuda", 0))
    if count < 2:
        return LinkSpeeds(processes, to_device)
    first = torch.empty(DEVICE_BYTES, dtype=torch.uint8, device="cuda:0")
    slowest = min(_copies(first, torch.device("cuda", index)) for index in range(1, count))
    return LinkSpeeds(processes, to_device, slowest, _all_reduce(count))


def between_processes() -> float:
    """Return the bytes per second that one process can read from another through shared memory."""
    shared, local = mmap.mmap(-1, SIZE_BYTES + mmap.PAGESIZE), bytearray(SIZE_BYTES)
    turn = SIZE_BYTES  # byte by which the two take turns: 1 written, 0 read, 2 over
    writer = os.fork()
    if writer == 0:
        while shared[turn] != 2:
            if shared[turn] == 0:
                shared[:SIZE_BYTES] = local
                shared[turn] = 1
            os.sched_yield()
        os._exit(0)
    moved, start, seconds = 0, time.monotonic(), 0.0
    while seconds < FOR_S or not moved:
        if shared[turn] == 1:
            local[:] = memoryview(shared)[:SIZE_BYTES]
            shared[turn] = 0
            moved += SIZE_BYTES
        os.sched_yield()
        seconds = time.monotonic() - start
    while shared[turn] != 1:  # it is still writing, and would overwrite the end mark
        os.sched_yield()
    shared[turn] = 2
    os.waitpid(writer, 0)
    return moved / seconds


def _copies(source: torch.Tensor, device: torch.device) -> float:
    place = torch.empty(source.shape, dtype=source.dtype, device=device)
    place.copy_(source)
    torch.cuda.synchronize(device)
    start = time.monotonic()
    for _ in range(ROUNDS):
        place.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return ROUNDS * source.nbytes / (time.monotonic() - start)


def _all_reduce(count: int) -> float:
    """Return the bus bandwidth of an all-reduce as NCCL defines it: 2 (n - 1) / n of a tensor, per device."""
    tensors = [torch.ones(DEVICE_BYTES // 4, device=f"cuda:{index}") for index in range(count)]

    def all_reduce_once() -> None:
        torch.cuda.nccl.all_reduce(tensors)
        for index in range(count):
            torch.cuda.synchronize(index)

    all_reduce_once()
    start = time.monotonic()
    for _ in range(ROUNDS):
        all_reduce_once()
    return ROUNDS * 2 * (count - 1) / count * DEVICE_BYTES / (time.monotonic() - start)


# --- probe

LIMIT_S = 8.0  # for a probe; starting CUDA takes some seconds
SAY_S = 2.0  # until a line shows the running probe
UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
Value = TypeVar("Value")


def look(run: Path, port: int) -> NodeFacts:
    """Return all facts of this node. `run`: folder of a run. CUDA is not initialised in this process."""
    listed = run_with_limit(_devices, "devices")
    devices = listed if isinstance(listed, CheckProblem) else tuple(CudaDevice(**device) for device in listed)
    return NodeFacts(
        cpus=len(os.sched_getaffinity(0)),
        devices=devices,
        drivers=_read(Drivers, _drivers, "versions"),
        memory=_read(HostMemory, _memory, "memory"),
        disk=_read(Disk, lambda: _disk(run), "disk"),
        limits=_read(ProcessLimits, _limits, "limits"),
        clock=_read(Clock, _clock, "clock"),
        network=_read(HostNetwork, lambda: _network(port), "network"),
        links=_read(LinkSpeeds, measure, "links"),
        native=run_with_limit(lambda: missing() or "", "C++ of the ops"),
        boundary=run_with_limit(boundary.problem, "boundary"),
        health=_read_health(),
    )


def run_with_limit(probe: Callable[[], Any], topic: str, limit_s: float = LIMIT_S) -> Any:
    """Run a probe in a separate process. Return its JSON value; a CheckProblem if it raises, dies or hangs."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _answer(probe, writing)
    os.close(writing)
    try:
        return _receive(reading, topic, limit_s)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _collect(pid)


def _answer(probe: Callable[[], Any], descriptor: int) -> None:
    """Write the answer of a probe, and end its process."""
    try:
        try:
            answer = {"value": probe()}
        except Exception as error:
            answer = {"problem": " ".join((str(error) or type(error).__name__).split())[:300]}
        with os.fdopen(descriptor, "w") as pipe:
            json.dump(answer, pipe)
    finally:
        os._exit(0)


def _receive(descriptor: int, topic: str, limit_s: float) -> Any:
    start, data, has_said = time.monotonic(), b"", False
    while (left_s := limit_s - (time.monotonic() - start)) > 0:
        if select.select([descriptor], [], [], min(left_s, SAY_S))[0]:
            part = os.read(descriptor, 1 << 16)
            if not part:
                break
            data += part
        elif not has_said:
            print(f"doctor: looking at {topic}", file=sys.stderr, flush=True)
            has_said = True
    else:
        return CheckProblem(f"no answer within {limit_s:g} s")
    try:
        answer = json.loads(data)
    except ValueError:
        return CheckProblem("the process that looked has died")
    return CheckProblem(answer["problem"]) if "problem" in answer else answer["value"]


def _collect(pid: int) -> None:
    """Wait briefly for a killed process: one that waits for a dead disk cannot end."""
    for _ in range(100):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)


def _read(kind: type[Value], probe: Callable[[], Any], topic: str) -> Value | CheckProblem:
    answer = run_with_limit(lambda: asdict(probe()), topic)
    return answer if isinstance(answer, CheckProblem) else kind(**answer)


# ---------------------------------------------------------------- probes
def _devices() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [asdict(CudaDevice(device.name, device.multi_processor_count, device.total_memory)) for device in properties]


def _health() -> list[dict[str, Any]]:
    if not nvml.has_driver():
        return []
    with nvml.Nvml() as driver:
        return [asdict(device.look()) for device in driver.devices()]


def _read_health() -> tuple[DeviceHealth, ...] | CheckProblem:
    answer = run_with_limit(_health, "device health")
    return answer if isinstance(answer, CheckProblem) else tuple(map(_health_from_json, answer))


def _health_from_json(fields: dict[str, Any]) -> DeviceHealth:
    pcie = PcieLink(**fields["pcie"]) if fields["pcie"] else None
    return DeviceHealth(**fields | {"pcie": pcie, "xids": tuple(fields["xids"])})


def _drivers() -> Drivers:
    driver, nccl = Path("/proc/driver/nvidia/version"), ""
    with suppress(AttributeError, RuntimeError):  # torch for CPUs has no NCCL
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    text = driver.read_text("utf-8", "replace") if driver.exists() else ""
    match = re.search(r"Module\s+(\d[\d.]*)", text)
    return Drivers(_version("torch"), _version("triton"), torch.version.cuda or "", match[1] if match else "", nccl)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _memory() -> HostMemory:
    shared = 0
    with suppress(OSError):
        state = os.statvfs("/dev/shm")
        shared = state.f_blocks * state.f_frsize
    return HostMemory(free_bytes(Path("/proc"), Path("/sys/fs/cgroup")), shared)


def _disk(run: Path) -> Disk:
    run = run.absolute()
    folder = next(parent for parent in (run, *run.parents) if parent.exists())
    state = os.statvfs(folder)
    return Disk(str(folder), state.f_bavail * state.f_frsize, os.access(folder, os.W_OK | os.X_OK))


def _limits() -> ProcessLimits:
    return ProcessLimits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def _clock() -> Clock:
    empty = ctypes.create_string_buffer(512)  # a struct timex without modes changes nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(empty)
    return Clock(time.time(), state not in (-1, UNSYNCHRONISED))


def _network(port: int) -> HostNetwork:
    host, address, problem = socket.gethostname(), "", ""
    with suppress(OSError):
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
    return HostNetwork(host, address, port, problem)
