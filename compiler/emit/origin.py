"""Where in `spec.resolved` an emitted segment comes from."""

from __future__ import annotations

from compiler.ir import SegmentCode, Use
from dsl.canonical import range_text
from dsl.schema import Model


def with_origin(code: SegmentCode, use: Use, model: Model, resolved: str) -> str:
    """The segment's source with the line of the spec that asked for it named, for its first use in the model."""
    lines = resolved.split("\n")  # a text in it may hold what splitlines splits at
    begin = lines.index(f"model {model.name} {{")
    wanted = "  " + _statement(use, model)
    number = next(i for i, line in enumerate(lines) if i > begin and line.startswith(wanted))
    head, _, rest = code.source.partition("\n")
    return f"{head}\n# from spec.resolved:{number + 1}: {lines[number].strip().removesuffix(' {')}\n{rest}"


def _statement(use: Use, model: Model) -> str:
    """How the statement begins that a segment comes from."""
    place, _, part = use.site.partition(".")
    if place.startswith("M"):
        return "mtp {"
    if not part:
        return "norm_eps = " if place == "final_norm" else "vocab = "
    span = model.layers[model.range_of(int(place.removeprefix("L")))]
    if part == "attention" and span.attention is None:
        return "attention "
    return f"layers {range_text(span)} {{"
