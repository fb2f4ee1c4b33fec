"""A long computation in pieces: run by several processes, returned in order, and journaled to survive a kill.

A `Journal` is a file of consecutive results. Each has its sha256, so a partial result after a kill or a power loss is
ignored. Results depend on the piece alone, so results from a journal are bit-identical.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

from runtime.data.files import descriptor_of_regular

HEAD = struct.Struct("<Q32s")  # size of a result, sha256 of its number and its content
AHEAD = 2  # waiting pieces per worker
Item = TypeVar("Item")
Result = TypeVar("Result")


class Journal:
    """Results in a file, as a context manager. `about` identifies the computation: with another value the journal
    starts empty.

    Existing results are read first, with `next`. After the last one, new ones are added.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path = path
        self.num_found = 0  # results from an earlier process
        self._about = about.encode()
        self._number = 0

    def __enter__(self) -> Journal:
        self._stream = os.fdopen(descriptor_of_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b")
        if self.next() != self._about:
            self._cut(0)
            self.add(self._about)
        self.num_found = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stream.close()
        except OSError:  # unwritten data on a full disk, which `add` has reported
            if kind is None:
                raise

    def next(self) -> bytes | None:
        """Return the next result, or None after the last complete one. The rest of the file is cut off."""
        begin = self._stream.tell()
        head = self._stream.read(HEAD.size)
        if len(head) == HEAD.size:
            size, digest = HEAD.unpack(head)
            content = self._stream.read(size) if begin + size <= self._size() else b""
            if len(content) == size and digest == _digest(self._number, content):
                self._number += 1
                self.num_found += 1
                return content
        self._cut(begin)
        return None

    def add(self, content: bytes) -> None:
        """Append a result. OSError if the disk is full."""
        try:
            self._stream.write(HEAD.pack(len(content), _digest(self._number, content)) + content)
            self._stream.flush()
        except OSError as error:  # without a file name
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._number += 1

    def _cut(self, offset: int) -> None:
        self._stream.seek(offset)
        self._stream.truncate()
        if offset == 0:
            self._number = 0

    def _size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size


def _digest(number: int, content: bytes) -> bytes:
    return hashlib.sha256(b"%d\0" % number + content).digest()


def compute_with_journal(
    items: Iterable[Item], workers: Sequence[Callable[[Item], bytes]], journal: Journal, stop: Callable[[], None]
) -> Iterator[tuple[Item, bytes]]:
    """Yield each item with its result, in the order of items: from the journal as far as it has them, then computed by
    `in_order` and added to it."""
    remaining = iter(items)
    for item in remaining:
        if (saved := journal.next()) is None:
            remaining = chain([item], remaining)
            break
        yield item, saved
    for item, result in in_order(remaining, workers, stop):
        journal.add(result)
        yield item, result


def in_order(
    items: Iterable[Item], workers: Sequence[Callable[[Item], Result]], stop: Callable[[], None]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, in the order of items. Each worker is called in one thread at a time.

    Raises the error of the first item that has one. `stop` is called if the caller does not take all results; it must
    end running calls.
    """
    if len(workers) == 1:
        for item in items:
            yield item, workers[0](item)
        return
    idle: SimpleQueue[Callable[[Item], Result]] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def work(item: Item) -> Result:
        worker = idle.get()
        try:
            return worker(item)
        finally:
            idle.put(worker)

    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > AHEAD * len(workers):
                    yield waiting[0][0], waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        finally:
            if waiting:
                for _, future in waiting:
                    future.cancel()
                stop()
