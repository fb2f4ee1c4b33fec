"""Scripts of `dsc launch`: two nodes on this machine train, stop for a time limit, and resume bit-identically."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.load import load
from tests import progress
from tests.compiler.tools.launch.cluster import fake_slurm, in_job
from tests.progress import children
from tests.runtime.processes import is_gone, wait_for
from tests.runtime.run.place import FOUR_RANKS, Place, bits, has_reached, rows, saved, untimed
from tests.runtime.run.test_elastic import starts
from tests.runtime.run.test_failures import BEGUN

STEPS = 60  # enough that a job is stopped before its end
Straight = Callable[[int], Path]


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A build for two nodes with two ranks each."""
    place = new_place()
    spec = place.write(FOUR_RANKS | {"devices": 2})
    spec.write_text(spec.read_text("utf-8").replace("cluster here { nodes = 1", "cluster here { nodes = 2"), "utf-8")
    write_build(place.folder / "build" / "tiny", compile_spec(load(spec), segments=place.segments).files)
    return place


@pytest.fixture(scope="module")
def straight(place: Place) -> Straight:
    """An undisturbed run of a number of steps on one machine."""

    @cache
    def run(steps: int) -> Path:
        place.dsc("train", "build/tiny", "--out", f"straight-{steps}", "--steps", steps)
        return place.folder / f"straight-{steps}"

    return run


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def end(pids: list[int]) -> None:
    """Kill processes that a test left."""
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def below(pid: int) -> list[int]:
    """A process and its descendants."""
    pids = [pid]
    for descendant in pids:
        pids += children(descendant)
    return pids


def test_two_shells_train_as_one_machine(place: Place, straight: Straight) -> None:
    words = ("--out", "files", "--run-folder", "by-hand", "--port", free_port(), "--steps", 6)
    place.dsc("launch", "torchrun", "build/tiny", *words)
    nodes = [
        subprocess.Popen(["bash", "files/node.sh", socket.gethostname(), str(node)], cwd=place.folder)
        for node in range(2)
    ]
    try:
        assert [progress.end(node) for node in nodes] == [0, 0]
    finally:
        end([pid for node in nodes for pid in below(node.pid)])
    run, expected = place.folder / "by-hand", straight(6)
    assert untimed(run) == untimed(expected) and len(untimed(run)) == 6
    assert bits(saved(run)) == bits(saved(expected))


@pytest.mark.parametrize("everybody", [False, True])
def test_a_slurm_job_stops_at_its_time_limit_and_resumes(
    place: Place, straight: Straight, tmp_path: Path, everybody: bool
) -> None:
    """The signal goes to the tasks or, as some clusters are configured, to all their processes."""
    run = place.folder / f"slurm-{everybody}"
    words = ("--time", "1:00:00", "--out", tmp_path / "files", "--run-folder", run, "--port", free_port())
    place.dsc("launch", "slurm", "build/tiny", *words, "--steps", STEPS)
    environment = in_job(fake_slurm(tmp_path))
    batch = ("bash", str(tmp_path / "files" / "job.sbatch"))
    job = subprocess.Popen(batch, cwd=place.folder, env=environment)
    try:
        wait_for(lambda: has_reached(run, BEGUN), f"step {BEGUN}")
        tasks = [int(pid) for pid in (tmp_path / "tasks").read_text().split()]
        for pid in [pid for task in tasks for pid in below(task)] if everybody else tasks:
            os.kill(pid, signal.SIGUSR1)
        assert progress.end(job) == 128 + signal.SIGUSR1
        assert (tmp_path / "requeued").read_text() == "7\n"
    finally:
        end(below(job.pid))
    last = rows(run)[-1]["step"]
    assert last < STEPS, "the run must be longer"
    assert saved(run).step == last, "the last step is saved, whichever it was"
    job = subprocess.Popen(batch, cwd=place.folder, env=environment)
    try:
        assert progress.end(job) == 0
    finally:
        end(below(job.pid))
    assert (tmp_path / "requeued").read_text() == "7\n"
    expected = straight(STEPS)
    undisturbed = [row for row in untimed(expected) if row["step"] != last]
    assert [row for row in untimed(run) if row["step"] != last] == undisturbed, "but for a validation at the stop"
    assert bits(saved(run)) == bits(saved(expected))


def test_an_elastic_slurm_job_loses_and_regains_a_node(place: Place, tmp_path: Path) -> None:
    """The node's whole step is killed, as if the machine were gone: the other continues alone, then both."""
    run = tmp_path / "elastic"
    words = ("--time", "1:00:00", "--out", tmp_path / "files", "--run-folder", run, "--port", free_port())
    place.dsc("launch", "slurm", "build/tiny", *words, "--elastic", 1, "--gather", 2, "--steps", 10**6)
    batch = ("bash", str(tmp_path / "files" / "job.sbatch"))
    with (tmp_path / "out").open("wb") as log:
        job = subprocess.Popen(batch, cwd=place.folder, env=in_job(fake_slurm(tmp_path)), stdout=log, stderr=log)
    try:
        wait_for(lambda: starts(run)[-1:] == [4], "the start of four ranks")
        wait_for(lambda: has_reached(run, BEGUN), f"step {BEGUN}")
        (tmp_path / "lost-1").touch()
        end(below(int((tmp_path / "task-1").read_text())))
        wait_for(lambda: starts(run)[-1] == 2, "the start of two ranks")
        (tmp_path / "lost-1").unlink()
        wait_for(lambda: starts(run)[-1] == 4, "the start of four ranks")
        before = len(rows(run))
        wait_for(lambda: len(rows(run)) > before + 3, "steps on four ranks")
        for node in range(2):
            os.kill(int((tmp_path / f"task-{node}").read_text()), signal.SIGUSR1)
        assert progress.end(job) == 128 + signal.SIGUSR1, (tmp_path / "out").read_text()
        assert (tmp_path / "requeued").read_text() == "7\n"
    finally:
        end(below(job.pid))
    last = saved(run).step
    theirs = rows(run)
    assert [row["step"] for row in theirs] == list(range(1, last + 1))
    place.dsc("train", "build/tiny", "--out", "undisturbed", "--steps", last)
    undisturbed = place.folder / "undisturbed"
    assert saved(run).meta["position"] == saved(undisturbed).meta["position"], "no sample twice, none left out"
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in rows(undisturbed)], rel=1e-3)
