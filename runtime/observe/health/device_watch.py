"""Looks at the device of a rank while it trains: at the start, every five minutes, and after a fault.

A thread asks the driver, which may hang if a device is sick. It writes the event `device` if something is wrong with
the device, and again if that changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, replace

from runtime.observe.events import Events
from runtime.observe.health import nvml
from runtime.observe.health.devices import XIDS_OF_PROGRAMS, DeviceFault, DeviceHealth, faults_of

EVERY_S = 300.0
CLOSE_S = 2.0  # how long a fault or the end of a run waits for a driver


class DeviceWatch:
    """The watch of one device by a rank. It starts immediately; without a driver it does nothing.

    `uuid`: of the device, as the driver names it; `say`: gets a line if something is wrong.
    """

    def __init__(self, rank: int, uuid: str, events: Events, say: Callable[[str], None]) -> None:
        self._rank, self._uuid, self._events, self._say = rank, uuid, events, say
        self._change = threading.Condition()
        self._asked, self._looked, self._is_over = 0, 0, False  # the last look that was asked for, and that was taken
        self._thread: threading.Thread | None = None
        if nvml.has_driver():
            self._thread = threading.Thread(target=self._run, name="device watch", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Look now. Returns when the event is written, or when the driver does not answer soon."""
        with self._change:
            self._asked = wanted = self._asked + 1
            self._change.notify_all()
            if self._thread and not self._is_over:
                self._change.wait_for(lambda: self._is_over or self._looked >= wanted, CLOSE_S)

    def close(self) -> None:
        """End the watch."""
        self._end()
        if self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with nvml.Nvml() as driver:
                self._watch(driver.device(self._uuid))
        except nvml.NvmlError as error:
            if self._rank == 0 or str(error) != nvml.MISSING:
                self._say(f"rank {self._rank}: its device is not looked at: {error}")
        finally:
            self._end()

    def _end(self) -> None:
        with self._change:
            self._is_over = True
            self._change.notify_all()

    def _watch(self, device: nvml.NvmlDevice) -> None:
        first: DeviceHealth | None = None
        known = frozenset[str]()
        while not self._is_over:
            taken = self._asked
            try:
                health = device.look()
            except nvml.NvmlError as error:
                if first is None:
                    raise
                fault = DeviceFault("error", "lost", str(error), "look at dmesg; the node must be started again")
                self._tell(replace(first, xids=()), (fault,))
                return
            first = first or health  # errors of links from before the run are not its news
            faults = tuple(faults_of(health, first))
            kinds = frozenset(fault.kind for fault in faults)
            if kinds != known or set(health.xids) - XIDS_OF_PROGRAMS:  # the same Xid may come again
                self._tell(health, faults)
            known = kinds
            self._rest(taken)

    def _rest(self, taken: int) -> None:
        """Report that a look is taken, and wait until the next one is due or asked for."""
        with self._change:
            self._looked = taken
            self._change.notify_all()
            self._change.wait_for(lambda: self._is_over or self._asked > taken, EVERY_S)

    def _tell(self, health: DeviceHealth, faults: tuple[DeviceFault, ...]) -> None:
        facts = asdict(health)
        known = {name: value for name, value in facts.items() if value is not None and name not in ("index", "name")}
        self._events.write(
            "device",
            rank=self._rank,
            device=health.index,
            name=health.name,
            faults=[asdict(fault) for fault in faults],
            facts=known,
        )
        for fault in faults:
            self._say(f"rank {self._rank}, device {health.index}: {fault.found}: {fault.mend}")
