"""Plan DeepSeek-V3 on 2,048 to 1,048,576 devices, simulate the runs event by event, and write docs/scale.md.

python -m benchmarks.scale     # about two minutes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from compiler.predict.failures import Goodput
from compiler.predict.predict import predict
from compiler.predict.prediction import seconds, span
from dsl.closed_forms.stragglers import NODE, expected_maximum, scale_of, slowest_factor
from dsl.load import resolve

ROOT = Path(__file__).parents[1]
SPEC, PAGE = ROOT / "benchmarks" / "scale.dsc", ROOT / "docs" / "scale.md"
NODES = (256, 2_048, 16_384, 131_072)
CLUSTERS, FAILURES = 40, 500  # that are simulated; failures of each
BATCH = 15_360  # sequences on 2,048 devices; more devices get as many each

HEAD = """# What many devices cost

DeepSeek-V3 with as many tokens per device on ever more devices: the step, and the share of the time spent on training
that no failure undoes. `python -m benchmarks.scale` writes this page.

- **The slowest device.** The times of equal devices have a standard deviation of 1.75%, at which the fastest and the
  slowest of the 8 GPUs of a node differ by 5% on average (github.com/stas00/ml-engineering at 744d01e: "5%+"). All wait
  for the slowest one.
- **Crowded links.** Links lose 10% of their bandwidth at each layer of switches above the leaf: an all-reduce reached
  386 GB/s on 64 H100 (github.com/coreweave/nccl-tests at cb86553) and 350 GB/s on 1,984 H200
  (github.com/NVIDIA/nccl-tests/issues/283).
- **Latency.** Sums take n − 1 messages in a row, or log2 n, whichever is faster.
- **Failures.** A device fails once in 50,000 hours, a restart takes 10 minutes ([planning.md](planning.md)).

`scale` and `failures` in a cluster change these figures. *Simulated*: the mean of {clusters} runs of {failures}
failures each, event by event. Each device has a speed of its own, a failed device is replaced by another one, and lost
steps are repeated. Checkpoints come at the best interval.

| devices | step | longer than on a node | simulated | tokens/s per device | a failure every | goodput | simulated |
|--:|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class SimulatedRuns:
    """Runs of clusters with failures. Errors are standard errors of the means."""

    slowest: float  # time of a step over that on a node
    slowest_error: float
    goodput: float  # share of the time that is training which is not lost
    goodput_error: float


def simulate(world: int, spread: float, step_s: float, goodput: Goodput, draw: np.random.Generator) -> SimulatedRuns:
    """Simulate `CLUSTERS` runs until each has had `FAILURES` failures, with checkpoints at the best interval.

    `step_s`: of a step on a node. A save waits until the one before is written. A failed device is replaced by another
    one, and a failure during a restart starts it again.
    """
    on_node = 1 + spread * expected_maximum(NODE)
    slowest, shares = list[float](), list[float]()
    for _ in range(CLUSTERS):
        times = 1 + spread * draw.standard_normal(world)
        kept_s = passed_s = trained_s = steps_s = 0.0
        for _ in range(FAILURES):
            factor = times.max() / on_node
            until_s = draw.exponential(goodput.mtbf_s)
            interval_s = goodput.best_steps * step_s * factor
            first_s = interval_s + goodput.copy_s + goodput.write_s
            cycle_s = max(interval_s, goodput.write_s) + goodput.copy_s
            written = 0 if until_s < first_s else 1 + int((until_s - first_s) // cycle_s)
            kept_s, passed_s = kept_s + written * interval_s, passed_s + until_s
            trained_s, steps_s = trained_s + until_s, steps_s + until_s / factor
            times[draw.integers(world)] = 1 + spread * draw.standard_normal()
            while (again_s := draw.exponential(goodput.mtbf_s)) < goodput.restart_s:
                passed_s += again_s
            passed_s += goodput.restart_s
        slowest.append(trained_s / steps_s)
        shares.append(kept_s / passed_s)
    errors = (stdev(values) / sqrt(CLUSTERS) for values in (slowest, shares))
    return SimulatedRuns(fmean(slowest), next(errors), fmean(shares), next(errors))


def rows() -> Iterator[str]:
    """The rows of the table."""
    for nodes in NODES:
        overrides = [f"cluster.nodes={nodes}", "parallel.data=auto", f"train.batch={BATCH * nodes // NODES[0]}"]
        spec = resolve(SPEC, overrides=overrides).spec
        prediction = predict(spec)
        scale, goodput, step_s = scale_of(spec.cluster), prediction.goodput, prediction.step.seconds
        assert scale is not None and goodput is not None
        factor, world = slowest_factor(spec.cluster), spec.cluster.world
        run = simulate(world, scale.spread, step_s / factor, goodput, np.random.default_rng(world))
        cells = (
            f"{world:,}", seconds(step_s), f"{factor - 1:.2%}", f"{run.slowest - 1:.2%} ± {run.slowest_error:.2%}",
            f"{prediction.step.tokens_per_second / world:,.0f}", span(goodput.mtbf_s), f"{goodput.best:.2%}",
            f"{run.goodput:.2%} ± {run.goodput_error:.2%}",
        )  # fmt: skip
        print(" | ".join(cells), flush=True)
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Write the page."""
    PAGE.write_text(HEAD.format(clusters=CLUSTERS, failures=FAILURES) + "\n".join(rows()) + "\n", "utf-8")
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
