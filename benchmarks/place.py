"""The balance of expert placements, compared with the published greedy algorithm and the bound, and the CPU time.

    python -m benchmarks.place [--layers 16] [--out benchmarks/results/place.txt]

One core; times are CPU time. Loads are random: tokens per expert are log-normal with a standard deviation from 0.1 (as
if balanced by a bias) to 1 (as if not balanced). `greedy` is hierarchical if groups divide over nodes; the better of
both forms is in brackets. A balance is the load of the busiest device over the mean, averaged over layers. `worst gap`
is that of the layer furthest above its bound, `whole` counts layers with every group on one node.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import numpy as np

from compiler.plan.experts.layer_search import GroupRule, place_layer
from compiler.plan.experts.layout import ExpertLayout, balance_of
from compiler.plan.experts.pack import global_

LAYOUTS = {
    "V3 trains": ExpertLayout(256, 8, 8, 64),
    "Qwen3-30B": ExpertLayout(128, 1, 2, 16),
    "V2-Lite": ExpertLayout(64, 1, 1, 8),
}
RULES: tuple[GroupRule, ...] = ("keep", "auto")
HEAD = (
    "layout", "experts", "nodes", "devices", "deviation", "rule", "greedy", "placed", "bound", "worst gap",
    "node greedy", "node placed", "whole", "CPU ms/layer",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEAD]
    for name, layout in LAYOUTS.items():
        for deviation in (0.1, 0.5, 1.0):
            for rule in RULES:
                if rule == "auto" or (layout.groups_divide and layout.nodes > 1 and layout.groups > 1):
                    rows.append(measured(name, layout, deviation, rule, args.layers))
                    print("  ".join(rows[-1]), flush=True)
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    text = f"Python {platform.python_version()}, {platform.machine()}, one core\n\n{text}\n"
    print(text)
    if args.out:
        args.out.write_text(text, "utf-8")


def measured(name: str, layout: ExpertLayout, deviation: float, rule: GroupRule, num_layers: int) -> tuple[str, ...]:
    """A row of the table."""
    random = np.random.default_rng(7)
    loads = [np.round(1e6 * random.lognormal(0, deviation, layout.experts)) for _ in range(num_layers)]
    start = time.process_time()
    placed = [place_layer(load, layout, rule) for load in loads]
    took = (time.process_time() - start) / num_layers
    best_greedy = [
        min(layer.greedy.device, balance_of(load, global_(load, layout), layout).device)
        for load, layer in zip(loads, placed, strict=True)
    ]

    def mean(values: list[float]) -> str:
        return f"{sum(values) / num_layers:.4f}"

    greedy = f"{mean([layer.greedy.device for layer in placed])} ({mean(best_greedy)})"
    return (
        name, *map(str, (layout.experts, layout.nodes, layout.devices, deviation)), rule, greedy,
        mean([layer.balance.device for layer in placed]), mean([layer.bound for layer in placed]),
        f"{max(layer.gap for layer in placed):.2%}", mean([layer.greedy.node for layer in placed]),
        mean([layer.balance.node for layer in placed]), f"{sum(layer.keeps_groups for layer in placed)}/{num_layers}",
        f"{took * 1e3:.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
