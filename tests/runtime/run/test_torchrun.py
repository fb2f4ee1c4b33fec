"""Runs started by two real torchrun agents, each like a machine: how they end, and how they are resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import string
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import progress
from tests.progress import children
from tests.runtime.processes import is_gone, listeners, wait_for
from tests.runtime.run.place import DENSE, FOUR_RANKS, TORCHRUN, Place, bits, has_reached, rows, run, saved, untimed
from tests.runtime.run.sick import events
from tests.runtime.run.test_failures import ACTION, BEGUN

FOREVER = ("--steps", str(10**6))
STRAIGHT = 30


@pytest.fixture(scope="module")
def place(new_place: Callable[[], Place]) -> Place:
    """A build for four ranks, and `straight`, an undisturbed run of it."""
    place = new_place()
    place.compile(FOUR_RANKS)
    place.dsc("train", "build/tiny", "--out", "straight", "--steps", STRAIGHT)
    return place


@dataclass
class Agents:
    """Two torchrun processes of two ranks each, and any started later."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path
    name: str
    command: tuple[str, ...] = ()

    def start_another(self) -> None:
        """Start another torchrun process."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"{self.name}-{len(self.processes)}.out").open("wb") as log:
            self.processes.append(
                subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log, env=environment)
            )

    def ranks(self) -> dict[int, int]:
        """Rank → process id."""
        pids = [pid for agent in self.processes for pid in children(agent.pid)]
        named = {_variable(pid, "RANK"): pid for pid in pids}
        return {int(rank): pid for rank, pid in named.items() if rank is not None}

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert all(agent.poll() is None for agent in self.processes), self.output(0) + self.output(1)
            return has_reached(self.folder / self.name, step)

        wait_for(reached, f"step {step}")

    def end(self) -> list[int]:
        """Wait until the agents and all ranks have ended. Returns the agents' exit codes."""
        ranks = self.ranks()
        codes = [progress.end(agent) for agent in self.processes]
        wait_for(lambda: all(map(is_gone, ranks.values())), "the end of every rank")
        return codes

    def output(self, agent: int) -> str:
        return (self.folder / f"{self.name}-{agent}.out").read_text("utf-8")

    def said(self, start: str) -> list[list[str]]:
        """The lines of each agent's output that begin with `start`."""
        return [[line for line in self.output(a).splitlines() if line.startswith(start)] for a in range(2)]


def _variable(pid: int, name: str) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((e.partition(b"=")[2].decode() for e in entries if e.startswith(name.encode() + b"=")), None)


def _is_listened_on(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@contextmanager
def agents(
    place: Place, name: str, *words: object, torchrun: tuple[str, ...] = (), first_hosts: bool = False, nodes: int = 2
) -> Iterator[Agents]:
    """`first_hosts`: the first agent hosts the store, not whichever is first. `nodes`: the number of agents."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--nnodes", f"{nodes}", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command = (
        *TORCHRUN,
        *options,
        "--rdzv-id",
        name,
        *torchrun,
        "build/tiny/train.py",
        "--out",
        name,
        *map(str, words),
    )
    started = Agents([], place.folder, name, command)
    try:
        started.start_another()
        if first_hosts:
            wait_for(lambda: _is_listened_on(endpoint), "the store of the first agent")
        if nodes == 2:
            started.start_another()
        yield started
    finally:
        for pid in (*started.ranks().values(), *(agent.pid for agent in started.processes)):
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        for agent in started.processes:
            progress.end(agent)


def check_equals_straight(place: Place, name: str, last: int) -> None:
    theirs, straight = place.folder / name, place.folder / "straight"
    assert untimed(theirs) == untimed(straight)[:last]
    assert bits(saved(theirs, last - last % 3)) == bits(saved(straight, last - last % 3))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_ends_both_machines_by_name(place: Place, rank: int) -> None:
    """The watch ends the ranks of the other machine, which would otherwise wait half an hour for torch's timeout."""
    with agents(place, f"killed-{rank}", *FOREVER, "--hang-timeout", "none") as pair:
        pair.wait_for_step(BEGUN)
        os.kill(pair.ranks()[rank], signal.SIGKILL)
        assert pair.end() == [1, 1]
        for lines in pair.said("error: "):
            assert len(lines) == 1, "once for each machine"
            assert re.match(rf"error: rank {rank} failed during {ACTION}, step \d+: its process was killed", lines[0])


def test_stopping_one_machine_saves_and_the_run_resumes(place: Place) -> None:
    with agents(place, "stopped", *FOREVER) as pair:
        pair.wait_for_step(BEGUN)
        pair.processes[1].send_signal(signal.SIGTERM)
        pair.end()
        for lines in pair.said("stopped: "):
            assert len(lines) == 1 and re.fullmatch(r"stopped: rank \d received SIGTERM; go on with --resume", lines[0])
    last = rows(place.folder / "stopped")[-1]["step"]
    assert saved(place.folder / "stopped").step == last, "the last step is saved, whichever it was"
    last += 3 - last % 3  # a step with a validation in both runs
    assert last <= STRAIGHT, "the undisturbed run must be longer"
    with agents(place, "stopped", "--resume", "--steps", last) as pair:
        assert pair.end() == [0, 0]
    check_equals_straight(place, "stopped", last)


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_ranks_restarted_by_torchrun_resume(place: Place, transport: str) -> None:
    words = ("--steps", STRAIGHT, "--transport", transport)
    with agents(place, f"again-{transport}", *words, torchrun=("--max-restarts", "1")) as pair:
        pair.wait_for_step(BEGUN)
        first = pair.ranks()
        os.kill(first[2], signal.SIGKILL)
        assert pair.end() == [0, 0], pair.output(0)
        assert "torchrun started the ranks again: they go on from a checkpoint" in pair.output(0) + pair.output(1)
    theirs = place.folder / f"again-{transport}"
    assert [row["step"] for row in rows(theirs)] == list(range(1, STRAIGHT + 1))
    if transport == "memory":
        check_equals_straight(place, f"again-{transport}", STRAIGHT)


SPIKY = "health { spike { loss = 8, norm = 8, action = rollback }, window = 4, back = 2, most = 9 }"


def write_spiky_text(folder: Path) -> None:
    """Write text of few words with some unusual lines, on which the gradient is large."""
    folder.mkdir(parents=True)
    drawn = random.Random(1)
    words = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 7))) for _ in range(120)]
    for number in range(8):
        lines = [" ".join(drawn.choices(words, k=10)) for _ in range(100)]
        if number % 4 == 1:
            lines[40] = "QXZJKVWYBGPM" * 20
        (folder / f"{number}.py").write_text("\n".join(lines) + "\n", "utf-8")


def test_a_rollback_and_a_kill_change_no_bit(new_place: Callable[[], Place]) -> None:
    """Gradients of some samples spike: torchrun restarts the ranks, which roll back. Then all is killed and resumed.
    Events, rows and weights equal those of the same run under dsc's supervisor, without a kill."""
    place = new_place()
    write_spiky_text(place.folder / "corpus")
    settings = dict(FOUR_RANKS, pipeline=1, expert=1, schedule="1f1b", devices=2, model=DENSE)
    place.compile(dict(settings, rate="2e-2", more=SPIKY))
    words = ("--steps", 26)
    place.dsc("train", "build/tiny", "--out", "straight", *words)
    expected = events(place.folder / "straight", "bad_step")
    assert expected and all(event["action"] == "rollback" for event in expected)
    again, run_folder = ("--max-restarts", "9"), place.folder / "run"
    with agents(place, "run", *words, torchrun=again, nodes=1) as agent:
        wait_for(lambda: (run_folder / "health.json").exists(), "a rollback")
        wait_for(lambda: len(events(run_folder, "start")) > 1, "ranks that go back")
        assert agent.processes[0].poll() is None
        killed = [*agent.ranks().values()]
        agent.processes[0].kill()
        wait_for(lambda: all(map(is_gone, killed)), "the end of every rank")
    with agents(place, "run", *words, "--resume", torchrun=again, nodes=1) as agent:
        assert agent.end() == [0], agent.output(0)
    theirs, straight = place.folder / "run", place.folder / "straight"
    assert untimed(theirs) == untimed(straight) and bits(saved(theirs)) == bits(saved(straight))
    steps = [(event["step"], event["samples"], event["to"]) for event in events(theirs, "bad_step")]
    assert steps == [(event["step"], event["samples"], event["to"]) for event in expected]
    assert len(json.loads((theirs / "health.json").read_text("utf-8"))["rollbacks"]) == len(expected)


def test_a_second_run_in_the_folder_is_refused(place: Place) -> None:
    """Whichever way it is started; and the first goes on."""
    with agents(place, "one", *FOREVER) as pair:
        pair.wait_for_step(BEGUN)
        command = (*TORCHRUN, "--nproc-per-node", "4", "build/tiny/train.py", "--out", "one", "--resume", *FOREVER)
        done = run(command, 1, place.folder)
        assert done.stderr.count("error: another run is using one\n") == 1
        assert "exitcode  : 75" in done.stderr
        done = place.dsc("train", "build/tiny", "--out", "one", "--resume", *FOREVER, code=75)
        assert done.stderr.endswith("error: another run is using one\n")
        pair.wait_for_step(len(rows(place.folder / "one")) + 2)
        pair.processes[0].send_signal(signal.SIGTERM)
        pair.end()
    steps = [row["step"] for row in rows(place.folder / "one")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_killed_torchrun_takes_its_ranks_with_it(place: Place) -> None:
    with agents(place, "orphans", *FOREVER) as pair:
        pair.wait_for_step(BEGUN)
        assert len(pair.ranks()) == 4
        pair.processes[0].send_signal(signal.SIGKILL)
        assert pair.end() == [-signal.SIGKILL, 1]


def test_the_documented_setting_leaves_no_open_port(place: Place, tmp_path: Path) -> None:
    """With the setting of docs/torchrun.md, nothing listens outside loopback, including torchrun."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", str(tmp_path / "meeting"), "--rdzv-conf", "store_type=file")
    command = (*TORCHRUN, "--nproc-per-node", "4", *meeting, "build/tiny/train.py", "--out", "closed", *FOREVER)
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (place.folder / "closed.out").open("wb") as log:
        process = subprocess.Popen(command, cwd=place.folder, stdout=log, stderr=log, env=environment)
    pair = Agents([process], place.folder, "closed")
    try:
        wait_for(lambda: len(rows(place.folder / "closed")) >= 1, "the first step")
        addresses = {address for pid in (process.pid, *pair.ranks().values()) for address in listeners(pid)}
        process.send_signal(signal.SIGTERM)
        progress.end(process)
    finally:
        process.kill()
        progress.end(process)
    assert addresses == {"0100007F"}
    assert saved(place.folder / "closed").step == rows(place.folder / "closed")[-1]["step"]
