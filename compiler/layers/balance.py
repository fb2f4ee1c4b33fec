"""Layers to pipeline stages: the exact min-max partition, knowing which stages share a rank.

What is least, in this order: the load of the most loaded pipeline rank; the time of the slowest stage; the sum of the
squares of the stages' times. A rank's load comes first because a rank runs all its stages on every micro-batch, and the
most loaded one sets the rhythm; of a slow stage only the filling and draining suffer. Under `bidirectional` each of the
two copies of a stage runs half of the micro-batches, so a rank's load is the mean of its two stages.

How: ranks that store the same stages are a cell. Cells take their runs of layers one after the other, with one cursor a
run: the first stages ascend from the first layer while those of the other end of a fold descend from the last.

1. A lower bound of the largest load: the same problem where a stage may be without layers. There, of two ways to give
   the same layers to all runs but the last, the one that covers more is never worse (a run that is shortened costs no
   more), so one number is kept for each; the limit is found by bisection over whole nanoseconds.
2. Within those limits every split is followed, states that the rest cannot finish left out, and the best by squares is
   taken. Where the limits of 1 are too low, since stages must not be empty, bisection goes on here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from compiler.layers.pipeline import Blocks, Pipeline, Runs, Split

Cursors = tuple[int, ...]  # of each run of a cell: layers taken so far, from where its stages begin
NO_LIMIT = 1 << 62
PATIENCE = 1  # limits that are tried one after the other before they are bisected
MOST_STEPS = 2_000_000  # of a search, some two seconds: only chunked placements of many layers have more


def partition(pipeline: Pipeline) -> Split:
    """The best split. The first and the last stage may be without layers, the others not.

    Of chunked placements with more steps than `MOST_STEPS`, the best whose slowest stage takes the least.
    """
    assert pipeline.num_stages <= pipeline.num_layers + 2, "more stages than can be filled"
    try:
        return pipeline.split_of(_Search(pipeline).best())
    except _TooLongError:
        single = Pipeline("loop(1)", tuple(_slowest(pipeline, s) for s in range(pipeline.num_stages)))
        return pipeline.split_of(_Search(single).best())


def _slowest(pipeline: Pipeline, stage: int) -> Blocks:
    return max(pipeline.kinds_of[stage], key=lambda blocks: sum(lane[-1] for lane in blocks.before))


# ---------------------------------------------------------------- the search


class _TooLongError(Exception):
    """The search has taken `MOST_STEPS`."""


@dataclass(frozen=True)
class _Lane:
    """A lane of a kind of device, as a cell's runs see it."""

    costs: tuple[tuple[int, ...], ...]  # of each run: of the first n layers from where its stages begin
    ends: tuple[int, ...]  # of each run: what its stage costs without layers


def _without_idle_lanes(pipeline: Pipeline) -> Pipeline:
    """The same loads from one lane, where it is the fuller one in every block: that of compute, as a rule."""
    costs = [cost for blocks in pipeline.kinds for cost in (blocks.first, *blocks.layers, blocks.last)]
    if any(cost[0] < max(cost) for cost in costs):
        return pipeline

    def first(blocks: Blocks) -> Blocks:
        return Blocks(tuple(cost[:1] for cost in blocks.layers), blocks.first[:1], blocks.last[:1])

    fuller = {id(blocks): first(blocks) for blocks in pipeline.kinds}
    return Pipeline(pipeline.placement, tuple(fuller[id(blocks)] for blocks in pipeline.blocks))


class _Search:
    """Cells in order, a cursor for each of a cell's runs."""

    def __init__(self, pipeline: Pipeline) -> None:
        pipeline = _without_idle_lanes(pipeline)
        self.pipeline, self.size, self.steps = pipeline, pipeline.num_layers, 0
        self.cells = [
            [lane for blocks in kinds for lane in self._lanes(stages, blocks)] for stages, kinds in pipeline.cells
        ]
        self.num_runs = len(pipeline.cells[0][0])
        self.least = []  # of the first n layers, what they cost on each lane on any device at least
        for lane in range(len(pipeline.blocks[0].first)):
            columns = zip(*([cost[lane] for cost in blocks.layers] for blocks in pipeline.kinds), strict=True)
            self.least.append((0, *accumulate(map(min, columns))))

    def _lanes(self, stages: Sequence[int], blocks: Blocks) -> Iterator[_Lane]:
        last = self.pipeline.num_stages - 1
        for before, behind, first, final in zip(blocks.before, blocks.behind, blocks.first, blocks.last, strict=True):
            down = [self.pipeline.folded and run == 1 for run in range(len(stages))]
            ends = tuple((first if s == 0 else 0) + (final if s == last else 0) for s in stages)
            yield _Lane(tuple(behind if each else before for each in down), ends)

    def best(self) -> Runs:
        """The best runs of all."""
        most, _, _ = self.pipeline.score(_even(self.size, self.pipeline.num_stages))
        total = max(lane[-1] for lane in self.least)
        load = _lowest(total // len(self.cells), most, lambda limit: self._reach_all(limit, NO_LIMIT))
        stage = _lowest(total // self.pipeline.num_stages, load, lambda limit: self._reach_all(load, limit))
        found = self._finds(load, stage)
        if found is None:
            load = _lowest(load, most, lambda limit: (self._finds(limit, NO_LIMIT) is not None, limit + 1))
            stage = _lowest(stage, load, lambda limit: (self._finds(load, limit) is not None, limit + 1))
            found = self._finds(load, stage)
        assert found is not None, "every model can be split into so many stages"
        _, cells = found
        runs: dict[int, tuple[int, int]] = {}
        for (stages, _), (begins, ends) in zip(self.pipeline.cells, pairwise(cells), strict=True):
            for run, (s, begin, end) in enumerate(zip(stages, begins, ends, strict=True)):
                down = self.pipeline.folded and run == 1
                runs[s] = (self.size - end, self.size - begin) if down else (begin, end)
        return tuple(runs[s] for s in range(self.pipeline.num_stages))

    def _bounds(self) -> Iterator[tuple[Cursors, Cursors]]:
        """Where the runs of the first cell begin and those of the last may end, in every way there is."""
        runs = self.num_runs
        if self.pipeline.folded or runs == 1:
            yield (0,) * runs, (self.size,) * runs
            return
        for cuts in combinations(range(self.size + 1), runs - 1):
            yield (0, *cuts), (*cuts, self.size)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise _TooLongError

    # ------------------------------------------------------------ where stages may be empty

    def _reach_all(self, load: int, stage: int) -> tuple[bool, int]:
        """Whether all layers can be taken within limits on the load of a rank and of a stage; where not, the least that
        one of them must be: of the stage, if it has one."""
        least = NO_LIMIT
        for starts, stops in self._bounds():
            passes, known = self._reach(load, stage, starts, stops)
            if passes:
                return True, 0
            least = min(least, known)
        return False, least

    def _reach(self, load: int, stage: int, starts: Cursors, stops: Cursors) -> tuple[bool, int]:
        states = {starts[:-1]: starts[-1]}  # all cursors but the last → the farthest the last can be
        over = [NO_LIMIT]
        for index, lanes in enumerate(self.cells):
            following: dict[Cursors, int] = {}
            for cursors, last in states.items():
                if self._is_behind(index, (*cursors, last), stops, load, stage, over):
                    continue
                used = [sum(lane.ends) for lane in lanes]
                for heads, spent in self._heads(lanes, cursors, stops, used, load, stage, over):
                    reach = self._farthest(lanes, last, stops[-1], spent, load, stage, over)
                    if reach > following.get(heads, -1):
                        following[heads] = reach
            states = following
        done = any(self._is_all((*cursors, last), stops) for cursors, last in states.items())
        return done, over[0]

    def _is_behind(self, index: int, cursors: Cursors, stops: Cursors, load: int, stage: int, over: list[int]) -> bool:
        """Whether what is left is too much for this cell and those behind it; `over` as in `_heads`."""
        cells = len(self.cells) - index
        left = max(sum(lane[end] - lane[begin] for begin, end in self._spans(cursors, stops)) for lane in self.least)
        if left > cells * load or (stage != NO_LIMIT and left > cells * self.num_runs * stage):
            total, alone = -(-left // cells), -(-left // (cells * self.num_runs))
            _note(over, total, alone, load, stage)
            return True
        return False

    def _spans(self, cursors: Cursors, stops: Cursors) -> list[tuple[int, int]]:
        """The layers between the runs taken so far and where they must end."""
        if self.pipeline.folded:
            return [(cursors[0], max(cursors[0], self.size - cursors[1]))]
        return list(zip(cursors, stops, strict=True))

    def _is_all(self, cursors: Cursors, stops: Cursors) -> bool:
        return sum(cursors) >= self.size if self.pipeline.folded else cursors == stops

    def _heads(
        self,
        lanes: list[_Lane],
        cursors: Cursors,
        stops: Cursors,
        used: list[int],
        load: int,
        stage: int,
        over: list[int],
    ) -> Iterator[tuple[Cursors, list[int]]]:
        """Ends of all runs but the last within the limits, and what they and the ends of the model cost on each lane.
        Where a run stops at a limit, `over` gets what that limit must be for one more layer, if that is less."""
        states: list[tuple[Cursors, list[int]]] = [((), used)]
        for run, start in enumerate(cursors):
            grown = []
            for heads, before in states:
                for end in range(start, stops[run] + 1):
                    self._step()
                    more = [lane.costs[run][end] - lane.costs[run][start] for lane in lanes]
                    spent = [a + b for a, b in zip(before, more, strict=True)]
                    alone = max(lane.ends[run] + each for lane, each in zip(lanes, more, strict=True))
                    if max(spent) > load or alone > stage:
                        _note(over, max(spent), alone, load, stage)
                        break
                    grown.append(((*heads, end), spent))
            states = grown
        yield from states

    def _farthest(
        self, lanes: list[_Lane], start: int, stop: int, spent: list[int], load: int, stage: int, over: list[int]
    ) -> int:
        """The farthest end of the last run within the limits; -1 where even none is too much."""
        end = stop
        for lane, each in zip(lanes, spent, strict=True):
            costs = lane.costs[-1]
            room = min(load - each, stage - lane.ends[-1])
            end = min(end, bisect_right(costs, costs[start] + room, start, stop + 1) - 1)
        if end < stop:
            more = (
                [lane.costs[-1][end + 1] - lane.costs[-1][start] for lane in lanes]
                if end >= start
                else [0] * len(lanes)
            )
            total = max(a + b for a, b in zip(spent, more, strict=True))
            alone = max(lane.ends[-1] + each for lane, each in zip(lanes, more, strict=True))
            _note(over, total, alone, load, stage)
        return end if end >= start else -1

    # ------------------------------------------------------------ every split within limits

    def _finds(self, load: int, stage: int) -> _Found | None:
        """The split with the least sum of squares within the limits, of those the one whose runs end earliest."""
        found = (self._find(load, stage, starts, stops) for starts, stops in self._bounds())
        return min((each for each in found if each is not None), default=None)

    def _find(self, load: int, stage: int, starts: Cursors, stops: Cursors) -> _Found | None:
        states: dict[Cursors, _Found] = {starts: (0, (starts,))}
        for index, lanes in enumerate(self.cells):
            following: dict[Cursors, _Found] = {}
            for cursors, (squares, path) in states.items():
                for ends, more in self._ways(index, lanes, cursors, stops, load, stage):
                    known = (squares + more, (*path, ends))
                    if ends not in following or known < following[ends]:
                        following[ends] = known
            states = following
        done = [known for ends, known in states.items() if self._is_all(ends, stops)]
        return min(done, default=None)

    def _ways(
        self, index: int, lanes: list[_Lane], cursors: Cursors, stops: Cursors, load: int, stage: int
    ) -> Iterator[tuple[Cursors, int]]:
        """Ends of a cell's runs from which the rest can be taken, and the sum of the squares of its stages."""
        stages, _ = self.pipeline.cells[index]
        outer = (0, self.pipeline.num_stages - 1)
        states: list[tuple[Cursors, list[int], int]] = [((), [sum(lane.ends) for lane in lanes], 0)]
        for run, start in enumerate(cursors):
            grown = []
            for heads, before, squares in states:
                for end in range(start + (stages[run] not in outer), stops[run] + 1):
                    self._step()
                    more = [lane.costs[run][end] - lane.costs[run][start] for lane in lanes]
                    spent = [a + b for a, b in zip(before, more, strict=True)]
                    alone = max(lane.ends[run] + each for lane, each in zip(lanes, more, strict=True))
                    if max(spent) > load or alone > stage:
                        break
                    grown.append(((*heads, end), spent, squares + alone * alone))
            states = grown
        for ends, _, squares in states:
            if self._can_end(index, ends, stops, load, stage):
                yield ends, squares

    def _can_end(self, index: int, ends: Cursors, stops: Cursors, load: int, stage: int) -> bool:
        """Whether what is left is enough for the stages behind this cell, and not too much for them."""
        rest = self.pipeline.cells[index + 1 :]
        outer = (0, self.pipeline.num_stages - 1)
        inner = sum(s not in outer for stages, _ in rest for s in stages)
        if self.pipeline.folded and sum(ends) > self.size:
            return False
        spans = self._spans(ends, stops)
        if sum(end - begin for begin, end in spans) < inner or any(end < begin for begin, end in spans):
            return False
        most = min(load * len(rest), stage * sum(len(stages) for stages, _ in rest))
        return all(sum(lane[end] - lane[begin] for begin, end in spans) <= most for lane in self.least)


def _even(num_layers: int, num_stages: int) -> Runs:
    """A split, whatever it costs: the ends have what the stages between them do not need."""
    inner = max(0, num_stages - 2)
    ends = [num_layers * (s + 1) // num_stages for s in range(num_stages)]
    if num_layers < 2 * num_stages:
        ends = [min(num_layers, num_layers - inner + s) if s else num_layers - inner for s in range(num_stages)]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


_Found = tuple[int, tuple[Cursors, ...]]  # sum of squares, and the cursors before the first cell and behind each


def _note(over: list[int], total: int, alone: int, load: int, stage: int) -> None:
    """What the limit that is looked for must be at least: on a stage's load where there is one, else on a rank's."""
    if stage == NO_LIMIT:
        over[0] = min(over[0], total)
    elif total <= load:
        over[0] = min(over[0], alone)


def _lowest(low: int, high: int, test: Callable[[int], tuple[bool, int]]) -> int:
    """The least limit that passes; `high` does. A test tells (True, …), or (False, a limit below which none passes)."""
    for turn in range(NO_LIMIT):
        passes, known = test(low)
        if passes:
            return low
        low = max(low + 1, known)
        if turn > PATIENCE and low < high:
            middle = (low + high) // 2
            passes, known = test(middle)
            low, high = (low, middle) if passes else (max(middle + 1, known), high)
        if low >= high:
            break
    return high
