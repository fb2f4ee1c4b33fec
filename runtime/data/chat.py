"""Conversations for supervised fine-tuning: rows of `.jsonl` files, and their tokens with a loss mask.

A row is an object as TRL reads it: `messages`, or `prompt` and `completion`, which are texts or lists of messages; and
`tools`. A message has a `role`, and what its template reads: `content`, `tool_calls`.

The loss is on every token that holds a character of the assistant's text: of what the chat template marks in
`messages`, and of the text from the completion on in other rows. `transformers` and TRL look up the first and the last
character of a span, or the number of the prompt's tokens. That is the same except where they fail: spans that are
empty, begin or end without a token, or end within a character; prompts whose tokens change in front of a completion.

A token without loss is stored as its complement ~id, which is below 0. It is not counted as a target; as an input it is
read as ~(~id) = id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from runtime.contract import ChatRecipe, PromptsRecipe
from runtime.data import tokenizer, tokenizer_files
from runtime.data.files import DataError
from runtime.data.readers import LINE_SUFFIXES, SourceFile, json_lines

if TYPE_CHECKING:
    from runtime.data.chat_template import Template

FORMAT = 2  # version of the encoding of rows
SUFFIXES = LINE_SUFFIXES
MAX_TEMPLATE_BYTES = 1 << 20
UNMARKED = "the chat template does not mark what the assistant says, so a row of `messages` has no loss"
MARK_IT = "put {% generation %} … {% endgeneration %} around the assistant's content and its end token"
NO_TEMPLATE = "there is no chat template"
PUT_IT = f"put {tokenizer_files.TEMPLATE} beside the tokenizer.json"
NAME_IT = f"write `template`, or {PUT_IT}"


# ---------------------------------------------------------------- settings from the tokenizer's folder


@dataclass(frozen=True)
class Settings:
    """The chat template of a run, its path, and the special tokens by name. `prompts`: how to read prompts from rows
    (runtime/data/prompts.py); None if rows are conversations."""

    template: str | None
    path: str | None
    tokens: Mapping[str, str]
    prompts: PromptsRecipe | None = None

    @property
    def digest(self) -> str:
        """sha256 of the settings that determine the tokens of rows."""
        parts = [self.template, dict(self.tokens), *([asdict(self.prompts)] if self.prompts else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_settings(data: ChatRecipe | PromptsRecipe, tokenizer_path: Path, folder: Path) -> Settings:
    """Read the template that a spec in `folder` names, or else that of the tokenizer's folder, and the special tokens.

    Raises DataError if a file cannot be used.
    """
    prompts = data if isinstance(data, PromptsRecipe) else None
    named = data.template if isinstance(data, ChatRecipe) else None
    config_path = tokenizer_path.with_name(tokenizer_files.CONFIG)
    tokens = tokenizer_files.special_tokens(tokenizer_path)
    template_path = tokenizer_path.with_name(tokenizer_files.TEMPLATE)
    if named is not None or template_path.is_file():
        path = folder / named if named is not None else template_path
        return Settings(tokenizer_files.read_text(path, MAX_TEMPLATE_BYTES), str(path), tokens, prompts)
    template = tokenizer_files.config(tokenizer_path).get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise DataError(f'{config_path}: "chat_template" is no text')
    return Settings(template, str(config_path) if template else None, tokens, prompts)


# ---------------------------------------------------------------- rows


def rows(file: SourceFile) -> Iterator[str]:
    """Yield the rows of a file, each as its line. Raises DataError with file and line for an invalid row."""
    for place, line, row in json_lines(file.path):
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError(f"{place}: not UTF-8") from None
        if fault := row_fault(row):
            raise DataError(f"{place}: {fault}")
        yield text


def place_of(file: SourceFile, text: str) -> str:
    """Return `file:line` of a row."""
    content = text.encode()
    return next(place for place, line, _ in json_lines(file.path) if line.endswith(content))


def row_fault(row: object) -> str:
    """Return why a value is no row, or ""."""
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
    return fault or template_arguments_fault(row)


def messages_fault(name: str, value: object) -> str:
    """Return why the value under a name is no list of messages, or ""."""
    if not isinstance(value, list) or not value:
        return f'"{name}" is not a list of messages'
    if all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value):
        return ""
    return f'a message of "{name}" is no object with a string under "role"'


def template_arguments_fault(row: Mapping[str, Any]) -> str:
    """Return why a row's `chat_template_kwargs` or `tools` cannot be passed to a template, or ""."""
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        return '"chat_template_kwargs" is not an object'
    try:
        tools = _tools(row.get("tools"))
    except (ValueError, RecursionError):
        return '"tools" is a text that is not JSON'
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return ""
    return '"tools" is not a list of objects'


def _tools(value: object) -> Any:
    """Return the tools of a row, which may be JSON in a string."""
    return (json.loads(value) if isinstance(value, str) else value) or None


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class EncodedRow:
    """The tokens of a row, ~id for tokens without loss.

    `aligned`: the tokens before the loss equal those of the prompt alone. `started`: the row starts with the tokens
    that the tokenizer puts before texts.
    """

    ids: list[int]
    aligned: bool = True
    started: bool = True


class RowEncoder:
    """Encodes rows. Raises DataError if the template of the settings is invalid."""

    without_template = f"{NO_TEMPLATE}: {NAME_IT}"

    def __init__(self, bpe: Tokenizer, settings: Mapping[str, Any]) -> None:
        self._bpe, self._path = bpe, settings["path"]
        from runtime.data.chat_template import Template  # imports jinja2, which only the encoding process needs

        tokenizer.parse_special(bpe)  # a template writes special tokens as text
        self._tokens: Mapping[str, str] = settings["tokens"]
        text: str | None = settings["template"]
        self._template = None if text is None else Template(text, self._tokens, self._path)
        end: str | None = self._tokens.get("eos_token") or bpe.id_to_token(tokenizer.end_id(bpe))
        assert end is not None, "an id of the vocabulary"
        self._end, self._end_id = end, tokenizer.end_id(bpe, end)
        self._start = tokenizer.prefix_ids(bpe)
        bpe.post_processor = None  # it would trim spaces from the offsets, and add tokens that are not in the text

    def encode(self, texts: Sequence[str]) -> list[EncodedRow]:
        """Return the tokens of each row."""
        return [self._replace_empty_by_end(self._encode_row(json.loads(text))) for text in texts]

    def _replace_empty_by_end(self, row: EncodedRow) -> EncodedRow:
        """Return a row, or the end token without loss if the row is empty, so that it is counted and left out."""
        return row if row.ids else replace(row, ids=[~self._end_id])

    def _encode_row(self, row: Mapping[str, Any]) -> EncodedRow:
        if "messages" in row:
            return self._encode_conversation(row)
        if isinstance(row["prompt"], str):
            return self._encode_completion_text(row["prompt"], row["completion"])
        return self._encode_completion_messages(row)

    def _encode_completion_text(self, prompt: str, completion: str) -> EncodedRow:
        """Encode two texts and an end token. The loss is on the completion."""
        completion += "" if completion.endswith(self._end) else self._end
        encoding = self._encode(prompt + completion)
        ids = _mask_loss(encoding, [(len(prompt), len(prompt + completion))])
        return EncodedRow(self._prepend_start(ids), _is_aligned(ids, self._encode(prompt).ids))

    def _encode_completion_messages(self, row: Mapping[str, Any]) -> EncodedRow:
        """Encode a prompt and a completion that are messages. The loss is on everything from the completion on."""
        messages = [*row["prompt"], *row["completion"]]
        prompt, text = self._render(row["prompt"], row, prompt=True), self._render(messages, row, prompt=False)
        first = len(prompt) if text.startswith(prompt) else self._first_of_answer(row, text)
        encoding = self._encode(text)
        ids = _mask_loss(encoding, [(first, len(text))])
        return EncodedRow(ids, _is_aligned(ids, self._encode(prompt).ids), self._is_begun(encoding.ids))

    def _first_of_answer(self, row: Mapping[str, Any], text: str) -> int:
        """Return the start of the completion in a conversation's text, for a template that renders the prompt
        differently when a completion follows: it drops earlier reasoning, or the `<think>` that ends the prompt. The
        start is where the text changes when the completion is replaced."""
        from runtime.data.chat_template import replace_text_of, unused_character

        answer, *following = row["completion"]
        replaced = [*row["prompt"], replace_text_of(answer, unused_character(text)), *following]
        pairs = enumerate(zip(text, self._render(replaced, row, prompt=False), strict=False))
        return next((place for place, (character, other_character) in pairs if character != other_character), len(text))

    def _encode_conversation(self, row: Mapping[str, Any]) -> EncodedRow:
        """Encode messages. The loss is on tokens with a character that the template marks."""
        text, spans = self._given_template.render_marked(row["messages"], names_of(row))
        if not self._given_template.marks_assistant:
            raise DataError(f"{self._path}: {UNMARKED}: {MARK_IT}")
        encoding = self._encode(text)
        return EncodedRow(_mask_loss(encoding, spans), started=self._is_begun(encoding.ids))

    @property
    def _given_template(self) -> Template:
        if self._template is None:
            raise DataError(self.without_template)
        return self._template

    def _render(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], *, prompt: bool) -> str:
        return self._given_template.render(messages, names_of(row), prompt=prompt)

    def _encode(self, text: str) -> Encoding:
        try:
            return self._bpe.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # a str that UTF-8 cannot encode
            raise DataError("the text holds half of a surrogate pair, which no UTF-8 text has") from None

    def _prepend_start(self, ids: list[int]) -> list[int]:
        """Prepend the tokens that the tokenizer puts before texts, unless `ids` starts with them."""
        return ids if self._is_begun(ids) else [*(~i for i in self._start), *ids]

    def _is_begun(self, ids: Sequence[int]) -> bool:
        return as_inputs(ids[: len(self._start)]) == self._start


def names_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a row passes to its template besides messages."""
    return {"tools": _tools(row.get("tools")), **(row.get("chat_template_kwargs") or {})}


def _mask_loss(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return ids for tokens with a character in a span, and ~id for all others.

    A token without a character, which a normalizer may insert, counts as having the next character.
    """
    ids = np.array(encoding.ids, np.int64)
    first, end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    end = np.maximum(end, first + 1)
    loss = np.zeros(len(ids), bool)
    for begin, last in spans:
        loss |= (first < last) & (end > begin)
    return list(np.where(loss, ids, ~ids).tolist())


def as_inputs(ids: Sequence[int]) -> list[int]:
    return [i if i >= 0 else ~i for i in ids]


def _is_aligned(ids: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether the tokens before the loss equal those of the prompt alone."""
    in_front = next((place for place, i in enumerate(ids) if i >= 0), len(ids))
    return as_inputs(ids[:in_front]) == list(prompt)
