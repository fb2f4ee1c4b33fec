"""Why a plan does not fit and which edits would make it fit, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compiler.predict.memory import explain_memory, gib
from compiler.predict.prediction import RankMemory
from dsl.messages.diagnostics import Span, make_visible
from dsl.text.as_json import span_value

if TYPE_CHECKING:
    from compiler.predict.timed_plan import TimedPlan
    from compiler.predict.why import FittingEdit, FittingEdits, NearestEdit  # imports the search for schedules


@dataclass(frozen=True, slots=True)
class EditSetting:
    """A setting of an edit. `span`: the value in the spec that it replaces, or the block that it is added to."""

    key: str
    value: str
    span: Span | None
    replaces: bool

    def __str__(self) -> str:
        verb, name = "write" if self.replaces else "add", self.key.rpartition(".")[2]
        return f"{verb} `{name} = {self.value}`" + ("" if self.span is None else f" at {make_visible(str(self.span))}")


@dataclass(frozen=True)
class Misfit:
    """The reason why a plan does not fit, and the edits that make it fit."""

    lines: tuple[str, ...]  # the rank, action and bytes of the peak, and the nearest edit if none is enough
    edits: tuple[FittingEdit, ...]
    places: tuple[tuple[EditSetting, ...], ...]  # the settings of each edit, with their places
    nearest: NearestEdit | None = None


def misfit_of(
    timed: TimedPlan, ranks: Sequence[RankMemory], edits: FittingEdits, origins: Mapping[str, Span]
) -> Misfit:
    """Explain a plan that does not fit. `origins`: where the spec's values are written."""
    places = tuple(tuple(place_of(key, value, origins) for key, value in edit.settings) for edit in edits.fit)
    lines = explain_memory(timed.spec, timed.plan, ranks)
    return Misfit((*lines, *_no_edit_lines(timed, edits)), edits.fit, places, edits.nearest)


def _no_edit_lines(timed: TimedPlan, edits: FittingEdits) -> Iterator[str]:
    """If no edit is enough, lines that say so and name the nearest edit."""
    if not edits.fit:
        yield "none of the edits that dsc tried makes it fit"
    if edits.nearest is not None:
        near = edits.nearest
        devices = f" on {near.num_devices:,} devices" if near.num_devices > timed.spec.cluster.world else ""
        lacking = f"the closest still lacks {gib(near.lacking_bytes)} ({near.lacking_bytes:,} bytes) on pipeline rank "
        yield f"{lacking}{near.pp_rank}{devices}: {_settings_text(near.settings)}"


def _settings_text(settings: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings)


def place_of(key: str, value: str, origins: Mapping[str, Span]) -> EditSetting:
    """The place of a key's value or, if the spec does not state it, of the block that it belongs to."""
    path = key
    while path not in origins and path:
        path = path.rpartition(".")[0]
    return EditSetting(key, value, origins.get(path), path == key)


def lines_of(why: Misfit, width: int) -> Iterator[tuple[str, bool]]:
    """Lines of at most `width` columns, each with whether it is an edit."""
    yield from ((line, False) for text in why.lines for line in _wrap(text, width))
    if not why.edits:
        return
    offer = "each of these edits makes it fit; the fastest comes first:"
    yield from ((line, False) for line in _wrap(offer, width))
    for number, (edit, places) in enumerate(zip(why.edits, why.places, strict=True), 1):
        yield from (
            (line, True)
            for line in textwrap.wrap(
                _settings_text(edit.settings), width, initial_indent=f"{number}. ", subsequent_indent="   "
            )
        )
        yield from ((line, False) for line in _wrap(f"   {gain(edit)}", width))
        yield from ((line, False) for place in places for line in _wrap(f"   {place}", width))


def gain(edit: FittingEdit) -> str:
    """What an edit gains and costs: `fits, 3.8 GiB free, step 19.47 s (+1.2%)`."""
    precision = "" if edit.is_exact else ", values are less precise"
    return f"fits, {gib(edit.free_bytes)} free, step {edit.seconds:#.4g} s ({edit.change:+.1%}){precision}" + (
        f", {edit.num_devices:,} devices" if edit.needs_more_devices else ""
    )


def edits_document(why: Misfit | None) -> list[dict[str, Any]]:
    """The key `edits` of docs/json.md; empty if the plan fits."""
    if why is None:
        return []
    return [
        {
            "settings": [
                {"key": place.key, "value": place.value, "replaces": place.replaces, **span_value(place.span)}
                for place in places
            ],
            "step_s": edit.seconds,
            "change": edit.change,
            "free_bytes": edit.free_bytes,
            "devices": edit.num_devices,
            "exact": edit.is_exact,
        }
        for edit, places in zip(why.edits, why.places, strict=True)
    ]


def nearest_document(why: Misfit | None) -> dict[str, Any] | None:
    """The key `nearest` of docs/json.md."""
    if why is None or why.nearest is None:
        return None
    near = why.nearest
    return {
        "settings": [{"key": key, "value": value} for key, value in near.settings],
        "lacking_bytes": near.lacking_bytes,
        "pp_rank": near.pp_rank,
        "devices": near.num_devices,
    }


def _wrap(line: str, width: int) -> list[str]:
    """Wrap a line. The lines after the first are indented by two more columns."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False, drop_whitespace=True)
