"""The view of a run in a terminal: a panel that is redrawn, or lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runtime.observe.watch.run_state import RunState, seconds_of
from runtime.system.lines import NOT_FINITE
from runtime.system.outcome import printable

BAR_COLUMNS, NAME_COLUMNS = 24, 6
BLOCKS = "▁▂▃▄▅▆▇█"
DIGITS = "01234567"  # for terminals without block characters
LEAST_SHARE = 0.005  # least share of time that is shown
FULL_LOAD = 2.0  # busiest expert over the mean for a full block
GIB, MIB = 2**30, 2**20
# Parts of the time (docs/json.md) → displayed name.
PARTS = {
    "compute": "compute",
    "message": "messages",
    "exchange": "exchanges",
    "sum": "sums",
    "data": "data",
    "generation": "generation",
    "reward": "rewards",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "other": "other",
}


def line(state: RunState, total: int | None, unigram_nats: float | None = None, left_s: float | None = None) -> str:
    """`step 12/90  loss 5.1  validation 5.2 at step 10 (unigram 6.8)  9,345 tokens/s  0:01:23 left`"""
    row = state.row
    parts = [f"step {row['step']}" + (f"/{total}" if total is not None else ""), f"loss {number(row, 'loss', '.4f')}"]
    if "reward" in row:
        words = f"{number(row, 'completion_tokens', '.0f')} tokens, entropy {number(row, 'entropy', '.2f')}"
        parts.append(f"reward {number(row, 'reward', '.3f')} ({words})")
    if validation := _validation(state, unigram_nats):
        parts.append(f"validation {validation}")
    if "tokens_per_s" in row:
        parts.append(f"{number(row, 'tokens_per_s', ',.0f')} tokens/s")
    if "imbalance" in row:
        parts.append(f"expert load {number(row, 'imbalance', '.2f')}x")  # busiest expert over the mean
    if left_s:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def panel(
    state: RunState, total: int | None, unigram_nats: float | None = None, note: str = "", *, blocks: bool = True
) -> RenderableType:
    """Return a panel with the state of the run in a few lines. `note`: the action of rank 0, or how the run ended.
    `blocks`: whether the terminal has block characters."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim", min_width=NAME_COLUMNS)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, words in _lines(state, unigram_nats, blocks=blocks):
        table.add_row(name, Text(printable(words)))
    if note:
        table.add_row("now", Text(printable(note)))
    return Group(_head(state, total), table) if state.row else table


def has_blocks(console: Console) -> bool:
    """Whether a terminal has block characters."""
    return console.encoding.lower().startswith("utf")


def _head(state: RunState, total: int | None) -> RenderableType:
    """Return the bar, the step, and the remaining time."""
    head = Table.grid(padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(no_wrap=True, overflow="ellipsis")
    step, words = state.row["step"], [f"step {state.row['step']:,}"]
    if total:
        words = [f"step {step:,}/{total:,}", f"{step / total:.0%}"]
    if state.left_s is not None and state.end is None:
        words.append(f"{duration(state.left_s)} left")
    if state.forecast:
        words.append(printable(state.forecast.run))
        if state.forecast.phases > 1:
            words.append(f"phase {state.forecast.phase} of {state.forecast.phases}")
    head.add_row(ProgressBar(total=total or step, completed=step, width=BAR_COLUMNS), Text("  ".join(words), "bold"))
    return head


def _lines(state: RunState, unigram_nats: float | None, *, blocks: bool) -> list[tuple[str, str]]:
    """Return name and text of each non-empty line."""
    if not state.row:
        return []
    row = state.row
    loss = [number(row, "loss", ".4f")]
    if validation := _validation(state, unigram_nats):
        loss.append(f"validation {validation}")
    if "grad_norm" in row:
        loss.append(f"gradient norm {number(row, 'grad_norm', '.3g')}")
    if "rate" in row:
        loss.append(f"rate {number(row, 'rate', '.3g')}")
    lines = [("loss", "  ".join(loss)), ("speed", _speed(state)), ("time", _time(state))]
    lines += [("load", _load(state.layers, blocks=blocks)), ("memory", _memory(state)), ("saved", _last_save(state))]
    return [(name, words) for name, words in lines if words]


def _speed(state: RunState) -> str:
    row, forecast, words = state.row, state.forecast, list[str]()
    if "tokens_per_s" in row:
        words.append(f"{number(row, 'tokens_per_s', ',.0f')} tokens/s")
    if "step_s" in row:
        note = "" if forecast is None or forecast.calibrated else ", not calibrated for this machine"
        planned = f" (planned {_seconds(forecast.step_s)}{note})" if forecast else ""
        words.append(f"step {_seconds(state.number('step_s') or 0.0)}{planned}")
    if state.mfu is not None and forecast:
        words.append(f"MFU {state.mfu:.1%}" + (f" (planned {forecast.mfu:.1%})" if forecast.mfu is not None else ""))
    return "  ".join(words)


def _time(state: RunState) -> str:
    """Return the shares of time. The planned bubble is next to the messages, because a rank waits there."""
    words = []
    for part, name in PARTS.items():
        share = state.shares.get(part, 0.0)
        bubble = state.forecast.bubble if state.forecast and part == "message" else 0.0
        if share >= LEAST_SHARE or bubble:
            planned = f" (bubble planned {bubble:.0%})" if bubble else ""
            words.append(f"{name} {share:.0%}{planned}")
    if state.shares and "message" not in state.shares and state.forecast and state.forecast.bubble:
        words.append(f"bubble planned {state.forecast.bubble:.0%}, not measured")
    return "  ".join(words)


def _load(layers: Mapping[str, float], *, blocks: bool) -> str:
    """Return a strip with a character per MoE layer, and the ratios of the most and least balanced layer."""
    if not layers:
        return ""
    signs = BLOCKS if blocks else DIGITS
    strip = "".join(signs[_height(ratio)] for ratio in layers.values())
    busiest = max(layers, key=layers.__getitem__)
    return f"{strip}  {min(layers.values()):.2f}x to {layers[busiest]:.2f}x, most in {busiest}"


def _height(ratio: float) -> int:
    return min(len(BLOCKS) - 1, max(0, int((ratio - 1) / (FULL_LOAD - 1) * len(BLOCKS))))


def _memory(state: RunState) -> str:
    words, forecast = list[str](), state.forecast
    if (used := state.number("memory_bytes")) is not None:
        words.append(f"{size(used)} at most in a rank")
    if (reserved := state.number("reserved_bytes")) is not None:
        words.append(f"{size(reserved)} reserved")
    if (used := state.number("process_bytes")) is not None:
        words.append(f"{size(used)} at most in a process with its libraries")
    if forecast and forecast.memory_bytes:
        fullest = max(range(len(forecast.memory_bytes)), key=forecast.memory_bytes.__getitem__)
        planned, capacity = forecast.memory_bytes[fullest], forecast.capacity_bytes[fullest]
        words.append(f"tensors planned {size(planned)} of {size(capacity)}")
    return "  ".join(words)


def _last_save(state: RunState) -> str:
    words = []
    if state.save is not None:
        words.append(f"step {state.save.get('step')}")
        if state.end is None and (saved_s := seconds_of(state.save.get("time"))) is not None:
            words.append(f"{duration(max(0.0, time.time() - saved_s))} ago")
    if state.failing:
        words.append(f"not copied to {', '.join(map(str, state.failing))}")
    return "  ".join(words)


def _validation(state: RunState, unigram_nats: float | None) -> str:
    """Return `5.2000 at step 10 (unigram 6.8120)`; "" before the first validation."""
    if state.validation is None:
        return ""
    step, loss = state.validation
    of_step = f" at step {step}" if step != state.row["step"] else ""
    return f"{loss:.4f}{of_step}" + (f" (unigram {unigram_nats:.4f})" if unigram_nats is not None else "")


# ---------------------------------------------------------------- events


def event_line(event: Mapping[str, Any]) -> str | None:
    """Return an event as a line for the viewer; None for events without news."""

    def entry(name: str) -> str:
        return printable(str(event.get(name, "?")))

    match event.get("event"):
        case "start":
            steps = f"after step {entry('step')}, to step {entry('last_step')}"
            return f"start: {entry('ranks')} ranks on {entry('device')}, {steps}"
        case "save_failed":
            return f"step {entry('step')} was not saved: {entry('reason')}"
        case "copy_failed":
            return f"the checkpoint of step {entry('step')} was not copied to {entry('place')}: {entry('reason')}"
        case "notice":
            return entry("text")
        case "stop":
            return f"stop after step {entry('step')}: {entry('received_by')} received {entry('signal')}"
        case "restart":
            return f"restart {entry('number')} from step {entry('saved_step')}: {entry('reason')}"
        case "bad_step":
            return f"step {entry('step')}: {entry('reason')}: {entry('action')}"
        case "fault" | "straggler":
            return f"step {entry('step')}: {entry('reason')}"
        case "straggler_over":
            return f"step {entry('step')}: rank {entry('rank')} on {entry('host')} is as fast as its peers again"
        case "export":
            return f"{entry('exporter')}: {entry('where')}"
        case "export_failed":
            return f"{entry('exporter')} gets no numbers: {entry('reason')}"
        case "end":
            why = f": {entry('reason')}" if event.get("reason") else ""
            return f"{entry('outcome')} after step {entry('step')}{why}"
    return None


# ---------------------------------------------------------------- numbers


def number(row: Mapping[str, Any], name: str, style: str) -> str:
    """Return a number of a row as text; `nan` or `inf` if recorded so, `?` if it is missing."""
    value = row.get(name)
    if isinstance(value, int | float):
        return format(float(value), style)
    flags = row.get(NOT_FINITE)
    return printable(str(flags.get(name, "?"))) if isinstance(flags, dict) else "?"


def duration(seconds: float) -> str:
    """`1:02:03`"""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}"


def size(value: float) -> str:
    """`1.5 GiB`, `12.0 MiB`"""
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
