"""Checks of a node: compares its facts with what a plan needs. This module does not probe the node.

A failed check says how to fix it: a command, an edit of the spec, or a setting. A missing requirement of the plan is an
error; what only slows a run, or is unknown, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.contract import NodeKind, RunPlan
from runtime.launch.room import checkpoint_bytes
from runtime.observe.health.devices import DeviceHealth, faults_of
from runtime.system.outcome import printable

# --- Facts about a node. A CheckProblem stands for a fact that could not be determined


@dataclass(frozen=True)
class CheckProblem:
    """Why a fact could not be determined, in one line."""

    why: str


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device, as its driver describes it."""

    name: str
    sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Drivers:
    """Versions; "" if not installed."""

    torch: str
    triton: str
    cuda: str  # of the build of torch
    driver: str
    nccl: str


@dataclass(frozen=True)
class Disk:
    """The place of the run: the nearest existing folder, and its free bytes."""

    folder: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class ProcessLimits:
    """Soft limits of a process: open files, and bytes of locked memory (-1: unlimited)."""

    files: int
    locked_bytes: int


@dataclass(frozen=True)
class HostMemory:
    """Free bytes of the host, and bytes of /dev/shm (0 if there is none)."""

    free_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class LinkSpeeds:
    """Measured bytes per second: between two processes, from host to device, and between devices (None if fewer than
    two).

    `nccl`: of an all-reduce over all devices, per device; None if not measured.
    """

    processes: float
    to_device: float | None = None
    devices: float | None = None
    nccl: float | None = None


@dataclass(frozen=True)
class Clock:
    """Seconds since 1970, and whether the kernel reports the clock as synchronised."""

    now_s: float
    is_synchronised: bool


@dataclass(frozen=True)
class HostNetwork:
    """The name of this host, the address it resolves to, and why the port cannot be used ("" if it is free)."""

    host: str
    address: str
    port: int
    port_problem: str


@dataclass(frozen=True)
class NodeFacts:
    """All facts. `native`: why ops do not run in C++, or "". `boundary`: why user code has no boundary, or ""."""

    cpus: int
    devices: tuple[CudaDevice, ...] | CheckProblem
    drivers: Drivers | CheckProblem
    memory: HostMemory | CheckProblem
    disk: Disk | CheckProblem
    limits: ProcessLimits | CheckProblem
    clock: Clock | CheckProblem
    network: HostNetwork | CheckProblem
    links: LinkSpeeds | CheckProblem
    native: str | CheckProblem
    boundary: str | CheckProblem
    health: tuple[DeviceHealth, ...] | CheckProblem  # as the driver tells it; empty without a driver


# --- checks

Status = Literal["ok", "warning", "error"]
GIB, GB = 2**30, 10**9
LEAST_FILES, FILES_A_RANK = 1024, 64  # file descriptors: of a process, and for each peer of a rank
SHARED_A_DEVICE = 32 << 20  # bytes of /dev/shm that NCCL needs per device of a node, with a margin
LEAST_DRIVER = 525  # CUDA 12: https://docs.nvidia.com/deploy/cuda-compatibility/
EARLIEST_S = 1_735_689_600  # 2025-01-01, before this program existed
OF_NOMINAL = 0.5  # links between devices below this share of the host link are suspicious


@dataclass(frozen=True)
class CheckFinding:
    """The result of a check. `mend`: how to fix it, empty if it is ok."""

    name: str
    status: Status
    found: str
    mend: str = ""


def check(node: NodeFacts, plan: RunPlan | None) -> list[CheckFinding]:
    """Return the results of all checks, in order of display. `plan`: of the build that will run here."""
    kind = plan.cluster[0] if plan else None
    ranks = kind.devices if kind else max(1, _count(node))
    checks = (
        *_devices(node, plan, kind),
        *_health(node),
        _memory(node, plan, kind),
        _versions(node, kind),
        _native(node, kind),
        _boundary(node, plan),
        _shared_memory(node, kind),
        _disk(node, plan),
        _files(node, plan, ranks),
        _locked_memory(node),
        _network(node, plan),
        _clock(node),
        _links(node),
    )
    return [
        CheckFinding(finding.name, finding.status, printable(finding.found), printable(finding.mend))
        for finding in checks
    ]


def device_faults(
    kind: NodeKind, devices: tuple[CudaDevice, ...], *, first: int = 0, memory: bool = True
) -> Iterator[str]:
    """Yield how devices of a node, counted from `first`, differ from those of a plan, each with an edit. Empty for
    CPUs. `memory`: whether to compare memory, too."""
    if kind.sms is None:
        return
    for index, device in enumerate(devices, first):
        if device.sms != kind.sms:
            yield (
                f"device {index}, {device.name}, has {device.sms} SMs, and the build is for {kind.sms}:"
                f" write `sms = {device.sms}` in device {kind.device} of the spec, and compile it again"
            )
        if memory and device.memory_bytes < kind.memory:
            yield (
                f"device {index}, {device.name}, has {device.memory_bytes / GIB:.1f} GiB, and the build is for"
                f" {kind.memory / GIB:.1f} GiB: write `memory = {device.memory_bytes // 2**20}MiB` in device"
                f" {kind.device} of the spec, and compile it again"
            )


def _devices(node: NodeFacts, plan: RunPlan | None, kind: NodeKind | None) -> Iterator[CheckFinding]:
    devices = node.devices
    if isinstance(devices, CheckProblem):
        yield CheckFinding(
            "devices", "error", f"the driver does not answer: {devices.why}", "look at nvidia-smi and dmesg"
        )
        return
    wanted = 0 if kind is None or kind.sms is None else kind.devices
    text = _devices_text(devices) or f"no GPU, {node.cpus} cores"
    if len(devices) < wanted:
        mend = (
            f"the plan has {wanted} ranks on a node, and each needs a GPU: use another node, or set devices of the spec"
        )
        yield CheckFinding("devices", "error", text, mend)
        return
    yield CheckFinding("devices", "ok", text)
    if kind is None:
        return
    yield from (
        CheckFinding("device", "error", *fault.split(": ", 1)) for fault in device_faults(kind, devices[:wanted])
    )
    if wanted and kind.device.lower() not in devices[0].name.lower().replace(" ", ""):
        mend = f"name the device in the spec: rates of the plan are those of {kind.device}"
        yield CheckFinding("device", "warning", f"{devices[0].name}, and the plan is for {kind.device}", mend)
    if not wanted and node.cpus < kind.devices:
        text = f"{node.cpus} cores for {kind.devices} ranks"
        yield CheckFinding("cores", "warning", text, f"ranks share cores: a node with {kind.devices} is faster")


def _health(node: NodeFacts) -> Iterator[CheckFinding]:
    """Yield what the driver says about the health of devices; nothing on a node without them."""
    if isinstance(node.health, CheckProblem):
        yield _unknown_finding("device health", node.health)
        return
    faults = [(device, fault) for device in node.health for fault in faults_of(device)]
    for device, fault in faults:
        found = f"device {device.index}, {device.name}: {fault.found}"
        yield CheckFinding("device health", fault.severity, found, fault.mend)
    if node.health and not faults:
        yield CheckFinding("device health", "ok", "memory, clocks, links and temperature are as they should be")


def _devices_text(devices: tuple[CudaDevice, ...]) -> str:
    kinds = dict.fromkeys((device.name, device.sms, device.memory_bytes) for device in devices)
    counts = {kind: sum((d.name, d.sms, d.memory_bytes) == kind for d in devices) for kind in kinds}
    return ", ".join(f"{n} × {name}, {sms} SMs, {size / GIB:.1f} GiB" for (name, sms, size), n in counts.items())


def _count(node: NodeFacts) -> int:
    return 0 if isinstance(node.devices, CheckProblem) else len(node.devices)


def _memory(node: NodeFacts, plan: RunPlan | None, kind: NodeKind | None) -> CheckFinding:
    if isinstance(node.memory, CheckProblem):
        return _unknown_finding("memory", node.memory)
    text = f"{node.memory.free_bytes / GB:.1f} GB free on the host"
    if plan is None or kind is None:
        return CheckFinding("memory", "ok", text)
    if max(plan.memory) > kind.room:
        text = (
            f"a rank holds {max(plan.memory) / GB:.1f} GB, and a device of the spec has {kind.room / GB:.1f} GB for it"
        )
        return CheckFinding("memory", "error", text, "`dsc plan` names edits that make the run fit")
    needed = max(plan.memory) * kind.devices if kind.sms is None else 0
    if needed > node.memory.free_bytes:
        mend = "free memory, or lay the run on more nodes, with fewer devices each"
        return CheckFinding("memory", "error", f"{text}, and {kind.devices} ranks hold {needed / GB:.1f} GB", mend)
    return CheckFinding("memory", "ok", text)


def _versions(node: NodeFacts, kind: NodeKind | None) -> CheckFinding:
    if isinstance(node.drivers, CheckProblem):
        return _unknown_finding("versions", node.drivers)
    drivers = node.drivers
    named = {
        "torch": drivers.torch,
        "triton": drivers.triton,
        "CUDA": drivers.cuda,
        "driver": drivers.driver,
        "NCCL": drivers.nccl,
    }
    text = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    on_gpus = _count(node) > 0 or (kind is not None and kind.sms is not None)
    if on_gpus and not drivers.cuda:
        return CheckFinding("versions", "error", text, "this torch is for CPUs: install one that is built for CUDA")
    if on_gpus and not drivers.triton:
        return CheckFinding("versions", "error", text, "kernels need triton: pip install triton")
    if on_gpus and not drivers.nccl:
        return CheckFinding("versions", "error", text, "ranks on GPUs need NCCL: install a torch with NCCL")
    if drivers.driver and int(drivers.driver.partition(".")[0]) < LEAST_DRIVER:
        return CheckFinding("versions", "error", text, f"install a driver of NVIDIA from {LEAST_DRIVER} on")
    return CheckFinding("versions", "ok", text)


def _native(node: NodeFacts, kind: NodeKind | None) -> CheckFinding:
    if isinstance(node.native, CheckProblem):
        return _unknown_finding("ops in C++", node.native)
    if not node.native:
        return CheckFinding("ops in C++", "ok", "compiled for this processor")
    status: Status = "warning" if kind is None or kind.sms is None else "ok"
    reason, _, mend = node.native.partition("; ")
    return CheckFinding("ops in C++", status, f"on torch, which takes about twice as long on CPUs: {reason}", mend)


def _boundary(node: NodeFacts, plan: RunPlan | None) -> CheckFinding:
    if isinstance(node.boundary, CheckProblem):
        return _unknown_finding("boundary", node.boundary)
    if not node.boundary:
        return CheckFinding("boundary", "ok", "Python rewards have no network, and no files but those of Python")
    grpo = plan.train.grpo if plan else None
    is_needed = grpo is not None and any(reward.check == "python" for reward in grpo.rewards)
    reason, _, mend = node.boundary.partition("; ")
    text = f"none: Python rewards have the rights of the run: {reason}"
    return CheckFinding("boundary", "warning" if is_needed else "ok", text, mend)


def _shared_memory(node: NodeFacts, kind: NodeKind | None) -> CheckFinding:
    if isinstance(node.memory, CheckProblem):
        return _unknown_finding("/dev/shm", node.memory)
    size = node.memory.shared_bytes
    devices = _count(node) if kind is None else kind.devices if kind.sms is not None else 0
    if size < devices * SHARED_A_DEVICE:
        mend = "NCCL needs it: `docker run --shm-size=8g`, or an emptyDir of medium Memory at /dev/shm"
        return CheckFinding("/dev/shm", "error", f"{size / GIB:.2f} GiB for {devices} devices", mend)
    return CheckFinding("/dev/shm", "ok", f"{size / GIB:.2f} GiB")


def _disk(node: NodeFacts, plan: RunPlan | None) -> CheckFinding:
    if isinstance(node.disk, CheckProblem):
        return CheckFinding("disk", "error", node.disk.why, "name another folder with --out")
    text = f"{node.disk.free_bytes / GB:.1f} GB free in {node.disk.folder}"
    if not node.disk.is_writable:
        return CheckFinding("disk", "error", f"{node.disk.folder} cannot be written", "name another folder with --out")
    if plan is None:
        return CheckFinding("disk", "ok", text)
    spec, size = plan.train.checkpoint, checkpoint_bytes(plan)
    count = spec.keep + spec.best + 1 if spec else 2
    text += f", {count} checkpoints of {size / GB:.3g} GB"
    if count * size > node.disk.free_bytes:
        return CheckFinding(
            "disk", "error", text, "make room, name another folder with --out, or keep fewer checkpoints"
        )
    return CheckFinding("disk", "ok", text)


def _files(node: NodeFacts, plan: RunPlan | None, ranks: int) -> CheckFinding:
    if isinstance(node.limits, CheckProblem):
        return _unknown_finding("open files", node.limits)
    peers = len({rank for bucket in plan.buckets for rank in bucket.holders}) if plan else ranks
    needed = max(LEAST_FILES, min(peers, 1024) * FILES_A_RANK)
    text = f"ulimit -n is {node.limits.files}"
    if 0 <= node.limits.files < needed:
        return CheckFinding("open files", "warning", text, f"raise it before the run: ulimit -n {needed}")
    return CheckFinding("open files", "ok", text)


def _locked_memory(node: NodeFacts) -> CheckFinding:
    if isinstance(node.limits, CheckProblem):
        return _unknown_finding("locked memory", node.limits)
    size = node.limits.locked_bytes
    text = "ulimit -l is unlimited" if size < 0 else f"ulimit -l is {size // 1024}"
    if size >= 0 and _count(node):
        mend = "adapters of InfiniBand pin memory: ulimit -l unlimited, or the capability IPC_LOCK"
        return CheckFinding("locked memory", "warning", text, mend)
    return CheckFinding("locked memory", "ok", text)


def _network(node: NodeFacts, plan: RunPlan | None) -> CheckFinding:
    if isinstance(node.network, CheckProblem):
        return _unknown_finding("network", node.network)
    network = node.network
    text = f"{network.host} is {network.address or 'not an address'}, port {network.port} is "
    if network.port_problem:
        mend = "end what listens there, or name another port: dsc launch … --port"
        return CheckFinding("network", "error", f"{text}taken: {network.port_problem}", mend)
    several = plan is not None and sum(kind.nodes for kind in plan.cluster) > 1
    if several and (not network.address or network.address.startswith("127.") or network.address == "::1"):
        mend = "name the interface by which nodes talk: dsc launch … --interface, or GLOO_SOCKET_IFNAME"
        return CheckFinding("network", "warning", f"{text}free; other nodes cannot reach that address", mend)
    return CheckFinding("network", "ok", f"{text}free")


def _clock(node: NodeFacts) -> CheckFinding:
    if isinstance(node.clock, CheckProblem):
        return _unknown_finding("clock", node.clock)
    if node.clock.now_s < EARLIEST_S:
        return CheckFinding("clock", "error", "it is set to a time before 2025", "set it, and start chrony or ntpd")
    if not node.clock.is_synchronised:
        mend = "start chrony or ntpd, for times in logs of several nodes to be comparable"
        return CheckFinding("clock", "warning", "not synchronised", mend)
    return CheckFinding("clock", "ok", "synchronised")


def _links(node: NodeFacts) -> CheckFinding:
    if isinstance(node.links, CheckProblem):
        status: Status = "error" if _count(node) else "warning"
        return CheckFinding("links", status, node.links.why, "see what hangs: py-spy dump, nvidia-smi, dmesg")
    rates = {
        "between processes": node.links.processes,
        "to a device": node.links.to_device,
        "between devices": node.links.devices,
        "all-reduce by NCCL": node.links.nccl,
    }
    text = ", ".join(f"{rate / GB:.1f} GB/s {name}" for name, rate in rates.items() if rate is not None)
    devices, to_device = node.links.devices, node.links.to_device
    if devices is not None and to_device is not None and devices < OF_NOMINAL * to_device:
        mend = "devices reach each other through the host: look at nvidia-smi topo -m, and for peer access"
        return CheckFinding("links", "warning", text, mend)
    return CheckFinding("links", "ok", text)


def _unknown_finding(name: str, problem: CheckProblem) -> CheckFinding:
    return CheckFinding(name, "warning", f"not known: {problem.why}", "look by hand")
