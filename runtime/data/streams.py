"""The documents of a split of prepared data, as training reads them: a shard of the folder, or files of token ids in
other places; with the middle of some at their end, if the run asks for it.

What meta.json says of them: "token_files", by the name of the source ("" where there is one), for each file its digests
and which of its documents [first, end) are of a split; "places", where these files are; "infill", the arguments of
`Infilled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data import store
from runtime.data.errors import DataError
from runtime.data.files import open_regular
from runtime.data.infill import SENTINELS, Infilled, Rate, sentinels
from runtime.data.shards import Reader, Stream, Tokens
from runtime.data.tokenizer_files import TOKENIZER


class Joined(Stream):
    """Documents [first, end) of several shards, one shard after the other."""

    def __init__(self, parts: Sequence[tuple[Reader, int, int]]) -> None:
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
        readers = (Reader(Path(each["prefix"])) for each in places)
        stream = Joined([(reader, *file[split]) for reader, file in zip(readers, files, strict=True)])
    else:
        stream = Reader(folder / shard_name(split, source))
    infill = meta.get("infill", {}).get(source)
    return Infilled(stream, **infill) if infill and split == "train" else stream
