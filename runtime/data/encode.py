"""Encodes documents into the train and validation shards of a folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from runtime.data import tokenizer, tokenizer_files
from runtime.data.chat import Settings
from runtime.data.document_encoder import DocumentEncoder
from runtime.data.files import DataError, open_regular, write_and_sync
from runtime.data.given import GivenTokenizer
from runtime.data.pieces import Journal, compute_with_journal
from runtime.data.prompts import PromptWriter, reader_of
from runtime.data.readers import Batch, SourceFile, batches, documents
from runtime.data.shards import Notices, RowReader, RowWriter, ShardReader, ShardWriter
from runtime.data.store import Meta
from runtime.data.tokenizer_files import TOKENIZER

# --- Splitting documents into training and validation
#
# A hash decides the side of a document: of (seed, name of the file) for a file that is one document, of (seed, text)
# for a line of a `.jsonl`. So a document stays on its side when other documents are added or removed, and lines of
# equal text are on the same side, in any file.

RANKS = 1 << 64


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Documents with a rank below `limit` are held out; a limit of 0 holds out none."""

    seed: int
    limit: int

    def is_held(self, file: SourceFile, text: str) -> bool:
        """Whether a document is held out for validation."""
        return self.limit > 0 and rank(self.seed, file.name if file.is_one_document else text) < self.limit


def split(
    files: Iterable[SourceFile],
    fraction: float,
    seed: int,
    read: Callable[[SourceFile], Iterable[str]] = documents,
) -> TextSplit:
    """Return a split that holds out about `fraction` of the documents, none if it is 0. `read`: reads a file.

    Both sides get at least one document: if a side is empty, the limit is moved to the nearest rank. Stops reading once
    neither side is empty. Raises DataError for a fraction outside [0, 1), or if there are fewer than two documents.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"validation = {fraction!r}: expected a share of the documents, from 0 to below 1")
    if fraction == 0:
        return TextSplit(0, 0)  # independent of the seed
    limit = max(1, int(fraction * RANKS))
    lowest, highest, file = RANKS, -1, None
    for file in files:
        for text in read(file):
            document_rank = rank(seed, file.name if file.is_one_document else text)
            lowest, highest = min(lowest, document_rank), max(highest, document_rank)
            if lowest < limit <= highest:
                return TextSplit(seed, limit)
    if lowest >= highest:
        raise DataError(
            f"{file.path if file else 'data'}: a single document cannot be divided: give more files, write its parts "
            "as lines of a .jsonl, or leave `validation` out"
        )
    return TextSplit(seed, highest if highest < limit else lowest + 1)


def rank(seed: int, word: str) -> int:
    """Return a hash of (seed, word), uniform in [0, 2⁶⁴)."""
    text = f"{seed}\0{word}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --- Encoding

MAX_TRAINING_BYTES = 1 << 30  # of text to train a BPE on; more text makes no useful difference
Progress = Callable[[str, int, int], None]
Ids = npt.NDArray[np.int64]
HEAD = 1 + len(fields(Notices))  # numbers before the sizes of a batch in a journal
Piece = tuple[list[Ids], Notices]  # ids of each document of a batch, and notices about its rows


@dataclass(frozen=True)
class Tokens:
    """A tokenizer: its tokenizer.json, its entry in meta.json, and a function that encodes documents in order.

    `encode_batches` yields batches of documents with the ids of each document, and notices about rows. `side_files`:
    those next to tokenizer.json, by name.
    """

    json: str
    facts: dict[str, Any]
    phase: str  # name of the progress while documents are encoded
    encode_batches: Callable[[Iterable[Batch]], Iterable[tuple[Batch, tuple[Iterable[Ids], Notices]]]]
    side_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodingWork:
    """Settings of encoding: number of processes, the journal of encoded batches, and the folder of the shards."""

    jobs: int
    journal: Journal
    folder: Path


# ---------------------------------------------------------------- sources of token ids
@contextmanager
def open_trained_tokenizer(
    files: tuple[SourceFile, ...],
    text_split: TextSplit,
    vocab: int,
    seed: int,
    progress: Progress,
    work: EncodingWork,
    special: Sequence[str] = (),
) -> Iterator[Tokens]:
    """Train a BPE on the training documents. `special`: tokens that it gets besides the end of a document."""
    text = train_tokenizer(files, text_split, vocab, seed, progress, work.journal, special)
    bpe = tokenizer.parse(text.encode())
    facts = {"sha256": tokenizer.digest(bpe), "vocab": tokenizer.size(bpe), "end_of_document": tokenizer.end_id(bpe)}
    facts["library"] = tokenizers.__version__
    if work.jobs == 1:
        encoder = DocumentEncoder(bpe)
        encode = lambda batch: (encoder.encode([text for _, text in batch]), Notices())  # noqa: E731
        yield Tokens(
            text, facts, "encode", lambda batches: _encode_batches(batches, [encode], work.journal, lambda: None)
        )
    else:
        path = work.folder / TOKENIZER  # no file: so no neighbours name the end token
        with _processes(path, text.encode(), None, work) as (_, encode_batches):
            yield Tokens(text, facts, "encode", encode_batches)


def train_tokenizer(
    files: tuple[SourceFile, ...],
    text_split: TextSplit,
    vocab: int,
    seed: int,
    progress: Progress,
    journal: Journal,
    special: Sequence[str] = (),
) -> str:
    """Train a BPE on the training documents and return its tokenizer.json: the first result of the journal."""
    if (saved := journal.next()) is not None:
        return saved.decode()
    text = tokenizer.to_json(tokenizer.train(_sample(files, text_split, seed, progress), vocab, special))
    journal.add(text.encode())
    return text


@contextmanager
def open_tokenizer(
    path: Path, content: bytes, vocab: int, work: EncodingWork, chat: Settings | None = None
) -> Iterator[Tokens]:
    """Open a user's tokenizer. Raises DataError if it is invalid or has more tokens than `vocab`."""
    with _processes(path, content, chat, work) as (process, encode_batches):
        facts = {**process.facts, "library": tokenizers.__version__}
        check_vocab(path, facts["vocab"], vocab)
        text, side_files = facts.pop("json"), side_files_of(path, chat)
        yield Tokens(text, facts, "encode", encode_batches, side_files)


@contextmanager
def _processes(
    path: Path, content: bytes, chat: Settings | None, work: EncodingWork
) -> Iterator[tuple[GivenTokenizer, Callable[[Iterable[Batch]], Iterator[tuple[Batch, Piece]]]]]:
    """Start processes of one tokenizer. Yield the first, and a function that encodes batches in all of them."""
    with ExitStack() as stack:
        threads = None if work.jobs == 1 else 1
        processes = [stack.enter_context(GivenTokenizer(path, content, chat, threads)) for _ in range(work.jobs)]

        def stop() -> None:
            for process in processes:
                process.stop()

        workers = [partial(_ask, process) for process in processes]
        yield processes[0], lambda batches: _encode_batches(batches, workers, work.journal, stop)


def _ask(process: GivenTokenizer, batch: Batch) -> Piece:
    process.notices = Notices()
    return process.encode(batch), process.notices


def _encode_batches(
    batches: Iterable[Batch], workers: Sequence[Callable[[Batch], Piece]], journal: Journal, stop: Callable[[], None]
) -> Iterator[tuple[Batch, Piece]]:
    """Yield batches with their ids: from the journal as far as it has them, then encoded and added to it."""
    for batch, content in compute_with_journal(
        batches, [partial(_piece_bytes, worker) for worker in workers], journal, stop
    ):
        yield batch, _read_piece(content)


def _piece_bytes(worker: Callable[[Batch], Piece], batch: Batch) -> bytes:
    ids, notices = worker(batch)
    head = np.array([len(ids), *astuple(notices), *map(len, ids)], "<i4")
    return head.tobytes() + np.concatenate([np.zeros(0, np.int64), *ids]).astype("<i4").tobytes()


def _read_piece(content: bytes) -> Piece:
    numbers = np.frombuffer(content, "<i4").astype(np.int64)
    count, *notices = numbers[:HEAD].tolist()
    return np.split(numbers[HEAD + count :], np.cumsum(numbers[HEAD : HEAD + count])[:-1]), Notices(*notices)


def side_files_of(path: Path, chat: Settings | None) -> dict[str, str]:
    """Return the files next to a user's tokenizer.json. For rows the chat template is that of the run."""
    files = tokenizer_files.read_side_files(path)
    return files if chat is None or chat.template is None else files | {tokenizer_files.TEMPLATE: chat.template}


def check_vocab(path: Path, size: int, vocab: int) -> None:
    """Raise DataError if a user's tokenizer has more tokens than the model."""
    if size > vocab:
        raise DataError(f"{path}: {size} tokens, more than the model's {vocab}")


def resplit_tokens(folder: Path, meta: Meta) -> Tokens:
    """Return the tokens of a verified folder with the same text but another split: nothing is encoded."""
    old_split = TextSplit(**meta["split"])
    is_chat, ends = "chat" in meta, "prompts" not in meta  # a prompt has no end token
    sides = [
        _rows(folder / name)
        if is_chat
        else (ids[:-1] if ends else ids for ids in _documents(ShardReader(folder / name)))
        for name in ("train", "validation")
    ]
    with open_regular(folder / TOKENIZER) as stream:
        text = stream.read().decode("utf-8")
    notices = [Notices.of(meta.get("chat") or meta.get("prompts") or {})]  # all notices come with the first batch

    def encode_batches(batches: Iterable[Batch]) -> Iterator[tuple[Batch, tuple[Iterator[Ids], Notices]]]:
        for batch in batches:
            ids = (next(sides[old_split.is_held(*document)]) for document in batch)
            yield batch, (ids, notices.pop() if notices else Notices())

    return Tokens(
        text, dict(meta["tokenizer"]), "divide", encode_batches, tokenizer_files.read_side_files(folder / TOKENIZER)
    )


def _documents(reader: ShardReader) -> Iterator[Ids]:
    return (reader.document(index) for index in range(reader.num_documents))


def _rows(prefix: Path) -> Iterator[Ids]:
    reader = RowReader(prefix)
    return (reader.row(index) for index in range(reader.num_rows))


def _sample(files: tuple[SourceFile, ...], text_split: TextSplit, seed: int, progress: Progress) -> Iterator[str]:
    """Yield the texts that the BPE is trained on: training documents up to a limit, files in the order of a hash."""
    num_bytes = 0
    for number, file in enumerate(sorted(files, key=lambda file: rank(seed, file.name))):
        progress("tokenizer", number, len(files))
        for text in documents(file):
            if text_split.is_held(file, text):
                continue
            num_bytes += len(text.encode())
            if num_bytes > MAX_TRAINING_BYTES:
                return
            yield text
    progress("tokenizer", len(files), len(files))


# ---------------------------------------------------------------- shards
class _Side:
    """One shard that is being written, with statistics. `end`: the token appended to a document."""

    def __init__(self, folder: Path, name: str, vocab: int, end: int, chat: Settings | None) -> None:
        self._end = end
        kind = ShardWriter if chat is None else RowWriter if chat.prompts is None else PromptWriter
        self.writer: ShardWriter | RowWriter | PromptWriter = kind(folder / name, vocab)
        self.documents: dict[str, int] = {}  # by file
        self.num_bytes = 0

    def add(self, file: SourceFile, text: str, ids: Ids) -> None:
        if isinstance(self.writer, PromptWriter):
            self.writer.add(ids, text)
        else:
            self.writer.add(ids if isinstance(self.writer, RowWriter) else np.append(ids, self._end))
        self.documents[file.name] = self.documents.get(file.name, 0) + 1
        self.num_bytes += len(text.encode())

    def facts(self) -> dict[str, int]:
        return {
            "files": len(self.documents),
            "documents": sum(self.documents.values()),
            "bytes": self.num_bytes,
            "tokens": sum(self.writer.sizes),
        }


def write_shards(
    folder: Path,
    files: tuple[SourceFile, ...],
    text_split: TextSplit,
    tokens: Tokens,
    progress: Progress,
    chat: Settings | None = None,
) -> dict[str, Any]:
    """Write the tokenizer and both shards. Return their entries for meta.json. `chat`: None unless rows are
    conversations or prompts."""
    for name, text in {TOKENIZER: tokens.json, **tokens.side_files}.items():
        write_and_sync(folder / name, text)
    vocab, end = tokens.facts["vocab"], tokens.facts["end_of_document"]
    train, validation = (_Side(folder, name, vocab, end, chat) for name in ("train", "validation"))
    total = max(1, sum(file.path.stat().st_size for file in files))
    num_read, notices = 0, Notices()
    with train.writer, validation.writer:
        for batch, (batch_ids, batch_notices) in tokens.encode_batches(batches(files, reader_of(chat))):
            notices += batch_notices
            for (file, text), ids in zip(batch, batch_ids, strict=True):
                side = validation if text_split.is_held(file, text) else train
                side.add(file, text, ids)
                num_read += len(text)
            progress(tokens.phase, min(num_read, total - 1), total)
    progress(tokens.phase, total, total)
    return _facts_of_rows(files, train, validation, chat, notices) | {
        "tokenizer": tokens.facts,
        "splits": {"train": train.facts(), "validation": validation.facts()},
        "held_out": list(_held_out(files, train, validation)),
        "unigram_nats": _unigram_nats(folder, vocab, chat),
        "unigram_smoothing": "add one to the count of every token",
    }


def _facts_of_rows(
    files: Sequence[SourceFile], train: _Side, validation: _Side, chat: Settings | None, notices: Notices
) -> dict[str, Any]:
    """Return the entries for meta.json about conversations or prompts. Raises DataError if there is no prompt."""
    if chat is None:
        return {}
    if chat.prompts is None:
        return {"chat": {"settings": chat.digest, **asdict(notices)}}
    if not train.documents:
        raise DataError(f"{files[0].path}: no prompts: a prompt is a line of .jsonl, or a row of .parquet or .arrow")
    sides = {"train": train.writer, "validation": validation.writer}
    unanswered = {name: writer.unanswered for name, writer in sides.items() if isinstance(writer, PromptWriter)}
    return {"prompts": {"settings": chat.digest, "unanswered": unanswered, **asdict(notices)}}


def _held_out(files: tuple[SourceFile, ...], train: _Side, validation: _Side) -> Iterator[str]:
    """Yield the names of files that are held out, with the share if only some of their documents are."""
    for file in files:
        if num_held := validation.documents.get(file.name, 0):
            trained_on = train.documents.get(file.name, 0)
            yield f"{file.name} ({num_held} of {num_held + trained_on} documents)" if trained_on else file.name


def _unigram_nats(folder: Path, vocab: int, chat: Settings | None) -> float | None:
    """Return `unigram_nats` of the shards in a folder; None for prompts, which have no loss."""
    if chat is not None and chat.prompts is not None:
        return None
    kind: type[ShardReader | RowReader] = ShardReader if chat is None else RowReader
    return unigram_nats(kind(folder / "train"), kind(folder / "validation"), vocab)


def unigram_nats(train: ShardReader | RowReader, validation: ShardReader | RowReader, vocab: int) -> float | None:
    """Return the cross-entropy of the validation tokens under the training frequencies, in nats per token: the loss of
    a model that knows only how often each token occurs. p_i = (count_i + 1) / (training tokens + vocab). In rows, only
    tokens with loss count. None without validation tokens.
    """
    train_V, validation_V = (_counts(reader, vocab) for reader in (train, validation))
    num_train, num_validation = int(train_V.sum()), int(validation_V.sum())
    if num_validation == 0:
        return None
    log_p_V = np.log(train_V + 1.0) - math.log(num_train + vocab)
    return math.fsum((-validation_V * log_p_V).tolist()) / num_validation


def _counts(reader: ShardReader | RowReader, vocab: int) -> Ids:
    chunks = (chunk[chunk >= 0] for chunk in reader.chunks())
    return sum((np.bincount(chunk, minlength=vocab) for chunk in chunks), np.zeros(vocab, np.int64))
