"""Stages that are alike: their actions take equally long, so each of them stands for the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from compiler.ir import Stage, Use

Key = tuple[tuple[str, int], ...]  # (kind, stage) of an action, or of both of a pair


def twins_of(stages: Iterable[Stage]) -> dict[int, tuple[int, ...]]:
    """Stage → the stages that run the same segments and exchanges, ascending."""
    alike: dict[Hashable, list[int]] = {}
    for stage in stages:
        alike.setdefault(_shape(stage), []).append(stage.index)
    return {stage: tuple(group) for group in alike.values() for stage in group}


def key_of_twins(key: Key, twins: Mapping[int, tuple[int, ...]]) -> Key:
    """The key that stands for this one and its twins.

    Two stages stay two, as weight gradients of one stage wait for each other.
    """
    (first, stage), *rest = key
    return (
        (first, twins[stage][0]),
        *(
            (kind, twins[other_stage][other_stage != stage and twins[other_stage] == twins[stage]])
            for kind, other_stage in rest
        ),
    )


def _shape(stage: Stage) -> Hashable:
    return tuple(
        (
            step.segment.key if isinstance(step, Use) else (step.kind, tuple((b.shape, b.dtype) for b in step.sizes)),
            step.is_repeated,
        )
        for step in stage.steps
    )
