"""Turn the written value of a field into the typed value that the schema expects."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dsl.facts import units
from dsl.facts.units import exact_text
from dsl.messages.diagnostics import OVERRIDE, Span
from dsl.resolve.context import Context, RejectedError, Scope, enclosing_blocks, suggest
from dsl.resolve.evaluate import convert, number, phrase
from dsl.schema import StoredUnit, Tile
from dsl.schema.base import WORDS_AS_TEXT, FieldType, broken_bound
from dsl.schema.train import LOCAL
from dsl.text.parser import MAX_STRING
from dsl.text.syntax import Attribute, Let, ListOf, Number, String, Value, Word

TILE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})", re.ASCII)
BOUNDS = {  # a bound → (rule, edit)
    "ge": ("at least {}", "{} or more"),
    "gt": ("more than {}", "a number above {}"),
    "le": ("at most {}", "{} or less"),
    "lt": ("less than {}", "a number below {}"),
    "min_length": ("at least {} character", "a path or a name"),
    "max_length": ("at most {} characters", "a shorter string"),
    "least": ("at least {} word", "one or more, with commas between"),  # for a list
}
MOST_PARTS = 10**6  # largest denominator of an exact number; six decimals


def reject_out_of_bounds(
    context: Context, setting: str, span: Span, unit: StoredUnit | None, bound: str, limit: int | float
) -> RejectedError:
    """Report a setting such as `hidden = 0` that breaks a bound of its key."""
    words, edit = BOUNDS[bound]
    text = f"{limit:g}" if isinstance(limit, float) else f"{limit:,}"
    if unit is not None and not unit.bare:
        text = units.bound_text(limit, unit.name)
    message = f"`{setting}` is out of bounds: {words.format(text)}"
    return context.reject("E0303", message, span, f"write {edit.format(text)}")


def scalar(context: Context, scope: Scope, kind: FieldType, statement: Attribute) -> Any:
    """Resolve a value with the syntax of its type: a number, a word, a string or a list of words."""
    key, written = statement.key.text, statement.phrase
    value = written.items[0]
    if kind.form == "places":
        return places(context, scope, statement)
    if kind.form == "ranks" and isinstance(numbers := _substitute_let(context, scope, value, kind.types[0]), ListOf):
        return _rank_numbers(context, scope, kind, statement, numbers)
    if kind.optional and len(written.items) == 1 and isinstance(value, Word) and value.text == "none":
        return None
    wanted = kind.types[0]
    if wanted in (int, float, Fraction):
        result = convert(context, phrase(context, scope, written), kind.unit, key, written.span)
        return _convert_type(context, result, wanted, kind.unit, key, written.span)
    if len(written.items) > 1:
        extra = written.items[1].span.extend_to(written.items[-1].span)
        raise context.reject("E0302", f"`{key}` takes one value", extra, f"remove `{extra.text}`")
    value = _substitute_let(context, scope, value, wanted)
    if isinstance(value, Word) and (canonical := dict(kind.aliases).get(value.text)):
        return None if canonical == "none" else canonical
    if get_origin(wanted) is Literal:
        return choice(context, key, value, get_args(wanted))
    if get_origin(wanted) is tuple:
        return _words(context, key, value, get_args(get_args(wanted)[0]))
    if wanted is bool:
        return choice(context, key, value, ("true", "false")) == "true"
    if wanted is Tile:
        return _tile(context, key, value)
    assert wanted is str, wanted
    return string(context, key, value, kind.is_path)


def _rank_numbers(
    context: Context, scope: Scope, kind: FieldType, statement: Attribute, value: ListOf
) -> tuple[Fraction, ...]:
    """Resolve `[8, 8, 7.5, 20 / 3]`: a number for each pipeline rank."""
    key = statement.key.text
    if len(statement.phrase.items) > 1 or not value.items:
        hint = f"write `{key} = [8, 7.5]`, with a number for each pipeline rank"
        raise context.reject("E0302", f"`{key}` is a number, or a list of numbers", statement.phrase.span, hint)
    numbers = []
    for index, item in enumerate(value.items):
        context.origins[f"{scope.path_of(key)}.{index}"] = item.span
        with suppress(RejectedError):  # continue with the next one
            fraction = convert(context, number(context, scope, item), kind.unit, key, item.span)
            _convert_type(context, fraction, Fraction, kind.unit, key, item.span)
            if (bound := broken_bound(kind, fraction)) is not None:
                raise reject_out_of_bounds(context, item.span.text, item.span, kind.unit, *bound)
            numbers.append(fraction)
    if len(numbers) < len(value.items):
        raise RejectedError
    return tuple(numbers)


def string(context: Context, key: str, value: Value, is_path: bool) -> str:
    """Resolve a string in quotes, or a word that stands for a path."""
    if isinstance(value, String):
        return _relative_to_first_file(context, value) if is_path else value.value
    text = value.span.text
    if is_path and isinstance(value, Word) and text in WORDS_AS_TEXT:
        return text
    items = value.items if isinstance(value, ListOf) else ()
    hint = f'write `{key} = "{text}"`'
    if len(items) == 1 and isinstance(items[0], String):
        hint = f"write `{key} = {items[0].span.text}`"
    elif not isinstance(value, (Word, Number)):  # quotes around several strings or a call would not help
        hint = "write one string in quotes"
        hint += "; a glob names several files, as in `corpus/**/*.txt`" if key == "source" else ""
    elif value.span.source.name == OVERRIDE:
        source = value.span.source
        hint = f"write `-s '{source.text[: value.span.start]}\"{text}\"{source.text[value.span.end :]}'`"
    raise context.reject("E0302", f"`{key}` is a string in quotes, but `{text}` is not", value.span, hint)


def _relative_to_first_file(context: Context, value: String) -> str:
    """Convert a path from relative to its file to relative to the folder of the first file."""
    text, folder = value.value, context.definitions.folders.get(value.span.source.name, ".")
    if folder == "." or not text or text in WORDS_AS_TEXT or Path(text).is_absolute():
        return text
    home, path = Path(context.definitions.home), str(Path(folder, text))
    short = os.path.normpath(path)
    # `link/../notes` is not `notes` if the link leads elsewhere
    is_same = os.path.realpath(home / path) == os.path.realpath(home / short)
    resolved = short if is_same else path
    if len(resolved) > MAX_STRING:
        message = (
            f"relative to the folder of the spec, this path has {len(resolved):,} characters: at most "
            f"{MAX_STRING:,} are allowed"
        )
        raise context.reject("E0104", message, value.span, "write a shorter path, or an absolute one")
    return resolved


def places(context: Context, scope: Scope, statement: Attribute) -> tuple[str, ...]:
    """Resolve `[local, "/mnt/slow/mine", "s3://bucket/mine"]`: the places of checkpoints."""
    key, value = statement.key.text, statement.phrase.items[0]
    if not isinstance(value, ListOf) or len(statement.phrase.items) > 1:
        text = statement.phrase.span.text
        hint = f"write `{key} = [{LOCAL}{'' if text == LOCAL else f', {text}'}]`"
        raise context.reject("E0302", f"`{key}` is a list", statement.phrase.span, hint)
    targets = [
        LOCAL if isinstance(item, Word) and item.text == LOCAL else _place(context, item) for item in value.items
    ]
    context.origins |= {f"{scope.path_of(key)}.{index}": item.span for index, item in enumerate(value.items)}
    return tuple(targets)


def _place(context: Context, value: Value) -> str:
    """Resolve a folder, relative to that of the first file, or a URL. `"local"` in quotes is a folder of that name."""
    if not isinstance(value, String):
        hint = f'write `{LOCAL}`, or a folder in quotes, as in `"/mnt/slow/mine"`'
        raise context.reject("E0302", f"`{value.span.text}` is not a place for checkpoints", value.span, hint)
    target = value.value if "://" in value.value else string(context, "to", value, is_path=True)
    return f"./{target}" if target == LOCAL else target


def choice(context: Context, key: str, value: Value, choices: tuple[str, ...]) -> str:
    """Resolve one of the allowed words; `1f1b` is one too, although it parses as a number."""
    if isinstance(value, (Word, Number)) and value.text in choices:
        return value.text
    text = value.span.text
    hint = f"write `{value.value}`" if isinstance(value, String) and value.value in choices else suggest(text, choices)
    counted = re.fullmatch(r"(\w+)\s*\(\s*([0-9]+)\s*\)", text)
    if counted and counted[1] in choices:  # `placement = loop(3)`, as `dsc schedule` writes it
        chunks = f", chunks = {counted[2]}" if key == "placement" and int(counted[2][:9]) > 1 else ""
        hint = f"write `{counted[1]}{chunks}`"
    raise context.reject("E0304", f"`{key}` cannot be `{text}`", value.span, hint)


def _convert_type(
    context: Context, value: Fraction, wanted: Any, unit: StoredUnit | None, key: str, span: Span
) -> int | float | Fraction:
    if wanted is float:
        return float(value)
    if wanted is Fraction:
        if value > 1 and value.denominator > MOST_PARTS:
            message = f"`{key}` has at most six decimals, or a denominator of at most {MOST_PARTS:,}"
            hint = f"write `{exact_text(Fraction(int(value * MOST_PARTS), MOST_PARTS))}`"
            raise context.reject("E0302", message, span, hint)
        return value
    if value.denominator != 1 and (unit is None or unit.name != "byte"):
        hint = f"write `{key} = {round(value)}`"
        raise context.reject("E0302", f"`{key}` is a whole number, but `{span.text}` is not", span, hint)
    return int(value)


def _substitute_let(context: Context, scope: Scope, value: Value, wanted: Any) -> Value:
    """Replace a word that names a `let` by its value, unless the word is itself allowed."""
    seen: set[str] = set()
    while isinstance(value, Word) and value.text not in get_args(wanted) and value.text not in seen:
        seen.add(value.text)
        let = let_of(context, scope, value.text)
        if let is None or len(let.phrase.items) != 1:
            break
        context.uses[value.span] = let
        value = let.phrase.items[0]
    return value


def let_of(context: Context, scope: Scope, name: str) -> Let | None:
    """Find the `let` of a name in the blocks around, innermost first, or in the file."""
    for block, _ in enclosing_blocks(scope):
        for statement in block.statements_by_name.get(name, ()):
            if isinstance(statement, Let):
                return statement
    return context.definitions.lets.get(name)


def _words(context: Context, key: str, value: Value, choices: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(value, ListOf):
        hint = f"write `{key} = [{value.span.text}]`"
        raise context.reject("E0302", f"`{key}` is a list", value.span, hint)
    words: list[str] = []
    for item in value.items:
        try:
            word = choice(context, key, item, choices)
            if word in words:
                raise context.reject("E0202", f"`{word}` is listed twice", item.span, "remove one of them")
            words.append(word)
        except RejectedError:
            continue
    if len(words) < len(value.items):
        raise RejectedError
    return tuple(words)


def _tile(context: Context, key: str, value: Value) -> Tile:
    match = TILE.fullmatch(value.text) if isinstance(value, Number) else None
    if match is None:
        message = f"`{key}` is a tile, but `{value.span.text}` is not"
        raise context.reject("E0302", message, value.span, f"write rows x columns, as in `{key} = 1x128`")
    rows, columns = int(match[1]), int(match[2])
    if not (1 <= rows <= 1024 and 1 <= columns <= 1024):
        message = f"`{value.span.text}` is out of bounds: rows and columns are at least 1 and at most 1024"
        raise context.reject("E0303", message, value.span, f"write `{key} = 1x128`")
    return Tile.model_construct(rows=rows, columns=columns)
