"""What a field of a schema class takes, read from its annotation: types, unit, form and bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from dsl.schema.base import Aliases, FilePath, Node, Syntax, Unit, Unless

LIMITS: dict[str, Callable[[Any, Any], bool]] = {  # a bound of pydantic's Field → whether a value keeps to it
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "min_length": lambda text, least: len(text) >= least,
    "max_length": lambda text, most: len(text) <= most,
}
WORDS_AS_TEXT = {"python_stdlib"}  # words that stand where a string may


@dataclass(frozen=True)
class FieldType:
    """What a field of a schema class takes."""

    types: tuple[Any, ...]  # alternatives, without None
    optional: bool
    required: bool
    unit: Unit | None
    form: str
    is_path: bool  # a text that starts at the file it is written in
    bounds: tuple[tuple[str, int | float], ...]  # of LIMITS, with what they hold a value against
    aliases: tuple[tuple[str, str], ...]  # other words → the words they stand for
    unless: str  # another key, in the place of which this one must be given

    @property
    def entry(self) -> type[Node]:
        """The class of the blocks that the field is a list of."""
        found: type[Node] = get_args(self.types[0])[0]
        return found

    @property
    def nodes(self) -> tuple[type[Node], ...]:
        """The block classes, if the field is a block."""
        return tuple(each for each in self.types if isinstance(each, type) and issubclass(each, Node))


def broken_bound(kind: FieldType, value: Any) -> tuple[str, int | float] | None:
    """The bound that a value does not keep to."""
    if value is None or (kind.form == "ranks" and isinstance(value, tuple)):  # each number was held to them on its own
        return None
    return next((bound for bound in kind.bounds if not LIMITS[bound[0]](value, bound[1])), None)


@cache
def fields_of(cls: type[Node]) -> dict[str, FieldType]:
    """The fields of a schema class, by key."""
    found = {}
    for name, info in cls.model_fields.items():
        union = get_origin(info.annotation) in (Union, UnionType)
        types = get_args(info.annotation) if union else (info.annotation,)
        unless = next((mark.other for mark in info.metadata if isinstance(mark, Unless)), "")
        found[name] = FieldType(
            types=tuple(each for each in types if each is not NoneType),
            optional=NoneType in types and not unless,
            required=info.is_required() or bool(unless),
            unit=next((mark for mark in info.metadata if isinstance(mark, Unit)), None),
            form=next((mark.form for mark in info.metadata if isinstance(mark, Syntax)), ""),
            is_path=any(isinstance(mark, FilePath) for mark in info.metadata),
            bounds=tuple(
                (name, getattr(mark, name)) for mark in info.metadata for name in LIMITS if hasattr(mark, name)
            ),
            aliases=tuple(alias for mark in info.metadata if isinstance(mark, Aliases) for alias in mark.words.items()),
            unless=unless,
        )
    return found


def keys_of(cls: type[Node]) -> tuple[str, ...]:
    """The keys a user may write in a block of this class."""
    keys = [name for name, kind in fields_of(cls).items() if kind.form != "label"]
    return (*keys, "steps") if "tokens" in keys else tuple(keys)
