"""Writes docs/kernels.md from stored results: measurements by GPU, and the machine code of kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import CASES, Case, Goal
from benchmarks.gpu.sizes import V3, Make
from benchmarks.side_by_side import kept, section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FACTS = RESULTS / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
TEXT = Path(__file__).parent / "kernels.md"  # the head of the page; links are relative to the page
DEVICES = ("h200", "h100")  # devices whose results are shown, if there are any
NOT = "not measured"
TRAINED = {"alone": "one rank, BF16", "fp8": "one rank, FP8", "shared": "four ranks on the one GPU"}  # by part
FAMILIES = (
    FP8_PRODUCTS,
    BF16_PRODUCTS,
    STREAM_PRODUCTS,
    HEAD_PRODUCTS,
    ATTENTION,
    ATTENTION_GRADIENTS,
    INDEXER,
    OTHERS,
) = (
    "FP8 products",
    "grouped BF16 products",
    "products of residual streams",
    "the head with the cross entropy",
    "attention, forward",
    "attention, backward",
    "the indexer of sparse attention",
    "all without tensor cores",
)
NO_KERNEL = "no kernel |  |  |  |  |  | "
SHORT = {
    **{"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"},
    **{"int64": "i64", "int32": "i32", "uint8": "u8"},
}
Found = Mapping[str, Any]


def current() -> str:
    """The page from the stored results."""
    measured = [
        json.loads(path.read_text("utf-8")) for path in (RESULTS / f"{d}.json" for d in DEVICES) if path.exists()
    ]
    return page(measured, compiled())


def compiled() -> Found:
    """Read the machine-code figures that `--facts` wrote."""
    document: Found = json.loads(FACTS.read_text("utf-8")) if FACTS.exists() else {"triton": "", "cases": {}}
    return document


def page(measured: Sequence[Found], facts: Found) -> str:
    """The whole page."""
    tables = [section for results in measured for section in of_device(results)] or [nothing_measured()]
    return "\n".join([TEXT.read_text("utf-8"), *tables, code(facts), section(kept()[0])])


# ---------------------------------------------------------------- measured


def of_device(found: Found) -> list[str]:
    parts = found["parts"]
    return [
        _about(found),
        times(parts.get("timing", {}).get("rows", []), parts.get("checks", {}).get("rows", [])),
        _left_out(parts),
        training({name: parts.get(name, {}) for name in TRAINED}),
        gaps(parts.get("gaps", {}).get("rows", [])),
        nccl(parts.get("nccl", {}).get("rows", [])),
        split(parts.get("split", {}).get("rows", [])),
        bounds(parts.get("bounds", {})),
    ]


def nothing_measured() -> str:
    text = "No GPU has run these yet. `make gpu` writes its results here. The goals are those of an H200:"
    return f"## On a GPU\n\n{text}\n\n{goals()}"


def goals() -> str:
    """A row for each goal: how many kernels have it, and three of them."""
    by_goal: dict[str, list[str]] = {}
    for case in CASES:
        by_goal.setdefault(str(case.goal), []).append(case.name)
    lines = ["| goal | kernels | such as |", "|---|--:|---|"]
    for goal, names in by_goal.items():
        lines.append(f"| {goal} | {len(names)} | {', '.join(f'`{name}`' for name in names[:2])} |")
    return "\n".join([*lines, ""])


def _about(found: Found) -> str:
    limits = _limits(found["parts"].get("timing", {}).get("rows", []))
    rates = (
        f"copy {limits['copy'] / 1e12:.2f} TB/s, BF16 products {limits['bf16'] / 1e12:.0f} TFLOPS, "
        f"E4M3 {limits['fp8'] / 1e12:.0f}"
        if limits
        else NOT
    )
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "cuda", "python") if name in found)
    facts = f"{found['sms']} SMs; {versions}; {found['date']}. Its limits, in the same run: {rates}."
    return f"## {found['device']}\n\n{facts}\n"


def _limits(rows: Iterable[Found]) -> Found | None:
    return next((row for row in rows if row.get("kind") == "limits" and "copy" in row), None)


def times(rows: Sequence[Found], checked: Sequence[Found]) -> str:
    """One row per case: its time, its share of the limit, its goal, and the ratio of others' times to it."""
    limits = _limits(rows)
    lines = ["| kernel | time | of the limit | goal | reached | × others | error |", "|---|--:|--:|---|---|---|--:|"]
    for case in CASES:
        mine = [row for row in rows if row.get("name") == case.name]
        lines.append(_line(case, mine, limits, [row for row in checked if row["name"] == case.name]))
    return "\n".join([*lines, ""])


def _line(case: Case, rows: Sequence[Found], limits: Found | None, checked: Sequence[Found]) -> str:
    timed = next((row for row in rows if row["kind"] == "libraries" and "ours" in row.get("seconds", {})), None)
    if timed is None:
        why = next((row.get("failed") or row.get("left_out") for row in rows), None)
        return f"| {case.name} | {_cell(why or NOT)} | | {case.goal} | | | {_error(checked)} |"
    ours = timed["seconds"]["ours"]
    limit = floor(timed, limits)
    ratios = {
        name: seconds / row["seconds"]["ours"]
        for row in rows
        if "ours" in row.get("seconds", {})
        for name, seconds in row["seconds"].items()
        if name != "ours"
    }
    cells = [
        f"{ours * 1e6:,.1f} µs",
        f"{limit / ours:.0%}" if limit else "",
        str(case.goal),
        {True: "yes", False: "no", None: ""}[reached(case.goal, ours, limit, timed["flops"], ratios)],
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
        _error(checked),
    ]
    return f"| {case.name} | " + " | ".join(cells) + " |"


def floor(timed: Found, limits: Found | None) -> float | None:
    """Seconds for the work at the machine's limits."""
    if limits is None:
        return None
    moving = timed["bytes"] / limits["copy"]
    return max(moving, timed["flops"] / limits[timed["rate"]]) if timed["flops"] else moving


def reached(
    goal: Goal, seconds: float, limit: float | None, flops: int | None, ratios: Mapping[str, float]
) -> bool | None:
    """Whether the goal is reached; None if unknown."""
    if goal.kind == "share":
        return None if limit is None else limit / seconds >= goal.value
    if goal.kind == "TFLOPS":
        return None if flops is None else flops / seconds / 1e12 >= goal.value
    if goal.kind == "µs":
        return seconds * 1e6 <= goal.value
    return ratios[goal.peer] >= goal.value if goal.peer in ratios else None


def _error(checked: Sequence[Found]) -> str:
    """The largest error over all sizes and dtypes, as a share of the allowed error."""
    if wrong := [row for row in checked if "failed" in row]:
        return f"**{len(wrong)} failed**"
    errors = [row["error"] for row in checked if "error" in row]
    return f"{max(errors):.2f}" if errors else ""


def _left_out(parts: Mapping[str, Found]) -> str:
    lines = []
    for name, part in parts.items():
        if why := part.get("left_out") or part.get("failed"):
            lines.append(f"- {name}: {_cell(why)}")
        for row in part.get("rows", []):
            if why := row.get("failed"):
                sizes = " ".join(str(row[key]) for key in ("name", "kind", "dtype", "sizes") if key in row)
                lines.append(f"- {name}, {sizes}: {_cell(why)}")
    return "\n".join(["Left out, or failed:\n", *lines, ""]) if lines else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:160]


def training(runs: Mapping[str, Found]) -> str:
    lines = ["| the quickstart on | tokens/s | on the CPU | steps | first loss | last loss | apart | memory, GiB |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, run in runs.items():
        if not run.get("device", {}).get("losses"):
            lines.append(f"| {TRAINED[name]} | {NOT} | | | | | | |")
            continue
        ours, cpu = run["device"], run["cpu"]
        memory = [run.get("planned_bytes"), ours.get("memory_bytes"), ours.get("reserved_bytes")]
        cells = [
            f"{ours['tokens_per_s']:,.0f}",
            f"{cpu['tokens_per_s']:,.0f}" if cpu["tokens_per_s"] else NOT,
            str(len(ours["losses"])),
            f"{ours['losses'][0]:.4f}",
            f"{ours['losses'][-1]:.4f}",
            f"{run['apart']:.4f}" if run["apart"] is not None else NOT,
            ", ".join("?" if amount is None else f"{amount / 2**30:.2f}" for amount in memory),
        ]
        lines.append(f"| {TRAINED[name]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Memory: planned, of tensors, reserved by the allocator.", ""])


WITH = {"graphs": " with CUDA graphs"}  # by name of a build


def gaps(rows: Sequence[Found]) -> str:
    """The share of a step in which a kernel runs."""
    return "\n".join(
        f"In a step of the quickstart{WITH.get(row['name'], '')} a kernel runs for {row['busy']:.0%} of "
        f"{row['step_ms']:.1f} ms: "
        f"{row['kernels']:,} kernels, the longest gap {row['longest_gap_us']:,.0f} µs.\n"
        for row in rows
        if "busy" in row
    )


def nccl(rows: Sequence[Found]) -> str:
    """Times of NCCL's operations on one rank, by the thread blocks that it may use."""
    if not rows:
        return ""
    lines = ["| NCCL on one rank | thread blocks | time |", "|---|--:|--:|"]
    for row in rows:
        outcome = f"{row['seconds'] * 1e6:,.0f} µs" if "seconds" in row else _cell(row.get("failed", NOT))
        lines.append(f"| {row['name']} | {row['ctas'] or 'default'} | {outcome} |")
    return "\n".join([*lines, ""])


def split(rows: Sequence[Found]) -> str:
    """Overlap efficiency: the time of the longer of the two alone, divided by the time of both together."""
    lines = ["| a product and a copy on | product | copy | in turn | two streams | green contexts | efficiency |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        if "product_s" not in row:
            continue
        longer = max(row["product_s"], row["copy_s"])
        green = row.get("green_contexts_s")
        cells = [f"{row[key] * 1e6:,.0f} µs" for key in ("product_s", "copy_s", "serial_s", "two_streams_s")]
        cells += [f"{green * 1e6:,.0f} µs" if green else _cell(row.get("no_green_contexts", ""))]
        efficiency = f"{longer / row['two_streams_s']:.2f}"
        if green:
            efficiency += f"; {max(row['green_product_s'], row['green_copy_s']) / green:.2f} in green contexts"
        lines.append(f"| {row['name']} | " + " | ".join([*cells, efficiency]) + " |")
    return "\n".join([*lines, ""]) if len(lines) > 2 else ""


def bounds(part: Found) -> str:
    counts = part.get("counts")
    if not counts:
        return ""
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    failures = "\n".join(f"- {_cell(line)}" for line in part.get("failures", ())[:10])
    return f"The interpreter's checks on this device, within their bounds: {summary}.\n{failures}\n"


# ---------------------------------------------------------------- compiled


def code(facts: Found) -> str:
    """The table of registers, shared memory and idle instructions, one row for each family of kernels."""
    intro = (
        f"For sm_90 by Triton {facts['triton']}, at the sizes of one rank of DeepSeek-V3 with 64 expert ranks. "
        "A thread has at most 255\nregisters and an SM 227 KiB of shared memory. *programs an SM*: how many fit at the "
        "same time. *idle*: instructions\nof a warp in a round of the innermost loop while no product runs. No kernel "
        "spills. `python -m benchmarks.gpu --code`\nprints each launch with its arguments."
    )
    head = f"## Machine code\n\n{intro}\n"
    lines = ["| kernels | launches | registers | shared KiB | programs an SM | idle |", "|---|--:|--:|--:|--:|--:|"]
    for name, rows in families(facts).items():
        spans = [
            _span([row["registers"] for row in rows]),
            _span([row["shared_bytes"] // 1024 for row in rows]),
            _span([row["programs"] for row in rows]),
            _span([row["idle"] for row in rows]),
        ]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(spans)} |")
    return "\n".join([head, *lines, ""])


def families(facts: Found) -> dict[str, list[Found]]:
    """Launches by family: those on tensor cores by what they compute, and all others."""
    by_family: dict[str, list[Found]] = {}
    for name, case in facts["cases"].items():
        for row in case["launches"]:
            by_family.setdefault(_family(name, row["instructions"]), []).append(row)
    return {name: by_family[name] for name in FAMILIES if name in by_family}


def _family(name: str, instructions: Sequence[str]) -> str:
    if not instructions:
        return OTHERS
    if "attention" in name:
        return ATTENTION_GRADIENTS if "_dgrad" in name else ATTENTION
    if name.startswith("linear_cross_entropy"):
        return HEAD_PRODUCTS
    if name.startswith(("select_keys", "indexer_loss")):
        return INDEXER
    if name.startswith("hyper_products"):
        return STREAM_PRODUCTS
    return FP8_PRODUCTS if "QGMMA" in instructions else BF16_PRODUCTS


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}–{max(numbers)}" if min(numbers) < max(numbers) else str(min(numbers))


def launches(facts: Found) -> str:
    """A row for each launch: registers, shared memory and instructions. Equal launches of a kernel share a row."""
    lines = ["| kernel | arguments | launch | registers | shared | programs an SM | load | idle | instructions |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|---|")
    for case in CASES:
        rows = Counter(" | ".join(_launch(row)) for row in facts["cases"].get(case.name, {}).get("launches", ()))
        for i, (row, times) in enumerate((rows or {NO_KERNEL: 1}).items()):
            first = (case.name, arguments(case)) if i == 0 else ("", "")
            kernel, cells = row.split(" | ", 1)
            lines.append(f"| {first[0]} | {first[1]} | {kernel}{f' × {times}' if times > 1 else ''} | {cells} |")
    return "\n".join([*lines, ""])


def _launch(row: Found) -> list[str]:
    instructions = ", ".join(row["instructions"]) + (
        " **" + "; ".join(row["failures"]) + "**" if row["failures"] else ""
    )
    numbers = (row["registers"], f"{row['shared_bytes']:,}", row["programs"], f"{row['load_bytes']} B", row["idle"])
    return [f"`{row['kernel']}`", *map(str, numbers), instructions]


def arguments(case: Case) -> str:
    """The tensors of a case, such as `bf16[4096, 7168]`."""
    arguments = case.arguments(V3, Make(case.dtypes[0], "meta"))
    tensors = (_of_tensor(value) for value in arguments if isinstance(value, Tensor))
    return " ".join(tensors)


def _of_tensor(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{SHORT[dtype]}{list(tensor.shape)}"
