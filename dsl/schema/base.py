"""Base of all schema classes: strict frozen models, and the marks that tell the resolver how a field is written.

A field is `Annotated[type, Field(bounds, description, examples), mark]`. The type and bounds are checked by pydantic,
the mark is read by `dsl.resolve`: without one, a field is written as its type says (a number, a word, a string, a
block). Descriptions and examples are shown by hints, `dsc explain`, editors and docs/reference; the first example is
what a hint proposes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

MAX_TOKENS = 10**16
MAX_STEPS = 10**9
Width = Annotated[int, Field(ge=1, le=1_048_576)]


class StrictModel(BaseModel):
    """A pydantic model that also rejects unknown fields in `model_copy` and `model_construct`."""

    model_config = ConfigDict(defer_build=True)  # the validator is never used and takes time to build

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the model and replace some fields, without validation. Raises TypeError for unknown fields."""
        _check_fields(type(self), update or {})
        return super().model_copy(update=update, deep=deep)

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        """Make an instance without validation; fields may be missing. Raises TypeError for unknown fields."""
        _check_fields(cls, values)
        return super().model_construct(_fields_set, **values)


def _check_fields(cls: type[BaseModel], values: Mapping[str, Any]) -> None:
    unknown = values.keys() - cls.model_fields.keys()
    if unknown:
        raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")


class Node(StrictModel):
    """A block of a resolved spec: immutable, no conversions (`"8"` is not 8), no unknown keys."""

    # pydantic's validators take 30 ms to build; only code that constructs a spec uses them, `dsl.resolve` checks by
    # itself
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """The unit a number is stored in; written values are converted to it. `bare`: the number may be written without
    it."""

    name: str  # a unit of dsl.facts.units
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Syntax:
    """A field with a syntax of its own, instead of that of its type. The forms are in `dsl.resolve.forms`."""

    form: Literal["phases", "batch", "rate", "layers", "entries", "tokenizer", "places", "ranks", "label"]


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """Bounds of a number, or of each number of a list. pydantic's `Field` cannot express both."""

    ge: int
    le: int


@dataclass(frozen=True, slots=True)
class FilePath:
    """A string that is a path: relative to the file it is written in; in a resolved spec, relative to the run's
    file."""


@dataclass(frozen=True, slots=True)
class RequiredUnless:
    """A field that is required unless another field of its block is given."""

    key: str


@dataclass(frozen=True, slots=True)
class QuietField:
    """A field that the resolved text of a spec and plan.json show only if it differs from its default.

    Fields added later are quiet, so that existing builds and checkpoints of models without them keep their bytes.
    """


@dataclass(frozen=True, slots=True)
class DerivedDefault:
    """A field whose default `dsl.resolve.derive` computes from other values; `text` describes it."""

    text: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The words a field takes, each with its meaning."""

    meanings: Mapping[str, str]


def words_of(cls: type[BaseModel], name: str) -> tuple[str, ...]:
    """The words that a field with `Choices` takes."""
    return tuple(next(mark for mark in cls.model_fields[name].metadata if isinstance(mark, Choices)).meanings)


@dataclass(frozen=True, slots=True)
class Aliases:
    """Synonyms of the words a field takes. A synonym of `none` means that there is no value."""

    words: Mapping[str, str]


class Phase(Node):
    """A value that holds until `until_tokens` tokens have been trained on; the last phase of a tuple has no end."""

    value: Annotated[float, Field(ge=0, le=1000, description="the value")]
    until_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKENS, description="where it ends")] = None


def value_at(phases: tuple[Phase, ...], tokens: int) -> float:
    """The value of a phased quantity after `tokens` tokens of training."""
    for phase in phases:
        if phase.until_tokens is None or tokens < phase.until_tokens:
            return phase.value
    raise AssertionError("the last phase has no end")


def as_tree(value: Any) -> Any:
    """JSON-able form of a block or of a value in one, without quiet fields at their default."""
    if isinstance(value, Node):
        fields = type(value).model_fields
        return {name: as_tree(item) for name, item in value if not is_left_out(fields[name], item)}
    return [as_tree(item) for item in value] if isinstance(value, tuple) else value


def is_left_out(info: FieldInfo, value: Any) -> bool:
    """Whether a field is quiet and `value` is its default."""
    return bool(value == info.default) and any(isinstance(mark, QuietField) for mark in info.metadata)


# --- What a field of a schema class takes, read from its annotation: types, unit, form and bounds

LIMITS: dict[str, Callable[[Any, Any], bool]] = {  # a bound of pydantic's Field → whether a value is within it
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "min_length": lambda text, limit: len(text) >= limit,
    "max_length": lambda text, limit: len(text) <= limit,
}
WORDS_AS_TEXT = {"python_stdlib"}  # words that a string key also takes


@dataclass(frozen=True)
class FieldType:
    """What a field of a schema class takes."""

    types: tuple[Any, ...]  # alternatives, without None
    optional: bool
    required: bool
    unit: StoredUnit | None
    form: str
    is_path: bool  # a path, relative to the file it is written in
    bounds: tuple[tuple[str, int | float], ...]  # (key of LIMITS, limit)
    aliases: tuple[tuple[str, str], ...]  # (synonym, word)
    unless: str  # the field is required unless this other key is given

    @property
    def entry(self) -> type[Node]:
        """The class of the blocks that the field is a list of."""
        entry_class: type[Node] = get_args(self.types[0])[0]
        return entry_class

    @property
    def nodes(self) -> tuple[type[Node], ...]:
        """The block classes, if the field is a block."""
        return tuple(
            annotation for annotation in self.types if isinstance(annotation, type) and issubclass(annotation, Node)
        )


def broken_bound(kind: FieldType, value: Any) -> tuple[str, int | float] | None:
    """The bound that a value breaks; None if it is within all."""
    if value is None or (kind.form == "ranks" and isinstance(value, tuple)):  # each number was checked on its own
        return None
    return next((bound for bound in kind.bounds if not LIMITS[bound[0]](value, bound[1])), None)


@cache
def fields_of(cls: type[Node]) -> dict[str, FieldType]:
    """The fields of a schema class, by key."""
    fields = {}
    for name, info in cls.model_fields.items():
        union = get_origin(info.annotation) in (Union, UnionType)
        types = get_args(info.annotation) if union else (info.annotation,)
        unless = next((mark.key for mark in info.metadata if isinstance(mark, RequiredUnless)), "")
        fields[name] = FieldType(
            types=tuple(annotation for annotation in types if annotation is not NoneType),
            optional=NoneType in types and not unless,
            required=info.is_required() or bool(unless),
            unit=next((mark for mark in info.metadata if isinstance(mark, StoredUnit)), None),
            form=next((mark.form for mark in info.metadata if isinstance(mark, Syntax)), ""),
            is_path=any(isinstance(mark, FilePath) for mark in info.metadata),
            bounds=tuple(
                (name, getattr(mark, name)) for mark in info.metadata for name in LIMITS if hasattr(mark, name)
            ),
            aliases=tuple(alias for mark in info.metadata if isinstance(mark, Aliases) for alias in mark.words.items()),
            unless=unless,
        )
    return fields


def keys_of(cls: type[Node]) -> tuple[str, ...]:
    """The keys a user may write in a block of this class."""
    keys = [name for name, kind in fields_of(cls).items() if kind.form != "label"]
    return (*keys, "steps") if "tokens" in keys else tuple(keys)
