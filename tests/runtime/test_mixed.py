"""Channels of ranks on several machines: the transport of each, and sums with the same bits over any transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm import connect, memory
from runtime.comm.connect import Transport, channels_of, transport_in_use
from runtime.comm.transport import Carrier, Channel, Links, Parts, Shares, WantedChannels, equal_shares
from tests.runtime.test_start import WANTED, connected

ELEMENTS = 1001  # no multiple of the ranks
DTYPES = (torch.float32, torch.bfloat16)
UNEVEN = (
    (slice(10, 20), slice(0, 10)),
    (slice(20, 21),),
    (),
    (slice(21, 600), slice(900, ELEMENTS), slice(600, 900)),
)
# The machine of each rank. Ranks 0 and 1 are one expert group, 2 and 3 the other; messages go between 0 and 2, 1 and 3.
MACHINES = {"by expert group": "aabb", "by pipeline": "abab", "three and one": "aaab", "alone": "abcd", "one": "aaaa"}


def values(rank: int, dtype: torch.dtype) -> Tensor:
    """Values of very different magnitudes, so that the bits of a sum depend on its order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(ELEMENTS, generator=generator) * 10 ** (4 * torch.rand(ELEMENTS, generator=generator))).to(
        dtype
    )


def in_order(holders: Sequence[int], dtype: torch.dtype) -> Tensor:
    return reduce(torch.add, [values(rank, dtype) for rank in holders])


def flats() -> dict[str, tuple[tuple[int, ...], int]]:
    """A flat tensor for each set of holders and dtype, named by them."""
    holders = [
        ranks for opening in WANTED.openings if opening.kind == "reduce" for ranks in opening.channels(WANTED.mesh)
    ]
    return {
        f"{ranks} {dtype}": (ranks, ELEMENTS * dtype.itemsize) for ranks in dict.fromkeys(holders) for dtype in DTYPES
    }


def all_wanted() -> WantedChannels:
    flat_sizes = flats()
    parted = {Channel("reduce", holders): size for holders, size in flat_sizes.values()}
    return WantedChannels(WANTED.mesh, WANTED.openings, flat_sizes, parted)


def check_parts(rank: int, parts: Parts, holders: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that holders of a sharded tensor get the sums of their shards, and then the whole tensor."""
    even = ELEMENTS // 4 * 4
    flat, expected = values(rank, dtype)[:even].clone(), in_order(holders, dtype)[:even]
    parts.scatter("sums", flat, flat).wait()
    mine = holders.index(rank)
    assert torch.equal(flat.chunk(len(holders))[mine], expected.chunk(len(holders))[mine])
    parts.gather("whole", flat).wait()
    assert torch.equal(flat, expected)


def check_sums(rank: int, links: Links) -> None:
    """Check that all sums of a rank are bit-identical to sums in the order of ranks."""
    parts = {ranks: links.parts("reduce", ranks) for kind, ranks in links.carriers if kind == "reduce"}
    for dtype in DTYPES:
        total = values(rank, dtype).view(7, 143)
        links.sums.all_reduce(total)
        assert torch.equal(total.view(-1), in_order(range(4), dtype)), dtype
        for holders in parts:
            name, expected = f"{holders} {dtype}", in_order(holders, dtype)
            check_parts(rank, parts[holders], holders, dtype)
            flat = links.flat(name, ELEMENTS, dtype)
            assert (flat is None) == (links.carriers[Channel("reduce", holders)] == "gloo")
            flat = torch.zeros(ELEMENTS, dtype=dtype) if flat is None else flat
            all_shares: tuple[Shares, ...] = (
                (),
                equal_shares(ELEMENTS, len(holders)),
                *([UNEVEN] if len(holders) == 4 else []),
            )
            for shares in all_shares:
                flat.copy_(values(rank, dtype))
                links.sums.start_reduce(name, holders, flat, shares).wait()
                for part in shares[holders.index(rank)] if shares else [slice(None)]:
                    assert torch.equal(flat[part], expected[part]), (name, part)
                if shares:
                    links.sums.gather(name, holders, flat, shares)
                assert torch.equal(flat, expected), name


def carriers(rank: int, machines: str) -> dict[tuple[str, tuple[int, ...]], Carrier]:
    """The expected transports of a rank's channels: memory if all ranks of the channel are on one machine."""
    return {
        (kind, ranks): "memory" if len({machines[member] for member in ranks}) == 1 else "gloo"
        for kind, ranks in WANTED.channels(rank)
    }


@pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)
def test_channels_inside_a_machine_share_memory(tmp_path: Path, machines: str) -> None:
    """The others have a communicator each, in the order of openings; messages, rows and sums are right over both."""
    group_sizes: list[int] = []
    gloo = dist.ProcessGroupGloo

    def counted(*args: Any) -> dist.ProcessGroupGloo:
        group_sizes.append(args[2])
        return gloo(*args)

    def before(rank: int, _: str) -> None:
        memory.machine = lambda: machines[rank]  # of this process, which is the rank's

    def after(rank: int, links: Links) -> None:
        expected = carriers(rank, machines)
        assert links.carriers == expected
        used = {*expected.values()}
        assert transport_in_use(links) == ("memory and gloo" if len(used) == 2 else used.pop())
        assert sum(map(len, channels_of(links).values())) == len(expected) == 6
        opened = [len(ranks) for (kind, ranks), carrier in expected.items() if carrier == "gloo" and kind != "world"]
        assert group_sizes == opened
        peer = (rank + 2) % 4
        forth, back = links.edge(rank, peer), links.edge(peer, rank)
        sent = forth.send("F0.0", torch.full((3,), float(rank)))
        assert back.post("F0.0", torch.empty(3)).wait().tolist() == [float(peer)] * 3
        sent.wait()
        check_sums(rank, links)
        (tmp_path / f"done_{rank}").write_text(json.dumps(sorted(used)))

    wanted = all_wanted()
    with mock.patch.object(dist, "ProcessGroupGloo", counted), mock.patch.object(memory, "machine", memory.machine):
        outcome = connected(tmp_path, "auto", before, after, lambda _: wanted)
    assert outcome.ok, str(outcome)
    assert all((tmp_path / f"done_{rank}").exists() for rank in range(4))


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_sums_have_the_bits_of_the_order_of_ranks(tmp_path: Path, transport: Transport) -> None:
    wanted = all_wanted()
    outcome = connected(tmp_path, transport, after=check_sums, wanted=lambda _: wanted)
    assert outcome.ok, str(outcome)


def test_unavailable_shared_memory_is_refused_if_requested(tmp_path: Path) -> None:
    def before(rank: int, _: str) -> None:
        memory.machine = lambda: "aaab"[rank]

    with mock.patch.object(memory, "machine", memory.machine):
        outcome = connected(tmp_path, "memory", before)
    assert outcome.kind == "failed"
    assert "ranks cannot share memory: rank 0 cannot map the memory of rank 3: another machine" in outcome.reason


def test_a_rank_that_may_not_open_the_memory_of_others_takes_gloo(tmp_path: Path) -> None:
    """Although it is on their machine. The others share memory, and agree with it on the transport of channels."""

    def refused(address: memory.Address) -> memory.SharedMemory:
        raise PermissionError(13, "Permission denied")

    def before(rank: int, _: str) -> None:
        if rank == 3:
            connect.map_memory = refused

    def after(rank: int, links: Links) -> None:
        assert links.carriers == carriers(rank, "aaab")
        check_sums(rank, links)

    wanted = all_wanted()
    with mock.patch.object(connect, "map_memory", connect.map_memory):
        outcome = connected(tmp_path, "auto", before, after, lambda _: wanted)
    assert outcome.ok, str(outcome)
