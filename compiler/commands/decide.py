"""What a spec leaves open with `auto`: chosen among all plans that keep the rules, before a command goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.predict.search import Ranking, search
from compiler.spec_files import expert_placement_of
from dsl.choices import Choice
from dsl.diagnostics import Diagnostic, SpecError, plural
from dsl.load import Resolved, alternatives
from dsl.schema import Spec


def decided(
    resolved: Resolved, file: str, run: str | None, overrides: Sequence[str], tell: Callable[[str], None]
) -> Ranking:
    """All plans that were tried, the best first. The spec has the files that it names.

    `tell` shows how far the search is, and is called with "" at its end.
    """
    spec = resolved.spec
    plans = [(choice, other.with_files(spec.files)) for choice, other in alternatives(file, run, overrides)]
    plans = _placeable(resolved, plans)
    tell(f"looking for the best of {plural(len(plans), 'plan')}")
    try:
        return search(
            spec, resolved.opened, plans, lambda share: tell(f"looking for the best plan: {share:.0%}")
        )  # fmt: skip
    finally:
        tell("")


def _placeable(resolved: Resolved, plans: list[tuple[Choice, Spec]]) -> list[tuple[Choice, Spec]]:
    """The plans that the placement of experts is for, if the spec names one: others could not go on with it."""
    expert_placement = expert_placement_of(resolved.spec)
    if expert_placement is None:
        return plans
    degree = expert_placement.num_ranks
    found = [(choice, other) for choice, other in plans if other.parallel.expert == degree]
    if not found:
        message = f"{resolved.spec.parallel.placement} is for expert = {degree}, which no choice for `auto` is"
        hint = f"place the experts anew, or leave more open, so that {degree} divides data·tensor"
        raise SpecError([Diagnostic("P0101", message, resolved.origins.get("parallel.placement"), hint)])
    return found
