"""The order of micro-batches of unequal costs: which micro-batch of the data goes to which position of a schedule.

Short micro-batches at the start fill the pipeline sooner, short ones at the end drain it sooner, and neighbours of
similar size keep ranks from waiting for each other. The search anneals several orders at once, from sorted and random
ones. A move swaps two micro-batches or moves one. The search counts steps, not seconds, so equal arguments give equal
orders.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from runtime.contract.actions import COPIES, Step, actions_of, is_copy

Floats = NDArray[np.float64]
_CHAINS = 64  # orders that are annealed at once: numpy times them together
_WORK = 1_200_000  # steps that are timed, each for all chains; they take about 10 s
_ROUNDS = (40, 1_500)  # the least and the most rounds of all chains
_HEATS = (0.02, 0.0005)  # first and last temperature, in makespans
_MEAN = 0.2  # weight of the ranks' mean end in the score, as the makespan alone has wide plateaus


def reorder_costs(costs: Costs, order: Sequence[int]) -> Costs:
    """The costs by position of a schedule, if `order` has the micro-batch of the data at each position."""
    return replace(costs, micro_batches=tuple(costs.micro_batches[m] for m in order))


def best_order(
    schedule: Schedule, costs: Costs, effort: float = 1.0, report: Callable[[float], None] = lambda share: None
) -> list[int]:
    """The micro-batch of the data at each position of a checked schedule, with the shortest makespan found.

    Never worse than the order of the data, which is one of the starts. `effort` scales the work of the search.
    """
    timed = _TimedSteps(schedule, costs)
    rng = random.Random(0)
    orders = _starts(schedule, costs, rng)
    scores = timed.scores(orders).tolist()
    best = min(zip(scores, orders, strict=True))
    rounds = math.ceil(effort * min(max(_WORK // len(timed.steps), _ROUNDS[0]), _ROUNDS[1]))
    hot, cold = (heat * scores[0] for heat in _HEATS)
    for turn in range(rounds):
        heat = hot * (cold / hot) ** (turn / rounds)
        tried = [_swap_or_move(order, rng) for order in orders]
        for chain, (before, after) in enumerate(zip(scores, timed.scores(tried).tolist(), strict=True)):
            if after <= before or rng.random() < math.exp((before - after) / heat):
                orders[chain], scores[chain] = tried[chain], after
                best = min(best, (after, tried[chain]))
        report((turn + 1) / rounds)
    identity = [*range(schedule.num_micro_batches)]
    return min((identity, best[1]), key=lambda order: simulate(schedule, reorder_costs(costs, order)).makespan)


def _starts(schedule: Schedule, costs: Costs, rng: random.Random) -> list[list[int]]:
    """The order of the data, sorted orders and random orders. Positions are sorted by when they begin."""
    N = schedule.num_micro_batches
    spans = simulate(schedule, replace(costs, micro_batches=())).ticks
    begins = [0] * N
    for steps, ticks in zip(schedule.actions, spans, strict=True):
        for step, (start, _) in zip(steps, ticks, strict=True):
            for action in actions_of(step):
                if action.kind == "F" and action.stage == 0:
                    begins[action.micro_batch] = start
    positions = sorted(range(N), key=lambda position: (begins[position], position))
    rising = sorted(range(N), key=lambda m: (costs.micro_batches[m], m))
    hill = [*rising[::2], *reversed(rising[1::2])]
    lists = [rising, rising[::-1], hill, hill[N // 2 :] + hill[: N // 2]]
    orders = [[*range(N)]]
    for micro_batches in lists:
        order = [0] * N
        for position, m in zip(positions, micro_batches, strict=True):
            order[position] = m
        orders.append(order)
    orders *= max(1, _CHAINS // (2 * len(orders)))
    return orders + [rng.sample(range(N), N) for _ in range(_CHAINS - len(orders))]


def _swap_or_move(order: list[int], rng: random.Random) -> list[int]:
    """An order with two micro-batches swapped, or one moved."""
    result = order[:]
    a, b = (rng.randrange(len(order)) for _ in range(2))
    if rng.random() < 0.5:
        result[a], result[b] = result[b], result[a]
    else:
        result.insert(b, result.pop(a))
    return result


class _TimedSteps:
    """A schedule's steps in topological order, with their times as functions of the weights of micro-batches.

    Copies of each direction run in a separate lane of the rank.
    """

    # (rank, length, or time of a copy, [(step that it waits for, delay)], kind of the copy or "")
    Step: TypeAlias = "tuple[int, _Length | float, list[tuple[int, float]], str]"

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.weights = np.array([float(weight) for weight in costs.micro_batches])
        self.num_ranks, last = schedule.num_ranks, schedule.num_stages - 1
        plain = replace(costs, micro_batches=())
        unit = Fraction(1)
        ticks = simulate(schedule, Costs(O=unit, R=unit)).ticks  # every step takes time, so starts are in that order
        starts = [(start, rank, k) for rank, row in enumerate(ticks) for k, (start, _) in enumerate(row)]
        self.steps: list[_TimedSteps.Step] = []
        made_by: dict[tuple[bool, int, int], int] = {}  # (backward, stage, micro-batch) -> the step
        fetched: dict[tuple[int, int], int] = {}  # (stage, micro-batch) -> the copy back
        for number, (_, rank, k) in enumerate(sorted(starts)):
            step, waits = schedule.actions[rank][k], []
            if is_copy(step):
                (copy,) = actions_of(step)
                if copy.kind == "R":
                    fetched[copy.stage, copy.micro_batch] = number
                else:
                    waits.append((made_by[False, copy.stage, copy.micro_batch], 0.0))
                self.steps.append((rank, float(plain.lone_time(copy.kind)), waits, copy.kind))
                continue
            handed = [action for action in actions_of(step) if action.kind != "W"]
            for action in handed:
                back = action.kind != "F"
                before = action.stage + (1 if back else -1)
                if back and (action.stage, action.micro_batch) in fetched:
                    waits.append((fetched[action.stage, action.micro_batch], 0.0))
                if 0 <= before <= last:
                    source = schedule.rank_of(before, action.micro_batch)
                    delay = float(plain.message(source, rank)) if source != rank else 0.0
                    waits.append((made_by[back, before, action.micro_batch], delay))
            made_by |= {(action.kind != "F", action.stage, action.micro_batch): number for action in handed}
            self.steps.append((rank, _Length.of(step, rank, plain), waits, ""))

    def scores(self, orders: Sequence[Sequence[int]]) -> Floats:
        """The makespan of each order, plus a share of the mean end of the ranks."""
        weights = self.weights[np.array(orders).T]  # [position, order]
        ends: list[Floats] = []
        clocks = [np.zeros(len(orders)) for _ in range(self.num_ranks)]
        lanes: dict[tuple[str, int], Floats] = {(copy, r): zeros for copy in COPIES for r, zeros in enumerate(clocks)}
        for rank, length, waits, copy in self.steps:
            start = lanes[copy, rank] if copy else clocks[rank]
            for step, delay in waits:
                start = np.maximum(start, ends[step] + delay if delay else ends[step])
            if isinstance(length, _Length):
                end = clocks[rank] = start + length(weights)
            elif copy == "O":  # the rank waits until it ends
                end = lanes[copy, rank] = start + length
                clocks[rank] = np.maximum(clocks[rank], end)
            else:
                end = lanes[copy, rank] = np.maximum(start, clocks[rank]) + length
            ends.append(end)
        rank_ends = np.array(clocks)
        return np.asarray(rank_ends.max(axis=0) + _MEAN * rank_ends.mean(axis=0))


@dataclass(frozen=True)
class _Length:
    """The time of a step as a function of the weights of its micro-batches, as in `Costs.step_time`.

    A pair takes the sum of `shares` times weights, and at least each action's `least` times its weight.
    """

    micro_batches: tuple[int, ...]
    shares: tuple[float, ...]
    least: tuple[float, ...]

    @staticmethod
    def of(step: Step, rank: int, costs: Costs) -> _Length:
        parts, least = costs.parts(step, rank)
        micro_batches = tuple(action.micro_batch for action in actions_of(step))
        return _Length(micro_batches, tuple(map(float, parts)), tuple(map(float, least)))

    def __call__(self, weights: Floats) -> Floats:
        if len(self.shares) == 1:
            return np.asarray(weights[self.micro_batches[0]] * self.shares[0])
        a, b = (weights[m] for m in self.micro_batches)
        longest = np.maximum(a * self.least[0], b * self.least[1])
        return np.asarray(np.maximum(a * self.shares[0] + b * self.shares[1], longest))
