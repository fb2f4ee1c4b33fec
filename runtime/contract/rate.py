"""Quantities that change while a run goes on: the learning rate, phased values, the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from runtime.contract import Batches, PlannedPhase, RecipeRatePhase, RunPlan


def learning_rate(phases: Sequence[RecipeRatePhase], tokens: int) -> float:
    """The rate of the step after which `tokens` tokens have been trained on; past the last phase its end."""
    begin = 0
    for phase in phases:
        start, end, end_tokens = phase.start, phase.end, phase.end_tokens
        if tokens <= end_tokens:
            done = (tokens - begin) / (end_tokens - begin)
            if phase.shape == "cosine":
                return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
            return start + (end - start) * done if phase.shape == "linear" else start
        begin = end_tokens
    return phases[-1].end


def value_at(phases: Sequence[PlannedPhase], tokens: int) -> float:
    """The value of a phased quantity when `tokens` tokens have been trained on."""
    return next(p.value for p in phases if p.until_tokens is None or tokens < p.until_tokens)


def batch_at(batches: Batches, sequence: int, tokens: int) -> int:
    """Sequences of the step that begins when `tokens` tokens have been trained on."""
    return max((first, size) for first, size in _growth(batches, sequence) if first <= tokens)[1]


def tokens_after(batches: Batches, sequence: int, steps: int) -> int:
    """Tokens that the first `steps` steps train on."""
    growth = _growth((*(each for each in batches if each[0] < steps), (steps, 0)), sequence)
    return growth[-1][0]


def tokens_to_train(plan: RunPlan) -> int:
    """Tokens that a build trains on, counted from its first: of the run, or of a phase up to the beginning of the next.

    A phase that another follows ends with a whole step, where that one begins.
    """
    train = plan.train
    is_followed = train.within is not None and not train.within.is_last
    return tokens_after(plan.batches, train.sequence, plan.steps) if is_followed else train.tokens


def last_step(batches: Batches, sequence: int, step: int, tokens: int, total: int) -> int:
    """The step that trains on token `total`, where `tokens` have been trained on after `step`."""
    growth = _growth(batches, sequence)
    for (first, size), after in zip(growth, [*(g[0] for g in growth[1:]), None], strict=True):
        end = total if after is None else min(after, total)
        if tokens < end and first < end:
            steps = -(-(end - tokens) // (size * sequence))
            step, tokens = step + steps, tokens + steps * size * sequence
    return step


def _growth(batches: Batches, sequence: int) -> list[tuple[int, int]]:
    """(tokens trained on before, sequences of a step) of every size of the batch."""
    growth, tokens = [(0, batches[0][1])], 0
    for (start, size), (end, following) in pairwise(batches):
        tokens += (end - start) * size * sequence
        growth.append((tokens, following))
    return growth
