"""Compute the loss of a checkpoint with the validation program of a build, on its ranks.

    python -P -m runtime.run.evaluate BUILD --checkpoint DIR --samples FILE --out FOLDER [--average]

FILE (.npy) has one sample per row: the tokens of a sequence of the build, and two more. An id below 0 is no target.
FOLDER/losses.json gets the mean loss and the number of targets; FOLDER/logs gets the output of the ranks.

Exit codes: 0 done · 1 a rank failed · 2 the build, the checkpoint or the samples cannot be used · 3 hung · 128 + signal
when asked to stop.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.build.build import Build, BuildError
from runtime.build.compile_kernels import compile_for_rank
from runtime.checkpoint.loading import LoadedCheckpoint, load, with_base
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.comm.connect import PEER_TIMEOUT_S, Endpoint
from runtime.contract import EXTRA_TOKENS
from runtime.contract.names import AVERAGE, WEIGHT
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.observe.device import BACKENDS, choose, divide, take
from runtime.state import snapshot
from runtime.step.start import Start
from runtime.step.trainer import Trainer
from runtime.system.outcome import EXIT_USAGE, printable

LOSSES = "losses.json"


@dataclass(frozen=True)
class SampleRows:
    """The samples of a file."""

    ids: npt.NDArray[np.int64]

    @property
    def num_windows(self) -> int:
        """Number of samples."""
        return len(self.ids)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of a sample: [sequence + extra]."""
        return self.ids[index]

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """[length]: start of the document of each token. A sample is one document."""
        return np.zeros_like(self.ids[index])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.run.evaluate", allow_abbrev=False)
    parser.add_argument("build", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--average", action="store_true")
    args = parser.parse_args(argv)
    try:
        build, checkpoint = Build.open(args.build), with_base(load(args.checkpoint))
        rows = np.load(args.samples, allow_pickle=False)
        device = choose("auto", build.plan.mesh.world)
    except (BuildError, CheckpointError, OSError, ValueError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    assert rows.shape[1] == build.plan.train.sequence + EXTRA_TOKENS
    kind = AVERAGE if args.average else WEIGHT
    job = Evaluation(build, checkpoint, kind, SampleRows(rows), device, args.out / LOSSES)
    outcome = launch(job.rank, build.plan.mesh.world, folder=args.out, backend=BACKENDS[device])
    if not outcome.ok:
        print(f"error: {outcome}", file=sys.stderr)
    return outcome.exit_code


@dataclass(frozen=True)
class Evaluation:
    """The work of the ranks. `kind`: the kind of the checkpoint's tensors that are used as weights."""

    build: Build
    checkpoint: LoadedCheckpoint
    kind: str
    samples: SampleRows
    device: str
    out: Path

    def rank(self, rank: int, world: int, board: Board) -> None:
        """Compute the loss; rank 0 writes it. This is the target of a launch."""
        plan, device = self.build.plan, take(self.device, rank)
        divide(device, plan.communication_sms)
        compile_for_rank(self.build, rank, device.type, board.set_action, board.say)
        endpoint = Endpoint(device, "auto", PEER_TIMEOUT_S, sms=plan.communication_sms)
        start = Start(weights=self.checkpoint, load=partial(snapshot.put_weights, kind=self.kind))
        trainer = Trainer(self.build, rank, self.samples, self.samples, board, endpoint, start)
        ids = self.samples.ids
        losses = trainer.losses_on(self.samples, -(-len(ids) // plan.batches[-1][1]))
        if rank == 0:
            tokens = int((ids[:, 1:-1] >= 0).sum())
            self.out.write_text(json.dumps({"loss": losses["loss"], "tokens": tokens}) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
