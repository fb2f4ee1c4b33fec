"""Memory that ranks of one machine share: pipes between two ranks, and sums over several.

Each rank creates one file in memory and publishes its address; the others map it. The writer copies a message in, the
reader copies it out, and a word counts the progress of each: no system call, no thread, no socket. A waiting rank spins
for a moment, then yields its core, then sleeps. The protocol needs stores to become visible in order, which x86
guarantees; other processors use gloo (`can_share`).
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.comm.transport import Shares, copy_rows, equal_shares, largest_of, sum_in_order, sum_parts
from runtime.system.machine import machine

WORD = 8  # bytes
LINE = 64  # bytes of a cache line; words of different ranks are on different lines
ENTRIES = 1 << 12  # most unread messages in a pipe
HEAP_BYTES = 1 << 30  # of a pipe; untouched pages take no memory
TOKEN, TOKEN_BYTES = "token", 16  # a part with random bytes that identify the file
SLOT_BYTES = 1 << 16  # of a rank, for sums of tensors outside the shared memory
SPIN_S, YIELD_S = 20e-6, 500e-6  # how long a waiting rank spins, and then yields, before it sleeps
SLEEPS_S = (50e-6, 1e-3)  # the shortest and the longest


class PeerTimeoutError(RuntimeError):
    """Another rank did not answer in time."""


def can_share() -> bool:
    """Whether this machine keeps the order of stores and has memory files."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


def wait_until(ready: Callable[[], bool], timeout_s: float, action: str) -> None:
    """Return as soon as `ready()` is true. PeerTimeoutError after `timeout_s`, which names the `action`."""
    if ready():
        return
    start = time.monotonic()
    sleep_s = SLEEPS_S[0]
    while not ready():
        waited = time.monotonic() - start
        if waited < SPIN_S:
            continue
        if waited < YIELD_S:
            os.sched_yield()
        elif waited < timeout_s:
            time.sleep(sleep_s)
            sleep_s = min(SLEEPS_S[1], 1.1 * sleep_s)
        else:
            raise PeerTimeoutError(f"{action}: no answer in {timeout_s:.0f} s")


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Address:
    """The address of a memory file for other processes, and the offsets of its parts."""

    machine: str
    pid: int
    descriptor: int
    size: int
    parts: Mapping[str, int]  # name → byte
    token: str  # the first bytes of the file, in hexadecimal digits


class SharedMemory:
    """A mapped memory file with named parts, of this rank or of another."""

    def __init__(self, mapped: mmap.mmap, parts: Mapping[str, int]) -> None:
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._words = memoryview(mapped).cast("q")
        self._parts = parts

    def tensor(self, part: str, elements: int, dtype: torch.dtype, skip: int = 0) -> Tensor:
        """Return a view of `elements` elements, `skip` bytes into the part."""
        start = self._parts[part] + skip
        return self._bytes[start : start + elements * dtype.itemsize].view(dtype)

    def extent(self, part: str) -> int:
        """Return the bytes from the start of a part to the start of the next."""
        start = self._parts[part]
        return min((offset for offset in self._parts.values() if offset > start), default=len(self._bytes)) - start

    def words(self, part: str, count: int, skip: int = 0) -> memoryview:
        """Return a view of `count` int64 words."""
        start = (self._parts[part] + skip) // WORD
        return self._words[start : start + count]


def make_memory(sizes: Mapping[str, int]) -> tuple[SharedMemory, Address]:
    """Create a memory file of this process, with parts of these sizes in bytes. Untouched pages take no memory."""
    parts, size = {}, 0
    for name, extent in {TOKEN: TOKEN_BYTES, **sizes}.items():
        parts[name] = size
        size += -(-extent // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("dsc", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    mapped, token = mmap.mmap(descriptor, size), os.urandom(TOKEN_BYTES)
    mapped[:TOKEN_BYTES] = token
    return SharedMemory(mapped, parts), Address(machine(), os.getpid(), descriptor, size, parts, token.hex())


def map_memory(address: Address) -> SharedMemory:
    """Map another rank's memory. OSError if that is impossible, for example from another machine."""
    if address.machine != machine():
        raise OSError("another machine")
    descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        token = os.pread(descriptor, TOKEN_BYTES, 0)
        if os.fstat(descriptor).st_size != address.size or token.hex() != address.token:
            raise OSError("another file")
        return SharedMemory(mmap.mmap(descriptor, address.size), address.parts)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- pipes


class Heap:
    """Allocates blocks of a byte range, each at the lowest address where it fits, so that few pages are ever used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: list[tuple[int, int]] = []  # (start, end), ascending

    def take(self, size: int) -> int | None:
        """Allocate a block of `size` bytes. Return its start; None if there is no room."""
        size, start = -(-max(size, 1) // LINE) * LINE, 0
        for index, (begin, end) in enumerate(self._blocks):
            if begin - start >= size:
                self._blocks.insert(index, (start, start + size))
                return start
            start = end
        if self.size - start < size:
            return None
        self._blocks.append((start, start + size))
        return start

    def free(self, start: int) -> None:
        self._blocks = [block for block in self._blocks if block[0] != start]


# Words of a pipe's part: the number of written messages; then for each entry its start, size and stamp; then for each
# entry the number of the message that was last read from it, plus one. The heap follows.
_HEAD, _ENTRY = 0, 3
_ENTRIES_AT = LINE // WORD
_ACKS_AT = _ENTRIES_AT + _ENTRY * ENTRIES
_CONTROL_BYTES = -(-(_ACKS_AT + ENTRIES) * WORD // mmap.PAGESIZE) * mmap.PAGESIZE
PIPE_BYTES = _CONTROL_BYTES + HEAP_BYTES
IN_FLIGHT = 16  # sharded-state messages in a pipe: two gathers and two scatters of two slots, at each end


def pipe_bytes(message: int) -> int:
    """Return the bytes of a pipe with room for `IN_FLIGHT` messages of this size, so that no writer waits."""
    return _CONTROL_BYTES + max(HEAP_BYTES, IN_FLIGHT * (message + LINE))


class PipeWriter:
    """The writing end of a pipe, in this rank's memory. A message stays until it was read; `write` seldom waits."""

    def __init__(self, memory: SharedMemory, part: str, timeout_s: float) -> None:
        self._words = memory.words(part, _ACKS_AT + ENTRIES)
        self._heap = Heap(memory.extent(part) - _CONTROL_BYTES)
        self._heap_bytes = memory.tensor(part, self._heap.size, torch.uint8, _CONTROL_BYTES)
        self._unread: deque[tuple[int, int]] = deque()  # (message, start)
        self._written = 0
        self._timeout_s, self._part = timeout_s, part

    def write(self, pieces: Sequence[Tensor], stamp: int) -> None:
        """Copy pieces into the pipe as one message: rows of one tensor, or one tensor."""
        size = sum(piece.nbytes for piece in pieces)
        assert size <= self._heap.size, f"{self._part}: a message of {size} bytes"
        self._reclaim()
        start = self._heap.take(size) if len(self._unread) < ENTRIES else None
        while start is None:
            wait_until(self._reclaim, self._timeout_s, f"room in {self._part}")
            start = self._heap.take(size)
        if size:
            copy_rows([_rows_in(self._heap_bytes[start : start + size], pieces[0])], pieces)
        entry = _ENTRIES_AT + _ENTRY * (self._written % ENTRIES)
        self._words[entry], self._words[entry + 1], self._words[entry + 2] = start, size, stamp
        self._unread.append((self._written, start))
        self._written += 1
        self._words[_HEAD] = self._written

    def _reclaim(self) -> bool:
        """Free the messages that were read. Return whether there were any."""
        unread: deque[tuple[int, int]] = deque()
        for message, start in self._unread:
            if self._words[_ACKS_AT + message % ENTRIES] == message + 1:
                self._heap.free(start)
            else:
                unread.append((message, start))
        is_freed = len(unread) < len(self._unread)
        self._unread = unread
        return is_freed


class PipeReader:
    """The reading end of a pipe, in the writer's memory. Messages are numbered in the order of writing."""

    def __init__(self, memory: SharedMemory, part: str, timeout_s: float) -> None:
        self._words = memory.words(part, _ACKS_AT + ENTRIES)
        self._heap_bytes = memory.tensor(part, memory.extent(part) - _CONTROL_BYTES, torch.uint8, _CONTROL_BYTES)
        self._timeout_s = timeout_s

    def read(self, message: int, places: Sequence[Tensor], action: str) -> int:
        """Wait for a message and copy it to the places of its pieces. Return its stamp."""
        wait_until(lambda: self._words[_HEAD] > message, self._timeout_s, action)
        entry = _ENTRIES_AT + _ENTRY * (message % ENTRIES)
        start, size, stamp = self._words[entry : entry + _ENTRY]
        expected = sum(place.nbytes for place in places)
        if size != expected:
            raise RuntimeError(f"{action}: {size} bytes were sent, {expected} are expected")
        if size:
            copy_rows(places, [_rows_in(self._heap_bytes[start : start + size], places[0])])
        self._words[_ACKS_AT + message % ENTRIES] = message + 1
        return int(stamp)


def _rows_in(block: Tensor, like: Tensor) -> Tensor:
    """View the bytes of a block as rows like those of a tensor."""
    return block.view(like.dtype).view(-1, *like.shape[1:])


# ---------------------------------------------------------------- sums


@dataclass
class Circle:
    """A barrier and sums over some ranks. `memories`: of all ranks, in the same order on each; this rank is `index`."""

    memories: Sequence[SharedMemory]
    index: int
    part: str  # has the word of the barrier, and a slot for small tensors
    timeout_s: float
    _met: int = 0
    _words: list[memoryview] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._words = [memory.words(self.part, 1) for memory in self.memories]

    def meet(self, action: str) -> None:
        """Return when all ranks have arrived."""
        self.await_all(self.arrive(), action)

    def arrive(self) -> int:
        """Arrive at the next meeting without waiting. Return its number."""
        self._met += 1
        self._words[self.index][0] = self._met
        return self._met

    def await_all(self, meeting: int, action: str) -> None:
        """Return when all ranks have arrived at this meeting or a later one."""
        for words in self._words:
            wait_until(lambda words=words: words[0] >= meeting, self.timeout_s, action)  # type: ignore[misc]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """Sum a small tensor over all ranks in their order, so that results are bit-identical, or take the maximum."""
        assert tensor.nbytes <= SLOT_BYTES and tensor.is_contiguous(), (tensor.nbytes, tensor.stride())
        slots = [memory.tensor(self.part, tensor.numel(), tensor.dtype, LINE) for memory in self.memories]
        slots[self.index].copy_(tensor.view(-1))
        self.meet("sum")
        total = largest_of(slots) if largest else sum_in_order(slots)
        self.meet("sum was read")
        tensor.view(-1).copy_(total)

    def start_reduce(self, part: str, elements: int, dtype: torch.dtype, owned: Shares = ()) -> PendingAllReduce:
        """Announce that this rank's tensor in this part of its memory is ready to be summed with the others'.

        `owned`: the shares of all ranks, if each rank needs the sums of its own share alone.
        """
        return PendingAllReduce(
            self, self.arrive(), [memory.tensor(part, elements, dtype) for memory in self.memories], owned
        )

    def sum_parts(self, of_each: Sequence[Tensor], owned: Shares) -> None:
        """Sum the tensors of all ranks: each rank sums its share, then copies the shares of the others."""
        mine = of_each[self.index]
        shares = owned or equal_shares(mine.numel(), len(self.memories))
        for share in shares[self.index]:
            sum_parts([tensor[share] for tensor in of_each], mine[share])
        self.meet("sums of gradients")
        if not owned:
            self._take(of_each, shares)

    def gather_parts(self, part: str, elements: int, dtype: torch.dtype, shares: Shares) -> None:
        """All-gather the shares of a tensor that is in this part of each memory."""
        of_each = [memory.tensor(part, elements, dtype) for memory in self.memories]
        self.meet("weights")
        self._take(of_each, shares)

    def _take(self, of_each: Sequence[Tensor], shares: Shares) -> None:
        for owner, share in enumerate(shares):
            if owner != self.index:
                for part in share:
                    of_each[self.index][part].copy_(of_each[owner][part])
        self.meet("shares were read")


@dataclass(frozen=True)
class PendingAllReduce:
    """A pending sum of one tensor `of_each` rank. The tensors are ready at a meeting; `wait` computes the sum."""

    circle: Circle
    meeting: int
    of_each: Sequence[Tensor]
    owned: Shares

    def wait(self) -> None:
        self.circle.await_all(self.meeting, "gradients")
        self.circle.sum_parts(self.of_each, self.owned)


CIRCLE_BYTES = LINE + SLOT_BYTES
