"""Random specs of the fuzzer have every key of the schema, so that none goes without a random value."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from dsl.messages.diagnostics import Source
from dsl.schema import (
    Batch,
    Dense,
    Gqa,
    LayerRange,
    Mla,
    Moe,
    Node,
    Parallel,
    Spec,
    Tile,
    Train,
    TrainTokenizer,
)
from dsl.schema.base import FieldType, fields_of, keys_of
from dsl.text.parser import parse
from dsl.text.syntax import NAMED, Attribute, Block
from tests.fuzz.generate import KINDS


def drawn(cls: type[Node], block: Block, found: dict[tuple[type[Node], str], set[str]]) -> None:
    """Values and kinds written for every key of a block and its nested blocks, by the class that has the key."""
    for statement in block.body:
        if not isinstance(statement, (Attribute, Block)) or statement.key.text not in (*keys_of(cls), "ffn"):
            continue
        key, written = statement.key.text, found[cls, statement.key.text]
        if isinstance(statement, Attribute):
            written.add(statement.phrase.span.text)
            continue
        written.add(" ".join(label.span.text for label in statement.labels) or "{")
        inner = (LayerRange,) if key == "layers" else fields_of(cls)[key].nodes if key in fields_of(cls) else ()
        for node_cls in inner:
            label = node_cls.model_fields["kind"].default if "kind" in node_cls.model_fields else None
            if label is None or label in written:
                drawn(node_cls, statement, found)


def expected(kind: FieldType) -> Iterator[str]:
    """The words that a field of the schema must be drawn with: each alternative, each choice."""
    if kind.optional and not (kind.form or kind.nodes):
        yield "none"
    for type_ in kind.types:
        if isinstance(type_, type) and issubclass(type_, Node):
            yield type_.model_fields["kind"].default if "kind" in type_.model_fields else ""
        elif get_origin(type_) is Literal:
            yield from get_args(type_)
        elif type_ is bool:
            yield from ("true", "false")
        elif get_origin(type_) is tuple and get_origin(get_args(type_)[0]) is Literal:
            yield from get_args(get_args(type_)[0])


def test_random_specs_draw_every_key_every_alternative_and_every_word() -> None:
    """Random specs draw every key, kind of block and word of the schema; a new one must be drawn, or this fails."""
    drawn_words: dict[tuple[type[Node], str], set[str]] = defaultdict(set)
    chooser = random.Random(0)
    tops = {"run": Spec, **{name: fields_of(Spec)[name].nodes[0] for name in NAMED}}
    for _ in range(400):
        document = parse(Source("spec", KINDS["schema"](chooser).files["spec.dsc"])).document
        for block in document.body:
            assert isinstance(block, Block)
            drawn(tops[block.key.text], block, drawn_words)
    todo, classes = [Spec], set[type[Node]]()
    while todo:
        cls = todo.pop()
        if cls in classes or cls in (Batch, Tile, TrainTokenizer):  # written as one value
            continue
        classes.add(cls)
        for name, kind in fields_of(cls).items():
            if kind.form == "label" or (cls is LayerRange and name != "ffn"):
                continue
            written = drawn_words[cls, name]
            assert written, f"{cls.__name__}.{name} is never drawn"
            text = " ".join(sorted(written))
            lacking = [word for word in expected(kind) if word and not re.search(rf"(?<!\w){word}(?!\w)", text)]
            assert not lacking, f"{cls.__name__}.{name} is never {', '.join(lacking)}"
            todo += [LayerRange] if kind.form == "layers" else kind.nodes
    assert {Spec, Gqa, Mla, Moe, Dense, LayerRange} <= classes
    assert {"auto"} <= drawn_words[Parallel, "pipeline"] and drawn_words[Train, "steps"]
