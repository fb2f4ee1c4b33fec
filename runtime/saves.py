"""The checkpoints of a run as it trains: when one is due, what it says of the run, and what happens if it fails.

A save that fails leaves the checkpoints that are there. It is said, and the run goes on to the next save, unless the
spec says `failure = stop`. Without its last save a run has failed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import snapshot
from runtime.checkpoint import publish
from runtime.checkpoint.retention import LOSS, Keep
from runtime.checkpoint.shard_manifest import CheckpointError
from runtime.events import Events
from runtime.trainer import Trainer


class Saves:
    """Checkpoints that one rank saves in the folder `run`, as its spec asks for them.

    `about`: what each of them says of the run, JSON. `say`: shows a line to the user.
    """

    def __init__(
        self,
        trainer: Trainer,
        world: int,
        run: Path,
        about: Mapping[str, Any],
        events: Events,
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._run, self._about, self._events, self._say = trainer, run, about, events, say
        self._spec = spec = trainer.plan.train.checkpoint
        keep = Keep(spec.keep, spec.best, spec.keep_every) if spec else Keep(1, 0, None)
        barrier = dist.barrier if world > 1 else lambda: None
        self._publisher = publish.Publisher(run / "checkpoints", trainer.rank, world, barrier, keep)

    def due(self, step: int) -> bool:
        """Whether the spec asks for a checkpoint after a step that is not the last."""
        return self._spec is not None and step % self._spec.every == 0

    def save(self, validation_loss: float | None, *, last: bool) -> None:
        """Save the state after a step; every rank calls it. `last`: there will be no other save of this process.

        Raises CheckpointError on all ranks if the save fails and is the last, or is not to fail.
        """
        trainer = self._trainer
        trainer.board.set_action("checkpoint")
        start_s = time.perf_counter()
        try:
            self._save(validation_loss)
        except CheckpointError as error:
            if trainer.rank == 0:
                self._events.write("save_failed", step=trainer.step, reason=str(error))
            if last or (self._spec is not None and self._spec.failure == "stop"):
                raise
            text = f"step {trainer.step} was not saved, the run goes on to its next save: {error}"
            print(text, flush=True)
            if not error.of_peer:
                self._say(text)
            return
        if trainer.rank == 0:
            seconds = round(time.perf_counter() - start_s, 3)
            self._events.write("save", step=trainer.step, **_newest(self._publisher.folder), seconds=seconds)

    def _save(self, validation_loss: float | None) -> None:
        trainer = self._trainer
        trainer.settle()
        loads = {name: load.tolist() for name, load in trainer.loads.items()}
        meta = {**self._about, "threads": torch.get_num_threads(), "loads": loads}
        meta |= {"position": trainer.position.to_json()}
        meta |= {LOSS: validation_loss} if validation_loss is not None and math.isfinite(validation_loss) else {}
        self._publisher.save(trainer.step, snapshot.take(trainer.state, trainer.plan, trainer.rank), meta)
        if trainer.rank == 0 and loads:
            try:
                _replace(self._run / "load.json", json.dumps({"load": list(loads.values())}) + "\n")
            except OSError as error:
                self._say(f"{self._run / 'load.json'} was not written: {error.strerror}")


def _newest(folder: Path) -> dict[str, Any]:
    """The name of the newest checkpoint and its bytes, for the event log."""
    with suppress(OSError):
        name = (folder / publish.LATEST).read_text("utf-8").strip()
        return {"checkpoint": name, "bytes": sum(path.stat().st_size for path in (folder / name).iterdir())}
    return {}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
