"""Files of token ids in Megatron's format as a source: read where they are, memory-mapped; no text, and no copy.

They are read once before the first run on them: every id has to be one of the vocabulary, and the digests of the files
say which tokens a checkpoint was trained on. From then on size and time of change say whether a file is still that one.
Held out are the last documents, as Megatron's own `split` has it: a hash of each document would scatter them.
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
from runtime.data.files import DataError, fingerprint, open_regular, write_synced
from runtime.data.given import GivenTokenizer
from runtime.data.infill import SENTINELS, Infilled, Rate, sentinels
from runtime.data.shards import ShardReader, Stream, Tokens
from runtime.data.store import key_of, place
from runtime.data.tokenizer_files import TOKENIZER

# --- The documents of a split of prepared data, as training reads them: a shard of the folder, or files of token ids in
# other places; with the middle of some at their end, if the run asks for it
#
# What meta.json says of them: "token_files", by the name of the source ("" where there is one), for each file its
# digests and which of its documents [first, end) are of a split; "places", where these files are; "infill", the
# arguments of `Infilled`.


class Joined(Stream):
    """Documents [first, end) of several shards, one shard after the other."""

    def __init__(self, parts: Sequence[tuple[ShardReader, int, int]]) -> None:
        self.data_path = parts[0][0].data_path
        self._readers = [reader for reader, _, _ in parts]
        self._begins = [int(reader.starts[first]) for reader, first, _ in parts]
        sizes = [np.diff(reader.starts[first : end + 1]) for reader, first, end in parts]
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
        ends = np.cumsum([len(each) for each in sizes])
        self._firsts: Tokens = np.concatenate(
            [np.zeros(1, np.int64), self.starts[ends]]
        )  # token of each shard, and the end
        self.num_tokens = int(self.starts[-1])

    def tokens(self, first: int, last: int) -> Tokens:
        """Tokens [first, last) of the stream of all documents. [last - first] int64, a copy."""
        assert 0 <= first <= last <= self.num_tokens, f"[{first}, {last}) of {self.num_tokens} tokens"
        parts = [np.zeros(0, np.int64)]
        number = int(np.searchsorted(self._firsts, first, "right")) - 1
        while first < last:
            until, offset = min(last, int(self._firsts[number + 1])), self._begins[number] - int(self._firsts[number])
            parts.append(self._readers[number].tokens(first + offset, until + offset))
            number, first = number + 1, until
        return np.concatenate(parts)


def shard_name(split: str, source: str) -> str:
    """The shard of a split, of one source of a blend if that is named."""
    return f"{source}.{split}" if source else split


def open_split(folder: Path, split: str, source: str = "") -> Stream:
    """The documents of a split of a prepared folder. Raises DataError, naming the file, for one that is damaged."""
    return _stream(folder, store.meta_of(folder) or {}, split, source)


def infilled(folder: Path, meta: store.Meta, fim: Rate | None) -> dict[str, Any]:
    """What meta.json says where a share of the documents has its middle at the end; nothing where none has. `folder`:
    with the tokens that are arranged and their tokenizer, of which `meta` says the rest."""
    if fim is None:
        return {}
    with open_regular(folder / TOKENIZER) as stream:
        found = sentinels(stream.read().decode("utf-8"))
    if found is None:
        raise DataError(
            f"fim = {fim.rate:g}: the tokenizer has no tokens for it, such as {', '.join(SENTINELS[1])}, or "
            f"{', '.join(SENTINELS[2])}: name another tokenizer, or leave `fim` out"
        )
    facts = {"rate": fim.rate, "seed": fim.seed, "sentinels": found, "end": meta["tokenizer"]["end_of_document"]}
    values = {"infill": {"": facts}}
    train = meta["splits"]["train"] | {"tokens": _stream(folder, {**meta, **values}, "train", "").num_tokens}
    return values | {"splits": {**meta["splits"], "train": train}}


def _stream(folder: Path, meta: store.Meta, split: str, source: str) -> Stream:
    stream: Stream
    if files := meta.get("token_files", {}).get(source):
        places = meta["places"][source]
        readers = (ShardReader(Path(each["prefix"])) for each in places)
        stream = Joined([(reader, *file[split]) for reader, file in zip(readers, files, strict=True)])
    else:
        stream = ShardReader(folder / shard_name(split, source))
    infill = meta.get("infill", {}).get(source)
    return Infilled(stream, **infill) if infill and split == "train" else stream


# --- token files

BLOCK = 1 << 23  # tokens
THREADS = 8  # that read and hash blocks, which needs no lock of the interpreter


@dataclass(frozen=True)
class TokenShard:
    """A pair of files. `name` is that of both without suffix; `digest` is of the tokens, in blocks."""

    name: str
    prefix: Path
    reader: ShardReader
    index: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class TokenTask:
    """A folder that names files of token ids: what `Task` is for text."""

    shards: tuple[TokenShard, ...]
    held_out: int  # documents
    facts: dict[str, Any]  # of the tokenizer
    text: str | None  # tokenizer.json, if there is one
    beside: dict[str, str]
    key: str
    skipped: dict[str, int]
    fim: Rate | None = None

    @property
    def text_key(self) -> str:
        """What a lock of these tokens is named by."""
        return self.key.partition("-")[0]

    def passed(self, where: Path, guard: object, say: object) -> TokenTask:
        """The task itself: token ids have no text to filter."""
        return self

    def check(self, meta: Any) -> None:
        """All ids were checked when the task was made."""

    def build(self, where: Path, folder: Path, journal: object) -> dict[str, Any]:
        """Write the files of the tokenizer into `folder`; what meta.json says of the tokens."""
        for name, text in ({TOKENIZER: self.text, **self.beside} if self.text is not None else {}).items():
            write_synced(folder / name, text)
        sides, files, left = {"train": 0, "validation": 0}, [], self.num_documents - self.held_out
        totals = dict.fromkeys(sides, 0)
        for shard in self.shards:
            cut = min(left, shard.reader.num_documents)
            left -= cut
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
        """Where the files are, and when they were changed last."""
        return {"places": {"": [place(shard.prefix) for shard in self.shards]}}


def task_of(request: DataRequest, prefixes: Sequence[Path], spec_folder: Path, progress: Progress) -> TokenTask:
    """Read files of token ids, and divide them. Raises DataError, naming the file, for one that cannot be used."""
    data = request.data
    if data.chat is not None:
        raise DataError(f"data source {data.source!r}: token ids are no conversations; leave `chat` out")
    facts, text, beside = _tokenizer(request, spec_folder)
    limit, whose = request.vocab, "the model's vocab"
    if text is not None and facts["vocab"] < limit:
        limit, whose = facts["vocab"], f"the tokenizer {data.tokenizer}"
    progress("read", 0, 1)
    shards = tuple(_shards(prefixes, limit, whose, progress))
    num = sum(shard.reader.num_documents for shard in shards)
    held = max(1, round(num * data.validation)) if data.validation else 0
    if held and num < 2:
        raise DataError(f"{shards[0].prefix}: a single document cannot be divided: leave `validation` out")
    held = min(held, num - 1)
    named = [[each.name, each.index["sha256"], each.digest] for each in shards]
    key = key_of(["token files", named, facts["sha256"], data.validation])[:16]
    return TokenTask(shards, held, facts, text, beside, key, {})


def _tokenizer(request: DataRequest, spec_folder: Path) -> tuple[dict[str, Any], str | None, dict[str, str]]:
    """What meta.json says of the tokenizer, its tokenizer.json if one is named, and the files beside that."""
    data = request.data
    if data.tokenizer is None:
        assert data.end_id is not None, "a rule of specs: without a tokenizer a spec says what ends a document"
        sha256 = hashlib.sha256(json.dumps({"end_id": data.end_id}).encode()).hexdigest()
        return {"sha256": sha256, "vocab": request.vocab, "end_of_document": data.end_id}, None, {}
    if not isinstance(data.tokenizer, str):
        raise DataError(
            f"data source {data.source!r}: token ids are those of some tokenizer, and none can be trained on them: "
            'write `tokenizer = "tokenizer.json"`, or `end_id`, the id that ends a document, in its place'
        )
    path = spec_folder / data.tokenizer
    with GivenTokenizer(path, tokenizer.read(path)) as process:
        facts = dict(process.facts)
    encode.check_vocab(path, facts["vocab"], request.vocab)
    return facts, facts.pop("json"), encode.files_beside(path, None)


def _shards(prefixes: Sequence[Path], limit: int, whose: str, progress: Progress) -> Iterator[TokenShard]:
    readers = [ShardReader(prefix) for prefix in prefixes]
    if not sum(reader.num_tokens for reader in readers):
        raise DataError(f"{prefixes[0]}.bin: no tokens")
    total, done = sum(reader.num_tokens for reader in readers), 0
    with ThreadPoolExecutor(THREADS) as threads:
        for prefix, reader in zip(prefixes, readers, strict=True):
            digests = hashlib.sha256()
            firsts = range(0, reader.num_tokens, BLOCK)
            for first, digest in zip(firsts, threads.map(_TokenBlock(reader, limit, whose), firsts), strict=True):
                digests.update(digest)
                progress("ids", done + first, total)
            done += reader.num_tokens
            yield TokenShard(prefix.name, prefix, reader, fingerprint(reader.index_path), digests.hexdigest())
    progress("ids", total, total)


@dataclass(frozen=True)
class _TokenBlock:
    """The digest of the block of tokens that begins at a place. DataError for an id that the vocabulary has not."""

    reader: ShardReader
    limit: int
    whose: str

    def __call__(self, first: int) -> bytes:
        ids = self.reader.tokens(first, min(first + BLOCK, self.reader.num_tokens))
        for at in (int(ids.argmax()), int(ids.argmin())):
            if not 0 <= ids[at] < self.limit:
                raise DataError(
                    f"{self.reader.data_path}: token {first + at:,} has the id {ids[at]:,}, and those of "
                    f"{self.whose} are 0 to {self.limit - 1:,}"
                )
        return hashlib.sha256(ids.tobytes()).digest()
