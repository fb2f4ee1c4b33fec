"""Ranks of a test: `python -m tests.runtime.exchanges FOLDER WORLD` dispatches random rows over every transport,
compares the received rows with `expected`, which computes what every rank sent, and combines them again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from runtime.comm.connect import Endpoint, StagedSwap
from runtime.comm.exchange import Exchange, HostReads, RankExchange
from runtime.comm.transport import WantedChannels, raw
from runtime.contract import Mesh, Opening
from runtime.contract.names import ExchangeName
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch

COUNTS, DISPATCH, COMBINE = (ExchangeName.of(kind, "F0", 0, "L1") for kind in ("counts", "dispatch", "combine"))

ALIGNMENTS = (1, 8, 128)
E4M3 = torch.float8_e4m3fn
LOCAL = 3  # experts of a rank


def counts_of(seed: int, world: int) -> Tensor:
    """counts [source, expert]. Some experts and some sources have no rows; with seed 0, none has."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 40, (world, world * LOCAL), generator=generator)
    counts[torch.rand(counts.shape, generator=generator) < 0.3] = 0
    counts[:, seed % counts.shape[1]] = 0
    counts[seed % world] *= seed % 2
    return counts * min(seed, 1)


def given(seed: int, world: int, source: int) -> list[Tensor]:
    """The tensors that a source sends, sorted by expert: several dtypes and layouts, all rows different."""
    num_rows = int(counts_of(seed, world)[source].sum())
    generator = torch.Generator().manual_seed(1000 * seed + source)
    wide = torch.randn(num_rows, 5, generator=generator)
    eight = torch.randn(num_rows, 16, generator=generator).to(E4M3)
    scales = torch.rand(3, num_rows, generator=generator).t()  # column by column
    return [wide, torch.rand(num_rows, generator=generator) + 1, wide.to(torch.bfloat16), eight, scales]


def expected(seed: int, world: int, rank: int, alignment: int) -> tuple[list[Tensor], list[int]]:
    """The rows of a rank after a dispatch, and the end offsets of its experts."""
    counts, sources = counts_of(seed, world), [given(seed, world, source) for source in range(world)]
    rows: list[list[Tensor]] = [[] for _ in sources[0]]
    ends: list[int] = []
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        for source in range(world):
            first = int(counts[source, :expert].sum())
            for tensor_rows, tensor in zip(rows, sources[source], strict=True):
                tensor_rows.extend(tensor[first : first + int(counts[source, expert])].float())
        while len(rows[0]) % alignment:
            for tensor_rows, tensor in zip(rows, sources[0], strict=True):
                tensor_rows.append(torch.zeros(tensor.shape[1:]))
        ends.append(len(rows[0]))
    shapes = [tensor.shape[1:] for tensor in sources[0]]
    return [torch.stack(r) if r else torch.zeros(0, *s) for r, s in zip(rows, shapes, strict=True)], ends


def check(exchange: Exchange, alignment: int, seed: int, world: int, rank: int) -> None:
    tensors = given(seed, world, rank)
    exchange.start_counts(COUNTS, counts_of(seed, world)[rank])
    route, offsets_E = exchange.wait_counts(COUNTS)
    exchange.start(DISPATCH, tensors, route, forward=True)
    received = exchange.wait(DISPATCH)
    wanted, ends = expected(seed, world, rank, alignment)
    assert offsets_E.tolist() == ends and offsets_E.dtype == torch.int32
    assert route.num_rows == ends[-1] == len(received[0])
    for tensor, output, rows in zip(tensors, received, wanted, strict=True):
        assert output.dtype == tensor.dtype and torch.equal(output.float(), rows), (seed, output.dtype)
    assert all(output.is_contiguous() for output in received[:-1]) and received[-1].t().is_contiguous()
    for output in received:  # padding may hold anything when combining: it is not sent
        raw(output)[wanted[1] == 0] = 7
    exchange.start(COMBINE, received, route, forward=False)
    for tensor, back in zip(tensors, exchange.wait(COMBINE), strict=True):
        assert back.dtype == tensor.dtype and torch.equal(back.float(), tensor.float()), (seed, back.dtype)


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        kinds = ("expert", "block"), ("counts", "block"), ("world", "all")
        openings = tuple(Opening(kind, (0,), columns) for kind, columns in kinds if world > 1)  # type: ignore[arg-type]
        wanted = WantedChannels(Mesh(pp=1, dp=world, ep=world, tp=1, cp=1), openings, {})
        for transport in ("memory", "gloo"):
            links = Endpoint(transport=transport, timeout_s=60).connect(rank, wanted)  # type: ignore[arg-type]
            everyone, reads = tuple(range(world)), HostReads(torch.device("cpu"))
            rows, counts = links.swap("expert", everyone), links.swap("counts", everyone)
            assert rows is not None and counts is not None and rows is not counts
            for swaps in ((rows, counts), (StagedSwap(rows), StagedSwap(counts))):
                for alignment in ALIGNMENTS:
                    for seed in range(4):
                        check(RankExchange(*swaps, world, reads, alignment), alignment, seed, world, rank)

    outcome = launch(target, world, folder=folder, backend="gloo" if world > 1 else None)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
