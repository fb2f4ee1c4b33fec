"""The life of a rank in a run: resume, then steps, validations, metrics and checkpoints until the end or a stop."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from runtime.build import run_copy
from runtime.build.build import Build
from runtime.checkpoint.loading import Checkpoint
from runtime.checkpoint.places import Place, places_of
from runtime.checkpoint.retention import LOSS
from runtime.checkpoint.shard_manifest import BASE, CHECKPOINTS, base_named
from runtime.comm.connect import PEER_TIMEOUT_S, Endpoint, Transport, channels_of, transport_in_use
from runtime.contract import EXTRA_TOKENS, node_kind
from runtime.contract.options import START_TIMEOUT_S
from runtime.contract.rate import last_step, tokens_to_train
from runtime.data.blend import Blend
from runtime.data.position import Position
from runtime.data.samples import AnySamples, BlendSamples, RowSamples, Samples, samples_of, too_short
from runtime.launch import debug
from runtime.launch.heartbeat import Board
from runtime.observe.device import check, divide, take
from runtime.observe.events import Events
from runtime.observe.health import record, replicas
from runtime.observe.health.judge import BadStepError, Recent
from runtime.observe.metrics import Metrics
from runtime.observe.progress import Progress
from runtime.observe.slots import Slots, host, name_of, take_core
from runtime.ops.native import library
from runtime.run.profile import WARM_UP, Profile
from runtime.run.resume import origin, text_of
from runtime.run.saves import Saves
from runtime.run.witness import Witness, as_hex
from runtime.state import snapshot
from runtime.state.snapshot import AVERAGE
from runtime.step import ledger
from runtime.step.trace import Trace
from runtime.step.trainer import Trainer
from runtime.system.lines import to_stderr

if TYPE_CHECKING:
    from runtime.data.prompts import PromptSamples


@dataclass(frozen=True)
class Loop:
    """A run of `build` in the folder `run` on a prepared corpus.

    `steps`: where to end, None for the spec's last token. `resume`: a verified checkpoint of the same model, or None.
    """

    build: Build
    run: Path
    corpus: Path
    steps: int | None
    resume: Checkpoint | None
    position: Position  # in the data, of the first step
    device: str = "cpu"  # or cuda, or shared
    transport: Transport = "auto"
    profile: int | None = None  # steps to profile; such a run ends with them and leaves no checkpoint
    local_rank: int | None = None  # among the ranks of this machine; None: all ranks are of this machine
    debugged: bool = False  # a rank may wait at its prompt; such a run leaves no checkpoint either
    start_timeout_s: float = START_TIMEOUT_S  # how long ranks wait for all to come
    places_from: Path | None = None  # folder that places of checkpoints are relative to; None: none is copied
    initial: Checkpoint | None = None  # whose weights a run begins with that does not resume, or that has adapters
    recent: Recent = field(default_factory=Recent)  # what the run remembers of its steps
    slots: Slots | None = None  # in a replay, which is watched and leaves no checkpoint: where its ranks compute

    @property
    def total(self) -> int:
        """The last step. Where several train on the same completions a run ends with the last of them."""
        again = self.build.plan.train.grpo.iterations if self.build.plan.train.grpo else 1
        return -(-self._last_step // again) * again

    @property
    def _last_step(self) -> int:
        if self.profile is not None:
            return (self.resume.step if self.resume else 0) + WARM_UP + self.profile
        train, step = self.build.plan.train, self.resume.step if self.resume else 0
        done = self.position.tokens - train.first_token
        end = last_step(self.build.plan.batches, train.sequence, step, done, tokens_to_train(self.build.plan))
        if self.steps is None:
            return end
        return self.steps if train.within is None or train.within.is_last else min(self.steps, end)

    @property
    def _timeout_s(self) -> float:
        """How long ranks wait for one another before they fail."""
        return debug.TIMEOUT_S if self.debugged else PEER_TIMEOUT_S

    @property
    def _saves_nothing(self) -> bool:
        return self.profile is not None or self.debugged or self.slots is not None

    def progress(self) -> Progress:
        """What the supervisor shows while the ranks run."""
        meta = json.loads((self.corpus / "meta.json").read_text("utf-8"))
        return Progress(self.run, self.total, meta.get("unigram_nats"))

    def say_rows(self, say: Callable[[str], None]) -> None:
        """Say which conversations or prompts are not read as they are, and whether what is held out is too short for a
        later phase. Raises DataError where no sample is left."""
        validation, within = self._validation(), self.build.plan.train.within
        for samples in (self._prompts() or self._samples("train"), validation):
            if samples is not None and not isinstance(samples, Samples | BlendSamples):
                for text in samples.survey.notes():
                    say(f"data: {text}")
        if within is not None and isinstance(validation, Samples | BlendSamples):
            meta = json.loads((self.corpus / "meta.json").read_text("utf-8"))
            if text := too_short(meta, {"validation": within.longest + EXTRA_TOKENS}):
                say(f"data: warning: a phase of longer sequences cannot validate: {text}")

    def rank(self, rank: int, world: int, board: Board, view: Progress | None = None) -> None:
        """Train to the end; the target of a launch. `view`: shown by this rank, where no supervisor does."""
        train, health = self.build.plan.train, self.build.plan.train.health
        prompts = self._prompts()
        samples, validation = None if prompts else self._samples("train"), self._validation()
        plan, number = self.build.plan, self._device_number(rank, world)
        device, core = take(self.device, number), ""
        if self.slots and self.slots.fixed and self.device == "cpu":
            core = take_core(number)
        check(device, node_kind(plan.cluster, rank), shared=self.device == "shared")
        divide(device, plan.communication_sms)
        sms, start_s = plan.communication_sms, self.start_timeout_s
        endpoint = Endpoint(device, self.transport, self._timeout_s, start_timeout_s=start_s, sms=sms)
        trainer = Trainer(self.build, rank, samples, validation, board, endpoint)
        trainer.position, trainer.watch.recent = self.position, self.recent
        if self.initial is not None:
            board.set_action("load initial weights")
            put = snapshot.put_untrained if plan.adapter else snapshot.put_weights
            put(trainer.state, self.initial.read, self.initial.shapes)
        policy = None
        if prompts:
            from runtime.rl.policy import policy_of

            policy = policy_of(trainer, prompts)
        if self.resume is not None:
            board.set_action("load checkpoint")
            _restore(trainer, self.resume)
        if policy:
            trainer.policy = policy

        def say(text: str) -> None:
            to_stderr(text)  # the rank's log
            board.say(text)  # the terminal
            events.write("notice", rank=rank, text=text)

        events, witness = Events(self.run), None
        if self.slots:
            where = name_of(device) if device.type == "cuda" else core or "any core"
            witness = Witness(trainer, self.run, {"host": host(), "device": where})
        if rank == 0:
            self._begin(trainer, world, events, say)
            for split in (samples, validation):
                if isinstance(split, RowSamples):
                    events.write("rows", split=split.split, **split.survey.facts)
            if prompts:
                events.write("rows", split="train", **prompts.survey.facts)
        if len(by_carrier := channels_of(trainer.links)) > 1:
            events.write("channels", rank=rank, **by_carrier)
        saves = Saves(trainer, world, self.run, self._about(), events, say, self._places())
        metrics = Metrics(self.run, trainer.step, say) if rank == 0 else None
        trace = Trace(self.run, rank, trainer.step, run_copy.program_digest(self.build.files), say)
        measured = self.device != "cpu" or self.debugged or witness is not None
        measured = measured or ledger.is_there(self.run, rank, run_copy.digest(self.build.files))
        profile = Profile(trainer, self.profile) if self.profile is not None else None
        total, phase, stop = self.total, self._phase, False
        while trainer.step < total:
            board.start_step(trainer.step + 1)
            with self._all_end(trainer, world, saves):
                try:
                    if profile:
                        row = profile.train_step()
                    else:
                        row = trainer.train_step() if measured else self._measured_step(trainer)
                        measured = True
                except BadStepError as bad:
                    self._act(bad, trainer, events, say)
                    if bad.verdict.action != "skip":  # of a replay, which has what it came for
                        break
                    continue
                finally:
                    _say_faults(trainer, events, say)
            last = trainer.step == total
            trace.write(trainer.step, trainer.program, trainer.actions, wanted=last and self.slots is not None)
            if saves.poll() and rank == 0:
                board.request_stop(SIGTERM)  # the step behind which all end is agreed on as for a signal
            stop = board.should_stop(trainer.step) and trainer.is_between_rollouts
            due = not self._saves_nothing and trainer.is_between_rollouts
            due = due and (last or any(map(saves.due, trainer.steps_of_rollout)))
            if health and health.hash and not self._saves_nothing and (due or trainer.step % health.hash == 0):
                with self._all_end(trainer, world, saves):
                    self._compare(trainer, events)
            if train.validate and not profile and (last or self._validates(trainer.step, saves=due)):
                with trainer.time.whole("validation"):
                    row |= trainer.evaluate()
            if metrics:
                metrics.write(row | phase | ({"copy_failed": saves.failing} if saves.failing else {}))
            if view:
                view.poll(board)
            if due or (stop and not self._saves_nothing):
                with trainer.time.whole("checkpoint"):
                    saves.save(row.get(LOSS), last=last or stop)
            if stop:
                if rank == 0 and (asked := board.stop_request()):
                    by = "supervisor" if asked.rank < 0 else f"rank {asked.rank}"
                    events.write("stop", step=trainer.step, signal=Signals(asked.signal).name, received_by=by)
                break
        if policy:
            policy.close()
        saves.finish(stopped=stop)
        if profile and trainer.step == total:
            profile.write(self.run)
        trace.close()
        if witness:
            witness.close()
        if metrics:
            metrics.close()
        events.close()
        if view:
            view.close()

    def _device_number(self, rank: int, world: int) -> int:
        """The number of the device of a rank on its machine."""
        if self.local_rank is not None:
            return self.local_rank
        return self.slots.device_of(rank, world) if self.slots else rank

    def _about(self) -> dict[str, Any]:
        """What checkpoints say of the run; of adapters, also which weights they are beside."""
        about = origin(self.build, self.corpus, self.device)
        if not self.build.plan.adapter:
            return about
        assert self.initial is not None, "adapters are beside the weights of a checkpoint"
        return about | {BASE: base_named(self.initial.path, self.initial.manifest, self.run / CHECKPOINTS)}

    def _places(self) -> Sequence[Place]:
        """Where checkpoints are copied to."""
        saved = self.build.plan.train.checkpoint
        if saved is None or self._saves_nothing or self.places_from is None:
            return ()
        return places_of(saved.to, self.places_from, self.run)

    def _begin(self, trainer: Trainer, world: int, events: Events, say: Callable[[str], None]) -> None:
        """Keep the build's description, and record the start."""
        try:
            run_copy.copy(self.build.files, self.run, self._phase.get("phase"))
        except OSError as error:
            say(f"{self.run} has no copy of what was planned ({error.strerror}): dsc report and dsc inspect need one")
        machine = {"device": self.device, "transport": transport_in_use(trainer.links)}
        build = {"build": self.build.digest, "torch": torch.__version__, "ops": library.identity()}
        events.write("start", step=trainer.step, last_step=self.total, ranks=world, **machine, **build, **self._phase)
        if self.initial is not None:
            events.write("notice", rank=0, text=f"the weights begin with those of {self.initial.path}")
        if self.resume is None:
            return
        for reason in self.resume.refused:
            events.write("refused", reason=reason)
        events.write("resume", step=self.resume.step, checkpoint=self.resume.path.name)

    @property
    def _phase(self) -> dict[str, int]:
        """What rows and events say of the phase, in a run that has several."""
        within = self.build.plan.train.within
        return {"phase": within.number} if within else {}

    def _measured_step(self, trainer: Trainer) -> dict[str, Any]:
        """A step whose ledger is kept: on a CPU the first that a run trains of a build."""
        trainer.roll_out()  # which the plan of a step does not have
        with trainer.ledger() as held:
            row = trainer.train_step()
        with suppress(OSError):  # a full disk does not end a run
            held.write(self.run, trainer.rank, trainer.step, trainer.program, run_copy.digest(self.build.files))
        return row

    def _prompts(self) -> PromptSamples | None:
        if self.build.plan.data.prompts is None:
            return None
        from runtime.data.prompts import open_prompts  # with tokenizers

        return open_prompts(self.build.plan, self.corpus)

    def _samples(self, split: str) -> AnySamples:
        train, chat = self.build.plan.train, self.build.plan.data.chat
        order = self.position.order if split == "train" or isinstance(self.position.order, Blend) else None
        return samples_of(self.corpus, split, train.sequence, EXTRA_TOKENS, seed=train.seed, chat=chat, order=order)

    def _validation(self) -> AnySamples | None:
        return self._samples("validation") if self.build.plan.train.validate else None

    def _validates(self, step: int, *, saves: bool) -> bool:
        """Whether the run is validated after a step: by the spec, and where a checkpoint is judged by its loss."""
        train = self.build.plan.train
        best = train.checkpoint is not None and train.checkpoint.best > 0
        assert train.validate is not None
        return step % train.validate.every == 0 or (best and saves)

    def _act(self, bad: BadStepError, trainer: Trainer, events: Events, say: Callable[[str], None]) -> None:
        """What follows a step that must not change the weights: the batch is left out, or it is raised, to end the run
        or to roll it back. A replay ends by itself."""
        action, world = bad.verdict.action, self.build.plan.mesh.world
        if trainer.rank == 0:
            facts: dict[str, Any] = {"samples": [bad.samples[0], bad.samples[1] - 1], "loss": _number(bad.loss)}
            facts |= {"grad_norm": _number(bad.norm), "to": bad.to}
            facts |= {"prints": [as_hex(each) for each in bad.prints]}
            facts |= {"replay": f"dsc replay {shlex.quote(str(self.run))} {bad.step}{' --swap all' * (world > 1)}"}
            events.write("bad_step", step=bad.step, action=action, reason=bad.verdict.reason, **facts)
            if action != "skip" and not self.slots:
                with suppress(OSError):
                    record.record(self.run, record.identity(trainer.position, text_of(self.corpus)), bad)
        if action != "skip":
            if self.slots:
                return
            order = record.identity(trainer.position, text_of(self.corpus))
            raise bad.after(record.failed_before(self.run, order, bad))
        trainer.leave_out()
        if trainer.rank == 0:
            first, end = bad.samples
            say(f"step {bad.step}: {bad.verdict.reason}; samples {first:,} to {end - 1:,} are left out")

    def _compare(self, trainer: Trainer, events: Events) -> None:
        """Compare the bits that ranks hold alike. Raises ReplicaError on all of them."""
        trainer.settle()
        trainer.board.set_action("compare replicas")
        found = replicas.compare(trainer.state, self.build.plan, trainer.rank, trainer.links.sums)
        if found:
            error = replicas.ReplicaError(trainer.step, found)
            if trainer.rank == 0:
                facts = {"ranks": error.ranks, "tensors": error.tensors}
                events.write("fault", step=trainer.step, reason="; ".join(map(str, found)), **facts)
            raise error

    @contextmanager
    def _all_end(self, trainer: Trainer, world: int, saves: Saves) -> Iterator[None]:
        """Where all ranks raise an error alike, each says it and ends the save that was begun, before any of them
        ends because of it."""
        try:
            yield
        except (BadStepError, replicas.ReplicaError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)  # the first rank that ends may end the others
            saves.settle()
            if world > 1:
                dist.barrier()
            raise


def _number(value: float) -> float | str:
    """A number, or the word for one that JSON has not."""
    return value if math.isfinite(value) else str(value)


def _say_faults(trainer: Trainer, events: Events, say: Callable[[str], None]) -> None:
    """Tell of steps that had other bits when they were computed again."""
    for fault in trainer.watch.faults if trainer.rank == 0 else ():
        events.write("fault", step=fault.step, reason=fault.reason, ranks=[*fault.ranks], tensors=[])
        say(f"step {fault.step}: {fault.reason}; the second result holds")
    trainer.watch.faults.clear()


def _restore(trainer: Trainer, saved: Checkpoint) -> None:
    snapshot.put(trainer.state, saved.read, averaged=any(name.startswith(f"{AVERAGE}/") for name in saved.shapes))
    trainer.step = saved.step
    for name, load in saved.meta["loads"].items():
        trainer.loads[name] = torch.tensor(load)
