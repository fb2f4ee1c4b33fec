"""One traced step of a run as Chrome trace events (JSON), for ui.perfetto.dev: a process a rank, an event an action."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiler.tools.picture.labels import clean
from compiler.tools.picture.palette import KINDS
from compiler.tools.picture.recorded import Line, TraceError, read_trace
from runtime.contract.actions import actions_of, parse_step


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
