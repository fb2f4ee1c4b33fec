"""The batch script, with an srun that starts two tasks here: when a job is put back into the queue, and when not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.cluster import fake_slurm, in_job, launch
from tests.runtime.processes import wait_for

# A torchrun: it saves when it is told to stop, if there is a file that says so, and fails as often as another says.
FAKE = f"""#!{sys.executable} -S
import os, signal, sys, time
os.chdir(FOLDER)
def stop(*_):
    if os.path.exists("saves"):
        os.makedirs("run/checkpoints", exist_ok=True)
        with open("run/checkpoints/LATEST", "w") as latest:
            latest.write("step-%d" % time.monotonic_ns())
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
if os.path.exists("failures"):
    sys.exit(int(open("failures").read()))
open("ready-" + os.environ["SLURM_NODEID"], "w").close()
while not os.path.exists("done"):
    time.sleep(0.02)
"""


@pytest.fixture
def job(two_nodes: Path, tmp_path: Path) -> Path:
    """A folder with a batch script, what it starts, and what Slurm has."""
    python = tmp_path / "python"
    python.write_text(FAKE.replace("FOLDER", repr(str(tmp_path))), "utf-8")
    python.chmod(0o755)
    words = ("--python", str(python), "--run-folder", str(tmp_path / "run"), "--restarts", "2")
    launch("slurm", two_nodes, tmp_path / "out", *words)
    fake_slurm(tmp_path)
    return tmp_path


def started(job: Path) -> subprocess.Popen[str]:
    for name in ("ready-0", "ready-1", "tasks"):
        (job / name).unlink(missing_ok=True)
    batch = ["bash", str(job / "out" / "job.sbatch")]
    return subprocess.Popen(batch, env=in_job(job / "bin"), stderr=subprocess.PIPE, text=True)


def send(job: Path, number: int) -> None:
    """A signal to the tasks, once they train."""
    wait_for(lambda: all((job / name).exists() for name in ("ready-0", "ready-1", "tasks")), "two tasks")
    for pid in (job / "tasks").read_text().split():
        os.kill(int(pid), number)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_that_ends_is_done(job: Path) -> None:
    (job / "done").touch()
    process = started(job)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (0, [], 1)


def test_the_signal_before_the_time_limit_requeues(job: Path) -> None:
    (job / "saves").touch()
    process = started(job)
    send(job, signal.SIGUSR1)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (138, ["7"], 1)


def test_a_stop_before_a_checkpoint_does_not_requeue(job: Path) -> None:
    """A job whose time is too short for a step would else come back for ever."""
    process = started(job)
    send(job, signal.SIGUSR1)
    assert (process.wait(), lines(job / "requeued")) == (2, [])
    assert process.stderr and process.stderr.read().startswith("error: stopped before a checkpoint was saved")


def test_a_cancelled_job_stays_cancelled(job: Path) -> None:
    (job / "saves").touch()
    process = started(job)
    send(job, signal.SIGTERM)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (143, [], 1)


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1), (130, 1)])
def test_a_failure_starts_again_and_a_mistake_does_not(job: Path, code: int, starts: int) -> None:
    (job / "failures").write_text(str(code))
    process = started(job)
    assert (process.wait(), len(lines(job / "starts")), lines(job / "requeued")) == (code, starts, [])
    said = process.stderr.read() if process.stderr else ""
    assert said.count("starting again from the first step") == starts - 1


def test_a_job_of_another_size_is_refused(job: Path) -> None:
    environment = in_job(job / "bin") | {"SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(["bash", str(job / "out" / "job.sbatch")], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the build is of 2 nodes, and this job has 3\n")


def test_what_sbatch_reads(job: Path, two_nodes: Path, gpu_nodes: Path, tmp_path: Path) -> None:
    words = ("--partition", "gpu,long", "--account", "a.b", "--constraint", "h100&ib", "--lead", "120")
    for build, gpus in ((two_nodes, []), (gpu_nodes, ["--gpus-per-node=1"])):
        text = (launch("slurm", build, tmp_path / "options", *words).folder / "job.sbatch").read_text()
        found = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        assert found == [
            *("--job-name=tiny", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", *gpus),
            *("--time=1:00:00", "--signal=USR1@120", "--requeue", "--open-mode=append"),
            *("--partition=gpu,long", "--account=a.b", "--constraint=h100&ib"),
        ]
        head = text.partition("\nset -euo")[0].splitlines()
        assert all(line.startswith("#") for line in head), "sbatch reads no option behind a command"
