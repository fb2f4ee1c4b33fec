"""The accelerators whose peaks need not be written: a `device` of such a name has those of the maker's data sheet.

Peaks are dense: data sheets of Hopper print BF16 and FP8 with sparsity, which is twice as much. SXM modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIELDS = ("sms", "hbm", "bf16", "fp8")


@dataclass(frozen=True)
class Peaks:
    """Peaks of a device: streaming multiprocessors, byte/s, FLOP/s. `source`: the data sheet that they are from."""

    source: str
    sms: int
    hbm: float
    bf16: float
    fp8: float | None = None  # None: it does not multiply in it


# SMs: architecture white papers of NVIDIA A100 (2020) and H100 (2022). An H800 is an H100 with slower NVLink, arXiv
# 2505.09343, section 2.
PEAKS: Mapping[str, Peaks] = {
    "a100": Peaks("NVIDIA A100 80GB SXM data sheet", 108, 2.039e12, 312e12),
    "h100": Peaks("NVIDIA H100 SXM data sheet", 132, 3.35e12, 989e12, 1979e12),
    "h200": Peaks("NVIDIA H200 SXM data sheet", 132, 4.8e12, 989e12, 1979e12),
    "h800": Peaks("NVIDIA H100 SXM data sheet, which H800 differs from in NVLink", 132, 3.35e12, 989e12, 1979e12),
}


def peaks_of(name: str) -> Peaks | None:
    """The peaks of a device by its name, in capitals or not; None where they are not known."""
    return PEAKS.get(name.lower())
