"""The plans that a search tried, for people and for programs: the best first, each other with why it lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiler.predict.search import Candidate, Ranking

MOST_SHOWN = 12
SHORT = {"sm.communication": "SMs"}  # heads of columns; else the last part of the path


def table(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """Heads, then a row a plan: the values that were open, seconds of a step, and why it lost."""
    paths = tuple(ranking.best.choice)
    yield (*(SHORT.get(path, path.rpartition(".")[2]) for path in paths), "step", "")
    for candidate in ranking.candidates[:MOST_SHOWN]:
        values = (_word(candidate.choice[path]) for path in paths)
        step = "" if candidate.seconds is None else f"{candidate.seconds:#.4g} s"
        yield (*values, step, ranking.why(candidate))


def document(ranking: Ranking) -> list[dict[str, Any]]:
    """A row a plan, the best first. `seconds` and `missing_bytes` are null where a bound was enough."""
    return [
        {
            "values": {path: _value(value) for path, value in candidate.choice.items()},
            "seconds": candidate.seconds,
            "at_least_s": candidate.bound_s,
            "fits": _fits(candidate),
            "missing_bytes": candidate.missing_bytes,
            "why": ranking.why(candidate),
        }
        for candidate in ranking.candidates
    ]


def _fits(candidate: Candidate) -> bool | None:
    return None if candidate.missing_bytes is None else candidate.fits


def _value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else f"{value:,}"
