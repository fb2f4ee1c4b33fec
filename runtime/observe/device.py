"""Devices of ranks: one CUDA device each, the CPU, or, to try things out, one shared CUDA device."""

from __future__ import annotations

import os

import torch

from runtime.contract import NodeKind
from runtime.observe.doctor.checks import CudaDevice, device_faults
from runtime.system.outcome import ReportedError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "gloo"}  # of the process groups; NCCL needs one device per rank

SETTINGS = {
    # Connect every algorithm of NCCL when a channel opens. By default an operation connects the one that it needs at
    # its first use, for which the host waits in the middle of a step.
    "NCCL_RUNTIME_CONNECT": "0",
    # A hardware queue for each stream: compute, host reads, second hops, copies, and one for each channel. Streams that
    # share one of the default 8 wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
# Rows of experts have other sizes in each step. In segments of fixed size, freed memory would be lost to fragmentation.
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


def choose(kind: str, ranks: int) -> str:
    """Return "cpu", "cuda" or "shared" for one of these or "auto". ValueError if there are too few devices.

    `ranks`: number of ranks on this machine.

    Counting devices does not initialise CUDA, so ranks can still be forked.
    """
    devices = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "shared":
        if not devices:
            raise ValueError("--device shared: this machine has no CUDA device")
        return kind
    if kind == "cuda" and devices < ranks:
        raise ValueError(f"--device cuda: {ranks} ranks need a device each, and this machine has {devices}")
    return "cuda" if devices >= ranks else "cpu"


def take(kind: str, local_rank: int) -> torch.device:
    """Make the device of a rank current and return it. `local_rank`: its rank on this machine."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0 if kind == "shared" else local_rank)
    set_up_cuda()
    torch.cuda.set_device(device)
    return device


def set_up_cuda() -> None:
    """Set defaults of CUDA, NCCL and torch's allocator for a rank. Variables that the user has set are kept.

    Call it before the first use of CUDA, which reads them.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not ALLOCATOR & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def divide(device: torch.device, communication: int) -> None:
    """Reserve SMs of a CUDA device for communication in torch's matrix products, as emitted kernels do.

    torch passes the number to cuBLASLt, which treats it as a hint. Products of two matrices go to cuBLAS by default,
    to which torch 2.11 passes no number, so cuBLASLt is preferred.
    """
    if device.type == "cuda":
        torch._C._set_sm_carveout_experimental(communication or None)
        if communication and torch.cuda.is_available():
            torch.backends.cuda.preferred_blas_library("cublaslt")


def check_ranks(planned: NodeKind, ranks: int) -> None:
    """Raise ValueError if a node with GPUs does not have as many ranks as the plan places on it."""
    if planned.sms is not None and planned.devices != ranks:
        raise ValueError(
            f"this node starts {ranks} ranks, and the build is for nodes of {planned.devices}:"
            f" torchrun --nproc-per-node {planned.devices}"
        )


def check(device: torch.device, planned: NodeKind, *, shared: bool = False) -> None:
    """Raise ReportedError if a CUDA device differs from the one of the plan, whose grids and memory would not fit.

    `shared`: several ranks use the device, so its memory is not compared.
    """
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    actual = CudaDevice(properties.name, properties.multi_processor_count, properties.total_memory)
    if fault := next(device_faults(planned, (actual,), first=device.index, memory=not shared), None):
        raise ReportedError(fault)
