"""The sizes of the global batch over a run, and with them the conversion between steps and tokens.

A batch that grows does so in equal increments of `quantum` sequences, at equal distances of tokens. The quantum of a
run is 2·data·micro_batch under every schedule: the number of micro-batches stays even, as some schedules want it, and
another schedule changes no step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from dsl.facts.schedules import GROWTH
from dsl.schema import Batch, Parallel, Spec

MAX_SIZES = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """Sequences of a step (`batch`) from step `first_step` on, when `first_token` tokens have been trained on."""

    batch: int
    first_step: int
    first_token: int
    sequence: int  # tokens of each

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Ramp:
    """The sizes of a run, or of a phase of it, in order; the last one holds forever."""

    sizes: tuple[Size, ...]

    def tokens_at(self, step: int) -> int:
        """Tokens trained on when `step` steps are done."""
        size = self.sizes[max(0, bisect_right(self.sizes, step, key=lambda each: each.first_step) - 1)]
        return size.first_token + (step - size.first_step) * size.tokens

    def steps_for(self, tokens: int) -> int:
        """Steps needed to train on at least `tokens` tokens."""
        size = self.sizes[max(0, bisect_left(self.sizes, tokens, key=lambda each: each.first_token) - 1)]
        return size.first_step + -(-(tokens - size.first_token) // size.tokens)

    def behind(self, before: tuple[Size, ...], step: int, token: int) -> Ramp:
        """The ramp of a run in which these sizes come first, and end when `step` steps have trained on `token`s."""
        moved = (
            replace(each, first_step=each.first_step + step, first_token=each.first_token + token)
            for each in self.sizes
        )
        return Ramp((*before, *moved))

    def phases(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """(sequences of a step, number of such steps) of a run of `tokens` tokens."""
        total = self.steps_for(tokens)
        ends = (*(size.first_step for size in self.sizes[1:]), total)
        counts = ((size.batch, min(end, total) - size.first_step) for size, end in zip(self.sizes, ends, strict=True))
        return tuple((batch, count) for batch, count in counts if count > 0)


def num_sizes(batch: Batch, quantum: int) -> int:
    """How many sizes a batch grows through."""
    return -(-(batch.end - batch.start) // quantum) + 1


def ramp(batch: Batch, sequence: int, quantum: int) -> Ramp:
    """The sizes `start`, `start + quantum`, … `end`, each reached after an equal share of `over_tokens`."""
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
    """Sequences by which the batch of a run may grow."""
    return GROWTH * parallel.data * micro_batch


def of(spec: Spec) -> Ramp:
    """The ramp of a resolved spec; of a phase of a run, from its beginning on."""
    return ramp(spec.train.batch, spec.train.sequence, quantum_of(spec.parallel, spec.train.micro_batch))


def micro_batches(spec: Spec) -> tuple[int, ...]:
    """Micro-batches of a step on each data rank, of every size that the batch of a run has, ascending."""
    growth = of(spec)
    steps = growth.steps_for(spec.train.tokens)
    batches = {size.batch for size in growth.sizes if size.first_step < steps}
    return tuple(sorted(batch // (spec.parallel.data * spec.train.micro_batch) for batch in batches))
