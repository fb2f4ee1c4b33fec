"""Pictures, and traced steps of runs, as Chrome trace events (JSON) for ui.perfetto.dev."""

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

# --- A picture as Chrome trace events (JSON), for ui.perfetto.dev: a process a rank, a thread of compute and one of
# communication, messages as flows, activations as counters

COMPUTE, COMMUNICATION, TO_HOST, FROM_HOST = range(4)  # threads of a rank
_THREADS = ((COMPUTE, "compute"), (COMMUNICATION, "communication"))
_OF_COPIES = ((TO_HOST, "to the host"), (FROM_HOST, "from the host"))  # where there are any
Event = dict[str, Any]


def trace(picture: Picture) -> str:
    """The file: an event a line. Times in microseconds; `otherData` says what one unit of the picture became.

    A pair is two events of equal times, shown one below the other. Sorted by process, then as the rank runs.
    """
    events: list[Event] = []
    process, flow = 0, 0
    for panel in picture.panels:
        named = f"{panel.name}, " if len(picture.panels) > 1 else ""
        processes = {}
        for row in panel.rows:
            name = f"{named}rank {row.rank}{f' {row.track}' if row.track else ''}"
            events += _process(process, name, _THREADS + _OF_COPIES if row.copies else _THREADS)
            events += _steps(row, process, picture.us)
            processes[row.rank] = process  # of tracks, the last: measured
            process += 1
        for event in _messages(panel, processes, flow, picture.us):
            events.append(event)
        flow += len(panel.messages)
    other = {
        "title": labels.clean(picture.title),
        "unit": labels.clean(picture.unit),
        "microseconds_of_unit": picture.us,
    }
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{lines}\n]}}\n'


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
    for e in row.exchanges:
        place = {"pid": pid, "tid": COMMUNICATION, "ts": _us(e.start, us), "dur": _us(e.end - e.start, us)}
        yield {"ph": "X", "name": labels.clean(e.label), "cat": "communication", **place, "args": {}}
    for c in row.copies:
        thread = FROM_HOST if c.returns else TO_HOST
        place = {"pid": pid, "tid": thread, "ts": _us(c.start, us), "dur": _us(c.end - c.start, us)}
        yield {"ph": "X", "name": c.label, "cat": "copy", **place, "args": {}}
    for time, amount in row.live:
        yield {"ph": "C", "pid": pid, "name": "activations", "ts": _us(time, us), "args": {"held": amount}}


def _messages(panel: Panel, processes: dict[int, int], first: int, us: float) -> Iterator[Event]:
    """A send on the sender's communication, a receive on the receiver's, and the flow from one to the other."""
    for number, m in enumerate(panel.messages, first):
        ends = (("s", "send", m.source, m.sent), ("f", "recv", m.target, m.arrived))
        for phase, verb, rank, time in ends:
            place = {"pid": processes[rank], "tid": COMMUNICATION, "ts": _us(time, us)}
            yield {"ph": "X", "name": f"{verb} {m.label}", "cat": "message", **place, "dur": 0, "args": {}}
            flow = {"ph": phase, "name": "message", "cat": "message", "id": number, **place}
            yield flow if phase == "s" else flow | {"bp": "e"}


def _us(time: float, us: float) -> float:
    """Microseconds to a nanosecond."""
    return round(time * us, 3)


# --- One traced step of a run as Chrome trace events (JSON), for ui.perfetto.dev: a process a rank, an event an action


def ranks_of(run: Path) -> int:
    """How many ranks have left a trace. TraceError where there is none, or one is missing between them."""
    names = (re.fullmatch(r"rank_(\d{1,6})\.jsonl", path.name, re.ASCII) for path in (run / "trace").glob("rank_*"))
    ranks = {int(name[1]) for name in names if name}
    missing = min(set(range(len(ranks) + 1)) - ranks)
    if not ranks or missing < max(ranks):
        raise TraceError(f"{run / 'trace'} lacks rank_{missing}.jsonl: not every rank left a trace there")
    return len(ranks)


def step_of(run: Path, step: int) -> list[Line]:
    """What each rank ran in a step. TraceError says which steps were traced, if it is none of them."""
    ranks = read_trace(run, ranks_of(run))
    whole = sorted(set.intersection(*(set(rank) for rank in ranks)))
    if not whole:
        raise TraceError("no step was traced by every rank yet")
    if step not in whole:
        nearest = min(whole, key=lambda other: (abs(other - step), other))
        words = f"no trace of step {step:,}, the nearest is of step {nearest:,}"
        raise TraceError(f"{words}: steps 1 to 32, 64, 128, 256, … are traced")
    return [rank[step] for rank in ranks]


def step_events(name: str, step: int, lines: Sequence[Line], row: Mapping[str, Any]) -> str:
    """The file: an event a line, times in microseconds from the first action of all ranks.

    `row`: that of the step in metrics.jsonl, empty where there is none. Times of ranks of several machines are of
    several clocks. Where their actions do not overlap, each rank begins at 0.
    """
    begins = [line["actions"][0][1] if line["actions"] else 0 for line in lines]
    ends = [line["actions"][-1][2] if line["actions"] else 0 for line in lines]
    shared = max(begins, default=0) <= min(ends, default=0)
    events: list[dict[str, Any]] = []
    for rank, line in enumerate(lines):
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}})
        origin = min(begins) if shared else begins[rank]
        events += [_action(rank, label, start - origin, end - start) for label, start, end in line["actions"]]
    about = {"title": f"{clean(name)}, step {step}", "program": clean(lines[0]["program"]), "one clock": shared}
    about |= {key: row[key] for key in ("spent_s", "spent_most_s", "slowest_rank", "step_s", "loss") if key in row}
    text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{text}\n]}}\n'


def _action(rank: int, label: str, start: float, lasts: float) -> dict[str, Any]:
    event = {"ph": "X", "pid": rank, "tid": 0, "ts": start, "dur": lasts, "name": clean(label)}
    try:
        actions = actions_of(parse_step(label))
    except ValueError:  # of a later version
        return event | {"cat": "action", "args": {}}
    kinds = " and ".join(KINDS.get(action.kind, action.kind) for action in actions)
    args = {"stages": [action.stage for action in actions], "micro_batches": [a.micro_batch for a in actions]}
    return event | {"cat": kinds, "args": args}
