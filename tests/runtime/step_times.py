"""Steps of all trainers of a run, timed from outside, and the samples that each rank read.

`python -m tests.runtime.step_times FOLDER WORLD` trains FOLDER/build and writes FOLDER/rank_<r>.json.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.runtime.step.ledger import main
from tests.runtime.step.samples import RandomSamples

STEPS = 5
SLOW = (2, 3)  # a rank, and the step in which its first body takes long
SLOW_S = 1000  # only by its own clock: a rank that waits for a core on a busy machine takes less


class Watched(RandomSamples):
    """Samples, with a count of those read by the training thread."""

    def __init__(self, vocab: int, sequence: int) -> None:
        super().__init__(vocab, sequence)
        self.trains, self.read_by_trainer = threading.get_ident(), 0

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        self.read_by_trainer += threading.get_ident() == self.trains
        return super().tokens(index)


def watched(build: Build, rank: int, board: Board) -> dict[str, object]:
    """The samples a rank has read after each step, its rows, and the seconds between the ends of its sums."""
    samples = Watched(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, rank, samples, None, board)
    late = 0

    def clock() -> int:
        return time.perf_counter_ns() + late

    trainer.time._clock = clock
    real, ends_s = trainer._norm, list[float]()

    def looked() -> float:
        """When the trainer last looked at its clock: a look of our own may come late on a loaded machine."""
        assert trainer.time._since is not None
        return trainer.time._since / 1e9

    def norm() -> object:
        squares = real()
        ends_s.append(looked())
        return squares

    trainer._norm = norm  # type: ignore[assignment, method-assign]
    rows, read, body = [], [], next(iter(trainer.bodies))
    first = trainer.bodies[body]

    def slow(*args: Any) -> None:
        nonlocal late
        late = SLOW_S * 10**9  # once: the body runs for each micro-batch
        first(*args)

    trainer.time.enter("other")
    begun = looked()
    for step in range(1, STEPS + 1):
        if (rank, step) == SLOW:
            trainer.bodies |= {body: slow}
        rows.append(trainer.train_step())
        assert trainer.feed._prefetched is not None
        trainer.feed._prefetched.future.result()  # steps as long as their samples take to read
        read.append(samples.read_by_trainer)
        if (rank, step) == SLOW:
            trainer.bodies |= {body: first}
    wall = [after - before for before, after in zip([begun, *ends_s], ends_s, strict=False)]
    names = trainer.feed.names
    return {
        "rows": rows,
        "read_by_trainer": read,
        "read": len(samples.read),
        "waits": trainer.feed.waits,
        "wall": wall,
        "asks": names,
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), watched))
