"""The blocks and keys of the language, read from the schema, for `dsc explain`, editors and docs/reference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from types import CodeType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from dsl.canonical import number_text
from dsl.facts import units
from dsl.rules import RULES
from dsl.rules.finding import Rule
from dsl.schema import Choices, DerivedDefault, LayerRange, Mtp, Node, Spec, Tile
from dsl.schema.base import WORDS_AS_TEXT, FieldType, fields_of
from dsl.text.syntax import NAMED

NESTED = ("more",)  # blocks that may contain one of their kind
CODE = re.compile(r"E\d{4}")
SMALL = 3  # a rule that reads a whole block with at most this many keys applies to each of them

# Form → what it takes. Other fields are described by their types.
FORMS = {
    "phases": "number, or a number for each phase: `0.3 until 10T tokens then 0.1`",
    "batch": "whole number, or a block of `from`, `to` and `over`",
    "rate": "block of phases, one per line",
    "layers": "blocks, one for each range of layers",
    "entries": "blocks, each with its own name",
    "places": "list of `local` and strings in quotes",
    "tokenizer": "string in quotes, or `train(entries)`",
    "ranks": "number, or a list with a number for each pipeline rank",
}
UNITS = {
    "byte": "bytes, as in `80GB`",
    "byte/s": "bytes per second, as in `200GB/s`",
    "flop/s": "FLOPS, as in `989TFLOPS`",
    "USD/h": "dollars per hour, as in `2USD/h`",
    "s": "time, as in `10min`",
    "token": "tokens, as in `10B` or `10B tokens`",
    "step": "steps, as in `1000` or `1000 steps`",
}
# Rules that concern other keys than their rows name, or that have no row: code → keys.
ABOUT = {
    "E0704": ("train.rate",),
    "E0708": ("model", "data", "adapter", *(f"train.{key}" for key in ("optimizer", "seed", "initial", "ema"))),
    "E0812": ("cluster.node.device.memory",),
    "E0910": (*(f"model.attention.{key}" for key in ("query_rank", "kv_rank", "heads")), "model.layers.ffn.inner"),
    "E0920": ("precision.high",),
    "E0921": ("precision.linear", "precision.dispatch", "precision.combine"),
    "E0926": (
        "model.attention.rope.theta",
        *(f"model.attention.rope.scaling.{key}" for key in ("low_freq_factor", "high_freq_factor")),
        *(f"model.attention.rope.scaling.{key}" for key in ("beta_fast", "beta_slow")),
    ),
    "E0950": ("model.attention.indexer", "model.attention.indexer.head_dim"),
    "E1001": ("precision",),
    "E1006": ("precision", "precision.linear"),
    "E1005": ("data.tokenizer",),
    "E1008": ("train.grpo",),
    "E1010": ("stack",),
    "E1009": ("precision", "parallel.tensor", "parallel.expert_tensor"),
}


@dataclass(frozen=True)
class BlockKey:
    """A key of a block. `default` is empty if the key must be given."""

    path: str  # with the kinds of the outer blocks: model.attention.mla.heads
    meaning: str
    takes: str
    default: str = ""
    unit: str = ""
    bounds: str = ""
    or_none: bool = False  # it must be given, but may be none
    choices: tuple[tuple[str, str], ...] = ()  # (word, meaning)
    examples: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()  # codes of the rules that read it

    @property
    def name(self) -> str:
        """The key as written in its block."""
        return self.path.rpartition(".")[2]

    @property
    def is_block(self) -> bool:
        """Whether the value of the key is a block, or the name of one, with a section of its own."""
        return self.takes.startswith(("block", "name of")) and self.takes != FORMS["rate"]

    @property
    def value(self) -> str:
        """What the key takes, including its bounds."""
        return ", ".join(part for part in (self.takes, self.bounds, "or `none`" * self.or_none) if part)


@dataclass(frozen=True)
class BlockKeys:
    """A block: its head, its meaning, and its keys in the order of the schema."""

    path: str
    head: str  # `attention mla`, or `sources { NAME` for a named entry
    meaning: str
    keys: tuple[BlockKey, ...]

    @property
    def closing(self) -> str:
        """The closing braces of the block."""
        return "} " * self.head.count("{") + "}"


@cache
def blocks() -> tuple[BlockKeys, ...]:
    """All blocks, depth first: the run, its inner blocks, the model, the cluster, the precision."""
    run = BlockKeys("run", "run NAME", _class_meaning(Spec), tuple(_keys_of_class(Spec, "")))
    inner = [block for name in fields_of(Spec) if name not in NAMED for block in _blocks_of_field(Spec, name, "")]
    named = [block for name in NAMED for block in _blocks_of_field(Spec, name, "")]
    return (run, *inner, *named)


@cache
def keys() -> dict[str, BlockKey]:
    """All keys by path."""
    return {key.path: key for block in blocks() for key in block.keys}


def without_kinds(path: str) -> str:
    """A path without kinds, as in `-s` and rules: model.attention.heads."""
    parts = path.split(".")
    return ".".join(part for before, part in zip(["", *parts], parts, strict=False) if (before, part) not in _kinds())


def documented_path(path: str) -> str:
    """The path of the block that documents this path: `cluster.more.more` has the keys of `cluster.more`."""
    parts = path.split(".")
    return ".".join(
        part for index, part in enumerate(parts) if part not in NESTED or parts[index - 1 : index] != [part]
    )


def related_key_paths(key: BlockKey) -> tuple[str, ...]:
    """Paths of the keys that a rule reads together with this one."""
    plain_path, block = without_kinds(key.path), key.path.rpartition(".")[0]
    rows = [[_without_index(read) for read in reads] for reads, rule in RULES if set(codes_of(rule)) & set(key.codes)]
    read_together = {read for row in rows if plain_path in row for read in row if read != plain_path}
    paths = [path for path in keys() if without_kinds(path) in read_together]
    alternatives = {
        path
        for path in paths
        if without_kinds(path).rpartition(".")[0] == without_kinds(block) and path.rpartition(".")[0] != block
    }
    return tuple(path for path in paths if path not in alternatives)


# ---------------------------------------------------------------- from the schema


def _blocks_of_field(cls: type[Node], name: str, path: str) -> Iterator[BlockKeys]:
    """Yield the blocks of a field and their inner blocks."""
    kind, info = fields_of(cls)[name], cls.model_fields[name]
    block_path = f"{path}.{name}".lstrip(".")
    listed = kind.form in ("layers", "entries")
    classes = (kind.entry,) if listed else kind.nodes
    if kind.form in ("phases", "batch", "rate", "tokenizer") or not classes or classes == (Tile,):
        return
    if cls in (LayerRange, Mtp) and name == "attention":  # same keys as the attention of the model
        return
    for block_class in classes:
        label = block_class.model_fields["kind"].default if "kind" in block_class.model_fields else ""
        named = "name" in block_class.model_fields and fields_of(block_class)["name"].form == "label"
        head = f"{name} {label or ('NAME' if named else 'FIRST..LAST' if kind.form == 'layers' else '')}".strip()
        head = f"{name} {{ NAME" if kind.form == "entries" else head
        inner = f"{block_path}.{label}".rstrip(".")
        yield BlockKeys(inner, head, _class_meaning(block_class), tuple(_keys_of_class(block_class, inner)))
        for field, field_type in fields_of(block_class).items():
            if block_class not in field_type.nodes:  # `more` inside `more` has the same keys
                yield from _blocks_of_field(block_class, field, inner)
    assert info.description, f"{cls.__name__}.{name}"


def _keys_of_class(cls: type[Node], path: str) -> Iterator[BlockKey]:
    for name, kind in fields_of(cls).items():
        if kind.form == "label" or (path.endswith("layers") and name in ("first", "last")):
            continue
        key_path = f"{path}.{name}".lstrip(".")
        yield _key_of_field(cls, name, kind, key_path)
        if key_path == "train.tokens":
            meaning = "length of the run or phase in steps, instead of `tokens`"
            bounds = "1 to 1,000,000,000"
            examples = ("steps = 1000", "steps = 1000 steps")
            steps = BlockKey("train.steps", meaning, "whole number", "from `tokens`", UNITS["step"], bounds)
            yield replace(steps, examples=examples, codes=("E0707",))


def _key_of_field(cls: type[Node], name: str, kind: FieldType, path: str) -> BlockKey:
    info = cls.model_fields[name]
    choices = next((tuple(mark.meanings.items()) for mark in info.metadata if isinstance(mark, Choices)), ())
    if len(kind.nodes) > 1:
        choices = tuple(
            (block_class.model_fields["kind"].default, _class_meaning(block_class)) for block_class in kind.nodes
        )
    return BlockKey(
        path=path,
        meaning=info.description or "",
        takes=_takes_text(name, kind, info.examples or ()),
        default=_default_text(info, kind),
        unit=UNITS[kind.unit.name] if kind.unit else "",
        bounds=_bounds_text(info, kind),
        or_none=kind.optional and kind.required,
        choices=choices,
        examples=tuple(info.examples or ()),
        codes=_codes_of_key(cls, without_kinds(path), kind),
    )


def _takes_text(name: str, kind: FieldType, examples: Collection[Any]) -> str:
    if kind.form:
        return FORMS[kind.form]
    if name in NAMED:
        return f"name of a `{name}` block"
    if kind.types == (Tile,):
        return "tile, rows x columns"
    if kind.nodes:
        return "block"
    (wanted,) = kind.types
    if get_origin(wanted) is tuple:
        return "list of words"
    if get_origin(wanted) is Literal:
        return "word"
    if wanted is str:
        words = [word for word in sorted(WORDS_AS_TEXT) if f"{name} = {word}" in examples]
        return " or ".join(["string in quotes", *(f"`{word}`" for word in words)])
    return {int: "whole number", float: "number", Fraction: "number", bool: "`true` or `false`"}[wanted]


def _default_text(info: FieldInfo, kind: FieldType) -> str:
    derived = next((mark.text for mark in info.metadata if isinstance(mark, DerivedDefault)), "")
    if derived or info.is_required():
        return derived
    if isinstance(info.default, Node):
        return "the defaults of its keys"
    return f"`{_value_text(info.default)}`"


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, Fraction)):
        return number_text(value)
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def _bounds_text(info: FieldInfo, kind: FieldType) -> str:
    """The bounds of a field in its unit: `1 to 65,536`."""
    limits = {
        name: getattr(mark, name) for mark in info.metadata for name in ("ge", "gt", "le", "lt") if hasattr(mark, name)
    }
    if kind.types == (Tile,):
        return "1x1 to 1024x1024"
    if not limits or kind.form not in ("", "ranks"):
        return ""
    texts = {name: _limit_text(value, kind) for name, value in limits.items()}
    if "ge" in texts and "le" in texts:
        return f"{texts['ge']} to {texts['le']}"
    low = f"at least {texts['ge']}" if "ge" in texts else f"above {texts['gt']}"
    return f"{low}, {'at most ' + texts['le'] if 'le' in texts else 'below ' + texts['lt']}"


def _limit_text(value: float, kind: FieldType) -> str:
    if kind.unit and not kind.unit.bare and value > 1:
        return re.sub(r"^\d+", lambda number: f"{int(number[0]):,}", units.unit_text(value, kind.unit.name))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+0", "e").replace("e+", "e")


def _class_meaning(cls: type[Node]) -> str:
    return " ".join((cls.__doc__ or "").split())


@cache
def _kinds() -> frozenset[tuple[str, str]]:
    """(key, kind) of every block that has a kind."""
    kinds: set[tuple[str, str]] = set()
    pending: list[Any] = [Spec]
    while pending:
        cls = pending.pop()
        for name, kind in fields_of(cls).items():
            kinds |= {
                (name, block_class.model_fields["kind"].default)
                for block_class in kind.nodes
                if "kind" in block_class.model_fields
            }
            pending += [
                argument
                for annotation in kind.types
                for argument in (annotation, *get_args(annotation))
                if isinstance(argument, type) and issubclass(argument, Node) and argument is not cls
            ]
    return frozenset(kinds)


# ---------------------------------------------------------------- from the rules


def codes_of(rule: Rule) -> tuple[str, ...]:
    """The codes that a rule reports, read from the constants of its bytecode."""
    code: CodeType = rule.__code__
    return tuple(
        sorted({constant for constant in code.co_consts if isinstance(constant, str) and CODE.fullmatch(constant)})
    )


def _codes_of_key(cls: type[Node], path: str, kind: FieldType) -> tuple[str, ...]:
    """The codes of the rules that read a key, or that read its whole block if that is small."""
    parent = path.rpartition(".")[0]
    codes = {code for code, about in ABOUT.items() if path in about}
    codes |= {"E0703"} if kind.form == "phases" else set()
    for reads, rule in RULES:
        places = {_without_index(read) for read in reads}
        siblings = {place.rpartition(".")[2] for place in places if place.rpartition(".")[0] == parent}
        is_mine = path in places and siblings <= fields_of(cls).keys()  # mla has no kv_heads
        if is_mine or (parent in places and parent in _small_blocks()):
            codes |= set(codes_of(rule))
    return tuple(sorted(codes))


def _without_index(read: str) -> str:
    return read.replace(".*", "").replace(".first", "").replace(".last", "")


@cache
def _small_blocks() -> frozenset[str]:
    """Paths of the blocks with at most SMALL keys."""
    counts: dict[str, int] = {}

    def visit(cls: type[Node], path: str) -> None:
        for name, kind in fields_of(cls).items():
            counts[path] = counts.get(path, 0) + (kind.form != "label")
            for block_class in kind.nodes:
                if block_class is not cls:
                    visit(block_class, f"{path}.{name}".lstrip("."))

    visit(Spec, "")
    return frozenset(path for path, count in counts.items() if count <= SMALL)
