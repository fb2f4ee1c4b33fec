"""Memory that the ranks of one machine share: pipes between two of them, and sums over several.

Each rank makes one file in memory and says where it is; the others map it. A message is copied into the writer's part
and out of it by the reader, and a word says how far each has come: no system call, no thread, no socket. Who waits
spins for a moment, then leaves its core to others, then sleeps. That a word is seen after what it stands for is a
promise of x86; other processors take gloo (`can_share`).
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
LINE = 64  # bytes of a cache line, so that no word shares one with a word of another rank
ENTRIES = 1 << 12  # messages of a pipe that are not yet read
HEAP_BYTES = 1 << 30  # of a pipe; only what was ever used takes memory
TOKEN, TOKEN_BYTES = "token", 16  # a part of each file, of random bytes that tell it from every other
SLOT_BYTES = 1 << 16  # of a rank, for sums of tensors that are not shared
SPIN_S, YIELD_S = 20e-6, 500e-6  # how long a waiting rank spins, and then yields, before it sleeps
SLEEPS_S = (50e-6, 1e-3)  # the shortest and the longest


class PeerTimeoutError(RuntimeError):
    """Another rank did not come in time."""


def can_share() -> bool:
    """Whether this machine keeps the order of stores, and has files in memory."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


def wait_until(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return as soon as `ready()` holds."""
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
            raise PeerTimeoutError(f"{what}: no answer in {timeout_s:.0f} s")


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Address:
    """Where another process finds a file of memory, and where in it what lies."""

    machine: str
    pid: int
    descriptor: int
    size: int
    parts: Mapping[str, int]  # name → byte
    token: str  # what the file begins with, in hexadecimal digits


class SharedMemory:
    """A file of memory with named parts: this rank's own, or another rank's, mapped."""

    def __init__(self, mapped: mmap.mmap, parts: Mapping[str, int]) -> None:
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._words = memoryview(mapped).cast("q")
        self._parts = parts

    def tensor(self, part: str, elements: int, dtype: torch.dtype, skip: int = 0) -> Tensor:
        """A view of so many elements, `skip` bytes into the part."""
        start = self._parts[part] + skip
        return self._bytes[start : start + elements * dtype.itemsize].view(dtype)

    def extent(self, part: str) -> int:
        """Bytes from the start of a part to that of the next one."""
        start = self._parts[part]
        return min((other for other in self._parts.values() if other > start), default=len(self._bytes)) - start

    def words(self, part: str, count: int, skip: int = 0) -> memoryview:
        """A view of int64s."""
        start = (self._parts[part] + skip) // WORD
        return self._words[start : start + count]


def make_memory(sizes: Mapping[str, int]) -> tuple[SharedMemory, Address]:
    """Memory of this process with parts of so many bytes; untouched, it takes no room."""
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
    """Map another rank's memory. OSError where it cannot be reached, as from another machine."""
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
    """Blocks of a range of bytes, each at the lowest place where it fits, so that little of the range is ever used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: list[tuple[int, int]] = []  # (start, end), ascending

    def take(self, size: int) -> int | None:
        """Where a block of `size` bytes starts; None: there is no room."""
        size, start = -(-max(size, 1) // LINE) * LINE, 0
        for index, (at, end) in enumerate(self._taken):
            if at - start >= size:
                self._taken.insert(index, (start, start + size))
                return start
            start = end
        if self.size - start < size:
            return None
        self._taken.append((start, start + size))
        return start

    def free(self, start: int) -> None:
        """Give a block back."""
        self._taken = [block for block in self._taken if block[0] != start]


# Words of a pipe's part: how many messages were written; then of each entry where it is, its size and its stamp; then
# of each entry how many messages the reader had taken when it took this one, plus one. The heap follows.
_HEAD, _ENTRY = 0, 3
_ENTRIES_AT = LINE // WORD
_ACKS_AT = _ENTRIES_AT + _ENTRY * ENTRIES
_CONTROL_BYTES = -(-(_ACKS_AT + ENTRIES) * WORD // mmap.PAGESIZE) * mmap.PAGESIZE
PIPE_BYTES = _CONTROL_BYTES + HEAP_BYTES
IN_FLIGHT = 16  # messages of divided state in a pipe: of two slots two gathers and two scatters, at each of its ends


def pipe_bytes(message: int) -> int:
    """Bytes of a pipe in which so many messages of this size have room, so that no writer waits."""
    return _CONTROL_BYTES + max(HEAP_BYTES, IN_FLIGHT * (message + LINE))


class PipeWriter:
    """The writing end of a pipe, in memory of its own. A message stays until it was read; `write` seldom waits."""

    def __init__(self, memory: SharedMemory, part: str, timeout_s: float) -> None:
        self._words = memory.words(part, _ACKS_AT + ENTRIES)
        self._heap = Heap(memory.extent(part) - _CONTROL_BYTES)
        self._heap_bytes = memory.tensor(part, self._heap.size, torch.uint8, _CONTROL_BYTES)
        self._unread: deque[tuple[int, int]] = deque()  # (message, where)
        self._written = 0
        self._timeout_s, self._part = timeout_s, part

    def write(self, pieces: Sequence[Tensor], stamp: int) -> None:
        """Copy pieces in, one after another: rows of one tensor, or one tensor."""
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
        """Free what was read; whether anything was."""
        left: deque[tuple[int, int]] = deque()
        for message, start in self._unread:
            if self._words[_ACKS_AT + message % ENTRIES] == message + 1:
                self._heap.free(start)
            else:
                left.append((message, start))
        found = len(left) < len(self._unread)
        self._unread = left
        return found


class PipeReader:
    """The reading end, in the writer's memory. Messages have numbers, in the order in which they were written."""

    def __init__(self, memory: SharedMemory, part: str, timeout_s: float) -> None:
        self._words = memory.words(part, _ACKS_AT + ENTRIES)
        self._heap_bytes = memory.tensor(part, memory.extent(part) - _CONTROL_BYTES, torch.uint8, _CONTROL_BYTES)
        self._timeout_s = timeout_s

    def read(self, message: int, places: Sequence[Tensor], what: str) -> int:
        """Copy a message to the places of its pieces, once it is there; its stamp."""
        wait_until(lambda: self._words[_HEAD] > message, self._timeout_s, what)
        entry = _ENTRIES_AT + _ENTRY * (message % ENTRIES)
        start, size, stamp = self._words[entry : entry + _ENTRY]
        expected = sum(place.nbytes for place in places)
        if size != expected:
            raise RuntimeError(f"{what}: {size} bytes were sent, {expected} are expected")
        if size:
            copy_rows(places, [_rows_in(self._heap_bytes[start : start + size], places[0])])
        self._words[_ACKS_AT + message % ENTRIES] = message + 1
        return int(stamp)


def _rows_in(block: Tensor, like: Tensor) -> Tensor:
    """The bytes of a block as rows as those of a tensor."""
    return block.view(like.dtype).view(-1, *like.shape[1:])


# ---------------------------------------------------------------- sums


@dataclass
class Circle:
    """Ranks that meet: `memories` are theirs in one order that is the same on all of them, mine at `index`."""

    memories: Sequence[SharedMemory]
    index: int
    part: str  # of the words by which they meet, and of a slot for small tensors
    timeout_s: float
    _met: int = 0
    _words: list[memoryview] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._words = [memory.words(self.part, 1) for memory in self.memories]

    def meet(self, what: str) -> None:
        """Return when all have come."""
        self.await_all(self.come(), what)

    def come(self) -> int:
        """Come to the next meeting and go on; its number."""
        self._met += 1
        self._words[self.index][0] = self._met
        return self._met

    def await_all(self, meeting: int, what: str) -> None:
        """Return when all have come to a meeting, or to one behind it."""
        for words in self._words:
            wait_until(lambda words=words: words[0] >= meeting, self.timeout_s, what)  # type: ignore[misc]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """Sum a small tensor over all, in their order, so that all have the same to the bit, or take the largest."""
        assert tensor.nbytes <= SLOT_BYTES and tensor.is_contiguous(), (tensor.nbytes, tensor.stride())
        slots = [memory.tensor(self.part, tensor.numel(), tensor.dtype, LINE) for memory in self.memories]
        slots[self.index].copy_(tensor.view(-1))
        self.meet("sum")
        total = largest_of(slots) if largest else sum_in_order(slots)
        self.meet("sum was read")
        tensor.view(-1).copy_(total)

    def start_reduce(self, part: str, elements: int, dtype: torch.dtype, owned: Shares = ()) -> Summing:
        """Say that this rank's tensor in this part of its memory is to be summed with those of the others.

        `owned`: the shares of all ranks, where nobody needs those of others.
        """
        return Summing(self, self.come(), [memory.tensor(part, elements, dtype) for memory in self.memories], owned)

    def sum_parts(self, of_each: Sequence[Tensor], owned: Shares) -> None:
        """Sum tensors of all ranks, all there by now: each rank sums its share, then copies the others'."""
        mine = of_each[self.index]
        shares = owned or equal_shares(mine.numel(), len(self.memories))
        for share in shares[self.index]:
            sum_parts([each[share] for each in of_each], mine[share])
        self.meet("sums of gradients")
        if not owned:
            self._take(of_each, shares)

    def gather_parts(self, part: str, elements: int, dtype: torch.dtype, shares: Shares) -> None:
        """Give each rank the other ranks' shares of a tensor that lies in this part of each memory."""
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
class Summing:
    """A sum of tensors `of_each` rank of a circle, which come to one of its meetings. A core that waits sums them."""

    circle: Circle
    meeting: int
    of_each: Sequence[Tensor]
    owned: Shares

    def wait(self) -> None:
        self.circle.await_all(self.meeting, "gradients")
        self.circle.sum_parts(self.of_each, self.owned)


CIRCLE_BYTES = LINE + SLOT_BYTES
