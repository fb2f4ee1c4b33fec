"""docs/rates.md has the figures of the shipped tables, and its examples can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from compiler.machine.rates import shipped_table
from compiler.machine.rates.table import CLASSES, TABLES, merge_base
from compiler.plan.spec_rates import rates_of
from compiler.predict.traced_layer import TRACES, layer_times, shipped_trace
from tests.compiler.program.lower.stages import deepseek_v3
from tests.specs.shipped import shipped

PAGE = Path(__file__).parents[4] / "docs" / "rates.md"
LAST = "What the public profile says, and the shipped tables beside it, in ms of a MoE layer:\n\n"


def compared() -> str:
    """The table at the end of the page."""
    spec, plan = shipped("deepseek-v3.dsc", "pretrain"), deepseek_v3().plan
    cuts = plan.cuts
    names = ("h800", "h800-calibrated")
    predictions = [layer_times(plan, cuts, rates_of(spec, merge_base(shipped_table(name))), "L10") for name in names]
    trace = shipped_trace("deepseek-pair")
    rows: list[tuple[str, float, list[float]]] = []
    for entry in trace.classes:
        name = ", ".join(entry.classes[:2]) + (", …" if len(entry.classes) > 2 else "")
        rows.append(
            (
                name,
                entry.ms,
                [sum(prediction.classes.get(kind, 0.0) for kind in entry.classes) for prediction in predictions],
            )
        )
    rows += [
        (
            f"exchanges, {exchange.phase}",
            exchange.ms,
            [prediction.exchanges[exchange.phase] for prediction in predictions],
        )
        for exchange in trace.exchanges
    ]
    lines = [f"| | profile | {' | '.join(f'`{name}`' for name in names)} |", "|---|---|" + "---|" * len(names)]
    for name, ms, seconds in rows:
        lines.append(f"| {name} | {ms:.2f} | {' | '.join(f'{1e3 * value:.2f}' for value in seconds)} |")
    return "\n".join(lines) + "\n"


def test_the_page_matches_the_tables(bless: bool) -> None:
    text = PAGE.read_text("utf-8")
    head, mark, table = text.partition(LAST)
    assert mark
    if bless:
        PAGE.write_text(head + mark + compared(), "utf-8")
        table = compared()
    assert table == compared(), "pytest --bless"


def test_the_page_names_every_class_and_table() -> None:
    text = PAGE.read_text("utf-8")
    words = set(re.findall(r"[a-z0-9_]+(?:-[a-z0-9-]+)?", text))
    assert set(CLASSES) <= words
    for name in (path.stem for path in TABLES.glob("*.json")):
        assert name in words, name
    for path in TRACES.glob("*.json"):
        assert set(json.loads(path.read_text("utf-8"))) - {"name", "source", "date"} <= words
