"""A machine of an elastic run is lost, with a last packet or without one, and returns: what stays, and what it costs.

The machines are network namespaces, and the scripts are those of `dsc launch`.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runtime.launch import fork_server
from tests.progress import children
from tests.runtime.processes import wait_for
from tests.runtime.run.machines import Machines, machines, why_not
from tests.runtime.run.place import Place, rows, saved
from tests.runtime.run.test_elastic import build_for_two_nodes, starts

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"this host allows no namespaces: {REASON}")


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A build for two nodes with two ranks each that saves every 20 steps, and the script of its nodes."""
    place = new_place()
    build_for_two_nodes(place)
    words = ("--build-path", "/mnt/own/build", "--run-folder", "/mnt/shared/run", "--data", "/mnt/shared")
    words += ("--elastic", "1", "--gather", "60")
    place.dsc("launch", "torchrun", "build/tiny", "--out", "files", "--steps", 10**6, *words)
    return place


@dataclass
class ElasticRun:
    """A run on two machines."""

    pair: Machines
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.pair.folder / "shared" / "run"

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start the script on a machine."""
        words = ("bash", "/mnt/own/node.sh", self.pair.addresses[0], str(index))
        self.started.append(self.pair.start(index, *words))
        return self.started[-1]

    def steps(self) -> int:
        return len(rows(self.folder)) if (self.folder / "metrics.jsonl").exists() else 0

    def last_start(self) -> int:
        """The number of ranks that train."""
        return [0, *starts(self.folder)][-1] if (self.folder / "events.jsonl").exists() else 0

    def train(self, ranks: int, steps: int) -> None:
        """Wait until this number of ranks has trained some steps."""
        wait_for(lambda: self.last_start() == ranks, f"the start of {ranks} ranks")
        before = self.steps()
        wait_for(lambda: self.steps() >= before + steps, f"{steps} steps on {ranks} ranks")

    def seconds_until_step(self, ranks: int) -> float:
        """Wait until this number of ranks has trained a step. Returns the time since the last step of others."""
        last, last_s = self.steps(), time.monotonic()
        while self.last_start() != ranks or self.steps() in (0, last):
            if (now := self.steps()) != last:
                last, last_s = now, time.monotonic()
            time.sleep(0.02)
        return time.monotonic() - last_s

    def fork_servers(self, index: int) -> list[int]:
        """The processes of a machine that fork its ranks, whose forks have the same command line."""
        pids, servers = [self.started[index].pid], list[int]()
        for pid in pids:
            if fork_server.__name__ in _command_line(pid).split("\0"):
                servers.append(pid)
            else:
                pids += children(pid)
        return servers


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize("loss", ["kill", "cut"])
def test_a_lost_machine(
    place: Place, loss: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The ranks that live are forked from the process that they were forked from, and find their build compiled. No
    sample is lost. `cut`: nothing arrives from the machine any more; the others decide by its silence."""
    with machines(tmp_path / "host") as pair:
        shutil.copytree(place.folder / "corpus", pair.folder / "shared" / "corpus")
        for name in ("a", "b"):
            shutil.copytree(place.folder / "build" / "tiny", pair.folder / name / "build")
            shutil.copy(place.folder / "files" / "node.sh", pair.folder / name)
        run = ElasticRun(pair)
        cable = ("ip", "-n", f"{pair.prefix}a", "link", "set", "cable")
        try:
            run.start(0)
            lost = run.start(1)
            run.train(ranks=4, steps=21)
            wait_for(lambda: [*(run.folder / "builds").glob("*-1x2/manifest.json")], "the build for one machine")
            (server,) = run.fork_servers(0)
            if loss == "kill":
                lost.kill()
            else:
                subprocess.run((*cable, "down"), check=True)
            record_property("lost_s", run.seconds_until_step(ranks=2))
            run.train(ranks=2, steps=20)
            assert run.fork_servers(0) == [server]
            if loss == "cut":
                lost.kill()
                subprocess.run((*cable, "up"), check=True)
            lost.wait()
            returned = time.monotonic()
            run.start(1)
            record_property("paused_s", run.seconds_until_step(ranks=4))
            record_property("returned_s", time.monotonic() - returned)
            run.train(ranks=4, steps=20)
            assert run.fork_servers(0) == [server]
            assert starts(run.folder) == [4, 2, 4], "both machines were waited for at the start"
            said = pair.output(0)
        finally:
            for process in run.started:
                process.kill()  # and all processes of its machine with it
                process.wait()
    assert "error: rank " in said and "no sign of life" in said
    assert "compiling the run" not in said, "it was compiled before"
    last = saved(run.folder).step
    theirs = rows(run.folder)[:last]
    assert [row["step"] for row in theirs] == list(range(1, last + 1))
    place.dsc("train", "build/tiny", "--out", f"straight-{loss}", "--steps", last)
    straight = rows(place.folder / f"straight-{loss}")
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in straight], rel=1e-6)
    assert saved(run.folder).meta["position"] == saved(place.folder / f"straight-{loss}").meta["position"]
