"""What may stand in a block: its class of the schema, its keys, and the text to insert for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from compiler.tools.editor import outline
from dsl.canonical import value_text
from dsl.resolve import derive
from dsl.resolve.merge import ALTERNATIVES, PHASE
from dsl.resolve.phases import GRPO, WHOLE, WHOLE_OF_TRAIN
from dsl.schema import Batch, LayerRange, Node, Spec, Tile, TrainTokenizer
from dsl.schema.base import FieldType, fields_of, keys_of
from dsl.text.syntax import KINDS, NAMED

# --- A proposal of the completion

ItemKind = Literal["key", "block", "value", "name", "unit", "word", "file", "reference"]


@dataclass(frozen=True)
class CompletionItem:
    """What takes the place of characters `start` to `end`: the label, or a snippet where the client knows them."""

    label: str
    kind: ItemKind
    detail: str = ""
    documentation: str = ""  # Markdown
    snippet: str = ""
    start: int = 0
    end: int = 0


# --- block keys

BATCH_KEYS = {
    "from": ("from = 3072", "sequences of the first step"),
    "to": ("to = 15360", "sequences of a step once it has grown"),
    "over": ("over = 469B tokens", "tokens over which it grows"),
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
class Inside:
    """What a block is: the file, a block of a class or blocks of one by their names, or a form without such keys."""

    form: Literal["file", "class", "names", "batch", "rate", "unknown"]
    cls: type[Node] = Node
    path: str = ""  # with the kinds of the blocks: model.attention.mla; of a run or a phase of it, nothing
    of_phase: bool = False  # whether it is in a phase of a run, which says what is otherwise than before

    def at(self, key: str) -> str:
        """The path of a key, as `dsl.reference` has it."""
        return f"{self.path}.{key}".lstrip(".")


def inside(path: Sequence[outline.OutlineNode]) -> Inside:
    """What the innermost of some nested blocks is."""
    if not path:
        return Inside("file")
    root = path[0].key
    if root not in KINDS:
        return Inside("unknown")
    found = Inside("class", Spec) if root == "run" else Inside("class", fields_of(Spec)[root].nodes[0], root)
    for node in path[1:]:
        is_phase = found.cls is Spec and node.key == PHASE and not found.of_phase
        found = replace(found, of_phase=True) if is_phase else _within(found, node)
    return found


def _within(around: Inside, node: outline.OutlineNode) -> Inside:
    if around.form == "names":
        return replace(around, form="class")
    kind = fields_of(around.cls).get(node.key) if around.form == "class" else None
    if kind is None or not is_block(kind):
        return Inside("unknown")
    path = around.at(node.key)
    if kind.form in ("batch", "rate"):
        return replace(around, form="batch" if kind.form == "batch" else "rate", cls=Node, path=path)
    if kind.form == "layers":
        return replace(around, cls=LayerRange, path=path)
    if kind.form == "entries":
        return replace(around, form="names", cls=kind.entry, path=path)
    cls = class_of(kind, node.labels)
    if cls is None:
        return Inside("unknown")
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
    """Whether a field is written with braces, always or sometimes."""
    blocks = kind.nodes and kind.types != (Tile,) and kind.form != "tokenizer"
    return bool(blocks) or kind.form in ("layers", "entries", "rate", "batch")


def given(block: outline.OutlineNode) -> set[str]:
    """Keys a block has already, and those that would say the same."""
    keys = {node.key for node in block.body} - {"layers", PHASE}
    return keys | {ALTERNATIVES[key] for key in keys if key in ALTERNATIVES}


OURS = ("within",)  # keys that dsc writes, and no user


def every_key(cls: type[Node]) -> tuple[str, ...]:
    """The keys of a block."""
    return tuple(LayerRange.KEYS if cls is LayerRange else keys_of(cls))


def keys(cls: type[Node]) -> tuple[str, ...]:
    """The keys of a block that a user writes, those that must be given first."""
    names = [name for name in every_key(cls) if name not in OURS]
    return tuple(sorted(names, key=lambda name: not required(cls, name)))


def keys_in(where: Inside) -> tuple[str, ...]:
    """The keys of a block at its place: a phase has none of those of its whole run, or of runs without phases."""
    of_train = (*WHOLE_OF_TRAIN, GRPO) if where.path == "train" else ()
    whole = (WHOLE if where.cls is Spec else of_train) if where.of_phase else ()
    return tuple(name for name in keys(where.cls) if name not in whole)


def required(cls: type[Node], key: str) -> bool:
    """Whether a key must be written: it has no default, nor one that follows from other keys."""
    kind = fields_of(cls).get(key)
    return kind is not None and kind.required and kind.form != "label" and key not in derive.DEFAULTS.get(cls, {})


# ---------------------------------------------------------------- what to insert
def text_of(cls: type[Node], key: str) -> str:
    """A statement for a key, without placeholders: its example, or what the schema lets one write."""
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
    """A block with the keys it must have."""
    lines = [text_of(cls, name) for name in fields_of(cls) if required(cls, name)]
    body = "".join(f"\n{line}" for line in lines).replace("\n", "\n  ")
    return f"{head} {{{body}\n}}"


def snippet(cls: type[Node], key: str) -> str:
    """The text of `text_of`, with the values to fill in marked as the protocol marks them in a snippet."""
    if key in NAMED and cls is Spec:
        return f"{key} = $1"  # a name of the user's, so that the names there are come up
    kind = fields_of(cls).get(key)
    choices = values(kind) if kind is not None else []
    if kind is not None and choices and get_origin(kind.types[0]) is not tuple:
        return f"{key} = ${{1|{','.join(choices)}|}}"
    return placeholders(text_of(cls, key))


def phase_snippet(name: str) -> str:
    """A line of the learning rate, its numbers to be filled in."""
    return placeholders(PHASES[name], NUMBER)


def placeholders(text: str, places: re.Pattern[str] = VALUE) -> str:
    """A snippet in which each value of a text is a place to fill in."""
    parts, last = [], 0
    for number, match in enumerate(places.finditer(text), 1):
        parts += [escaped(text[last : match.start()]), f"${{{number}:{escaped(match[0])}}}"]
        last = match.end()
    return "".join(parts) + escaped(text[last:])


def escaped(text: str) -> str:
    """Text that a snippet takes as it is."""
    return re.sub(r"[$}\\]", r"\\\g<0>", text)


def values(kind: FieldType) -> list[str]:
    """The words that a value may be, if they are known."""
    for wanted in kind.types:
        if get_origin(wanted) is Literal:
            return list(get_args(wanted))
        if get_origin(wanted) is tuple and get_origin(get_args(wanted)[0]) is Literal:
            return list(get_args(get_args(wanted)[0]))
        if wanted is bool:
            return ["true", "false"]
    return []


def default(cls: type[Node], key: str) -> str:
    """The default of a key as it is written; "" if it has none, or none that can be written in a line."""
    info = cls.model_fields[key]
    if info.is_required() or info.default is None or isinstance(info.default, Node):
        return ""
    return written(fields_of(cls)[key], info.default)


def written(kind: FieldType, value: Any) -> str:
    """A value of a field as one writes it in a line; "" if it takes a block."""
    if isinstance(value, Batch):
        return f"{value.start}" if value.start == value.end else ""
    block = isinstance(value, Node) and not isinstance(value, (Tile, TrainTokenizer))
    return "" if block or kind.form in ("layers", "entries", "rate") else value_text(kind, value)
