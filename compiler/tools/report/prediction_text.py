"""A prediction as text for the terminal: the headline, then where time and memory go, then the assumptions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, get_args

from rich.style import Style
from rich.text import Text

from compiler.predict.failures import Goodput
from compiler.predict.prediction import (
    CALIBRATE,
    GIB,
    GenerationTime,
    Prediction,
    RankMemory,
    StepPrediction,
    Verdict,
    WhatIf,
    count,
    interval_words,
    ranges,
    seconds,
    size,
    span,
    watt_hours,
)
from compiler.predict.torch_share import refusals
from compiler.predict.why_shown import Misfit, lines_of
from compiler.tools.picture.drawing import Screen
from compiler.tools.picture.palette import DARK
from compiler.tools.picture.terminal import console_of, text_of_console
from dsl.messages.diagnostics import plural

if TYPE_CHECKING:
    from compiler.predict.search import Ranking

__all__ = ["count", "ranges", "seconds", "size", "span", "text", "text_of_phases"]

NARROWEST, WIDEST = 60, 200
BAR, REST = "█", "·"
# The parts of a step, and the tint of each in pictures of schedules.
ROWS = (
    ("overlapped_s", "pairs, overlapped", "F1"),
    ("forward_s", "forward alone", "F0"),
    ("backward_s", "backward alone", "B0"),
    ("weight_s", "weight gradients alone", "W0"),
    ("bubble_s", "bubble", ""),
    ("optimizer_s", "reduction, optimizer", "I0"),
)
PARTS = (
    ("weights", "F0"), ("gradients", "B0"), ("optimizer", "W0"), ("activations", "I0"), ("buffers", "F1"),
)  # fmt: skip
LEAST_SHARE = 0.01  # of the compute, below which classes of kernels are put together
LEAST_GAIN, MOST_CAUSES = 0.02, 3  # of the interval's width
MAX_RUN_S = 1e12  # a run that failures make longer has no end


def text(
    prediction: Prediction,
    screen: Screen | None = None,
    ranking: Ranking | None = None,
    why: Misfit | None = None,
    what_if: WhatIf | None = None,
) -> str:
    """Return the text, with escape codes if the screen has colours. Lines fit the screen, but have at least 60 columns.

    `ranking`: the plans that were tried, if the spec left a choice open. `why`: the reasons, if the plan does not fit.
    `what_if`: what was asked for besides.
    """
    screen = screen or Screen()
    width = min(max(screen.width, NARROWEST), WIDEST)
    console = console_of(screen, width)
    for line in _lines(prediction, ranking, why, what_if, width):
        line.truncate(width)
        line.rstrip()
        console.print(line, soft_wrap=True)
    return text_of_console(console, screen)


def text_of_phases(phases: Sequence[Prediction], screen: Screen) -> str:
    """Return a table of the phases of a run, and the totals of the run."""
    width = min(max(screen.width, NARROWEST), WIDEST)
    console = console_of(screen, width)
    title = _title("the run", plural(len(phases), "phase"))
    names = ("phase", "steps", "tokens", "time", "device-hours", "cost", "memory")
    rows = [names, *((phase.run, *_totals([phase])) for phase in phases), ("all", *_totals(phases))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for line in (title, *(_row(row, widths) for row in rows)):
        line.truncate(width)
        line.rstrip()
        console.print(line, soft_wrap=True)
    return text_of_console(console, screen)


def _totals(phases: Sequence[Prediction]) -> tuple[str, ...]:
    """Sum up phases: steps, tokens, time, device hours, cost, and whether all fit."""
    usd = [phase.money.usd for phase in phases if phase.money.usd is not None]
    return (
        f"{sum(phase.whole_run.steps for phase in phases):,}",
        count(sum(phase.whole_run.tokens for phase in phases)),
        span(sum(phase.whole_run.seconds for phase in phases)),
        count(sum(phase.device_hours for phase in phases)),
        f"${count(sum(usd))}" if len(usd) == len(phases) else "unknown",
        max((phase.verdict for phase in phases), key=get_args(Verdict).index),
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> Text:
    """Align the first cell to the left and the others to the right."""
    first, *rest = zip(cells, widths, strict=True)
    return Text(f"  {first[0]:<{first[1]}}" + "".join(f"  {cell:>{width}}" for cell, width in rest))


def _lines(
    p: Prediction, ranking: Ranking | None, why: Misfit | None, what_if: WhatIf | None, width: int
) -> Iterable[Text]:
    yield from _heading(p)
    yield Text()
    yield from _headline(p)
    yield Text()
    if ranking is not None:
        yield from _text_of_ranking(ranking)
        yield Text()
    if why is not None:
        yield _title("why it may not fit" if p.verdict == "may not fit" else "why it does not fit")
        for line, is_edit in lines_of(why, width - 2):
            yield Text(f"  {line}", style=Style(bold=True) if is_edit else _quiet_style())
        yield Text()
    if sentences := refusals(p.torch):
        yield _title("why `dsc compile` refuses it")
        yield from (Text(f"  {line}") for text in sentences for line in textwrap.wrap(text, width - 2))
        yield Text()
    if what_if is not None:
        yield from _loads(what_if, p.step.seconds)
        yield from _changes(what_if, p.step.seconds)
    yield from _breakdown(p.step, width)
    yield Text()
    yield from _use(p, width)
    yield Text()
    yield from _memory(p, width)
    yield Text()
    yield from _stages(p, width)
    yield Text()
    yield from _causes(p.step)
    yield _title("assumed")
    for line in p.assumptions:
        wrapped = textwrap.wrap(line, width - 4)
        yield from (
            Text(f"  {'· ' if not index else '  '}{part}", style=_quiet_style()) for index, part in enumerate(wrapped)
        )


def _title(words: str, note: str = "") -> Text:
    return Text(words, style=Style(bold=True)).append(f"  {note}" if note else "", style=_quiet_style())


def _quiet_style() -> Style:
    return Style(color=DARK.quiet, bold=False)


# ---------------------------------------------------------------- headline


def _heading(p: Prediction) -> Iterable[Text]:
    degrees = ", ".join(f"{name} {degree:,}" for name, degree in p.degrees if degree > 1) or "one device"
    active = f", {count(p.active_parameters)} active" if p.active_parameters < p.parameters else ""
    in_mtp = f", {count(p.mtp_parameters)} more of MTP" if p.mtp_parameters else ""
    trained = f", {count(p.adapter_parameters)} of adapters trained" if p.adapter_parameters else ""
    yield _title(f"{p.run}: {p.model} on {p.num_devices:,} × {p.device}", f"({p.cluster})")
    schedule = f"{p.step.schedule}, {plural(p.step.num_micro_batches, 'micro-batch')}"
    yield Text(f"{count(p.parameters)} parameters{active}{in_mtp}{trained}", style=_quiet_style())
    yield Text(f"{degrees}; {schedule}", style=_quiet_style())


def _headline(p: Prediction) -> Iterable[Text]:
    step, unknown = p.step, "unknown"
    between = interval_words(step.interval) if step.interval else ""
    between = between if p.calibrated else "not calibrated for this machine"
    mfu = f"{p.mfu.causal:.1%} causal, {p.mfu.full:.1%} full" if p.mfu else unknown
    yield _fact("step", seconds(step.seconds), between)
    if not p.calibrated:
        yield Text(f"          `{CALIBRATE}` measures it", style=_quiet_style())
    yield _fact("tokens", f"{count(step.tokens_per_second)}/s", f"{count(step.tokens)} per step")
    if p.generation is not None:
        yield from _generation(p, p.generation)
    yield _fact("MFU", mfu, "of the BF16 peak" if p.mfu else "add `bf16 = …TFLOPS` to the device")
    yield _fact(
        "run", span(p.whole_run.seconds), f"{count(p.whole_run.tokens)} tokens in {plural(p.whole_run.steps, 'step')}"
    )
    if p.order_gain is not None:
        gain = p.order_gain
        note = f"{p.step.schedule} with micro-batches by cost, not as drawn: {gain.steps} steps of {gain.data}"
        yield _fact("order", f"saves {gain.saved_share:.1%}", note)
    if p.goodput is not None:
        yield from _goodput(p, p.goodput)
    yield _fact("hours", count(p.device_hours_per_trillion_tokens), "device hours per trillion tokens")
    if p.money.usd is None or p.money.usd_per_trillion_tokens is None:
        yield _fact("cost", unknown, "add `price = 2USD/h` to the device")
    else:
        yield _fact("cost", f"${count(p.money.usd)}", f"${count(p.money.usd_per_trillion_tokens)} per trillion tokens")
    if p.energy.kwh_per_trillion_tokens is not None and p.energy.watts is not None:
        energy = watt_hours(p.energy.kwh_per_trillion_tokens * 1000)
        yield _fact("energy", energy, f"per trillion tokens, at {p.energy.watts:g} W per device")
    worst = min(p.ranks, key=lambda rank: rank.free_bytes)
    free = worst.free_bytes
    place = f"rank {worst.pp_rank}" + (f" at {worst.peak_action}" if worst.peak_action else "")
    verdict = f"{size(free)} free" if free >= 0 else f"{size(-free)} too much"
    line = _fact("memory", p.verdict, "")
    yield line.append(
        f"{verdict}: {size(worst.peak_bytes)} of {size(worst.capacity_bytes)} on {place}", style=_quiet_style()
    )
    if (device := p.fullest_device) is not None:
        low, high = size(device.low_bytes), size(device.high_bytes)
        note = f"of {size(device.memory_bytes)}, with CUDA, NCCL and the allocator"
        yield _fact("", f"{low} to {high}", note)
    if p.host_bytes:
        host_bytes = max(rank.host_bytes for rank in p.ranks)
        note = f"of the memory of a node: at most {size(host_bytes)} per device"
        yield _fact("host", size(p.host_bytes), note)


def _generation(p: Prediction, generation: GenerationTime) -> Iterable[Text]:
    """The time and memory to generate completions."""
    rounds = f"{plural(generation.rounds, 'round')} of {seconds(generation.round_s)}"
    note = f"{p.generation_share:.0%} of it and the step: {rounds}"
    yield _fact("writing", seconds(generation.seconds), f"{note}, if completions have the maximum length")
    cache = f"keys and values of {plural(generation.slots, 'completion')} at a time"
    excess = "" if generation.fits else ": more than weights and state leave free"
    yield _fact("", size(generation.cache_bytes), cache + excess)


def _goodput(p: Prediction, goodput: Goodput) -> Iterable[Text]:
    """The goodput under failures, and the checkpoint interval with the best goodput."""
    ends = goodput.share * MAX_RUN_S > p.whole_run.seconds
    run = span(p.whole_run.seconds / goodput.share) if ends else "no end"
    yield _fact("goodput", f"{goodput.share:.1%}, {run}", f"one failure every {span(goodput.mtbf_s)}")
    share = "" if goodput.of_spec is None else f"{goodput.best:.1%}"
    yield _fact("", share, f"with a checkpoint every {plural(goodput.best_steps, 'step')}")


def _fact(name: str, value: str, note: str) -> Text:
    line = Text(f"  {name:<8}", style=_quiet_style())
    return line.append(f"{value:<27} ", style=Style(bold=True, color=DARK.ink)).append(note, style=_quiet_style())


# ---------------------------------------------------------------- what was chosen


def _text_of_ranking(ranking: Ranking) -> Iterable[Text]:
    from compiler.predict.search import cut_of, table  # only specs with `auto` need the search

    tried = len(ranking.candidates)
    remark = f"among {tried} plans that keep the rules" if tried > 1 else "no other plan keeps the rules"
    yield _title("chosen", f"{remark}; {cut_of(ranking)}" if ranking.is_cut else remark)
    rows = list(table(ranking))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield Text(f"  {cells}", style=_quiet_style() if index != 1 else Style(bold=True))


# ---------------------------------------------------------------- what if


def _loads(what_if: WhatIf, step_s: float) -> Iterable[Text]:
    """The step if experts are loaded unevenly."""
    if not what_if.loads:
        return
    yield _title("if experts are loaded unevenly", "rows on the fullest rank of each layer, over the mean")
    for effect in what_if.loads:
        often = "" if effect.quantile is None else f"  {_often(effect.quantile)}"
        line = f"  {effect.load:<6.4g}{seconds(effect.seconds):>9} {effect.seconds / step_s - 1:>+7.1%}"
        yield Text(line).append(often, style=_quiet_style())
    yield Text()


def _often(quantile: float) -> str:
    return f"{quantile:.0%} of layers stay below if tokens choose evenly and independently"


def _changes(what_if: WhatIf, step_s: float) -> Iterable[Text]:
    """The next changes."""
    yield _title("next changes", "each alone, planned in full; the fastest of those that fit")
    for number, change in enumerate(what_if.changes, 1):
        settings = ", ".join(f"{key} = {value}" for key, value in change.settings)
        precision = "" if change.is_exact else ", values are less precise"
        yield Text(f"  {number}. {settings}", style=Style(bold=True))
        gain = f"step {seconds(change.seconds)} ({change.seconds / step_s - 1:+.1%}), {size(change.free_bytes)} free"
        yield Text(f"     {gain}{precision}", style=_quiet_style())
    if not what_if.changes:
        yield Text("  no other value of a key keeps the rules and fits", style=_quiet_style())
    yield Text()


# ---------------------------------------------------------------- time


def _breakdown(step: StepPrediction, width: int) -> Iterable[Text]:
    columns = max(8, width - 56)
    several = len(step.ranks) > 1
    yield _title(
        "where the step goes", f"pipeline rank 0; at the right the mean of {len(step.ranks)}" if several else ""
    )
    for row, name, tint in ROWS:
        value, mean = getattr(step.first_rank, row), getattr(step.mean, row)
        if value or mean or row in ("bubble_s", "optimizer_s"):
            line = Text(f"  {name:<24}").append(f"{seconds(value):>9} {value / step.seconds:>6.1%}  ")
            line.append(_bar(value / step.seconds, columns, tint))
            yield line.append(f"{seconds(mean):>11}", style=_quiet_style()) if several else line
    yield Text(f"  no order of these actions takes less than {seconds(step.bound_s)}", style=_quiet_style())


def _bar(share: float, columns: int, tint: str) -> Text:
    full = round(share * columns)
    colour = DARK.tints[tint] if tint else DARK.hatch
    return Text(BAR * full, style=Style(color=colour)).append(REST * (columns - full), style=Style(color=DARK.rule))


def _use(p: Prediction, width: int) -> Iterable[Text]:
    """What the busiest rank computes, by class of kernel, and what it exchanges."""
    use, columns = p.use, max(8, width - 56)
    whole_s = sum(kernels.seconds for kernels in use.classes.values())
    shown = {kind: time.seconds for kind, time in use.classes.items() if time.seconds >= LEAST_SHARE * whole_s}
    rest_s = whole_s - sum(shown.values())
    note = f"pipeline rank {use.pp_rank}, by class of kernel; shares are of its compute"
    yield _title("compute of the busiest rank", note)
    for kind, time_s in (*shown.items(), *((("others", rest_s),) if rest_s else ())):
        line = Text(f"  {kind:<24}{seconds(time_s):>9} {time_s / whole_s:>6.1%}  ")
        yield line.append(_bar(time_s / whole_s, columns, "F0"))
    if not use.axes:
        return
    yield Text()
    yield _title("communication of the busiest rank", "busy: on its links; exposed: compute waits meanwhile")
    yield Text(f"  {'among ranks of':<24}{'busy':>9}{'exposed':>11}  of the step", style=_quiet_style())
    for axis in use.axes:
        share = axis.exposed_s / p.step.seconds
        yield Text(f"  {axis.axis:<24}{seconds(axis.busy_s):>9}{seconds(axis.exposed_s):>11}{share:>13.1%}")


def _causes(step: StepPrediction) -> Iterable[Text]:
    """What widens the interval of the step, and what to measure."""
    causes = [cause for cause in step.interval.causes if cause.narrows >= LEAST_GAIN] if step.interval else []
    if not causes:
        return
    yield _title("what widens the range of the step", "at the right: how much narrower a measurement makes it")
    for cause in causes[:MOST_CAUSES]:
        yield Text(f"  {cause.what:<62}{-cause.narrows:>6.0%}")
        yield Text(f"    {cause.remedy}", style=_quiet_style())
    yield Text()


# ---------------------------------------------------------------- memory


def _memory(p: Prediction, width: int) -> Iterable[Text]:
    capacities = sorted({rank.capacity_bytes for rank in p.ranks})
    room = " or ".join(map(size, capacities))
    unit, unit_bytes = ("GiB", GIB) if max(rank.peak_bytes for rank in p.ranks) >= GIB else ("MiB", GIB >> 10)
    yield _title("memory of a device", f"{unit}, at the peak; each has room for {room}")
    heads = ("ranks", *(part for part, _ in PARTS), "peak")
    columns = max(8, width - 82)
    yield Text(
        "  " + f"{heads[0]:<12}" + "".join(f"{head:>12}" for head in heads[1:-1]) + f"{'peak':>7}", style=_quiet_style()
    )
    for ranks, rank in _group_equal_ranks(p.ranks, unit_bytes):
        values = "".join(f"{getattr(rank, part) / unit_bytes:>12.2f}" for part, _ in PARTS)
        line = Text(f"  {ranges(ranks):<12}{values}{rank.peak_bytes / unit_bytes:>7.1f} ")
        if not rank.fits:
            line.stylize(Style(color=DARK.warm, bold=True))
        yield line.append(_parts(rank, columns))


def _parts(rank: RankMemory, columns: int) -> Text:
    """Return one bar of all parts. It is cut off and marked at the capacity."""
    bar, drawn, total = Text(), 0, 0
    for part, tint in PARTS:
        total += getattr(rank, part)
        end = min(columns, round(total / rank.capacity_bytes * columns))
        bar.append(BAR * (end - drawn), style=Style(color=DARK.tints[tint]))
        drawn = max(drawn, end)
    return bar.append(REST * (columns - drawn), style=Style(color=DARK.rule))


def _group_equal_ranks(ranks: Sequence[RankMemory], unit_bytes: int) -> list[tuple[tuple[int, ...], RankMemory]]:
    """Group ranks whose rows print the same, each group under its first rank."""
    rows: dict[tuple[int, ...], list[RankMemory]] = {}
    for rank in ranks:
        key = tuple(round(getattr(rank, part) / unit_bytes * 100) for part, _ in PARTS)
        rows.setdefault((*key, rank.peak_bytes * 10 // unit_bytes, rank.fits), []).append(rank)
    return [(tuple(rank.pp_rank for rank in group), group[0]) for group in rows.values()]


# ---------------------------------------------------------------- stages


def _stages(p: Prediction, width: int) -> Iterable[Text]:
    yield _title("stages", "time of a micro-batch, forward and backward")
    yield Text(
        f"  {'stage':<7}{'ranks':<9}{'parameters':>11}{'compute':>10}{'exchange':>10}  layers", style=_quiet_style()
    )
    for row in p.stages:
        layers = ", ".join(
            ([*row.other_blocks[:1]] if "embedding" in row.other_blocks else [])
            + ([ranges(row.layers)] if row.layers else [])
            + [name for name in row.other_blocks if name != "embedding"]
        )
        times = f"{seconds(row.compute_s):>10}{seconds(row.exchange_s):>10}"
        line = f"  {row.stage:<7}{ranges(row.ranks):<9}{count(row.parameters):>11}{times}  {layers}"
        yield Text(line if len(line) <= width else f"{line[: width - 1]}…")
