"""The batch script, with an srun that starts two local tasks: when a job is requeued, and when not."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

import pytest

from tests.compiler.tools.launch.cluster import fake_slurm, in_job, launch
from tests.compiler.tools.launch.test_scripts import SHELLCHECK
from tests.runtime.processes import wait_for

# A stand-in for torchrun: saves on a stop signal if one file exists, and fails as often as another file states.
FAKE = f"""#!{sys.executable} -S
import fcntl, os, signal, sys, time
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
with open("runs") as lock:  # whose lock the test has, until the run is to end
    fcntl.flock(lock, fcntl.LOCK_SH)
"""


@pytest.fixture
def job(two_nodes: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with a batch script, the programs it starts, and the state of Slurm."""
    python = tmp_path / "python"
    python.write_text(FAKE.replace("FOLDER", repr(str(tmp_path))), "utf-8")
    python.chmod(0o755)
    words = ("--python", str(python), "--run-folder", str(tmp_path / "run"), "--restarts", "2")
    launch("slurm", two_nodes, tmp_path / "out", *words)
    fake_slurm(tmp_path)
    with running(tmp_path):
        yield tmp_path


@contextmanager
def running(job: Path) -> Iterator[None]:
    """Tasks go on until `finish`, or until the end of the block."""
    with (job / "runs").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LOCKS[job] = lock
        yield


def finish(job: Path) -> None:
    """Let the tasks of a job finish, including those not started yet."""
    LOCKS.pop(job).close()


LOCKS: dict[Path, TextIOWrapper] = {}


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
    finish(job)
    process = started(job)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (0, [], 1)


def test_the_signal_before_the_time_limit_requeues(job: Path) -> None:
    (job / "saves").touch()
    process = started(job)
    send(job, signal.SIGUSR1)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (138, ["7"], 1)


def test_a_stop_before_a_checkpoint_does_not_requeue(job: Path) -> None:
    """Otherwise a job whose time limit is shorter than a step would be requeued forever."""
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
    stderr = process.stderr.read() if process.stderr else ""
    assert stderr.count("starting again from the first step") == starts - 1


def test_a_job_of_another_size_is_refused(job: Path) -> None:
    environment = in_job(job / "bin") | {"SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(["bash", str(job / "out" / "job.sbatch")], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the build is for 2 nodes, but this job has 3\n")


def test_further_options_of_sbatch(gpu_nodes: Path, tmp_path: Path) -> None:
    """They follow the options of the script; devices in --gres are not requested twice."""
    words = (
        "--gres",
        "gpu:h100:1,nvme:2",
        "--sbatch=--reservation=week",
        "--sbatch",
        "mem=500G",
        "--sbatch",
        "overcommit",
    )
    text = (launch("slurm", gpu_nodes, tmp_path, *words).folder / "job.sbatch").read_text()
    assert "gpus-per-node" not in text
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives[-4:] == [
        f"#SBATCH --{option}" for option in ("gres=gpu:h100:1,nvme:2", "reservation=week", "mem=500G", "overcommit")
    ]


@pytest.mark.parametrize("more", [(), ("--elastic", "1")])
@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("nvcr.io/nvidia/pytorch:26.01-py3", ["--container-image=nvcr.io#nvidia/pytorch:26.01-py3", "MOUNTS"]),
        ("localhost:5000/dsc", ["--container-image=localhost:5000#dsc", "MOUNTS"]),
        ("team/dsc:1", ["--container-image=team/dsc:1", "MOUNTS"]),
        ("/images/dsc.sqsh", ["--container-image=/images/dsc.sqsh", "MOUNTS"]),
        ("/images/dsc.sif", ["apptainer", "exec", "--nv", "--bind", "FOLDERS", "/images/dsc.sif"]),
    ],
)
def test_a_task_runs_in_the_image(
    image: str, words: list[str], more: tuple[str, ...], gpu_nodes: Path, tmp_path: Path
) -> None:
    """With the folders of the job, whose names are quoted; shellcheck reports nothing."""
    folder, run = tmp_path / "it's; a folder", tmp_path / "run"
    options = ("--image", image, "--mount", "/scratch", "--run-folder", str(run), "--data", "/data", *more)
    text = (launch("slurm", gpu_nodes, folder, *options).folder / "job.sbatch").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("container=(")]
    folders = ",".join(f"{path}:{path}" for path in (folder, gpu_nodes, run, "/data", "/scratch"))
    wanted = [word.replace("MOUNTS", f"--container-mounts={folders}").replace("FOLDERS", folders) for word in words]
    printed = subprocess.run(
        ["bash", "-c", f"{line}\nprintf '%s\\0' \"${{container[@]}}\""], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split("\0")[:-1] == wanted
    assert text.count('"${container[@]}" bash "$node_script"') == 1 and 'mkdir -p "$run"' in text
    checked = subprocess.run(
        [str(SHELLCHECK), "--shell=bash", "--norc", str(folder / "job.sbatch")], capture_output=True
    )
    assert (checked.returncode, checked.stdout) == (0, b"")
    assert "python=python3\n" in (folder / "node.sh").read_text(), "this machine's Python is not in the image"


def test_options_that_sbatch_reads(job: Path, two_nodes: Path, gpu_nodes: Path, tmp_path: Path) -> None:
    words = ("--partition", "gpu,long", "--account", "a.b", "--constraint", "h100&ib", "--lead", "120")
    for build, gpus in ((two_nodes, []), (gpu_nodes, ["--gpus-per-node=1"])):
        text = (launch("slurm", build, tmp_path / "options", *words).folder / "job.sbatch").read_text()
        directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        assert directives == [
            *("--job-name=tiny", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", *gpus),
            *("--time=1:00:00", "--signal=USR1@120", "--requeue", "--open-mode=append"),
            *("--partition=gpu,long", "--account=a.b", "--constraint=h100&ib"),
        ]
        head = text.partition("\nset -euo")[0].splitlines()
        assert all(line.startswith("#") for line in head), "sbatch reads no option behind a command"
