"""Writes docs/published-runs.md from the JSON files in this folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from textwrap import fill

from benchmarks.published.rows import Group, Published, Result, all_runs, groups, reasons, stored, summary
from compiler.predict.interval import CONFIDENCE

FAR = 0.30  # an error above which the page gives a reason
BIAS, INSIDE = 0.04, (0.70, 0.90)  # goals
MEDIANS = {"Ampere": 0.10, "Hopper": 0.08, "Blackwell": 0.12}  # goals of the median error, by generation of the devices
GENERATIONS = {"a100": "Ampere", **dict.fromkeys(("h100", "h200"), "Hopper")} | dict.fromkeys(
    ("b200", "b300", "gb200", "gb300"), "Blackwell"
)

HEAD = """# Published runs beside their plans

This page shows how near `dsc plan` comes to {runs} runs that others published. Each run is a spec of
[benchmarks/published](../benchmarks/published), planned with the default rates. No rate is fitted to any of them
([rates.md](rates.md)). For DeepSeek-V3 see [predictions.md](predictions.md), for memory
[published-memory.md](published-memory.md).
`python -m benchmarks.published` writes this page.

| tokens per second | | goal |
|---|--:|:--|
{medians}
| bias: median of signed errors | {bias:+.1%} | within {bias_goal:.0%}: {bias_met} |
| farthest | {worst:+.1%}, `{name}` | above {far:.0%} with a reason below |
| published step inside the {confidence:.0%} interval | {inside:.0%} | {least:.0%} to {most:.0%}: {inside_met} |

A positive error means that the plan is faster than the run was. Steps and intervals in seconds are in
[results.json](../benchmarks/published/results.json). ZB-2p runs are planned with another schedule, which `auto` finds
within the same memory, so they say less about the rates.

Where an architecture differs from what a spec can say, it is planned with a near one of equal size: GELU of 4h as
SwiGLU of 8h/3, learned positions and ALiBi as RoPE, LayerNorm as RMSNorm, no biases and no dropout, FP16 as BF16."""


def page() -> str:
    """The whole page."""
    results = stored()
    accuracy = summary(tuple(all_runs()), results)
    head = HEAD.format(
        runs=accuracy.runs,
        medians="\n".join(_medians(results)),
        bias=accuracy.bias,
        bias_goal=BIAS,
        bias_met=_met(abs(accuracy.bias) <= BIAS),
        worst=accuracy.worst[1],
        name=accuracy.worst[0],
        far=FAR,
        inside=accuracy.inside,
        confidence=CONFIDENCE,
        least=INSIDE[0],
        most=INSIDE[1],
        inside_met=_met(INSIDE[0] <= accuracy.inside <= INSIDE[1]),
    )
    return "\n\n".join((head, *(_group(group, results) for group in groups()), _reasons(results))) + "\n"


def medians_of(results: Mapping[str, Result]) -> dict[str, float]:
    """The median error, either way, by generation of the devices."""
    of_generation: dict[str, list[float]] = {generation: [] for generation in MEDIANS}
    for run in all_runs():
        result = results[run.name]
        of_generation[GENERATIONS[result.rates]].append(abs(result.off(run)))
    return {generation: median(errors) for generation, errors in of_generation.items()}


def _medians(results: Mapping[str, Result]) -> Iterator[str]:
    for generation, error in medians_of(results).items():
        goal = MEDIANS[generation]
        yield f"| median error, either way, {generation} | {error:.1%} | at most {goal:.0%}: {_met(error <= goal)} |"


def far_off(results: Mapping[str, Result]) -> list[Published]:
    """The runs whose errors need a reason."""
    return [run for run in all_runs() if abs(results[run.name].off(run)) > FAR]


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def _group(group: Group, results: Mapping[str, Result]) -> str:
    rows = (
        f"## {group.title}\n",
        _flow(f"Source: {group.source}." + (f" Differences: {group.differs}" if group.differs else "")),
        "",
        "| run | tokens/s of a device | predicted | off |",
        "|---|--:|--:|--:|",
        *(_row(run, results[run.name]) for run in group.runs),
    )
    return "\n".join(rows)


def _row(run: Published, result: Result) -> str:
    cells = (
        f"{run.config} `{run.name}`",
        f"{run.tokens_per_s_gpu:,.0f}",
        f"{result.tokens_gpu / result.step_s:,.0f}" + ("" if result.is_hit(run) else " **outside the interval**"),
        f"{result.off(run):+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _reasons(results: Mapping[str, Result]) -> str:
    return "\n".join(("## Why some are far off\n", *_reason_lines(far_off(results))))


def _reason_lines(far: Iterable[Published]) -> Iterator[str]:
    names = [run.name for run in far]
    for start, reason in reasons().items():
        matching = [name for name in names if name.startswith(start)]
        if matching:
            yield _flow(f"- {', '.join(f'`{name}`' for name in matching)}: {reason}")
    if not names:
        yield f"None is off by more than {FAR:.0%}."


def _flow(text: str) -> str:
    return fill(text, 118, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)
