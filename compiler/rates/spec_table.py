"""The rate table of a spec's own: the file that `cluster { rates = … }` names.

What is read is a part of the spec's value: `spec.cluster` holds it, beside the path. So whatever takes a spec goes by
the same rates, and a build stands alone: it has the table as `rates.json`, and its spec names that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compiler.rates.table import RateError, Table, read_table
from dsl.diagnostics import Diagnostic, SpecError
from dsl.schema import Spec
from dsl.source import Span


def with_rates(spec: Spec, folder: Path) -> Spec:
    """A spec of `folder` with the table that it names; RateError where that cannot be used."""
    if spec.cluster.rates is None:
        return spec
    return with_table(spec, read_table(folder / spec.cluster.rates))


def with_table(spec: Spec, table: Table) -> Spec:
    """The spec, with the table that its path stands for, or with one that is given in its place."""
    return spec.model_copy(update={"cluster": spec.cluster.with_table(table)})


def own_table(spec: Spec) -> Table | None:
    """The table that the spec has (`with_rates`, `with_table`); None where it names none and none was given."""
    table = spec.cluster.table
    if table is None:
        assert spec.cluster.rates is None, "a spec that names a rate table is loaded with it: with_rates"
        return None
    assert isinstance(table, Table)
    return table


def checked(spec: Spec, origins: Mapping[str, Span], folder: Path) -> Spec:
    """As `with_rates`; raises what is wrong with the file as a SpecError at the place that names it."""
    if wrong := mistakes(spec, origins, folder):
        raise SpecError(wrong)
    return with_rates(spec, folder)


def mistakes(spec: Spec, origins: Mapping[str, Span], folder: Path) -> tuple[Diagnostic, ...]:
    """What is wrong with the file that a spec in `folder` names, at the place where it does."""
    try:
        with_rates(spec, folder)
    except RateError as error:
        hint = "`dsc calibrate -o rates.json` writes one for this machine"
        return (Diagnostic("R0101", str(error), origins.get("cluster.rates"), hint),)
    return ()
