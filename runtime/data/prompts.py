"""Prompts that completions are written to: rows of files, and their tokens.

A row is a line of a `.jsonl` file or a row of a table, as TRL, slime and verl read it: a prompt, which is a text or a
list of messages, and other columns, one of which may be the answer. `tools` and `chat_template_kwargs` go to the chat
template, as of conversations.

What is kept of a row is JSON: {"prompt": the text or messages, "columns": all else of the row, and its `answer`}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from runtime.contract import Prompts
from runtime.data import chat
from runtime.data.chat import Encoded, RowEncoder, Settings, as_inputs, messages_fault, more_fault
from runtime.data.errors import DataError
from runtime.data.readers import (
    LINE_SUFFIXES,
    MAX_DOCUMENT_BYTES,
    TABLE_SUFFIXES,
    SourceFile,
    documents,
    json_lines,
    suffix_of,
)
from runtime.data.rewards.scoring import ANSWER

FORMAT = 1  # of what is kept of rows, and the tokens that they become
SUFFIXES = (*LINE_SUFFIXES, *TABLE_SUFFIXES)
# Where the answer of a row is, the first that is there: in rows for TRL, slime and verl.
ANSWERS = (ANSWER, "solution", "ground_truth", "label", "reward_model.ground_truth")
MAX_SHOWN = 6  # names of columns

Read = Callable[[SourceFile], Iterable[str]]


def reader_of(settings: Settings | None) -> Read:
    """What reads a file: its documents where there are no settings, else its conversations or prompts."""
    if settings is None:
        return documents
    return chat.rows if settings.prompts is None else partial(rows, keys=settings.prompts)


def place_of(settings: Settings, file: SourceFile, text: str) -> str:
    """`file:line` of a conversation or prompt, of a table its file and row."""
    if settings.prompts is None:
        return chat.place_of(file, text)
    return next(place for place, found in _placed(file, settings.prompts) if found == text)


# ---------------------------------------------------------------- rows


def rows(file: SourceFile, keys: Prompts) -> Iterator[str]:
    """What is kept of each row of a file. Raises DataError with file and line, or row, for one without a prompt."""
    return (text for _, text in _placed(file, keys))


def _placed(file: SourceFile, keys: Prompts) -> Iterator[tuple[str, str]]:
    for place, row in _values(file):
        if fault := row_fault(row, keys):
            raise DataError(f"{place}: {fault}")
        yield place, json.dumps(_kept(row, keys))


def _values(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """The values of a file with their places."""
    if suffix_of(file.path) in LINE_SUFFIXES:
        yield from ((place, row) for place, _, row in json_lines(file.path))
        return
    from runtime.data.tables import rows_of_table

    for number, text in enumerate(rows_of_table(file.path, MAX_DOCUMENT_BYTES), 1):
        yield f"{file.path}: row {number:,}", json.loads(text)


def _kept(row: Mapping[str, Any], keys: Prompts) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name != keys.prompt}
    answer = next(filter(_is_there, (_at(row, path) for path in _answers(keys))), None)
    return {"prompt": _at(row, keys.prompt), "columns": columns if answer is None else columns | {ANSWER: answer}}


def _answers(keys: Prompts) -> tuple[str, ...]:
    return ANSWERS if keys.answer is None else (keys.answer,)


def _at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path: under a name that has its dots, or in objects. None where there is none."""
    if path in row:
        return row[path]
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_there(value: object) -> bool:
    return value is not None


def row_fault(row: object, keys: Prompts) -> str:
    """Why a value is no row, or ""."""
    if not isinstance(row, dict):
        return f'expected an object with a prompt under "{keys.prompt}"'
    prompt = _at(row, keys.prompt)
    if prompt is None:
        return f'no "{keys.prompt}"{_instead(row)}'
    if keys.answer is not None and _at(row, keys.answer) is None:
        return f'no "{keys.answer}", which `answer` of `prompts` names'
    if isinstance(prompt, str):
        return "" if prompt else f'"{keys.prompt}" is empty'
    if not isinstance(prompt, list):
        return f'"{keys.prompt}" is neither a text nor a list of messages'
    if fault := messages_fault(keys.prompt, prompt) or more_fault(row):
        return fault
    if prompt[-1]["role"] == "assistant":
        return f'"{keys.prompt}" ends with what the assistant says, and a completion is its next turn: leave that out'
    return ""


def _instead(row: Mapping[str, Any]) -> str:
    """What to name where a prompt is not found."""
    names = [name for name, value in row.items() if isinstance(value, str) or not messages_fault(name, value)]
    if not names:
        return ", and no other text or list of messages"
    return f'; there are {", ".join(names[:MAX_SHOWN])}: write `prompts {{ prompt = "{names[0]}" }}`'


# ---------------------------------------------------------------- tokens


class PromptEncoder(RowEncoder):
    """Tokens of prompts. A text has the special tokens that the tokenizer adds to texts, as in TRL; messages go through
    the chat template, to what begins the assistant's next turn."""

    without_template = f"{chat.NO_TEMPLATE}: {chat.PUT_IT}"

    def _encoded(self, row: Mapping[str, Any]) -> Encoded:
        prompt, columns = row["prompt"], row["columns"]
        if isinstance(prompt, str):
            ids = as_inputs(self._begun(self._encode(prompt).ids))
        else:
            ids = self._encode(self._rendered(prompt, columns, prompt=True)).ids
        if not ids:
            raise DataError("the prompt has no tokens")
        return Encoded(ids, started=self._is_begun(ids))
