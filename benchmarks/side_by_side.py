"""Find pairs of calls that touch the same values, so that a fused kernel would move fewer bytes.

    python -m benchmarks.side_by_side [SPEC] [--least 1.0] [--out benchmarks/results/side-by-side.json]

A pair is two calls in F, I or W of one segment. Fused, a value that both read would be read once less; a value that the
first computes for the second would be read once less, and not written if no other call needs it. Bytes are those of a
micro-batch through the whole model, forward and backward, with an even load of the experts. Parameters do not count.

Two calls stand *beside* each other; or there is a call *between* them, which needs the first and feeds the second, so
that they cannot be fused; or they are *apart*, the first in I and the second in W, which run at different times.
docs/kernels.md has the result for DeepSeek-V3, with the reasons in `WHY`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill

from compiler.ir import Segment
from compiler.ir.dtypes import has_rows, tensor_bytes
from compiler.model.segments.fuse import depends_through_others
from compiler.model.segments.interpret import interpret
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import phases, view_nodes
from compiler.model.segments.unpack import unpack_tensors

ROOT = Path(__file__).parent.parent
V3 = ROOT / "specs" / "deepseek-v3.dsc"
RESULTS = ROOT / "benchmarks" / "results" / "side-by-side.json"
ATTENTION = ("mla_attention", "gqa_attention")
SHOWN_GB = 5  # of all pairs of a reason, for docs/kernels.md
PRODUCTS = ("linear", "grouped_linear")

# Why pairs are not fused, by `Pair.reason`.
WHY = {
    "operand of a product": (
        "A product reads each tile of its operands up to 56 times. A fused kernel would repeat the norm or the "
        "quantisation as often."
    ),
    "result of a product": (
        "A program of a product has 128 rows and 128 or 192 columns of the result. A norm needs whole rows, SwiGLU "
        "columns that lie N / 2 apart, attention all keys of a sequence. E4M3 products take 189 to 236 of 255 "
        "registers: a tile to be quantised has no room."
    ),
    "two products": "Both read the same rows, 29 MB or less; the second product finds most of them in L2.",
    "attention": "A program for two heads of queries has too few registers: one head takes 213.",
    "norm's gradient by columns": "Quantisation by columns needs 128 rows of 1,536 columns: 384 KiB of an SM's 256.",
    "logits": "`recompute = [logits]` makes one kernel of the head and the cross entropy.",
    "between": "Another call needs the first one's result, and the second needs that call's.",
    "apart": "The first is in I, the second in W, which may run much later ([ADR 4](adr/0004-w-reads-no-weights.md)).",
}


@dataclass(frozen=True, order=True)
class Pair:
    """Two ops in a kind of segment."""

    segment: str
    functions: str  # the functions that they are in: `F`, or `I W`
    first: str
    second: str
    stand: str  # beside, between or apart
    bytes: int  # shared

    @property
    def reason(self) -> str:
        """The key of `WHY` for the pair; "" if one kernel could compute both."""
        makes, reads = (op.startswith(PRODUCTS) for op in (self.first, self.second))
        if self.stand != "beside":
            return self.stand
        if self.segment == "head":
            return "logits"
        if makes or reads:
            return "two products" if makes and reads else "result of a product" if makes else "operand of a product"
        if any(name in self.first for name in ATTENTION):
            return "attention"
        by_columns = (self.first, self.second) == ("rmsnorm_dgrad", "quantise_both")
        return "norm's gradient by columns" if by_columns else ""


def pairs(path: Path) -> list[Pair]:
    """All pairs in a spec's program that share bytes, largest first."""
    from compiler.plan.plan import make_plan  # needs pydantic, which writing the page from `RESULTS` does not
    from compiler.plan.split_blocks import balanced_rows
    from dsl.load import load

    spec = load(path)
    plan, rows, total = make_plan(spec), balanced_rows(spec), Counter[Pair]()
    uses = Counter(use.segment.key for use in plan.uses)
    for segment in {use.segment.key: use.segment for use in plan.uses}.values():
        for pair in _of_segment(segment, rows):
            total[Pair(**asdict(pair) | {"bytes": 0})] += pair.bytes * uses[segment.key]
    summed = [Pair(**asdict(pair) | {"bytes": count}) for pair, count in total.items()]
    return sorted(summed, key=lambda pair: (-pair.bytes, pair))


def _of_segment(segment: Segment, rows: int) -> Iterator[Pair]:
    joint = unpack_tensors(interpret(segment))
    phase_of = phases(joint)
    for a, function_a in phase_of.items():
        for b, function_b in phase_of.items():
            if a < b and (function_a == function_b or (function_a, function_b) == ("I", "W")):
                first, second = joint.nodes[a], joint.nodes[b]
                shared = _shared(joint, first, second, rows)
                if shared:
                    stand = "between" if depends_through_others(joint, (first, second)) else "beside"
                    if function_a == function_b:
                        functions = function_a
                    else:
                        functions, stand = f"{function_a} {function_b}", "apart"
                    yield Pair(segment.kind, functions, first.op, second.op, stand, shared)


def _shared(joint: Joint, first: OpNode, second: OpNode, rows: int) -> int:
    """The bytes that fusing the two would save."""
    views = view_nodes(joint)

    def base(value: str) -> str:
        return base(views[value].reads[0]) if value in views else value

    def size(value: str) -> int:
        tensor = joint.tensors[value]
        return tensor_bytes(tensor.shape, tensor.dtype) * (rows if has_rows(tensor.shape) else 1)

    returned = {value for _, value in (*joint.outputs, *joint.gradients)}
    shared = 0
    for value in {*second.reads} - {*joint.params}:
        if value in first.reads:
            shared += size(value)
        elif base(value) in first.outputs:
            nodes = [node for node in joint.nodes if node not in views.values() and node != second]
            needed = base(value) in returned or any(base(read) == base(value) for node in nodes for read in node.reads)
            shared += size(value) * (1 if needed else 2)
    return shared


def text(found: list[Pair], least: float) -> str:
    """One line per pair that shares at least `least` GB."""
    rows = [
        f"{pair.bytes / 1e9:7.2f}  {pair.stand:8}{pair.segment:12}{pair.functions:4} {pair.first} → {pair.second}"
        f"{f'  ({pair.reason})' if pair.reason and pair.reason != pair.stand else ''}"
        for pair in found
        if pair.bytes >= least * 1e9
    ]
    return "\n".join(["     GB  stand   segment     in   calls", *rows]) + "\n"


def section(found: list[Pair]) -> str:
    """The section of docs/kernels.md on pairs of calls. AssertionError if one has no reason."""
    lines = [
        "## What is not fused, and why",
        "",
        "Some neighbouring calls of `specs/deepseek-v3.dsc` still read or write the same values. *GB* is what one",
        "kernel in place of two calls would save in a micro-batch, in all layers together. Only pairs of at least",
        f"1 GB count, and reasons of {SHOWN_GB}. `python -m benchmarks.side_by_side SPEC` lists the pairs of any spec.",
        "",
        "| reason | pairs | GB |",
        "|---|--:|--:|",
    ]
    by_reason: dict[str, list[Pair]] = {}
    for pair in found:
        assert pair.reason, f"{pair}: one kernel could do both"
        by_reason.setdefault(pair.reason, []).append(pair)
    totals = {reason: sum(pair.bytes for pair in group) / 1e9 for reason, group in by_reason.items()}
    shown = sorted((reason for reason in totals if totals[reason] >= SHOWN_GB), key=lambda reason: -totals[reason])
    lines += [f"| {reason} | {len(by_reason[reason])} | {totals[reason]:.1f} |" for reason in shown]
    names = [name for name in WHY if name in shown]
    reasons = [fill(f"- *{name}*: {WHY[name]}", 120, subsequent_indent="  ", break_on_hyphens=False) for name in names]
    return "\n".join([*lines, "", *reasons]) + "\n"


def kept() -> tuple[list[Pair], float]:
    """The stored result for DeepSeek-V3: the pairs, and the least GB that they share."""
    stored = json.loads(RESULTS.read_text("utf-8"))
    return [Pair(**pair) for pair in stored["pairs"]], stored["least_gb"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("spec", type=Path, nargs="?", default=V3, help="default: specs/deepseek-v3.dsc")
    parser.add_argument("--least", type=float, default=1.0, help="least GB per micro-batch (default: 1)")
    parser.add_argument("--out", type=Path, help="also write the pairs to a file")
    args = parser.parse_args()
    all_pairs = pairs(args.spec)
    print(text(all_pairs, args.least), end="")
    if args.out:
        rows = [asdict(pair) for pair in all_pairs if pair.bytes >= args.least * 1e9]
        args.out.write_text(json.dumps({"least_gb": args.least, "pairs": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
