"""The prepared folder of a run: of one source as it is (runtime/data/prepare.py), or of several in one folder.

Each source of a blend is prepared by itself, in the tokens of one tokenizer, and divided by itself. So a cache has it
for every blend that it is in, whatever the weights. The folder of the blend is hard links to the files of all, under
the names of their sources: `web.train.bin`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.contract import DataRequest
from runtime.data import encode, prepare, store
from runtime.data.encode import Progress
from runtime.data.errors import DataError
from runtime.data.files import write_synced
from runtime.data.prepare import FORMAT, Prepared, Say, Task
from runtime.data.split import Split
from runtime.data.tokenizer_files import TOKENIZER

SHARDS = ("train.bin", "train.idx", "validation.bin", "validation.idx")


def prepare_data(
    request: DataRequest,
    spec_folder: Path,
    out: Path,
    progress: Progress,
    say: Say = lambda _: None,
    *,
    cache: Path | None = None,
    resumed: Sequence[str] = (),
) -> Prepared:
    """Return the prepared corpus of a request, of one source or several. Arguments and errors: those of `prepare`."""
    if not request.data.sources:
        return prepare.prepare(request, spec_folder, out, progress, say, cache=cache, resumed=resumed)
    asked = prepare.asked_for(request)
    out.mkdir(parents=True, exist_ok=True)
    cache = prepare.usable(cache, say)
    with store.run_lock(out, say):
        found, damaged = prepare.of_checkpoints(out, asked, resumed, cache)
        if found is not None:
            say(f"from {out}, verified; the text is not read again")
            return found
        try:
            tasks = {name: prepare.task_of(one, spec_folder, progress) for name, one in _requests(request)}
        except (DataError, OSError) as error:
            if damaged is None:
                raise
            raise DataError(f"{error}; and {damaged}, which this run was trained on, is damaged") from None
        key = prepare.key_of(["blend", [[name, task.key] for name, task in tasks.items()]])[:16]
        about = {
            "source": ", ".join(each.files for each in request.data.sources),
            "skipped": dict(sum((Counter(task.skipped) for task in tasks.values()), Counter())),
            "request": asked,
        }
        if (meta := store.verified(out / key)) is not None:
            return Prepared(out / key, store.renamed(out / key, meta, about), reused=True)
        with _aside(out) as aside:
            tokenizer = request.data.tokenizer
            if not isinstance(tokenizer, str):
                tokenizer = _trained(tasks, tokenizer.vocab, aside, progress)
            parts = {
                name: prepare.prepare(one, spec_folder, aside / name, progress, say, cache=cache)
                for name, one in _requests(request, tokenizer)
            }
            meta = store.publish(out, key, lambda at: _put_together(parts, at) | about)
    return Prepared(out / key, meta, reused=all(part.reused for part in parts.values()))


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder for the parts of a blend, which goes with them. What a kill leaves of it goes with the next lock."""
    folder = out / f"{store.BUILDING}sources"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(request: DataRequest, tokenizer: str | None = None) -> Iterator[tuple[str, DataRequest]]:
    """What preparing each source by itself takes."""
    data = request.data
    for each in data.sources:
        one = replace(data, source=each.files, sources=(), tokenizer=tokenizer or data.tokenizer)
        yield each.name, replace(request, data=one)


def _trained(tasks: Mapping[str, Task], vocab: int, folder: Path, progress: Progress) -> str:
    """The file of a tokenizer that is trained on the training documents of all sources, whatever their weights."""
    files = tuple(file for task in tasks.values() for file in task.files)
    seed = max(task.divided.seed for task in tasks.values())
    divided = Split(seed, max(task.divided.limit for task in tasks.values()))  # what any source holds out
    write_synced(folder / TOKENIZER, encode.trained(files, divided, vocab, seed, progress).json)
    return str((folder / TOKENIZER).absolute())


def _put_together(parts: Mapping[str, Prepared], folder: Path) -> dict[str, Any]:
    """Link the files of all sources into a folder; what meta.json says of them."""
    files: dict[str, Any] = {}
    for name, part in parts.items():
        for file, fingerprint in part.meta["files"].items():
            target = f"{name}.{file}" if file in SHARDS else file
            if target not in files:
                store.link(part.folder / file, folder / target)
                files[target] = fingerprint
    metas = {name: part.meta for name, part in parts.items()}
    first = next(iter(metas.values()))
    return {
        "files": files,
        "format": FORMAT,
        "tokenizer": first["tokenizer"],
        "splits": {split: _sums([meta["splits"][split] for meta in metas.values()]) for split in first["splits"]},
        "sources": {name: meta["splits"] for name, meta in metas.items()},
        "held_out": [f"{name}: {each}" for name, meta in metas.items() for each in meta["held_out"]],
        "unigram_nats": None,  # it depends on the weights
    }


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}
