"""Merge blocks: a child over its parent, a later block over an earlier one, `-s` over the file.

A key of the child replaces the parent's; a block is merged key by key, unless its kind differs. Nodes keep their spans,
so that every value still knows its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsl.messages.diagnostics import Diagnostic, Note, Span
from dsl.text.syntax import ALTERNATIVES, Attribute, Block, Import, Let, Line, LostStatement, Number, Statement, Word

MAX_NOTES = 8
EXTENDS = "extends"
PHASE = "phase"  # a block that a run may have several of
NAMES = frozenset({"run", "model", "cluster", "precision", "device"})  # blocks whose label is a name, not a kind


def key_of(statement: Statement) -> str:
    """The key that a statement sets; "" for a line or a lost statement, which have none."""
    if isinstance(statement, Block) and statement.key.text == PHASE:
        return f"{PHASE} {label_of(statement)}"
    if isinstance(statement, (Attribute, Block)):
        return statement.key.text
    if isinstance(statement, Let):
        return f"let {statement.name.text}"
    return ""


def lost_keys(block: Block) -> set[str]:
    """The names in the unreadable statements of a block. Missing keys among them may have been given there."""
    return {name for statement in block.body if isinstance(statement, LostStatement) for name in statement.words}


def label_of(block: Block) -> str:
    """The kind or name of a block, if it has one."""
    label = block.labels[0] if block.labels else None
    return label.text if isinstance(label, (Word, Number)) else ""


def remove_duplicate_keys(block: Block, mistakes: list[Diagnostic]) -> Block:
    """Report keys that a body gives twice, here or in inner blocks, and return the block with only the first of each.

    Inner blocks cannot extend others: they inherit through the block around them.
    """
    spans: dict[str, Span] = {}
    body: list[Statement] = []
    for statement in block.body:
        key = key_of(statement)
        alternative = ALTERNATIVES.get(key, "")
        span = statement.key.span if isinstance(statement, (Attribute, Block)) else statement.span
        if key in spans and key != "layers":
            note = Note("first given here", spans[key])
            mistakes.append(Diagnostic("E0202", f"`{key}` is given twice", span, "remove one of them", (note,)))
        elif alternative in spans:
            note = Note(f"`{alternative}` is given here", spans[alternative])
            mistakes.append(
                Diagnostic("E0202", f"`{key}` and `{alternative}` mean the same", span, "keep one of them", (note,))
            )
        else:
            body.append(check_inner_block(statement, mistakes) if isinstance(statement, Block) else statement)
        if key:
            spans.setdefault(key, span)
    return Block(block.key, block.labels, block.parent, tuple(body), block.head, block.end)


def check_inner_block(block: Block, mistakes: list[Diagnostic]) -> Block:
    """Check an inner block and return it with unique keys; inner blocks cannot extend others."""
    if block.parent is not None:
        begin = block.head.start + block.head.text.rindex(EXTENDS, 0, block.parent.span.start - block.head.start)
        span = Span(block.head.source, begin, block.parent.span.end)
        message = f"`{block.key.text}` cannot extend a block: only a run, model, cluster or precision can"
        mistakes.append(Diagnostic("E0205", message, span, f"remove `{span.text}`"))
    return replace(remove_duplicate_keys(block, mistakes), parent=None)


def merge(parent: Block, child: Block, mistakes: list[Diagnostic]) -> Block:
    """Return the parent's body with the child's merged over it. Key and position are the child's, the label too if it
    has one."""
    labels = {label_of(parent), label_of(child)} - {""}
    if len(labels) > 1 and child.key.text not in NAMES:
        return child  # another kind of attention, ffn or optimizer: no key of the old one applies
    if child.key.text == "rate":
        return child
    overriding = {key_of(statement): statement for statement in child.body if key_of(statement)}
    replaced = overriding.keys() | {ALTERNATIVES[key] for key in overriding if key in ALTERNATIVES}
    layers = "layers" in overriding
    kin = _ffns(parent) if layers else {}
    body: list[Statement] = []
    for statement in parent.body:
        key = key_of(statement)
        override = overriding.get(key)
        if isinstance(statement, Block) and isinstance(override, Block) and not is_layer_ranges(key):
            body.append(merge(statement, override, mistakes))
        elif key not in replaced or isinstance(statement, Import):
            body.append(statement)
    merged_keys = {key_of(statement) for statement in body}
    for statement in child.body:
        if layers and key_of(statement) == "layers":
            assert isinstance(statement, (Block, Attribute))
            body.append(_inherit(kin, statement, mistakes) if isinstance(statement, Block) else statement)
        elif key_of(statement) not in merged_keys or not key_of(statement) or not isinstance(statement, Block):
            body.append(statement)
    block_labels, extended = child.labels or parent.labels, child.parent or parent.parent
    return Block(child.key, block_labels, extended, tuple(body), child.head, child.end)


def is_layer_ranges(key: str) -> bool:
    """Whether a key is that of layer ranges, which are replaced instead of merged."""
    return key == "layers"


# ---------------------------------------------------------------- layer ranges


@dataclass(frozen=True)
class _InheritableBlocks:
    """The blocks of one kind in a parent's layer ranges."""

    blocks: tuple[Block, ...]
    keys: frozenset[str]  # keys of all blocks


def _ffns(parent: Block) -> dict[tuple[str, str], _InheritableBlocks]:
    """The blocks that layer ranges of a child may inherit from, by key and kind."""
    ffns: dict[tuple[str, str], list[Block]] = {}
    for layer_range in parent.body:
        if isinstance(layer_range, Block) and layer_range.key.text == "layers":
            for item in layer_range.body:
                if isinstance(item, Block) and item.key.text == "ffn":
                    ffns.setdefault((item.key.text, label_of(item)), []).append(item)
    return {
        key: _InheritableBlocks(tuple(blocks), frozenset().union(*map(_keys, blocks))) for key, blocks in ffns.items()
    }


def _inherit(kin: Mapping[tuple[str, str], _InheritableBlocks], layers: Block, mistakes: list[Diagnostic]) -> Block:
    """Return a child's layer range whose ffn inherits missing keys from the parent's only ffn of that kind."""
    body = tuple(
        _inherit_ffn(kin[statement.key.text, label_of(statement)], statement, mistakes)
        if isinstance(statement, Block) and (statement.key.text, label_of(statement)) in kin
        else statement
        for statement in layers.body
    )
    return Block(layers.key, layers.labels, layers.parent, body, layers.head, layers.end)


def _inherit_ffn(kin: _InheritableBlocks, ffn: Block, mistakes: list[Diagnostic]) -> Block:
    if len(kin.blocks) == 1:
        return merge(kin.blocks[0], ffn, mistakes)
    unset = sorted(kin.keys - _keys(ffn))
    if unset:
        notes = tuple(Note(f"`{item.head.text}` is given here", item.head) for item in kin.blocks[:MAX_NOTES])
        names = ", ".join(f"`{key}`" for key in unset)
        message = f"the missing keys of this block could be inherited from {len(kin.blocks)} blocks `{ffn.head.text}`"
        hint = f"give {names} here"
        mistakes.append(Diagnostic("E0403", message, ffn.head, hint, notes))
        return Block(ffn.key, ffn.labels, ffn.parent, (*ffn.body, LostStatement(ffn.head)), ffn.head, ffn.end)
    return ffn


def _keys(block: Block, prefix: str = "") -> set[str]:
    """Keys of a block and, dotted, those of its inner blocks."""
    keys: set[str] = set()
    for statement in block.body:
        if isinstance(statement, Block):
            keys |= _keys(statement, f"{prefix}{statement.key.text}.")
        elif isinstance(statement, (Attribute, Line)) and key_of(statement):
            keys.add(prefix + key_of(statement))
    return keys
