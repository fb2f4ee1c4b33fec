"""Resolve SPEC, SPEC:RUN or SPEC:RUN.2 with overrides to a spec with its files and with every `auto` decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from dsl.load import ResolvedSpec, alternatives, resolve
from dsl.messages.diagnostics import Diagnostic, Span, SpecError, plural
from dsl.resolve.chosen import find, phases_in, runs_in, split
from dsl.rules import train_refusals
from dsl.schema import Spec
from dsl.schema.choices import Choice

if TYPE_CHECKING:
    from compiler.machine.rates import RateTable
    from compiler.predict.search import Ranking


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the search for the values of `auto` may take, if a plan fits."""

    budget_s: float = math.inf  # of each phase of a run
    keeps_on_interrupt: bool = False  # whether Ctrl-C ends the search with the best plan so far


@dataclass(frozen=True)
class ChosenSpec:
    """A resolved spec with the files that it names, the places of its values, and its own file."""

    spec: Spec
    origins: Mapping[str, Span]
    path: Path
    ranking: Ranking | None = None  # of the plans that were tried, if the spec has `auto`
    argument: str = ""  # as given to a command: SPEC, SPEC:RUN, SPEC:RUN.2


def choose(
    argument: str | None,
    overrides: list[str],
    table: RateTable | None = None,
    tell: Callable[[str], None] = lambda _: None,
    patience: Patience = Patience(),
) -> ChosenSpec:
    """Resolve the argument of a command. `tell` is called with lines on the progress of a search.

    Raises SpecError with all mistakes of the spec.
    """
    file, run = split(str(find()) if argument is None else argument)
    resolved = resolve(file, run, overrides)
    spec, origins, path = resolved.spec, resolved.origins, Path(file)
    files = spec.schedule.file, spec.parallel.placement, spec.cluster.rates, spec.train.initial
    if table is not None or any(files) or spec.model.customs or spec.train.grpo:
        from compiler.plan.read_files import with_files  # imported only for specs that name files

        spec = with_files(spec, origins, path.parent, resolved.opened, table, runs_in(file))
    ranking = None
    if resolved.opened:
        plans = alternatives(file, run, overrides)
        ranking = _search_auto_values(replace(resolved, spec=spec), plans, tell, patience)
        spec = ranking.best.spec
    return ChosenSpec(spec, origins, path, ranking, argument or str(path))


def choose_phases(
    argument: str | None,
    overrides: list[str],
    table: RateTable | None = None,
    tell: Callable[[str], None] = lambda _: None,
    patience: Patience = Patience(),
) -> list[ChosenSpec]:
    """Resolve all phases of the chosen run; most runs have one. Raises SpecError with the mistakes of all phases."""
    file, run = split(str(find()) if argument is None else argument)
    names = phases_in(file, run)
    if len(names) < 2:
        return [choose(argument, overrides, table, tell, patience)]
    phases, mistakes = list[ChosenSpec](), dict[Diagnostic, None]()
    for number in range(1, len(names) + 1):
        try:
            phases.append(choose(f"{file}:{names[0]}.{number}", overrides, table, tell, patience))
        except SpecError as error:
            mistakes |= dict.fromkeys(error.diagnostics)
    if mistakes:
        raise SpecError([*mistakes])
    return phases


def refusals_of(chosen: ChosenSpec) -> tuple[Diagnostic, ...]:
    """The reasons why a valid spec cannot be trained yet."""
    refusals = train_refusals(chosen.spec, chosen.origins)
    if chosen.spec.train.initial is not None:
        from compiler.plan.read_files import missing_initial_run

        refusals += missing_initial_run(chosen.spec, chosen.origins)
    return refusals


def _search_auto_values(
    resolved: ResolvedSpec,
    structures: Iterable[tuple[Choice, Spec]],
    tell: Callable[[str], None],
    patience: Patience,
) -> Ranking:
    """Search for the values of `auto`; returns all plans that were tried, the best first.

    `tell` is called with lines on the progress of the search, and with "" at its end.
    """
    spec, deadline = resolved.spec, monotonic() + patience.budget_s
    plans = [(choice, alternative.with_files(spec.files)) for choice, alternative in structures]
    plans = _placeable(resolved, plans)
    from compiler.predict.search import Candidate, line_of, search  # only specs with `auto` need it

    def report(share: float, best: Candidate | None) -> None:
        tell(f"looking for the best plan: {share:.0%}" + (f"; so far a step of {line_of(best)}" if best else ""))

    tell(f"looking for the best of {plural(len(plans), 'plan')}")
    try:
        return search(
            spec, resolved.opened, plans, report, lambda: monotonic() >= deadline, patience.keeps_on_interrupt
        )
    finally:
        tell("")


def _placeable(resolved: ResolvedSpec, plans: list[tuple[Choice, Spec]]) -> list[tuple[Choice, Spec]]:
    """The plans that match the spec's placement of experts, if it names one. Raises SpecError if none does."""
    from compiler.plan.spec_files import expert_placement_of

    expert_placement = expert_placement_of(resolved.spec)
    if expert_placement is None:
        return plans
    degree = expert_placement.num_ranks
    placeable = [(choice, alternative) for choice, alternative in plans if alternative.parallel.expert == degree]
    if not placeable:
        file = resolved.spec.parallel.placement
        message = f"{file} is for expert = {degree}, but no choice for `auto` gives that degree"
        hint = f"place the experts again, or set more keys to `auto`, so that {degree} divides data·tensor"
        raise SpecError([Diagnostic("P0101", message, resolved.origins.get("parallel.placement"), hint)])
    return placeable
