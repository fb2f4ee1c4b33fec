"""The search for splits of layers within limits, cell by cell. A cell is the ranks that store the same stages.

Cells take their runs of layers in order, with one cursor per run. The first stages ascend from the first layer, and the
stages at the other end of a fold descend from the last layer.

1. A lower bound of the largest load, of the bytes, or of a stage's time comes from the same problem with stages that
   may be empty. In that problem, of two ways to give the same layers to all runs but the last, the one that covers more
   is never worse, as a shortened run costs no more. So one number is kept per way. The limit is found by bisection over
   whole nanoseconds and bytes.
2. Within these limits every split is followed, without states that the rest cannot finish, and the best by squares is
   taken. If the limits of step 1 are too low because stages must not be empty, bisection continues here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, count, pairwise
from typing import Any, TypeVar

from compiler.plan.layer_runs import Blocks, Pipeline, Runs, StageCell

Cursors = tuple[int, ...]  # for each run of a cell, the layers taken so far, from the end where its stages begin
Limits = tuple[int, int, int, int]  # on a rank's load, the bytes of a device, a stage's load, the sum of squares
LOAD, HELD, STAGE, SQUARES = range(4)
NO_LIMIT = 1 << 200  # squares of nanoseconds are large
NEAR = 100  # loads that differ by less than 1 / NEAR of the least, one percent, are near ties
PATIENCE = 1  # limits that are tried in order before bisection begins
MOST_STEPS = 300_000  # of a search, a second or two; only chunked placements of many layers have more


class TooLongError(Exception):
    """The search has taken more than `MOST_STEPS`."""


def _without_idle_lanes(pipeline: Pipeline) -> Pipeline:
    """The pipeline with only its first lane, if that is the fuller one in every block, as compute mostly is."""
    costs = [cost for blocks in pipeline.kinds for cost in (blocks.first, *blocks.layers, blocks.last)]
    if any(cost[0] < max(cost) for cost in costs):
        return pipeline

    def first(blocks: Blocks) -> Blocks:
        return Blocks(tuple(cost[:1] for cost in blocks.layers), blocks.first[:1], blocks.last[:1])

    fuller = {id(blocks): first(blocks) for blocks in pipeline.kinds}
    return replace(pipeline, blocks=tuple(fuller[id(blocks)] for blocks in pipeline.blocks))


class _LimitBound:
    """A lower bound of the limit that is sought: the least value that exceeded it but none of the other limits."""

    def __init__(self, sought: int, limits: Limits) -> None:
        self.sought, self.least = sought, NO_LIMIT
        self.limits = with_limit(limits, sought, NO_LIMIT)

    def note(self, values: Limits) -> None:
        if values[self.sought] < self.least and not exceeds(values, self.limits):
            self.least = values[self.sought]


class CellSearch:
    """The search over cells in order, with a cursor for each run of a cell."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline = _without_idle_lanes(pipeline)
        self.size, self.steps, self.cells = pipeline.num_layers, 0, pipeline.lanes
        self.num_runs = len(self.cells[0].stages)
        self.least = []  # by lane, the least cost of the first n layers on any device
        for lane in range(len(pipeline.blocks[0].first)):
            columns = zip(*([cost[lane] for cost in blocks.layers] for blocks in pipeline.kinds), strict=True)
            self.least.append((0, *accumulate(map(min, columns))))

    def fastest(self) -> tuple[Limits, Runs]:
        """The fastest runs, with their limits."""
        _, load, _, _ = self.pipeline.score(_even(self.size, self.pipeline.num_stages))
        return self._least_split((LOAD, STAGE), self._floor(), (load, NO_LIMIT, load, NO_LIMIT))

    def fullest_least(self, fastest: Limits, held_bytes: int) -> Runs:
        """The near tie of the fastest runs with the least bytes on the fullest device, at most `held_bytes`."""
        load, _, stage, squares = fastest
        near = load + load // NEAR, held_bytes, stage + stage // NEAR, squares + 2 * squares // NEAR
        return self._least_split((HELD, LOAD, STAGE), with_limit(self._floor(), LOAD, load), near)[1]

    def _floor(self) -> Limits:
        """Lower bounds for every split."""
        total = max(lane[-1] for lane in self.least)
        return total // len(self.cells), 0, total // self.pipeline.num_stages, 0

    def _least_split(self, order: Sequence[int], floor: Limits, ceiling: Limits) -> tuple[Limits, Runs]:
        """The split within `ceiling` with the least of the first limit in `order`, then of the next, then of squares.

        Returns the limits that it just meets, and its runs. Some split must be within `ceiling`, and none below
        `floor`.
        """
        for lowest in (self._lowest, self._lowest_filled):
            limits = ceiling
            for sought in order:
                high = min(limits[LOAD], limits[STAGE]) if sought == STAGE else limits[sought]
                limits = lowest(sought, floor[sought], with_limit(limits, sought, high))
            split = self._best_split(limits)
            if split is not None:
                return with_limit(limits, SQUARES, split[0]), self._runs(split)
            # with more of the first limit, less of the next ones may be enough
            floor = with_limit(floor, order[0], limits[order[0]])
        raise AssertionError("every model can be split into so many stages")

    def _runs(self, split: FoundSplit) -> Runs:
        runs: dict[int, tuple[int, int]] = {}
        for cell, (begins, ends) in zip(self.cells, pairwise(split[1]), strict=True):
            for run, (s, begin, end) in enumerate(zip(cell.stages, begins, ends, strict=True)):
                down = self.pipeline.is_folded and run == 1
                runs[s] = (self.size - end, self.size - begin) if down else (begin, end)
        return tuple(runs[s] for s in range(self.pipeline.num_stages))

    def _bounds(self) -> Iterator[tuple[Cursors, Cursors]]:
        """All combinations of where the runs of the first cell begin and those of the last cell may end."""
        runs = self.num_runs
        if self.pipeline.is_folded or runs == 1:
            yield (0,) * runs, (self.size,) * runs
            return
        for cuts in combinations(range(self.size + 1), runs - 1):
            yield (0, *cuts), (*cuts, self.size)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLongError

    # ------------------------------------------------------------ stages that may be empty

    def _lowest(self, sought: int, low: int, limits: Limits) -> Limits:
        """The limits with the lowest value of the sought one, at least `low`, within which all layers can be taken.

        Within the given limits they can be.
        """
        high = limits[sought]
        for turn in count():
            passes, bound = self._reach_all(with_limit(limits, sought, low), sought)
            if passes:
                high = low
            low = min(high, max(low + 1, bound))
            if turn > PATIENCE and low < high:
                middle = (low + high) // 2
                passes, bound = self._reach_all(with_limit(limits, sought, middle), sought)
                low, high = (low, middle) if passes else (min(high, max(middle + 1, bound)), high)
            if low >= high:
                break
        return with_limit(limits, sought, high)

    def _reach_all(self, limits: Limits, sought: int) -> tuple[bool, int]:
        """Whether all layers can be taken within limits, and if not, a lower bound of the sought limit."""
        bound = _LimitBound(sought, limits)
        passes = any(self._can_reach(limits, starts, stops, bound) for starts, stops in self._bounds())
        return passes, bound.least

    def _can_reach(self, limits: Limits, starts: Cursors, stops: Cursors, bound: _LimitBound) -> bool:
        states = {starts[:-1]: starts[-1]}  # all cursors but the last → the farthest the last can be
        for index, cell in enumerate(self.cells):
            following: dict[Cursors, int] = {}
            for cursors, last in states.items():
                if self._is_behind(index, (*cursors, last), stops, limits, bound):
                    continue
                for heads, spent in self._heads(cell, cursors, stops, limits, bound):
                    reach = self._farthest(cell, last, stops[-1], spent, limits, bound)
                    if reach > following.get(heads, -1):
                        following[heads] = reach
            states = following
        return any(self._has_all_layers((*cursors, last), stops) for cursors, last in states.items())

    def _is_behind(self, index: int, cursors: Cursors, stops: Cursors, limits: Limits, bound: _LimitBound) -> bool:
        """Whether the layers that are left are too much for this cell and those after it."""
        self._step()
        cells = len(self.cells) - index
        remaining = self._remaining_cost(cursors, stops)
        if remaining > cells * limits[LOAD] or remaining > cells * self.num_runs * limits[STAGE]:
            bound.note((-(-remaining // cells), 0, -(-remaining // (cells * self.num_runs)), 0))
            return True
        return False

    def _remaining_cost(self, cursors: Cursors, stops: Cursors) -> int:
        """A lower bound of the cost of the layers that are left."""
        return max(sum(lane[end] - lane[begin] for begin, end in self._spans(cursors, stops)) for lane in self.least)

    def _spans(self, cursors: Cursors, stops: Cursors) -> list[tuple[int, int]]:
        """The layers between the cursors and where the runs must end."""
        if self.pipeline.is_folded:
            return [(cursors[0], max(cursors[0], self.size - cursors[1]))]
        return list(zip(cursors, stops, strict=True))

    def _has_all_layers(self, cursors: Cursors, stops: Cursors) -> bool:
        return sum(cursors) >= self.size if self.pipeline.is_folded else cursors == stops

    def _heads(
        self, cell: StageCell, cursors: Cursors, stops: Cursors, limits: Limits, bound: _LimitBound
    ) -> list[tuple[Cursors, list[int]]]:
        """Ends of all runs but the last within the limits, and the cost on each lane of these and of the model's ends.

        If a run stops at a limit, `bound` notes the cost with one more layer.
        """
        states: list[tuple[Cursors, list[int]]] = [((), list(cell.empty))]
        for run, start in enumerate(cursors):
            grown = []
            for heads, before in states:
                for end in range(start, stops[run] + 1):
                    self._step()
                    spent, usage = taken_with(cell, before, run, start, end)
                    if exceeds(usage, limits):
                        bound.note(usage)
                        break
                    grown.append(((*heads, end), spent))
            states = grown
        return states

    def _farthest(
        self, cell: StageCell, start: int, stop: int, before: list[int], limits: Limits, bound: _LimitBound
    ) -> int:
        """The farthest end of the last run within the limits; -1 if even an empty run is too much."""
        self._step()
        end, last = stop, self.num_runs - 1
        for lane, (costs, spent) in enumerate(zip(cell.costs[last], before, strict=True)):
            timed = lane < len(cell.times)
            room = min(limits[LOAD] - spent, limits[STAGE] - cell.ends[last][lane]) if timed else limits[HELD] - spent
            end = min(end, bisect_right(costs, costs[start] + room, start, stop + 1) - 1)
        if end < stop:
            bound.note(taken_with(cell, before, last, start, max(start, end + 1))[1])
        return end if end >= start else -1

    # ------------------------------------------------------------ all splits within limits

    def _lowest_filled(self, sought: int, low: int, limits: Limits) -> Limits:
        """`_lowest` with the limit on squares, and without splits whose inner stages are empty."""
        high, middle = limits[sought], False
        while low < high:
            limit = (low + high) // 2 if middle else high - 1  # high - 1 ends the search if no split lies between
            split = self._best_split(with_limit(limits, sought, limit))
            if split is None:
                low = limit + 1
            else:
                memory, load, stage, _ = self.pipeline.score(self._runs(split))
                high = (load, memory, stage)[sought]
            middle = not middle
        return with_limit(limits, sought, high)

    def _best_split(self, limits: Limits) -> FoundSplit | None:
        """The split with the least sum of squares within the limits; of equals, the one whose runs end earliest."""
        splits = (self._best_split_between(limits, starts, stops) for starts, stops in self._bounds())
        return min((split for split in splits if split is not None and split[0] <= limits[SQUARES]), default=None)

    def _best_split_between(self, limits: Limits, starts: Cursors, stops: Cursors) -> FoundSplit | None:
        states: dict[Cursors, FoundSplit] = {starts: (0, (starts,))}
        for index in range(len(self.cells)):
            following: dict[Cursors, FoundSplit] = {}
            for cursors, (squares, path) in states.items():
                for ends, added in self._cell_ends(index, cursors, stops, limits):
                    entry = (squares + added, (*path, ends))
                    if ends not in following or entry < following[ends]:
                        following[ends] = entry
            behind = sum(len(cell.stages) for cell in self.cells[index + 1 :])
            if limits[SQUARES] != NO_LIMIT:  # the stages left have at least the squares of equal stages
                following = {
                    ends: entry
                    for ends, entry in following.items()
                    if self._remaining_cost(ends, stops) ** 2 <= (limits[SQUARES] - entry[0]) * behind
                }
            states = following
        done = [entry for ends, entry in states.items() if self._has_all_layers(ends, stops)]
        return min(done, default=None)

    def _cell_ends(self, index: int, cursors: Cursors, stops: Cursors, limits: Limits) -> Iterator[tuple[Cursors, int]]:
        """Ends of a cell's runs from which the rest can be taken, and the sum of squares of its stages."""
        cell = self.cells[index]
        outer = (0, self.pipeline.num_stages - 1)
        states: list[tuple[Cursors, list[int], int]] = [((), list(cell.empty), 0)]
        for run, start in enumerate(cursors):
            grown = []
            for heads, before, squares in states:
                for end in range(start + (cell.stages[run] not in outer), stops[run] + 1):
                    self._step()
                    spent, usage = taken_with(cell, before, run, start, end)
                    if exceeds(usage, limits):
                        break
                    grown.append(((*heads, end), spent, squares + usage[STAGE] * usage[STAGE]))
            states = grown
        for ends, _, squares in states:
            if self._can_end(index, ends, stops, limits):
                yield ends, squares

    def _can_end(self, index: int, ends: Cursors, stops: Cursors, limits: Limits) -> bool:
        """Whether the layers that are left are enough for the stages after this cell, and not too much for them."""
        later_cells = self.cells[index + 1 :]
        outer = (0, self.pipeline.num_stages - 1)
        inner = sum(s not in outer for cell in later_cells for s in cell.stages)
        if self.pipeline.is_folded and sum(ends) > self.size:
            return False
        spans = self._spans(ends, stops)
        if sum(end - begin for begin, end in spans) < inner or any(end < begin for begin, end in spans):
            return False
        limit = min(limits[LOAD] * len(later_cells), limits[STAGE] * sum(len(cell.stages) for cell in later_cells))
        return all(sum(lane[end] - lane[begin] for begin, end in spans) <= limit for lane in self.least)


FoundSplit = tuple[int, tuple[Cursors, ...]]  # sum of squares, and the cursors before the first cell and after each


def taken_with(cell: StageCell, before: Sequence[int], run: int, start: int, end: int) -> tuple[list[int], Limits]:
    """What a cell has spent on each lane after one more run of layers, and the values that limits apply to."""
    costs, times = cell.costs[run], len(cell.times)
    spent = [cost + lane[end] - lane[start] for cost, lane in zip(before, costs, strict=True)]
    if times == 1:
        load, alone = spent[0], cell.ends[run][0] + costs[0][end] - costs[0][start]
    else:
        load = max(spent[:times])
        alone = max(end_of + lane[end] - lane[start] for end_of, lane in zip(cell.ends[run], costs, strict=False))
    return spent, (load, max(spent[times:], default=0), alone, 0)


def exceeds(values: Limits, limits: Limits) -> bool:
    return values[LOAD] > limits[LOAD] or values[HELD] > limits[HELD] or values[STAGE] > limits[STAGE]


def with_limit(limits: Limits, sought: int, limit: int) -> Limits:
    load, memory, stage, squares = (limit if k == sought else current for k, current in enumerate(limits))
    return load, memory, stage, squares


def _even(num_layers: int, num_stages: int) -> Runs:
    """Some split: layers are spread evenly or, if there are few, each inner stage has one."""
    inner = max(0, num_stages - 2)
    ends = [num_layers * (s + 1) // num_stages for s in range(num_stages)]
    if num_layers < 2 * num_stages:
        ends = [min(num_layers, num_layers - inner + s) if s else num_layers - inner for s in range(num_stages)]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


# --- Splits of layers that are alike, over ranks that run several stages: a count of layers for each stage
#
# From some layer on, mostly the first or the one after a few dense layers, the layers of a model have equal costs and
# memory. If all runs consist of such layers, except for the beginning of the first run, the cost of a stage depends on
# its number of layers, not on where it begins. So the search goes through the cells once, and keeps only the best split
# for each number of layers taken so far. It finds the lowest limit in the same way, without trying others. The results
# equal those of `CellSearch`, even for ties.

Counts = tuple[int, ...]  # the number of layers in each stage of a cell
State = tuple[int, int]  # how many of the unlike layers, and how many layers in all, have been taken
CellFill = tuple[Counts, Limits]  # counts, and the values of a cell with them; for squares, the sum over its stages
Entry = TypeVar("Entry", bound=Any)


def search_of(pipeline: Pipeline) -> CellSearch:
    """The search for splits of a pipeline: by counts of layers if they are enough, else by where runs begin."""
    unlike, cells = _unlike(pipeline), pipeline.cells
    several_runs = len(cells[0][0]) > 1
    # Each cell but the first has a layer of the first run, so this run takes all unlike layers.
    return AlikeSearch(pipeline, unlike) if several_runs and unlike < len(cells) else CellSearch(pipeline)


def _unlike(pipeline: Pipeline) -> int:
    """The number of layers before those that have the same cost and memory as the last one on every device."""
    columns: list[tuple[Any, ...]] = [blocks.layers for blocks in pipeline.kinds]
    columns += [pipeline.holding.layers] if pipeline.holding is not None else []
    unlike_layers = [
        layer for layer in range(pipeline.num_layers) if any(column[layer] != column[-1] for column in columns)
    ]
    return unlike_layers[-1] + 1 if unlike_layers else 0


class AlikeSearch(CellSearch):
    """The search for layers that are all alike after the first `unlike`, which the first run takes."""

    def __init__(self, pipeline: Pipeline, unlike: int) -> None:
        super().__init__(pipeline)
        self.unlike = unlike

    def _lowest(self, sought: int, low: int, limits: Limits) -> Limits:
        """The limits with the lowest value of the sought one. Within the given limits all layers can be taken."""
        least = self._best(limits, 0, lambda largest, _, usage: max(largest, usage[sought]))
        assert least is not None, "all layers can be taken within the given limits"
        return with_limit(limits, sought, max(low, least))

    def _best_split(self, limits: Limits) -> FoundSplit | None:
        """The split with the least sum of squares within the limits; of equals, the one whose runs end earliest."""

        none = (0,) * self.num_runs

        def after(entry: tuple[int, Counts, tuple[Counts, ...]], counts: Counts, values: Limits) -> Any:
            squares, begins, path = entry
            return squares + values[SQUARES], none if self.pipeline.is_folded else _sum(begins, counts), (*path, counts)

        split = self._best(limits, (0, none, ()), after)
        if split is None or split[0] > limits[SQUARES]:
            return None
        squares, begins, path = split  # in a loop, a run begins where the previous one ends
        return squares, tuple(accumulate(path, _sum, initial=(0, *accumulate(begins[:-1]))))

    def _best(self, limits: Limits, first: Entry, after: Callable[[Entry, Counts, Limits], Entry]) -> Entry | None:
        """The least entry with which all layers are taken within the limits.

        `after` returns an entry with the counts of one more cell. It must keep the order of entries.
        """
        fills = [self._fills_of(index, limits, lambda fill: after(first, *fill)) for index in range(len(self.cells))]
        totals = [max((total for states in of_cell.values() for _, total in states), default=0) for of_cell in fills]
        behind = [*accumulate(totals[:0:-1], initial=0)]  # the most layers that the cells after each can take
        states: dict[State, Entry] = {(0, 0): first}
        for of_cell in fills:
            following: dict[State, Entry] = {}
            capacity = behind.pop()
            for (unlike, total), entry in states.items():
                for (reached, added), fill in of_cell[unlike].items():
                    state = reached, total + added
                    if state[1] <= self.size <= state[1] + capacity:
                        later = after(entry, *fill)
                        if state not in following or later < following[state]:
                            following[state] = later
            states = following
        return states.get((self.unlike, self.size))

    def _fills_of(
        self, index: int, limits: Limits, order: Callable[[CellFill], Any]
    ) -> dict[int, dict[State, CellFill]]:
        """By number of unlike layers taken before a cell, the first fill in `order` to each state after it.

        The second number of a state counts only the layers of the cell.
        """
        fills: dict[int, dict[State, CellFill]] = {}
        for unlike in range(min(self.unlike, max(0, index - 1)) if index else 0, self.unlike + 1 if index else 1):
            first: dict[State, tuple[Any, CellFill]] = {}
            for fill in self._fills_within(self.cells[index], unlike, limits):
                state, rank = (min(self.unlike, unlike + fill[0][0]), sum(fill[0])), order(fill)
                if state not in first or rank < first[state][0]:
                    first[state] = rank, fill
            fills[unlike] = {state: fill for state, (_, fill) in first.items()}
        return fills

    def _fills_within(self, cell: StageCell, unlike: int, limits: Limits) -> Iterator[CellFill]:
        """All counts of a cell within the limits."""
        outer = (0, self.pipeline.num_stages - 1)
        states: list[tuple[Counts, list[int], Limits]] = [((), list(cell.empty), (0, 0, 0, 0))]
        for run, stage in enumerate(cell.stages):
            begin = unlike if run == 0 else 0 if self.pipeline.is_folded else self.unlike
            grown = []
            for counts, before, (_, _, slowest, squares) in states:
                for end in range(begin + (stage not in outer), self.size + 1):
                    self._step()
                    spent, usage = taken_with(cell, before, run, begin, end)
                    if exceeds(usage, limits):
                        break
                    load, memory, time, _ = usage
                    together = load, memory, max(slowest, time), squares + time * time
                    grown.append(((*counts, end - begin), spent, together))
            states = grown
        for counts, _, usage in states:
            yield counts, usage


def _sum(a: Counts, b: Counts) -> Counts:
    return tuple(map(int.__add__, a, b))
