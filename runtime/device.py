"""Where ranks compute: one CUDA device each, or the CPU."""

from __future__ import annotations

import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # of the process groups


def choose(asked: str, world: int) -> str:
    """ "cpu" or "cuda" for `asked` "auto", "cpu" or "cuda"; ValueError where there are fewer devices than ranks.

    Counting devices leaves CUDA uninitialised, so ranks can still be forked.
    """
    devices = torch.cuda.device_count() if asked != "cpu" else 0
    if asked == "cuda" and devices < world:
        raise ValueError(f"--device cuda: {world} ranks need a device each, and this machine has {devices}")
    return "cuda" if devices >= world else "cpu"


def take(kind: str, rank: int) -> torch.device:
    """The device of a rank, made the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
