"""The problem that is solved: rows that run slots, the waits between them, and the exact costs as whole numbers.

A row is a rank, and its chunks are the stages that the placement gives it. A micro-batch takes a path: for each stage,
a row and a chunk of it. Under `bidirectional` there are two paths, one for each direction. If `is_folded`, ranks r and
P-1-r of a bidirectional pipeline run the same list: the rows are half of the ranks, and both paths become one, a V.

Costs and cap are for the placement's stages, which have half as much of the model under `v` as under `loop(1)`. If a
path stays on a rank, its message takes the latency here, so `simulate` may find a shorter time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations_with_replacement, product

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.numbering import number_micro_batches
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Home, Slot, homes
from compiler.schedule.weights import Weight
from runtime.contract.actions import Action, ActionKind, Pair, actions_of

# --- Slots as small integers: the next step of a row, without a micro-batch index
#
# A token is a kind and a chunk, of which a row has up to `MOST_CHUNKS`. The k-th F of a chunk is for its k-th
# micro-batch. A W, which is written with chunk 0 for any chunk, takes the oldest input gradient whose weight gradient
# is still due. A slot is a token, or an unordered pair of tokens.

Slots = tuple[tuple[int, ...], ...]  # [row][position]: a schedule
MOST_CHUNKS = 16
F, B, I, W = (kind * MOST_CHUNKS for kind in range(4))  # tokens of chunk 0; W + chunk is used only to look up times
NUM_TOKENS = 4 * MOST_CHUNKS
NUM_CODES = NUM_TOKENS * (NUM_TOKENS + 1)  # numbers of slots


def pair(a: int, b: int) -> int:
    """The slot of two tokens that overlap."""
    return NUM_TOKENS * (min(a, b) + 1) + max(a, b)


def tokens_of(slot: int) -> tuple[int, ...]:
    """The one or two tokens of a slot, ascending."""
    return (slot,) if slot < NUM_TOKENS else (slot // NUM_TOKENS - 1, slot % NUM_TOKENS)


def slot_of(tokens: Iterable[int]) -> int:
    """Inverse of `tokens_of`, in any order."""
    first, *second = tokens
    return pair(first, second[0]) if second else first


def kind_of(token: int) -> str:
    """F, B, I or W."""
    return "FBIW"[token // MOST_CHUNKS]


def chunk_of(token: int) -> int:
    """The chunk of a token; 0 for a W in a slot."""
    return token % MOST_CHUNKS


# --- problem

# Events: one that never arrives, one at the start, and one that nobody waits for; then `count` that paths begin with.
NEVER, NOW, NOBODY, FIRST = 0, 1, 2, 3


@dataclass(frozen=True)
class ScheduleProblem:
    """Sizes, times and waits. An event is the end of the k-th F, or of the k-th B or I, of a chunk of a row.

    The kind of an event is a number: the chunk for F, and `num_chunks` more for B and I.
    """

    placement: StagePlacement
    is_folded: bool
    num_ranks: int
    count: int  # micro-batches of each chunk; one less in direction 1 if `is_odd`
    is_odd: bool  # bidirectional with one micro-batch less in direction 1
    caps: tuple[int, ...]  # [row], in parts of an activation
    activation_parts: int  # parts of an activation
    w_parts: int  # parts that are held from its I to its W
    unit: Fraction  # of all times, which are whole numbers
    delays: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][kind]: time of the message that its events send
    times: tuple[dict[int, int], ...] = field(repr=False)  # [row][slot], where a W is written with its chunk
    offered: tuple[frozenset[int], ...] = field(repr=False)  # [row]: lone tokens, and pairs that gain
    has_equal_w: bool  # whether a W takes the same time for every chunk
    delay: tuple[int, ...] = field(repr=False)  # [event]
    needs: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][kind]: the event that the first one waits for
    makes: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][kind]: the event that the first one makes
    counts: tuple[tuple[int, ...], ...] = field(repr=False)  # [row][chunk]: its micro-batches

    @property
    def num_rows(self) -> int:
        return len(self.times)

    @property
    def num_chunks(self) -> int:
        return chunks_a_row(self.placement)

    @property
    def num_events(self) -> int:
        return FIRST + self.count * (2 * self.num_chunks * self.num_rows + 1)

    @property
    def room(self) -> tuple[int, ...]:
        """By row, the whole activations that it can hold."""
        return tuple(cap // self.activation_parts for cap in self.caps)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages(self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        return self.count * self.placement.copies - self.is_odd

    @cached_property
    def homes(self) -> tuple[tuple[Home, ...], ...]:
        """By rank and chunk, its stage and the direction of its micro-batches."""
        return tuple(homes(self.placement, self.num_ranks, rank) for rank in range(self.num_ranks))

    def event(self, row: int, kind: int) -> int:
        """The first event of a row and kind."""
        return FIRST + self.count * (1 + 2 * self.num_chunks * row + kind)

    def row_of(self, rank: int) -> int:
        """The row that a rank runs."""
        return min(rank, self.num_ranks - 1 - rank) if self.is_folded else rank


def chunks_a_row(placement: StagePlacement) -> int:
    """The number of stages that a row runs, in both directions."""
    return placement.stages_per_rank * placement.copies


def make_problem(
    placement: StagePlacement,
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: Fraction | int | Sequence[Fraction | int],
    folded: bool = False,
) -> ScheduleProblem:
    """A problem of the given sizes, with one micro-batch more if ranks are folded and the number is odd.

    `cap`: one for all ranks, or one for each.
    """
    P, two_way = num_ranks, placement == BIDIRECTIONAL
    count, odd = (
        (num_micro_batches + two_way) // placement.copies,
        two_way and not folded and num_micro_batches % 2 == 1,
    )
    parts, w_parts = costs.keeps.denominator, costs.keeps.numerator
    of_rank = [int(rank_cap * parts) for rank_cap in ((cap,) * P if isinstance(cap, (int, Fraction)) else cap)]
    rows = P // 2 if folded else P
    caps = tuple(min(of_rank[row], of_rank[P - 1 - row]) for row in range(rows)) if folded else tuple(of_rank)
    gains = costs.gains()
    tables: dict[tuple[Weight, ...], dict[int, Fraction]] = {}  # rows with equal weights share one
    keys = [tuple(costs.weight(stage, row) for stage, _ in homes(placement, P, row)) for row in range(rows)]
    for row, key in enumerate(keys):
        if key not in tables:
            tables[key] = _times([stage for stage, _ in homes(placement, P, row)], row, costs)
    messages = [_messages(placement, P, row, costs) for row in range(rows)]
    denominators = (time.denominator for row in messages for time in row)
    unit = Fraction(
        1,
        math.lcm(
            costs.latency.denominator,
            *denominators,
            *(t.denominator for table in tables.values() for t in table.values()),
        ),
    )
    times = {key: {slot: int(time / unit) for slot, time in table.items()} for key, table in tables.items()}
    offered = {
        key: frozenset(slot for slot in table if _is_offered(slot, table, gains)) for key, table in tables.items()
    }
    problem = ScheduleProblem(
        placement,
        folded,
        P,
        count,
        odd,
        caps,
        parts,
        w_parts,
        unit,
        tuple(tuple(int(time / unit) for time in row) for row in messages),
        tuple(times[key] for key in keys),
        tuple(offered[key] for key in keys),
        all(are_alike(table, W, W + chunk, len(key)) for key, table in times.items() for chunk in range(len(key))),
        (),
        (),
        (),
        (),
    )
    return resize_problem(problem, count)


def resize_problem(problem: ScheduleProblem, count: int) -> ScheduleProblem:
    """The problem with another number of micro-batches."""
    problem = replace(problem, count=count)
    C, rows = problem.num_chunks, range(problem.num_rows)
    row_homes = problem.homes[: problem.num_rows]
    places = {
        home: (problem.row_of(rank), chunk)
        for rank, rank_homes in enumerate(problem.homes)
        for chunk, home in enumerate(rank_homes)
    }

    def need(stage: int, direction: int, step: int) -> int:
        """The event of the previous or next stage; a path waits for nothing at its ends."""
        if (stage + step, direction) not in places:
            return FIRST
        row, chunk = places[stage + step, direction]
        return problem.event(row, chunk if step < 0 else C + chunk)

    needs = tuple(tuple([need(*home, step) for step in (-1, 1) for home in row_homes[row]]) for row in rows)
    makes = tuple(tuple(problem.event(row, kind) for kind in range(2 * C)) for row in rows)
    counts = tuple(tuple(count - (problem.is_odd and direction) for _, direction in row_homes[row]) for row in rows)
    delay = [0] * problem.num_events
    for row, row_delays in enumerate(problem.delays):
        for kind, time in enumerate(row_delays):
            first = problem.event(row, kind)
            delay[first : first + count] = [time] * count
    return replace(problem, delay=tuple(delay), needs=needs, makes=makes, counts=counts)


def _messages(placement: StagePlacement, num_ranks: int, row: int, costs: Costs) -> list[Fraction]:
    """By kind of event of a row, the time of the message to the rank that waits for it; 0 if none does."""
    times = []
    for step in (1, -1):
        for stage, direction in homes(placement, num_ranks, row):
            end = stage + step
            inside = 0 <= end < placement.num_stages(num_ranks)
            times.append(costs.message(row, _rank_of(placement, num_ranks, end, direction)) if inside else Fraction(0))
    return times


def _rank_of(placement: StagePlacement, num_ranks: int, stage: int, direction: int) -> int:
    """The rank of a stage on micro-batches of a direction."""
    return placement.rank_of(num_ranks, 2, stage, direction if placement == BIDIRECTIONAL else 0)


def _times(stages: Sequence[int], row: int, costs: Costs) -> dict[int, Fraction]:
    """The time of each token of a row, where a W has its chunk, and of each pair."""
    lone = [token + chunk for token in (F, B, I, W) for chunk in range(len(stages))]
    action = {token: Action(_kind(token), stages[chunk_of(token)], 0) for token in lone}
    result = {token: costs.step_time(action[token], row) for token in lone}
    for tokens in combinations_with_replacement(lone, 2):
        first, second = (action[token] for token in tokens)
        result[slot_of(tokens)] = costs.step_time(Pair(first, replace(second, micro_batch=1)), row)
    return result


def are_alike(table: dict[int, int], first: int, second: int, num_chunks: int) -> bool:
    """Whether two tokens of a row take equally long, alone and in each pair with a third."""
    partners = [(token + chunk,) for token in (F, B, I, W) for chunk in range(num_chunks)]
    return all(table[slot_of((first, *partner))] == table[slot_of((second, *partner))] for partner in [(), *partners])


def _is_offered(slot: int, table: dict[int, Fraction], gains: frozenset[str]) -> bool:
    tokens = tokens_of(slot)
    if any(token > W for token in tokens):
        return False
    if len(tokens) == 1:
        return True
    if "".join(sorted(map(kind_of, tokens))) not in gains:
        return False
    chunks = range(sum(token >= W for token in table if token < NUM_TOKENS))  # a W in a slot may be any chunk's
    pairs = product(*([W + chunk for chunk in chunks] if token == W else [token] for token in tokens))
    return any(table[slot_of(pair)] < sum(table[token] for token in pair) for pair in pairs)


def _kind(token: int) -> ActionKind:
    return kind_of(token)  # type: ignore[return-value]


# ---------------------------------------------------------------- to and from schedules
def schedule_of_slots(problem: ScheduleProblem, slots: Slots) -> Schedule:
    """The schedule that the rows run, named auto."""
    named_slots = {slot: _named_slot(slot) for slot in set().union(*slots)}
    P, N = problem.num_ranks, problem.num_micro_batches

    def of_rank(rank: int) -> list[Slot]:
        return [named_slots[slot] for slot in slots[problem.row_of(rank)]]

    return number_micro_batches("auto", P, N, problem.placement, of_rank)


def _named_slot(slot: int) -> Slot:
    """The slot in the form of named schedules."""
    return tuple(("W", -1) if token == W else (_kind(token), chunk_of(token)) for token in tokens_of(slot))


def slots_of_schedule(problem: ScheduleProblem, schedule: Schedule) -> Slots:
    """The rows of a schedule on the problem's ranks, or on a V of half of them. Pairs that are not offered are split.

    The form cannot express every order of micro-batches or W, so the result may differ from the schedule: time it.
    """
    rows = []
    for row in range(min(problem.num_rows, schedule.num_ranks)):
        chunks = {stage: chunk for chunk, (stage, _) in enumerate(problem.homes[row])}
        slots: list[int] = []
        for step in schedule.actions[row]:
            tokens = [_token(action, chunks) for action in actions_of(step)]
            slot = slot_of(tokens)
            slots += [slot] if slot in problem.offered[row] else sorted(tokens, reverse=True)
        rows.append(tuple(slots))
    return tuple(rows)


def _token(action: Action, chunks: dict[int, int]) -> int:
    return W if action.kind == "W" else {"F": F, "B": B, "I": I}[action.kind] + chunks[action.stage]
