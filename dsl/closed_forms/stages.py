"""How a run's pipeline is cut into stages, and which ranks have them, as far as it is known before planning.

What a named schedule asks for is in `dsl.facts.schedules`; here it meets the ranks, layers and layout of a spec.
"""

from __future__ import annotations

from dsl.facts.layout import LayoutError, expanded
from dsl.facts.schedules import AUTO, facts_of
from dsl.schema import ScheduleBlock, Spec


def fewest_stages_of_rank(schedule: ScheduleBlock) -> int:
    """Stages into which a pipeline rank's share of the layers is cut, at least; 1 where a file says it."""
    if schedule.name == AUTO and schedule.placement is not None:
        return {"v": 2, "loop": schedule.chunks or 1, "bidirectional": 1}[schedule.placement]
    return facts_of(schedule.name).stages_per_rank(schedule.chunks)


def most_stages_of_rank(schedule: ScheduleBlock, ranks: int) -> int:
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


def _is_mirrored_by_auto(schedule: ScheduleBlock, ranks: int) -> bool:
    """Whether `auto` mirrors: where P is even, unless the placement or the copies are given."""
    given = schedule.placement
    return given == "bidirectional" or (given is None and schedule.copies != 1 and ranks % 2 == 0)


def has_both_ends(spec: Spec) -> bool:
    """Whether the first and the last stage share a rank."""
    return is_mirrored(spec) or is_folded(spec) or spec.parallel.pipeline == 1


def may_overlap(schedule: ScheduleBlock) -> bool:
    """Whether forwards may be paired with backwards; a file may do so."""
    return facts_of(schedule.name).overlaps
