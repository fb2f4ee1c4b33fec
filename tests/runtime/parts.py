"""Ranks of a test: `python -m tests.runtime.parts FOLDER WORLD` reduce-scatters and all-gathers flat tensors over every
transport, several at a time, and compares the results with the inputs of all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from runtime.comm.connect import Endpoint, StagedParts
from runtime.comm.transport import Channel, Parts, WantedChannels
from runtime.contract import Mesh, Opening
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch

PART = 70_001  # elements of a part: more than one block of a sum
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def given(member: int, world: int, dtype: torch.dtype, size: int) -> Tensor:
    """The flat tensor of one member."""
    generator = torch.Generator().manual_seed(1000 * member + size)
    return torch.randn(size * world, dtype=torch.float64, generator=generator).to(dtype)


def check(parts: Parts, world: int, rank: int) -> None:
    """Check that sums are bit-identical to sums in the order of the members, and that gathered parts are in place."""
    for dtype in DTYPES:
        for size in (1, PART):
            flats = [given(member, world, dtype, size) for member in range(world)]
            summed, gathered = flats[rank].clone(), torch.full_like(flats[rank], torch.nan)
            again, mine = flats[rank] * 2, slice(rank * size, (rank + 1) * size)
            room = torch.full_like(again, torch.nan)
            gathered[mine] = flats[rank][mine]
            started = [
                parts.scatter("one", summed, summed),
                parts.gather("two", gathered),
                parts.scatter("three", again, room),
            ]
            for work in started:
                work.wait()
            total = sum(flats[1:], flats[0].clone())
            assert torch.equal(summed[mine], total[mine]), (dtype, size)
            assert torch.equal(room[mine], 2 * total[mine]), (dtype, size)
            assert torch.equal(gathered, torch.cat([f[m * size : (m + 1) * size] for m, f in enumerate(flats)]))


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        openings = tuple(Opening(kind, (0,), "all") for kind in ("reduce", "world"))  # type: ignore[arg-type]
        everyone = tuple(range(world))
        wanted = WantedChannels(
            Mesh(pp=1, dp=world, ep=1, tp=1, cp=1), openings, {}, {Channel("reduce", everyone): 8 * PART}
        )
        for transport in ("memory", "gloo"):
            links = Endpoint(transport=transport, timeout_s=60).connect(rank, wanted)  # type: ignore[arg-type]
            parts = links.parts("reduce", everyone)
            for variant in (parts, StagedParts(parts)):
                check(variant, world, rank)

    outcome = launch(target, world, folder=folder, backend="gloo")
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
