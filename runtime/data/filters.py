"""Filters of documents: which of a source's are kept, found once for a text and its filters, before it is divided.

A document is judged by itself first: its length, then the rules of quality. Of those that are left, equal and similar
ones are found: the first in the order of reading stays. What a document is judged by depends on it alone and is made in
several processes, `python -P -m runtime.data.filters`; the rest goes by the order, in one. A journal has what the
processes made.

The standard input of such a process has a line of JSON with the filters, then one for each batch: a list of texts. Its
standard output has for each the length of the answer, eight bytes, and the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from runtime.contract import FiltersRecipe
from runtime.data import duplicates
from runtime.data.files import DataError, open_regular, sync_folder, write_synced
from runtime.data.pieces import Journal, journaled
from runtime.data.readers import Batch, SourceFile, batches, documents
from runtime.data.store import BUILDING, key_of
from runtime.system.limited import end_with_parent
from runtime.system.outcome import death_text

# --- The rules of quality of Gopher (arXiv 2112.11446, appendix A.1.1 and table A1) that need no list of words
#
# A rule that is left out, the one on stop words, is of English. Words are parted by white space, lines of white space
# alone count nowhere, and paragraphs are parted by such lines. Shares of characters are of those of all words, or
# lines, or paragraphs. What was there before in the document is a repetition: of two equal lines one is.

WORDS = (50, 100_000)
WORD_LENGTH = (3, 10)  # the mean, in characters
MOST = {  # percent of the words, or of the lines
    "hash_signs": 10,
    "ellipses": 10,
    "bullet_lines": 90,
    "ellipsis_lines": 30,
}
LETTERS = 80  # percent of the words that have one, at least
REPEATED = {  # percent: of the lines or paragraphs, and of their characters
    "repeated_lines": 30,
    "repeated_paragraphs": 30,
    "repeated_line_characters": 20,
    "repeated_paragraph_characters": 20,
}
TOP = {2: 20, 3: 18, 4: 16}  # percent of the characters that are in the n-gram that occurs most often
REPEATED_GRAMS = {5: 15, 6: 14, 7: 13, 8: 12, 9: 11, 10: 10}  # percent of those in n-grams that were there before
RULES = (
    "words",
    "word_length",
    *MOST,
    "letters",
    *REPEATED,
    *(f"top_{n}_gram" for n in TOP),
    *(f"repeated_{n}_grams" for n in REPEATED_GRAMS),
)
BULLETS = ("-", "*", "•", "‣", "◦", "▪", "●", "–")
ELLIPSES = ("...", "…")
PARAGRAPHS = re.compile(r"\n\s*\n")
Numbers = npt.NDArray[np.int64]


def fault(text: str) -> str:
    """The first of RULES that a document breaks, "" where it keeps all."""
    words = text.split()
    if not WORDS[0] <= len(words) <= WORDS[1]:
        return "words"
    characters = sum(map(len, words))
    if not WORD_LENGTH[0] * len(words) <= characters <= WORD_LENGTH[1] * len(words):
        return "word_length"
    lines = [line for each in text.splitlines() if (line := each.strip())]
    found = {
        "hash_signs": (text.count("#"), len(words)),
        "ellipses": (sum(map(text.count, ELLIPSES)), len(words)),
        "bullet_lines": (sum(line.startswith(BULLETS) for line in lines), len(lines)),
        "ellipsis_lines": (sum(line.endswith(ELLIPSES) for line in lines), len(lines)),
    }
    for name, (count, of) in found.items():
        if count * 100 > MOST[name] * of:
            return name
    if sum(any(map(str.isalpha, word)) for word in words) * 100 < LETTERS * len(words):
        return "letters"
    paragraphs = [part for each in PARAGRAPHS.split(text) if (part := each.strip())]
    return next(_repetitions(lines, paragraphs), "") or next(_grams(words, characters), "")


def _repetitions(lines: Sequence[str], paragraphs: Sequence[str]) -> Iterator[str]:
    """The rules on lines and paragraphs that are broken."""
    parts = {"line": lines, "paragraph": paragraphs}
    repeated = {kind: _repeated(each) for kind, each in parts.items()}
    for kind, each in parts.items():
        if len(repeated[kind]) * 100 > REPEATED[f"repeated_{kind}s"] * len(each):
            yield f"repeated_{kind}s"
    for kind, each in parts.items():
        name = f"repeated_{kind}_characters"
        if sum(map(len, repeated[kind])) * 100 > REPEATED[name] * sum(map(len, each)):
            yield name


def _repeated(parts: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [part for part in parts if part in seen or seen.add(part)]  # type: ignore[func-returns-value]


def _grams(words: Sequence[str], characters: int) -> Iterator[str]:
    """The rules on runs of n words that are broken.

    Runs get numbers: a run of n words is that of its first n-1 words and its last word. So equal numbers are equal
    runs, and no hash decides. Where all runs of n words differ, all longer ones do.
    """
    number: dict[str, int] = {}
    words_W = np.fromiter((number.setdefault(word, len(number)) for word in words), np.int64, len(words))
    lengths_W = np.fromiter(map(len, words), np.int64, len(words))
    runs_G = words_W
    for n in range(2, max(REPEATED_GRAMS) + 1):
        if len(runs_G) < 2:
            return
        pairs_G = runs_G[:-1] * len(number) + words_W[n - 1 :]
        kinds_K, first_K, runs_G, counts_K = np.unique(
            pairs_G, return_index=True, return_inverse=True, return_counts=True
        )
        if len(kinds_K) == len(runs_G):
            return
        if n in TOP:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_W)])
            sizes_K = ends[first_K + n] - ends[first_K]
            often_K = counts_K == counts_K.max()
            best_K = often_K & (sizes_K == sizes_K[often_K].max())
            top = int(np.where(best_K, first_K, len(runs_G)).argmin())  # the first of the longest of the most frequent
            if _inside(runs_G == top, n, lengths_W) * 100 > TOP[n] * characters:
                yield f"top_{n}_gram"
        elif n in REPEATED_GRAMS:
            again_G = first_K[runs_G] != np.arange(len(runs_G))
            if _inside(again_G, n, lengths_W) * 100 > REPEATED_GRAMS[n] * characters:
                yield f"repeated_{n}_grams"


def _inside(begins_G: npt.NDArray[np.bool_], n: int, lengths_W: Numbers) -> int:
    """Characters of the words that are in some of the runs of n words that begin where it says, each counted once."""
    steps = np.zeros(len(lengths_W) + 1, np.int64)
    begins = np.flatnonzero(begins_G)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + n, -1)
    return int(lengths_W[np.cumsum(steps)[:-1] > 0].sum())


# --- filters

FORMAT = 1  # of NAMES, the rules and the hashes
KEPT = 0
NAMES = ("shortest", "longest", *RULES, "exact", "near")  # why a document is left out: 1 is the first
FILE = "filters.dat"  # in a folder of prepared data
FOUND = ".filtered-"  # beside such folders, for the next one of the same text
LENGTH = struct.Struct("<Q")
HEAD = struct.Struct("<ii")
Progress = Callable[[str, int, int], None]
Fates = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Filtered:
    """What becomes of each document of some files: KEPT, or the number of the filter that leaves it out.

    `sizes`: documents of each file. `shown`: the filters that are counted where they leave out nothing, too.
    """

    fates: Fates
    sizes: tuple[int, ...]
    shown: tuple[str, ...]

    def of(self, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
        """The files, of which the documents that are kept are read."""
        places = pairwise(accumulate(self.sizes, initial=0))
        parts = ((self.fates[first:end] == KEPT).tobytes() for first, end in places)
        return tuple(replace(file, kept=part) for file, part in zip(files, parts, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """What meta.json says: documents that were read and kept, and how many each filter left out."""
        counts = np.bincount(self.fates, minlength=len(NAMES) + 1).tolist()
        left_out = {name: count for name, count in zip(NAMES, counts[1:], strict=True) if count or name in self.shown}
        return {"documents": len(self.fates), "kept": counts[KEPT], "left_out": left_out}

    def to_bytes(self) -> bytes:
        """A line of JSON with the sizes, and the fates, a byte each."""
        head = {"sizes": self.sizes, "shown": self.shown}
        sha256 = hashlib.sha256(json.dumps(head).encode() + self.fates.tobytes()).hexdigest()
        return json.dumps(head | {"sha256": sha256}).encode() + b"\n" + self.fates.tobytes()


def said(facts: Mapping[str, Any]) -> str:
    """The facts of a source in a line."""
    left_out = facts["left_out"]
    reasons = ", ".join(f"{name} {left_out[name]:,}" for name in NAMES if name in left_out)
    return f"{facts['kept']:,} of {facts['documents']:,} documents pass the filters; left out: {reasons or 'none'}"


def key(settings: FiltersRecipe, text: str) -> str:
    """What the fates of the documents of a text depend on. Raises DataError where a library is missing."""
    versions = [unicodedata.unidata_version]  # of the letters and the forms of composition
    versions += [duplicates.version()] if settings.duplicates == "near" else []
    return key_of(["filters", FORMAT, text, asdict(settings), versions])[:16]


# ---------------------------------------------------------------- a batch of documents
@dataclass(frozen=True)
class Judged:
    """Documents of a batch by themselves. `digests`, `signatures`: of those that are kept so far."""

    fates: Fates
    digests: Sequence[bytes]
    signatures: npt.NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        head = HEAD.pack(len(self.fates), len(self.signatures))
        return head + self.fates.tobytes() + b"".join(self.digests) + self.signatures.astype("<u4").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Judged:
        num, num_signatures = HEAD.unpack_from(content)
        fates = np.frombuffer(content, np.uint8, num, HEAD.size)
        at, size = HEAD.size + num, duplicates.DIGEST_BYTES
        end = len(content) - num_signatures * duplicates.MINIMA * 4
        signatures = np.frombuffer(content, "<u4", offset=end).reshape(num_signatures, duplicates.MINIMA)
        return cls(fates, [content[i : i + size] for i in range(at, end, size)], signatures)


def judged(settings: FiltersRecipe, texts: Sequence[str]) -> bytes:
    """What is known of each text by itself."""
    fates = np.array([_fate(settings, text) for text in texts], np.uint8)
    kept = [text for text, fate in zip(texts, fates, strict=True) if fate == KEPT]
    digests = [duplicates.digest(text) for text in kept] if settings.duplicates else []
    signatures = [duplicates.signature(text) for text in kept] if settings.duplicates == "near" else []
    return Judged(fates, digests, np.array(signatures, np.uint32).reshape(-1, duplicates.MINIMA)).to_bytes()


def _fate(settings: FiltersRecipe, text: str) -> int:
    if settings.shortest is not None and len(text) < settings.shortest:
        return 1 + NAMES.index("shortest")
    if settings.longest is not None and len(text) > settings.longest:
        return 1 + NAMES.index("longest")
    broken = fault(text) if settings.quality else ""
    return 1 + NAMES.index(broken) if broken else KEPT


# ---------------------------------------------------------------- all documents
def filtered(
    files: Sequence[SourceFile], settings: FiltersRecipe, jobs: int, journal: Journal, progress: Progress
) -> Filtered:
    """What becomes of the documents of some files; `jobs` processes judge them. Raises DataError where none is kept."""
    total = max(1, sum(file.path.stat().st_size for file in files))
    sizes, fates, done = dict.fromkeys(files, 0), [], 0
    seen = duplicates.SeenDocuments(settings.similarity if settings.duplicates == "near" else None)
    with ExitStack() as stack:
        workers: list[Callable[[Batch], bytes]] = [lambda batch: judged(settings, [text for _, text in batch])]
        processes = [stack.enter_context(_Judge(settings)) for _ in range(jobs if jobs > 1 else 0)]
        workers = [process.ask for process in processes] or workers

        def stop() -> None:
            for process in processes:
                process.stop()

        for batch, answer in journaled(batches(files, documents), workers, journal, stop):
            found = Judged.from_bytes(answer)
            fates.append(_with_duplicates(found, seen) if settings.duplicates else found.fates)
            for file, text in batch:
                sizes[file] += 1
                done += len(text)
            progress("filter", min(done, total - 1), total)
    progress("filter", total, total)
    shown = [name for name in ("shortest", "longest") if getattr(settings, name) is not None]
    shown += {None: [], "exact": ["exact"], "near": ["exact", "near"]}[settings.duplicates]
    result = Filtered(np.concatenate([np.zeros(0, np.uint8), *fates]), tuple(sizes.values()), tuple(shown))
    if not result.facts["kept"]:
        raise DataError(f"{files[0].path}: nothing is left to train on: {said(result.facts)}")
    return result


def _with_duplicates(found: Judged, seen: duplicates.SeenDocuments) -> Fates:
    fates = found.fates.copy()
    signatures = list(found.signatures) or [None] * len(found.digests)
    places = np.flatnonzero(fates == KEPT).tolist()
    for place, digest, signature in zip(places, found.digests, signatures, strict=True):
        if name := seen.add(digest, signature):
            fates[place] = 1 + NAMES.index(name)
    return fates


# ---------------------------------------------------------------- kept for the next folder of the text
def read(where: Path, key: str) -> Filtered | None:
    """What was written, if it is there and whole."""
    path = where / f"{FOUND}{key}"
    if path.is_symlink() or not path.is_file():
        return None
    with open_regular(path) as stream:
        head, _, content = stream.read().partition(b"\n")
    try:
        values = json.loads(head)
        found = Filtered(np.frombuffer(content, np.uint8), tuple(values["sizes"]), tuple(values["shown"]))
        return found if found.to_bytes() == head + b"\n" + content else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write(where: Path, key: str, found: Filtered) -> None:
    """Keep a result, which appears whole or not at all. Under the lock of `key`, or of the folder."""
    aside = where / f"{BUILDING}{key}"
    aside.unlink(missing_ok=True)  # what a kill has left
    write_synced(aside, found.to_bytes())
    aside.replace(where / f"{FOUND}{key}")
    sync_folder(where)


# ---------------------------------------------------------------- the process
class _Judge:
    """A process that judges batches, as a context manager."""

    def __init__(self, settings: FiltersRecipe) -> None:
        self._settings = settings

    def __enter__(self) -> _Judge:
        command = [sys.executable, "-P", "-m", "runtime.data.filters"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(asdict(self._settings))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        with suppress(BrokenPipeError):  # of a batch that it did not read
            _pipe(self._process.stdin).close()
        with self._process:  # closes its pipes
            pass

    def stop(self) -> None:
        """End the process; a question that waits gets an error."""
        self._process.kill()

    def ask(self, batch: Batch) -> bytes:
        """The bytes of `judged`. Raises DataError if the process ends."""
        self._send([text for _, text in batch])
        stream = _pipe(self._process.stdout)
        if len(head := stream.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            if len(content := stream.read(size)) == size:
                return content
        code = self._process.wait()
        why = f"was {death_text(-code)}" if code < 0 else f"ended with code {code}"
        raise DataError(f"{batch[0][0].path}: a process that filters its documents {why}")

    def _send(self, value: Any) -> None:
        stdin = _pipe(self._process.stdin)
        with suppress(BrokenPipeError):  # it has ended, which its answer says
            stdin.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            stdin.flush()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def main() -> int:
    end_with_parent()
    lines: Iterator[bytes] = iter(sys.stdin.buffer)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        judge = partial(judged, FiltersRecipe(**json.loads(next(lines, b"{}"))))
        for line in lines:
            answer = judge(json.loads(line))
            sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
            sys.stdout.buffer.flush()
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
