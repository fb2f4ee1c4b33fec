"""The table of contests, one row per contestant, and the commands of the contestants."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.speed.arena import Contestant

CORES = len(os.sched_getaffinity(0))
DUALPIPE = ("parallel.pipeline=2", "parallel.data=1", "schedule.name=dualpipe")
ON_4 = ("cluster.node.devices=4",)
PIPELINE_4 = (*ON_4, "parallel.pipeline=4", "parallel.data=1", "train.micro_batch=1")
DATA_4 = (*ON_4, "parallel.data=4", "train.micro_batch=2")
DUALPIPE_4 = (*ON_4, "parallel.pipeline=2", "parallel.data=2", "schedule.name=dualpipe", "train.micro_batch=1")
ALONE = ("cluster.node.devices=1", "parallel.data=1", "train.micro_batch=8")
QUICKSTART = (
    *("cluster.node.devices=1", "parallel.pipeline=1", "parallel.expert=1", "parallel.data=1"),
    "schedule.name=1f1b",
)
# Compiled rows use the default choice of attention, batch parts and AdamW: trying others would compile again.
COMPILED = ("--compile", "--choice", "{}")
PLAIN = ("--experts", "plain")


@dataclass(frozen=True)
class Row:
    """A contestant."""

    name: str
    title: str
    group: str  # ours, theirs or limit
    processes: int = 1
    threads: int = 1  # per process
    overrides: tuple[str, ...] = ()  # of the spec, for ours
    module: str = "ours"
    arguments: tuple[str, ...] = ()  # of the module
    quick: bool = False  # whether it takes part with --quick


@dataclass(frozen=True)
class Contest:
    """Rows that are interleaved in one arena, with a common spec and precision."""

    name: str
    title: str
    spec: str
    precision: str  # fp32, bf16, or "each" if rows have their own
    steps: int  # per round
    rows: tuple[Row, ...]
    start: tuple[str, ...] = ALONE  # overrides of the one-rank build with the initial weights of theirs


def ours(name: str, title: str, *overrides: str, processes: int = 1, quick: bool = False) -> Row:
    """dsc with a layout."""
    return Row(name, title, "ours", processes, 1, overrides, quick=quick)


def theirs(name: str, title: str, *arguments: str, processes: int = 1, threads: int = 1, quick: bool = False) -> Row:
    """`transformers`."""
    sizes = ("--threads", str(threads), "--ranks", str(processes))
    return Row(name, title, "theirs", processes, threads, (), "theirs", (*sizes, *arguments), quick)


def pipelining(schedule: str, title: str) -> Row:
    """torch.distributed.pipelining with the layers of `transformers`."""
    return Row(f"torch {schedule}", title, "theirs", 4, 1, (), "pipelining", ("--schedule", schedule))


def limit(dtype: str) -> Row:
    """The machine."""
    return Row(
        "limit", "the products of a step alone", "limit", module="limit", arguments=("--dtype", dtype), quick=True
    )


OF_TWO = (
    ours("dsc", "one process", *ALONE, quick=True),
    ours("dsc data 2", "data parallel over 2 processes", processes=2, quick=True),
    ours("dsc data 2 expert 2", "data 2 × expert 2", "parallel.expert=2", processes=2),
    ours("dsc dualpipe 4x2", "DualPipe P = 2, N = 4 of 2", *DUALPIPE, "train.micro_batch=2", processes=2),
    ours("dsc dualpipe 8x1", "DualPipe P = 2, N = 8 of 1", *DUALPIPE, "train.micro_batch=1", processes=2),
)
CONTESTS = (
    Contest(
        "bench-4 fp32",
        "4 layers, FP32",
        "specs/bench-4.dsc",
        "fp32",
        4,
        (
            limit("float32"),
            *OF_TWO,
            theirs("hf eager", "`transformers`, eager experts", "--experts", "eager", threads=CORES),
            theirs("hf grouped", "`transformers`, grouped_mm", threads=CORES, quick=True),
            theirs("hf compiled", "`transformers`, grouped_mm, torch.compile", *COMPILED, threads=CORES),
            theirs("hf ddp", "`transformers`, grouped_mm, DistributedDataParallel", processes=CORES),
            theirs("hf grouped 1", "`transformers`, grouped_mm", quick=True),
            theirs("hf compiled 1", "`transformers`, grouped_mm, torch.compile", *COMPILED),
            theirs("plain", "plain PyTorch", *PLAIN, threads=CORES, quick=True),
            theirs("plain compiled", "plain PyTorch, torch.compile", *PLAIN, *COMPILED, threads=CORES),
            theirs("plain 1", "plain PyTorch", *PLAIN),
            theirs("plain compiled 1", "plain PyTorch, torch.compile", *PLAIN, *COMPILED),
        ),
    ),
    Contest(
        "bench-4 bf16",
        "4 layers, BF16 compute, FP32 master weights",
        "specs/bench-4.dsc",
        "bf16",
        4,
        (
            limit("bfloat16"),
            *OF_TWO,
            theirs("hf autocast", "`transformers`, autocast", "--precision", "autocast", threads=CORES),
            theirs("hf bf16", "`transformers`, BF16 weights, FP32 master", "--precision", "bf16", threads=CORES),
            theirs(
                "hf bf16 compiled",
                "`transformers`, BF16 weights, FP32 master, torch.compile",
                *("--precision", "bf16", *COMPILED),
                threads=CORES,
            ),
            theirs("hf bf16 ddp", "`transformers`, BF16 weights, DDP", "--precision", "bf16", processes=CORES),
            theirs("hf autocast 1", "`transformers`, autocast", "--precision", "autocast"),
            theirs("hf bf16 1", "`transformers`, BF16 weights, FP32 master", "--precision", "bf16"),
            theirs(
                "hf bf16 compiled 1",
                "`transformers`, BF16 weights, FP32 master, torch.compile",
                *("--precision", "bf16", *COMPILED),
            ),
            *(
                theirs(f"plain {name}", f"plain PyTorch, {title}", *PLAIN, *arguments, threads=threads)
                for threads, last in ((CORES, ""), (1, " 1"))
                for name, title, arguments in (
                    (f"autocast{last}", "autocast", ("--precision", "autocast")),
                    (f"compiled{last}", "autocast, torch.compile", ("--precision", "autocast", *COMPILED)),
                )
            ),
        ),
    ),
    Contest(
        "bench-8 fp32",
        "8 layers, FP32",
        "specs/bench-8.dsc",
        "fp32",
        2,
        (
            limit("float32"),
            *(row for row in OF_TWO if row.name in ("dsc", "dsc data 2", "dsc dualpipe 4x2")),
            theirs("hf grouped", "`transformers`, grouped_mm", threads=CORES),
            theirs("hf compiled", "`transformers`, grouped_mm, torch.compile", *COMPILED, threads=CORES),
            theirs("hf grouped 1", "`transformers`, grouped_mm"),
        ),
    ),
    Contest(
        "bench-8 on 4",
        "8 layers, FP32, 4 processes of one thread",
        "specs/bench-8.dsc",
        "fp32",
        2,
        (
            limit("float32"),
            ours("dsc dualpipev", "DualPipeV P = 4, N = 8 of 1", *PIPELINE_4, "schedule.name=dualpipev", processes=4),
            ours("dsc 1f1b", "1F1B P = 4, N = 8 of 1", *PIPELINE_4, "schedule.name=1f1b", processes=4),
            ours("dsc dualpipe data 2", "DualPipe P = 2, N = 4 of 1, data 2", *DUALPIPE_4, processes=4),
            ours("dsc data 4", "data parallel over 4 processes", *DATA_4, processes=4),
            pipelining("dualpipev", "torch ScheduleDualPipeV, N = 8 of 1"),
            pipelining("1f1b", "torch Schedule1F1B, N = 8 of 1"),
            pipelining("interleaved1f1b", "torch ScheduleInterleaved1F1B, N = 8 of 1"),
        ),
    ),
)
PRECISIONS = Contest(
    "precisions",
    "Precisions",
    "specs/quickstart.dsc",
    "each",
    1,
    (
        *(ours(f"{p} on 1", p, *QUICKSTART, f"precision={p}") for p in ("fp32", "bf16", "fp8_block", "mxfp8", "nvfp4")),
        *(ours(f"{p} on 4", p, f"precision={p}", processes=4) for p in ("fp32", "bf16", "fp8_block")),
    ),
    QUICKSTART,
)


def chosen(quick: bool, only: Iterable[str]) -> list[Contest]:
    """The contests whose names contain a word of `only` (or all). With `quick`: the first, with its quick rows."""
    words = tuple(only)
    named = [contest for contest in (*CONTESTS, PRECISIONS) if not words or any(word in contest.name for word in words)]
    if not quick:
        return named
    first = named[0] if words else CONTESTS[0]
    return [replace(first, rows=tuple(row for row in first.rows if row.quick) or first.rows)]


def contestant(contest: Contest, row: Row, build: Path, corpus: Path, work: Path) -> Contestant:
    """The contestant of a row. `build`: its own, or for theirs the one with the initial weights and the recipe."""
    inputs: Sequence[str] = (contest.spec,) if row.group == "limit" else (str(build), str(corpus))
    command = (sys.executable, "-m", f"benchmarks.speed.{row.module}", *inputs, *row.arguments)
    environment = {
        "OMP_NUM_THREADS": str(row.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),  # a second run need not compile
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no process pool besides the contestant
    }
    return Contestant(row.name, command, contest.steps, environment)


def builds_of(contest: Contest) -> dict[str, tuple[str, ...]]:
    """Overrides of the spec for the build of each row of ours, and for `start`, the build with theirs' initial
    weights."""
    precision = () if contest.precision in ("fp32", "each") else (f"precision={contest.precision}",)
    rows = {row.name: (*row.overrides, *precision) for row in contest.rows if row.group == "ours"}
    return {"start": contest.start, **rows}
