"""`--elastic`: the options of torchrun, and a batch script that keeps a task on every node."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.tools.launch.files import MEETING
from tests.compiler.tools.launch.cluster import NEEDED, fake_python, fake_slurm, in_job, launch, told
from tests.compiler.tools.launch.test_slurm import FAKE, finish, lines, running
from tests.runtime.processes import wait_for

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_torchrun_is_asked_for_a_range_of_nodes(launcher: str, two_nodes: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python")
    words = ("--python", str(python), "--env", f"TOLD={tmp_path / 'told'}", "--elastic", "1", "--gather", "7")
    written = launch(launcher, two_nodes, tmp_path / "out", *words)
    done = written.start({"DSC_HOST": "first", "DSC_NODE": "0"}, ("first", "0"))
    assert done.returncode == 0, done.stderr
    received = told(tmp_path / "told")
    words_of = received["words"]
    assert words_of[words_of.index("--nnodes") + 1] == "1:2"
    assert words_of[words_of.index("--max-restarts") + 1] == "100"
    assert words_of[words_of.index("--rdzv-conf") + 1] == f"is_host=true,{MEETING}"
    assert words_of[words_of.index("--gather") + 1] == "7"
    assert "--elastic" in words_of and "--resume" not in words_of
    assert received["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--elastic", "3"), "--elastic 3 is more than the 2 nodes of the build"),
        (("--elastic", "0"), "'0' is not a number of nodes"),
        (("--gather", "3"), "--gather needs --elastic"),
    ],
)
def test_invalid_elastic_runs_are_refused(words: tuple[str, ...], said: str, two_nodes: Path, capsys: Captured) -> None:
    try:
        assert main(["launch", "slurm", str(two_nodes), *NEEDED["slurm"], *words]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert said in capsys.readouterr().err


def test_one_node_is_not_elastic(one_node: Path, capsys: Captured) -> None:
    assert main(["launch", "torchrun", str(one_node), "--elastic", "1"]) == 2
    assert "--elastic needs several nodes, but the build is for one" in capsys.readouterr().err


def test_options_that_sbatch_reads(two_nodes: Path, tmp_path: Path) -> None:
    text = (launch("slurm", two_nodes, tmp_path / "out", "--elastic", "1").folder / "job.sbatch").read_text()
    assert "#SBATCH --nodes=1-2\n" in text and "#SBATCH --no-kill\n" in text


# ---------------------------------------------------------------- the batch script, with tasks that do not train


@pytest.fixture
def job(two_nodes: Path, tmp_path: Path) -> Iterator[Path]:
    python = tmp_path / "python"
    python.write_text(FAKE.replace("FOLDER", repr(str(tmp_path))).replace("SLURM_NODEID", "DSC_NODE"), "utf-8")
    python.chmod(0o755)
    words = ("--python", str(python), "--run-folder", str(tmp_path / "run"), "--restarts", "2", "--elastic", "1")
    folder = launch("slurm", two_nodes, tmp_path / "out", *words).folder
    batch = folder / "job.sbatch"
    text = batch.read_text("utf-8")
    assert "10 * starts" in text
    batch.write_text(text.replace("10 * starts", "1 * starts"), "utf-8")  # of the pause, for the test to be short
    fake_slurm(tmp_path)
    with running(tmp_path):
        yield tmp_path


def started(job: Path, **more: str) -> subprocess.Popen[str]:
    batch = ["bash", str(job / "out" / "job.sbatch")]
    process = subprocess.Popen(batch, env=in_job(job / "bin") | more, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: all((job / f"ready-{node}").exists() for node in (0, 1)), "two tasks")
    return process


def task(job: Path, node: int) -> int:
    return int((job / f"task-{node}").read_text())


def test_a_lost_task_is_started_again(job: Path) -> None:
    """The other task is not touched, and the run finishes with it."""
    process = started(job)
    other_task = task(job, 0)
    for pid in range(2):
        (job / "ready-1").unlink()
        os.kill(task(job, 1), signal.SIGKILL)
        wait_for(lambda: (job / "ready-1").exists(), f"start {pid + 2} of the second task")
    assert task(job, 0) == other_task
    finish(job)
    assert (process.wait(), lines(job / "requeued")) == (0, [])
    assert len(lines(job / "starts")) == 4
    stderr = process.stderr.read() if process.stderr else ""
    assert "node 1, second, ended with exit code 137: starting it again in 2 s, 2 of 2" in stderr


def test_a_node_that_flaps_is_given_up(job: Path) -> None:
    """After its last restart the job continues without it, and ends with the others' exit code."""
    process = started(job)
    for restarts_left in (1, 1, 0):
        os.kill(task(job, 1), signal.SIGKILL)
        if restarts_left:
            (job / "ready-1").unlink()
            wait_for(lambda: (job / "ready-1").exists(), "another start")
    finish(job)
    assert (process.wait(), len(lines(job / "starts"))) == (0, 4)


def test_the_signal_before_the_time_limit_requeues(job: Path) -> None:
    (job / "saves").touch()
    process = started(job)
    for node in (0, 1):
        os.kill(task(job, node), signal.SIGUSR1)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (138, ["7"], 2)


def test_a_cancelled_job_stays_cancelled(job: Path) -> None:
    (job / "saves").touch()
    process = started(job)
    for node in (0, 1):
        os.kill(task(job, node), signal.SIGTERM)
    assert (process.wait(), lines(job / "requeued"), len(lines(job / "starts"))) == (143, [], 2)


def test_a_job_of_fewer_nodes_begins(job: Path) -> None:
    finish(job)
    batch = ["bash", str(job / "out" / "job.sbatch")]
    environment = in_job(job / "bin") | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    assert subprocess.run(batch, env=environment, check=False).returncode == 0
    assert len(lines(job / "starts")) == 1
    environment |= {"SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(batch, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: the run needs 1 to 2 nodes, but this job has 3\n")
