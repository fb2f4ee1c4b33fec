"""Files of token ids in Megatron's format as a source: memory-mapped in place, without text or copies.

They are read once before the first run that uses them: every id must be in the vocabulary, and the digests of the files
identify the tokens that a checkpoint was trained on. After that, size and modification time reveal changes. The last
documents are held out, as with Megatron's own `split`: a hash of each document would scatter them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.contract import DataRequest
from runtime.data import encode, store, tokenizer
from runtime.data.encode import Progress
from runtime.data.files import DataError, fingerprint, open_regular, write_and_sync
from runtime.data.given import GivenTokenizer
from runtime.data.infill import SENTINELS, InfilledStream, Rate, sentinels
from runtime.data.shards import ShardReader, Stream, Tokens
from runtime.data.store import key_of, place
from runtime.data.tokenizer_files import TOKENIZER

# --- The documents of a split of prepared data, as training reads them: a shard of the folder, or token files
# elsewhere; some of them rearranged for fill-in-the-middle, if the run asks for it
#
# Entries of meta.json: "token_files", by name of the source ("" if there is one), has for each file its digests and the
# documents [first, end) of each split; "places" has the paths of these files; "infill" the arguments of
# `InfilledStream`.


class JoinedStream(Stream):
    """Documents [first, end) of several shards, concatenated."""

    def __init__(self, parts: Sequence[tuple[ShardReader, int, int]]) -> None:
        self.data_path = parts[0][0].data_path
        self._readers = [reader for reader, _, _ in parts]
        self._begins = [int(reader.starts[first]) for reader, first, _ in parts]
        sizes = [np.diff(reader.starts[first : end + 1]) for reader, first, end in parts]
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
        ends = np.cumsum([len(shard_sizes) for shard_sizes in sizes])
        # The first token of each shard, and the end.
        self._firsts: Tokens = np.concatenate([np.zeros(1, np.int64), self.starts[ends]])
        self.num_tokens = int(self.starts[-1])

    def tokens(self, first: int, last: int) -> Tokens:
        """Return tokens [first, last) of the stream of all documents: [last - first] int64, a copy."""
        assert 0 <= first <= last <= self.num_tokens, f"[{first}, {last}) of {self.num_tokens} tokens"
        parts = [np.zeros(0, np.int64)]
        number = int(np.searchsorted(self._firsts, first, "right")) - 1
        while first < last:
            until, offset = min(last, int(self._firsts[number + 1])), self._begins[number] - int(self._firsts[number])
            parts.append(self._readers[number].tokens(first + offset, until + offset))
            number, first = number + 1, until
        return np.concatenate(parts)


def shard_name(split: str, source: str) -> str:
    """Return the name of the shard of a split, of one source of a blend if it is named."""
    return f"{source}.{split}" if source else split


def open_split(folder: Path, split: str, source: str = "") -> Stream:
    """Open the documents of a split of a prepared folder. Raises DataError that names a damaged file."""
    return _stream(folder, store.meta_of(folder) or {}, split, source)


def infill_entries(folder: Path, meta: store.Meta, fim: Rate | None) -> dict[str, Any]:
    """Return the entries of meta.json for fill-in-the-middle; empty without it. `folder`: has the tokens and the
    tokenizer; `meta`: its other entries."""
    if fim is None:
        return {}
    with open_regular(folder / TOKENIZER) as stream:
        sentinel_ids = sentinels(stream.read().decode("utf-8"))
    if sentinel_ids is None:
        raise DataError(
            f"fim = {fim.rate:g}: the tokenizer has no tokens for it, such as {', '.join(SENTINELS[1])}, or "
            f"{', '.join(SENTINELS[2])}: name another tokenizer, or leave `fim` out"
        )
    facts = {"rate": fim.rate, "seed": fim.seed, "sentinels": sentinel_ids, "end": meta["tokenizer"]["end_of_document"]}
    values = {"infill": {"": facts}}
    train = meta["splits"]["train"] | {"tokens": _stream(folder, {**meta, **values}, "train", "").num_tokens}
    return values | {"splits": {**meta["splits"], "train": train}}


def _stream(folder: Path, meta: store.Meta, split: str, source: str) -> Stream:
    stream: Stream
    if files := meta.get("token_files", {}).get(source):
        places = meta["places"][source]
        readers = (ShardReader(Path(saved["prefix"])) for saved in places)
        stream = JoinedStream([(reader, *file[split]) for reader, file in zip(readers, files, strict=True)])
    else:
        stream = ShardReader(folder / shard_name(split, source))
    infill = meta.get("infill", {}).get(source)
    return InfilledStream(stream, **infill) if infill and split == "train" else stream


# --- token files

BLOCK = 1 << 23  # tokens
THREADS = 8  # for reading and hashing blocks, which releases the GIL


@dataclass(frozen=True)
class TokenShard:
    """A pair of files. `name`: their name without suffix; `digest`: digest of the tokens, in blocks."""

    name: str
    prefix: Path
    reader: ShardReader
    index: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class TokenTask:
    """The inputs of a prepared folder that refers to token files: the counterpart of PreparationTask for text."""

    shards: tuple[TokenShard, ...]
    held_out: int  # documents
    facts: dict[str, Any]  # of the tokenizer
    text: str | None  # tokenizer.json, if there is one
    side_files: dict[str, str]
    key: str
    skipped: dict[str, int]
    fim: Rate | None = None

    @property
    def text_key(self) -> str:
        """Name of the lock of these tokens."""
        return self.key.partition("-")[0]

    def apply_filters(self, parent: Path, guard: object, say: object) -> TokenTask:
        """Return the task itself: token ids have no text to filter."""
        return self

    def check(self, meta: Any) -> None:
        """Do nothing: all ids were checked when the task was made."""

    def build(self, parent: Path, folder: Path, journal: object) -> dict[str, Any]:
        """Write the files of the tokenizer into `folder`. Return the entries of meta.json."""
        for name, text in ({TOKENIZER: self.text, **self.side_files} if self.text is not None else {}).items():
            write_and_sync(folder / name, text)
        sides, files, remaining = {"train": 0, "validation": 0}, [], self.num_documents - self.held_out
        totals = dict.fromkeys(sides, 0)
        for shard in self.shards:
            cut = min(remaining, shard.reader.num_documents)
            remaining -= cut
            split = {"train": [0, cut], "validation": [cut, shard.reader.num_documents]}
            files.append({"name": shard.name, "index": shard.index, "digest": shard.digest, **split})
            for side, (first, end) in split.items():
                sides[side] += end - first
                totals[side] += int(shard.reader.starts[end] - shard.reader.starts[first])
        return {
            "tokenizer": self.facts,
            "splits": {
                side: {"files": len(self.shards), "documents": sides[side], "bytes": 0, "tokens": totals[side]}
                for side in sides
            },
            "held_out": [f"the last {self.held_out:,} documents"] * (self.held_out > 0),
            "unigram_nats": None,
            "token_files": {"": files},
        }

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.reader.num_documents for shard in self.shards)

    @property
    def places(self) -> dict[str, Any]:
        """Paths of the files, and their modification times."""
        return {"places": {"": [place(shard.prefix) for shard in self.shards]}}


def task_of(request: DataRequest, prefixes: Sequence[Path], spec_folder: Path, progress: Progress) -> TokenTask:
    """Read and split token files. Raises DataError that names a file that cannot be used."""
    data = request.data
    if data.chat is not None:
        raise DataError(f"data source {data.source!r}: token ids are no conversations; leave `chat` out")
    facts, text, side_files = _tokenizer(request, spec_folder)
    limit, limited_by = request.vocab, "the model's vocab"
    if text is not None and facts["vocab"] < limit:
        limit, limited_by = facts["vocab"], f"the tokenizer {data.tokenizer}"
    progress("read", 0, 1)
    shards = tuple(_shards(prefixes, limit, limited_by, progress))
    num = sum(shard.reader.num_documents for shard in shards)
    num_held = max(1, round(num * data.validation)) if data.validation else 0
    if num_held and num < 2:
        raise DataError(f"{shards[0].prefix}: a single document cannot be divided: leave `validation` out")
    num_held = min(num_held, num - 1)
    named = [[shard.name, shard.index["sha256"], shard.digest] for shard in shards]
    key = key_of(["token files", named, facts["sha256"], data.validation])[:16]
    return TokenTask(shards, num_held, facts, text, side_files, key, {})


def _tokenizer(request: DataRequest, spec_folder: Path) -> tuple[dict[str, Any], str | None, dict[str, str]]:
    """Return the entry of meta.json for the tokenizer, its tokenizer.json if it is named, and the files next to it."""
    data = request.data
    if data.tokenizer is None:
        assert data.end_id is not None, "a rule of specs: without a tokenizer a spec says what ends a document"
        sha256 = hashlib.sha256(json.dumps({"end_id": data.end_id}).encode()).hexdigest()
        return {"sha256": sha256, "vocab": request.vocab, "end_of_document": data.end_id}, None, {}
    if not isinstance(data.tokenizer, str):
        raise DataError(
            f"data source {data.source!r}: a tokenizer cannot be trained on token ids, which already belong to one: "
            'write `tokenizer = "tokenizer.json"`, or instead `end_id`, the id that ends a document'
        )
    path = spec_folder / data.tokenizer
    with GivenTokenizer(path, tokenizer.read(path)) as process:
        facts = dict(process.facts)
    encode.check_vocab(path, facts["vocab"], request.vocab)
    return facts, facts.pop("json"), encode.side_files_of(path, None)


def _shards(prefixes: Sequence[Path], limit: int, whose: str, progress: Progress) -> Iterator[TokenShard]:
    readers = [ShardReader(prefix) for prefix in prefixes]
    if not sum(reader.num_tokens for reader in readers):
        raise DataError(f"{prefixes[0]}.bin: no tokens")
    total, num_read = sum(reader.num_tokens for reader in readers), 0
    with ThreadPoolExecutor(THREADS) as threads:
        for prefix, reader in zip(prefixes, readers, strict=True):
            digests = hashlib.sha256()
            firsts = range(0, reader.num_tokens, BLOCK)
            for first, digest in zip(firsts, threads.map(_TokenBlock(reader, limit, whose), firsts), strict=True):
                digests.update(digest)
                progress("ids", num_read + first, total)
            num_read += reader.num_tokens
            yield TokenShard(prefix.name, prefix, reader, fingerprint(reader.index_path), digests.hexdigest())
    progress("ids", total, total)


@dataclass(frozen=True)
class _TokenBlock:
    """Computes the digest of the block of tokens from `first` on. DataError for an id outside the vocabulary."""

    reader: ShardReader
    limit: int
    whose: str

    def __call__(self, first: int) -> bytes:
        ids = self.reader.tokens(first, min(first + BLOCK, self.reader.num_tokens))
        for index in (int(ids.argmax()), int(ids.argmin())):
            if not 0 <= ids[index] < self.limit:
                raise DataError(
                    f"{self.reader.data_path}: token {first + index:,} has the id {ids[index]:,}, and those of "
                    f"{self.whose} are 0 to {self.limit - 1:,}"
                )
        return hashlib.sha256(ids.tobytes()).digest()
