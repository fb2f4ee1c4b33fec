"""The splits of layers that are alike, over ranks that run several stages: a count of layers for each stage.

From some layer on, mostly the first or the one behind a few dense ones, the layers of a model cost the same and hold
the same. Where all runs are of such layers, but for the beginning of the first run, what a stage takes hangs on how
many layers it has, not on where it begins. So the cells are gone through once, and of splits that have taken as
many layers so far only the best is kept. The least limit is found in the same way, without trying others. What is found
is what `Search` finds, ties included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

from compiler.plan.layer_runs import Cell, Pipeline
from compiler.plan.split_search import SQUARES, Found, Limits, Search, exceeds, taken_with, with_limit

Counts = tuple[int, ...]  # the layers of each stage of a cell
State = tuple[int, int]  # how many of the layers that are not alike, and of all, have been taken
Way = tuple[Counts, Limits]  # counts, and what a cell has with them; of squares the sum over its stages
Entry = TypeVar("Entry", bound=Any)


def search_of(pipeline: Pipeline) -> Search:
    """The search for splits of a pipeline: by counts of layers where they say all, else by where the runs begin."""
    unlike, cells = _unlike(pipeline), pipeline.cells
    several = len(cells[0][0]) > 1
    # each cell but the first has a layer of the first run, so that this run takes all that are not alike
    return AlikeSearch(pipeline, unlike) if several and unlike < len(cells) else Search(pipeline)


def _unlike(pipeline: Pipeline) -> int:
    """How many layers there are before those that cost and hold the same as the last one, on every device."""
    columns: list[tuple[Any, ...]] = [blocks.layers for blocks in pipeline.kinds]
    columns += [pipeline.holding.layers] if pipeline.holding is not None else []
    other = [at for at in range(pipeline.num_layers) if any(column[at] != column[-1] for column in columns)]
    return other[-1] + 1 if other else 0


class AlikeSearch(Search):
    """The search where all layers behind the first `unlike` are alike, and the first run takes those."""

    def __init__(self, pipeline: Pipeline, unlike: int) -> None:
        super().__init__(pipeline)
        self.unlike = unlike

    def _lowest(self, sought: int, low: int, limits: Limits) -> Limits:
        """The limits with the least of the one that is looked for; as given, all layers can be taken."""
        least = self._best(limits, 0, lambda most, _, taken: max(most, taken[sought]))
        assert least is not None, "as given, all layers can be taken"
        return with_limit(limits, sought, max(low, least))

    def _finds(self, limits: Limits) -> Found | None:
        """The split with the least sum of squares within the limits, of those the one whose runs end earliest."""

        none = (0,) * self.num_runs

        def after(entry: tuple[int, Counts, tuple[Counts, ...]], counts: Counts, taken: Limits) -> Any:
            squares, begins, path = entry
            return squares + taken[SQUARES], none if self.pipeline.folded else _sum(begins, counts), (*path, counts)

        found = self._best(limits, (0, none, ()), after)
        if found is None or found[0] > limits[SQUARES]:
            return None
        squares, begins, path = found  # of a loop, a run begins where the one before it ends
        return squares, tuple(accumulate(path, _sum, initial=(0, *accumulate(begins[:-1]))))

    def _best(self, limits: Limits, first: Entry, after: Callable[[Entry, Counts, Limits], Entry]) -> Entry | None:
        """The least entry with which all layers are taken within the limits. `after`: what an entry becomes with the
        counts of one more cell; of two entries the lesser stays the lesser."""
        ways = [self._ways_of(at, limits, lambda way: after(first, *way)) for at in range(len(self.cells))]
        most = [max((total for of in each.values() for _, total in of), default=0) for each in ways]
        behind = [*accumulate(most[:0:-1], initial=0)]  # what the last cells can take at most
        states: dict[State, Entry] = {(0, 0): first}
        for of_cell in ways:
            following: dict[State, Entry] = {}
            left = behind.pop()
            for (unlike, total), entry in states.items():
                for (reached, more), way in of_cell[unlike].items():
                    state = reached, total + more
                    if state[1] <= self.size <= state[1] + left:
                        later = after(entry, *way)
                        if state not in following or later < following[state]:
                            following[state] = later
            states = following
        return states.get((self.unlike, self.size))

    def _ways_of(self, at: int, limits: Limits, order: Callable[[Way], Any]) -> dict[int, dict[State, Way]]:
        """The first way by an order to each state behind a cell, by how many layers that are not alike were taken
        before it. Its second number counts the layers of the cell alone."""
        found: dict[int, dict[State, Way]] = {}
        for unlike in range(min(self.unlike, max(0, at - 1)) if at else 0, self.unlike + 1 if at else 1):
            first: dict[State, tuple[Any, Way]] = {}
            for way in self._within(self.cells[at], unlike, limits):
                state, rank = (min(self.unlike, unlike + way[0][0]), sum(way[0])), order(way)
                if state not in first or rank < first[state][0]:
                    first[state] = rank, way
            found[unlike] = {state: way for state, (_, way) in first.items()}
        return found

    def _within(self, cell: Cell, unlike: int, limits: Limits) -> Iterator[Way]:
        """All counts of a cell within limits."""
        outer = (0, self.pipeline.num_stages - 1)
        states: list[tuple[Counts, list[int], Limits]] = [((), list(cell.empty), (0, 0, 0, 0))]
        for run, stage in enumerate(cell.stages):
            begin = unlike if run == 0 else 0 if self.pipeline.folded else self.unlike
            grown = []
            for counts, before, (_, _, slowest, squares) in states:
                for end in range(begin + (stage not in outer), self.size + 1):
                    self._step()
                    spent, taken = taken_with(cell, before, run, begin, end)
                    if exceeds(taken, limits):
                        break
                    load, held, time, _ = taken
                    together = load, held, max(slowest, time), squares + time * time
                    grown.append(((*counts, end - begin), spent, together))
            states = grown
        for counts, _, taken in states:
            yield counts, taken


def _sum(a: Counts, b: Counts) -> Counts:
    return tuple(map(int.__add__, a, b))
