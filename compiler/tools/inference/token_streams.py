"""The token streams to evaluate: ids from a file, encoded text, or the held-out text of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from compiler.tools.inference.evaluation import Ids
from compiler.tools.inference.sources import InferenceError
from dsl.schema import Spec
from runtime.data import corpus, tokenizer, tokenizer_files
from runtime.data.encode import check_vocab
from runtime.data.files import DataError
from runtime.data.given import GivenTokenizer
from runtime.data.order import PADDING
from runtime.data.readers import batches, documents
from runtime.data.samples import RowSamples
from runtime.data.token_files import open_split
from runtime.data.tokenizer import is_byte_level

VALIDATION = "validation"
NO_TARGET = -1


@dataclass(frozen=True)
class Streams:
    """Streams of token ids. `bytes`: size of the text of their targets (all tokens but the first of each)."""

    ids: tuple[Ids, ...]
    bytes: int | None = None


def require_tokenizer(path: Path | None) -> Path:
    """The path of a tokenizer.json. Raises InferenceError if it is None."""
    if path is None:
        raise InferenceError("the run's tokenizer is missing", "name a tokenizer.json: --tokenizer FILE")
    return path


def read_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """Read a tokenizer.json. Raises InferenceError if it is invalid, or has more tokens than the model."""
    try:
        parsed = tokenizer.parse(tokenizer.read(path), tokenizer_files.special_tokens(path).get("eos_token"))
    except DataError as error:
        raise InferenceError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    try:
        check_vocab(path, tokenizer.size(parsed), vocab)
    except DataError as error:
        raise InferenceError(str(error), "name the tokenizer of this model: --tokenizer FILE") from None
    return parsed


def end_ids(path: Path, bpe: Tokenizer) -> tuple[int, ...]:
    """The ids that end a text: the end-of-document token, then those in generation_config.json next to `path`.

    `bpe`: the tokenizer read from `path`.
    """
    end = tokenizer.end_id(bpe, tokenizer_files.special_tokens(path).get("eos_token"))
    return (end, *sorted(tokenizer_files.stops(path) - {end}))


def read_token_file(path: Path, vocab: int, named: Tokenizer | None) -> Streams:
    """The ids of a .npy file of integers [tokens] or [rows, tokens], each row a stream. An id below 0 is not a target:
    ~id is read as id, as in training, and ids below -vocab as padding."""
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InferenceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise InferenceError(f"{path} is not a .npy file of numbers: {error}", "write one with numpy.save") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        kind = array.dtype if isinstance(array, np.ndarray) else "several arrays"
        raise InferenceError(f"{path} holds {kind}, not integers", "token ids are integers: ids.astype('int32')")
    if array.ndim not in (1, 2):
        raise InferenceError(f"{path} has {array.ndim} dimensions", "give one row of ids, or several: [rows, tokens]")
    if array.size and int(array.max()) >= vocab:
        place = int(array.argmax())
        raise InferenceError(
            f"{path} holds the id {int(array.max()):,} at {place:,}, but the model's ids are 0 to {vocab - 1:,}",
            "the ids come from another tokenizer",
        )
    ids = np.atleast_2d(array).astype(np.int64)
    return _streams(tuple(np.where(ids < -vocab, NO_TARGET, ids)), str(path), named)


def held_out(data: Path | None, named: Tokenizer | None, spec: Spec) -> Streams:
    """The held-out text of a run. A stream is a row of conversations, a document if the run masks documents, or else
    all documents of a source joined, as the run validates. `data`: the run's prepared data."""
    if data is None:
        raise InferenceError("the data of the run is missing", "name what to measure: --text GLOB or --tokens FILE")
    if spec.data.prompts is not None:
        raise InferenceError("the run has prompts but no text", "name what to measure: --text GLOB or --tokens FILE")
    try:
        if spec.data.chat is not None:
            rows = RowSamples(data, VALIDATION, spec.train.sequence, 0, seed=0, long=spec.data.chat.long)
            padded = map(rows.tokens, range(rows.num_windows))
            ids = tuple(np.where(row == PADDING, NO_TARGET, row) for row in padded)
            return _streams(ids, str(data / VALIDATION), named)
        names = [source.name for source in spec.data.sources] or [""]
        readers = [open_split(data, VALIDATION, name) for name in names]
    except (DataError, OSError) as error:
        raise InferenceError(f"the text that the run held out cannot be read: {error}") from None
    if not any(reader.num_tokens for reader in readers):
        raise InferenceError(
            "the run has no held-out text: its spec has no `validation`", "name what to measure: --text or --tokens"
        )
    streams: list[npt.NDArray[np.int64]] = []
    for reader in readers:
        tokens = reader.tokens(0, reader.num_tokens)
        streams += np.split(tokens, reader.starts[1:-1]) if spec.data.documents == "masked" else [tokens]
    return _streams(tuple(streams), str(readers[0].data_path), named)


def tokenize_files(pattern: str, path: Path, vocab: int, progress: Callable[[str], None]) -> Streams:
    """The documents matching a glob pattern as one stream, encoded with a tokenizer.json. The end-of-document token
    comes before each and at the end, so that every token of text is a target."""
    try:
        files = corpus.find(pattern, Path.cwd()).files
        with GivenTokenizer(path, tokenizer.read(path)) as process:
            check_vocab(path, process.facts["vocab"], vocab)
            end = process.facts["end_of_document"]
            ids, num_bytes = [np.array([end])], 0
            for batch in batches(files, documents):
                progress(f"encode {batch[-1][0].name}")
                for (_, text), text_ids in zip(batch, process.encode(batch), strict=True):
                    ids += [text_ids, np.array([end])]
                    num_bytes += len(text.encode())
    except DataError as error:
        raise InferenceError(str(error)) from None
    except OSError as error:
        raise InferenceError(f"{error.filename}: {error.strerror}") from None
    progress("")
    return Streams((np.concatenate(ids).astype(np.int64),), num_bytes)


def _streams(rows: tuple[Ids, ...], name: str, named: Tokenizer | None) -> Streams:
    if not any((row[1:] >= 0).any() for row in rows):
        raise InferenceError(f"{name}: no token follows another, so there is nothing to predict")
    return Streams(rows, _bytes_of(rows, named))


def _bytes_of(rows: Sequence[Ids], named: Tokenizer | None) -> int | None:
    """The bytes of the targets of streams; None unless the tokenizer is a byte-level BPE, whose tokens are bytes."""
    if named is None or not is_byte_level(named):
        return None
    sizes = np.zeros(tokenizer.size(named) + 1, np.int64)  # the last entry is for ids below 0
    for word, index in named.get_vocab(with_added_tokens=False).items():
        sizes[index] = len(word)  # a character for each byte
    sizes[[index for index, added in named.get_added_tokens_decoder().items() if added.special]] = 0
    if max(int(row.max()) for row in rows) >= len(sizes) - 1:
        return None  # ids of the model that its tokenizer lacks
    return sum(int(sizes[np.maximum(row[1:], -1)].sum()) for row in rows)
