"""Exports the numbers of a run: `python -P -m runtime.observe.sinks RUN SINCE`, which the supervisor starts beside
itself.

SINCE: when this start of the run began, ISO 8601 in UTC.

The first line of stdin is the build's watch.json as one line (runtime/contract/watch.py). When stdin ends, what the
run has written by then is exported, and the process ends, after DRAIN_S at the latest: with 1 where an exporter was
still at it. The exporters of the next start of the run begin behind that, so that two never export the same. It changes
nothing of the run, and the run never waits for it while it trains. What it says goes to stderr, which is
RUN/logs/exporters.log.
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
SINKS: dict[str, Callable[[], Sink]] = {  # by their keys in the block
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
    asked = [name for name in SINKS if (value := getattr(metrics, name)) is not None and value is not False]
    _wait_for_others(run)
    exports, events, follower = Exports(run), Events(run), Follower(run)
    workers = [Worker(name, SINKS[name](), run, watch, exports, events, since) for name in asked]
    for worker in workers:
        worker.start()
    over = False
    while not over:
        over = bool(select.select([0], [], [], POLL_S)[0])  # nothing else comes
        items = follower.poll()
        for worker in workers:
            if items and worker.is_alive():  # one whose library is not installed has ended
                worker.put(items)
            worker.say_if_late()
    late = _end(workers)
    for worker in late:
        worker.fail(f"its last numbers were not sent in {_last_s(worker):g} s")
    events.close()
    return 1 if late else 0


def _end(workers: Sequence[Worker]) -> list[Worker]:
    """End workers, each in its time; those that have not ended."""
    for worker in workers:
        worker.end()
    ended_s = time.monotonic()
    while any(worker.is_alive() and time.monotonic() < ended_s + _last_s(worker) for worker in workers):
        time.sleep(POLL_S / 10)
    return [worker for worker in workers if worker.is_alive()]


def _last_s(worker: Worker) -> float:
    return DRAIN_S if worker.works else LAST_TRY_S


def _wait_for_others(run: Path) -> None:
    """Wait for the process of an earlier start, which ends within DRAIN_S. The lock is on the folder of its log, and is
    held to the end of this process."""
    until = time.monotonic() + DRAIN_S + LAST_TRY_S
    with suppress(OSError):  # where there are no locks
        lock = os.open(run / "logs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        while time.monotonic() < until:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of libraries keep nobody waiting
