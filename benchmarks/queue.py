"""The time of a launch that gets fewer SMs than it has programs, by how tiles are assigned to programs:
`python -m benchmarks.queue`.

A simulation of programs that each hold an SM until they end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from compiler.emit.kernels.kernel import LEGS
from compiler.emit.kernels.linear_fp8 import CLOCKS, rows_by_weight

PROGRAMS = 112  # of 132 SMs, 20 are kept for communication
SHOWN = (("legs", 0), ("strides", 8), ("legs", 8))  # columns: how tiles are handed out, SMs that communication takes
CLOCK_HZ = 1.755e9  # of an H100
DRAW_S = 1.3e-6  # time to draw a ticket (a round trip to L2, a barrier, the first loads): an assumption

# Products of DeepSeek-V3 in E4M3: (rows, columns of the result, terms).
PRODUCTS = {
    "keys and values up": (4096, 32768, 512),
    "queries up": (4096, 24576, 1536),
    "queries down": (4096, 1536, 7168),
    "out-projection": (4096, 7168, 16384),
    "experts up": (32768, 4096, 7168),
}


def strides(tiles: int, programs: int) -> list[int]:
    """Number of tiles per program: program p has tiles p, p + programs, …"""
    return [len(range(program, tiles, programs)) for program in range(programs)]


def legs(tiles: int, programs: int, most: int = LEGS) -> list[range]:
    """The tiles of each ticket, in the order of drawing, as in compiler/emit/kernels/queue.j2."""
    rounds, tickets = -(-tiles // programs), []
    for leg in range(min(most, rounds.bit_length())):
        first = rounds - (rounds >> leg)
        end = rounds - (rounds >> leg + 1 if leg + 1 < most else 0)
        tickets += [range(first * programs + lane, min(end * programs, tiles), programs) for lane in range(programs)]
    return tickets


def time_of(shares: Sequence[int], sms: int, tile: float = 1.0, draw: float = 0.0) -> float:
    """The time when the last share ends, if each goes to the first free SM. A draw precedes each share."""
    free = [0.0] * sms
    for share in shares:
        heapq.heapreplace(free, free[0] + (draw + share * tile if share else 0.0))
    return max(free)


def times(tiles: int, tile: float, taken: int) -> dict[str, float]:
    """Seconds of a launch of PROGRAMS programs, by how tiles are assigned."""
    sms = PROGRAMS - taken
    return {
        "strides": time_of(strides(tiles, PROGRAMS), sms, tile),
        "tile by tile": time_of([1] * tiles, sms, tile, DRAW_S),
        "legs": time_of([len(leg) for leg in legs(tiles, PROGRAMS)], sms, tile, DRAW_S),
    }


def size_of(rows: int, out: int, inner: int, gathered: bool) -> tuple[int, float]:
    """(tiles, seconds per tile) of a product, by the clock model that chooses its launch."""
    launch = rows_by_weight(out, gathered)
    columns = int(launch["WIDE"]) + int(launch["NARROW"])
    tiles = -(-rows // int(launch["BLOCK_R"])) * -(-out // columns)
    return tiles, -(-inner // 128) * CLOCKS[columns] / CLOCK_HZ


def section() -> str:
    """The results, as a table."""
    lines = ["| product | tiles | µs a tile | " + " | ".join(f"{way}, −{n}" for way, n in SHOWN) + " |"]
    lines.append("|---|" + "--:|" * (2 + len(SHOWN)))
    for name, shape in PRODUCTS.items():
        tiles, tile = size_of(*shape, gathered=name.startswith("experts"))
        full_s = times(tiles, tile, 0)["strides"]
        cells = [f"{times(tiles, tile, num_sms)[way] / full_s:.2f}" for way, num_sms in SHOWN]
        lines.append(f"| {name} | {tiles:,} | {tile * 1e6:.1f} | " + " | ".join(cells) + " |")
    return f"{TEXT}\n" + "\n".join(lines) + "\n"


TEXT = f"""\
Programs of products and attention draw their tiles from a queue: a ticket is one part of one of {LEGS} legs, and each
leg has half of the tiles that are left. With fixed shares (strides), programs that find no SM wait until others end.

Times relative to strides with all {PROGRAMS} SMs. −8: communication takes 8 of these SMs. A draw is assumed to take
{DRAW_S * 1e6:.1f} µs.
"""


if __name__ == "__main__":
    print(section())
