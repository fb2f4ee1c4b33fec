"""Apply `-s key=value` of the command line to a run: each is merged like a later block with only that value.

Keys are the paths that `dsc show` prints. Layer ranges and phases of the rate are counted from 0:
`model.layers.1.ffn.experts=32`, `train.rate.0=warmup 100 steps to 1e-3`. A block can be written as in a file,
`model.attention gqa { … }`, and a `let` of the file can be set by its name. Setting a key of a built-in precision gives
the run a new precision that extends the built-in one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dsl.messages.diagnostics import MAX_LISTED, OVERRIDE, Source, Span
from dsl.resolve.context import Context, RejectedError, Scope
from dsl.resolve.evaluate import ranges_of
from dsl.resolve.files import Definitions
from dsl.resolve.merge import PHASE, check_inner_block, key_of, merge
from dsl.schema import BUILT_IN, Node, Spec
from dsl.schema.base import fields_of, keys_of
from dsl.text.parser import MAX_PARTS, parse
from dsl.text.syntax import (
    NAMED,
    Attribute,
    Block,
    FunctionCall,
    Let,
    Line,
    Number,
    Phrase,
    Range,
    Statement,
    String,
    Value,
    Word,
)

NAME_OR_CALL = re.compile(r"[A-Za-z_]\w*(\([^()]*\)?)?", re.ASCII)  # train(4096), also without the closing parenthesis
KEY = re.compile(r"\s*([A-Za-z_]\w*(?:\.\w+)*)\s*(=?)", re.ASCII)
EXAMPLE = "write `-s parallel.pipeline=8`"
Setting = Attribute | Block | tuple[Line, ...]  # the new value of a path; lines are those of a rate


def override(context: Context, text: str) -> None:
    """Set one value of the run, or of a block that it names. Mistakes are reported."""
    source = Source(OVERRIDE, text)
    context.definitions.sources.append(source)
    assignment = _read(context, source)
    if assignment is None:
        return
    word, setting = assignment
    kind, *inner_keys = word.text.split(".")
    lets = context.definitions.lets
    try:
        if not inner_keys and kind not in keys_of(Spec) and kind not in lets and (hint := _let_hint(kind, lets)):
            message = f"the run has no key `{kind}`, and the file no `let` of that name"
            raise context.reject("E0504", message, word.span, hint)
        if not inner_keys and kind not in keys_of(Spec) and kind in lets:
            _set_let(context, word, setting)
        elif kind == PHASE:
            _set_in_phase(context, inner_keys, word, setting)
        elif kind in NAMED and inner_keys:
            _set_in_named_block(context, kind, inner_keys, word, setting)
        else:
            context.run = _with_value(context, Scope((context.run,)), context.run, [kind, *inner_keys], word, setting)
    except RejectedError:
        return


# ---------------------------------------------------------------- reading
def _read(context: Context, source: Source) -> tuple[Word, Setting] | None:
    """Parse an override to its path and its value; None after reporting a mistake."""
    match = KEY.match(source.text)
    setting: Setting | None = None
    if match is not None and match[1].count(".") < MAX_PARTS:
        word = Word(match[1], Span(source, match.start(1), match.end(1)))
        value = source.text[match.end() :]
        if match[2] and value.strip() and _takes_text(word.text) and _is_plain(value):
            span = Span(source, match.end(), len(source.text))
            return word, Attribute(word, Phrase((String(value.strip(), span),), span), span)
        if value.strip():
            parsed = parse(source)
            context.mistakes += parsed.diagnostics
            if parsed.diagnostics:
                return None
            setting = _setting(word.text, parsed.document.body)
            setting = check_inner_block(setting, context.mistakes) if isinstance(setting, Block) else setting
        if setting is not None:
            return word, setting
    span = Span(source, 0, max(1, len(source.text)))
    context.complain("E0504", f"`{source.text}` is not key=value", span, EXAMPLE)
    return None


def _setting(key: str, statements: tuple[Statement, ...]) -> Setting | None:
    """The value that the statements of an override set a key to; None if they are not one value."""
    first = statements[0] if statements else None
    if isinstance(first, Attribute) and _is_rate(key):
        return _rate_lines(statements) or (first if key == "train.rate" and len(statements) == 1 else None)
    return first if isinstance(first, (Attribute, Block)) and len(statements) == 1 else None


def _is_rate(key: str) -> bool:
    return re.fullmatch(r"train\.rate(\.[0-9]+)?", key) is not None


def _rate_lines(statements: tuple[Statement, ...]) -> tuple[Line, ...]:
    """The phases of `rate = warmup 10 steps to 1e-3, constant`; empty if the statements are something else."""
    lines: list[Line] = []
    for statement in statements:
        if isinstance(statement, Attribute) and not lines and isinstance(statement.phrase.items[0], Word):
            head, *items = statement.phrase.items
            assert isinstance(head, Word)
            lines.append(Line(head, tuple(items), statement.phrase.span))
        elif isinstance(statement, Line) and lines:
            lines.append(statement)
        else:
            return ()
    return tuple(lines)


def _takes_text(key: str) -> bool:
    """Whether the value of a nested key of the run is a string, as for `data.source`."""
    *parents, name = key.split(".")
    cls: type[Node] = Spec
    for part in parents:
        kind = fields_of(cls).get(part)
        if kind is None or not kind.nodes:
            return False
        cls = kind.nodes[0]
    kind = fields_of(cls).get(name)
    return kind is not None and str in kind.types and kind.form != "label"


def _is_plain(value: str) -> bool:
    """Whether a value is a string whose quotes the shell removed: not a name, a call or still in quotes."""
    text = value.strip()
    return text.isprintable() and text[0] != '"' and not NAME_OR_CALL.fullmatch(text)


# ---------------------------------------------------------------- setting
def _let_hint(name: str, lets: Collection[str]) -> str:
    """Hint for a name that is neither a key nor a `let`; "" if there are no lets, or if a key was probably meant."""
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    if not lets or (nearest_words(name, keys_of(Spec)) and not nearest_words(name, lets)):
        return ""
    close_names = nearest_words(name, lets)
    names_text = ", ".join(f"`{let_name}`" for let_name in sorted(lets)[:MAX_LISTED])
    return (
        f"did you mean `{close_names[0]}`?" if close_names else f"every `let` outside blocks can be set: {names_text}"
    )


def _set_let(context: Context, word: Word, setting: Setting) -> None:
    """Set a `let` of the file to another value."""
    if not isinstance(setting, Attribute):
        raise context.reject("E0504", f"`{word.text}` is a value", word.span, f"write `-s {word.text}=…`")
    lets = {**context.definitions.lets, word.text: Let(word, setting.phrase, setting.span)}
    context.definitions = replace(context.definitions, lets=lets)


def _set_in_named_block(context: Context, kind: str, keys: list[str], word: Word, setting: Setting) -> None:
    """Set a key of the model, cluster or precision that the run names."""
    named = next(
        (
            statement
            for statement in context.run.body
            if isinstance(statement, Attribute) and statement.key.text == kind
        ),
        None,
    )
    target = named.phrase.items[0] if named else None
    if kind == "precision" and named and isinstance(target, Word) and target.text in BUILT_IN:
        target = _own_precision(context, named, target)
    if not isinstance(target, Word) or (kind, target.text) not in context.definitions.blocks:
        message = f"the run names no existing {kind}, so `{keys[0]}` cannot be set"
        raise context.reject("E0504", message, word.span, f"define a {kind} and write `{kind} = name`")
    block = context.block(kind, target.text, target.span)
    context.extended[kind, target.text] = _with_value(context, Scope((block,), kind), block, keys, word, setting)


def _set_in_phase(context: Context, keys: list[str], word: Word, setting: Setting) -> None:
    """Set a key of one phase of the run: `phase.to_32k.train.batch`."""
    name, *inner_keys = keys or [""]
    phase = next((statement for statement in context.run.body if key_of(statement) == f"{PHASE} {name}"), None)
    if not isinstance(phase, Block) or not inner_keys:
        names = [
            key_of(statement).partition(" ")[2]
            for statement in context.run.body
            if key_of(statement).startswith(f"{PHASE} ")
        ]
        hint = f"write `-s phase.{names[0]}.train.batch=…`; the phases are {', '.join(names)}" if names else ""
        raise context.reject("E0504", f"`{word.text}` names no key of a phase of this run", word.span, hint)
    scope = Scope((context.run, phase))
    context.run = _with_statement(context.run, phase, _with_value(context, scope, phase, inner_keys, word, setting))


def _own_precision(context: Context, named: Attribute, built_in: Word) -> Word:
    """Give the run a new precision that extends the built-in one, and return its name."""
    existing = context.definitions.blocks
    name = f"my_{built_in.text}"
    while ("precision", name) in existing:
        name += "_"
    word, kind = replace(built_in, text=name), replace(named.key, text="precision")
    block = Block(kind, (word,), built_in, (), built_in.span)
    context.definitions = replace(context.definitions, blocks={**existing, ("precision", name): block})
    context.run = _with_statement(context.run, named, replace(named, phrase=Phrase((word,), named.phrase.span)))
    return word


def _with_value(context: Context, scope: Scope, block: Block, keys: list[str], word: Word, setting: Setting) -> Block:
    """Return a block with one value set. `keys`: the path of the value within the block."""
    name, *inner_keys = keys
    if name == "layers" and inner_keys:
        return _with_layer_value(context, scope, block, inner_keys, word, setting)
    if name == "rate" and isinstance(setting, tuple):
        return _with_rate(context, block, inner_keys, word, setting)
    key = Word(name, word.span)
    inner_block = next(
        (statement for statement in block.body if isinstance(statement, Block) and key_of(statement) == name), None
    )
    new: Attribute | Block
    if inner_keys and inner_block is not None:
        new = _with_value(context, scope.inner_scope(inner_block, name), inner_block, inner_keys, word, setting)
        return _with_statement(block, inner_block, new)
    if inner_keys:
        empty = Block(key, (), None, (), word.span)
        new = _with_value(context, scope.inner_scope(empty, name), empty, inner_keys, word, setting)
    elif isinstance(setting, Block):
        new = replace(setting, key=key)
    else:
        assert isinstance(setting, Attribute)
        new = Attribute(key, setting.phrase, setting.span)
    return merge(block, Block(block.key, (), None, (new,), block.head, block.end), context.mistakes)


def _with_layer_value(
    context: Context, scope: Scope, block: Block, keys: list[str], word: Word, setting: Setting
) -> Block:
    """Set a key of a layer range, as in `layers.1.ffn.experts`. Ranges are numbered in the order of their layers."""
    ranges = ranges_of(context, scope, block)
    index, *inner_keys = keys
    target = ranges[int(index)] if index.isdecimal() and len(index) < 5 and int(index) < len(ranges) else None
    if target is not None and inner_keys:
        return _with_statement(
            block,
            target,
            _with_value(context, scope.inner_scope(target, f"layers.{index}"), target, inner_keys, word, setting),
        )
    label = setting.phrase.items[0] if isinstance(setting, Attribute) else None
    if target is not None and isinstance(setting, Attribute) and isinstance(label, Range):
        return _with_statement(
            block, target, Block(target.key, (label,), target.parent, target.body, setting.span, target.end)
        )
    labels = (
        f"`layers.{number}` is {layer_range.head.text.removeprefix('layers ')}"
        for number, layer_range in enumerate(ranges)
    )
    hint = f"{', '.join(labels)}: write `-s model.layers.{max(0, len(ranges) - 1)}.ffn.inner=…`"
    if not ranges:  # the block is a run; layers are in its model
        hint = f"layers belong to the model: write `-s model.{word.text}=…`"
    raise context.reject("E0504", f"`{word.text}` names no value of a layer range", word.span, hint)


def _with_rate(context: Context, block: Block, keys: list[str], word: Word, lines: tuple[Line, ...]) -> Block:
    """Set `rate`, or one phase of it."""
    key = Word("rate", word.span)
    old = next(
        (statement for statement in block.body if isinstance(statement, Block) and key_of(statement) == "rate"), None
    )
    body: tuple[Statement, ...] = lines
    if keys:
        index = int(keys[0]) if len(keys[0]) < 5 else len(lines)
        phases = old.body if old is not None else ()
        if index >= len(phases):
            count = f"{len(phases)} phase{'s' * (len(phases) != 1)}"
            hint = f"write `-s train.rate.{max(0, len(phases) - 1)}=…`, or all of it: `-s 'train.rate=…, …'`"
            raise context.reject("E0504", f"the rate has {count}, counted from 0", word.span, hint)
        body = (*phases[:index], *lines, *phases[index + 1 :])
    new = Block(key, (), None, body, word.span)
    return (
        _with_statement(block, old, new)
        if old is not None
        else merge(block, Block(block.key, (), None, (new,), block.head), [])
    )


def _with_statement(block: Block, old: Statement, new: Statement) -> Block:
    """Return a block with one statement replaced by another."""
    body = tuple(new if statement is old else statement for statement in block.body)
    return Block(block.key, block.labels, block.parent, body, block.head, block.end)


# --- A spec with some values replaced, as if its text had been edited and read again

RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)", re.ASCII)
CALL = re.compile(r"([a-z]+)\(([0-9]+)\)", re.ASCII)


def edit_definitions(definitions: Definitions, edits: Mapping[Span, str]) -> Definitions:
    """Return definitions in which the values at the spans are replaced. Spans are unchanged."""
    blocks = {key: _edit_block(block, edits) for key, block in definitions.blocks.items()}
    return replace(definitions, blocks=blocks, sources=[*definitions.sources], mistakes=[])


def edit_overrides(overrides: Iterable[str], edits: Mapping[Span, str]) -> tuple[str, ...]:
    """Return the overrides of the command line with these edits applied."""
    new = {span.source.text: (span, text) for span, text in edits.items() if span.source.name == OVERRIDE}
    return tuple(
        f"{text[: new[text][0].start]}{new[text][1]}{text[new[text][0].end :]}" if text in new else text
        for text in overrides
    )


def rename_keys(definitions: Definitions, names: Mapping[Span, str]) -> Definitions:
    """Return definitions in which the block keys at the spans are replaced."""
    blocks = {key: _rename_block_keys(block, names) for key, block in definitions.blocks.items()}
    return replace(definitions, blocks=blocks, sources=[*definitions.sources], mistakes=[])


def _rename_block_keys(block: Block, names: Mapping[Span, str]) -> Block:
    key = Word(names[block.key.span], block.key.span) if block.key.span in names else block.key
    body = tuple(
        _rename_block_keys(statement, names) if isinstance(statement, Block) else statement for statement in block.body
    )
    is_same = key is block.key and all(new is old for new, old in zip(body, block.body, strict=True))
    return block if is_same else replace(block, key=key, body=body)


def _edit_block(block: Block, edits: Mapping[Span, str]) -> Block:
    labels = tuple(
        _parse_value(edits[label.span], label.span) if label.span in edits else label for label in block.labels
    )
    return replace(block, labels=labels, body=tuple(_edit_statement(statement, edits) for statement in block.body))


def _edit_statement(statement: Statement, edits: Mapping[Span, str]) -> Statement:
    if isinstance(statement, Block):
        return _edit_block(statement, edits)
    if isinstance(statement, Attribute) and statement.phrase.span in edits:
        span = statement.phrase.span
        return replace(statement, phrase=Phrase((_parse_value(edits[span], span),), span))
    return statement


def _parse_value(text: str, span: Span) -> Value:
    """Parse the text of an edit: a number with unit, a word, a layer range or `train(4096)`."""
    match = RANGE.fullmatch(text)
    if match is not None:
        return Range(Number(match[1], span), Number(match[2], span), span)
    match = CALL.fullmatch(text)
    if match is not None:
        return FunctionCall(match[1], (Number(match[2], span),), span)
    return Number(text, span) if text[0].isdigit() else Word(text, span)
