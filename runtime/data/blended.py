"""The prepared folder of a run: of one source (runtime/data/prepare.py), or of several sources in one folder.

Each source of a blend is encoded (with the same tokenizer) and split separately, so a cache can share it between blends
with any weights. The folder of the blend has hard links to the files of all sources, under the names of the sources:
`web.train.bin`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.contract import DataRequest, TrainedTokenizer
from runtime.data import encode, prepare, store
from runtime.data.encode import Progress, TextSplit
from runtime.data.files import DataError, write_and_sync
from runtime.data.filters import FILE
from runtime.data.pieces import Journal
from runtime.data.prepare import FORMAT, Guard, PreparationTask, PreparedFolder, Say
from runtime.data.token_files import TokenTask
from runtime.data.tokenizer_files import TOKENIZER

OF_A_SOURCE = ("train.bin", "train.idx", "validation.bin", "validation.idx", FILE)  # files that each source has


def prepare_data(
    request: DataRequest,
    spec_folder: Path,
    out: Path,
    progress: Progress,
    say: Say = lambda _: None,
    *,
    cache: Path | None = None,
    resumed: Sequence[str] = (),
) -> PreparedFolder:
    """Return the prepared corpus of a request, with one source or several. Arguments and errors as of `prepare`."""
    if not request.data.sources:
        return prepare.prepare(request, spec_folder, out, progress, say, cache=cache, resumed=resumed)
    entry = prepare.request_entry(request)
    out.mkdir(parents=True, exist_ok=True)
    cache = prepare.usable_cache(cache, say)
    with store.run_lock(out, say):
        prepared, damaged = prepare.data_of_checkpoints(out, entry, resumed, cache)
        if prepared is not None:
            say(f"from {out}, verified; the text is not read again")
            return prepared
        try:
            tasks = {
                name: prepare.task_of(source_request, spec_folder, progress)
                for name, source_request in _requests(request)
            }
        except (DataError, OSError) as error:
            if damaged is None:
                raise
            raise DataError(f"{error}; and {damaged}, which this run was trained on, is damaged") from None
        prepare.say_skipped(tasks, dict(_requests(request)), say)
        blend = BlendRequest(request, spec_folder, tasks, progress, say)
        if (meta := store.verified_meta(out / blend.key)) is not None:
            return PreparedFolder(out / blend.key, store.update_about(out / blend.key, meta, blend.about), reused=True)
        if cache is not None:
            return prepare.link_from_cache(out, blend.find_or_build(cache, str(out)), blend.about, say)
        with _temporary_folder(out) as temporary:
            part: Part = lambda name, task, about: prepare.build(task, _folder(temporary / name), about)  # noqa: E731
            return blend.build(out, part, prepare.no_lock)


def prepare_shared(
    request: DataRequest, spec_folder: Path, cache: Path, progress: Progress, say: Say, jobs: int
) -> PreparedFolder:
    """Prepare the corpus of a request in the cache, where runs find it, with `jobs` processes. Errors as of
    `prepare`."""
    cache.mkdir(parents=True, exist_ok=True)
    purpose = f"{cache}"
    if not request.data.sources:
        task = prepare.task_of(request, spec_folder, progress, jobs)
        prepare.say_skipped({"": task}, {"": request}, say)
        return prepare.find_or_build(task, cache, prepare.about_of(request, task), purpose, say)
    tasks = {
        name: prepare.task_of(source_request, spec_folder, progress, jobs)
        for name, source_request in _requests(request)
    }
    prepare.say_skipped(tasks, dict(_requests(request)), say)
    return BlendRequest(request, spec_folder, tasks, progress, say, jobs).find_or_build(cache, purpose)


# Prepares the folder of a source: (name, task, what meta.json records about the request).
Part = Callable[[str, PreparationTask | TokenTask, dict[str, Any]], PreparedFolder]


@dataclass(frozen=True)
class BlendRequest:
    """The work for a folder of several sources. `tasks`: of each source, before the tokenizer is trained."""

    request: DataRequest
    spec_folder: Path
    tasks: Mapping[str, PreparationTask | TokenTask]
    progress: Progress
    say: Say
    jobs: int = 1

    @property
    def key(self) -> str:
        return store.key_of(["blend", [[name, task.key] for name, task in self.tasks.items()]])[:16]

    @property
    def about(self) -> dict[str, Any]:
        return {
            "source": ", ".join(source.files for source in self.request.data.sources),
            "skipped": dict(sum((Counter(task.skipped) for task in self.tasks.values()), Counter())),
            "request": prepare.request_entry(self.request),
            **_entries_by_source("places", {name: task.places for name, task in self.tasks.items()}),
        }

    def find_or_build(self, cache: Path, purpose: str) -> PreparedFolder:
        """Return the folder of the blend in the cache, built from the folders of its sources if it does not exist."""
        with store.shared_lock(cache, self.key, purpose, self.say):
            if (meta := store.verified_meta(cache / self.key)) is not None:
                return PreparedFolder(cache / self.key, meta, reused=True)
            part: Part = lambda _, task, about: prepare.find_or_build(task, cache, about, purpose, self.say)  # noqa: E731
            return self.build(cache, part, prepare.guard_of(cache, purpose, self.say))

    def build(self, parent: Path, part: Part, guard: Guard) -> PreparedFolder:
        """Build the folder of the blend in `parent`. The caller holds the lock of `key`, or of a run. `part`: prepares
        the folder of a source. `guard`: takes further locks."""
        with store.journal(parent, self.key) as journal, TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            tokenizer = self.request.data.tokenizer
            if isinstance(tokenizer, TrainedTokenizer):
                filtered_tasks = {
                    name: self._apply_filters(name, task, parent, guard) for name, task in self.tasks.items()
                }
                tokenizer = self._train_tokenizer(filtered_tasks.values(), tokenizer.vocab, Path(temporary), journal)
            parts = {}
            for name, source_request in _requests(self.request, tokenizer):
                task = self.tasks[name]
                if isinstance(task, PreparationTask):  # text is encoded with the tokenizer that is known now
                    task = prepare.task_of(source_request, self.spec_folder, self.progress, self.jobs)
                parts[name] = part(
                    name, self._apply_filters(name, task, parent, guard), prepare.about_of(source_request, task)
                )
            meta = store.publish(parent, self.key, lambda folder: _put_together(parts, folder) | self.about)
        return PreparedFolder(parent / self.key, meta, reused=all(prepared.reused for prepared in parts.values()))

    def _apply_filters(
        self, name: str, task: PreparationTask | TokenTask, parent: Path, guard: Guard
    ) -> PreparationTask | TokenTask:
        """Return the task of a source, restricted to the documents that pass its filters."""
        return task.apply_filters(parent, guard, lambda text: self.say(f"{name}: {text}"))

    def _train_tokenizer(
        self, tasks: Collection[PreparationTask | TokenTask], vocab: int, folder: Path, journal: Journal
    ) -> str:
        """Train a tokenizer on the training documents of all sources, regardless of weights. Return its path."""
        texts = [task for task in tasks if isinstance(task, PreparationTask)]
        assert len(texts) == len(tasks), "sources of token ids cannot train a tokenizer, and were refused before"
        files = tuple(file for task in texts for file in task.files)
        seed = max(task.text_split.seed for task in texts)
        limit = max(task.text_split.limit for task in texts)  # held out if any source holds it out
        special = next((task.special for task in texts if task.special), ())
        text = encode.train_tokenizer(files, TextSplit(seed, limit), vocab, seed, self.progress, journal, special)
        write_and_sync(folder / TOKENIZER, text)
        return str((folder / TOKENIZER).absolute())


@contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """Create a temporary folder for the parts of a blend. The next lock removes what a killed process left."""
    folder = out / f"{store.BUILDING}sources"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _requests(request: DataRequest, tokenizer: str | None = None) -> Iterator[tuple[str, DataRequest]]:
    """Yield the name of each source and a request for it alone."""
    data = request.data
    for source in data.sources:
        source_data = replace(
            data, source=source.files, sources=(), tokenizer=tokenizer or data.tokenizer, fim=source.fim
        )
        yield source.name, replace(request, data=replace(source_data, filters=source.filters))


def _folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _put_together(parts: Mapping[str, PreparedFolder], folder: Path) -> dict[str, Any]:
    """Link the files of all sources into a folder. Return their entries for meta.json."""
    files: dict[str, Any] = {}
    for name, part in parts.items():
        for file, fingerprint in part.meta["files"].items():
            target = f"{name}.{file}" if file in OF_A_SOURCE else file
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
        "held_out": [f"{name}: {entry}" for name, meta in metas.items() for entry in meta["held_out"]],
        "unigram_nats": None,  # it depends on the weights
        **_entries_by_source("token_files", metas),
        **_entries_by_source("infill", metas),
        **_entries_by_source("filters", metas),
    }


def _entries_by_source(name: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry `name` of the parts by source, for those that have it."""
    entries = {source: part[name][""] for source, part in parts.items() if name in part}
    return {name: entries} if entries else {}


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(of_source[name] for of_source in counts) for name in counts[0]}
