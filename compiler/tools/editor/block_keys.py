"""The keys that a block may have: its schema class, its keys, and the text to insert for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from compiler.tools.editor import outline
from dsl.canonical import value_text
from dsl.resolve import derive
from dsl.resolve.merge import ALTERNATIVES, PHASE
from dsl.resolve.phases import FIXED_KEYS, FIXED_TRAIN_KEYS, GRPO
from dsl.schema import Batch, LayerRange, Node, Spec, Tile, TrainTokenizer
from dsl.schema.base import FieldType, fields_of, keys_of
from dsl.text.syntax import KINDS, NAMED

# --- Completion items

ItemKind = Literal["key", "block", "value", "name", "unit", "word", "file", "reference"]


@dataclass(frozen=True)
class CompletionItem:
    """A proposal that replaces characters `start` to `end` with its label, or with its snippet if the client supports
    snippets."""

    label: str
    kind: ItemKind
    detail: str = ""
    documentation: str = ""  # Markdown
    snippet: str = ""
    start: int = 0
    end: int = 0


# --- Keys

BATCH_KEYS = {
    "from": ("from = 3072", "sequences in the first step"),
    "to": ("to = 15360", "sequences per step at the end of the ramp"),
    "over": ("over = 469B tokens", "length of the ramp in tokens"),
}
PHASES = {
    "warmup": "warmup 2000 steps to 2.2e-4",
    "constant": "constant until 10T tokens",
    "cosine": "cosine to 2.2e-5 over 4.3T tokens",
    "linear": "linear to 0 over 1000 steps",
}
VALUE = re.compile(r"(?<== )(?:\[[^\]]*\]|[^,{}\n]+?)(?=\s*(?:,|}|$))", re.MULTILINE)
NUMBER = re.compile(r"(?<= )[0-9][\w.-]*")


@dataclass(frozen=True)
class BlockKind:
    """The kind of a block: the file, a block with a schema class, one of named blocks of a class, or a special form."""

    form: Literal["file", "class", "names", "batch", "rate", "unknown"]
    cls: type[Node] = Node
    path: str = ""  # path with the kinds of blocks, such as model.attention.mla; "" for a run or its phase
    is_in_phase: bool = False  # whether it is in a phase of a run, which only has the keys that change

    def path_of(self, key: str) -> str:
        """The path of a key, as `dsl.reference` has it."""
        return f"{self.path}.{key}".lstrip(".")


def kind_of_block(path: Sequence[outline.OutlineNode]) -> BlockKind:
    """The kind of the innermost of some nested blocks."""
    if not path:
        return BlockKind("file")
    root = path[0].key
    if root not in KINDS:
        return BlockKind("unknown")
    around = BlockKind("class", Spec) if root == "run" else BlockKind("class", fields_of(Spec)[root].nodes[0], root)
    for node in path[1:]:
        is_phase = around.cls is Spec and node.key == PHASE and not around.is_in_phase
        around = replace(around, is_in_phase=True) if is_phase else _kind_of_inner_block(around, node)
    return around


def _kind_of_inner_block(around: BlockKind, node: outline.OutlineNode) -> BlockKind:
    if around.form == "names":
        return replace(around, form="class")
    kind = fields_of(around.cls).get(node.key) if around.form == "class" else None
    if kind is None or not is_block(kind):
        return BlockKind("unknown")
    path = around.path_of(node.key)
    if kind.form in ("batch", "rate"):
        return replace(around, form="batch" if kind.form == "batch" else "rate", cls=Node, path=path)
    if kind.form == "layers":
        return replace(around, cls=LayerRange, path=path)
    if kind.form == "entries":
        return replace(around, form="names", cls=kind.entry, path=path)
    cls = class_of(kind, node.labels)
    if cls is None:
        return BlockKind("unknown")
    return replace(around, cls=cls, path=f"{path}.{node.labels[0]}" if kinds_of(kind) else path)


def class_of(kind: FieldType, labels: Sequence[str]) -> type[Node] | None:
    """The class that a block's label selects among those of a field."""
    by_kind = kinds_of(kind)
    if by_kind:
        return by_kind.get(labels[0]) if labels else None
    return kind.nodes[0]


def kinds_of(kind: FieldType) -> dict[str, type[Node]]:
    """The classes of a block by the word that follows its key: mla, gqa, moe."""
    return {cls.model_fields["kind"].default: cls for cls in kind.nodes if "kind" in cls.model_fields}


def is_block(kind: FieldType) -> bool:
    """Whether a field can be written with braces."""
    blocks = kind.nodes and kind.types != (Tile,) and kind.form != "tokenizer"
    return bool(blocks) or kind.form in ("layers", "entries", "rate", "batch")


def present_keys(block: outline.OutlineNode) -> set[str]:
    """The keys that a block has already, and alternatives to them."""
    keys = {node.key for node in block.body} - {"layers", PHASE}
    return keys | {ALTERNATIVES[key] for key in keys if key in ALTERNATIVES}


OURS = ("within",)  # keys that only dsc writes


def every_key(cls: type[Node]) -> tuple[str, ...]:
    """The keys of a block."""
    return tuple(LayerRange.KEYS if cls is LayerRange else keys_of(cls))


def keys(cls: type[Node]) -> tuple[str, ...]:
    """The keys of a block that a user can write, required keys first."""
    names = [name for name in every_key(cls) if name not in OURS]
    return tuple(sorted(names, key=lambda name: not is_required(cls, name)))


def keys_in(block: BlockKind) -> tuple[str, ...]:
    """The keys allowed in a block. A phase lacks the keys of the whole run and of runs without phases."""
    train_keys = (*FIXED_TRAIN_KEYS, GRPO) if block.path == "train" else ()
    excluded = (FIXED_KEYS if block.cls is Spec else train_keys) if block.is_in_phase else ()
    return tuple(name for name in keys(block.cls) if name not in excluded)


def is_required(cls: type[Node], key: str) -> bool:
    """Whether a key must be written: it has neither a default nor a value derived from other keys."""
    kind = fields_of(cls).get(key)
    return kind is not None and kind.required and kind.form != "label" and key not in derive.DEFAULTS.get(cls, {})


# ---------------------------------------------------------------- text to insert
def text_of(cls: type[Node], key: str) -> str:
    """A statement for a key, without placeholders: its example, or a valid statement from the schema."""
    if key == "steps":
        return "steps = 1000"
    example = (cls.model_fields[key].examples or [""])[0]
    if example and "…" not in example:
        return str(example)
    kind = fields_of(cls)[key]
    if is_block(kind):
        head = example.partition("{")[0].strip() or key
        labels = head.split()[1:]
        chosen = class_of(kind, labels) or (kind.nodes[0] if kind.nodes else None)
        return block_text(head, chosen) if chosen else f"{head} {{ }}"
    return f"{key} = {default(cls, key) or (values(kind) or ['1'])[0]}"


def block_text(head: str, cls: type[Node]) -> str:
    """A block with its required keys."""
    lines = [text_of(cls, name) for name in fields_of(cls) if is_required(cls, name)]
    body = "".join(f"\n{line}" for line in lines).replace("\n", "\n  ")
    return f"{head} {{{body}\n}}"


def snippet(cls: type[Node], key: str) -> str:
    """`text_of` as an LSP snippet, with placeholders for the values to fill in."""
    if key in NAMED and cls is Spec:
        return f"{key} = $1"  # a name defined by the user: left empty, so that completion proposes the defined names
    kind = fields_of(cls).get(key)
    choices = values(kind) if kind is not None else []
    if kind is not None and choices and get_origin(kind.types[0]) is not tuple:
        return f"{key} = ${{1|{','.join(choices)}|}}"
    return placeholders(text_of(cls, key))


def phase_snippet(name: str) -> str:
    """A line of the learning rate, with placeholders for its numbers."""
    return placeholders(PHASES[name], NUMBER)


def placeholders(text: str, places: re.Pattern[str] = VALUE) -> str:
    """A snippet with a placeholder for each value of a text."""
    parts, last = [], 0
    for number, match in enumerate(places.finditer(text), 1):
        parts += [escape_snippet(text[last : match.start()]), f"${{{number}:{escape_snippet(match[0])}}}"]
        last = match.end()
    return "".join(parts) + escape_snippet(text[last:])


def escape_snippet(text: str) -> str:
    """A text escaped for use in a snippet."""
    return re.sub(r"[$}\\]", r"\\\g<0>", text)


def values(kind: FieldType) -> list[str]:
    """The words allowed as a value; [] if it is not one of a fixed set."""
    for wanted in kind.types:
        if get_origin(wanted) is Literal:
            return list(get_args(wanted))
        if get_origin(wanted) is tuple and get_origin(get_args(wanted)[0]) is Literal:
            return list(get_args(get_args(wanted)[0]))
        if wanted is bool:
            return ["true", "false"]
    return []


def default(cls: type[Node], key: str) -> str:
    """The default of a key in spec syntax; "" if it has none, or none that fits on a line."""
    info = cls.model_fields[key]
    if info.is_required() or info.default is None or isinstance(info.default, Node):
        return ""
    return value_text_of(fields_of(cls)[key], info.default)


def value_text_of(kind: FieldType, value: Any) -> str:
    """A value of a field in spec syntax on one line; "" if it needs a block."""
    if isinstance(value, Batch):
        return f"{value.start}" if value.start == value.end else ""
    block = isinstance(value, Node) and not isinstance(value, (Tile, TrainTokenizer))
    return "" if block or kind.form in ("layers", "entries", "rate") else value_text(kind, value)
