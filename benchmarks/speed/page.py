"""Writes docs/performance.md from the unrounded results in benchmarks/results/speed."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.speed.contests import CONTESTS, PRECISIONS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "speed"  # one file per kind of processor
PAGE = ROOT / "docs" / "performance.md"
MB = 10**6
SHOWN = ("torch", "transformers")  # packages whose versions the page states
Kind = Literal["ratio", "share", "at most"]  # of a goal
HEAD = "| | layout | tokens/s | × theirs | a second of a core | core s for 1M tokens | of the limit | memory |"
RULE = "|---|---|--:|--:|--:|--:|--:|--:|"
LEFT_OUT = ("bench-8 fp32",)  # contests without a goal: only in the results


@dataclass(frozen=True)
class Goals:
    """The goals of a precision: for two ranks, for a pipeline of two ranks, and for one thread."""

    two_ranks: float  # × the best of theirs
    dualpipe: float  # × the best of theirs
    one_thread: float  # × the best of theirs on one thread, by processor time
    two_ranks_share: float  # of the limit
    one_thread_share: float  # of the limit


GOALS = {
    "FP32": ("bench-4 fp32", Goals(1.6, 1.2, 1.5, 0.75, 0.82)),
    "BF16": ("bench-4 bf16", Goals(2.4, 1.7, 2.2, 0.68, 0.72)),
}
DUALPIPE_SHARE = 0.95  # of the speed of data parallelism on as many ranks


@dataclass(frozen=True)
class Figures:
    """The medians over the rounds of a row."""

    row: Mapping[str, Any]
    tokens_per_s: float
    tokens_per_processor_s: float
    limit: float | None  # tokens per second of a core that only computes products; None if not measured

    @property
    def peak_bytes(self) -> int:
        return int(self.row["peak_bytes"])

    @property
    def share(self) -> float | None:
        """The speed by processor time, as a share of the limit."""
        return self.tokens_per_processor_s / self.limit if self.limit else None

    @property
    def one_thread(self) -> bool:
        return bool(self.row["processes"] * self.row["threads"] == 1)


def results() -> list[dict[str, Any]]:
    """The results for each kind of processor, the newest first."""
    documents = [json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    return sorted(documents, key=lambda document: str(document["date"]), reverse=True)


def file_of(processor: str) -> Path:
    """The file of results for a kind of processor: amd-epyc-family-25.json."""
    return RESULTS / ("-".join(re.findall("[a-z0-9]+", processor.lower())) + ".json")


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: the goals on each machine, and the tables of the newest."""
    newest = found[0]
    tables = (table(contest) for contest in newest["contests"] if contest["name"] not in LEFT_OUT)
    parts = (
        _head(found),
        _goals(found),
        f"The tables below are of {newest['processor']}.\n",
        *tables,
        _method(),
    )
    return "\n".join(parts)


def _head(found: Sequence[Mapping[str, Any]]) -> str:
    machines = "\n".join(map(_machine, found))
    return f"""# Speed

This page shows how fast dsc trains on CPUs beside what you could use instead: `transformers`, a model in plain PyTorch,
and torch's pipelining. All rows of a table do the same work, in turn, on one machine. `make bench` measures them in
some 20 minutes and writes this page. [performance-log.md](performance-log.md) lists what was tried to make dsc faster.
For GPUs, see [kernels.md](kernels.md); for `dsc compile`, [compile-speed.md](compile-speed.md).

Each goal compares dsc with the fastest alternative. The ratio depends on the processor:

{machines}
"""


def _machine(found: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {found['versions'][name]}" for name in SHOWN if name in found["versions"])
    rates = [rate for contest in found["contests"] if (rate := _core_rate(contest))]
    missing = sum(len(unmeasured(contest)) for contest in found["contests"])
    without = f"; {missing} rows not measured" if missing else ""
    return (
        f"- {found['processor']}, {found['cores']} cores, {found['memory_bytes'] / 2**30:.0f} GiB, products at "
        f"{' and '.join(f'{rate / 1e9:.0f}' for rate in rates[:2])} GFLOP/s per core\n  in FP32 and BF16; "
        f"{packages}; {found['rounds']} rounds, {found['date']}{without}"
    )


def unmeasured(contest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that this contest has now, and that its stored results lack."""
    stored = {row["name"] for row in contest["rows"]}
    now = [row for c in (*CONTESTS, PRECISIONS) if c.name == contest["name"] for row in c.rows]
    return [{**asdict(row), "failed": "not measured", "rounds": []} for row in now if row.name not in stored]


# ---------------------------------------------------------------- figures


def figures(contest: Mapping[str, Any]) -> dict[str, Figures]:
    """Figures of each complete row, by name of the row."""
    rows = {row["name"]: row for row in contest["rows"] if not row["failed"] and row["rounds"]}
    seconds = {name: [_median(row, column) for column in (0, 1)] for name, row in rows.items()}
    limit = None
    if "limit" in seconds:
        share = contest["product_flops"] / (contest["product_flops"] + contest["attention_flops"])
        limit = share * contest["tokens"] / seconds["limit"][1]
    return {
        name: Figures(rows[name], contest["tokens"] / clock, contest["tokens"] / processor, limit)
        for name, (clock, processor) in seconds.items()
        if rows[name]["group"] != "limit"
    }


def _median(row: Mapping[str, Any], column: int) -> float:
    """Seconds per step: wall-clock (0) or CPU time (1)."""
    return statistics.median(r[column] for r in row["rounds"]) / row["steps"]


def best(found: Iterable[Figures], group: str, one_thread: bool = False, holds: str = "") -> Figures | None:
    """The fastest row of a group by wall-clock time; with `one_thread`, the fastest one-thread row by CPU time.

    `holds`: words of its title."""
    rows = [
        f for f in found if f.row["group"] == group and holds in f.row["title"] and (not one_thread or f.one_thread)
    ]
    key: Callable[[Figures], float] = lambda f: f.tokens_per_processor_s if one_thread else f.tokens_per_s  # noqa: E731
    return max(rows, key=key, default=None)


# ---------------------------------------------------------------- a contest


def table(contest: Mapping[str, Any]) -> str:
    """A contest: every row, also those that failed."""
    if contest["precision"] == "each":
        return _precisions(contest)
    by_name = figures(contest)
    theirs = best(by_name.values(), "theirs")
    limit = next((f.limit for f in by_name.values()), None)
    lines = [f"## {contest['title']}\n", *([_of_limit(contest, limit), ""] if limit else []), HEAD, RULE]
    rows = [row for row in (*contest["rows"], *unmeasured(contest)) if row["group"] != "limit"]
    lines += [_line(row, by_name.get(row["name"]), theirs) for row in rows]
    return "\n".join([*lines, ""])


def _precisions(contest: Mapping[str, Any]) -> str:
    """One line per precision: one process by CPU time, and four ranks by wall-clock time."""
    by_name = figures(contest)
    names = [row["title"] for row in contest["rows"] if row["name"].endswith(" on 1")]
    lines = [
        f"## {contest['title']}\n",
        f"[{contest['spec']}](../{contest['spec']}), {contest['tokens']:,} tokens per step. × FP32: the ratio to the",
        "same layout in FP32. CPUs cannot multiply numbers of 8 or 4 bits, so they are widened to FP32 or BF16.\n",
        "| | one thread, a second of a core | × FP32 | 4 ranks, tokens/s | × FP32 | memory, one process |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in names:
        on_one, on_four = by_name.get(f"{name} on 1"), by_name.get(f"{name} on 4")
        row = next(row for row in contest["rows"] if row["name"] == f"{name} on 1")
        if on_one is None:
            lines.append(f"| `{name}` | {_cell(row['failed'].splitlines()[0] or 'no rounds')} | | | | |")
            continue
        cells = [
            f"{on_one.tokens_per_processor_s:,.0f}",
            _times(_ratio(on_one, by_name.get("fp32 on 1"), processor=True)),
            f"{on_four.tokens_per_s:,.0f}" if on_four else "",
            _times(_ratio(on_four, by_name.get("fp32 on 4"))),
            f"{on_one.peak_bytes / MB:,.0f} MB",
        ]
        lines.append(" | ".join([f"| `{name}`", *cells]) + " |")
    return "\n".join([*lines, ""])


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _core_rate(contest: Mapping[str, Any]) -> float:
    """FLOP/s of the products of a step on one thread; 0 if not measured."""
    limit = next((f.limit for f in figures(contest).values()), None) or 0.0
    return float(limit * (contest["product_flops"] + contest["attention_flops"]) / contest["tokens"])


def _of_limit(contest: Mapping[str, Any], limit: float) -> str:
    flops, rate = contest["product_flops"] + contest["attention_flops"], _core_rate(contest)
    return (
        f"[{contest['spec']}](../{contest['spec']}): {flops / 1e9:.1f} GFLOP a step of {contest['tokens']:,} tokens, "
        f"{contest['product_flops'] / 1e9:.1f} of them in\nproducts, which one thread does at "
        f"{rate / 1e9:.0f} GFLOP/s. Limit: {limit:,.0f} tokens/s per core."
    )


def _line(row: Mapping[str, Any], f: Figures | None, others: Figures | None) -> str:
    title = f"**dsc**, {row['title']}" if row["group"] == "ours" else row["title"]
    layout = f"{row['processes']} × {row['threads']}"
    if f is None:
        why = row["failed"].splitlines()[0] if row["failed"] else "no rounds"
        return f"| {title} | {layout} | {_cell(why)} | | | | | |"
    cells = [
        f"{f.tokens_per_s:,.0f}",
        f"{f.tokens_per_s / others.tokens_per_s:.2f}" if others else "",
        f"{f.tokens_per_processor_s:,.0f}",
        f"{1e6 / f.tokens_per_processor_s:,.0f}",
        "" if f.share is None else f"{f.share:.0%}",
        f"{f.peak_bytes / MB:,.0f} MB",
    ]
    return " | ".join([f"| {title}", layout, *cells]) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---------------------------------------------------------------- goals


Goal = tuple[str, float, float | None, Kind]  # (name, goal, measured value, kind)


def _goals(found: Sequence[Mapping[str, Any]]) -> str:
    """The table of goals and measured values on each machine."""
    rows = zip(*map(_goals_on, found), strict=True)
    head = "".join(f" {document['processor']} |" for document in found)
    return "\n".join([f"| | goal |{head}", "|---|--:|" + "--:|" * len(found), *map(_goal, rows), ""])


def _goals_on(found: Mapping[str, Any]) -> list[Goal]:
    contests = {contest["name"]: list(figures(contest).values()) for contest in found["contests"]}
    goals = [goal for words, (name, aims) in GOALS.items() for goal in _goals_of(contests.get(name, []), words, aims)]
    four = contests.get("bench-8 on 4", [])
    goals.append(
        ("4 ranks, against torch's pipelining", 1.5, _ratio(best(four, "ours"), best(four, "theirs")), "ratio")
    )
    return goals + _goals_of_precisions(next((c for c in found["contests"] if c["precision"] == "each"), None))


def _goals_of_precisions(contest: Mapping[str, Any] | None) -> list[Goal]:
    """Goals for `fp8_block` relative to FP32 on CPUs, which have no FP8 products."""
    by_name = figures(contest) if contest else {}
    on_one = _ratio(by_name.get("fp8_block on 1"), by_name.get("fp32 on 1"), processor=True)
    on_four = _ratio(by_name.get("fp8_block on 4"), by_name.get("fp32 on 4"))
    return [
        ("`fp8_block`, one thread, against FP32, by processor time", 0.4, on_one, "ratio"),
        ("`fp8_block`, 4 ranks, against FP32", 0.4, on_four, "ratio"),
    ]


def _goal(goals: Sequence[Goal]) -> str:
    """The row of a goal, with the value on each machine."""
    name, goal, _, kind = goals[0]
    sign, form = "≤" if kind == "at most" else "≥", ".0%" if kind == "share" else ".2f"
    return " | ".join([f"| {name}", f"{sign} {goal:{form}}", *(_reached(*entry, form) for entry in goals)]) + " |"


def _reached(_: str, goal: float, value: float | None, kind: Kind, form: str) -> str:
    """The value and whether it reaches the goal, before rounding."""
    if value is None:
        return "not measured"
    reached = value <= goal if kind == "at most" else value >= goal
    return f"{value:{form}}" if reached else f"{value:{form}}, not reached"


def _goals_of(found: Sequence[Figures], words: str, goals: Goals) -> list[Goal]:
    ours, theirs = best(found, "ours"), best(found, "theirs")
    alone, theirs_alone = best(found, "ours", one_thread=True), best(found, "theirs", one_thread=True)
    data, pipeline = best(found, "ours", holds="data parallel"), best(found, "ours", holds="DualPipe")
    memory = ours.peak_bytes / theirs.peak_bytes if ours and theirs else None
    return [
        (f"{words}, 2 ranks, against their best", goals.two_ranks, _ratio(ours, theirs), "ratio"),
        (f"{words}, 2 ranks, of the limit", goals.two_ranks_share, data.share if data else None, "share"),
        (f"{words}, DualPipe P = 2, against their best", goals.dualpipe, _ratio(pipeline, theirs), "ratio"),
        (f"{words}, DualPipe P = 2, against data parallel", DUALPIPE_SHARE, _ratio(pipeline, data), "ratio"),
        (
            f"{words}, one thread, by processor time",
            goals.one_thread,
            _ratio(alone, theirs_alone, processor=True),
            "ratio",
        ),
        (f"{words}, one thread, of the limit", goals.one_thread_share, alone.share if alone else None, "share"),
        (f"{words}, peak memory of the fastest, of theirs", 1.0, memory, "at most"),
    ]


def _ratio(ours: Figures | None, others: Figures | None, processor: bool = False) -> float | None:
    if ours is None or others is None:
        return None
    if processor:
        return ours.tokens_per_processor_s / others.tokens_per_processor_s
    return ours.tokens_per_s / others.tokens_per_s


# ---------------------------------------------------------------- how


def _method() -> str:
    return """## How it is measured

Columns:

- *layout*: processes × threads.
- *× theirs*: the ratio to the fastest row that is not dsc.
- *a second of a core*: tokens per second of processor time of all processes. Compare rows of one thread by it.
- *core s for 1M tokens*: seconds of processor time for a million tokens.
- *of the limit*: *a second of a core*, as a share of the limit: one thread that computes only the products of the step.
  These are dsc's own products; torch's reach about half of their speed in FP32
  ([products.txt](../benchmarks/results/products.txt)).
- *memory*: the peak of all processes of the row.

Method:

- Each row takes 4 steps to warm up. Then the rows take turns: A/B/C/A/B/C. Numbers are medians over rounds. The
  benchmark checks that no row used the processor outside its turns.
- A step includes everything: samples, forward, backward, clipping by the global norm, AdamW, reading the loss.
- All rows have the same initial weights, samples, batch (8 sequences of 256), recipe and first loss.
- The others run with their best options: attention by sdpa or eager, the batch in one part or two, AdamW fused or
  foreach.
- Plain PyTorch is the same architecture in as few lines as nanochat's, with a loop over the experts
  ([plain_model.py](../benchmarks/speed/plain_model.py)).

[benchmarks/results/speed](../benchmarks/results/speed) has all rounds, the options of each row, and 8 layers
in FP32 on 2 cores.
"""
