"""Conversations for supervised fine-tuning: rows of `.jsonl` files, and their tokens with what the loss is on.

A row is an object as TRL reads it: `messages`, or `prompt` and `completion`, which are texts or lists of messages; and
`tools`. A message has a `role`, and what its template reads: `content`, `tool_calls`. The loss is on what the assistant
says in `messages`, by the marks of the chat template, and on all of a `completion`.

A token that the loss is not on is written as its complement, ~id, which is below 0. Its target counts nowhere, and what
reads it as an input has id = ~(~id).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from runtime.contract import Chat, Prompts
from runtime.data import tokenizer, tokenizer_files
from runtime.data.errors import DataError
from runtime.data.readers import LINE_SUFFIXES, SourceFile, json_lines

FORMAT = 1  # of the tokens that rows become
SUFFIXES = LINE_SUFFIXES
MAX_TEMPLATE_BYTES = 1 << 20
UNMARKED = "the chat template does not mark what the assistant says, so a row of `messages` has no loss"
MARK_IT = "put {% generation %} … {% endgeneration %} around the assistant's content and its end token"
NO_TEMPLATE = "there is no chat template"
PUT_IT = f"put {tokenizer_files.TEMPLATE} beside the tokenizer.json"
NAME_IT = f"write `template`, or {PUT_IT}"


# ---------------------------------------------------------------- what a tokenizer's folder says


@dataclass(frozen=True)
class Settings:
    """The chat template of a run, where it is from, and the special tokens by their names. `prompts`: where these are
    in rows (runtime/data/prompts.py); None: rows are conversations."""

    template: str | None
    path: str | None
    tokens: Mapping[str, str]
    prompts: Prompts | None = None

    @property
    def digest(self) -> str:
        """sha256 of what decides the tokens of rows."""
        parts = [self.template, dict(self.tokens), *([asdict(self.prompts)] if self.prompts else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_settings(data: Chat | Prompts, tokenizer_path: Path, folder: Path) -> Settings:
    """The template that a spec in `folder` names, or that of the tokenizer's folder, and its special tokens.

    Raises DataError where a file is named or there, and cannot be used.
    """
    prompts = data if isinstance(data, Prompts) else None
    named = data.template if isinstance(data, Chat) else None
    config_path, tokens = (
        tokenizer_path.with_name(tokenizer_files.CONFIG),
        tokenizer_files.special_tokens(tokenizer_path),
    )
    beside = tokenizer_path.with_name(tokenizer_files.TEMPLATE)
    if named is not None or beside.is_file():
        path = folder / named if named is not None else beside
        return Settings(tokenizer_files.read_text(path, MAX_TEMPLATE_BYTES), str(path), tokens, prompts)
    template = tokenizer_files.config(tokenizer_path).get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise DataError(f'{config_path}: "chat_template" is no text')
    return Settings(template, str(config_path) if template else None, tokens, prompts)


# ---------------------------------------------------------------- rows


def rows(file: SourceFile) -> Iterator[str]:
    """The rows of a file, each as its line. Raises DataError with file and line for what is none."""
    for place, line, row in json_lines(file.path):
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError(f"{place}: not UTF-8") from None
        if fault := row_fault(row):
            raise DataError(f"{place}: {fault}")
        yield text


def place_of(file: SourceFile, text: str) -> str:
    """`file:line` of a row."""
    content = text.encode()
    return next(place for place, line, _ in json_lines(file.path) if line.endswith(content))


def row_fault(row: object) -> str:
    """Why a value is no row, or ""."""
    if not isinstance(row, dict):
        return 'expected an object with "messages", or with "prompt" and "completion"'
    if "messages" in row:
        fault = messages_fault("messages", row["messages"])
    elif "prompt" in row and "completion" in row:
        kinds = {isinstance(row[name], str) for name in ("prompt", "completion")}
        if kinds == {True}:
            return ""
        if len(kinds) > 1:
            return '"prompt" and "completion" are both texts, or both lists of messages'
        fault = messages_fault("prompt", row["prompt"]) or messages_fault("completion", row["completion"])
    elif "text" in row:
        return 'a row with "text" is a document, not a conversation: remove `chat` from `data`'
    else:
        return 'expected "messages", or "prompt" and "completion"'
    return fault or more_fault(row)


def messages_fault(name: str, found: object) -> str:
    """Why a value under a name is no list of messages, or ""."""
    if not isinstance(found, list) or not found:
        return f'"{name}" is not a list of messages'
    if all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in found):
        return ""
    return f'a message of "{name}" is no object with a string under "role"'


def more_fault(row: Mapping[str, Any]) -> str:
    """Why a row's `chat_template_kwargs` or `tools` cannot be given to a template, or ""."""
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        return '"chat_template_kwargs" is not an object'
    try:
        tools = _tools(row.get("tools"))
    except (ValueError, RecursionError):
        return '"tools" is a text that is not JSON'
    if tools is None or (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        return ""
    return '"tools" is not a list of objects'


def _tools(found: object) -> Any:
    """Tools of a row, which may be JSON in a text."""
    return (json.loads(found) if isinstance(found, str) else found) or None


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Encoded:
    """A row as tokens, ~id where the loss is not on one. `aligned`: its prompt has the same tokens by itself."""

    ids: list[int]
    aligned: bool = True


class RowEncoder:
    """Tokens of rows. Raises DataError where the settings have a template that is none."""

    without_template = f"{NO_TEMPLATE}: {NAME_IT}"

    def __init__(self, bpe: Tokenizer, settings: Mapping[str, Any]) -> None:
        self._bpe, self._path = bpe, settings["path"]
        from runtime.data.chat_template import Template  # with jinja2, which only the process that encodes waits for

        bpe.encode_special_tokens = False  # a template writes special tokens as text
        self._tokens: Mapping[str, str] = settings["tokens"]
        text: str | None = settings["template"]
        self._template = None if text is None else Template(text, self._tokens, self._path)
        self._end = self._tokens.get("eos_token") or bpe.id_to_token(tokenizer.end_id(bpe))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of each row."""
        return [self._encoded(json.loads(text)) for text in texts]

    def _encoded(self, row: Mapping[str, Any]) -> Encoded:
        if "messages" in row:
            return self._marked(row)
        if isinstance(row["prompt"], str):
            completion = row["completion"]
            completion += "" if completion.endswith(self._end) else self._end
            parts = (self._encode(text, special=True).ids for text in (row["prompt"], row["prompt"] + completion))
        else:
            whole = [*row["prompt"], *row["completion"]]
            texts = (self._rendered(row["prompt"], row, prompt=True), self._rendered(whole, row, prompt=False))
            parts = (self._encode(text, special=False).ids for text, _ in texts)
        prompt, ids = parts
        return Encoded([*(~i for i in ids[: len(prompt)]), *ids[len(prompt) :]], ids[: len(prompt)] == prompt)

    def _marked(self, row: Mapping[str, Any]) -> Encoded:
        """Tokens of messages. The loss is on those that hold a character that the template marks."""
        text, spans = self._rendered(row["messages"], row, prompt=False)
        assert self._template is not None
        if not self._template.marks_assistant:
            raise DataError(f"{self._path}: {UNMARKED}: {MARK_IT}")
        found = self._encode(text, special=False)
        ids = [~i for i in found.ids]
        for first, end in spans:
            begin, last = found.char_to_token(first), found.char_to_token(end - 1)
            if begin is None:
                break
            for place in range(begin, last + 1 if last else len(ids)):
                ids[place] = found.ids[place]
        return Encoded(ids)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], *, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        if self._template is None:
            raise DataError(self.without_template)
        names = row.get("chat_template_kwargs") or {}
        return self._template.render(messages, prompt=prompt, tools=_tools(row.get("tools")), **names)

    def _encode(self, text: str, *, special: bool) -> Encoding:
        try:
            return self._bpe.encode(text, add_special_tokens=special)
        except (TypeError, UnicodeEncodeError):  # of a str that has no UTF-8
            raise DataError("the text holds half of a surrogate pair, which no UTF-8 text has") from None
