"""The sizes of the global batch over a run, and the conversion between steps and tokens that follows.

A batch grows in equal increments of `quantum` sequences, at equal distances in tokens. The quantum of a run is
2·data·micro_batch for every schedule: this keeps the number of micro-batches even, as some schedules need, and the
steps do not depend on the schedule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from dsl.facts.schedules import GROWTH
from dsl.schema import Batch, Parallel, Spec

MAX_SIZES = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """Sequences per step (`batch`) from step `first_step` on, which begins after `first_token` tokens."""

    batch: int
    first_step: int
    first_token: int
    sequence: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Ramp:
    """The batch sizes of a run or phase, in order; the last one has no end."""

    sizes: tuple[Size, ...]

    def tokens_at(self, step: int) -> int:
        """Tokens of the first `step` steps."""
        size = self.sizes[max(0, bisect_right(self.sizes, step, key=lambda entry: entry.first_step) - 1)]
        return size.first_token + (step - size.first_step) * size.tokens

    def steps_for(self, tokens: int) -> int:
        """Steps needed to train on at least `tokens` tokens."""
        size = self.sizes[max(0, bisect_left(self.sizes, tokens, key=lambda entry: entry.first_token) - 1)]
        return size.first_step + -(-(tokens - size.first_token) // size.tokens)

    def with_earlier_sizes(self, earlier_sizes: tuple[Size, ...], step: int, token: int) -> Ramp:
        """Return this ramp preceded by `earlier_sizes`, which end after `step` steps and `token` tokens."""
        moved = (
            replace(size, first_step=size.first_step + step, first_token=size.first_token + token)
            for size in self.sizes
        )
        return Ramp((*earlier_sizes, *moved))

    def phases(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """(sequences per step, number of such steps) of a run of `tokens` tokens."""
        total = self.steps_for(tokens)
        ends = (*(size.first_step for size in self.sizes[1:]), total)
        counts = ((size.batch, min(end, total) - size.first_step) for size, end in zip(self.sizes, ends, strict=True))
        return tuple((batch, count) for batch, count in counts if count > 0)


def num_sizes(batch: Batch, quantum: int) -> int:
    """Number of sizes that a batch has while it grows."""
    return -(-(batch.end - batch.start) // quantum) + 1


def ramp(batch: Batch, sequence: int, quantum: int) -> Ramp:
    """Make the ramp of sizes `start`, `start + quantum`, … `end`, each reached after an equal share of
    `over_tokens`."""
    increments = num_sizes(batch, quantum) - 1
    assert 0 <= increments < MAX_SIZES, "the rules bound the number of sizes"
    sizes: list[Size] = []
    step = token = 0
    for index in range(increments + 1):
        size = min(batch.start + index * quantum, batch.end)
        until = -(-batch.over_tokens * (index + 1) // increments) if index < increments else token + 1
        if until > token:
            sizes.append(Size(size, step, token, sequence))
            count = -(-(until - token) // (size * sequence))
            step, token = step + count, token + count * size * sequence
    return Ramp(tuple(sizes))


def quantum_of(parallel: Parallel, micro_batch: int) -> int:
    """Sequences by which the batch of a run grows at a time."""
    return GROWTH * parallel.data * micro_batch


def ramp_of_spec(spec: Spec) -> Ramp:
    """The ramp of a resolved spec; for a phase of a run, from the beginning of the phase."""
    return ramp(spec.train.batch, spec.train.sequence, quantum_of(spec.parallel, spec.train.micro_batch))


def micro_batches(spec: Spec) -> tuple[int, ...]:
    """Micro-batches per step and data rank for every batch size of a run, ascending."""
    growth = ramp_of_spec(spec)
    steps = growth.steps_for(spec.train.tokens)
    batches = {size.batch for size in growth.sizes if size.first_step < steps}
    return tuple(sorted(batch // (spec.parallel.data * spec.train.micro_batch) for batch in batches))
