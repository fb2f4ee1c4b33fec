"""The life of a rank in a run: resume, then steps, validations, metrics and checkpoints until the end or a stop."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime import checkpoint, kept, ledger, snapshot
from runtime.build import Build
from runtime.checkpoint import Checkpoint
from runtime.comm.connect import Transport
from runtime.data.samples import Samples
from runtime.device import take
from runtime.heartbeat import Board
from runtime.metrics import Metrics
from runtime.profile import WARM_UP, Profile
from runtime.progress import Progress
from runtime.resume import origin
from runtime.trace import Trace
from runtime.trainer import EXTRA_TOKENS, Trainer


@dataclass(frozen=True)
class Loop:
    """A run of `build` in the folder `run` on a prepared corpus.

    `steps`: where to end, None for the spec's last. `resume`: a verified checkpoint of the same model, or None.
    """

    build: Build
    run: Path
    corpus: Path
    steps: int | None
    resume: Checkpoint | None
    device: str = "cpu"  # or cuda, or shared
    transport: Transport = "auto"
    profile: int | None = None  # steps to profile; such a run ends with them and leaves no checkpoint

    @property
    def total(self) -> int:
        if self.profile is not None:
            return (self.resume.step if self.resume else 0) + WARM_UP + self.profile
        return self.steps if self.steps is not None else self.build.plan["steps"]

    def progress(self) -> Progress:
        """What the supervisor shows while the ranks run."""
        meta = json.loads((self.corpus / "meta.json").read_text("utf-8"))
        return Progress(self.run / "metrics.jsonl", self.total, meta.get("unigram_nats"))

    def rank(self, rank: int, world: int, board: Board, view: Progress | None = None) -> None:
        """Train to the end; the target of a launch. `view`: shown by this rank, where no supervisor does."""
        train = self.build.plan["train"]
        device = take(self.device, rank)
        samples, validation = self._samples("train"), self._validation()
        trainer = Trainer(self.build, rank, samples, validation, board, device, transport=self.transport)
        if self.resume is not None:
            board.set_action("load checkpoint")
            _restore(trainer, self.resume)
        metrics = Metrics(self.run / "metrics.jsonl", trainer.step) if rank == 0 else None
        trace = Trace(self.run, rank, trainer.step)
        if rank == 0:
            kept.copy(self.build.folder, self.run)
        measured = self.device != "cpu" or ledger.is_there(self.run, rank, self.build.folder)
        profile = Profile(trainer, self.profile) if self.profile is not None else None
        while trainer.step < self.total:
            board.start_step(trainer.step + 1)
            if profile:
                row = profile.train_step()
            else:
                row = trainer.train_step() if measured else self._measured_step(trainer)
                measured = True
            trace.write(trainer.step, trainer.program, trainer.actions)
            last = trainer.step == self.total
            stop = board.should_stop(trainer.step)
            if train["validate"] and not profile and (last or trainer.step % train["validate"]["every"] == 0):
                row |= trainer.evaluate()
            if metrics:
                metrics.write(row)
            if view:
                view.poll(board)
            every = train["checkpoint"]["every"] if train["checkpoint"] else None
            if not profile and (last or stop or (every and trainer.step % every == 0)):
                board.set_action("checkpoint")
                self._save(trainer, world)
            if stop:
                break
        if profile and trainer.step == self.total:
            profile.write(self.run)
        trace.close()
        if metrics:
            metrics.close()
        if view:
            view.close()

    def _measured_step(self, trainer: Trainer) -> dict[str, Any]:
        """A step whose ledger is kept: on a CPU the first that a run trains of a build."""
        with trainer.ledger() as held:
            row = trainer.train_step()
        with suppress(OSError):  # a full disk does not end a run
            held.write(self.run, trainer.rank, trainer.step, trainer.program, kept.digest(self.build.folder))
        return row

    def _samples(self, split: str) -> Samples:
        train = self.build.plan["train"]
        return Samples(self.corpus, split, train["sequence"], EXTRA_TOKENS, seed=train["seed"])

    def _validation(self) -> Samples | None:
        return self._samples("validation") if self.build.plan["train"]["validate"] else None

    # ---- checkpoints

    def _save(self, trainer: Trainer, world: int) -> None:
        keep = (self.build.plan["train"]["checkpoint"] or {"keep": 1})["keep"]
        loads = {name: load.tolist() for name, load in trainer.loads.items()}
        meta = origin(self.build, self.corpus) | {"threads": torch.get_num_threads(), "loads": loads}
        checkpoint.save(
            self.run / "checkpoints",
            trainer.step,
            snapshot.take(trainer.state, trainer.plan, trainer.rank),
            trainer.rank,
            world,
            meta,
            dist.barrier if world > 1 else lambda: None,
            keep,
        )
        if trainer.rank == 0 and loads:
            _replace(self.run / "load.json", json.dumps({"load": list(loads.values())}) + "\n")


def _restore(trainer: Trainer, saved: Checkpoint) -> None:
    snapshot.put(trainer.state, saved.read)
    trainer.step = saved.step
    for name, load in saved.meta["loads"].items():
        trainer.loads[name] = torch.tensor(load)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
