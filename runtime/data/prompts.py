"""Prompts for completions: rows of files, and their tokens.

A row is a line of a `.jsonl` file or a row of a table, as in TRL, slime and verl: a prompt, which is a text or a list
of messages, and other columns, one of which may be the answer. `tools` and `chat_template_kwargs` are passed to the
chat template, as for conversations.

A row is stored as JSON: {"prompt": the text or messages, "columns": the other columns, and the `answer`}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runtime.contract import PromptsRecipe, RunPlan
from runtime.data import chat, store, tokenizer
from runtime.data.chat import EncodedRow, RowEncoder, Settings, as_inputs, messages_fault, template_arguments_fault
from runtime.data.files import DataError
from runtime.data.order import Order
from runtime.data.readers import (
    LINE_SUFFIXES,
    MAX_DOCUMENT_BYTES,
    TABLE_SUFFIXES,
    SourceFile,
    documents,
    json_lines,
    suffix_of,
)
from runtime.data.rewards.scoring import ANSWER, Case
from runtime.data.shards import Notices, ShardReader, ShardWriter, Tokens
from runtime.data.store import META
from runtime.data.tokenizer_files import TOKENIZER, special_tokens

FORMAT = 1  # version of stored rows and their tokens
SUFFIXES = (*LINE_SUFFIXES, *TABLE_SUFFIXES)
# Columns for the answer of a row, in rows for TRL, slime and verl. The first that exists is used.
ANSWERS = (ANSWER, "solution", "ground_truth", "label", "reward_model.ground_truth")
MAX_SHOWN = 6  # names of columns
Read = Callable[[SourceFile], Iterable[str]]


def reader_of(settings: Settings | None) -> Read:
    """Return a function that reads a file: its documents without settings, else its conversations or prompts."""
    if settings is None:
        return documents
    return chat.rows if settings.prompts is None else partial(rows, keys=settings.prompts)


def place_of(settings: Settings, file: SourceFile, text: str) -> str:
    """Return `file:line` of a conversation or prompt; for a table its file and row."""
    if settings.prompts is None:
        return chat.place_of(file, text)
    return next(place for place, row in _rows_with_places(file, settings.prompts) if row == text)


# ---------------------------------------------------------------- rows
def rows(file: SourceFile, keys: PromptsRecipe) -> Iterator[str]:
    """Yield the stored JSON of each row of a file. DataError with file and line, or row, for one without a prompt."""
    return (text for _, text in _rows_with_places(file, keys))


def _rows_with_places(file: SourceFile, keys: PromptsRecipe) -> Iterator[tuple[str, str]]:
    for place, row in _values(file):
        if fault := row_fault(row, keys):
            raise DataError(f"{place}: {fault}")
        yield place, json.dumps(_kept_fields(row, keys))


def _values(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file with their places."""
    if suffix_of(file.path) in LINE_SUFFIXES:
        yield from ((place, row) for place, _, row in json_lines(file.path))
        return
    from runtime.data.tables import rows_of_table

    for number, text in enumerate(rows_of_table(file.path, MAX_DOCUMENT_BYTES), 1):
        yield f"{file.path}: row {number:,}", json.loads(text)


def _kept_fields(row: Mapping[str, Any], keys: PromptsRecipe) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name != keys.prompt}
    answer = next(filter(_is_there, (_value_at(row, path) for path in _answers(keys))), None)
    return {"prompt": _value_at(row, keys.prompt), "columns": columns if answer is None else columns | {ANSWER: answer}}


def _answers(keys: PromptsRecipe) -> tuple[str, ...]:
    return ANSWERS if keys.answer is None else (keys.answer,)


def _value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path: of a key with these dots, or in nested objects. None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_there(value: object) -> bool:
    return value is not None


def row_fault(row: object, keys: PromptsRecipe) -> str:
    """Return why a value is no row, or ""."""
    if not isinstance(row, dict):
        return f'expected an object with a prompt under "{keys.prompt}"'
    prompt = _value_at(row, keys.prompt)
    if prompt is None:
        return f'no "{keys.prompt}"{_column_hint(row)}'
    if keys.answer is not None and _value_at(row, keys.answer) is None:
        return f'no "{keys.answer}", which `answer` of `prompts` names'
    if isinstance(prompt, str):
        return "" if prompt else f'"{keys.prompt}" is empty'
    if not isinstance(prompt, list):
        return f'"{keys.prompt}" is neither a text nor a list of messages'
    if fault := messages_fault(keys.prompt, prompt) or template_arguments_fault(row):
        return fault
    if prompt[-1]["role"] == "assistant":
        return f'"{keys.prompt}" ends with a message of the assistant: remove it, since a completion takes its place'
    return ""


def _column_hint(row: Mapping[str, Any]) -> str:
    """Return a hint on which columns could be the prompt."""
    names = [name for name, value in row.items() if isinstance(value, str) or not messages_fault(name, value)]
    if not names:
        return ", and no other text or list of messages"
    return f'; there are {", ".join(names[:MAX_SHOWN])}: write `prompts {{ prompt = "{names[0]}" }}`'


# ---------------------------------------------------------------- tokens
class PromptEncoder(RowEncoder):
    """Encodes prompts. A text gets the special tokens that the tokenizer adds, as in TRL; messages are rendered by the
    chat template, up to the start of the assistant's next turn."""

    without_template = f"{chat.NO_TEMPLATE}: {chat.PUT_IT}"

    def _encode_row(self, row: Mapping[str, Any]) -> EncodedRow:
        prompt, columns = row["prompt"], row["columns"]
        if isinstance(prompt, str):
            ids = as_inputs(self._prepend_start(self._encode(prompt).ids))
        else:
            ids = self._encode(self._render(prompt, columns, prompt=True)).ids
        if not ids:
            raise DataError("the prompt has no tokens")
        return EncodedRow(ids, started=self._is_begun(ids))


# --- Prompts as token ids and rows: a shard in Megatron's format, and `<prefix>.rows` with a line of JSON per prompt

NEW_LINE = 10
BLOCK = 64 << 20  # bytes


class PromptWriter:
    """Writes a shard of prompts, as a context manager. The files must not exist; all are synced at the end."""

    def __init__(self, prefix: Path, vocab: int) -> None:
        self._writer = ShardWriter(prefix, vocab)
        self._rows = _rows_path(prefix).open("xb")
        self._unanswered, self._first_unanswered = 0, -1

    @property
    def sizes(self) -> list[int]:
        """Tokens of each prompt."""
        return self._writer.sizes

    @property
    def unanswered(self) -> dict[str, int]:
        """Number of rows without an answer, and the number of the first of them (-1 if there is none)."""
        return {"rows": self._unanswered, "first": self._first_unanswered}

    def __enter__(self) -> PromptWriter:
        self._writer.__enter__()
        return self

    def add(self, ids: Tokens, row: str) -> None:
        """Append a prompt: its tokens, and its row as JSON."""
        if json.loads(row)["columns"].get(ANSWER) is None:
            self._first_unanswered = len(self.sizes) if not self._unanswered else self._first_unanswered
            self._unanswered += 1
        self._writer.add(ids)
        self._rows.write(row.encode("ascii") + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._rows as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._writer.__exit__(kind, error, trace)


class PromptReader:
    """A memory-mapped shard of prompts. Raises DataError that names the file unless its files agree."""

    def __init__(self, prefix: Path) -> None:
        self.reader = ShardReader(prefix)
        path = _rows_path(prefix)
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: no such file of a shard")
        size = path.stat().st_size
        self._rows: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)
        firsts = range(0, size, BLOCK)
        ends = (np.flatnonzero(self._rows[first : first + BLOCK] == NEW_LINE) + first for first in firsts)
        self._begins = np.concatenate([np.zeros(1, np.int64), *(block_ends + 1 for block_ends in ends)])
        if len(self._begins) != self.num_prompts + 1 or self._begins[-1] != size:
            raise DataError(f"{path}: not {self.num_prompts} lines, one for each prompt")

    @property
    def num_prompts(self) -> int:
        return self.reader.num_documents

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt."""
        return np.diff(self.reader.starts)

    def ids(self, number: int) -> Tokens:
        """Return the tokens of a prompt."""
        return self.reader.document(number)

    def row(self, number: int) -> dict[str, Any]:
        """Return the stored row of a prompt: its "prompt", a text or messages, and "columns"."""
        row: dict[str, Any] = json.loads(self._rows[self._begins[number] : self._begins[number + 1]].tobytes())
        return row


def _rows_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".rows")


# --- The prompts of a run in the order of their draws, and completions as cases for rewards
#
# Draw i is a pure function of (seed, i): an epoch visits each prompt once, in its own order (runtime/data/order.py).

Ids = npt.NDArray[np.int64]


def open_prompts(plan: RunPlan, folder: Path) -> PromptSamples:
    """Open the prompts of a run with `train.grpo`. `folder`: its prepared data, `Loop.corpus`.

        prompts = open_prompts(plan, loop.corpus)           # on each rank; ranks share only the files
        for note in prompts.survey.notes(): say(f"data: {note}")   # once, before ranks begin
        ids = prompts.prompt(i // group)                    # of the sequence with number i of the run
        case = prompts.case(i // group, completion)         # generated ids, with or without the end
        prompts.end                                         # the id that ends a completion
        prompts.epochs(position.next)                       # how often each prompt was drawn
        prompts.survey.facts                                # of the event "rows"

    Raises DataError if no prompt is left, or if `check = exact` has no answer to compare with.
    """
    assert plan.train.grpo is not None
    grpo, meta = plan.train.grpo, json.loads((folder / META).read_text("utf-8"))
    if plan.data.prompts is None or "prompts" not in meta:
        raise DataError(f"{folder}: these are no prompts")
    unanswered = meta["prompts"]["unanswered"]["train"]
    if unanswered["rows"] and any(reward.check == "exact" for reward in grpo.rewards):
        named = ", ".join(f'"{name}"' for name in ANSWERS)
        raise DataError(
            f"{unanswered['rows']:,} of {meta['splits']['train']['documents']:,} prompts have no answer, which "
            f"`check = exact` compares with: none of {named} is there. Name where it is: `prompts {{ answer = … }}`; "
            f"`dsc data show --row {unanswered['first']}` shows the first"
        )
    return PromptSamples(folder, grpo.prompt, grpo.group, plan.train.seed, meta["tokenizer"]["end_of_document"])


class PromptSurvey:
    """The prompts of one split. `numbers`: the numbers of those with at most `longest` tokens, which are drawn."""

    def __init__(self, folder: Path, split: str, longest: int) -> None:
        self.reader, self._longest = PromptReader(folder / split), longest
        self._notices = Notices.of((store.meta_of(folder) or {}).get("prompts", {}))
        self.numbers = np.flatnonzero(self.reader.sizes <= longest)
        rows, samples = self.reader.num_prompts, len(self.numbers)
        self.facts = {"rows": rows, "samples": samples, "padding": 0, "cut": 0, "dropped": rows - samples}
        self.facts["without_loss"] = 0  # for conversations alone

    def notes(self) -> list[str]:
        """Return a note on prompts that are left out, and notes on unexpected tokens."""
        rows, dropped = (self.facts[name] for name in ("rows", "dropped"))
        longest = f"the longest has {self.reader.sizes.max(initial=0):,}"
        why = f"have more than `prompt = {self._longest}` tokens, and are left out; {longest}"
        return [f"{dropped:,} of {rows:,} prompts {why}"] * bool(dropped) + self._notices.notes()


class PromptSamples:
    """The prompts of the training split of a prepared folder that have at most `longest` tokens.

    `group`: completions per prompt. `end`: the id that ends a completion, `eos_token` of the tokenizer. Raises
    DataError if no prompt is left.
    """

    def __init__(self, folder: Path, longest: int, group: int, seed: int, end: int) -> None:
        self.group, self.end = group, end
        self.survey = PromptSurvey(folder, "train", longest)
        num = len(self.survey.numbers)
        if not num:
            raise DataError(f"no prompt is left: {'; '.join(self.survey.notes())}")
        self.order = Order(group, num * group, seed)  # of completions: an epoch has `group` of each prompt
        self._drawn = Order(1, num, seed)
        self._path = folder / TOKENIZER

    @cached_property
    def _bpe(self) -> Tokenizer:
        """The tokenizer. Only ranks that score completions need it; it must not be created in a process that forks."""
        return tokenizer.parse(tokenizer.read(self._path), special_tokens(self._path).get("eos_token"))

    # ---- prompts by number of the draw

    def number(self, index: int) -> int:
        """Return the row of the split, from 0, of draw `index`."""
        return int(self.survey.numbers[self._drawn.window(index)])

    def prompt(self, index: int) -> Ids:
        """Return the token ids of draw `index`."""
        return self.survey.reader.ids(self.number(index))

    def case(self, index: int, completion: Ids) -> Case:
        """Return the input of rewards for a completion of draw `index`: its text up to the end token, without special
        tokens.

        Messages are passed as the text of the chat template, with special tokens written out.
        """
        row = self.survey.reader.row(self.number(index))
        ends = np.flatnonzero(completion == self.end)
        text = self._bpe.decode(completion[: ends[0] if len(ends) else None].tolist(), skip_special_tokens=True)
        if isinstance(row["prompt"], str):
            return Case(row["prompt"], text, row["columns"])
        return Case(tokenizer.decode(self._bpe, self.prompt(index).tolist()), text, row["columns"], row["prompt"])

    def epochs(self, sequences: int) -> float:
        """Return how often each prompt was drawn after this number of completions."""
        return sequences / self.order.windows
