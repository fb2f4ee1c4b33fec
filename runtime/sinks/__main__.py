"""Exports the numbers of a run: `python -P -m runtime.sinks RUN`, which the supervisor starts beside itself.

The first line of stdin is the build's watch.json as one line (runtime/contract/watch.py). When stdin ends, what the
run has written by then is exported, and the process ends, after DRAIN_S at the latest. It changes nothing of the run,
and the run never waits for it while it trains. What it says goes to stderr, which is RUN/logs/exporters.log.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runtime.contract import Metrics, Watch
from runtime.events import Events
from runtime.sinks.mlflow import MLflow
from runtime.sinks.otel import OpenTelemetry
from runtime.sinks.prometheus import Prometheus
from runtime.sinks.sink import Sink
from runtime.sinks.tensorboard import TensorBoard
from runtime.sinks.wandb import WandB
from runtime.sinks.worker import Exports, Worker
from runtime.watch.follow import Follower

POLL_S = 0.25
DRAIN_S = 30.0  # and not for an exporter that does not work
SINKS: dict[str, Callable[[], Sink]] = {  # by their keys in the block
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "wandb": WandB,
    "mlflow": MLflow,
    "otel": OpenTelemetry,
}


def main(argv: list[str]) -> int:
    """Export until stdin ends."""
    run = Path(argv[0])
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        watch = Watch.from_json(stdin.readline())
    metrics = watch.metrics or Metrics()
    asked = [name for name in SINKS if (value := getattr(metrics, name)) is not None and value is not False]
    exports, events, follower = Exports(run), Events(run), Follower(run)
    workers = [Worker(name, SINKS[name](), run, watch, exports, events) for name in asked]
    for worker in workers:
        worker.start()
    over = False
    while not over:
        over = bool(select.select([0], [], [], POLL_S)[0])  # nothing else comes
        if items := follower.poll():
            for worker in workers:
                if worker.is_alive():  # one whose library is not installed has ended
                    worker.put(items)
    for worker in workers:
        worker.end()
    until = time.monotonic() + DRAIN_S
    while any(worker.is_alive() and worker.works for worker in workers) and time.monotonic() < until:
        time.sleep(POLL_S / 10)
    events.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of libraries keep nobody waiting
