"""`dsc data show`: a row, window or sequence of a run's prepared data as tokens, and how all rows are used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from compiler.cli.commands.common import progress
from dsl.messages.diagnostics import make_visible

if TYPE_CHECKING:
    from dsl.schema import Spec, Train
    from runtime.contract import DataRequest
    from runtime.data.samples import Fate

JSON_VERSION = 1
COLOURED, BRACKETS, ASCII = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧"), ("[[", "]]")


@dataclass(frozen=True)
class ShownToken:
    """A token of a row. `text`: U+FFFD if it is only a part of a character; None without a tokenizer."""

    id: int
    text: str | None
    loss: bool


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens that all have a loss, or all have none. `text`: decoded together, so that only characters at
    its ends may be incomplete; without a tokenizer, their ids. `used`: whether they are trained on."""

    text: str
    loss: bool
    used: bool


@dataclass(frozen=True)
class ShownRow:
    """A row of a split, or a window of its text. `used`: the number of tokens that are trained on."""

    split: str
    row: int
    rows: int
    tokens: tuple[ShownToken, ...]
    runs: tuple[TokenRun, ...]
    used: int
    fate: Fate
    facts: Mapping[str, int] | None  # counts over all rows; None for text
    unaligned: int  # rows whose prompt tokenizes differently on its own
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ShownDocument:
    """A row, a document or a part of one in a sequence. `first`: index of its first token in the sequence. Its
    positions count from 0."""

    row: int
    first: int
    tokens: tuple[ShownToken, ...]
    runs: tuple[TokenRun, ...]


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of documents that do not attend to each other. `facts`, `notes`: of all rows of the split."""

    split: str
    sequence: int
    sequences: int
    documents: tuple[ShownDocument, ...]
    padding: int
    facts: Mapping[str, int] | None
    notes: tuple[str, ...]


def show(args: argparse.Namespace, requested: ShownRow | ShownSequence) -> None:
    """Print a row or sequence."""
    if args.format == "json":
        print(json.dumps(document(requested), ensure_ascii=False, indent=2))
        return
    from compiler.tools.picture.formats import screen_of

    screen = screen_of(sys.stdout)
    marks = COLOURED if screen.colours else ASCII if screen.ascii else BRACKETS
    print("\n".join(lines(requested, marks) if isinstance(requested, ShownRow) else sequence_lines(requested, marks)))


def requested_row(args: argparse.Namespace, spec: Spec, folder: Path, out: Path) -> ShownRow | ShownSequence:
    """The requested row or sequence. Raises DataError if it does not exist."""
    from compiler.emit.data_recipe import data_request
    from runtime.data.blended import prepare_data
    from runtime.data.files import DataError
    from runtime.data.prepare import PHASES
    from runtime.data.tokenizer_files import TOKENIZER

    tell = progress("data")
    request = data_request(spec)
    folder_of_runs = args.cache / "data" if args.cache else Path("build/.data")
    cache = folder_of_runs if args.cache or folder_of_runs.is_dir() else None
    try:
        prepared = prepare_data(request, folder, out, lambda phase, done, total: tell(PHASES[phase]), cache=cache)
    finally:
        tell("")
    file = prepared.folder / TOKENIZER
    bpe = (
        Tokenizer.from_file(str(file)) if file.is_file() else None
    )  # data of token ids may have `end_id` but no tokenizer
    if args.sequence is not None and args.row is not None:
        raise DataError("--row and --sequence exclude each other")
    if args.sequence is not None:
        return _sequence(args, request, prepared.folder, spec.train, bpe)
    rows = _conversations if request.data.chat else _prompts if request.data.prompts else _windows
    num_rows, row = rows(request, prepared.folder, args.split, spec.train, _source(args.of, request))
    number = args.row or 0
    if not 0 <= number < num_rows:
        last = f", 0 to {num_rows - 1:,}" if num_rows else ""
        raise DataError(f"--row {number}: the {args.split} split has {num_rows:,} rows{last}")
    ids, about = row(number)
    unaligned = prepared.meta["chat"]["unaligned"] if request.data.chat else 0
    tokens, runs = _tokens(bpe, ids, about["used"] or len(ids))
    return ShownRow(args.split, number, num_rows, tokens, runs, unaligned=unaligned, **about)


def _source(name: str | None, request: DataRequest) -> str:
    """The source to show; "" if there is only one. Raises DataError for an unknown name."""
    from runtime.data.files import DataError

    names = [source.name for source in request.data.sources]
    if name is not None and name not in names:
        raise DataError(
            f"--of {name}: {'the sources are ' + ', '.join(names) if names else 'there is only one source'}"
        )
    return name or next(iter(names), "")


def _tokens(
    bpe: Tokenizer | None, ids: Sequence[int], used: int
) -> tuple[tuple[ShownToken, ...], tuple[TokenRun, ...]]:
    """Tokens and their runs. A negative id is ~id of a token without loss. Tokens from `used` on are not trained on."""

    def decode(part: Sequence[int]) -> str:
        plain = [i if i >= 0 else ~i for i in part]
        if bpe is None:
            return "".join(f"{i} " for i in plain)
        return str(bpe.decode(plain, skip_special_tokens=False))

    tokens = tuple(ShownToken(i if i >= 0 else ~i, None if bpe is None else decode([i]), i >= 0) for i in ids)
    parts = groupby(enumerate(ids), lambda item: (item[1] >= 0, item[0] < used))
    return tokens, tuple(TokenRun(decode([i for _, i in part]), *flags) for flags, part in parts)


def document(requested: ShownRow | ShownSequence) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    fields = {"version": JSON_VERSION} | asdict(requested)
    for part in fields.get("documents", [fields]):
        del part["runs"]
    return fields


Rows = tuple[
    int, Callable[[int], tuple[list[int], dict[str, Any]]]
]  # number of rows; row index → token ids, and fields of ShownRow


def _conversations(request: DataRequest, folder: Path, split: str, train: Train, _: str) -> Rows:
    from runtime.data.samples import ChatSurvey

    assert request.data.chat is not None
    survey = ChatSurvey(folder, split, train.sequence, request.data.chat.long, pack=request.data.chat.pack)

    def row(index: int) -> tuple[list[int], dict[str, Any]]:
        ids, fate = survey.reader.row(index).tolist(), survey.fate(index)
        used = min(len(ids), train.sequence) if fate in ("sample", "cut") else 0
        return ids, {"used": used, "fate": fate, "facts": survey.facts, "notes": tuple(survey.notes())}

    return survey.reader.num_rows, row


def _prompts(_: DataRequest, folder: Path, split: str, train: Train, __: str) -> Rows:
    from runtime.data.prompts import PromptSurvey

    assert train.grpo is not None, "rules of the spec allow prompts only with `grpo`"
    survey = PromptSurvey(folder, split, train.grpo.prompt)

    def row(number: int) -> tuple[list[int], dict[str, Any]]:
        ids, is_drawn = [~i for i in survey.reader.ids(number).tolist()], number in survey.numbers
        notes = (f"columns: {json.dumps(survey.reader.row(number)['columns'], ensure_ascii=False)}", *survey.notes())
        used, fate = (len(ids), "sample") if is_drawn else (0, "dropped")
        return ids, {"used": used, "fate": fate, "facts": survey.facts, "notes": notes}

    return survey.reader.num_prompts, row


def _num_windows(tokens: int, split: str, train: Train) -> int:
    """The number of windows that the run reads of a text of `tokens` tokens."""
    from runtime.data.order import windows_in

    longest = train.within.longest if train.within and split == "train" else None
    return windows_in(tokens, train.sequence, longest)


def _windows(request: DataRequest, folder: Path, split: str, train: Train, source: str) -> Rows:
    from runtime.data.token_files import open_split

    reader = open_split(folder, split, source)

    def row(index: int) -> tuple[list[int], dict[str, Any]]:
        first = index * train.sequence
        ids = reader.tokens(first, first + train.sequence).tolist()
        return ids, {"used": len(ids), "fate": "sample", "facts": None, "notes": ()}

    return _num_windows(reader.num_tokens, split, train), row


# ---------------------------------------------------------------- a sequence


def _sequence(
    args: argparse.Namespace, request: DataRequest, folder: Path, train: Train, bpe: Tokenizer | None
) -> ShownSequence:
    """The requested sequence. Raises DataError if it does not exist, or if documents are neither packed nor masked."""
    from runtime.data.files import DataError

    if request.data.prompts is not None:
        raise DataError(f"--sequence {args.sequence}: prompts are not packed: use --row {args.sequence}")
    if not request.data.masks_documents:
        keys = "`pack = true` in `chat`" if request.data.chat else "`documents = masked`"
        raise DataError(f"--sequence {args.sequence}: sequences do not separate documents; {keys} turns that on")
    sequences_of = _packs if request.data.chat else _open_masked_sequences
    num_sequences, parts, facts, notes = sequences_of(request, folder, args.split, train, _source(args.of, request))
    if not 0 <= args.sequence < num_sequences:
        last = f", 0 to {num_sequences - 1:,}" if num_sequences else ""
        raise DataError(f"--sequence {args.sequence}: the {args.split} split has {num_sequences:,} sequences{last}")
    documents, first = [], 0
    for row, ids in parts(args.sequence):
        documents.append(ShownDocument(row, first, *_tokens(bpe, ids, len(ids))))
        first += len(ids)
    return ShownSequence(
        args.split, args.sequence, num_sequences, tuple(documents), train.sequence - first, facts, notes
    )


Parts = Callable[[int], Iterable[tuple[int, list[int]]]]  # sequence index → (row, ids) of each document; ~id: no loss
Sequences = tuple[
    int, Parts, Mapping[str, int] | None, tuple[str, ...]
]  # number of sequences, …, facts and notes of all rows


def _packs(request: DataRequest, folder: Path, split: str, train: Train, _: str) -> Sequences:
    from runtime.data.samples import ChatSurvey

    assert request.data.chat is not None
    survey = ChatSurvey(folder, split, train.sequence, request.data.chat.long, pack=True)
    packs = survey.packs
    assert packs is not None

    def parts(index: int) -> Iterator[tuple[int, list[int]]]:
        for row in packs.rows(index).tolist():
            first, *rest = survey.reader.row(row, train.sequence).tolist()
            yield row, [min(first, ~first), *rest]  # no token predicts the first one: it has no loss

    return len(packs), parts, survey.facts, tuple(survey.notes())


def _open_masked_sequences(request: DataRequest, folder: Path, split: str, train: Train, source: str) -> Sequences:
    from runtime.data.token_files import open_split

    reader = open_split(folder, split, source)

    def parts(index: int) -> Iterator[tuple[int, list[int]]]:
        first, end = index * train.sequence, (index + 1) * train.sequence
        document = int(reader.starts.searchsorted(first, "right")) - 1
        while first < end:
            begin, until = int(reader.starts[document]), min(end, int(reader.starts[document + 1]))
            ids = reader.tokens(first, until).tolist()
            if ids:  # documents in a file of token ids may be empty
                yield document, [~ids[0], *ids[1:]] if begin == first else ids
            document, first = document + 1, until

    return _num_windows(reader.num_tokens, split, train), parts, None, ()


# ---------------------------------------------------------------- text


def sequence_lines(sequence: ShownSequence, marks: tuple[str, str]) -> Iterator[str]:
    """The documents of a sequence with `marks` around tokens with loss, each under a line with its place."""
    tokens = [token for part in sequence.documents for token in part.tokens]
    yield (
        f"{sequence.split} sequence {sequence.sequence:,} of {sequence.sequences:,}: "
        f"{len(sequence.documents):,} documents, "
        f"{len(tokens):,} tokens, {sum(token.loss for token in tokens):,} with loss, {sequence.padding:,} of padding"
    )
    for part in sequence.documents:
        yield ""
        yield f"-- row {part.row:,} from token {part.first:,} on, positions 0 to {len(part.tokens) - 1:,} --"
        yield _mark_runs(part.runs, marks)
    if sequence.notes:
        yield ""
    yield from sequence.notes


def lines(row: ShownRow, marks: tuple[str, str]) -> Iterator[str]:
    """The row with `marks` around tokens with loss, and how it and all rows are used."""
    total, loss = len(row.tokens), sum(token.loss for token in row.tokens)
    yield f"{row.split} row {row.row:,} of {row.rows:,}: {total:,} tokens, {loss:,} with loss{_fate(row)}"
    yield ""
    yield _mark_runs((run for run in row.runs if run.used), marks)
    if 0 < row.used < total:
        yield f"-- cut here: {total - row.used:,} tokens are not trained on --"
        yield _mark_runs((run for run in row.runs if not run.used), marks)
    if row.notes:
        yield ""
    yield from row.notes


def _fate(row: ShownRow) -> str:
    return {
        "sample": "",
        "cut": f", cut at {row.used:,}",
        "dropped": "; too long, left out",
        "without_loss": "; no token with loss fits the sequence, left out",
    }[row.fate]


def _mark_runs(runs: Iterable[TokenRun], marks: tuple[str, str]) -> str:
    begin, end = marks
    return "".join(f"{begin}{_printable(run.text)}{end}" if run.loss else _printable(run.text) for run in runs)


def _printable(text: str) -> str:
    return "\n".join(map(make_visible, text.split("\n")))
