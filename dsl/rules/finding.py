"""Findings of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from dsl.messages.diagnostics import Diagnostic, Note, Span
from dsl.schema import Spec


@dataclass(frozen=True)
class Finding:
    """A broken rule, at a path of the spec. Notes are (text, path) pairs."""

    code: str
    message: str
    path: str
    hint: str
    notes: tuple[tuple[str, str], ...] = ()


Rule = Callable[[Spec], Iterator[Finding]]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`; of two, the smaller one."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    divisors = {*small, *(number // divisor for divisor in small)}
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def nearest_multiple(number: int, unit: int) -> int:
    """The multiple of `unit` closest to `number`; of two, the larger one."""
    return max(unit, (2 * number + unit) // (2 * unit) * unit)


# --- The origin of a derived value in a message: `data = auto` follows from the cluster and the pipeline

DATA = "parallel.data"
SOURCES_OF_DATA = ("parallel.pipeline", "parallel.tensor", "parallel.context", "cluster.nodes", "cluster.node.devices")


def add_data_derivation(message: Diagnostic, finding: Finding, spec: Spec, origins: Mapping[str, Span]) -> Diagnostic:
    """Return the message of a finding; if it points at a derived `data`, add a note on how that was derived."""
    written = origins.get(DATA)
    if DATA not in (path for _, path in finding.notes) or (written is not None and written.text != "auto"):
        return message
    degrees = {name: vars(spec.parallel).get(name) for name in ("data", "pipeline", "tensor", "context")}
    counts = {name: count for name, count in degrees.items() if isinstance(count, int)}
    if len(counts) < len(degrees):  # out of bounds
        return message
    names = [name for name in counts if name == "pipeline" or (name != "data" and counts[name] > 1)]
    ranks = "".join(f" / {counts[name]:,} {name} rank{'s'[: counts[name] > 1]}" for name in names)
    derivation = f"data = {counts['data']:,} follows from {prod(counts.values()):,} devices{ranks}"
    notes = tuple(note for note in message.notes if written is None or note.span != written)
    places = [origins[path] for path in SOURCES_OF_DATA if path in origins]
    named = {note.span for note in notes}
    return replace(
        message, notes=(Note(derivation, places=tuple(place for place in places if place not in named)), *notes)
    )
