"""What is solved: rows that run slots, who waits for whom, and whole times that are those of the costs exactly.

Four forms. `v`: two stages a rank, in the form of a V. `folded`: a bidirectional pipeline whose rank r and mirror P-1-r
run the same list, seen as the V of half the ranks. `unfolded`: the same pipeline with a list for every rank, for rank
weights that are no mirror image. `chain`: one stage a rank, `loop(1)`.

Costs and cap are those of the form's stages: of half as much of the model under `v` as under the others. Where the V
turns, the message stays on its rank; here it takes the latency as any other, so that under `v` the judge may find less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from compiler.schedules.costs import Costs
from compiler.schedules.schedule import Schedule
from compiler.solver.tokens import KIND, NUM_CODES, PAIRS, W1, Slots, W, slot_of, tokens_of
from compiler.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V
from runtime.actions import Action, ActionKind, Pair, Step, actions_of

Form = Literal["v", "folded", "unfolded", "chain"]
NEVER, NOW, NOBODY, FIRST = 0, 1, 2, 3  # events: not there, at the start, waited for by nobody; then `count` entries


@dataclass(frozen=True)
class Problem:
    """Sizes, times and waits; an event is the end of the k-th F0, F1, B0 (or I0) or B1 (or I1) of a row."""

    form: Form
    num_ranks: int
    count: int  # micro-batches of each chunk, or most of them
    odd: bool  # unfolded with one micro-batch less in direction 1
    cap: int
    unit: Fraction  # of the whole times
    latency: int
    times: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][slot, a W of the far chunk written W1]
    offered: tuple[tuple[bool, ...], ...] = field(repr=False)  # [row][slot]: lone tokens, and pairs that gain
    needs: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][kind]: the event that the first one waits for
    makes: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][kind]: the event that the first one makes
    counts: tuple[tuple[int, ...], ...] = field(repr=False)  # [row]: micro-batches of the near and of the far chunk
    one_w: bool  # whether a W takes the same time whichever chunk's it is

    @property
    def num_rows(self) -> int:
        return len(self.times)

    @property
    def num_events(self) -> int:
        return FIRST + self.count * (4 * self.num_rows + 1)

    @property
    def num_chunks(self) -> int:
        return 1 if self.form == "chain" else 2

    @property
    def num_stages(self) -> int:
        return 2 * self.num_ranks if self.form == "v" else self.num_ranks

    @property
    def placement(self) -> StagePlacement:
        return {"v": V, "chain": ONE_STAGE}.get(self.form, BIDIRECTIONAL)

    @property
    def num_micro_batches(self) -> int:
        return self.count if self.form in ("v", "chain") else 2 * self.count - self.odd

    def event(self, row: int, kind: int) -> int:
        """The first event of a row and kind: F0, F1, B0, B1 = 0, 1, 2, 3."""
        return FIRST + self.count * (1 + 4 * row + kind)


def make_problem(form: Form, num_ranks: int, num_micro_batches: int, costs: Costs, cap: int) -> Problem:
    """A problem of so many micro-batches, or where the form is folded and they are odd, of one more."""
    P, N = num_ranks, num_micro_batches
    count, odd = (N, False) if form in ("v", "chain") else ((N + 1) // 2, form == "unfolded" and N % 2 == 1)
    rows = P // 2 if form == "folded" else P
    tables = [_times(form, P, row, costs) for row in range(rows)]
    unit = Fraction(
        1, math.lcm(costs.latency.denominator, *(t.denominator for table in tables for t in table.values()))
    )
    times = tuple(tuple(int(table.get(slot, 0) / unit) for slot in range(NUM_CODES)) for table in tables)
    gains = {kinds[0] + kinds[1] for kinds in costs.gains()}
    offered = tuple(
        tuple(slot in table and _is_offered(slot, table, gains) for slot in range(NUM_CODES)) for table in tables
    )
    one_w = all(table[slot] == table[_far_w(slot)] for table in tables for slot in table if _far_w(slot) in table)
    latency = int(costs.latency / unit)
    return resized(Problem(form, P, count, odd, cap, unit, latency, times, offered, (), (), (), one_w), count)


def resized(problem: Problem, count: int) -> Problem:
    """The problem with another number of micro-batches."""
    problem, rows = replace(problem, count=count), range(problem.num_rows)
    needs = tuple(tuple(_need(problem, row, kind) for kind in range(4)) for row in rows)
    makes = tuple(tuple(problem.event(row, kind) for kind in range(4)) for row in rows)
    counts = [(count, 0 if problem.form == "chain" else count)] * problem.num_rows
    if problem.odd:
        half = problem.num_rows // 2
        counts = [(count, count - 1)] * half + [(count - 1, count)] * half
    return replace(problem, needs=needs, makes=makes, counts=tuple(counts))


def stages_of_row(form: Form, num_ranks: int, row: int) -> tuple[int, ...]:
    """The stages of a row's chunks."""
    if form == "chain":
        return (row,)
    stages = 2 * num_ranks if form == "v" else num_ranks
    near = min(row, stages - 1 - row)
    return (near, stages - 1 - near)


def _times(form: Form, num_ranks: int, row: int, costs: Costs) -> dict[int, Fraction]:
    """Time of each slot on a row."""
    stages = stages_of_row(form, num_ranks, row)
    result = {}
    for slot in (*range(8), *PAIRS, *(slot_of((a, W1)) for a in range(8))):
        tokens = tokens_of(slot)
        if all((token & 1) < len(stages) for token in tokens):
            one, *two = (Action(_kind(token), stages[token & 1], k) for k, token in enumerate(tokens))
            result[slot] = costs.of(Pair(one, two[0]) if two else one, row)
    return result


def _far_w(slot: int) -> int:
    return slot_of(W1 if token == W else token for token in tokens_of(slot))


def _is_offered(slot: int, table: dict[int, Fraction], gains: set[str]) -> bool:
    tokens = tokens_of(slot)
    if W1 in tokens:
        return False
    if len(tokens) == 1:
        return True
    return "".join(sorted(KIND[token] for token in tokens)) in gains and table[slot] < sum(table[t] for t in tokens)


def _need(problem: Problem, row: int, kind: int) -> int:
    """Where the k-th of a kind finds what it waits for: at this event + k."""
    chunk, backward = kind & 1, kind >= 2
    away = backward != bool(chunk)  # whether it comes from the middle, or for a chain from the next row
    P, half = problem.num_stages, problem.num_stages // 2
    if problem.form == "chain":
        source = row + 1 if backward else row - 1
        return problem.event(source, kind) if 0 <= source < P and not chunk else FIRST
    mirrored = row >= half  # of the unfolded form
    near = P - 1 - row if mirrored else row
    other = near + 1 if away else near - 1
    if other < 0:
        return FIRST
    if other == half:  # the middle: the other chunk, of the same row seen folded
        if problem.form != "unfolded":
            return problem.event(row, kind ^ 1)
        return problem.event(P - 1 - row, kind ^ 1)
    return problem.event(P - 1 - other if mirrored else other, kind)


def _kind(token: int) -> ActionKind:
    return KIND[token]  # type: ignore[return-value]


# ---------------------------------------------------------------- to and from schedules


def schedule_of_slots(problem: Problem, slots: Slots) -> Schedule:
    """The schedule that the rows run, named auto."""
    P, N = problem.num_ranks, problem.num_micro_batches
    rows = slots if problem.form != "folded" else (*slots, *reversed(slots))
    ranks = tuple(_steps(problem, rank, row) for rank, row in enumerate(rows))
    return Schedule("auto", P, N, problem.placement, ranks)


def _steps(problem: Problem, rank: int, slots: tuple[int, ...]) -> tuple[Step, ...]:
    stages = stages_of_row(problem.form, problem.num_ranks, rank)
    mirrored = rank >= problem.num_ranks // 2
    halves = (problem.count, 0) if mirrored else (0, problem.count)
    first = halves if problem.placement == BIDIRECTIONAL else (0, 0)
    done = [0] * 4
    deferred: list[Action] = []
    steps: list[Step] = []
    for slot in slots:
        actions = []
        for token in tokens_of(slot):
            if token == W:
                oldest = deferred.pop(0)
                actions.append(Action("W", oldest.stage, oldest.micro_batch))
                continue
            kind = token if token < 4 else token - 2
            actions.append(Action(_kind(token), stages[token & 1], first[token & 1] + done[kind]))
            done[kind] += 1
        deferred += [action for action in actions if action.kind == "I"]
        steps.append(Pair(*actions) if len(actions) == 2 else actions[0])
    return tuple(steps)


def slots_of_schedule(problem: Problem, schedule: Schedule) -> Slots:
    """The rows of a schedule of the problem's ranks, or of the V of half of them; pairs not offered are taken apart.

    What the form cannot say (an order of micro-batches of its own, or of W) is lost: time what comes back.
    """
    rows = []
    for row in range(min(problem.num_rows, schedule.num_ranks)):
        stages = stages_of_row(problem.form, problem.num_ranks, row)
        slots: list[int] = []
        for step in schedule.actions[row]:
            tokens = [_token(action, stages) for action in actions_of(step)]
            slot = slot_of(tokens)
            slots += [slot] if problem.offered[row][slot] else sorted(tokens, reverse=True)
        rows.append(tuple(slots))
    return tuple(rows)


def _token(action: Action, stages: tuple[int, ...]) -> int:
    return W if action.kind == "W" else KIND.index(action.kind) + stages.index(action.stage)
