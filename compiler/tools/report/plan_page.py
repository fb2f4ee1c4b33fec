"""`dsc plan --format html`: a plan as one page, in the style of a report, without scripts or external resources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from compiler.emit.build_summary import count as count_of
from compiler.predict.planned_step import PARTS, planned_step_of
from compiler.predict.prediction import Prediction, StageRow, count, ranges, seconds, size, span
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.why_shown import Misfit, gain
from compiler.schedule.costs import Costs
from compiler.tools.picture import palette
from compiler.tools.picture.geometry import Style, figure_of, pixels
from compiler.tools.picture.panel import panel_of
from compiler.tools.picture.sheet import bulk, figure_css
from compiler.tools.picture.template import environment
from compiler.tools.report.diagrams import view_of

FOLDER = Path(__file__).parent
PAGE_WIDTH, MOST_WIDTH = 820.0, 12_000.0  # pixels of the schedule: on the page, and at most if it scrolls


@dataclass(frozen=True)
class Page:
    """The text of the page."""

    name: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]  # the last one says whether the plan fits
    is_over: bool
    why_lines: tuple[str, ...]
    edits: tuple[tuple[str, str, tuple[str, ...]], ...]
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    parts: tuple[str, ...]
    memory: tuple[tuple[tuple[str, ...], bool], ...]
    assumptions: tuple[str, ...]


def plan_html(timed: TimedPlan, prediction: Prediction, why: Misfit | None = None) -> str:
    """Return the page. Pure: equal values give equal bytes, and every text is escaped."""
    schedule = timed.schedule
    sizes = count_of(schedule.num_ranks, "rank"), count_of(schedule.num_micro_batches, "micro-batch")
    name = f"{schedule.name}, {', '.join(sizes)}"
    panel = panel_of(schedule, Costs(), name=name, timeline=timed.timeline)
    unit = pixels((panel,), PAGE_WIDTH, MOST_WIDTH)
    return (
        environment(FOLDER)
        .get_template("plan.html.j2")
        .render(
            page=page_of(prediction, name, why),
            view=view_of(planned_step_of(timed, prediction)),
            style=Markup(palette.css(with_series=True) + figure_css() + (FOLDER / "style.css").read_text("utf-8")),
            timeline=figure_of(panel, unit, Style()),
            bulk=bulk,
        )
    )


def page_of(p: Prediction, schedule: str, why: Misfit | None) -> Page:
    """Return the text and numbers of the page."""
    placed_edits = zip(why.edits, why.places, strict=True) if why else ()
    return Page(
        name=p.run,
        subtitle=f"{p.model} on {p.num_devices:,} × {p.device} ({p.cluster})",
        facts=facts_of(p),
        is_over=not p.fits,
        why_lines=why.lines if why else (),
        edits=tuple(
            (", ".join(f"{key} = {value}" for key, value in edit.settings), gain(edit), tuple(map(str, places)))
            for edit, places in placed_edits
        ),
        schedule=schedule,
        stages=tuple(stage_cells(row) for row in p.stages),
        parts=PARTS,
        memory=tuple(
            ((str(r.pp_rank), *(size(getattr(r, part)) for part in PARTS), size(r.peak_bytes), r.peak_action), r.fits)
            for r in p.ranks
        ),
        assumptions=p.assumptions,
    )


def facts_of(p: Prediction) -> tuple[tuple[str, str], ...]:
    """Return the headline facts; the last one says whether the plan fits."""
    worst = min(p.ranks, key=lambda rank: rank.free_bytes)
    free = worst.free_bytes
    degrees = ", ".join(f"{name} {degree:,}" for name, degree in p.degrees if degree > 1) or "one device"
    facts = [
        ("parameters", f"{count(p.parameters)}, {count(p.active_parameters)} active"),
        ("degrees", degrees),
        ("step" if p.calibrated else "step, not calibrated for this machine", seconds(p.step.seconds)),
        *((("generation per step", seconds(p.generation.seconds)),) if p.generation else ()),
        ("tokens per second", count(p.step.tokens_per_second)),
        ("MFU, causal and full", f"{p.mfu.causal:.1%}, {p.mfu.full:.1%}" if p.mfu else "unknown"),
        ("run", f"{span(p.whole_run.seconds)}, {count(p.whole_run.tokens)} tokens"),
        ("device hours per trillion tokens", count(p.device_hours_per_trillion_tokens)),
    ]
    if p.goodput is not None:
        facts.append(("goodput, with failures", f"{p.goodput.share:.1%}"))
    if p.money.usd is not None:
        facts.append(("cost of the run", f"${count(p.money.usd)}"))
    verdict = f"{p.verdict}, {size(free)} free" if p.fits else f"{size(-free)} too much on rank {worst.pp_rank}"
    if (device := p.fullest_device) is not None:
        facts.append(
            (
                f"a device holds, of {size(device.memory_bytes)}",
                f"{size(device.low_bytes)} to {size(device.high_bytes)}",
            )
        )
    return (*facts, ("memory", verdict))


def stage_cells(row: StageRow) -> tuple[str, ...]:
    """Return a stage as cells of a table."""
    layers = ([f"layer{'s' * (len(row.layers) > 1)} {ranges(row.layers)}"] if row.layers else []) + list(
        row.other_blocks
    )
    contents = [
        *(layer for layer in layers if layer == "embedding"),
        *(layer for layer in layers if layer != "embedding"),
    ]
    times = seconds(row.compute_s), seconds(row.exchange_s)
    return (str(row.stage), ranges(row.ranks), ", ".join(contents), count(row.parameters), *times)
