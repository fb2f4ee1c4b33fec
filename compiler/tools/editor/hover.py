"""Hover texts: the meaning of a word and its value in this run."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compiler.tools.editor import block_keys, outline, resolved, texts
from compiler.tools.editor.block_keys import BlockKind
from compiler.tools.editor.outline import LET, CursorPlace, OpenDocument, OutlineToken
from dsl.closed_forms import counts, ramp
from dsl.facts import units
from dsl.load import Analysis, block_view
from dsl.resolve.merge import PHASE
from dsl.schema import BUILT_IN, Cluster, Model, Precision, Spec
from dsl.schema.base import fields_of
from dsl.text.syntax import KINDS, NAMED

# --- Summaries of named blocks


def summary(analysis: Analysis, kind: str, name: str) -> str:
    """A Markdown summary of a named block; "" if it is unknown or has errors."""
    definitions = analysis.definitions
    if definitions.broken or (kind, name) not in definitions.blocks:
        return ""
    if kind == "run":
        complete = (view.spec for view in analysis.views if not view.context.failed)
        return next((_run(spec) for spec in complete if getattr(spec, "name", "") == name), "")
    view, _ = block_view(definitions, kind, name, explain=False)
    node: Any = getattr(view.spec, kind)
    if node is None or any(path.startswith(f"{kind}.") for path in view.context.failed):
        return ""
    if isinstance(node, Model):
        return _model(node)
    return _cluster(node) if isinstance(node, Cluster) else _precision(node)


def _model(model: Model) -> str:
    parameters = counts.parameters(model)
    kinds = Counter(model.ffn(layer).kind for layer in range(model.num_layers))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines = [
        f"{parameters.total:,} parameters, {parameters.active:,} active per token",
        f"{model.num_layers} layers ({layers}), hidden {model.hidden:,}, attention {model.attention.kind}",
    ]
    if model.mtp is not None:
        lines.append(f"{parameters.mtp:,} more parameters for MTP of depth {model.mtp.depth}")
    return _list(lines)


def _cluster(cluster: Cluster) -> str:
    lines = []
    for count, node in cluster.parts:
        nodes = "1 node" if count == 1 else f"{count:,} nodes"
        lines.append(f"{count * node.devices:,} × {node.device.name}: {nodes} of {node.devices:,}")
        lines.append(f"{units.unit_text(node.device.memory, 'byte')} per device")
    return _list(lines)


def _precision(precision: Precision) -> str:
    roles: dict[str, list[str]] = {}
    for role, value in precision:
        if role != "name" and isinstance(value, str):
            roles.setdefault(value, []).append(role)
    return _list(f"{dtype}: {', '.join(names)}" for dtype, names in roles.items())


def _run(spec: Spec) -> str:
    degrees = ((name, degree) for name, degree in spec.parallel if name != "zero" and isinstance(degree, int))
    parallel = ", ".join(f"{name} = {degree}" for name, degree in degrees if degree > 1)
    schedule = spec.schedule.name or spec.schedule.file
    steps = ramp.ramp_of_spec(spec).steps_for(spec.train.tokens)
    return _list(
        [
            f"model {spec.model.name}, cluster {spec.cluster.name}, precision {spec.precision.name}",
            f"{spec.cluster.world:,} ranks: {parallel or 'data = 1'}; schedule {schedule}",
            f"{spec.train.tokens:,} tokens in {steps:,} steps",
        ]
    )


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


# --- hover


@dataclass(frozen=True)
class Hover:
    """Markdown about characters `start` to `end`."""

    text: str
    start: int
    end: int


def hover(document: OpenDocument, offset: int) -> Hover | None:
    """The hover text for the word at character `offset`; None if there is none."""
    place = outline.place(document.source.text, document.file, offset)
    token, statement = place.token, place.statement
    if place.comment or token is None or statement is None:
        return None
    text = _hover_text(document, block_keys.kind_of_block(place.block.path()), place, statement, token)
    return Hover(text, token.start, token.end) if text else None


def _hover_text(
    document: OpenDocument, block: BlockKind, place: CursorPlace, statement: outline.OutlineNode, token: OutlineToken
) -> str:
    if statement.key == "import":
        return ""
    if block.form == "file":
        return _text_at_top_level(document, statement, token)
    if block.form == "rate":
        return _values_text(document, statement, statement.key)
    if token in statement.head[:1]:
        return _key(document, block, statement)
    if token in statement.head:
        return _label(document, block, statement, token)
    return _value(document, block, statement, token)


def _text_at_top_level(document: OpenDocument, statement: outline.OutlineNode, token: OutlineToken) -> str:
    kind, words = statement.key, [word.text for word in statement.head]
    if kind == LET:
        if token in statement.value and token.kind == "word":
            return _reference(document, token)
        value = resolved.let(document.analysis, document.source, statement)
        return _join_paragraphs(texts.title(" ".join(words), ""), f"= {value}" if value else "")
    if kind not in KINDS:
        return ""
    if token in statement.head[:1]:
        return texts.title(kind, texts.block(kind))
    if token.text in words[1:2] or (token.text in words[3:4] and words[2] == "extends"):
        return _name_text(document, kind, token.text)
    return ""


def _name_text(document: OpenDocument, kind: str, name: str) -> str:
    if kind == "precision" and name in BUILT_IN and (kind, name) not in document.names:
        return texts.title(f"precision {name}", "built in")
    if (kind, name) not in document.names:
        return ""
    return texts.title(f"{kind} {name}", summary(document.analysis, kind, name))


def _key(document: OpenDocument, block: BlockKind, statement: outline.OutlineNode) -> str:
    key = statement.key
    if block.form == "batch":
        meaning = block_keys.BATCH_KEYS[key][1] if key in block_keys.BATCH_KEYS else ""
        return texts.title(key, meaning) if meaning else ""
    if key == PHASE and block.cls is Spec and not block.is_in_phase:
        return texts.title(key, texts.word(key))
    is_key = block.form == "class" and key in block_keys.every_key(block.cls)
    if not is_key:
        return ""
    about = texts.key(block.path_of(key)) or texts.block(block.path_of(key))
    return _join_paragraphs(texts.title(key, ""), *_values(document, statement), about)


def _label(document: OpenDocument, block: BlockKind, statement: outline.OutlineNode, token: OutlineToken) -> str:
    """The text for a label: the kind of a block, or a range of layers."""
    if statement.key == "layers":
        return _join_paragraphs(*_values(document, statement))
    if statement.key == PHASE and block.cls is Spec and not block.is_in_phase:
        return texts.title(f"phase {token.text}", resolved.phase(document.analysis, statement))
    meaning = texts.block(f"{block.path_of(statement.key)}.{token.text}")
    return texts.title(f"{statement.key} {token.text}", meaning) if meaning else ""


def _value(document: OpenDocument, block: BlockKind, statement: outline.OutlineNode, token: OutlineToken) -> str:
    key = statement.key
    if block.form == "class" and block.cls is Spec and key in NAMED:
        return _name_text(document, key, token.text)
    if token.kind == "word":
        reference = _reference(document, token)
        if reference:
            return reference
        kind = fields_of(block.cls).get(key) if block.form == "class" else None
        if kind is not None and token.text in block_keys.values(kind):
            return texts.title(
                token.text, texts.choice(block.path_of(key), token.text) or texts.key(block.path_of(key))
            )
    return _values_text(document, statement, f"{key} = {' '.join(word.text for word in statement.value)}")


def _reference(document: OpenDocument, token: OutlineToken) -> str:
    resolution = resolved.reference(document.analysis, document.source, token)
    if resolution is None:
        return ""
    target, value = resolution
    text = f"{target.span.text}"
    return _join_paragraphs(
        f"```dsc\n{text}\n```",
        f"= {value}" if value else "",
        f"{posixpath.basename(target.span.source.name)}:{target.span.line}",
    )


def _values(document: OpenDocument, statement: outline.OutlineNode) -> tuple[str, ...]:
    return tuple(f"= {text}" for text in resolved.values(document.analysis, document.source, statement))


def _values_text(document: OpenDocument, statement: outline.OutlineNode, title: str) -> str:
    """The values of a statement; "" if its source text already says them."""
    values = _values(document, statement)
    return _join_paragraphs(texts.title(title, ""), *values) if values else ""


def _join_paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
