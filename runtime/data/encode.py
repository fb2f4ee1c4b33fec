"""Documents → train and validation shards of a folder, with what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from runtime.data import tokenizer, tokenizer_files
from runtime.data.chat import Settings, rows
from runtime.data.errors import DataError
from runtime.data.files import open_regular, write_synced
from runtime.data.given import Given
from runtime.data.readers import SourceFile, documents
from runtime.data.row_shards import RowReader, RowWriter
from runtime.data.shards import Reader, Writer
from runtime.data.split import Split, rank
from runtime.data.store import Meta
from runtime.data.tokenizer_files import TOKENIZER
from runtime.data.words import Encoder

MAX_TRAINING_BYTES = 1 << 30  # of text a BPE is trained on; more changes no merge worth having
BATCH_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]
Document = tuple[SourceFile, str]
Read = Callable[[SourceFile], Iterable[str]]  # the documents of a file, or its rows


@dataclass(frozen=True)
class Tokens:
    """A tokenizer: its tokenizer.json, what meta.json says of it, and the ids of documents in their order.

    `beside`: the files beside tokenizer.json, by their names.
    """

    json: str
    facts: dict[str, Any]
    phase: str  # of the progress, while documents are asked for
    ids: Callable[[Sequence[Document]], Iterable[Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]]]
    beside: Mapping[str, str] = field(default_factory=dict)
    unaligned: Callable[[], int] = lambda: 0  # rows so far whose prompt has other tokens by itself


# ---------------------------------------------------------------- where token ids come from


def trained(files: tuple[SourceFile, ...], divided: Split, vocab: int, seed: int, progress: Progress) -> Tokens:
    """A BPE that is trained on the training documents."""
    bpe = tokenizer.train(_sample(files, divided, seed, progress), vocab)
    encoder = Encoder(bpe)
    facts = {"sha256": tokenizer.digest(bpe), "vocab": tokenizer.size(bpe), "end_of_document": tokenizer.end_id(bpe)}
    ids = lambda documents: encoder.encode([text for _, text in documents])  # noqa: E731
    return Tokens(tokenizer.to_json(bpe), facts | {"library": tokenizers.__version__}, "encode", ids)


@contextmanager
def given(path: Path, content: bytes, vocab: int, chat: Settings | None = None) -> Iterator[Tokens]:
    """A user's tokenizer. Raises DataError if it has more tokens than `vocab`, or if it is none."""
    with Given(path, content, chat) as process:
        facts = {**process.facts, "library": tokenizers.__version__}
        check_vocab(path, facts["vocab"], vocab)
        text, beside = facts.pop("json"), files_beside(path, chat)
        yield Tokens(text, facts, "encode", process.encode, beside, lambda: process.unaligned)


def files_beside(path: Path, chat: Settings | None) -> dict[str, str]:
    """The files beside a user's tokenizer.json. Of conversations the chat template is that of the run."""
    files = tokenizer_files.beside(path)
    return files if chat is None or chat.template is None else files | {tokenizer_files.TEMPLATE: chat.template}


def check_vocab(path: Path, size: int, vocab: int) -> None:
    """Raises DataError if a user's tokenizer has more tokens than the model."""
    if size > vocab:
        raise DataError(f"{path}: {size} tokens, more than the model's {vocab}")


def again(folder: Path, meta: Meta) -> Tokens:
    """The tokens of the same text in a verified folder that divides it otherwise: nothing is encoded."""
    was = Split(**meta["split"])
    is_chat = "chat" in meta
    sides = [
        _rows(folder / name) if is_chat else (ids[:-1] for ids in _documents(Reader(folder / name)))
        for name in ("train", "validation")
    ]
    with open_regular(folder / TOKENIZER) as stream:
        text = stream.read().decode("utf-8")
    ids = lambda documents: (next(sides[was.is_held(*document)]) for document in documents)  # noqa: E731
    unaligned = meta["chat"]["unaligned"] if is_chat else 0
    beside = tokenizer_files.beside(folder / TOKENIZER)
    return Tokens(text, dict(meta["tokenizer"]), "divide", ids, beside, lambda: unaligned)


def _documents(reader: Reader) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    return (reader.document(index) for index in range(reader.num_documents))


def _rows(prefix: Path) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    reader = RowReader(prefix)
    return (reader.row(index) for index in range(reader.num_rows))


def _sample(files: tuple[SourceFile, ...], divided: Split, seed: int, progress: Progress) -> Iterator[str]:
    """What the BPE learns from: the training documents, up to a bound, files in the order of their hash."""
    num_bytes = 0
    for done, file in enumerate(sorted(files, key=lambda file: rank(seed, file.name))):
        progress("tokenizer", done, len(files))
        for text in documents(file):
            if divided.is_held(file, text):
                continue
            num_bytes += len(text.encode())
            if num_bytes > MAX_TRAINING_BYTES:
                return
            yield text
    progress("tokenizer", len(files), len(files))


# ---------------------------------------------------------------- shards


class _Side:
    """One shard while it is written, and what it holds. `rows`: of conversations."""

    def __init__(self, folder: Path, name: str, vocab: int, *, rows: bool) -> None:
        self.writer = RowWriter(folder / name, vocab) if rows else Writer(folder / name, vocab)
        self.documents: dict[str, int] = {}  # of each file
        self.num_bytes = 0

    def add(self, file: SourceFile, text: str, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.writer.add(ids)
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
    divided: Split,
    tokens: Tokens,
    progress: Progress,
    chat: Settings | None = None,
) -> dict[str, Any]:
    """Writes the tokenizer and both shards; returns what meta.json says of them. `chat`: of rows, else None."""
    for name, text in {TOKENIZER: tokens.json, **tokens.beside}.items():
        write_synced(folder / name, text)
    vocab, end = tokens.facts["vocab"], tokens.facts["end_of_document"]
    train, validation = (_Side(folder, name, vocab, rows=chat is not None) for name in ("train", "validation"))
    total = max(1, sum(file.path.stat().st_size for file in files))
    done = 0
    with train.writer, validation.writer:
        for batch in _batches(files, documents if chat is None else rows):
            for (file, text), ids in zip(batch, tokens.ids(batch), strict=True):
                side = validation if divided.is_held(file, text) else train
                found = np.asarray(ids, np.int64)
                side.add(file, text, np.append(found, end) if chat is None else found)
                done += len(text)
            progress(tokens.phase, min(done, total - 1), total)
    progress(tokens.phase, total, total)
    facts = {} if chat is None else {"chat": {"settings": chat.digest, "unaligned": tokens.unaligned()}}
    reader_of: type[Reader | RowReader] = Reader if chat is None else RowReader
    return facts | {
        "tokenizer": tokens.facts,
        "splits": {"train": train.facts(), "validation": validation.facts()},
        "held_out": list(_held_out(files, train, validation)),
        "unigram_nats": unigram_nats(reader_of(folder / "train"), reader_of(folder / "validation"), vocab),
        "unigram_smoothing": "add one to the count of every token",
    }


def _held_out(files: tuple[SourceFile, ...], train: _Side, validation: _Side) -> Iterator[str]:
    """The names of the files that are held out, and of others how much of them is."""
    for file in files:
        if held := validation.documents.get(file.name, 0):
            trained_on = train.documents.get(file.name, 0)
            yield f"{file.name} ({held} of {held + trained_on} documents)" if trained_on else file.name


def _batches(files: Iterable[SourceFile], read: Read) -> Iterator[list[Document]]:
    """Documents or rows, about BATCH_BYTES at a time: enough to keep every core encoding."""
    batch: list[Document] = []
    held = 0
    for file in files:
        for text in read(file):
            batch.append((file, text))
            held += len(text)
            if held >= BATCH_BYTES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def unigram_nats(train: Reader | RowReader, validation: Reader | RowReader, vocab: int) -> float | None:
    """Cross-entropy, nats a token, of the validation tokens under the training frequencies: what knowing only how
    often each token occurs achieves. p_i = (count_i + 1) / (training tokens + vocab). Of rows, only tokens count that
    the loss is on. None without validation tokens.
    """
    train_V, validation_V = (_counts(reader, vocab) for reader in (train, validation))
    num_train, num_validation = int(train_V.sum()), int(validation_V.sum())
    if num_validation == 0:
        return None
    log_p_V = np.log(train_V + 1.0) - math.log(num_train + vocab)
    return math.fsum((-validation_V * log_p_V).tolist()) / num_validation


def _counts(reader: Reader | RowReader, vocab: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    chunks = (chunk[chunk >= 0] for chunk in reader.chunks())
    return sum((np.bincount(chunk, minlength=vocab) for chunk in chunks), np.zeros(vocab, np.int64))
