"""Orders of jobs that a search has found, stored by everything that decides them: the next build need not search.

An entry is a file `orders/<key>.json` of a cache (compiler/files/cache.py), and as safe as those of segments. Its
key is the digest of the jobs, the source of the search, and the version of Python, whose random numbers it draws. An
order decides how long actions take, and no more: the program it goes into is proven all the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path

from compiler.files.cache import text_of
from compiler.plan.actions import lanes
from compiler.plan.actions.lanes import Jobs, best_order

FOLDER = "orders"
Order = tuple[int, ...]


@dataclass
class Orders:
    """The best orders of jobs: from the entries of a cache, there or not, or by search.

    folder: the cache; None: nothing is looked up, and nothing is there to store. entries: path → text, of all jobs that
    were asked for.
    """

    folder: Path | None = None
    entries: dict[str, str] = field(default_factory=dict, init=False)
    _found: dict[Jobs, Order] = field(default_factory=dict, init=False)

    def best(self, jobs: Jobs) -> Order:
        """The best order, from the cache or by search."""
        if self.folder is None:
            return best_order(jobs)
        if jobs not in self._found:
            key = self.key_of(jobs)
            text = text_of(self.folder / FOLDER, key)
            order = read(text, key, jobs) if text is not None else None
            self._found[jobs] = order = best_order(jobs) if order is None else order
            self.entries[f"{FOLDER}/{key}.json"] = entry(key, order)
        return self._found[jobs]

    def key_of(self, jobs: Jobs) -> str:
        """A digest that tells any two lists of jobs apart."""
        return _digest(json.dumps([astuple(jobs), self._tools]))

    @cached_property
    def _tools(self) -> list[object]:
        """What decides an order beside the jobs: the digest of its source, and the version of Python."""
        return [hashlib.sha256(Path(lanes.__file__).read_bytes()).hexdigest(), sys.version_info[:3]]


def entry(key: str, order: Order) -> str:
    """The text of an entry; `read` is its inverse."""
    return json.dumps({"key": key, "sha256": _digest(json.dumps(order)), "order": order}) + "\n"


def read(text: str, key: str, jobs: Jobs) -> Order | None:
    """The order that an entry holds; None where it is not whole, not of this key, or no order of the jobs."""
    try:
        order = tuple(map(int, json.loads(text)["order"]))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    if sorted(order) != list(range(len(jobs))) or entry(key, order) != text:
        return None
    place = {job: at for at, job in enumerate(order)}
    right = all(place[other] < place[job] for job, earlier in enumerate(jobs.after) for other in earlier)
    return order if right else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
