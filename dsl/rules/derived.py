"""Where a value of a message comes from that nobody wrote: `data = auto` follows from the cluster and the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dsl.diagnostics import Diagnostic, Note
from dsl.rules.finding import Finding
from dsl.schema import Spec
from dsl.source import Span

DATA = "parallel.data"
SAYS_DATA = ("parallel.pipeline", "cluster.nodes", "cluster.node.devices")


def explained(message: Diagnostic, finding: Finding, spec: Spec, origins: Mapping[str, Span]) -> Diagnostic:
    """The message about a finding, with what a derived `data` was derived from, if it points at that."""
    written = origins.get(DATA)
    if DATA not in (path for _, path in finding.notes) or (written is not None and written.text != "auto"):
        return message
    data, pipeline = (vars(spec.parallel).get(key) for key in ("data", "pipeline"))
    if data is None or pipeline is None:  # out of bounds
        return message
    how = f"data = {data:,} follows from {data * pipeline:,} devices / {pipeline:,} pipeline rank{'s'[: pipeline > 1]}"
    others = tuple(each for each in message.notes if written is None or each.span != written)
    places = [origins[path] for path in SAYS_DATA if path in origins]
    shown = {each.span for each in others}
    return replace(message, notes=(Note(how, places=tuple(each for each in places if each not in shown)), *others))
