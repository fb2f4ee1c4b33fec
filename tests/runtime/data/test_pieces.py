"""Results of pieces: stored in a file that may be cut anywhere, and computed by several workers in order."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runtime.data import store
from runtime.data.pieces import Journal, compute_with_journal, in_order

RESULTS = [b"", b"one", b"two" * 100, b"\0" * 17]


def _write(path: Path, results: list[bytes]) -> None:
    with Journal(path, "text") as journal:
        for result in results:
            assert journal.next() is None
            journal.add(result)


def _found(path: Path, about: str = "text") -> list[bytes]:
    with Journal(path, about) as journal:
        return list(iter(journal.next, None))


def test_a_journal_that_ends_anywhere_gives_its_whole_results(tmp_path: Path) -> None:
    """For each length that a kill may leave: the results found are a prefix, and continuing gives the same file."""
    path = tmp_path / "journal"
    _write(path, RESULTS)
    content = path.read_bytes()
    ends = []
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        results = _found(path)
        assert results == RESULTS[: len(results)]
        ends.append(len(results))
        with Journal(path, "text") as journal:
            missing = [result for result in RESULTS if journal.next() is None]
            for result in RESULTS[-len(missing) :] if missing else []:
                journal.add(result)
        assert path.read_bytes() == content
    assert ends == sorted(ends) and set(ends) == set(range(len(RESULTS) + 1))


def test_a_changed_byte_ends_a_journal_there(tmp_path: Path) -> None:
    path, random = tmp_path / "journal", Random(1)
    for _ in range(100):
        path.unlink(missing_ok=True)
        _write(path, RESULTS)
        content = bytearray(path.read_bytes())
        index = random.randrange(len(content))
        content[index] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        results = _found(path)
        assert results == RESULTS[: len(results)] and len(results) < len(RESULTS)


class Full:
    """A file on a full disk."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    def close(self) -> None:
        self.write(b"")


@pytest.mark.parametrize("inside", [None, RuntimeError("why")])
def test_a_journal_that_the_disk_does_not_take_is_an_error(tmp_path: Path, inside: Exception | None) -> None:
    """An error of the computation is raised unchanged, whether the file can be closed or not."""
    journal = Journal(tmp_path / "journal", "text")
    with pytest.raises(type(inside) if inside else OSError, match="why" if inside else "full"), journal:
        stream = journal._stream
        journal._stream = Full(stream)  # type: ignore[assignment]
        with pytest.raises(OSError, match="full") as caught:
            journal.add(b"one")
        assert caught.value.filename == str(tmp_path / "journal")
        if inside:
            raise inside
    stream.close()
    assert _found(tmp_path / "journal") == []


def test_results_of_earlier_processes_are_counted(tmp_path: Path) -> None:
    _write(tmp_path / "journal", RESULTS)
    for _ in range(2):
        with Journal(tmp_path / "journal", "text") as journal:
            assert journal.num_found == 0
            assert [journal.next(), journal.next()] == RESULTS[:2] and journal.num_found == 2
            assert list(compute_with_journal([3, 4], [lambda item: b"%d" % item], journal, lambda: None)) == [
                (3, RESULTS[2]),
                (4, RESULTS[3]),
            ]
            assert journal.num_found == 4
    with Journal(tmp_path / "journal", "text") as journal:
        items = list(compute_with_journal(range(6), [lambda item: b"%d" % item], journal, lambda: None))
        assert [result for _, result in items] == [*RESULTS, b"4", b"5"] and journal.num_found == 4
    assert _found(tmp_path / "journal") == [*RESULTS, b"4", b"5"]


def test_another_text_begins_anew(tmp_path: Path) -> None:
    _write(tmp_path / "journal", RESULTS)
    assert _found(tmp_path / "journal", "another") == []
    assert _found(tmp_path / "journal") == []


def test_abandoned_journals_are_kept_for_14_days(tmp_path: Path) -> None:
    """The journal of a text is deleted once the text is done."""
    for name, days in (("old", 15), ("other", 13), ("new", 0)):
        path = tmp_path / f"{store.PARTS}{name}"
        path.touch()
        os.utime(path, (time.time() - 86400 * days,) * 2)
    with store.journal(tmp_path, "text") as journal:
        journal.add(b"one")
    assert {path.name.removeprefix(store.PARTS) for path in tmp_path.iterdir()} == {"other", "new"}


def test_results_are_in_order_if_items_finish_out_of_order() -> None:
    """With several workers, each third item ends after the next one."""
    for jobs in (1, 2, 5):
        over = [threading.Event() for _ in range(20)]

        def work(item: int, over: list[threading.Event] = over, waits: bool = jobs > 1) -> int:
            if waits and item % 3 == 0:
                over[item + 1].wait()
            over[item].set()
            return item * item

        assert list(in_order(range(20), [work] * jobs, lambda: None)) == [(n, n * n) for n in range(20)]


def test_few_items_are_read_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            drawn.append(item)
            yield item

    for item, _ in in_order(items(), [lambda item: item] * 3, lambda: None):
        assert len(drawn) <= item + 8


def test_the_first_error_is_raised_and_the_others_are_stopped() -> None:
    stopped: list[bool] = []

    def work(item: int) -> int:
        if item in (3, 5):
            raise ValueError(f"{item}")
        return item

    items = []
    with pytest.raises(ValueError, match="3"):
        for item, _ in in_order(range(50), [work] * 2, lambda: stopped.append(True)):
            items.append(item)
    assert items == [0, 1, 2] and stopped == [True]
