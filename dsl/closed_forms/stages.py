"""Pipeline stages of a run and the ranks that hold them, as far as they are known before planning.

`dsl.facts.schedules` has the facts of named schedules; here they are applied to the ranks, layers and layout of a spec.
"""

from __future__ import annotations

from dsl.facts.layout import LayoutError, expand_layout
from dsl.facts.schedules import AUTO, facts_of
from dsl.schema import ScheduleBlock, Spec


def fewest_stages_of_rank(schedule: ScheduleBlock) -> int:
    """The fewest stages of a pipeline rank; 1 if a schedule file decides."""
    if schedule.name == AUTO and schedule.placement is not None:
        return {"v": 2, "loop": schedule.chunks or 1, "bidirectional": 1}[schedule.placement]
    return facts_of(schedule.name).stages_per_rank(schedule.chunks)


def most_stages_of_rank(schedule: ScheduleBlock, ranks: int) -> int:
    """The most stages of a pipeline rank, whatever the number of layers."""
    layers_decide = schedule.name == AUTO and schedule.placement is None and not _is_mirrored_by_auto(schedule, ranks)
    return 2 if layers_decide else fewest_stages_of_rank(schedule)


def stages_of_rank(spec: Spec) -> int:
    """Stages of a pipeline rank, not counting second copies; 1 if a schedule file decides."""
    return 2 if is_folded(spec) else fewest_stages_of_rank(spec.schedule)


def most_stages(num_layers: int) -> int:
    """The most stages without an empty one: the first may hold only the embedding, and the last only the head."""
    return num_layers + 2


def is_folded(spec: Spec) -> bool:
    """Whether a rank holds stages r and 2P−1−r.

    `auto` folds with `placement = v`, or if it does not mirror and there are layers for 2P stages, unless a layout has
    P stages.
    """
    schedule, ranks = spec.schedule, spec.parallel.pipeline
    if schedule.name != AUTO:
        return facts_of(schedule.name).is_folded
    if schedule.placement is not None or _is_mirrored_by_auto(schedule, ranks):
        return schedule.placement == "v"
    return 2 * ranks <= most_stages(spec.model.num_layers) and _num_layout_stages(spec.parallel.layout) != ranks


def _num_layout_stages(layout: str | None) -> int:
    """Number of stages in the layout; 0 if there is none, or if it cannot be read, which a rule reports."""
    try:
        return 0 if layout is None else expand_layout(layout).count("|") + 1
    except LayoutError:
        return 0


def is_mirrored(spec: Spec) -> bool:
    """Whether there are two copies of every stage, on ranks r and P−1−r."""
    name, ranks = spec.schedule.name, spec.parallel.pipeline
    return (facts_of(name).is_mirrored and ranks > 1) or (name == AUTO and _is_mirrored_by_auto(spec.schedule, ranks))


def _is_mirrored_by_auto(schedule: ScheduleBlock, ranks: int) -> bool:
    """Whether `auto` mirrors stages: with `placement = bidirectional`, or by default if P is even and `copies` is not
    1."""
    placement = schedule.placement
    return placement == "bidirectional" or (placement is None and schedule.copies != 1 and ranks % 2 == 0)


def has_both_ends(spec: Spec) -> bool:
    """Whether the first and the last stage share a rank."""
    return is_mirrored(spec) or is_folded(spec) or spec.parallel.pipeline == 1


def may_overlap(schedule: ScheduleBlock) -> bool:
    """Whether forwards may be paired with backwards; true for a schedule file."""
    return facts_of(schedule.name).overlaps
