"""Filters of documents: which documents of a source are kept. They run once per source text, before it is split into
training and validation.

First each document is judged alone: its length, then the quality rules. Among the rest, equal and similar documents are
found, and the first in reading order is kept. The judgements of single documents are computed in several processes,
`python -P -m runtime.data.filters`, and kept in a journal; duplicates are found in one process, in order.

The standard input of such a process has a line of JSON with the filters, then a line per batch: a list of texts. Its
standard output has for each batch the length of the answer in eight bytes, and the answer.
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
from runtime.data.files import DataError, open_regular, sync_folder, write_and_sync
from runtime.data.pieces import Journal, compute_with_journal
from runtime.data.readers import Batch, SourceFile, batches, documents
from runtime.data.store import BUILDING, key_of
from runtime.system.limits import end_with_parent
from runtime.system.outcome import death_text

# --- The quality rules of Gopher (arXiv 2112.11446, appendix A.1.1 and table A1), except the one on stop words
#
# The rule on stop words is for English alone. Words are separated by white space; blank lines do not count, and
# separate paragraphs. Shares of characters are relative to the characters of all words, lines, or paragraphs. Of
# equal lines or paragraphs, all but the first are repetitions.

NUM_WORDS = (50, 100_000)  # fewest, most
WORD_LENGTH = (3, 10)  # the mean, in characters
MAX_PERCENT = {  # percent of the words, or of the lines
    "hash_signs": 10,
    "ellipses": 10,
    "bullet_lines": 90,
    "ellipsis_lines": 30,
}
MIN_PERCENT_WITH_LETTER = 80  # of the words
MAX_PERCENT_REPEATED = {  # percent: of the lines or paragraphs, and of their characters
    "repeated_lines": 30,
    "repeated_paragraphs": 30,
    "repeated_line_characters": 20,
    "repeated_paragraph_characters": 20,
}
MAX_PERCENT_TOP_GRAM = {2: 20, 3: 18, 4: 16}  # percent of the characters in the most frequent n-gram
REPEATED_GRAMS = {5: 15, 6: 14, 7: 13, 8: 12, 9: 11, 10: 10}  # percent of the characters in repeated n-grams
RULES = (
    "words",
    "word_length",
    *MAX_PERCENT,
    "letters",
    *MAX_PERCENT_REPEATED,
    *(f"top_{n}_gram" for n in MAX_PERCENT_TOP_GRAM),
    *(f"repeated_{n}_grams" for n in REPEATED_GRAMS),
)
BULLETS = ("-", "*", "•", "‣", "◦", "▪", "●", "–")
ELLIPSES = ("...", "…")
PARAGRAPHS = re.compile(r"\n\s*\n")
Numbers = npt.NDArray[np.int64]


def broken_rule(text: str) -> str:
    """Return the first of RULES that a document breaks, or ""."""
    words = text.split()
    if not NUM_WORDS[0] <= len(words) <= NUM_WORDS[1]:
        return "words"
    characters = sum(map(len, words))
    if not WORD_LENGTH[0] * len(words) <= characters <= WORD_LENGTH[1] * len(words):
        return "word_length"
    lines = [line for raw_line in text.splitlines() if (line := raw_line.strip())]
    counts = {
        "hash_signs": (text.count("#"), len(words)),
        "ellipses": (sum(map(text.count, ELLIPSES)), len(words)),
        "bullet_lines": (sum(line.startswith(BULLETS) for line in lines), len(lines)),
        "ellipsis_lines": (sum(line.endswith(ELLIPSES) for line in lines), len(lines)),
    }
    for name, (count, total) in counts.items():
        if count * 100 > MAX_PERCENT[name] * total:
            return name
    if sum(any(map(str.isalpha, word)) for word in words) * 100 < MIN_PERCENT_WITH_LETTER * len(words):
        return "letters"
    paragraphs = [part for raw_part in PARAGRAPHS.split(text) if (part := raw_part.strip())]
    return next(_broken_repetition_rules(lines, paragraphs), "") or next(_broken_gram_rules(words, characters), "")


def _broken_repetition_rules(lines: Sequence[str], paragraphs: Sequence[str]) -> Iterator[str]:
    """Yield the rules on lines and paragraphs that are broken."""
    parts = {"line": lines, "paragraph": paragraphs}
    repeated = {kind: _repeats_of(texts) for kind, texts in parts.items()}
    for kind, texts in parts.items():
        if len(repeated[kind]) * 100 > MAX_PERCENT_REPEATED[f"repeated_{kind}s"] * len(texts):
            yield f"repeated_{kind}s"
    for kind, texts in parts.items():
        name = f"repeated_{kind}_characters"
        if sum(map(len, repeated[kind])) * 100 > MAX_PERCENT_REPEATED[name] * sum(map(len, texts)):
            yield name


def _repeats_of(parts: Sequence[str]) -> list[str]:
    """Return the parts that occurred before."""
    seen, repeats = set[str](), list[str]()
    for part in parts:
        if part in seen:
            repeats.append(part)
        seen.add(part)
    return repeats


def _broken_gram_rules(words: Sequence[str], characters: int) -> Iterator[str]:
    """Yield the rules on n-grams that are broken.

    Each n-gram gets an id, computed from the id of its first n-1 words and the id of its last word, so there are no
    hash collisions. If all n-grams of one length differ, so do all longer ones, and the loop ends. W words, G n-grams,
    K distinct n-grams.
    """
    word_ids: dict[str, int] = {}
    words_W = np.fromiter((word_ids.setdefault(word, len(word_ids)) for word in words), np.int64, len(words))
    lengths_W = np.fromiter(map(len, words), np.int64, len(words))
    gram_ids_G = words_W
    for n in range(2, max(REPEATED_GRAMS) + 1):
        if len(gram_ids_G) < 2:
            return
        pairs_G = gram_ids_G[:-1] * len(word_ids) + words_W[n - 1 :]
        distinct_pairs_K, first_K, gram_ids_G, counts_K = np.unique(
            pairs_G, return_index=True, return_inverse=True, return_counts=True
        )
        if len(distinct_pairs_K) == len(gram_ids_G):
            return
        if n in MAX_PERCENT_TOP_GRAM:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_W)])
            sizes_K = ends[first_K + n] - ends[first_K]
            is_most_frequent_K = counts_K == counts_K.max()
            best_K = is_most_frequent_K & (sizes_K == sizes_K[is_most_frequent_K].max())
            # The first of the longest of the most frequent.
            top = int(np.where(best_K, first_K, len(gram_ids_G)).argmin())
            if _covered_characters(gram_ids_G == top, n, lengths_W) * 100 > MAX_PERCENT_TOP_GRAM[n] * characters:
                yield f"top_{n}_gram"
        elif n in REPEATED_GRAMS:
            is_repeat_G = first_K[gram_ids_G] != np.arange(len(gram_ids_G))
            if _covered_characters(is_repeat_G, n, lengths_W) * 100 > REPEATED_GRAMS[n] * characters:
                yield f"repeated_{n}_grams"


def _covered_characters(begins_G: npt.NDArray[np.bool_], n: int, lengths_W: Numbers) -> int:
    """Return the characters of the words that are in any n-gram that starts at `begins_G`, each word counted once."""
    steps = np.zeros(len(lengths_W) + 1, np.int64)
    begins = np.flatnonzero(begins_G)
    np.add.at(steps, begins, 1)
    np.add.at(steps, begins + n, -1)
    return int(lengths_W[np.cumsum(steps)[:-1] > 0].sum())


# --- The result of filtering: a fate for each document

FORMAT = 1  # version of NAMES, the rules and the hashes
KEPT = 0
NAMES = ("shortest", "longest", *RULES, "exact", "near")  # reasons to leave a document out, numbered from 1
FILE = "filters.dat"  # in a folder of prepared data
# Of files beside the folders of prepared data, which later folders of the same text reuse.
FATES_PREFIX = ".filtered-"
LENGTH = struct.Struct("<Q")
HEAD = struct.Struct("<ii")
Progress = Callable[[str, int, int], None]
Fates = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class FilterResult:
    """The fate of each document of some files: KEPT, or the number of the filter that leaves it out.

    `sizes`: number of documents of each file. `listed`: filters that `facts` reports even if they left out no
    document.
    """

    fates: Fates
    sizes: tuple[int, ...]
    listed: tuple[str, ...]

    def restrict(self, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
        """Return the files, restricted to the documents that are kept."""
        places = pairwise(accumulate(self.sizes, initial=0))
        parts = ((self.fates[first:end] == KEPT).tobytes() for first, end in places)
        return tuple(replace(file, mask=part) for file, part in zip(files, parts, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """Entries for meta.json: documents read and kept, and how many each filter left out."""
        counts = np.bincount(self.fates, minlength=len(NAMES) + 1).tolist()
        left_out = {name: count for name, count in zip(NAMES, counts[1:], strict=True) if count or name in self.listed}
        return {"documents": len(self.fates), "kept": counts[KEPT], "left_out": left_out}

    def to_bytes(self) -> bytes:
        """Return a line of JSON with the sizes, then the fates, a byte each."""
        head = {"sizes": self.sizes, "shown": self.listed}
        sha256 = hashlib.sha256(json.dumps(head).encode() + self.fates.tobytes()).hexdigest()
        return json.dumps(head | {"sha256": sha256}).encode() + b"\n" + self.fates.tobytes()


def summary_line(facts: Mapping[str, Any]) -> str:
    """Return the facts of a source as one line."""
    left_out = facts["left_out"]
    reasons = ", ".join(f"{name} {left_out[name]:,}" for name in NAMES if name in left_out)
    return f"{facts['kept']:,} of {facts['documents']:,} documents pass the filters; left out: {reasons or 'none'}"


def key(settings: FiltersRecipe, text: str) -> str:
    """Return a hash of everything that determines the fates of a text's documents. DataError if a library is
    missing."""
    versions = [unicodedata.unidata_version]  # for the classes of letters and NFC
    versions += [duplicates.version()] if settings.duplicates == "near" else []
    return key_of(["filters", FORMAT, text, asdict(settings), versions])[:16]


# ---------------------------------------------------------------- a batch of documents
@dataclass(frozen=True)
class BatchJudgement:
    """Judgements of the documents of a batch. `digests` and `signatures` are of the documents that passed all rules;
    duplicates are not found yet."""

    fates: Fates
    digests: Sequence[bytes]
    signatures: npt.NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        head = HEAD.pack(len(self.fates), len(self.signatures))
        return head + self.fates.tobytes() + b"".join(self.digests) + self.signatures.astype("<u4").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> BatchJudgement:
        num, num_signatures = HEAD.unpack_from(content)
        fates = np.frombuffer(content, np.uint8, num, HEAD.size)
        begin, size = HEAD.size + num, duplicates.DIGEST_BYTES
        end = len(content) - num_signatures * duplicates.MINIMA * 4
        signatures = np.frombuffer(content, "<u4", offset=end).reshape(num_signatures, duplicates.MINIMA)
        return cls(fates, [content[i : i + size] for i in range(begin, end, size)], signatures)


def judge_batch(settings: FiltersRecipe, texts: Sequence[str]) -> bytes:
    """Judge each text alone. Return `BatchJudgement` as bytes."""
    fates = np.array([_fate(settings, text) for text in texts], np.uint8)
    kept_texts = [text for text, fate in zip(texts, fates, strict=True) if fate == KEPT]
    digests = [duplicates.digest(text) for text in kept_texts] if settings.duplicates else []
    signatures = [duplicates.signature(text) for text in kept_texts] if settings.duplicates == "near" else []
    return BatchJudgement(fates, digests, np.array(signatures, np.uint32).reshape(-1, duplicates.MINIMA)).to_bytes()


def _fate(settings: FiltersRecipe, text: str) -> int:
    if settings.shortest is not None and len(text) < settings.shortest:
        return 1 + NAMES.index("shortest")
    if settings.longest is not None and len(text) > settings.longest:
        return 1 + NAMES.index("longest")
    rule = broken_rule(text) if settings.quality else ""
    return 1 + NAMES.index(rule) if rule else KEPT


# ---------------------------------------------------------------- all documents
def filter_documents(
    files: Sequence[SourceFile], settings: FiltersRecipe, jobs: int, journal: Journal, progress: Progress
) -> FilterResult:
    """Filter the documents of some files with `jobs` processes. Raises DataError if none is kept."""
    total = max(1, sum(file.path.stat().st_size for file in files))
    sizes, fates, num_read = dict.fromkeys(files, 0), [], 0
    seen_documents = duplicates.SeenDocuments(settings.similarity if settings.duplicates == "near" else None)
    with ExitStack() as stack:
        workers: list[Callable[[Batch], bytes]] = [lambda batch: judge_batch(settings, [text for _, text in batch])]
        processes = [stack.enter_context(_JudgeProcess(settings)) for _ in range(jobs if jobs > 1 else 0)]
        workers = [process.ask for process in processes] or workers

        def stop() -> None:
            for process in processes:
                process.stop()

        for batch, answer in compute_with_journal(batches(files, documents), workers, journal, stop):
            judgement = BatchJudgement.from_bytes(answer)
            fates.append(_mark_duplicates(judgement, seen_documents) if settings.duplicates else judgement.fates)
            for file, text in batch:
                sizes[file] += 1
                num_read += len(text)
            progress("filter", min(num_read, total - 1), total)
    progress("filter", total, total)
    reasons = [name for name in ("shortest", "longest") if getattr(settings, name) is not None]
    reasons += {None: [], "exact": ["exact"], "near": ["exact", "near"]}[settings.duplicates]
    result = FilterResult(np.concatenate([np.zeros(0, np.uint8), *fates]), tuple(sizes.values()), tuple(reasons))
    if not result.facts["kept"]:
        raise DataError(f"{files[0].path}: nothing is left to train on: {summary_line(result.facts)}")
    return result


def _mark_duplicates(judgement: BatchJudgement, seen: duplicates.SeenDocuments) -> Fates:
    fates = judgement.fates.copy()
    signatures = list(judgement.signatures) or [None] * len(judgement.digests)
    places = np.flatnonzero(fates == KEPT).tolist()
    for place, digest, signature in zip(places, judgement.digests, signatures, strict=True):
        if name := seen.add(digest, signature):
            fates[place] = 1 + NAMES.index(name)
    return fates


# ---------------------------------------------------------------- cache of results, for later folders of the same text
def read(parent: Path, key: str) -> FilterResult | None:
    """Return the result that `write` wrote, if it exists and is complete."""
    path = parent / f"{FATES_PREFIX}{key}"
    if path.is_symlink() or not path.is_file():
        return None
    with open_regular(path) as stream:
        head, _, content = stream.read().partition(b"\n")
    try:
        values = json.loads(head)
        result = FilterResult(np.frombuffer(content, np.uint8), tuple(values["sizes"]), tuple(values["shown"]))
        return result if result.to_bytes() == head + b"\n" + content else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write(parent: Path, key: str, result: FilterResult) -> None:
    """Write a result atomically. The caller holds the lock of `key`, or of the folder."""
    temporary_path = parent / f"{BUILDING}{key}"
    temporary_path.unlink(missing_ok=True)  # left by a killed process
    write_and_sync(temporary_path, result.to_bytes())
    temporary_path.replace(parent / f"{FATES_PREFIX}{key}")
    sync_folder(parent)


# ---------------------------------------------------------------- the process
class _JudgeProcess:
    """A process that judges batches, as a context manager."""

    def __init__(self, settings: FiltersRecipe) -> None:
        self._settings = settings

    def __enter__(self) -> _JudgeProcess:
        command = [sys.executable, "-P", "-m", "runtime.data.filters"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(asdict(self._settings))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        with suppress(BrokenPipeError):  # a batch was not read
            _pipe(self._process.stdin).close()
        with self._process:  # closes its pipes
            pass

    def stop(self) -> None:
        """Kill the process. A pending `ask` raises an error."""
        self._process.kill()

    def ask(self, batch: Batch) -> bytes:
        """Return the bytes of `judge_batch`. Raises DataError if the process ends."""
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
        with suppress(BrokenPipeError):  # the process has ended, which `ask` reports
            stdin.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            stdin.flush()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def main() -> int:
    end_with_parent()
    lines: Iterator[bytes] = iter(sys.stdin.buffer)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        judge = partial(judge_batch, FiltersRecipe(**json.loads(next(lines, b"{}"))))
        for line in lines:
            answer = judge(json.loads(line))
            sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
            sys.stdout.buffer.flush()
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
