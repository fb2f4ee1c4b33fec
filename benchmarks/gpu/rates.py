"""Rates of the libraries that a run can name, as rows of a rate table, from the results of `make gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.checks import BY
from compiler.machine.rates.table import RateRow
from compiler.model.ops import kernel_class
from compiler.model.ops.implementations import PLANNED_AS
from dsl.schema.kernels import LIBRARY_NAMES

DTYPES = {"bf16": "bf16", "fp8": "e4m3"}  # of a case's products → of a row


def rows(found: Mapping[str, Any]) -> Iterator[RateRow]:
    """A row for each timed op and library. `found`: the results of a device. Rows without a shape hold for all shapes;
    of several cases of a class, a plan takes the mean."""
    source = f"python -m benchmarks.gpu on {found['device']}, torch {found['torch']}, at DeepSeek-V3's sizes"
    for timed in found["parts"].get("timing", {"rows": []})["rows"]:
        if timed["kind"] != "libraries" or not timed.get("flops"):
            continue
        op = CASES[timed["case"]].op
        for library in LIBRARY_NAMES:
            seconds = timed["seconds"].get(f"{BY.strip()} {library}")
            if seconds is not None:
                yield RateRow.model_validate(
                    {
                        "class": kernel_class(PLANNED_AS.get(op, op)),
                        "dtype": DTYPES[timed["rate"]],
                        "rate": float(f"{timed['flops'] / seconds:.4g}"),
                        "by": library,
                        "source": source,
                        "date": found["date"],
                    }
                )
