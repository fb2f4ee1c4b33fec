"""Stored orders: what their keys depend on, and that only complete entries that hold an order are read."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from compiler.files import cache as cache_folder
from compiler.plan.actions import order as order_cache
from compiler.plan.actions.lanes import Jobs
from compiler.plan.actions.order import Orders
from compiler.plan.actions.search import best_order

# Two chains with a dispatch each; the second job of a chain reads what the first has sent.
JOBS = Jobs(
    time=(4, 3, 5, 4, 3, 5),
    exchange=(True, False, False, True, False, False),
    slot=(0, 0, 0, 1, 1, 1),
    early=(False, False, True, False, False, True),
    after=((), (0,), (1,), (), (3,), (4,)),
    awaits=((), (0,), (), (), (3,), ()),
)
BEST = best_order(JOBS)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Jobs]:
    """The searches that were made."""
    searched: list[Jobs] = []

    def counted(jobs: Jobs) -> tuple[int, ...]:
        searched.append(jobs)
        return best_order(jobs)

    monkeypatch.setattr(order_cache, "best_order", counted)
    return searched


def test_stored_orders_are_not_searched_again(tmp_path: Path, searches: list[Jobs]) -> None:
    first = Orders(tmp_path)
    assert first.best(JOBS) == first.best(JOBS) == BEST and searches == [JOBS]
    cache_folder.store(tmp_path, first.entries.items())
    second = Orders(tmp_path)
    assert second.best(JOBS) == BEST and len(searches) == 1
    assert second.entries == first.entries, "what a build keeps does not depend on what was kept"


def test_every_field_of_jobs_changes_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "time": (4, 3, 5, 4, 3, 6),
        "exchange": (True, False, False, True, False, True),
        "slot": (0, 0, 0, 1, 1, 0),
        "early": (False,) * 6,
        "after": ((), (0,), (1,), (), (3,), (3, 4)),
        "awaits": ((), (0,), (), (), (3,), (3,)),
        "between": (4, 2, 5, 4, 3, 5),
    }
    assert list(changes) == [field.name for field in fields(Jobs)], "a field of jobs that no key knows"
    keys = {Orders(tmp_path).key_of(replace(JOBS, **{name: value})) for name, value in changes.items()}  # type: ignore[arg-type]
    keys.add(Orders(tmp_path).key_of(JOBS))
    with monkeypatch.context() as patch:
        patch.setattr(order_cache.sys, "version_info", (3, 99, 0))
        keys.add(Orders(tmp_path).key_of(JOBS))
    (tmp_path / "lanes.py").write_text("another search")
    monkeypatch.setattr(order_cache.search, "__file__", str(tmp_path / "lanes.py"))
    keys.add(Orders(tmp_path).key_of(JOBS))
    assert len(keys) == len(changes) + 3


def test_a_damaged_entry_is_ignored_and_replaced(tmp_path: Path, searches: list[Jobs]) -> None:
    orders = Orders(tmp_path)
    orders.best(JOBS)
    ((name, text),) = orders.entries.items()
    key = orders.key_of(JOBS)
    assert order_cache.read(text, key, JOBS) == BEST
    for offset in range(len(text)):
        assert order_cache.read(text[:offset], key, JOBS) is None, offset
        replacement = "0" if text[offset] != "0" else "1"
        assert order_cache.read(text[:offset] + replacement + text[offset + 1 :], key, JOBS) is None, offset
    for damage in (b"", b"\xff", text.replace("[0, ", "[1, ").encode()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(damage)
        again = Orders(tmp_path)
        assert again.best(JOBS) == BEST and again.entries == orders.entries
    assert len(searches) == 4


@pytest.mark.parametrize("order", [(), (0, 1, 2), (0, 0, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5), (0, 1, 2, 3, 4, 6)])
def test_invalid_orders_are_ignored(order: tuple[int, ...]) -> None:
    """This holds although the digests are right."""
    assert order_cache.read(order_cache.entry("key", order), "key", JOBS) is None
    assert order_cache.read(order_cache.entry("other", BEST), "key", JOBS) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"order": 3}', '{"order": [1e999]}', "[" * 100_000, "NaN"])
def test_invalid_entries_are_ignored(text: str) -> None:
    assert order_cache.read(text, "key", JOBS) is None
