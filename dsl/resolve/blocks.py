"""Turn blocks into instances of the schema; report unknown and missing keys, kinds, names and bounds."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from dsl.messages.diagnostics import MEANT, Span
from dsl.resolve import derive, forms
from dsl.resolve.context import Context, RejectedError, Scope
from dsl.resolve.evaluate import MAX_HINTED, count
from dsl.resolve.merge import key_of, label_of, lost_keys, merge
from dsl.resolve.values import reject_out_of_bounds, scalar
from dsl.schema import BUILT_IN, LayerRange, Model, Node, Tile, choices
from dsl.schema.base import FieldType, broken_bound, fields_of, keys_of
from dsl.schema.model import MAX_LAYER
from dsl.text.syntax import (
    NAMED,
    Attribute,
    Block,
    Import,
    Let,
    Line,
    LostStatement,
    Range,
    Statement,
    String,
    Value,
    Word,
)

MAX_RANGE_TEXT = 16  # characters of an invalid range such as `0 to 60` that a hint corrects


def node(context: Context, scope: Scope, cls: type[Node], block: Block) -> Any:
    """Make an instance of `cls`. Fields that failed are missing in it; their paths are added to `context.failed`."""
    fields, keys = fields_of(cls), keys_of(cls)
    if cls is Model:
        block = _with_mtp_attention(context, block)
    values: dict[str, Any] = {name: label_of(block) for name, kind in fields.items() if kind.form == "label"}
    failed: set[str] = set()
    ranges: list[Block] = []
    for statement in block.body:
        name = key_of(statement)
        if isinstance(statement, Let):
            context.lets.append((scope, statement))
        if isinstance(statement, (Let, LostStatement)):
            continue
        if name not in keys or not isinstance(statement, (Attribute, Block)):
            failed |= {_field_of(name) for name in _report_unknown(context, scope, cls, block, statement, keys)}
            continue
        if name == "layers" and isinstance(statement, Block):
            ranges.append(statement)
            continue
        target = _field_of(name)
        context.origins[scope.path_of(target)] = (
            statement.phrase.span if isinstance(statement, Attribute) else statement.head
        )
        try:
            values[target] = field(context, scope, cls, name, statement)
        except RejectedError:
            failed.add(target)
    for name in {_field_of(key) for key in lost_keys(block) & {*keys}} - values.keys():
        failed.add(name)
    if ranges:
        values["layers"] = _layers(context, scope, ranges, _attention_of(block))
        context.origins[scope.path_of("layers")] = ranges[0].head
        # one range of several failed: the others are still checked, but not the gaps between them
        if "layers" in failed:
            failed.remove("layers")
            context.failed |= {scope.path_of("layers.*.first"), scope.path_of("layers.*.last")}
    for name, default in derive.DEFAULTS.get(cls, {}).items():
        if name not in values and name not in failed:
            try:
                values[name] = default(context)
            except RejectedError:
                failed.add(name)
    for name, value in derive.values_of_name(cls, values).items():
        if values.get(name) is None and name not in failed:
            values[name] = value
    missing = [n for n, kind in fields.items() if kind.required and not {n, kind.unless} & (values.keys() | failed)]
    _report_missing(context, cls, block, missing)
    failed |= set(missing)
    return _build(context, scope, cls, values, failed)


def field(context: Context, scope: Scope, cls: type[Node], name: str, statement: Attribute | Block) -> Any:
    """Return the value of one field. Raises RejectedError after reporting a mistake in it."""
    if name == "steps":
        return derive.tokens_of_steps(context, scope, statement)
    kind = fields_of(cls)[name]
    if kind.form in ("batch", "rate") and isinstance(statement, Block):
        _report_labels(context, name, statement.labels)
    if kind.form == "batch":
        return forms.batch(context, scope, statement)
    if kind.form == "rate":
        block = _expect_block(context, statement, "write `rate { constant at 1e-4 }`")
        return forms.rate(context, scope, block, derive.ramp_of(context), derive.tokens_at_end(context))
    if kind.form == "entries":
        return _entries(context, scope, cls, name, statement)
    if kind.nodes and kind.types != (Tile,) and kind.form != "tokenizer":
        return _block_value(context, scope, cls, name, statement)
    if isinstance(statement, Block):
        hint = f"write `{name} = value`"
        raise context.reject("E0204", f"`{name}` is a value, not a block", statement.head, hint)
    if kind.optional and statement.phrase.span.text == "none":
        return None
    if kind.form == "phases":
        return forms.phases(context, scope, statement, derive.ramp_of(context))
    if kind.form == "tokenizer":
        return forms.tokenizer(context, scope, statement)
    if kind.form == "layers":
        hint = "write `layers 0..2 { ffn dense { inner = 18432 } }`"
        raise context.reject("E0204", "`layers` is a block with a range", statement.key.span, hint)
    if _is_auto(statement):
        if name == "data":
            return derive.data_degree(context, statement.phrase.span)
        if name == "layout":
            return None  # as even as possible
        if scope.path_of(name) in choices.OPEN:
            return _chosen_value(context, scope.path_of(name), statement.phrase.span)
    return scalar(context, scope, kind, statement)


# ---------------------------------------------------------------- blocks within blocks


def _block_value(context: Context, scope: Scope, cls: type[Node], name: str, statement: Attribute | Block) -> Any:
    kind = fields_of(cls)[name]
    if name in NAMED and not scope.path:
        return _resolve_named_block(context, kind.nodes[0], name, statement)
    if kind.optional and isinstance(statement, Attribute) and statement.phrase.span.text == "none":
        return None
    example = (cls.model_fields[name].examples or [f"{name} {{ … }}"])[0]
    block = _expect_block(context, statement, f"write `{example}`")
    return node(context, scope.inner_scope(block, name), _class_of(context, scope, kind, name, block), block)


def _resolve_named_block(context: Context, cls: type[Node], kind: str, statement: Attribute | Block) -> Any:
    """Resolve a model, cluster or precision that a run names."""
    if isinstance(statement, Block):
        hint = f"write `{kind} = name`, and put the block outside the run"
        raise context.reject("E0204", f"a run gives its {kind} by name", statement.head, hint)
    word = statement.phrase.items[0]
    if len(statement.phrase.items) > 1 or not isinstance(word, Word):
        quoted = word.value if isinstance(word, String) and len(statement.phrase.items) == 1 else ""
        hint = f"write `{kind} = {quoted if quoted.isidentifier() else 'name'}`"
        raise context.reject("E0302", f"`{statement.phrase.span.text}` is not a name", statement.phrase.span, hint)
    if kind == "precision" and word.text in BUILT_IN and (kind, word.text) not in context.definitions.blocks:
        return BUILT_IN[word.text]
    if kind == "precision" and (kind, word.text) not in context.definitions.blocks and not context.definitions.damaged:
        names = [*BUILT_IN, *(name for of_kind, name in context.definitions.blocks if of_kind == kind)]
        raise context.reject(
            "E0401", f"there is no {kind} `{word.text}`", word.span, _kind_hint(kind, word.text, names)
        )
    block = context.block(kind, word.text, word.span)
    return node(context, Scope((block,), kind), cls, block)


def _entries(
    context: Context, scope: Scope, cls: type[Node], name: str, statement: Attribute | Block
) -> tuple[Any, ...]:
    """Resolve a block of named entries: the sources of a blend, or the rewards of completions."""
    hint, singular = f"write `{(cls.model_fields[name].examples or [])[0]}`", name.removesuffix("s")
    block = _expect_block(context, statement, hint)
    entries_scope, entry_class, entries = scope.inner_scope(block, name), fields_of(cls)[name].entry, []
    for item in block.body:
        if isinstance(item, Let):
            context.lets.append((entries_scope, item))
        elif isinstance(item, Block):
            _report_labels(context, word := item.key.text, item.labels)
            if not word.isidentifier():
                message = f"`{word}` is not a valid {singular} name"
                raise context.reject("E0205", message, item.key.span, "write it without dots")
            context.origins[entries_scope.path_of(word)] = item.head
            entries.append(
                node(context, entries_scope.inner_scope(item, word), entry_class, replace(item, labels=(item.key,)))
            )
        elif not isinstance(item, LostStatement):
            context.complain("E0204", f"`{item.span.text}` is not a {singular}", item.span, hint)
            context.failed.add(entries_scope.path)
    if not entries and not lost_keys(block) and entries_scope.path not in context.failed:
        raise context.reject("E0203", f"`{name}` has no {singular}", block.head, hint)
    return tuple(entries)


def _expect_block(context: Context, statement: Attribute | Block, hint: str) -> Block:
    if isinstance(statement, Attribute):
        name = statement.key.text
        raise context.reject("E0204", f"`{name}` is a block, not a value", statement.key.span, hint)
    return statement


def _class_of(context: Context, scope: Scope, kind: FieldType, name: str, block: Block) -> type[Node]:
    """Return the class that a block's label selects; report a wrong label."""
    by_kind = {cls.model_fields["kind"].default: cls for cls in kind.nodes if "kind" in cls.model_fields}
    label = label_of(block)
    if by_kind:
        if label in by_kind:
            _report_labels(context, f"{name} {label}", block.labels[1:])
            return by_kind[label]
        hint = _kind_hint(scope.path_of(name), label, by_kind) if label else _missing_kind_hint(name, block, by_kind)
        message = f"there is no {name} `{label}`" if label else f"`{name}` needs a kind"
        raise context.reject("E0205", message, block.labels[0].span if label else block.head, hint)
    cls = kind.nodes[0]
    fields = fields_of(cls)
    named = "name" in fields and fields["name"].form == "label"
    if named and (not label or len(block.labels) != 1):
        raise context.reject("E0205", f"`{name}` needs one name", block.head, f"write `{name} my_{name} {{ … }}`")
    if not named:
        _report_labels(context, name, block.labels)
    return cls


def _report_labels(context: Context, name: str, labels: tuple[Value, ...]) -> None:
    """Report words before the brace of a block that are neither its kind nor its name."""
    if labels:
        span = labels[0].span.extend_to(labels[-1].span)
        context.complain("E0205", f"`{name}` takes no name", span, f"write `{name} {{ … }}`")


def _kind_hint(path: str, word: str, kinds: Collection[str]) -> str:
    from dsl.resolve.meant import kind_hint  # imported only to explain a mistake

    return kind_hint(path, word, kinds)


def _missing_kind_hint(name: str, block: Block, kinds: Collection[str]) -> str:
    """A hint that proposes the first kind, or the kind that is written in quotes."""
    label = block.labels[0] if block.labels else None
    quoted = label.value if isinstance(label, String) and label.value in kinds else ""
    return f"write `{name} {quoted or next(iter(kinds))} {{ … }}`"


def _layers(context: Context, scope: Scope, blocks: list[Block], attention: Statement | None) -> tuple[Any, ...]:
    """Resolve layer ranges, in the order of their first layers. `attention`: that of the model. Gaps and overlaps are
    checked by rules."""
    ranges: list[tuple[tuple[int, int, int], Block]] = []
    for block in blocks:
        try:
            ranges.append((_bounds(context, scope, block), block))
        except RejectedError:
            context.failed.add(scope.path_of("layers"))
            ranges.append(((0, 0, 1), block))
    ranges.sort(key=lambda item: item[0])
    nodes = []
    for index, (bounds, block) in enumerate(ranges):
        outer_range = next(
            (
                outer
                for (first, last, stride), outer in ranges
                if stride == 1 < bounds[2] and first <= bounds[0] <= last
            ),
            None,
        )
        merged = _merge_range(context, block, outer_range, attention)
        inner = scope.inner_scope(merged, f"layers.{index}")
        context.origins[inner.path] = block.labels[0].span if block.labels else block.head
        nodes.append(_range_node(context, inner, merged, *bounds))
    return tuple(nodes)


def _attention_of(block: Block) -> Statement | None:
    return next(iter(block.statements_by_name.get("attention", ())), None)


def _with_mtp_attention(context: Context, block: Block) -> Block:
    """Return a model block in which the attention of `mtp` is merged over that of the model."""
    body = [
        _merge_range(context, statement, None, _attention_of(block))
        if isinstance(statement, Block) and key_of(statement) == "mtp"
        else statement
        for statement in block.body
    ]
    return replace(block, body=tuple(body))


def _merge_range(context: Context, block: Block, outer_range: Block | None, attention: Statement | None) -> Block:
    """Return a layer range or `mtp` block with inherited keys: those that a range with `by` leaves out come from
    `outer_range`, the range around it, and those of attention from the model."""
    body = [*block.body]
    if outer_range is not None:
        body += [
            statement
            for statement in outer_range.body
            if key_of(statement) in LayerRange.KEYS and not block.has_key(key_of(statement))
        ]
        of_range = next(
            (
                statement
                for statement in outer_range.statements_by_name.get("attention", ())
                if isinstance(statement, Block)
            ),
            None,
        )
        if of_range is not None and isinstance(attention, Block):
            attention = merge(attention, of_range, context.mistakes)
    for index, statement in enumerate(body):
        if key_of(statement) == "attention" and isinstance(statement, Block) and isinstance(attention, Block):
            body[index] = merge(attention, statement, context.mistakes)
    return replace(block, body=tuple(body))


def _range_node(context: Context, scope: Scope, block: Block, first: int, last: int, stride: int) -> Any:
    values: dict[str, Any] = {"first": first, "last": last, "by": stride}
    failed: set[str] = set()
    for statement in block.body:
        if isinstance(statement, Let):
            context.lets.append((scope, statement))
        if isinstance(statement, (Let, LostStatement)):
            continue
        key = key_of(statement)
        if key not in LayerRange.KEYS or not isinstance(statement, (Attribute, Block)):
            failed |= _report_unknown(context, scope, LayerRange, block, statement, LayerRange.KEYS)
            continue
        if key == "attention":
            context.origins[scope.path_of(key)] = statement.span
        try:
            values[key] = field(context, scope, LayerRange, key, statement)
        except RejectedError:
            failed.add(key)
    if "ffn" not in values and "ffn" not in failed:
        failed.add("ffn")
        _report_missing(context, LayerRange, block, ["ffn"])
    return _build(context, scope, LayerRange, values, failed)


def _bounds(context: Context, scope: Scope, block: Block) -> tuple[int, int, int]:
    """(first, last, stride) of a layer range."""
    label, *stride_words = block.labels or (None,)
    has_by = len(stride_words) == 2 and isinstance(stride_words[0], Word) and stride_words[0].text == "by"
    if not isinstance(label, Range) or (stride_words and not has_by):
        raise _reject_range(context, block)
    first, last = (count(context, scope, part, "layers") for part in (label.first, label.last))
    if not 0 <= first <= last <= MAX_LAYER:
        message = f"the range {first}..{last} is empty or out of bounds: at most {MAX_LAYER}"
        low, high = sorted(min(max(0, bound), MAX_LAYER) for bound in (first, last))
        raise context.reject("E0303", message, label.span, f"write `layers {low}..{high}`")
    stride = count(context, scope, stride_words[1], "layers") if has_by else 1
    if has_by and not 2 <= stride <= MAX_LAYER:
        span, hint = label.span.extend_to(stride_words[1].span), f"write `layers {first}..{last}`"
        raise context.reject("E0303", f"`by {stride}` is out of bounds: at least 2 and at most {MAX_LAYER}", span, hint)
    return first, last, stride


def _reject_range(context: Context, block: Block) -> RejectedError:
    """Reject the label of `layers`. The hint is the range of its numbers, as for `layers 1-3`, or an example."""
    if not block.labels:
        return context.reject(
            "E0205", "`layers` needs one range", block.head, "write `layers 0..2 { … }`, both included"
        )
    span = block.labels[0].span.extend_to(block.labels[-1].span)
    numbers = [int(digits) for digits in re.findall(r"[0-9]{1,4}", span.text, re.ASCII)]
    plain = 1 <= len(numbers) <= 2 and numbers == sorted(numbers) and len(span.text) <= MAX_RANGE_TEXT
    hint = f"write `layers {numbers[0]}..{numbers[-1]}`" if plain else "write `layers 0..2 { … }`, both included"
    return context.reject("E0205", f"`{span.text}` is not a range of layers", span, hint)


# ---------------------------------------------------------------- mistakes


def _report_unknown(
    context: Context, scope: Scope, cls: type[Node], block: Block, statement: Statement, keys: tuple[str, ...]
) -> set[str]:
    """Report a statement that does not belong into a block. Returns the required keys that were probably meant, which
    count as given."""
    owner = block.key.text
    if isinstance(statement, Line):
        value = statement.items[0].span.extend_to(statement.items[-1].span).text if statement.items else "…"
        hint = f"write `{statement.head.text} = {value}`"
        context.complain("E0204", f"`{statement.span.text}` is not `key = value`", statement.span, hint)
        return {statement.head.text} & set(keys)
    if not isinstance(statement, (Attribute, Block)):
        context.complain("E0204", "an import must be outside blocks", statement.span, "move it to the top")
        return set()
    word, message = statement.key, f"`{owner}` has no key `{statement.key.text}`"
    if len(context.mistakes) >= MAX_HINTED:
        context.complain("E0201", message, word.span)
        return set()
    from dsl.resolve.meant import guess_key  # imported only to explain a mistake

    intended, hint, notes = guess_key(scope.path, cls, block, statement, keys)
    if isinstance(statement, Block) and len(intended) == 1 and MEANT.fullmatch(hint) and _takes_block(cls, *intended):
        context.key_corrections[word.span] = next(iter(intended))
    context.complain("E0201", message, word.span, hint, notes)
    return {key for key in intended if not block.has_key(key)}


def _takes_block(cls: type[Node], key: str) -> bool:
    kind = fields_of(cls).get(key)
    return kind is not None and (bool(kind.nodes) or kind.form in ("batch", "layers", "rate", "entries"))


def _report_missing(context: Context, cls: type[Node], block: Block, names: list[str]) -> None:
    """Report missing required keys, unless a statement that could not be read may have given them."""
    if not names or any(isinstance(statement, (LostStatement, Import)) for statement in block.body):
        return
    edits = []
    for name in names:
        info = cls.model_fields[name]
        meaning = f"  # {info.description}" if info.description else ""
        edits.append(f"`{(info.examples or [f'{name} = …'])[0]}`{meaning}")
    labels = block.labels if block.key.text in ("run", *NAMED) else ()
    owner = " ".join((block.key.text, *(label.span.text for label in labels)))
    listed = ", ".join(f"`{name}`" for name in names)
    context.complain("E0203", f"`{owner}` has no {listed}", block.head, "add " + "\n    ".join(edits))


def _field_of(key: str) -> str:
    """The field that a key sets."""
    return "tokens" if key == "steps" else key


def _build(context: Context, scope: Scope, cls: type[Node], values: dict[str, Any], failed: set[str]) -> Any:
    """Make the instance; report values out of bounds and leave them out. Types need no check: the resolver made
    them."""
    for name, value in values.items():
        bound = broken_bound(fields_of(cls)[name], value)
        if bound is not None and name not in failed:
            bound = ("least", bound[1]) if isinstance(value, tuple) else bound
            failed.add(name)
            span = context.origins[scope.path_of(name)]
            reject_out_of_bounds(context, f"{name} = {span.text}", span, fields_of(cls)[name].unit, *bound)
    context.failed |= {scope.path_of(name) for name in failed}
    return cls.model_construct(**{name: value for name, value in values.items() if name not in failed})


def _chosen_value(context: Context, path: str, span: Span) -> Any:
    """The value chosen for a key that is `auto`, or the smallest possible value until one is chosen."""
    if path not in context.chosen:
        context.opened[path] = span
    return context.chosen.get(path, choices.OPEN[path])


def _is_auto(statement: Attribute) -> bool:
    items = statement.phrase.items
    return len(items) == 1 and isinstance(items[0], Word) and items[0].text == "auto"
