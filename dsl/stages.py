"""What the rules must know of a schedule before it is made: its stages, copies and sizes.

The compiler has the same in `compiler/schedules`, where schedules are made; a test holds the two together.
"""

from __future__ import annotations

from dsl.layout import LayoutError, expanded
from dsl.schema import Schedule, Spec

INTERLEAVED, AUTO = "interleaved", "auto"
EVEN = ("dualpipe",)  # schedules that want even numbers of ranks and micro-batches
FEWEST = {"dualpipe": 2, "dualpipev": 2}  # micro-batches they want for each pipeline rank, at the end of a ramp
FOLDED = ("dualpipev", "zbv")  # schedules that keep stages r and 2P−1−r on rank r
CHUNKS = 2  # stages a rank, of a schedule that lets one choose


def stages_per_rank(name: str | None, chunks: int | None) -> int:
    """Stages into which a pipeline rank's share of the layers is cut, at least; 1 where a file says it."""
    if name == INTERLEAVED:
        return chunks or CHUNKS
    return 2 if name in FOLDED else 1


def fewest_stages_of_rank(schedule: Schedule) -> int:
    """The same of a schedule."""
    return stages_per_rank(schedule.name, schedule.chunks)


def most_stages_of_rank(schedule: Schedule, ranks: int) -> int:
    """As many as there may be, whatever the layers are."""
    return 2 if schedule.name == AUTO and ranks % 2 else fewest_stages_of_rank(schedule)


def stages_of_rank(spec: Spec) -> int:
    """Stages into which a pipeline rank's share of the layers is cut; 1 where a file says it."""
    return 2 if is_folded(spec) else fewest_stages_of_rank(spec.schedule)


def most_stages(num_layers: int) -> int:
    """No stage is empty, but the first one has the embedding and the last one the head."""
    return num_layers + 2


def is_folded(spec: Spec) -> bool:
    """Whether a rank keeps stages r and 2P−1−r.

    `auto` folds where it cannot mirror, P being odd, and 2P stages have layers; a layout of P stages says otherwise.
    """
    name, ranks = spec.schedule.name, spec.parallel.pipeline
    if name != AUTO or ranks % 2 == 0:
        return name in FOLDED
    return 2 * ranks <= most_stages(spec.model.num_layers) and _stages_of_layout(spec.parallel.layout) != ranks


def _stages_of_layout(layout: str | None) -> int:
    """0 for none, and for one that cannot be read, which a rule says."""
    try:
        return 0 if layout is None else expanded(layout).count("|") + 1
    except LayoutError:
        return 0


def is_mirrored(spec: Spec) -> bool:
    """Whether there are two copies of every stage, on ranks r and P−1−r. `auto` mirrors where P is even."""
    name, ranks = spec.schedule.name, spec.parallel.pipeline
    return (name == "dualpipe" and ranks > 1) or (name == AUTO and ranks % 2 == 0)


def has_both_ends(spec: Spec) -> bool:
    """Whether the first and the last stage share a rank."""
    return is_mirrored(spec) or is_folded(spec) or spec.parallel.pipeline == 1
