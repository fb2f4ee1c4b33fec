"""Where ranks compute: one CUDA device each, or the CPU; or, to try things out, all on one CUDA device."""

from __future__ import annotations

import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "shared": "gloo"}  # of the process groups; NCCL wants a device a rank


def choose(asked: str, world: int) -> str:
    """ "cpu", "cuda" or "shared" for one of these or "auto"; ValueError where there are too few devices.

    Counting devices leaves CUDA uninitialised, so ranks can still be forked.
    """
    devices = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "shared":
        if not devices:
            raise ValueError("--device shared: this machine has no CUDA device")
        return asked
    if asked == "cuda" and devices < world:
        raise ValueError(f"--device cuda: {world} ranks need a device each, and this machine has {devices}")
    return "cuda" if devices >= world else "cpu"


def take(kind: str, rank: int) -> torch.device:
    """The device of a rank, made the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0 if kind == "shared" else rank)
    torch.cuda.set_device(device)
    return device
