"""Writes docs/kernels.md from stored results: measurements by GPU, and the machine code of kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import queue
from benchmarks.gpu.cases import CASES, Case, Goal
from benchmarks.gpu.sizes import V3, Make
from benchmarks.side_by_side import kept, section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FACTS = RESULTS / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
DEVICES = ("h200", "h100")  # devices whose results are shown, if there are any
NOT = "not measured"
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
    facts = json.loads(FACTS.read_text("utf-8")) if FACTS.exists() else {"triton": "", "cases": {}}
    return page(measured, facts)


def page(measured: Sequence[Found], facts: Found) -> str:
    """The whole page."""
    tables = [section for found in measured for section in of_device(found)] or [nothing_measured()]
    return "\n".join([HEAD, *tables, code(facts), queue.section(), section(*kept()), HOW])


# ---------------------------------------------------------------- measured


def of_device(found: Found) -> list[str]:
    parts = found["parts"]
    return [
        _about(found),
        times(parts.get("timing", {}).get("rows", []), parts.get("checks", {}).get("rows", [])),
        _left_out(parts),
        training(parts.get("alone"), parts.get("shared")),
        split(parts.get("split", {}).get("rows", [])),
        bounds(parts.get("bounds", {})),
    ]


def nothing_measured() -> str:
    return f"## On a GPU\n\nNo GPU has run these yet. `make gpu` writes its results here.\n\n{times([], [])}"


def _about(found: Found) -> str:
    limits = _limits(found["parts"].get("timing", {}).get("rows", []))
    said = (
        f"copy {limits['copy'] / 1e12:.2f} TB/s, BF16 products {limits['bf16'] / 1e12:.0f} TFLOPS, "
        f"E4M3 {limits['fp8'] / 1e12:.0f}"
        if limits
        else NOT
    )
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "cuda", "python") if name in found)
    facts = f"{found['sms']} SMs; {versions}; {found['date']}. Its limits, in the same run: {said}."
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


def training(alone: Found | None, shared: Found | None) -> str:
    """Tokens per second, and the distance of losses from the CPU's."""
    lines = [
        "| the quickstart in BF16 | tokens/s | the CPU's | steps | first loss | last loss | apart from the CPU's |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for words, run in (("one rank", alone), ("four ranks on the one GPU", shared)):
        if not run or not run.get("device", {}).get("losses"):
            lines.append(f"| {words} | {NOT} | | | | | |")
            continue
        ours, cpu = run["device"], run["cpu"]
        cells = [
            f"{ours['tokens_per_s']:,.0f}",
            f"{cpu['tokens_per_s']:,.0f}" if cpu["tokens_per_s"] else NOT,
            str(len(ours["losses"])),
            f"{ours['losses'][0]:.4f}",
            f"{ours['losses'][-1]:.4f}",
            f"{run['apart']:.4f}" if run["apart"] is not None else NOT,
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
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
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    failures = "\n".join(f"- {_cell(line)}" for line in part.get("failures", ())[:10])
    return f"The interpreter's checks on this device, within their bounds: {said}.\n{failures}\n"


# ---------------------------------------------------------------- compiled


def code(facts: Found) -> str:
    """One row per launch with the resources of its machine code. Equal launches of a kernel share a row."""
    by = (
        f"For sm_90 by Triton {facts['triton']}, for one rank of DeepSeek-V3 with 64 expert ranks; the gate reads "
        "the code without a GPU. Sizes\nare those of the arguments. `× 16`: one call launches the kernel 16 times. "
        "*programs an SM*: how many fit on an SM at\nthe same time; *load*: the widest load of a thread; *idle*: "
        "instructions of a warp in a round of the innermost\nloop while no product runs."
    )
    head = f"## Machine code\n\n{by}\n"
    lines = ["| kernel | arguments | launch | registers | shared | programs an SM | load | idle | instructions |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|---|")
    for case in CASES:
        rows = Counter(" | ".join(_launch(row)) for row in facts["cases"].get(case.name, {}).get("launches", ()))
        for i, (row, times) in enumerate((rows or {NO_KERNEL: 1}).items()):
            first = (case.name, arguments(case)) if i == 0 else ("", "")
            kernel, rest = row.split(" | ", 1)
            lines.append(f"| {first[0]} | {first[1]} | {kernel}{f' × {times}' if times > 1 else ''} | {rest} |")
    return "\n".join([head, *lines, ""])


def _launch(row: Found) -> list[str]:
    said = ", ".join(row["instructions"]) + (" **" + "; ".join(row["failures"]) + "**" if row["failures"] else "")
    numbers = (row["registers"], f"{row['shared_bytes']:,}", row["programs"], f"{row['load_bytes']} B", row["idle"])
    return [f"`{row['kernel']}`", *map(str, numbers), said]


def arguments(case: Case) -> str:
    """The tensors of a case, such as `bf16[4096, 7168]`."""
    arguments = case.arguments(V3, Make(case.dtypes[0], "meta"))
    tensors = (_of_tensor(value) for value in arguments if isinstance(value, Tensor))
    return " ".join(tensors)


def _of_tensor(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{SHORT[dtype]}{list(tensor.shape)}"


# ---------------------------------------------------------------- text

HEAD = """# Kernels

A build holds Triton text, which CUDA ranks run. On the CPU the same build runs the ops that the kernels stand for.
`python -m benchmarks.gpu --page` writes this page from [benchmarks/results](../benchmarks/results); `make gpu`
measures the times.

A fused op is defined as the composition of the ops that it replaces, and rounds where they round. Every run fuses
these:

- a norm with the residual's addition before it, and the gradient of a norm with the addition around it
  (`residual_norm`);
- the router with its histogram, the permutation and the copy of the rows, and the permutation's gradient with the one
  or two additions after it (`route`); the reverse permutation with both additions (`join`);
- the gradient of a block's norm with the sum that it is the gradient of, which may be that of a permutation, and with
  the norm itself where the backward computes it again for the weight gradients alone (`norm_gradient`): each row is
  read once for all of these;
- gate weights within SwiGLU; RoPE with attention, and the softmax with both products; AdamW with the rounded copy in
  BF16.

Only with `recompute = [logits]`, the head's product is fused with the cross entropy, and no tensor of all logits
exists. The backward computes the logits again, so a run chooses between memory and time.

Recipes with FP8 ([precision.md](precision.md)) also fuse (`quantise`):
norms and SwiGLU with the quantising of their result, in both directions if a weight gradient reads columns; SwiGLU of
an input that was kept in E4M3; copies of gradients with their quantising; products of E4M3 with their scales,
promoted every 128. Latent attention whose heads are a tile of 128 columns wide quantises what it returns, for the
product behind it and for the backward; its gradient reads that in E5M6, and quantises the gradients of keys and values
in both directions if sequences are whole tiles, too. The rows below with `quantise` or `fp8` in their names belong to
these recipes. Their kernels are checked and compiled like the others.

`unfused = [residual_norm, join]` in a run does not fuse the ops of these names. Use it for a comparison, or to look
for an error. `kernels.json` of a build says which ops have which kernel, and what was fused
([json.md](json.md#dsc-inspect---kernels)). `dsc inspect BUILD --kernels` shows this, with the bytes that fusion
saves. An op without a kernel, such as `linear` in BF16, runs on torch; the reason is listed with it. So do all ops of
several residual streams (`hyper_connections`): each is a pass over the streams, with a small matrix of each token.
`dsc plan` times them as passes, one for each op. Fused, the mixing in front of a part would read the streams once,
where it reads them twice, and in the backward four times.
Compressed attention is on torch as well: the scores of a few queries at a time, with chosen entries gathered for each.
Where a layer of it has a window alone, its heads of 512 columns are wider than the kernels of attention with a window
take, and torch computes a few positions at a time. `rotate` has its kernel for entries, and for turning back.

Attention with a window visits only blocks of keys that some query of a block sees; its time grows with the sequence
times the window. A softcap and sinks are options of the same text. Heads of grouped queries may be 256 columns wide
in BF16, others 128. Activations beside SwiGLU have kernels of their own, in BF16 and FP32: FP8 recipes
quantise their results in a second pass.

Where sequences hold several documents that are kept apart ([ADR 28](adr/0028-documents-are-starts.md)), attention and
rotation have the same text with one option more. A block of queries visits keys from the first document of its first
row on, a block of keys queries up to the end of the document of its last. Tiles are dealt to programs as if each
sequence were one document, since only the device knows where documents begin. With short ones programs that are done
draw what is left ([ADR 25](adr/0025-programs-draw-their-tiles.md)).

Attention of a context rank has queries of some rows of each sequence, whose positions are loaded, and keys of all
([ADR 34](adr/0034-context-ranks-put-keys-together.md)). Its kernels load for each query the first key and the last that
it sees, which is all that documents and windows say, and for each key the range of queries that see it. So one text
serves every rank, with documents and without.

Linear attention has no kernels yet: the delta rule, the short convolution, decays and output gates run on torch on
every device ([ADR 62](adr/0062-one-kind-of-linear-attention.md)). The delta rule is a batch of products for all chunks,
and a loop over chunks. What a kernel would save is the traffic of decayed keys and scores between these products,
several times the bytes of the arguments. `dsc plan` takes the rates of attention for it on devices without a row of its
own, and says so.

Sparse attention has no kernels yet: the choice of keys (`select_keys`), attention over them (`chosen_attention`) and
the loss of the indexer (`indexer_loss`) run on torch on every device ([ADR
64](adr/0064-an-indexer-is-trained-by-its-own-loss.md)). They compute the scores of all keys, block by block, so that
scores of whole sequences never exist at once. Their times in a plan are those of kernels that compute the chosen keys
alone: on a GPU they take longer than `dsc plan` says.

Where a run clips logits ([ADR 63](adr/0063-attention-gives-its-largest-logits.md)), the forward also writes the largest
logit of each tile, one number, which it has anyway as that from which weights are made (`mla_attention_peaks` and its
likes). Behind a softcap that number has lost digits, and with sinks one of them may be larger: there the op runs on
torch, block by block.
"""

HOW = """## How a kernel is known to be right without a GPU

- Its text runs in Triton's interpreter and is compared with its op in FP64 on the same numbers, within bounds that
  follow from the number of roundings ([tests/compiler/emit/kernels](../tests/compiler/emit/kernels)). BF16 and E4M3
  round there as hardware rounds. The test fails if two programs touch one address, if a program reads outside the
  tensors, or if a second run gives other bits. What a load leaves undefined outside of its mask is NaN.
- It is compiled for sm_90, sm_100, sm_80 and gfx942, and the machine code is read. The check demands: no spills; the
  intended tensor core instructions and no others; tiles copied by the memory accelerator; streams that bypass the
  cache; no more shared memory than a block has ([gate.py](../tests/compiler/emit/kernels/gate.py)). `make kernels`, run
  before a release, does this for every launch of every shipped spec on two versions of Triton. It takes 40 minutes on
  two cores; when run again, it compiles only what changed.
- The runtime's part (which tensor is made on which device, what is copied when) runs on a simulated device
  ([tests/gpu](../tests/gpu)), and gives the CPU's numbers to the bit. Ranks that share a device communicate through
  the host.

On a GPU, `make gpu` repeats all checks. It runs every kernel at odd sizes, at even sizes and at those of *machine
code*, each twice, the second time into memory full of NaN. Times are of the sizes of *machine code*. *error* is the
largest error of these runs, as a share of what rounding allows. *× others* is the time of others over ours: *torch*
is the op itself in eager torch, *written in torch* is what a user would write, *compiled* is that under
torch.compile. Libraries get rows that are already sorted and heads that are already rotated. Times are medians of
three rounds in turn, with L2 flushed and random numbers. Short calls, theirs and ours, are replayed from a graph if
that is faster. *of the limit* is relative to moving each argument and result once at the speed of a copy, or to the
products at the speed of cuBLAS.

For a machine without the compiler's packages, run `python -m benchmarks.gpu --builds` on another machine first, and
copy build/gpu from there.

## To add one

1. The op in [runtime/ops](../runtime/ops), in torch. It is the definition; a fused op calls the ops that it replaces.
2. `compiler/emit/kernels/<name>.py`: when the kernel applies, its launch, and rows of `OPS`, by op. `<name>.py.j2`: its
   text. `STREAMS` names what the kernel streams, and the gate checks it.
3. `tests/compiler/emit/kernels/checks_<name>.py`, with the bound of each result, and `test_<name>.py`.
4. A case with its goal in [cases.py](../benchmarks/gpu/cases.py); then run `python -m benchmarks.gpu --facts`.

Tests fail if one of these is missing.
"""
