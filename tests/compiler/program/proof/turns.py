"""Lines of code that take turns; a preference decides which continues when several could, so a run can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

Condition: TypeAlias = Callable[[], bool]
Line: TypeAlias = Iterator[Condition]  # yields, wherever others may go first, what it needs in order to go on


class StuckError(Exception):
    """Lines remain, and none of them can continue."""


def always() -> bool:
    return True


def take_turns(lines: Sequence[Line], prefer: Callable[[list[int]], int]) -> BaseException | None:
    """Run all lines to their ends; the exception of the first that failed, or None.

    `prefer`: which of the lines that can continue (in ascending order) does so, up to its next yield.
    """
    wants: dict[int, Condition] = dict.fromkeys(range(len(lines)), always)
    while wants:
        runnable = [number for number, can_go_on in wants.items() if can_go_on()]
        if not runnable:
            return StuckError("every rank waits")
        number = prefer(runnable)
        try:
            wants[number] = next(lines[number])
        except StopIteration:
            del wants[number]
        except Exception as fault:
            return fault
    return None


def slowest(last: int) -> Callable[[list[int]], int]:
    """The first line that can continue, but `last` only when all others wait."""
    return lambda runnable: next((number for number in runnable if number != last), last)
