"""The stand-in for the library of NVIDIA's driver (stand_in.c), which the real package nvidia-ml-py calls."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

# In the order of stand_in.c; the values of a device that is well.
WELL = {
    "uncorrected": 0,
    "retired": -1,  # H100 and A100 remap rows
    "remap_pending": 0,
    "remap_failed": 0,
    "reasons": 0x4,  # a cap of power, as usual
    "old_reasons": -1,
    "links": 4,
    "link_errors": 0,
    "width": 16,
    "max_width": 16,
    "generation": 5,
    "max_generation": 5,
    "celsius": 60,
    "max_celsius": 87,
    "is_lost": 0,
}
UUIDS = ("GPU-0-stand-in", "GPU-1-stand-in")


class StandIn:
    """The compiled library, loaded under the name by which nvidia-ml-py loads the driver's."""

    def __init__(self, folder: Path) -> None:
        library, source = folder / "libnvidia-ml.so.1", Path(__file__).with_name("stand_in.c")
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self.heal()

    def set(self, device: int, **values: int) -> None:
        """Set answers of a device; -1: it does not support the question."""
        for name, value in values.items():
            self._library.stand_in_set(device, [*WELL].index(name), ctypes.c_int64(value))

    def heal(self) -> None:
        """Make all devices well."""
        for device in range(len(UUIDS)):
            self.set(device, **WELL)

    def xid(self, device: int, number: int) -> None:
        """Let the driver report an Xid error at the next look."""
        self._library.stand_in_xid(device, ctypes.c_uint64(number))

    @property
    def connections(self) -> int:
        """Open connections to the driver."""
        return int(self._library.stand_in_connections())
