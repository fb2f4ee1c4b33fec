"""Asks the driver of NVIDIA about its devices, with the package nvidia-ml-py (extra `gpu`). No torch, no CUDA context.

Where there is no driver, nothing is imported and nothing is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from runtime.observe.health.devices import DeviceHealth, PcieLink

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGE = "pynvml"  # the module of nvidia-ml-py
MISSING = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
MAX_XIDS = 64  # of one look
Value = TypeVar("Value")


class NvmlError(Exception):
    """The driver cannot be asked. The message says why."""


def has_driver() -> bool:
    """Whether this machine has a driver of NVIDIA."""
    return DRIVER.exists()


class Nvml:
    """A connection to the driver; a context manager. Raises NvmlError if there is none."""

    def __init__(self) -> None:
        try:
            self._module: Any = importlib.import_module(PACKAGE)
        except ImportError:
            raise NvmlError(MISSING) from None
        self._call(self._module.nvmlInit)

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._known(self._module.nvmlShutdown)

    def devices(self) -> Iterator[NvmlDevice]:
        """Yield all devices, in the order of the driver."""
        for index in range(self._call(self._module.nvmlDeviceGetCount)):
            yield NvmlDevice(self, self._call(self._module.nvmlDeviceGetHandleByIndex, index))

    def device(self, uuid: str) -> NvmlDevice:
        """Return the device with an identifier such as "GPU-5a…"."""
        return NvmlDevice(self, self._call(self._module.nvmlDeviceGetHandleByUUID, uuid))

    def _call(self, call: Callable[..., Value], *arguments: Any) -> Value:
        try:
            return call(*arguments)
        except self._module.NVMLError as error:
            raise NvmlError(f"the driver does not answer: {error}") from None

    def _known(self, call: Callable[..., Value], *arguments: Any) -> Value | None:
        """Return the answer to a question, None if this device or this driver has none."""
        try:
            return call(*arguments)
        except self._module.NVMLError:
            return None


class NvmlDevice:
    """A device. It collects Xid errors from its construction on."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        module = nvml._module
        self._events = nvml._known(module.nvmlEventSetCreate)
        if self._events is not None:
            nvml._known(module.nvmlDeviceRegisterEvents, handle, module.nvmlEventTypeXidCriticalError, self._events)

    def look(self) -> DeviceHealth:
        """Return the health of the device. Raises NvmlError if the device has left the bus."""
        module, handle = self._nvml._module, self._handle
        index = self._nvml._call(module.nvmlDeviceGetIndex, handle)
        name = self._ask("Name") or ""
        remapped = self._ask("RemappedRows")  # corrected, uncorrected, pending, failed
        retired = self._ask("RetiredPagesPendingStatus")  # of devices before A100
        pending = None if remapped is None and retired is None else bool((remapped or (0, 0, 0))[2] or retired)
        return DeviceHealth(
            index,
            name.decode() if isinstance(name, bytes) else name,
            uncorrected=self._ask(
                "TotalEccErrors", module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC
            ),
            is_repair_pending=pending,
            is_repair_failed=None if remapped is None else bool(remapped[3]),
            clock_reasons=self._clock_reasons(),
            link_errors=self._link_errors(),
            pcie=self._pcie(),
            celsius=self._ask("Temperature", module.NVML_TEMPERATURE_GPU),
            max_celsius=self._ask("TemperatureThreshold", module.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
            xids=tuple(self._xids()),
        )

    def _ask(self, topic: str, *arguments: Any) -> Any:
        question = getattr(self._nvml._module, f"nvmlDeviceGet{topic}", None)  # an older package has fewer
        return None if question is None else self._nvml._known(question, self._handle, *arguments)

    def _clock_reasons(self) -> int | None:
        reasons = self._ask("CurrentClocksEventReasons")
        answer: int | None = self._ask("CurrentClocksThrottleReasons") if reasons is None else reasons  # drivers < 535
        return answer

    def _link_errors(self) -> int | None:
        """Return the sum of all error counters of active NVLinks; None if there is no NVLink."""
        module, total = self._nvml._module, None
        for link in range(module.NVML_NVLINK_MAX_LINKS):
            if (is_active := self._ask("NvLinkState", link)) is None:
                break
            for counter in range(module.NVML_NVLINK_ERROR_COUNT) if is_active else ():
                if (count := self._ask("NvLinkErrorCounter", link, counter)) is not None:
                    total = (total or 0) + count
        return total

    def _pcie(self) -> PcieLink | None:
        topics = ("CurrPcieLinkWidth", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration")
        answers = [self._ask(topic) for topic in topics]
        return None if None in answers else PcieLink(*answers)

    def _xids(self) -> Iterator[int]:
        module = self._nvml._module
        for _ in range(MAX_XIDS) if self._events is not None else ():
            event = self._nvml._known(module.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # a time-out: there is no more
                return
            yield int(event.eventData)
