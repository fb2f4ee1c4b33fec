"""Writes docs/published-memory.md and sources.md from the JSON files in this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill

from benchmarks.published.memory.rows import PlannedPeak, PublishedPeak, groups, stored, summary
from benchmarks.published.memory.stacks import DIFFERENCES

LINE = "{:<38}{:>10}{:>15}{:>9}"
MEDIAN, FAR = 0.08, 0.25  # goals: the median error, and the error of every run

HEAD = """# Published peaks of memory beside their plans

This page shows how near plans come to {runs} peaks that others published
([sources](../benchmarks/published/memory/sources.md)). Nothing is fitted.
`python -m benchmarks.published.memory` writes it.

The median error is {median:.1%} (goal: {goal:.0%}, {median_met}), that of specs alone {alone:.1%}; the farthest is
{worst:+.1%} (goal: {far:.0%}, {far_met}).

The runs used other trainers. What these held that a spec cannot say is computed from their code: the second number of a
plan. GPT runs have Megatron-LM's layers as [modules](custom-layers.md), with whole attention weights and dropout masks.
A published peak counts the tensors, what the allocator reserved, or the whole device. Of {devices} whole
devices, published in whole GiB, {inside} lie within the interval (±) and half a GiB. The interval is meant for
programs of dsc."""

SOURCES = """# Sources of docs/published-memory.md

`python -m benchmarks.published.memory` writes this page. Each source is followed by what its trainer held besides the
plan."""


def page() -> str:
    """The whole page."""
    results = stored()
    errors = summary(results)
    head = HEAD.format(
        runs=errors.runs,
        median=errors.median_error,
        goal=MEDIAN,
        median_met=_met(errors.median_error <= MEDIAN),
        alone=errors.of_specs_alone,
        worst=errors.worst[1],
        far=FAR,
        far_met=_met(abs(errors.worst[1]) <= FAR),
        devices=errors.devices,
        inside=errors.inside,
    )
    lines = (LINE.format("GiB", "published", "planned", "off"), *_rows(results))
    return "\n".join((head, "", "```", *lines, "```", ""))


def sources() -> str:
    """The page of sources."""
    return "\n\n".join((SOURCES, "\n".join(_sources()), "\n".join(_differences()))) + "\n"


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def _rows(results: Mapping[str, PlannedPeak]) -> Iterator[str]:
    for group in groups():
        yield group.title if group.measure == "allocated" else f"{group.title}, {group.measure}"
        yield from (_row(run, results[run.name]) for run in group.runs)


def _row(run: PublishedPeak, result: PlannedPeak) -> str:
    besides = f"{result.differences:+.1f}" if result.differences else ""
    planned = f"{result.tensors:.1f}{besides}" + (f"±{result.error:.1f}" if result.error else "")
    return LINE.format(f"  {run.config}", f"{run.gib:.1f}", planned, f"{result.off(run):+.1%}")


def _sources() -> Iterator[str]:
    for group in groups():
        names = ", ".join(f"*{name}*" for name in group.differences)
        differs = f" Besides: {names}." if names else ""
        note = f" {group.note}" if group.note else ""
        yield _flow(f"- {group.title}: {group.source}.{differs}{note}")


def _differences() -> Iterator[str]:
    yield "## What other trainers hold\n"
    for name, difference in DIFFERENCES.items():
        yield _flow(f"- *{name}*: {difference.says}.")


def _flow(text: str) -> str:
    return fill(text, 118, subsequent_indent="  ", break_on_hyphens=False)
