"""The time of messages and all-reduces between ranks of this machine: over shared memory, and over gloo.

    python -m benchmarks.transport [--ranks 2 4] [--out benchmarks/results/transport.txt]

Both transfer the same data alternately, in the same processes. Medians of wall-clock time and of CPU time of rank 0.
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
    parser.add_argument("--out", type=Path, help="also write the table to a file")
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
    """One line per kind of transfer."""

    def target(rank: int, world: int, board: Board) -> None:
        medians = measure_rank(rank, world)
        if rank == 0:
            (folder / "medians.json").write_text(json.dumps(medians), "utf-8")

    outcome = launch(target, world, folder=folder)
    if outcome.exit_code:
        raise SystemExit(str(outcome))
    medians = json.loads((folder / "medians.json").read_text("utf-8"))
    return [
        f"{TITLES[kind]:<44}{world:>6}{memory[0]:>9.2f}{gloo[0]:>9.2f}{memory[1]:>20.2f}{gloo[1]:>9.2f}"
        for kind, (memory, gloo) in medians.items()
    ]


def measure_rank(rank: int, world: int) -> dict[str, list[list[float]]]:
    """Kind → [[wall-clock, CPU] in ms over shared memory, the same over gloo]."""
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
    private, small = torch.zeros(GRADIENTS), torch.zeros(SMALL)
    partner = rank ^ 1
    medians: dict[str, list[list[float]]] = {}
    kinds: dict[str, Callable[[Links], Callable[[], object]]] = {
        "gradients": lambda links: (
            lambda: links.sums.start_reduce("flat", holders, flat if links is memory else private).wait()
        ),
        "message": lambda links: _there_and_back(links, rank, partner),
        "small": lambda links: lambda: links.sums.all_reduce(small),
    }
    for kind, calls_of in kinds.items():
        calls = [calls_of(memory), calls_of(gloo)]
        samples: list[list[tuple[float, float]]] = [[], []]
        for _ in range(ROUNDS[kind]):
            for call, times in zip(calls, samples, strict=True):
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                call()
                times.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - used)))
        medians[kind] = [[statistics.median(column) for column in zip(*times[2:], strict=True)] for times in samples]
    return medians


def _there_and_back(links: Links, rank: int, partner: int) -> Callable[[], object]:
    outward, back = links.edge(rank, partner), links.edge(partner, rank)
    sent, received = torch.ones(MESSAGE), torch.empty(MESSAGE)

    def call() -> None:
        if rank % 2 == 0:
            outward.send("there", sent).wait()
            back.post("back", received).wait()
        else:
            back.post("there", received).wait()
            outward.send("back", received).wait()

    return call


if __name__ == "__main__":
    raise SystemExit(main())
