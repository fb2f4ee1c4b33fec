"""Where a value of a message comes from that nobody wrote: `data = auto` follows from the cluster and the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from dsl.messages.diagnostics import Diagnostic, Note
from dsl.messages.source import Span
from dsl.rules.finding import Finding
from dsl.schema import Spec

DATA = "parallel.data"
SAYS_DATA = ("parallel.pipeline", "parallel.tensor", "parallel.context", "cluster.nodes", "cluster.node.devices")


def explained(message: Diagnostic, finding: Finding, spec: Spec, origins: Mapping[str, Span]) -> Diagnostic:
    """The message about a finding, with what a derived `data` was derived from, if it points at that."""
    written = origins.get(DATA)
    if DATA not in (path for _, path in finding.notes) or (written is not None and written.text != "auto"):
        return message
    degrees = {name: vars(spec.parallel).get(name) for name in ("data", "pipeline", "tensor", "context")}
    known = {name: count for name, count in degrees.items() if isinstance(count, int)}
    if len(known) < len(degrees):  # out of bounds
        return message
    shown = [name for name in known if name == "pipeline" or (name != "data" and known[name] > 1)]
    ranks = "".join(f" / {known[name]:,} {name} rank{'s'[: known[name] > 1]}" for name in shown)
    how = f"data = {known['data']:,} follows from {prod(known.values()):,} devices{ranks}"
    others = tuple(each for each in message.notes if written is None or each.span != written)
    places = [origins[path] for path in SAYS_DATA if path in origins]
    named = {each.span for each in others}
    return replace(message, notes=(Note(how, places=tuple(each for each in places if each not in named)), *others))
