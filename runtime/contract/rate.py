"""Quantities that change during a run: the learning rate, phased values, the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from runtime.contract import Batches, PlannedPhase, RecipeRatePhase, RunPlan


def learning_rate(phases: Sequence[RecipeRatePhase], tokens: int) -> float:
    """Return the rate of the step that ends at `tokens` trained tokens. After the last phase, its final rate."""
    begin = 0
    for phase in phases:
        start, end, end_tokens = phase.start, phase.end, phase.end_tokens
        if tokens <= end_tokens:
            share = (tokens - begin) / (end_tokens - begin)
            if phase.shape == "cosine":
                return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))
            return start + (end - start) * share if phase.shape == "linear" else start
        begin = end_tokens
    return phases[-1].end


def value_at(phases: Sequence[PlannedPhase], tokens: int) -> float:
    """Return the value of a phased quantity at `tokens` trained tokens."""
    return next(p.value for p in phases if p.until_tokens is None or tokens < p.until_tokens)


def batch_at(batches: Batches, sequence: int, tokens: int) -> int:
    """Return the sequences of the step that begins at `tokens` trained tokens."""
    return max((first, size) for first, size in _growth(batches, sequence) if first <= tokens)[1]


def tokens_after(batches: Batches, sequence: int, steps: int) -> int:
    """Return the tokens of the first `steps` steps."""
    growth = _growth((*(entry for entry in batches if entry[0] < steps), (steps, 0)), sequence)
    return growth[-1][0]


def tokens_to_train(plan: RunPlan) -> int:
    """Return the tokens that a build trains on: of the run, or of a phase up to the start of the next.

    A phase that another follows ends with a whole step.
    """
    train = plan.train
    is_followed = train.within is not None and not train.within.is_last
    return tokens_after(plan.batches, train.sequence, plan.steps) if is_followed else train.tokens


def last_step(batches: Batches, sequence: int, step: int, tokens: int, total: int) -> int:
    """Return the step that trains on token `total`, if `tokens` were trained on after `step`."""
    growth = _growth(batches, sequence)
    for (first, size), after in zip(growth, [*(g[0] for g in growth[1:]), None], strict=True):
        end = total if after is None else min(after, total)
        if tokens < end and first < end:
            steps = -(-(end - tokens) // (size * sequence))
            step, tokens = step + steps, tokens + steps * size * sequence
    return step


def _growth(batches: Batches, sequence: int) -> list[tuple[int, int]]:
    """Return (tokens trained before, sequences of a step) for every batch size."""
    growth, tokens = [(0, batches[0][1])], 0
    for (start, size), (end, following) in pairwise(batches):
        tokens += (end - start) * size * sequence
        growth.append((tokens, following))
    return growth
