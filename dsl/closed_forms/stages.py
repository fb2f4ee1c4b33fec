"""How a run is cut before it is planned: its pipeline into stages, and its steps into sizes of the batch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from dsl.facts.layout import LayoutError, expanded
from dsl.facts.schedules import AUTO, GROWTH, facts_of
from dsl.schema import Batch, Parallel, Schedule, Spec

# --- How a run's pipeline is cut into stages, and which ranks have them, as far as it is known before planning
#
# What a named schedule asks for is in `dsl.facts.schedules`; here it meets the ranks, layers and layout of a spec.


def fewest_stages_of_rank(schedule: Schedule) -> int:
    """Stages into which a pipeline rank's share of the layers is cut, at least; 1 where a file says it."""
    if schedule.name == AUTO and schedule.placement is not None:
        return {"v": 2, "loop": schedule.chunks or 1, "bidirectional": 1}[schedule.placement]
    return facts_of(schedule.name).stages_per_rank(schedule.chunks)


def most_stages_of_rank(schedule: Schedule, ranks: int) -> int:
    """Stages of a pipeline rank, at most, whatever the layers are."""
    layers_decide = schedule.name == AUTO and schedule.placement is None and not _is_mirrored_by_auto(schedule, ranks)
    return 2 if layers_decide else fewest_stages_of_rank(schedule)


def stages_of_rank(spec: Spec) -> int:
    """Stages into which a pipeline rank's share of the layers is cut; 1 where a file says it."""
    return 2 if is_folded(spec) else fewest_stages_of_rank(spec.schedule)


def most_stages(num_layers: int) -> int:
    """The most stages of which none is empty: the first has the embedding and the last the head, besides layers."""
    return num_layers + 2


def is_folded(spec: Spec) -> bool:
    """Whether a rank keeps stages r and 2P−1−r.

    `auto` folds where it is told to, and where it does not mirror if 2P stages have layers; a layout of P stages says
    otherwise.
    """
    schedule, ranks = spec.schedule, spec.parallel.pipeline
    if schedule.name != AUTO:
        return facts_of(schedule.name).is_folded
    if schedule.placement is not None or _is_mirrored_by_auto(schedule, ranks):
        return schedule.placement == "v"
    return 2 * ranks <= most_stages(spec.model.num_layers) and _stages_of_layout(spec.parallel.layout) != ranks


def _stages_of_layout(layout: str | None) -> int:
    """Number of stages of the layout; 0 for none, and for one that cannot be read, which a rule reports."""
    try:
        return 0 if layout is None else expanded(layout).count("|") + 1
    except LayoutError:
        return 0


def is_mirrored(spec: Spec) -> bool:
    """Whether there are two copies of every stage, on ranks r and P−1−r."""
    name, ranks = spec.schedule.name, spec.parallel.pipeline
    return (facts_of(name).is_mirrored and ranks > 1) or (name == AUTO and _is_mirrored_by_auto(spec.schedule, ranks))


def _is_mirrored_by_auto(schedule: Schedule, ranks: int) -> bool:
    """Whether `auto` mirrors: where P is even, unless the placement or the copies are given."""
    given = schedule.placement
    return given == "bidirectional" or (given is None and schedule.copies != 1 and ranks % 2 == 0)


def has_both_ends(spec: Spec) -> bool:
    """Whether the first and the last stage share a rank."""
    return is_mirrored(spec) or is_folded(spec) or spec.parallel.pipeline == 1


def may_overlap(schedule: Schedule) -> bool:
    """Whether forwards may be paired with backwards; a file may do so."""
    return facts_of(schedule.name).overlaps


# --- The sizes of the global batch over a run, and with them the conversion between steps and tokens
#
# A batch that grows does so in equal increments of `quantum` sequences, at equal distances of tokens. The quantum of a
# run is 2·data·micro_batch under every schedule: the number of micro-batches stays even, as some schedules want it, and
# another schedule changes no step.

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
