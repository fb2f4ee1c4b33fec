"""Pictures and traced steps of runs, as Chrome trace events: JSON that ui.perfetto.dev shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiler.tools.picture import labels
from compiler.tools.picture.drawing import BoxRow, Panel, Picture
from compiler.tools.picture.labels import clean
from compiler.tools.picture.palette import KINDS
from compiler.tools.picture.recorded import Line, TraceError, read_trace
from runtime.contract.actions import actions_of, parse_step

# --- A picture: each rank is a process with one thread for compute and one for communication. Messages are flows, and
# activations are counters

COMPUTE, COMMUNICATION, TO_HOST, FROM_HOST = range(4)  # threads of a rank
_THREADS = ((COMPUTE, "compute"), (COMMUNICATION, "communication"))
_COPY_THREADS = ((TO_HOST, "to the host"), (FROM_HOST, "from the host"))  # only of ranks with such copies
Event = dict[str, Any]


def trace(picture: Picture) -> str:
    """Return the text of the file, with one event per line.

    Times are in microseconds; `otherData` says how many of them are one unit of the picture. An overlapped pair is two
    events with equal times, which Perfetto shows one below the other. Events are sorted by process, and those of a
    process are in the order in which the rank runs them.
    """
    events: list[Event] = []
    process, flow = 0, 0
    for panel in picture.panels:
        prefix = f"{panel.name}, " if len(picture.panels) > 1 else ""
        processes = {}  # rank → process
        for row in panel.rows:
            name = f"{prefix}rank {row.rank}{f' {row.track}' if row.track else ''}"
            events += _process(process, name, _THREADS + _COPY_THREADS if row.copies else _THREADS)
            events += _steps(row, process, picture.us)
            processes[row.rank] = process  # if a rank has several tracks, the last: measured times
            process += 1
        events += _messages(panel, processes, flow, picture.us)
        flow += len(panel.messages)
    other_data = {
        "title": labels.clean(picture.title),
        "unit": labels.clean(picture.unit),
        "microseconds_of_unit": picture.us,
    }
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other_data)},"traceEvents":[\n{lines}\n]}}\n'


def _process(pid: int, name: str, threads: tuple[tuple[int, str], ...]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": labels.clean(name)}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, thread in threads:
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _steps(row: BoxRow, pid: int, us: float) -> Iterator[Event]:
    for cell in row.cells:
        place = {"pid": pid, "tid": COMPUTE, "ts": _us(cell.start, us), "dur": _us(cell.end - cell.start, us)}
        for drawn in cell.actions:
            stage, _, _ = drawn.label[1:].partition(".")
            args: dict[str, Any] = {"stage": int(stage), "micro_batch": drawn.micro_batch, "direction": drawn.direction}
            if len(cell.actions) > 1:
                args["pair"] = cell.label
            if cell.error is not None:
                args["error"] = round(cell.error, 4)
            yield {"ph": "X", "name": drawn.label, "cat": KINDS[drawn.kind], **place, "args": args}
    for exchange in row.exchanges:
        duration = _us(exchange.end - exchange.start, us)
        place = {"pid": pid, "tid": COMMUNICATION, "ts": _us(exchange.start, us), "dur": duration}
        yield {"ph": "X", "name": labels.clean(exchange.label), "cat": "communication", **place, "args": {}}
    for copy in row.copies:
        thread = FROM_HOST if copy.is_return else TO_HOST
        place = {"pid": pid, "tid": thread, "ts": _us(copy.start, us), "dur": _us(copy.end - copy.start, us)}
        yield {"ph": "X", "name": copy.label, "cat": "copy", **place, "args": {}}
    for time, amount in row.live:
        yield {"ph": "C", "pid": pid, "name": "activations", "ts": _us(time, us), "args": {"held": amount}}


def _messages(panel: Panel, processes: dict[int, int], first: int, us: float) -> Iterator[Event]:
    """For each message, a send in the sender's communication thread, a receive in the receiver's, and a flow between
    them. `first`: the id of the first flow."""
    for number, message in enumerate(panel.messages, first):
        ends = (("s", "send", message.source, message.sent), ("f", "recv", message.target, message.arrived))
        for phase, verb, rank, time in ends:
            place = {"pid": processes[rank], "tid": COMMUNICATION, "ts": _us(time, us)}
            yield {"ph": "X", "name": f"{verb} {message.label}", "cat": "message", **place, "dur": 0, "args": {}}
            flow = {"ph": phase, "name": "message", "cat": "message", "id": number, **place}
            yield flow if phase == "s" else flow | {"bp": "e"}


def _us(time: float, us: float) -> float:
    """Convert a time of the picture to microseconds, rounded to a nanosecond. `us`: microseconds per unit."""
    return round(time * us, 3)


# --- One traced step of a run: each rank is a process, and each action is an event


def ranks_of(run: Path) -> int:
    """Return the number of ranks that wrote a trace. Raises TraceError if none did, or if the file of a lower rank is
    missing."""
    names = (re.fullmatch(r"rank_(\d{1,6})\.jsonl", path.name, re.ASCII) for path in (run / "trace").glob("rank_*"))
    ranks = {int(name[1]) for name in names if name}
    missing = min(set(range(len(ranks) + 1)) - ranks)
    if not ranks or missing < max(ranks):
        raise TraceError(f"{run / 'trace'} lacks rank_{missing}.jsonl: not every rank wrote a trace")
    return len(ranks)


def step_of(run: Path, step: int) -> list[Line]:
    """Return the trace of a step, by rank. If the step was not traced, raises TraceError with the nearest that was."""
    ranks = read_trace(run, ranks_of(run))
    traced = sorted(set.intersection(*(set(rank) for rank in ranks)))  # by every rank
    if not traced:
        raise TraceError("no step has been traced by every rank yet")
    if step not in traced:
        nearest = min(traced, key=lambda traced_step: (abs(traced_step - step), traced_step))
        reason = f"step {step:,} was not traced; the nearest traced step is {nearest:,}"
        raise TraceError(f"{reason} (a run traces steps 1 to 32, 64, 128, 256, …)")
    return [rank[step] for rank in ranks]


def step_events(name: str, step: int, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """Return the text of the file, with one event per line. Times are µs from the first action of any rank.

    `row`: the row of the step in metrics.jsonl; empty if there is none. Ranks on different machines have different
    clocks. If no moment lies within the step of every rank, clocks differ, and each rank's times begin at 0.
    """
    begins = [line["actions"][0][1] if line["actions"] else 0 for line in lines]
    ends = [line["actions"][-1][2] if line["actions"] else 0 for line in lines]
    one_clock = max(begins, default=0) <= min(ends, default=0)
    events: list[dict[str, Any]] = []
    for rank, line in enumerate(lines):
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}})
        origin = min(begins) if one_clock else begins[rank]
        events += [_action(rank, label, start - origin, end - start) for label, start, end in line["actions"]]
    about = {"title": f"{clean(name)}, step {step}", "program": clean(lines[0]["program"]), "one clock": one_clock}
    about |= {key: row[key] for key in ("spent_s", "spent_most_s", "slowest_rank", "step_s", "loss") if key in row}
    text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{text}\n]}}\n'


def _action(rank: int, label: str, start: float, duration: float) -> dict[str, Any]:
    event = {"ph": "X", "pid": rank, "tid": 0, "ts": start, "dur": duration, "name": clean(label)}
    try:
        actions = actions_of(parse_step(label))
    except ValueError:  # a label of a later version of dsc
        return event | {"cat": "action", "args": {}}
    kinds = " and ".join(KINDS.get(action.kind, action.kind) for action in actions)
    args = {"stages": [action.stage for action in actions], "micro_batches": [a.micro_batch for a in actions]}
    return event | {"cat": kinds, "args": args}
