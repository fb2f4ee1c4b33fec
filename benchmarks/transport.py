"""What messages and sums take between ranks of this machine: over memory they share, and over gloo.

    python -m benchmarks.transport [--ranks 2 4] [--out benchmarks/results/transport.txt]

Both do the same in turn, in the same processes. Medians, by the clock and of the processor of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.comm.connect import Endpoint
from runtime.comm.transport import Links, WantedChannels
from runtime.contract import Mesh, Opening
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch

GRADIENTS, MESSAGE, SMALL = 8_000_000, 1 << 18, 10  # float32 each
ROUNDS = {"gradients": 12, "message": 60, "small": 60}
TITLES = {
    "gradients": f"sum of {4 * GRADIENTS / 1e6:.0f} MB over all ranks",
    "message": f"message of {4 * MESSAGE / 2**20:.0f} MiB to a neighbour and back",
    "small": f"sum of {SMALL} numbers over all ranks",
}
CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, help="write the table to a file, too")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {cores} cores", ""]
    lines += [f"{'ms':<44}{'ranks':>6}{'memory':>9}{'gloo':>9}{'processor: memory':>20}{'gloo':>9}"]
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            lines += measured(world, Path(folder))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0


def measured(world: int, folder: Path) -> list[str]:
    """A line for each kind of transfer."""

    def rank_(rank: int, world: int, board: Board) -> None:
        found = of_rank(rank, world)
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found), "utf-8")

    outcome = launch(rank_, world, folder=folder)
    if outcome.exit_code:
        raise SystemExit(str(outcome))
    found = json.loads((folder / "found.json").read_text("utf-8"))
    return [
        f"{TITLES[kind]:<44}{world:>6}{of[0][0]:>9.2f}{of[1][0]:>9.2f}{of[0][1]:>20.2f}{of[1][1]:>9.2f}"
        for kind, of in found.items()
    ]


def of_rank(rank: int, world: int) -> dict[str, list[list[float]]]:
    """Kind → [clock, processor] in ms, over memory and over gloo."""
    holders = tuple(range(world))
    ring = [(a, b) for a, b in zip(holders, (*holders[1:], 0), strict=True)]
    edges = sorted({*ring, *((b, a) for a, b in ring)})
    openings = [Opening("edge", edge, "each") for edge in edges]
    openings += [Opening("reduce", holders, "all"), Opening("world", holders, "all")]
    mesh = Mesh(pp=world, dp=1, ep=1, tp=1, cp=1)
    wanted = WantedChannels(mesh, tuple(openings), {"flat": (holders, 4 * GRADIENTS)})
    memory: Links = Endpoint(CPU, "memory", 60.0).connect(rank, wanted)
    gloo: Links = Endpoint(CPU, "gloo", 60.0).connect(rank, wanted)
    flat = memory.flat("flat", GRADIENTS, torch.float32)
    assert flat is not None
    mine, small = torch.zeros(GRADIENTS), torch.zeros(SMALL)
    partner = rank ^ 1
    found: dict[str, list[list[float]]] = {}
    kinds: dict[str, Callable[[Links], Callable[[], object]]] = {
        "gradients": lambda links: (
            lambda: links.sums.start_reduce("flat", holders, flat if links is memory else mine).wait()
        ),
        "message": lambda links: _there_and_back(links, rank, partner),
        "small": lambda links: lambda: links.sums.all_reduce(small),
    }
    for kind, calls_of in kinds.items():
        calls = [calls_of(memory), calls_of(gloo)]
        taken: list[list[tuple[float, float]]] = [[], []]
        for _ in range(ROUNDS[kind]):
            for call, times in zip(calls, taken, strict=True):
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                call()
                times.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - used)))
        found[kind] = [[statistics.median(column) for column in zip(*times[2:], strict=True)] for times in taken]
    return found


def _there_and_back(links: Links, rank: int, partner: int) -> Callable[[], object]:
    out, back = links.edge(rank, partner), links.edge(partner, rank)
    sent, received = torch.ones(MESSAGE), torch.empty(MESSAGE)

    def call() -> None:
        if rank % 2 == 0:
            out.send("there", sent).wait()
            back.post("back", received).wait()
        else:
            back.post("there", received).wait()
            out.send("back", received).wait()

    return call


if __name__ == "__main__":
    raise SystemExit(main())
