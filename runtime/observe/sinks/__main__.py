"""Exports the metrics of a run: `python -P -m runtime.observe.sinks RUN SINCE`. The supervisor starts this process.

SINCE: start time of the supervisor's run, ISO 8601 in UTC.

The first line of stdin is the build's watch.json as one line (runtime/contract/watch.py). When stdin ends, everything
that the run has written is exported, and the process ends, after DRAIN_S at the latest: with code 1 if an exporter was
still busy. The exporters of the next start of the run wait for this end, so that nothing is exported twice. This
process does not change the run, and training never waits for it. It logs to stderr, which is RUN/logs/exporters.log.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.contract import MetricsSinks, WatchFacts
from runtime.observe.events import Events
from runtime.observe.sinks.mlflow import MLflow
from runtime.observe.sinks.otel import OpenTelemetry
from runtime.observe.sinks.prometheus import Prometheus
from runtime.observe.sinks.sink import DRAIN_S, LAST_TRY_S, Sink
from runtime.observe.sinks.tensorboard import TensorBoard
from runtime.observe.sinks.wandb import WandB
from runtime.observe.sinks.worker import Exports, Worker
from runtime.observe.watch.follow import Follower

POLL_S = 0.25
SINKS: dict[str, Callable[[], Sink]] = {  # by key of the block `metrics`
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "wandb": WandB,
    "mlflow": MLflow,
    "otel": OpenTelemetry,
}


def main(argv: list[str]) -> int:
    """Export until stdin ends."""
    run, since = Path(argv[0]), argv[1]
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        watch = WatchFacts.from_json(stdin.readline())
    metrics = watch.metrics or MetricsSinks()
    names = [name for name in SINKS if (value := getattr(metrics, name)) is not None and value is not False]
    _wait_for_others(run)
    exports, events, follower = Exports(run), Events(run), Follower(run)
    workers = [Worker(name, SINKS[name](), run, watch, exports, events, since) for name in names]
    for worker in workers:
        worker.start()
    is_over = False
    while not is_over:
        is_over = bool(select.select([0], [], [], POLL_S)[0])  # stdin has no other input
        items = follower.poll()
        for worker in workers:
            if items and worker.is_alive():  # a worker without its library has ended
                worker.add(items)
            worker.say_if_late()
    late = _end(workers)
    for worker in late:
        worker.fail(f"its last numbers were not sent in {_last_s(worker):g} s")
    events.close()
    return 1 if late else 0


def _end(workers: Sequence[Worker]) -> list[Worker]:
    """End workers, each within its time limit. Return those that have not ended."""
    for worker in workers:
        worker.end()
    ended_s = time.monotonic()
    while any(worker.is_alive() and time.monotonic() < ended_s + _last_s(worker) for worker in workers):
        time.sleep(POLL_S / 10)
    return [worker for worker in workers if worker.is_alive()]


def _last_s(worker: Worker) -> float:
    return DRAIN_S if worker.is_working else LAST_TRY_S


def _wait_for_others(run: Path) -> None:
    """Wait for the exporter process of an earlier start, which ends within DRAIN_S. The lock is on the log folder, and
    is held until this process ends."""
    until = time.monotonic() + DRAIN_S + LAST_TRY_S
    with suppress(OSError):  # without support for locks
        lock = os.open(run / "logs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while time.monotonic() < until:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # does not wait for threads of libraries
