"""Check the paths and keys that other modules name against the schema, when those modules are imported.

So a key that is renamed or removed fails at import, instead of silently reading as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from dsl.schema.base import Node
from dsl.schema.run import Spec
from dsl.schema.train import Batch

ENTRY = "*"  # any entry of a list of blocks
NAMED_ENTRIES = ("sources", "rewards")  # blocks whose entries have names
FIELDS_OF_BATCH_KEYS = {"from": "start", "to": "end", "over": "over_tokens"}  # keys of a batch block → fields


@cache
def check_path(text: str) -> str:
    """Return `text`, a path of fields that starts at the run; an entry of a list is a number or `*`. Raises LookupError
    if the schema has no such path."""
    classes: tuple[type[Node], ...] = (Spec,)
    parts = text.split(".")
    for before, part in zip(["", *parts], parts, strict=False):
        if part == ENTRY or part.isdigit():
            continue  # `classes` are already those of an entry
        fields = [
            cls.model_fields.get(FIELDS_OF_BATCH_KEYS.get(part, part) if cls is Batch else part) for cls in classes
        ]
        present = [field for field in fields if field is not None]
        if not present and before in NAMED_ENTRIES:
            continue
        if not present:
            raise LookupError(f"the schema has no `{part}` in `{text}`")
        classes = tuple(cls for field in present for cls in _block_classes(field.annotation))
    return text


def check_paths(*texts: str) -> tuple[str, ...]:
    """Return the paths, each checked by `check_path`."""
    return tuple(map(check_path, texts))


def check_key(cls: type[Node], name: str) -> str:
    """Return `name`, a field of a schema class. Raises LookupError if the class has no such field."""
    if name not in cls.model_fields:
        raise LookupError(f"{cls.__name__} has no field `{name}`")
    return name


def _block_classes(annotation: Any) -> Iterator[type[Node]]:
    """The classes of blocks that a field may hold, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Node):
        yield annotation
    for argument in get_args(annotation):
        yield from _block_classes(argument)
