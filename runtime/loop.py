"""The life of a rank in a run: resume, then steps, validations, metrics and checkpoints until the end or a stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from runtime import checkpoint, kept, ledger, snapshot
from runtime.build import Build
from runtime.checkpoint import Checkpoint
from runtime.comm.connect import Transport, expected_transport, transport_in_use
from runtime.data.samples import Samples
from runtime.device import BACKENDS, take
from runtime.events import Events
from runtime.heartbeat import Board
from runtime.lines import to_stderr
from runtime.metrics import Metrics
from runtime.profile import WARM_UP, Profile
from runtime.progress import Progress
from runtime.resume import difference, not_bit_for_bit, origin
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
        return Progress(self.run, self.total, meta.get("unigram_nats"))

    def rank(self, rank: int, world: int, board: Board, view: Progress | None = None) -> None:
        """Train to the end; the target of a launch. `view`: shown by this rank, where no supervisor does."""
        train = self.build.plan["train"]
        device = take(self.device, rank)
        samples, validation = self._samples("train"), self._validation()
        trainer = Trainer(self.build, rank, samples, validation, board, device, transport=self.transport)
        if self.resume is not None:
            board.set_action("load checkpoint")
            _restore(trainer, self.resume)

        def say(text: str) -> None:
            to_stderr(text)  # the rank's log
            board.say(text)  # the terminal
            events.write("notice", rank=rank, text=text)

        events = Events(self.run)
        machine = {"device": self.device, "transport": transport_in_use(trainer.links)}
        if rank == 0:
            self._begin(trainer, world, machine, events, say)
        metrics = Metrics(self.run, trainer.step, say) if rank == 0 else None
        trace = Trace(self.run, rank, trainer.step, kept.program_digest(self.build.files), say)
        measured = self.device != "cpu" or ledger.is_there(self.run, rank, kept.digest(self.build.files))
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
                self._save(trainer, world, machine, events)
            if stop:
                if rank == 0 and (asked := board.stop_request()):
                    by = "supervisor" if asked.rank < 0 else f"rank {asked.rank}"
                    events.write("stop", step=trainer.step, signal=Signals(asked.signal).name, received_by=by)
                break
        if profile and trainer.step == self.total:
            profile.write(self.run)
        trace.close()
        if metrics:
            metrics.close()
        events.close()
        if view:
            view.close()

    @property
    def machine(self) -> dict[str, str]:
        """What ranks will compute on and talk by, as far as it is known before they run."""
        backend, mesh = BACKENDS[self.device], self.build.plan["mesh"]
        return {
            "device": self.device,
            "transport": expected_transport(self.transport, backend, mesh["pp"] * mesh["dp"]),
        }

    def _begin(
        self, trainer: Trainer, world: int, machine: dict[str, str], events: Events, say: Callable[[str], None]
    ) -> None:
        """Keep the build's description, record the start, and say what only ranks that have met can know."""
        try:
            kept.copy(self.build.files, self.run)
        except OSError as error:
            say(f"{self.run} has no copy of what was planned ({error.strerror}): dsc report and dsc inspect need one")
        build = {"build": self.build.digest, "torch": torch.__version__}
        events.write("start", step=trainer.step, last_step=self.total, ranks=world, **machine, **build)
        if self.resume is None:
            return
        for reason in self.resume.refused:
            events.write("refused", reason=reason)
        events.write("resume", step=self.resume.step, checkpoint=self.resume.path.name)
        was = self.resume.meta
        if machine != self.machine and was.get("transport") != machine["transport"]:
            say(not_bit_for_bit([difference(was, machine, "transport")]))

    def _measured_step(self, trainer: Trainer) -> dict[str, Any]:
        """A step whose ledger is kept: on a CPU the first that a run trains of a build."""
        with trainer.ledger() as held:
            row = trainer.train_step()
        with suppress(OSError):  # a full disk does not end a run
            held.write(self.run, trainer.rank, trainer.step, trainer.program, kept.digest(self.build.files))
        return row

    def _samples(self, split: str) -> Samples:
        train = self.build.plan["train"]
        return Samples(self.corpus, split, train["sequence"], EXTRA_TOKENS, seed=train["seed"])

    def _validation(self) -> Samples | None:
        return self._samples("validation") if self.build.plan["train"]["validate"] else None

    # ---- checkpoints

    def _save(self, trainer: Trainer, world: int, machine: dict[str, str], events: Events) -> None:
        start = time.perf_counter()
        keep = (self.build.plan["train"]["checkpoint"] or {"keep": 1})["keep"]
        loads = {name: load.tolist() for name, load in trainer.loads.items()}
        meta = origin(self.build, self.corpus) | machine
        meta |= {"threads": torch.get_num_threads(), "loads": loads}
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
        if trainer.rank == 0:
            events.write("save", step=trainer.step, **_size(self.run), seconds=round(time.perf_counter() - start, 3))
        if trainer.rank == 0 and loads:
            _replace(self.run / "load.json", json.dumps({"load": list(loads.values())}) + "\n")


def _restore(trainer: Trainer, saved: Checkpoint) -> None:
    snapshot.put(trainer.state, saved.read)
    trainer.step = saved.step
    for name, load in saved.meta["loads"].items():
        trainer.loads[name] = torch.tensor(load)


def _size(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run folder and its bytes, for the event log."""
    with suppress(OSError):
        name = (run / "checkpoints" / checkpoint.LATEST).read_text("utf-8").strip()
        return {
            "checkpoint": name,
            "bytes": sum(path.stat().st_size for path in (run / "checkpoints" / name).iterdir()),
        }
    return {}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
