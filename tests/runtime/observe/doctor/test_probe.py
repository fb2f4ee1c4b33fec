"""How `dsc doctor` examines its node, and what it prints."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from compiler.cli.main import main as dsc
from runtime.observe.doctor import probe
from runtime.observe.doctor.__main__ import main
from runtime.observe.doctor.checks import CheckProblem, Disk, HostMemory, HostNetwork, LinkSpeeds, ProcessLimits
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.launch.conftest import one_node as one_node
from tests.progress import PATIENCE_S
from tests.runtime.observe.doctor.nodes import CPUS, changed
from tests.runtime.processes import block

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _slow_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for probes that end, however long they take."""
    monkeypatch.setattr(probe.run_with_limit, "__defaults__", (PATIENCE_S,))


def test_this_node(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        node = probe.look(tmp_path / "runs" / "new", server.getsockname()[1])
    assert node.cpus == len(os.sched_getaffinity(0))
    assert isinstance(node.memory, HostMemory) and node.memory.free_bytes > 0
    assert isinstance(node.disk, Disk) and node.disk.folder == str(tmp_path) and node.disk.is_writable
    assert isinstance(node.limits, ProcessLimits) and node.limits.files > 0
    assert isinstance(node.network, HostNetwork) and node.network.port_problem == "Address already in use"
    assert isinstance(node.links, LinkSpeeds) and node.links.processes > 0


def test_a_link_is_measured_with_all_of_a_block_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SIZE_BYTES", 4096)
    monkeypatch.setattr(probe, "FOR_S", 0.0)
    assert probe.between_processes() > 0


class Devices:
    """Stand-in for torch with two or more devices: copies to the named devices take seconds of `clock`."""

    def __init__(self, count: int) -> None:
        self.waited: list[int] = []
        self.device_count = lambda: count
        self.nccl = SimpleNamespace(all_reduce=lambda tensors: self.waited.clear())
        self.synchronize = self.waited.append


@pytest.mark.parametrize("count", [2, 3])
def test_the_slowest_copy_from_the_first_device_counts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cuda, rates = Devices(count), {0: 9.0, 1: 5.0, 2: 3.0}
    fake = SimpleNamespace(cuda=cuda, uint8=None, device=lambda kind, index: index, empty=MagicMock(), ones=MagicMock())
    monkeypatch.setattr(probe, "torch", fake)
    monkeypatch.setattr(probe, "between_processes", lambda: 1.0)
    monkeypatch.setattr(probe, "_copies", lambda source, target: rates[target])
    links = probe.measure()
    assert (links.processes, links.to_device, links.devices) == (1.0, 9.0, min(rates[1], rates[count - 1]))
    assert links.nccl is not None and cuda.waited == [*range(count)], "all devices are waited for"


def fails() -> None:
    raise OSError("Input/output\nerror")


def children() -> list[str]:
    """Processes that this thread started and has not waited for."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text("ascii").split()


def test_a_probe_that_hangs_dies_or_fails_is_a_problem(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(probe, "SAY_S", 0.05)
    assert probe.run_with_limit(block, "a disk", limit_s=0.2) == CheckProblem("no answer within 0.2 s")
    assert capsys.readouterr().err == "doctor: looking at a disk\n"
    assert probe.run_with_limit(fails, "a disk") == CheckProblem("Input/output error")
    assert probe.run_with_limit(lambda: os._exit(1), "a disk") == CheckProblem("the process that looked has died")
    assert probe.run_with_limit(lambda: {"a": [1]}, "a disk") == {"a": [1]}
    assert children() == before, "each process that looked is gone"


def test_the_command(one_node: Path, tmp_path: Path, capfd: Captured) -> None:
    code = dsc(["doctor", str(one_node), "--out", str(tmp_path / "run"), "--format", "json"])
    document = parsed(capfd.readouterr().out, "doctor")
    assert document["build"] == str(one_node) and code == (1 if document["errors"] else 0)
    assert {row["name"] for row in document["checks"]} >= {"devices", "memory", "disk", "links"}
    assert not (tmp_path / "run").exists()
    assert dsc(["doctor", str(tmp_path)]) == 2
    assert "holds no build" in capfd.readouterr().err


def test_exit_codes_and_text(one_node: Path, capsys: Captured) -> None:
    full = changed(CPUS, "disk", free_bytes=0)
    assert main([str(one_node)], lambda run, port: full) == 1
    assert "error    disk           0.0 GB free in /runs, 2 checkpoints of" in capsys.readouterr().out
    slow = changed(CPUS, "limits", files=10)
    assert main([], lambda run, port: slow) == 0
    output = capsys.readouterr().out
    assert (
        "warning  open files     ulimit -n is 10\n" in output and "→ raise it before the run: ulimit -n 1024" in output
    )
    assert main([str(one_node), "--format", "json"], lambda run, port: full) == 1
    document = parsed(capsys.readouterr().out, "doctor")
    assert (document["errors"], document["warnings"]) == (1, 0)
