"""Start-up of real ranks: the channels that they open, in which order, and which rank is named if one is missing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from runtime.comm.collective import name_of
from runtime.comm.connect import Endpoint, Transport
from runtime.comm.transport import Channel, Links, WantedChannels
from runtime.contract import Mesh, Opening
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.system.outcome import Outcome
from tests.progress import PATIENCE_S
from tests.runtime.processes import wait_for

# Two pipeline ranks with an expert group of two each; experts at a place of the group have two holders.
WANTED = WantedChannels(
    Mesh(pp=2, dp=2, ep=2, tp=1, cp=1),
    (
        Opening("edge", (0, 1), "each"),
        Opening("edge", (1, 0), "each"),
        Opening("expert", (0,), "block"),
        Opening("expert", (1,), "block"),
        Opening("reduce", (0, 1), "all"),
        Opening("reduce", (0, 1), "member"),
        Opening("world", (0, 1), "all"),
    ),
    {},
)
START_S = 3.0  # where a rank never comes
TRANSPORTS: tuple[Transport, ...] = ("memory", "gloo")


def connected(
    folder: Path,
    transport: Transport,
    before: Callable[[int, str], None] = lambda *_: None,
    after: Callable[[int, Links], None] = lambda *_: None,
    wanted: Callable[[int], WantedChannels] = lambda _: WANTED,
    start_s: float = PATIENCE_S,
) -> Outcome:
    """Ranks that connect. `before`: called by each rank with the channel it waits in; `after`: with its channels.
    `start_s`: how long they wait for each other once all exist."""

    def target(rank: int, world: int, board: Board) -> None:
        (folder / f"there_{rank}").touch()
        wait_for(lambda: all((folder / f"there_{other_rank}").exists() for other_rank in range(world)), "all ranks")

        def set_action(text: str) -> None:
            board.set_action(text)
            before(rank, text)

        endpoint = Endpoint(transport=transport, start_timeout_s=start_s, checked=True)
        after(rank, endpoint.connect(rank, wanted(rank), set_action))

    return launch(target, WANTED.mesh.world, folder=folder, supervision=Supervision(start_timeout_s=start_s))


def stops(at: int, text: str) -> Callable[[int, str], None]:
    def before(rank: int, action: str) -> None:
        if (rank, action) == (at, text):
            os.kill(os.getpid(), signal.SIGSTOP)

    return before


@pytest.mark.parametrize(
    ("transport", "text"),
    [("memory", "connect"), ("gloo", "connect"), ("gloo", "connect edge 3>1"), ("gloo", "connect reduce 0-3")],
)
def test_a_stopped_rank_is_named_within_seconds(tmp_path: Path, transport: Transport, text: str) -> None:
    """All others name it and the channel they wait in."""
    outcome = connected(tmp_path, transport, stops(3, text), start_s=START_S)
    assert (outcome.kind, outcome.exit_code, outcome.rank, outcome.action) == ("hung", 3, 3, text), str(outcome)
    assert outcome.reason == "its process is stopped, and the other ranks no longer wait for it"
    assert [waiter.rank for waiter in outcome.waiting] == [0, 1, 2]
    assert all(waiter.action.startswith("connect") for waiter in outcome.waiting), str(outcome)
    logs = "".join((tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(3))
    assert f"rank 3 did not come within {START_S:g} s: this rank waits in `connect" in logs or text != "connect"


def test_a_rank_that_dies_during_start_up_is_named(tmp_path: Path) -> None:
    def before(rank: int, action: str) -> None:
        if (rank, action) == (2, "connect expert 2-3"):
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = connected(tmp_path, "gloo", before)
    assert (outcome.kind, outcome.exit_code, outcome.rank) == ("failed", 1, 2), str(outcome)
    assert outcome.action == "connect expert 2-3" and "SIGKILL" in outcome.reason


def test_ranks_that_open_in_other_orders_do_not_hang(tmp_path: Path) -> None:
    """An order that the proof refuses: rank 1 begins with another edge than rank 0. Both give up and report it."""
    first, second, *rest = WANTED.openings
    reordered = WantedChannels(WANTED.mesh, (second, first, *rest), {})
    outcome = connected(tmp_path, "gloo", wanted=lambda rank: reordered if rank >= 2 else WANTED, start_s=START_S)
    assert outcome.kind == "failed" and "did not come within 3 s: this rank waits in `connect edge" in outcome.reason


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_creates_only_its_own_groups(tmp_path: Path, transport: Transport) -> None:
    """Six over gloo, and no group of torch.distributed. Sends one message per direction between the same two ranks."""

    def after(rank: int, links: Links) -> None:
        peer = (rank + 2) % 4
        forth, back = links.edge(rank, peer), links.edge(peer, rank)
        sent = forth.send("F0.0", torch.full((3,), float(rank)))
        assert back.post("F0.0", torch.empty(3)).wait().tolist() == [float(peer)] * 3
        sent.wait()
        total = torch.ones(1)
        links.sums.all_reduce(total)
        assert total.item() == 4
        (tmp_path / f"made_{rank}").write_text(json.dumps(group_sizes))

    group_sizes: list[int] = []
    gloo = dist.ProcessGroupGloo

    def counted(*args: Any) -> dist.ProcessGroupGloo:
        group_sizes.append(args[2])
        return gloo(*args)

    with mock.patch.object(dist, "ProcessGroupGloo", counted), mock.patch.object(dist, "new_group", None):
        outcome = connected(tmp_path, transport, after=after)
    assert outcome.ok, str(outcome)
    for rank in range(4):
        sizes = json.loads((tmp_path / f"made_{rank}").read_text())
        expected = [len(ranks) for kind, ranks in WANTED.channels(rank) if kind != "world"]
        assert sizes == (expected if transport == "gloo" else []) and len(expected) == 5


def test_names_of_channels() -> None:
    assert name_of(Channel("edge", (7, 3))) == "edge 7>3"
    assert name_of(Channel("expert", tuple(range(64, 128)))) == "expert 64-127"
    assert name_of(Channel("reduce", (0, 64, 1920, 1984))) == "reduce 0, 64, 1920, 1984"
    assert name_of(Channel("reduce", (0, 1, 2, 3, 8, 9))) == "reduce 0-3, 8-9"
