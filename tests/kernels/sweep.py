"""Every kernel of every shipped spec through the gate, on every target: `make kernels`, or

    python -m tests.kernels.sweep [--format json] [--spec quickstart] [--op rmsnorm] [--target sm_90]

with the Triton that is first on PYTHONPATH. A spec runs in its own precision, in bf16 and in fp32. Each kernel is
compiled once for a target and the arguments it is specialised for. Ends with a table of what the code for sm_90 takes,
and what failed; the exit code says whether anything did. Takes about half a second for a kernel and target.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import triton

from compiler.kernels import KernelFile, emit_kernel
from compiler.kernels.calls import Call
from compiler.kernels.gate import SM_90, TARGETS, Target, Verdict, gate
from compiler.kernels.gate_launch import arguments_of
from tests.kernels.shapes import VARIANTS, Variant, kernel_calls, rows_of

COLUMNS = ("kernel", "registers", "shared", "an SM", "load", "instructions")


@dataclass(frozen=True, slots=True)
class Row:
    """One launch of one call, for one target."""

    spec: str  # the first that has the call: deepseek-v3.dsc bf16
    call: str
    file: str
    verdict: Verdict


def sweep(variants: Iterable[Variant], targets: Sequence[Target], ops: str = "") -> Iterator[tuple[Row, ...]]:
    """The rows of each distinct call and target, as they are found. What cannot be planned or emitted has failed."""
    known: dict[str, Verdict] = {}
    seen: set[tuple[Call, int]] = set()
    for file, run, values in variants:
        name = " ".join([file, *values])
        try:
            found = kernel_calls(file, run, values)
        except Exception as error:
            yield (Row(name, "", "", Verdict("", "any", (f"is not planned: {error!r}",))),)
            continue
        for call, sms in found:
            if (call, sms) in seen or ops not in call.op:
                continue
            seen.add((call, sms))
            try:
                emitted = emit_kernel(call.op, call.arguments, sms)
            except Exception as error:
                yield (Row(name, str(call), "", Verdict(call.op, "any", (f"is not emitted: {error!r}",))),)
                continue
            for target in targets if emitted else ():
                assert emitted
                yield tuple(Row(name, str(call), emitted.name, each) for each in verdicts(emitted, call, target, known))


def verdicts(file: KernelFile, call: Call, target: Target, known: dict[str, Verdict]) -> list[Verdict]:
    """Of one call's launches; for sm_90 with every number of rows to try."""
    try:
        return [
            verdict
            for rows in (rows_of(call) if target is SM_90 else rows_of(call)[:1])
            for verdict in gate(file, call.op, arguments_of(call, rows), target, known)
        ]
    except Exception as error:  # of its wrapper
        return [Verdict(call.op, target.name, (f"is not launched: {error!r}",))]


def table(rows: Sequence[Row], colour: bool) -> str:
    """What each kernel takes on sm_90, of any of its launches the most, then every failure."""
    worst: dict[str, tuple[int, int, int, int]] = {}
    names: dict[str, set[str]] = {}
    for row in rows:
        v = row.verdict
        if v.target == SM_90.name:
            kernel = f"{row.file}.{v.kernel}"
            takes = v.registers, v.shared_bytes, -v.programs, v.load_bytes
            worst[kernel] = tuple(map(max, takes, worst.get(kernel, takes)))  # type: ignore[assignment]
            names.setdefault(kernel, set()).update(v.instructions)
    lines = [COLUMNS]
    lines += [
        (kernel, *(str(abs(n)) for n in takes), " ".join(sorted(names[kernel]))) for kernel, takes in worst.items()
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    red, plain = ("\033[31m", "\033[0m") if colour else ("", "")
    failed: dict[str, list[str]] = {}
    for row in rows:
        for failure in row.verdict.failures:
            where = f"{row.file}.{row.verdict.kernel} on {row.verdict.target}"
            failed.setdefault(f"{red}{where} {failure}{plain}", []).append(f"{row.call} of {row.spec}")
    text += [
        f"{what}: {where[0]}" + f", and {len(where) - 1} more" * (len(where) > 1) for what, where in failed.items()
    ]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sweep")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--spec", default="", help="only specs whose file has this in its name")
    parser.add_argument("--op", default="", help="only ops that have this in their name")
    parser.add_argument("--target", default="", help="only targets that have this in their name")
    asked = parser.parse_args(arguments)
    variants = [variant for variant in VARIANTS if asked.spec in variant[0]]
    targets = [target for target in TARGETS if asked.target in target.name]
    begun, rows = time.monotonic(), []
    for found in sweep(variants, targets, asked.op):
        rows += found
        for row in found[:1]:
            failures = [failure for each in found for failure in each.verdict.failures]
            result = "; ".join(failures) or "passes"
            print(
                f"{time.monotonic() - begun:6.0f} s  {row.verdict.target:7} {row.spec}: {row.call}: {result}",
                file=sys.stderr,
            )
    failed = [row for row in rows if row.verdict.failures]
    if asked.format == "json":
        print(json.dumps({"triton": triton.__version__, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(table(rows, sys.stdout.isatty()))
        kernels = len({(row.file, row.verdict.kernel) for row in rows})
        print(f"Triton {triton.__version__}: {kernels} kernels, {len(rows)} launches, {len(failed)} failed.")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
