"""When a run's batch has which size: the steps of the run, and the micro-batch counts it needs programs for."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.schema import Batch, Spec


@dataclass(frozen=True)
class Steps:
    """`batches`: (first step, sequences a step), ascending; `total`: steps until the run's tokens are trained on."""

    batches: tuple[tuple[int, int], ...]
    total: int


def run_steps(spec: Spec, unit: int) -> Steps:
    """`unit`: sequences by which a batch may grow (data · micro_batch, twice that under a bidirectional schedule).

    A ramp is linear in tokens, rounded down to `unit`, never below one `unit`.
    """
    train = spec.train
    batches: list[tuple[int, int]] = []
    tokens = step = 0
    while tokens < train.tokens:
        size = _size(train.batch, tokens, unit)
        if not batches or batches[-1][1] != size:
            batches.append((step, size))
        until = _next_change(train.batch, size, unit) if size < train.batch.end else train.tokens
        steps = max(1, -(-(min(until, train.tokens) - tokens) // (size * train.sequence)))
        step, tokens = step + steps, tokens + steps * size * train.sequence
    return Steps(tuple(batches), step)


def _size(batch: Batch, tokens: int, unit: int) -> int:
    if tokens >= batch.over_tokens:
        return batch.end
    size = batch.start + (batch.end - batch.start) * tokens // batch.over_tokens
    return max(unit, size // unit * unit)


def _next_change(batch: Batch, size: int, unit: int) -> int:
    """Tokens at which a ramp reaches the next size."""
    following = min(size + unit, batch.end)
    return -(-(following - batch.start) * batch.over_tokens // (batch.end - batch.start))


def micro_batches(spec: Spec, steps: Steps) -> tuple[int, ...]:
    """The distinct numbers of micro-batches of a pipeline in the run, ascending."""
    share = spec.parallel.data * spec.train.micro_batch
    return tuple(sorted({size // share for _, size in steps.batches}))
