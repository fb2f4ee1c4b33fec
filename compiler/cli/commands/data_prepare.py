"""`dsc data prepare`: prepare the data of a run in several processes, in the cache of `dsc train`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from compiler.cli.commands.common import human, progress, say
from runtime.system.outcome import printable

if TYPE_CHECKING:
    from dsl.schema import Data, Spec
    from runtime.data.prepare import PreparedFolder

JSON_VERSION = 1  # docs/json.md
COUNTS = ("documents", "tokens", "bytes")
MOST_EPOCHS = 4  # repeated text is about as good as new text up to here (arXiv 2305.16264)


@dataclass(frozen=True)
class SplitRow:
    """The size of one split of a source: documents, tokens, and bytes of text.

    `epochs`: how often the run reads a token on average; None for validation splits, and for chats and prompts.
    """

    source: str
    split: str
    documents: int
    tokens: int
    bytes: int
    epochs: float | None


class Pace:
    """Estimates the time left in a source. A smaller `done` or another `total` starts the next source."""

    def __init__(self) -> None:
        self._start_s, self._done, self._total = monotonic(), 0, 0

    def left_s(self, done: int, total: int) -> float | None:
        """Seconds to the end of the source; None at its start and end."""
        if done < self._done or total != self._total:
            self._start_s = monotonic()
        self._done, self._total = done, total
        return (monotonic() - self._start_s) * (total - done) / done if 0 < done < total else None


def prepare(args: argparse.Namespace, spec: Spec, folder: Path) -> PreparedFolder:
    """Prepare the data of a spec in the cache of `dsc train`. Raises DataError and OSError."""
    from compiler.emit.data_recipe import data_request
    from runtime.data.blended import prepare_shared
    from runtime.data.prepare import PHASES

    tell, noted, paces = progress("data"), set[str](), {phase: Pace() for phase in ("filter", "encode")}

    def show(phase: str, done: int, total: int) -> None:
        left_s = paces[phase].left_s(done, total) if phase in paces else None
        remaining = "" if left_s is None else f", {left_s:.0f} s left"
        tell(f"{PHASES[phase]} {100 * done // max(total, 1)}%{remaining}")

    def note(text: str) -> None:
        if text not in noted:
            noted.add(text)
            tell("")
            say(f"data: {printable(text)}")

    jobs = args.jobs or len(os.sched_getaffinity(0))
    cache = args.cache / "data" if args.cache else Path("build/.data")
    try:
        return prepare_shared(data_request(spec), folder, cache, show, note, jobs)
    finally:
        tell("")


def rows(prepared: PreparedFolder, phases: Sequence[Spec]) -> Iterator[SplitRow]:
    """The size of each source's splits, and how often the `phases` of the run read them."""
    data = phases[0].data
    sources: Mapping[str, Any] = prepared.meta.get("sources") or {"": prepared.meta["splits"]}
    for name in _names(data):
        for split, counts in sources[name].items():
            if not counts["documents"] and split != "train":
                continue
            epochs = None
            if split == "train" and data.chat is None and data.prompts is None and counts["tokens"]:
                epochs = _epochs_of(name, counts["tokens"], phases)
            documents, tokens, num_bytes = (counts[column] for column in COUNTS)
            yield SplitRow(name or f"{data.source}", split, documents, tokens, num_bytes, epochs)


def _names(data: Data) -> list[str]:
    """The source names in the order of the spec (meta.json sorts them); [""] if the source has no name."""
    return [source.name for source in data.sources] or [""]


def _filter_counts(prepared: PreparedFolder, data: Data) -> dict[str, Mapping[str, Any]]:
    """Counts of removed documents by source name. Sources without filters are absent."""
    filters = prepared.meta.get("filters", {})
    return {name: filters[name] for name in _names(data) if name in filters}


def _epochs_of(source: str, tokens: int, phases: Sequence[Spec]) -> float | None:
    """How often the phases read a source of `tokens` tokens; None if it is shorter than one sample."""
    from runtime.data.order import windows_in

    longest = _longest(phases)
    read = windows_in(tokens, longest) * longest
    return sum(_tokens_of(source, phase) for phase in phases) / read if read else None


def _longest(phases: Sequence[Spec]) -> int:
    """The longest sequence of a run. The text is cut into pieces of this length."""
    return max(phase.train.within.longest if phase.train.within else phase.train.sequence for phase in phases)


def unusable(prepared: PreparedFolder, phases: Sequence[Spec]) -> str:
    """Why `dsc train` would refuse the prepared data: a split is shorter than one sample. "" if it would not."""
    from runtime.contract import EXTRA_TOKENS
    from runtime.data.files import DataError
    from runtime.data.samples import RowSamples, short_split_error

    data, validating = phases[0].data, [phase.train.sequence for phase in phases if phase.train.validate]
    needed = {"train": _longest(phases)} | ({"validation": max(validating)} if validating else {})
    if data.prompts is not None:
        return ""
    if data.chat is None:
        return short_split_error(prepared.meta, {split: tokens + EXTRA_TOKENS for split, tokens in needed.items()})
    try:
        for split, sequence in needed.items():
            RowSamples(prepared.folder, split, sequence, seed=0, long=data.chat.long)
    except DataError as error:
        return str(error)
    return ""


def _tokens_of(source: str, phase: Spec) -> float:
    """Tokens of a source that a phase trains on. The source "" is all data."""
    weights = {entry.name: entry.weight for entry in phase.data.sources}
    return phase.train.tokens * (weights[source] / sum(weights.values()) if source else 1)


def document(prepared: PreparedFolder, phases: Sequence[Spec]) -> dict[str, Any]:
    """The JSON of docs/json.md."""
    data = phases[0].data
    source = f"{data.source}"
    return {
        "version": JSON_VERSION,
        "folder": str(prepared.folder),
        "reused": prepared.reused,
        "tokenizer": {name: prepared.meta["tokenizer"][name] for name in ("sha256", "vocab")},
        "sources": [vars(row) for row in rows(prepared, phases)],
        "skipped": dict(prepared.meta["skipped"]),
        "filters": [{"source": name or source, **facts} for name, facts in _filter_counts(prepared, data).items()],
    }


def text(prepared: PreparedFolder, phases: Sequence[Spec]) -> str:
    """A table with a line for each source and split."""
    from runtime.data.filters import summary_line

    splits = list(rows(prepared, phases))
    total = [sum(getattr(row, name) for row in splits) for name in COUNTS]
    cells = [["source", "split", *COUNTS, "epochs"]]
    cells += [
        [printable(row.source), row.split, *(f"{getattr(row, name):,}" for name in COUNTS), _epochs(row)]
        for row in splits
    ]
    cells += [["total", "", *(f"{count:,}" for count in total), ""]] if len(splits) > 1 else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    filtered = [
        f"{name}{name and ': '}{summary_line(facts)}"
        for name, facts in _filter_counts(prepared, phases[0].data).items()
    ]
    done = "already prepared" if prepared.reused else "prepared"
    return "\n".join([*lines, *filtered, f"{done}: {human(total[1])} tokens in {prepared.folder}"])


def _epochs(row: SplitRow) -> str:
    return "" if row.epochs is None else f"{row.epochs:.3g}" if row.epochs < 1000 else f"{row.epochs:,.0f}"


def show(args: argparse.Namespace, prepared: PreparedFolder, phases: Sequence[Spec]) -> None:
    """Print the prepared data. Warn of data that `dsc train` would refuse, and of data that is read too often."""
    if args.format == "json":
        print(json.dumps(document(prepared, phases), ensure_ascii=False, indent=2))
    else:
        print(text(prepared, phases))
    if reason := unusable(prepared, phases):
        say(f"warning: `dsc train` will refuse this data: {printable(reason)}")
    for row in rows(prepared, phases):
        if row.epochs is not None and row.epochs > MOST_EPOCHS:
            say(
                f"warning: {printable(row.source)} is read {row.epochs:,.1f} times; after {MOST_EPOCHS} epochs "
                "repeated text helps less and less (arXiv 2305.16264)\n = hint: train on fewer tokens, or add text"
            )
