"""Runs ranks with their copies to the host and back: a lane each way beside each rank, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiler.schedule.turns import Run, Ticks, run_in_turn
from runtime.contract.actions import Action, Step, actions_of, is_copy

EVENTS = 4  # of an activation that goes: its F has ended, it is on the host, its R is reached, it is back
_Key = tuple[int, int]  # a stage and a micro-batch
_Row = list[tuple[int, Run]]  # the step of each run, or -1


def run_with_copies(
    actions: Sequence[Sequence[Step]], rows: Sequence[Sequence[Run]], first: int, events: int, most: int
) -> tuple[list[Ticks], list[Ticks], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """When steps start and end, as `run_in_turn`, and of each rank's copies the step, the start and the end.

    `first`: of `events`, the first one that is of no stage; there are EVENTS for each O.
    """
    gone = [(a.stage, a.micro_batch) for steps in actions for a in steps if isinstance(a, Action) and a.kind == "O"]
    away = {key: first + EVENTS * number for number, key in enumerate(gone)}
    of_ranks = [_lanes(steps, row, away, events) for steps, row in zip(actions, rows, strict=True)]
    lanes = [lane for rank in of_ranks for lane in rank]
    starts, ends = run_in_turn([[run for _, run in lane] for lane in lanes], events, most)
    spans = [
        [(k, start, end) for (k, _), start, end in zip(*of_lane, strict=False) if k >= 0]
        for of_lane in zip(lanes, starts, ends, strict=True)
    ]
    compute = spans[::3]
    copies = tuple(tuple(sorted(out + back)) for out, back in zip(spans[1::3], spans[2::3], strict=True))
    return [[s for _, s, _ in each] for each in compute], [[e for _, _, e in each] for each in compute], copies


def _lanes(steps: Sequence[Step], row: Sequence[Run], away: dict[_Key, int], events: int) -> tuple[_Row, _Row, _Row]:
    """What a rank computes, copies to the host and copies back."""
    out: _Row = []
    back: _Row = []
    compute: _Row = []

    def run(time: int, wants: int = events, makes: int = events + 1) -> Run:
        return (time, wants, makes, 0, events, events + 1, 0)

    for k, (step, of_step) in enumerate(zip(steps, row, strict=True)):
        if isinstance(step, Action) and is_copy(step):
            event = away[step.stage, step.micro_batch]
            if step.kind == "O":
                out.append((k, run(of_step[0], event, event + 1)))
                compute.append((k, run(0, wants=event + 1)))
            else:
                back.append((k, run(of_step[0], event + 2, event + 3)))
                compute.append((k, run(0, makes=event + 2)))
            continue
        compute += [(-1, run(0, wants=event + 3)) for event in _events(step, "BI", away)]
        compute.append((k, of_step))
        compute += [(-1, run(0, makes=event)) for event in _events(step, "F", away)]
    return compute, out, back


def _events(step: Step, kinds: str, away: dict[_Key, int]) -> Iterator[int]:
    """The events of those of a step's actions that are of some kinds and whose activations go."""
    for action in actions_of(step):
        if action.kind in kinds and (event := away.get((action.stage, action.micro_batch))) is not None:
            yield event
