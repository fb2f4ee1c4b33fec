"""Memory shared by ranks: pipes and sums, in threads that map each other's memory as processes do."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.comm import memory, transport
from runtime.comm.memory import (
    CIRCLE_BYTES,
    ENTRIES,
    PIPE_BYTES,
    Circle,
    Heap,
    PeerTimeoutError,
    PipeReader,
    PipeWriter,
    SharedMemory,
    equal_shares,
    make_memory,
    map_memory,
)
from runtime.comm.transport import WantedChannels
from runtime.contract import Mesh, Opening
from tests.progress import PATIENCE_S

WAIT_S = PATIENCE_S


def pipe(timeout_s: float = WAIT_S) -> tuple[PipeWriter, PipeReader]:
    """Both ends of a pipe; the reader has a separate mapping."""
    mine, address = make_memory({"first": 100, "pipe": PIPE_BYTES})
    return PipeWriter(mine, "pipe", timeout_s), PipeReader(map_memory(address), "pipe", timeout_s)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=60))
def test_blocks_of_a_heap_never_overlap_and_use_the_lowest_space(moves: list[tuple[bool, int]]) -> None:
    heap, blocks = Heap(4096), dict[int, int]()
    for is_free, size in moves:
        if is_free and blocks:
            start = sorted(blocks)[size % len(blocks)]
            del blocks[start]
            heap.free(start)
            continue
        extent = -(-max(size, 1) // 64) * 64
        free = [
            offset
            for offset in range(0, 4096 - extent + 1, 64)
            if all(offset + extent <= start or offset >= start + length for start, length in blocks.items())
        ]
        assert heap.take(size) == (free[0] if free else None)
        if free:
            blocks[free[0]] = extent


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_messages_arrive_whole_in_any_order_of_reads(sizes: list[int], order: random.Random) -> None:
    writer, reader = pipe()
    sent = [torch.randint(0, 1 << 30, (size,)) for size in sizes]
    for stamp, tensor in enumerate(sent):
        writer.write([tensor], stamp)
    for message in order.sample(range(len(sent)), len(sent)):
        out = torch.empty_like(sent[message])
        assert reader.read(message, [out], "it") == message
        assert torch.equal(out, sent[message])


def test_a_pipe_reuses_its_lowest_blocks_and_outlives_its_entries() -> None:
    writer, reader = pipe()
    out = torch.empty(64, dtype=torch.int64)
    highest = 0
    for message in range(2 * ENTRIES + 3):
        writer.write([torch.full((64,), message)], message)
        highest = max(highest, writer._heap._blocks[-1][1])
        reader.read(message, [out], "it")
        assert out[0] == message
    assert highest == 512, "one message at a time takes the place of one"


def test_the_ends_of_a_pipe_run_at_their_own_pace() -> None:
    writer, reader = pipe()
    count = 3000

    def write() -> None:
        for message in range(count):
            writer.write([torch.full((1 + message % 700,), message)], message)

    def read() -> int:
        right = 0
        for message in range(count):
            out = torch.empty(1 + message % 700, dtype=torch.int64)
            reader.read(message, [out], "it")
            right += bool((out == message).all())
        return right

    with ThreadPoolExecutor() as threads:
        writing, reading = threads.submit(write), threads.submit(read)
        assert reading.result() == count and writing.result() is None


def test_a_pipe_holds_all_messages_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that write before they read do not wait, however large the tensor is."""
    monkeypatch.setattr(memory, "HEAP_BYTES", 4096)
    memory_of_writer, address = make_memory({"first": 100, "pipe": memory.pipe_bytes(80_000), "last": 100})
    writer, reader = PipeWriter(memory_of_writer, "pipe", 0.05), PipeReader(map_memory(address), "pipe", 0.05)
    sent = [torch.full((10_000,), float(value), dtype=torch.float64) for value in range(memory.IN_FLIGHT)]
    for message in sent:
        writer.write([message], 7)
    for number, message in enumerate(sent):
        out = torch.empty_like(message)
        assert reader.read(number, [out], "it") == 7 and torch.equal(out, message)


def test_a_timeout_names_the_awaited_message() -> None:
    _, reader = pipe(timeout_s=0.05)
    with pytest.raises(PeerTimeoutError, match=r"recv F0\.1: no answer in 0 s"):
        reader.read(0, [torch.empty(1)], "recv F0.1")


def test_a_message_of_another_size_is_refused() -> None:
    writer, reader = pipe()
    writer.write([torch.zeros(3)], 0)
    with pytest.raises(RuntimeError, match=r"recv it: 12 bytes were sent, 16 are expected"):
        reader.read(0, [torch.empty(4)], "recv it")


def test_memory_of_another_machine_or_process_that_ended_is_refused() -> None:
    _, address = make_memory({"part": 8})
    with pytest.raises(OSError, match="another machine"):
        map_memory(replace(address, machine="elsewhere"))
    with pytest.raises(OSError, match="No such"):
        map_memory(replace(address, pid=2**22 + 1))
    with pytest.raises(OSError, match="another file"):
        map_memory(replace(address, size=address.size + 1))


def test_mapping_memory_leaves_no_other_file_open() -> None:
    """A refused attempt leaves no file open either."""
    shared, address = make_memory({"part": 8})
    before = len([*Path("/proc/self/fd").iterdir()])
    mapped = [map_memory(address) for _ in range(3)]
    with pytest.raises(OSError, match="another file"):
        map_memory(replace(address, token="00"))
    shared.tensor("part", 1, torch.int64).fill_(7)
    assert [mapping.tensor("part", 1, torch.int64).item() for mapping in mapped] == [7, 7, 7]
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + len(mapped), "each map has its own"


# ---------------------------------------------------------------- sums


def circles(members: int, elements: int) -> list[Circle]:
    """Circles of members that each map the memories of the others."""
    memories = [make_memory({"world": CIRCLE_BYTES, "flat": 8 * elements}) for _ in range(members)]

    def seen_by(member: int) -> list[SharedMemory]:
        return [
            own_memory if index == member else map_memory(address)
            for index, (own_memory, address) in enumerate(memories)
        ]

    return [Circle(seen_by(member), member, "world", WAIT_S) for member in range(members)]


def on_all(each: list[Circle], work: Callable[[Circle], None]) -> None:
    with ThreadPoolExecutor(len(each)) as threads:
        for done in [threads.submit(work, circle) for circle in each]:
            done.result()


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, 5, 12, 70_001])
def test_every_member_has_the_same_sum(monkeypatch: pytest.MonkeyPatch, members: int, elements: int) -> None:
    monkeypatch.setattr(transport, "BLOCK", 1000)
    all_circles = circles(members, elements)
    flats = [circle.memories[circle.index].tensor("flat", elements, torch.float64) for circle in all_circles]
    for round_ in range(3):
        addends = [torch.randn(elements, dtype=torch.float64) for _ in all_circles]
        for flat, values in zip(flats, addends, strict=True):
            flat.copy_(values)
        on_all(all_circles, lambda circle: circle.start_reduce("flat", elements, torch.float64).wait())
        expected = sum(addends[1:], addends[0].clone())  # in the members' order
        assert all(torch.equal(flat, expected) for flat in flats), round_
        small = [values[:7].clone() for values in addends]
        on_all(all_circles, lambda circle, small=small: circle.all_reduce(small[circle.index]))  # type: ignore[misc]
        assert all(torch.equal(values, expected[:7]) for values in small)


@pytest.mark.parametrize("extents", [(5, 5), (7, 0, 4), (70_001, 3, 12)])
def test_an_owner_has_the_sums_of_only_its_share(extents: tuple[int, ...]) -> None:
    """They are bit-identical to those of a sum on all ranks; shares of others do not change."""
    elements, bounds = sum(extents), [sum(extents[:i]) for i in range(len(extents) + 1)]
    shares = tuple((slice(a, b),) if a < b else () for a, b in pairwise(bounds))
    all_circles = circles(len(extents), elements)
    flats = [circle.memories[circle.index].tensor("flat", elements, torch.float32) for circle in all_circles]
    addends = [torch.randn(elements) for _ in all_circles]
    for flat, values in zip(flats, addends, strict=True):
        flat.copy_(values)
    on_all(all_circles, lambda circle: circle.start_reduce("flat", elements, torch.float32, shares).wait())
    for rank, (flat, values) in enumerate(zip(flats, addends, strict=True)):
        expected = values.clone()
        for part in shares[rank]:
            expected[part] = sum([addend[part] for addend in addends[1:]], addends[0][part].clone())
        assert torch.equal(flat, expected), rank


@pytest.mark.parametrize("members", [2, 3])
def test_shares_are_gathered(members: int) -> None:
    elements = 4 * members
    all_circles = circles(members, elements)
    flats = [circle.memories[circle.index].tensor("flat", elements, torch.float32) for circle in all_circles]
    for rank, flat in enumerate(flats):
        flat.fill_(-1.0)
        flat[4 * rank : 4 * rank + 4] = rank
    shares = equal_shares(elements, members)
    on_all(all_circles, lambda circle: circle.gather_parts("flat", elements, torch.float32, shares))
    expected = torch.arange(members).repeat_interleave(4).float()
    assert all(torch.equal(flat, expected) for flat in flats)


def test_unused_memory_takes_no_space() -> None:
    openings = tuple(Opening("edge", edge, "each") for edge in ((0, 1), (1, 0)))
    wanted = WantedChannels(Mesh(pp=4, dp=2, ep=2, tp=1, cp=1), (*openings, Opening("expert", (0,), "block")), {})
    assert len(wanted.member_ranks(0, "edge")) == 2 and wanted.member_ranks(0, "expert") == [(0, 1)]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096

    before = resident()
    pipes = [make_memory({"pipe": PIPE_BYTES}) for _ in range(8)]
    assert len(pipes) == 8 and resident() - before < PIPE_BYTES / 100
