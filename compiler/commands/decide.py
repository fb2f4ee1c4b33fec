"""What a spec leaves open with `auto`: chosen among all plans that keep the rules, before a command goes on with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compiler.commands.common import progress
from compiler.predict.search import Ranking, search
from compiler.rates.spec_table import own_table, with_table
from dsl.choices import Choice
from dsl.diagnostics import Diagnostic, SpecError, plural
from dsl.load import Resolved, alternatives
from dsl.schema import Spec


def decided(resolved: Resolved, file: str, run: str | None, overrides: Sequence[str]) -> Ranking:
    """All plans that were tried, the best first. SpecError where a schedule's file leaves nothing to choose."""
    spec, folder = resolved.spec, Path(file).parent
    if spec.schedule.file is not None:
        place = resolved.origins.get(resolved.opened[0])
        message = "a schedule's file is of one size: what it is for cannot be auto"
        raise SpecError([Diagnostic("S0101", message, place, "write the number, or name a schedule")])
    structures = _placed(resolved, folder, _structures(spec, file, run, overrides))
    tell = progress("plan")
    tell(f"looking for the best of {plural(len(structures), 'plan')}")
    try:
        return search(
            spec, resolved.opened, structures, lambda share: tell(f"looking for the best plan: {share:.0%}")
        )  # fmt: skip
    finally:
        tell("")


def _placed(resolved: Resolved, folder: Path, structures: Iterator[tuple[Choice, Spec]]) -> list[tuple[Choice, Spec]]:
    """Plans whose expert degree is that of the placement file, where the spec names one; all plans otherwise."""
    spec = resolved.spec
    if spec.parallel.placement is None:
        return list(structures)
    from compiler.experts.spec_placement import degree_of, mistakes  # with numpy

    if wrong := mistakes(spec, resolved.origins, folder, resolved.opened):
        raise SpecError(wrong)
    degree = degree_of(spec, folder)
    found = [(choice, other) for choice, other in structures if other.parallel.expert == degree]
    if not found:
        message = f"{spec.parallel.placement} is for expert = {degree}, which no choice for `auto` is"
        hint = f"place the experts anew, or leave more open, so that {degree} divides data"
        raise SpecError([Diagnostic("P0101", message, resolved.origins.get("parallel.placement"), hint)])
    return found


def _structures(spec: Spec, file: str, run: str | None, overrides: Sequence[str]) -> Iterator[tuple[Choice, Spec]]:
    """The legal choices; each spec has the rate table of the cluster, if it names one."""
    table = own_table(spec)
    for choice, other in alternatives(file, run, overrides):
        yield choice, other if table is None else with_table(other, table)
