"""Where ranks compute: one CUDA device each, or the CPU; or, to try things out, all on one CUDA device."""

from __future__ import annotations

import torch

from runtime.contract import NodeKind
from runtime.observe.doctor.checks import CudaDevice, device_faults
from runtime.system.outcome import ReportedError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "gloo"}  # of the process groups; NCCL wants a device a rank


def choose(asked: str, ranks: int) -> str:
    """ "cpu", "cuda" or "shared" for one of these or "auto"; ValueError where there are too few devices.

    `ranks`: those of this machine.

    Counting devices leaves CUDA uninitialised, so ranks can still be forked.
    """
    devices = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "shared":
        if not devices:
            raise ValueError("--device shared: this machine has no CUDA device")
        return asked
    if asked == "cuda" and devices < ranks:
        raise ValueError(f"--device cuda: {ranks} ranks need a device each, and this machine has {devices}")
    return "cuda" if devices >= ranks else "cpu"


def take(kind: str, local_rank: int) -> torch.device:
    """The device of a rank, made the current one. `local_rank`: its number among the ranks of its machine."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0 if kind == "shared" else local_rank)
    torch.cuda.set_device(device)
    return device


def divide(device: torch.device, communication: int) -> None:
    """Have torch's products leave so many SMs of a CUDA device to communication, as emitted kernels do.

    torch passes the number on to cuBLAS, which takes it as advice.
    """
    if device.type == "cuda":
        torch._C._set_sm_carveout_experimental(communication or None)


def check_ranks(planned: NodeKind, ranks: int) -> None:
    """Raise ValueError where a node with GPUs has not as many ranks as the plan lays on it."""
    if planned.sms is not None and planned.devices != ranks:
        raise ValueError(
            f"this node starts {ranks} ranks, and the build is for nodes of {planned.devices}:"
            f" torchrun --nproc-per-node {planned.devices}"
        )


def check(device: torch.device, planned: NodeKind, *, shared: bool = False) -> None:
    """Raise ReportedError where a CUDA device is not what a plan is for: its grids and its memory would not fit.

    `shared`: several ranks compute on it, so its memory is not that of a rank.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    here = CudaDevice(found.name, found.multi_processor_count, found.total_memory)
    if fault := next(device_faults(planned, (here,), first=device.index, memory=not shared), None):
        raise ReportedError(fault)
