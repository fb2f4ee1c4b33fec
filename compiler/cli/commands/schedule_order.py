"""`dsc schedule --order`: put the micro-batches of schedules into the best orders found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compiler.cli.commands.schedule_answer import Answer, ScheduleAnswer
from compiler.cli.commands.schedule_input import InputError, searching
from compiler.schedule.measure import measure
from compiler.schedule.order import best_order, reorder_costs


def search_orders(answer: Answer) -> Answer:
    """Search an order for each schedule. Raises InputError if no costs of micro-batches are given."""
    if answer.costs is None or not answer.costs.micro_batches:
        raise InputError(
            "--order needs micro-batches of unequal costs, and none are given",
            '--costs FILE with "micro_batches": [1, 0.8, 1.5, …]',
        )
    with searching() as progress:
        return replace(answer, entries=tuple(_search_order(entry, progress) for entry in answer.entries))


def _search_order(entry: ScheduleAnswer, progress: Callable[[str], None]) -> ScheduleAnswer:
    if entry.candidates:
        entries = [_search_order(candidate, progress) for candidate in entry.candidates]
        return min(entries, key=lambda candidate: candidate.measured.makespan)  # type: ignore[union-attr]
    measured = entry.measured
    if measured is None:
        return entry
    schedule, costs = measured.schedule, measured.costs
    order = best_order(schedule, costs, report=lambda share: progress(f"order for {entry.name}: {share:.0%}"))
    best = measure(schedule, reorder_costs(costs, order), measured.cap)
    return replace(entry, measured=best, order=tuple(order), unordered=measured.makespan)
