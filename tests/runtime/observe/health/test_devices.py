"""The health of devices: read through nvidia-ml-py from a stand-in of the driver, judged, written as events."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.observe.doctor import probe
from runtime.observe.doctor.checks import CheckProblem, check
from runtime.observe.events import Events
from runtime.observe.health import device_watch, nvml
from runtime.observe.health.device_watch import DeviceWatch
from runtime.observe.health.devices import XIDS_OF_PROGRAMS, DeviceHealth, PcieLink, faults_of
from runtime.observe.watch.run_state import RunState
from runtime.observe.watch.series import SERIES
from runtime.run.observers import DeviceLooks
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.observe.doctor.nodes import CPUS, GPUS
from tests.runtime.observe.health.stand_in import UUIDS, StandIn
from tests.runtime.processes import wait_for

WELL = DeviceHealth(
    0,
    "NVIDIA Stand-in",
    uncorrected=0,
    is_repair_pending=False,
    is_repair_failed=False,
    clock_reasons=4,
    link_errors=0,
    pcie=PcieLink(16, 16, 5, 5),
    celsius=60,
    max_celsius=87,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A machine with a driver and two devices that are well."""
    version = tmp_path / "version"
    version.touch()
    monkeypatch.setattr(nvml, "DRIVER", version)
    library.heal()
    open_before = library.connections
    yield library
    assert library.connections == open_before, "each connection is closed"


def looked() -> list[DeviceHealth]:
    with nvml.Nvml() as connection:
        return [device.look() for device in connection.devices()]


def kinds(health: DeviceHealth, first: DeviceHealth | None = None) -> list[str]:
    return [fault.kind for fault in faults_of(health, first)]


def test_all_that_the_driver_knows_is_read(driver: StandIn) -> None:
    assert looked() == [WELL, replace(WELL, index=1)]
    driver.set(1, uncorrected=3, remap_pending=1, remap_failed=1, reasons=0x48, link_errors=5, celsius=91)
    driver.set(1, width=8, generation=4)
    sick = DeviceHealth(1, WELL.name, 3, True, True, 0x48, 5, PcieLink(8, 16, 4, 5), 91, 87)
    assert looked() == [WELL, sick]


def test_what_a_device_does_not_support_is_unknown(driver: StandIn) -> None:
    """A device of an older generation has retired pages and other clock reasons; some have neither links nor ECC."""
    driver.set(0, uncorrected=-1, remap_pending=-1, reasons=-1, links=0, max_width=-1, celsius=-1, max_celsius=-1)
    assert looked()[0] == DeviceHealth(0, WELL.name)
    driver.set(0, retired=1, old_reasons=0x20)
    assert looked()[0] == DeviceHealth(0, WELL.name, is_repair_pending=True, clock_reasons=0x20)
    assert kinds(looked()[0]) == ["memory repair", "clocks"]


def test_each_fault_is_named_with_a_remedy() -> None:
    changes: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"uncorrected": 1}, ["memory errors"]),
        ({"is_repair_pending": True}, ["memory repair"]),
        ({"is_repair_failed": True}, ["memory repair"]),
        ({"xids": (79,)}, ["Xid 79"]),
        ({"xids": tuple(XIDS_OF_PROGRAMS)}, []),
        ({"clock_reasons": 0x1 | 0x2 | 0x4 | 0x10 | 0x100}, []),
        ({"clock_reasons": 0x80}, ["clocks"]),
        ({"celsius": 87}, []),
        ({"celsius": 88}, ["temperature"]),
        ({"link_errors": 1}, ["NVLink"]),
        ({"pcie": PcieLink(8, 16, 5, 5)}, ["PCIe width"]),
        ({"pcie": PcieLink(16, 16, 4, 5)}, ["PCIe generation"]),
        ({"pcie": PcieLink(16, 16, 1, 5), "clock_reasons": 1}, []),  # an idle device saves power
    ]
    for change, named in changes:
        health = replace(WELL, **change)
        assert kinds(health) == named, change
        assert all(fault.mend and fault.found for fault in faults_of(health))
    assert kinds(replace(WELL, link_errors=9), first=replace(WELL, link_errors=9)) == []
    (fault,) = faults_of(replace(WELL, link_errors=9), first=replace(WELL, link_errors=7))
    assert fault.found.startswith("2 errors of NVLink since the start")


# ---------------------------------------------------------------- doctor


def test_the_doctor_names_sick_devices(driver: StandIn) -> None:
    driver.set(1, remap_failed=1, celsius=95)
    health = probe._read_health()
    assert isinstance(health, tuple) and [device.celsius for device in health] == [60, 95]
    found = [finding for finding in check(replace(GPUS, health=health), None) if finding.name == "device health"]
    assert [finding.status for finding in found] == ["error", "warning"]
    assert all("device 1, NVIDIA Stand-in: " in finding.found and finding.mend for finding in found)


def test_the_doctor_says_what_hides_the_health(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "PACKAGE", "no_such_package")
    problem = probe._read_health()
    assert problem == CheckProblem(nvml.MISSING)
    (found,) = [finding for finding in check(replace(GPUS, health=problem), None) if finding.status != "ok"]
    assert "pip install nvidia-ml-py" in found.found
    monkeypatch.undo()


def test_without_a_driver_there_is_nothing_to_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "DRIVER", tmp_path / "none")
    assert probe._read_health() == ()
    assert not [finding for finding in check(CPUS, None) if finding.name == "device health"]
    said: list[str] = []
    watch = DeviceWatch(0, UUIDS[0], Events(tmp_path), said.append)
    watch.look()
    watch.close()
    assert not said and not list(tmp_path.iterdir())


def test_neither_torch_nor_the_package_is_imported_for_a_look_that_finds_no_driver() -> None:
    code = """
import sys
from pathlib import Path
from runtime.observe.events import Events
from runtime.observe.health import device_watch, nvml
nvml.DRIVER = Path("/nonexistent/driver")
device_watch.DeviceWatch(0, "GPU-0", Events(Path(".")), print).close()
sys.exit(bool({"torch", "pynvml"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- a run


class Watched:
    """A watch of the first device, in a run folder."""

    def __init__(self, run: Path, uuid: str = UUIDS[0]) -> None:
        self.run, self.said = run, list[str]()
        self.watch = DeviceWatch(3, uuid, Events(run), self.said.append)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def kinds(self) -> list[list[str]]:
        return [[fault["kind"] for fault in event["faults"]] for event in self.events]


@pytest.fixture
def watched(driver: StandIn, tmp_path: Path) -> Iterator[Watched]:
    (tmp_path / "run").mkdir()
    watched = Watched(tmp_path / "run")
    watched.watch.look()
    yield watched
    watched.watch.close()


def test_an_event_is_written_when_something_changes(watched: Watched, driver: StandIn) -> None:
    assert watched.events == [] and watched.said == [], "a device that is well is no news"
    driver.set(0, celsius=90)
    watched.watch.look()
    watched.watch.look()
    driver.set(0, celsius=89, link_errors=2)
    watched.watch.look()
    driver.set(0, celsius=60)
    driver.set(1, remap_failed=1)  # the device of another rank
    watched.watch.look()
    assert watched.kinds() == [["temperature"], ["temperature", "NVLink"], ["NVLink"]]
    for event in watched.events:
        assert not faults(event, FORMS["event_device"]) and (event["rank"], event["device"]) == (3, 0)
    assert watched.said[0].startswith("rank 3, device 0: 90 °C, and 87 °C are allowed: look at")


def test_each_xid_is_told_once(watched: Watched, driver: StandIn) -> None:
    driver.xid(0, 31)  # of a program
    watched.watch.look()
    driver.xid(0, 94)
    watched.watch.look()
    watched.watch.look()
    driver.xid(0, 94)
    watched.watch.look()
    assert watched.kinds() == [["Xid 94"], [], ["Xid 94"]]


def test_a_fault_of_a_step_looks_at_the_device(watched: Watched, driver: StandIn) -> None:
    observer = DeviceLooks(watched.watch)
    assert observer.train(lambda: {"loss": 1.0}) == {"loss": 1.0}
    driver.set(0, uncorrected=1)

    def fails() -> dict[str, Any]:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(RuntimeError, match="uncorrectable"):
        observer.train(fails)
    assert watched.kinds() == [["memory errors"]]


def test_the_device_is_looked_at_from_time_to_time(
    driver: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_watch, "EVERY_S", 0.01)
    watched = Watched(tmp_path)
    driver.set(0, width=4)
    wait_for(lambda: watched.kinds() == [["PCIe width"]], "the look")
    driver.set(0, width=16)
    wait_for(lambda: watched.kinds() == [["PCIe width"], []], "another look")
    watched.watch.close()


def test_a_lost_device_or_an_unknown_one_is_told(driver: StandIn, tmp_path: Path) -> None:
    watched = Watched(tmp_path, "MIG-other")
    wait_for(lambda: watched.said, "the reason")
    assert watched.said[0].startswith("rank 3: its device is not looked at: the driver does not answer")
    watched.watch.close()
    watched = Watched(tmp_path)
    watched.watch.look()
    driver.set(0, is_lost=1)
    watched.watch.look()
    assert watched.kinds() == [["lost"]] and "the driver does not answer" in watched.said[0]
    watched.watch.look()  # does nothing: the watch is over
    watched.watch.close()


def test_exporters_have_the_faults(watched: Watched, driver: StandIn) -> None:
    driver.set(0, celsius=90, uncorrected=2)
    watched.watch.look()
    state = RunState(watched.run)
    for event in watched.events:
        state._take_event(event)
    samples = {series.name: [*series.read(state)] for series in SERIES if series.name.startswith("dsc_device_")}
    assert sorted(samples["dsc_device_fault"]) == [(("3", "0", "memory errors"), 1.0), (("3", "0", "temperature"), 1.0)]
    assert samples["dsc_device_temperature_celsius"] == [(("3", "0"), 90.0)]
    assert samples["dsc_device_uncorrected_errors"] == [(("3", "0"), 2.0)]
