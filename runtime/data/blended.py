"""The prepared folder of a run: of one source as it is (runtime/data/prepare.py), or of several in one folder.

Each source of a blend is prepared by itself, in the tokens of one tokenizer, and divided by itself. So a cache has it
for every blend that it is in, whatever the weights. The folder of the blend is hard links to the files of all, under
the names of their sources: `web.train.bin`.
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
from runtime.data.files import DataError, write_synced
from runtime.data.filters import FILE
from runtime.data.pieces import Journal
from runtime.data.prepare import FORMAT, Guard, PreparationTask, Prepared, Say
from runtime.data.token_files import TokenTask
from runtime.data.tokenizer_files import TOKENIZER

OF_A_SOURCE = ("train.bin", "train.idx", "validation.bin", "validation.idx", FILE)  # files of which each has one


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
        prepare.say_skipped(tasks, dict(_requests(request)), say)
        blend = BlendRequest(request, spec_folder, tasks, progress, say)
        if (meta := store.verified(out / blend.key)) is not None:
            return Prepared(out / blend.key, store.renamed(out / blend.key, meta, blend.about), reused=True)
        if cache is not None:
            return prepare.linked(out, blend.shared(cache, str(out)), blend.about, say)
        with _aside(out) as aside:
            part: Part = lambda name, task, about: prepare.made(task, _folder(aside / name), about)  # noqa: E731
            return blend.made(out, part, prepare.nobody_else)


def prepare_shared(
    request: DataRequest, spec_folder: Path, cache: Path, progress: Progress, say: Say, jobs: int
) -> Prepared:
    """The prepared corpus of a request in the cache, where runs find it; `jobs` processes encode. Errors: those of
    `prepare`."""
    cache.mkdir(parents=True, exist_ok=True)
    purpose = f"{cache}"
    if not request.data.sources:
        task = prepare.task_of(request, spec_folder, progress, jobs)
        prepare.say_skipped({"": task}, {"": request}, say)
        return prepare.shared(task, cache, prepare.about_of(request, task), purpose, say)
    tasks = {name: prepare.task_of(one, spec_folder, progress, jobs) for name, one in _requests(request)}
    prepare.say_skipped(tasks, dict(_requests(request)), say)
    return BlendRequest(request, spec_folder, tasks, progress, say, jobs).shared(cache, purpose)


# Makes the folder of a source: its name, what it is made from, and what meta.json says of who asked.
Part = Callable[[str, PreparationTask | TokenTask, dict[str, Any]], Prepared]


@dataclass(frozen=True)
class BlendRequest:
    """What the folder of several sources is made from. `tasks`: of each source, before the tokenizer is trained."""

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
            "source": ", ".join(each.files for each in self.request.data.sources),
            "skipped": dict(sum((Counter(task.skipped) for task in self.tasks.values()), Counter())),
            "request": prepare.asked_for(self.request),
            **_by_source("places", {name: task.places for name, task in self.tasks.items()}),
        }

    def shared(self, cache: Path, purpose: str) -> Prepared:
        """The folder in the cache, made there of those of its sources, unless it is there already."""
        with store.shared_lock(cache, self.key, purpose, self.say):
            if (meta := store.verified(cache / self.key)) is not None:
                return Prepared(cache / self.key, meta, reused=True)
            part: Part = lambda _, task, about: prepare.shared(task, cache, about, purpose, self.say)  # noqa: E731
            return self.made(cache, part, prepare.guard_of(cache, purpose, self.say))

    def made(self, where: Path, part: Part, guard: Guard) -> Prepared:
        """Make the folder in `where`; `part` gives that of a source. Under the lock of `key`, or of a run; `guard`: of
        the locks of others."""
        with store.journal(where, self.key) as journal, TemporaryDirectory(ignore_cleanup_errors=True) as aside:
            tokenizer = self.request.data.tokenizer
            if isinstance(tokenizer, TrainedTokenizer):
                passed = {name: self._passed(name, task, where, guard) for name, task in self.tasks.items()}
                tokenizer = self._trained(passed.values(), tokenizer.vocab, Path(aside), journal)
            parts = {}
            for name, one in _requests(self.request, tokenizer):
                task = self.tasks[name]
                if isinstance(task, PreparationTask):  # of text: with the tokenizer that is known now
                    task = prepare.task_of(one, self.spec_folder, self.progress, self.jobs)
                parts[name] = part(name, self._passed(name, task, where, guard), prepare.about_of(one, task))
            meta = store.publish(where, self.key, lambda at: _put_together(parts, at) | self.about)
        return Prepared(where / self.key, meta, reused=all(each.reused for each in parts.values()))

    def _passed(
        self, name: str, task: PreparationTask | TokenTask, where: Path, guard: Guard
    ) -> PreparationTask | TokenTask:
        """The task of a source, of what passes its filters."""
        return task.passed(where, guard, lambda text: self.say(f"{name}: {text}"))

    def _trained(
        self, tasks: Collection[PreparationTask | TokenTask], vocab: int, folder: Path, journal: Journal
    ) -> str:
        """The file of a tokenizer that is trained on the training documents of all sources, whatever their weights."""
        texts = [task for task in tasks if isinstance(task, PreparationTask)]
        assert len(texts) == len(tasks), "token ids were refused: they are of no tokenizer that is trained here"
        files = tuple(file for task in texts for file in task.files)
        seed = max(task.divided.seed for task in texts)
        limit = max(task.divided.limit for task in texts)  # what any source holds out
        special = next((task.special for task in texts if task.special), ())
        text = encode.tokenizer_of(files, TextSplit(seed, limit), vocab, seed, self.progress, journal, special)
        write_synced(folder / TOKENIZER, text)
        return str((folder / TOKENIZER).absolute())


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
        one = replace(data, source=each.files, sources=(), tokenizer=tokenizer or data.tokenizer, fim=each.fim)
        yield each.name, replace(request, data=replace(one, filters=each.filters))


def _folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _put_together(parts: Mapping[str, Prepared], folder: Path) -> dict[str, Any]:
    """Link the files of all sources into a folder; what meta.json says of them."""
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
        "held_out": [f"{name}: {each}" for name, meta in metas.items() for each in meta["held_out"]],
        "unigram_nats": None,  # it depends on the weights
        **_by_source("token_files", metas),
        **_by_source("infill", metas),
        **_by_source("filters", metas),
    }


def _by_source(name: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What parts say of their only source, by the name that it has in the blend."""
    found = {source: part[name][""] for source, part in parts.items() if name in part}
    return {name: found} if found else {}


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}
