"""What a spec leaves open with `auto`: chosen among all plans that keep the rules, before a command goes on with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiler.commands.common import progress
from compiler.predict.search import Ranking, search
from compiler.rates.own import own_table, with_table
from dsl.choices import Choice
from dsl.diagnostics import Diagnostic, SpecError
from dsl.load import Resolved, alternatives
from dsl.schema import Spec


def decided(resolved: Resolved, file: str, run: str | None, overrides: Sequence[str]) -> Ranking:
    """All plans that were tried, the best first. SpecError where a schedule's file leaves nothing to choose."""
    spec = resolved.spec
    if spec.schedule.file is not None:
        place = resolved.origins.get(resolved.opened[0])
        message = "a schedule's file is of one size: what it is for cannot be auto"
        raise SpecError([Diagnostic("S0101", message, place, "write the number, or name a schedule")])
    tell = progress("plan")
    try:
        return search(
            spec, resolved.opened, _structures(spec, file, run, overrides),
            lambda share: tell(f"looking for the best plan: {share:.0%}"),
        )  # fmt: skip
    finally:
        tell("")


def _structures(spec: Spec, file: str, run: str | None, overrides: Sequence[str]) -> Iterator[tuple[Choice, Spec]]:
    """The legal choices; each spec has the rate table of the cluster, if it names one."""
    table = own_table(spec)
    for choice, other in alternatives(file, run, overrides):
        yield choice, other if table is None else with_table(other, table)
