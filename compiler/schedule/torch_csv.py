"""The CSV of torch.distributed.pipelining (`_dump_csv`, `_load_csv`; torch 2.13): one line per rank, one cell per step.

`3F0` is the forward of stage 3 on micro-batch 0, `(0F4;0B1)OVERLAP_F_B` is an overlapped pair, and an empty cell is a
wait.
"""

from __future__ import annotations

import csv
import io
import re

from compiler.ir.stage_placement import BIDIRECTIONAL, MAX_LOOPS, StagePlacement, V, loop
from compiler.schedule.schedule import Schedule, ScheduleError
from runtime.contract.actions import Action, ActionKind, Pair, Step, actions_of, is_copy

_ACTION = re.compile(r"(0|[1-9]\d{0,5})([FIWB])(0|[1-9]\d{0,5})")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
# Actions that torch adds for its runtime: messages, and sharding of parameters. Here they follow from the others.
_ADDED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")

NO_OFFLOAD = "torch has no O and R: write --format text or json, or leave O and R out of the costs"
NO_COPIES = "torch has no bidirectional placement: use dualpipev, the same schedule folded onto half the ranks"


def to_torch_csv(schedule: Schedule) -> str:
    """The CSV of a schedule's actions (`format="compute_only"`). Pairs other than F and B become two cells.

    Raises ValueError for the bidirectional placement and for copies to the host, which torch does not have.
    """
    if schedule.stage_placement == BIDIRECTIONAL:
        raise ValueError(NO_COPIES)
    if any(is_copy(step) for steps in schedule.actions for step in steps):
        raise ValueError(NO_OFFLOAD)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [cell for step in steps for cell in _cells(step)] for steps in schedule.actions
    )
    return out.getvalue()


def from_torch_csv(text: str, name: str = "csv") -> Schedule:
    """Inverse of `to_torch_csv`, which also reads torch's communication actions. It infers the placement.

    Raises ScheduleError with the line and the cell that cannot be read. `Schedule.check` tests legality.
    """
    rows: list[tuple[Step, ...]] = []
    try:
        for cells in csv.reader(io.StringIO(text), strict=True):
            if not cells:  # an empty line is no rank; one with a comma is a rank that waits
                continue
            rows.append(tuple(step for cell in cells for step in _steps(cell.strip(), f"line {len(rows) + 1}")))
    except csv.Error as error:
        raise ScheduleError(f"line {len(rows) + 1}: not CSV: {error}") from None
    actions = [action for row in rows for step in row for action in actions_of(step)]
    if not actions:
        raise ScheduleError("it has no actions: write one line per rank, with cells such as 0F0")
    num_micro_batches = 1 + max(action.micro_batch for action in actions)
    placement = _placement(rows, num_micro_batches, 1 + max(action.stage for action in actions))
    return Schedule(name, len(rows), num_micro_batches, placement, tuple(rows))


def _cells(step: Step) -> list[str]:
    actions = actions_of(step)
    cells = [f"{a.stage}{a.kind}{a.micro_batch}" for a in actions]
    if isinstance(step, Pair) and sorted(a.kind for a in actions) == ["B", "F"]:
        forward_first = sorted(cells, key=lambda cell: "B" in cell)
        return [f"({';'.join(forward_first)})OVERLAP_F_B"]
    return cells


def _steps(cell: str, place: str) -> tuple[Step, ...]:
    if not cell or _ADDED.fullmatch(cell):
        return ()
    if pair := _PAIR.fullmatch(cell):
        return (Pair(_action(pair[1], place), _action(pair[2], place)),)
    return (_action(cell, place),)


def _action(text: str, place: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{place}: {text[:40]!r} is not an action of torch: expected a stage, then F, I, W or B, then a micro-batch"
        )
    kinds: dict[str, ActionKind] = {"F": "F", "I": "I", "W": "W", "B": "B"}
    return Action(kinds[match[2]], int(match[1]), int(match[3]))


def _placement(rows: list[tuple[Step, ...]], num_micro_batches: int, stages: int) -> StagePlacement:
    """The placement under which every action is on its rank."""
    ranks = len(rows)
    candidates = [loop(stages // ranks)] if stages % ranks == 0 and stages // ranks <= MAX_LOOPS else []
    candidates += [V] if stages == 2 * ranks else []

    def holds(placement: StagePlacement) -> bool:
        return placement.num_stages(ranks) == stages and all(
            placement.rank_of(ranks, num_micro_batches, action.stage, action.micro_batch) == rank
            for rank, row in enumerate(rows)
            for step in row
            for action in actions_of(step)
        )

    fitting = next((placement for placement in candidates if holds(placement)), None)
    if fitting is None:
        raise ScheduleError(
            f"{stages} stages on {ranks} ranks are neither a loop (stage s on rank s mod {ranks}) nor a V "
            f"(rank r with stages r and {2 * ranks - 1} - r)"
        )
    return fitting
