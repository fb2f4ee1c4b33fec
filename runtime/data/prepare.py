"""Corpus → `<out>/<key>/`: train and validation shards, tokenizer.json and meta.json. Made once, then reused.

The key is a hash of everything the result depends on. A folder appears whole or not at all (built aside, synced,
renamed), under a lock, so ranks and runs may ask for it at the same time. `python_stdlib` with train(4096): 12 MB,
3.5M tokens in 4.3 s of one core, reuse in 0.2 s (measured).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from runtime.data import corpus, tokenizer
from runtime.data.corpus import Corpus, SourceFile, Split
from runtime.data.errors import DataError
from runtime.data.shards import Reader, Writer
from runtime.data.words import Encoder

FORMAT = 1
META = "meta.json"
MAX_TRAINING_BYTES = 1 << 30  # of text a BPE is trained on; more changes no merge worth having
MAX_META_BYTES = 256 << 20
BATCH_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """A verified folder. `meta` is its meta.json; `reused`: it was there before."""

    folder: Path
    meta: Mapping[str, Any]
    reused: bool


def prepare(
    data: Mapping[str, Any], vocab: int, seed: int, spec_folder: Path, out: Path, progress: Progress
) -> Prepared:
    """The prepared corpus of `data` = {"source": text, "tokenizer": {"train": size} or path, "validation": fraction}.

    `vocab` is the model's; the tokenizer's may be smaller. `progress(phase, done, total)` is called with the phases
    "read", "tokenizer" and "encode". Nothing is written outside `out`. Raises DataError for what the user must mend.
    """
    source, choice, fraction = _checked(data, vocab)
    found = corpus.find(source, spec_folder)
    divided = corpus.split(found.files, fraction, seed)
    progress("read", 0, 1)
    given = tokenizer.load(spec_folder / choice) if isinstance(choice, str) else None
    key = _key(found, source, choice if given is None else tokenizer.digest(given), fraction, seed)
    progress("read", 1, 1)
    if given is not None and tokenizer.size(given) > vocab:
        raise DataError(f"{spec_folder / str(choice)}: {tokenizer.size(given)} tokens, more than the model's {vocab}")
    out.mkdir(parents=True, exist_ok=True)
    folder = out / key
    with _lock(out):
        if (meta := _verified(folder)) is not None:
            return Prepared(folder, meta, reused=True)
        building = _fresh(out, key)
        try:
            bpe = given or tokenizer.train(_sample(divided.train, seed, progress), choice["train"])
            meta = {"source": source, "seed": seed, "validation_fraction": fraction, "skipped": dict(found.skipped)}
            _build(building, bpe, divided, meta, progress)
            _publish(building, folder)
        except BaseException:
            shutil.rmtree(building)
            raise
    published = _verified(folder)
    assert published is not None, f"{folder} does not verify right after it was written"
    return Prepared(folder, published, reused=False)


def _checked(data: Mapping[str, Any], vocab: int) -> tuple[str, Any, float]:
    source, choice, fraction = data["source"], data["tokenizer"], data["validation"]
    assert isinstance(source, str) and isinstance(fraction, int | float)
    if isinstance(choice, Mapping):
        assert set(choice) == {"train"} and isinstance(choice["train"], int)
        if choice["train"] > vocab:
            raise DataError(f"tokenizer = train({choice['train']}): more tokens than the model's vocab = {vocab}")
        return source, {"train": choice["train"]}, float(fraction)
    assert isinstance(choice, str)
    return source, choice, float(fraction)


def _key(found: Corpus, source: str, choice: object, fraction: float, seed: int) -> str:
    """16 hexadecimal digits over all that the folder depends on, where it lies excepted."""
    parts = [FORMAT, tokenizers.__version__, source, corpus.digest(found.files), found.skipped, choice, fraction, seed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- building


def _sample(files: tuple[SourceFile, ...], seed: int, progress: Progress) -> Iterator[str]:
    """What the BPE learns from: the training documents, up to a bound, files in the order of their hash."""
    num_bytes = 0
    for done, file in enumerate(sorted(files, key=lambda file: corpus.rank(file.name, seed))):
        progress("tokenizer", done, len(files))
        for text in corpus.documents(file):
            num_bytes += len(text.encode())
            if num_bytes > MAX_TRAINING_BYTES:
                return
            yield text
    progress("tokenizer", len(files), len(files))


def _build(folder: Path, bpe: Tokenizer, divided: Split, meta: dict[str, Any], progress: Progress) -> None:
    """Writes everything but the name: shards, tokenizer.json, and meta.json last."""
    vocab, encoder = tokenizer.size(bpe), Encoder(bpe)
    _write(folder / "tokenizer.json", tokenizer.to_json(bpe))
    total, done = len(divided.train) + len(divided.validation), 0
    splits: dict[str, dict[str, int]] = {}
    for name, files in (("train", divided.train), ("validation", divided.validation)):
        with Writer(folder / name, vocab) as writer:
            num_documents = num_bytes = 0
            for num_files, texts in _batches(files):
                for ids in encoder.encode(texts):
                    writer.add([*ids, tokenizer.end_id(bpe)])
                num_documents += len(texts)
                num_bytes += sum(len(text.encode()) for text in texts)
                progress("encode", done + num_files, total)
        done += len(files)
        splits[name] = {
            "files": len(files),
            "documents": num_documents,
            "bytes": num_bytes,
            "tokens": sum(writer.sizes),
        }
    meta |= {
        "format": FORMAT,
        "tokenizer": {
            "sha256": tokenizer.digest(bpe),
            "vocab": vocab,
            "end_of_document": tokenizer.end_id(bpe),
            "library": tokenizers.__version__,
        },
        "splits": splits,
        "held_out": [file.name for file in divided.validation],
        "unigram_nats": unigram_nats(Reader(folder / "train"), Reader(folder / "validation"), vocab),
        "unigram_smoothing": "add one to the count of every token",
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }
    _write(folder / META, _meta_text(meta))


def _batches(files: Iterable[SourceFile]) -> Iterator[tuple[int, list[str]]]:
    """(files begun so far, about BATCH_BYTES of documents): enough to keep every core encoding."""
    texts: list[str] = []
    held = number = 0
    for number, file in enumerate(files, 1):
        for text in corpus.documents(file):
            texts.append(text)
            held += len(text)
            if held >= BATCH_BYTES:
                yield number, texts
                texts, held = [], 0
    if texts:
        yield number, texts


def unigram_nats(train: Reader, validation: Reader, vocab: int) -> float | None:
    """Cross-entropy, nats a token, of the validation tokens under the training frequencies: what knowing only how
    often each token occurs achieves. p_i = (count_i + 1) / (training tokens + vocab). None without validation tokens.
    """
    if validation.num_tokens == 0:
        return None
    train_V, validation_V = (_counts(reader, vocab) for reader in (train, validation))
    log_p_V = np.log(train_V + 1.0) - math.log(train.num_tokens + vocab)
    return math.fsum((-validation_V * log_p_V).tolist()) / validation.num_tokens


def _counts(reader: Reader, vocab: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return sum((np.bincount(chunk, minlength=vocab) for chunk in reader.chunks()), np.zeros(vocab, np.int64))


# ---------------------------------------------------------------- publishing


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """One builder at a time; the kernel gives the lock back when a process dies."""
    handle = os.open(out / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fresh(out: Path, key: str) -> Path:
    """An empty folder to build in. Under the lock, so what killed builders left can go."""
    for left in out.glob(".building-*"):
        shutil.rmtree(left)
    folder = out / f".building-{key}"
    folder.mkdir()
    return folder


def _publish(building: Path, folder: Path) -> None:
    _sync_folder(building)
    if folder.is_symlink():
        raise DataError(f"{folder}: a symbolic link where prepared data belongs; remove it")
    if folder.exists():  # it did not verify
        shutil.rmtree(folder)
    building.rename(folder)
    _sync_folder(folder.parent)


def _meta_text(meta: Mapping[str, Any]) -> str:
    """meta.json, which carries the sha256 of its other values."""
    signed = {**meta, "sha256": hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()}
    return json.dumps(signed, indent=1, sort_keys=True) + "\n"


def _verified(folder: Path) -> Mapping[str, Any] | None:
    """meta.json if it and every file of the folder are as they were written, size and sha256, else None."""
    path = folder / META
    if folder.is_symlink() or path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_META_BYTES:
        return None
    try:
        text = path.read_text("utf-8")
        meta = json.loads(text)
        if text != _meta_text({name: value for name, value in meta.items() if name != "sha256"}):
            return None
        names = set(meta["files"])
        present = {entry.name for entry in folder.iterdir()}
        if present != names | {META} or any((folder / name).is_symlink() for name in names):
            return None
        intact = all(_fingerprint(folder / name) == meta["files"][name] for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return None
    return meta if intact else None


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _write(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
