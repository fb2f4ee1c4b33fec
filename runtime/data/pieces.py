"""Pieces of a long computation: worked on by several processes, taken in order, and kept so that a kill loses little.

A `Journal` is a file of results, one behind the other. Each has its sha256, so what a kill or a loss of power leaves of
the last one is not read. Results depend on the piece alone, so a journal that is read again changes no bit.
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

HEAD = struct.Struct("<Q32s")  # bytes of a result, sha256 of its number and its content
AHEAD = 2  # pieces that wait, for each worker
Item = TypeVar("Item")
Result = TypeVar("Result")


class Journal:
    """Results in a file, as a context manager. `about` says what they are of: under another text it begins anew.

    First the results that are there are taken, by `next`; after the last of them, others are added.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path = path
        self.num_found = 0  # results that an earlier process left
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
        except OSError:  # what a full disk did not take, which `add` has said
            if kind is None:
                raise

    def next(self) -> bytes | None:
        """The next result, None behind the last one that is whole; what follows it is cut off."""
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
        """Put a result behind the last one. OSError where the disk is full."""
        try:
            self._stream.write(HEAD.pack(len(content), _digest(self._number, content)) + content)
            self._stream.flush()
        except OSError as error:  # which names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._number += 1

    def _cut(self, at: int) -> None:
        self._stream.seek(at)
        self._stream.truncate()
        if at == 0:
            self._number = 0

    def _size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size


def _digest(number: int, content: bytes) -> bytes:
    return hashlib.sha256(b"%d\0" % number + content).digest()


def journaled(
    items: Iterable[Item], workers: Sequence[Callable[[Item], bytes]], journal: Journal, stop: Callable[[], None]
) -> Iterator[tuple[Item, bytes]]:
    """Each item with its result, in the order of the items: first those that the journal has, then others, by
    `in_order`, which are added to it."""
    rest = iter(items)
    for item in rest:
        if (found := journal.next()) is None:
            rest = chain([item], rest)
            break
        yield item, found
    for item, result in in_order(rest, workers, stop):
        journal.add(result)
        yield item, result


def in_order(
    items: Iterable[Item], workers: Sequence[Callable[[Item], Result]], stop: Callable[[], None]
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in the order of the items. Workers are called in threads, each by one at a time.

    The error of the first item that has one is raised. `stop` is called where not all results are taken; calls that
    are going on have to end then.
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
