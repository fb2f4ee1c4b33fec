"""The loop of a rank in a run: open data, device and trainer, train to the end or a stop, close."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.build import run_copy
from runtime.build.build import Build
from runtime.build.compile_kernels import compile_for_rank
from runtime.checkpoint.places import CopyPlace, places_of
from runtime.checkpoint.shard_manifest import BASE, CHECKPOINTS, base_entry
from runtime.comm.connect import PEER_TIMEOUT_S, Endpoint, Transport, channels_of, transport_in_use
from runtime.contract import EXTRA_TOKENS, RunPlan, node_kind
from runtime.contract.options import START_TIMEOUT_S
from runtime.contract.rate import last_step, tokens_to_train
from runtime.data.blend import Blend
from runtime.data.samples import AnySamples, BlendSamples, RowSamples, Samples, samples_of, short_split_error
from runtime.launch import debug
from runtime.launch.heartbeat import Board
from runtime.observe.device import check, divide, take
from runtime.observe.events import Events
from runtime.observe.health.device_watch import DeviceWatch
from runtime.observe.metrics import MetricsWriter
from runtime.observe.progress import Progress
from runtime.observe.slots import Slots, host, name_of, take_core
from runtime.ops.native import library
from runtime.run.observers import (
    DeviceLooks,
    FirstLedger,
    MetricRows,
    Observer,
    ReplicaCheck,
    RerunFaults,
    StepTraces,
    StragglerWatch,
    TerminalView,
    ValidationLosses,
)
from runtime.run.profile import WARM_UP, Profile
from runtime.run.rank_run import RankRun, RunFacts
from runtime.run.resume import origin, text_of
from runtime.run.saves import Saves
from runtime.run.witness import Witness
from runtime.step.start import Start
from runtime.step.trace import Trace
from runtime.step.trainer import RolloutSource, Trainer
from runtime.system.lines import print_to_stderr

if TYPE_CHECKING:
    from runtime.data.prompts import PromptSamples


@dataclass(frozen=True)
class Ranks:
    """The devices of the ranks of a run, and how the ranks connect.

    device: cpu, cuda or shared. local_rank: rank on this machine, None if all ranks are on this machine.
    start_timeout_s: how long ranks wait for each other at the start. slots: the devices of a replay. is_debugged: a
    rank may wait at a debugger prompt. kept_because: why the run cannot go on without the device of a straggler, "" if
    it can.
    """

    device: str = "cpu"
    transport: Transport = "auto"
    local_rank: int | None = None
    start_timeout_s: float = START_TIMEOUT_S
    slots: Slots | None = None
    is_debugged: bool = False
    kept_because: str = ""

    def take(self, rank: int, world: int, plan: RunPlan) -> tuple[torch.device, str]:
        """Return the device of a rank, checked against its plan, and its name."""
        number = rank if self.local_rank is None else self.local_rank
        if self.slots and self.local_rank is None:
            number = self.slots.device_of(rank, world)
        device, name = take(self.device, number), "any core"
        if self.slots and self.slots.is_fixed and self.device == "cpu":
            name = take_core(number)
        check(device, node_kind(plan.cluster, rank), shared=self.device == "shared")
        divide(device, plan.communication_sms)
        return device, name_of(device) if self.slots and device.type == "cuda" else name

    def endpoint(self, device: torch.device, plan: RunPlan) -> Endpoint:
        """Return the settings with which a rank on this device connects to the others."""
        timeout_s = debug.TIMEOUT_S if self.is_debugged else PEER_TIMEOUT_S
        sms, start_s = plan.communication_sms, self.start_timeout_s
        return Endpoint(device, self.transport, timeout_s, start_timeout_s=start_s, sms=sms)


@dataclass(frozen=True)
class Loop:
    """A run of `build` in the folder `run` on a prepared corpus.

    steps: the last step, None for the end in the spec. start: the initial state. profile: number of steps to profile;
    such a run ends after them and saves no checkpoint. places_from: the places of checkpoint copies are relative to
    this folder; None if checkpoints are not copied.
    """

    build: Build
    run: Path
    corpus: Path
    steps: int | None
    start: Start
    ranks: Ranks = field(default_factory=Ranks)
    profile: int | None = None
    places_from: Path | None = None

    @property
    def total(self) -> int:
        """The last step. If several steps train on the same completions, the run ends with the last of them."""
        iterations = self.build.plan.train.grpo.iterations if self.build.plan.train.grpo else 1
        return -(-self._last_step // iterations) * iterations

    @property
    def _last_step(self) -> int:
        if self.profile is not None:
            return self.start.step + WARM_UP + self.profile
        plan, train = self.build.plan, self.build.plan.train
        trained = self.start.position.tokens - train.first_token
        end = last_step(plan.batches, train.sequence, self.start.step, trained, tokens_to_train(plan))
        if self.steps is None:
            return end
        return self.steps if train.within is None or train.within.is_last else min(self.steps, end)

    @property
    def _leaves_checkpoints(self) -> bool:
        return self.profile is None and not self.ranks.is_debugged and self.ranks.slots is None

    def progress(self) -> Progress:
        """Return the progress view of the supervisor."""
        meta = json.loads((self.corpus / "meta.json").read_text("utf-8"))
        return Progress(self.run, self.total, meta.get("unigram_nats"))

    def say_rows(self, say: Callable[[str], None]) -> None:
        """Print which conversations or prompts are dropped or cut, and whether the validation split is too short for a
        later phase. Raises DataError if no sample is left."""
        validation, within = self._validation(), self.build.plan.train.within
        for samples in (self._prompts() or self._samples("train"), validation):
            if samples is not None and not isinstance(samples, Samples | BlendSamples):
                for text in samples.survey.notes():
                    say(f"data: {text}")
        if within is not None and isinstance(validation, Samples | BlendSamples):
            meta = json.loads((self.corpus / "meta.json").read_text("utf-8"))
            if text := short_split_error(meta, {"validation": within.longest + EXTRA_TOKENS}):
                say(f"data: warning: a phase of longer sequences cannot validate: {text}")

    def rank(self, rank: int, world: int, board: Board, view: Progress | None = None) -> None:
        """Train to the end; the target of a launch. `view`: progress that this rank shows if there is no supervisor."""
        self._open(rank, world, board, view).train_to_end()

    def _open(self, rank: int, world: int, board: Board, view: Progress | None) -> RankRun:
        """Return a rank that is ready to train: with data, device, trainer and observers."""
        events = Events(self.run)

        def say(text: str) -> None:
            print_to_stderr(text)  # the rank's log
            board.say(text)  # the terminal
            events.write("notice", rank=rank, text=text)

        prompts = self._prompts()
        samples, validation = None if prompts else self._samples("train"), self._validation()
        device, name = self.ranks.take(rank, world, self.build.plan)
        compile_for_rank(self.build, rank, device.type, board.set_action, say)
        no_boundary: list[str] = []
        policy = self._policy(prompts, no_boundary.append)
        endpoint = self.ranks.endpoint(device, self.build.plan)
        trainer = Trainer(self.build, rank, samples, validation, board, endpoint, self.start, policy)
        observers: list[Observer] = []
        if self.ranks.slots:
            observers.append(Witness(trainer, self.run, {"host": host(), "device": name}))
        if rank == 0:
            self._begin(trainer, world, events, say)
            for split in (samples, validation):
                if isinstance(split, RowSamples):
                    events.write("rows", split=split.split, **split.survey.facts)
            if prompts:
                events.write("rows", split="train", **prompts.survey.facts)
        if len(by_carrier := channels_of(trainer.links)) > 1:
            events.write("channels", rank=rank, **by_carrier)
        for reason in no_boundary:
            if rank == 0 and reason:
                say(f"rewards: warning: your Python functions have the rights of this run: no boundary: {reason}")
            if rank == 0 or reason:
                events.write("boundary", rank=rank, is_closed=not reason, reason=reason)
        saves = Saves(trainer, world, self.run, self._about(), events, say, self._places())
        observers += self._of_each_step(trainer, events, say)
        if rank == 0:
            observers.append(MetricRows(MetricsWriter(self.run, trainer.step, say), saves, self._phase))
        if view:
            observers.append(TerminalView(view, board))
        replays = self.ranks.slots is not None
        facts = RunFacts(self.run, text_of(self.corpus), self.total, self._leaves_checkpoints, replays)
        return RankRun(facts, trainer, board, saves, observers, events, say)

    def _of_each_step(self, trainer: Trainer, events: Events, say: Callable[[str], None]) -> Iterator[Observer]:
        """Yield the observers of every rank, in the order in which they follow a step."""
        train, replays = self.build.plan.train, self.ranks.slots is not None
        if self.profile is not None:
            yield Profile(trainer, self.profile, self.run)
        elif self.ranks.device == "cpu" and not self.ranks.is_debugged and not replays:
            yield FirstLedger(trainer, self.run, run_copy.digest(self.build.files))
        trace = Trace(self.run, trainer.rank, trainer.step, run_copy.program_digest(self.build.files), say)
        yield StepTraces(trainer, trace, self.total if replays else None)
        yield RerunFaults(trainer, events, say)
        if trainer.device.type == "cuda":
            uuid = f"GPU-{torch.cuda.get_device_properties(trainer.device).uuid}"
            yield DeviceLooks(DeviceWatch(trainer.rank, uuid, events, say))
        if train.health and train.health.hash and self._leaves_checkpoints:
            yield ReplicaCheck(trainer, train.health.hash, events)
        if train.health and train.health.straggler and self.ranks.device == "cpu" and self._leaves_checkpoints:
            excludes = train.health.straggler == "exclude"
            yield StragglerWatch(trainer, events, say, excludes, self.ranks.kept_because)
        if train.validate and self.profile is None:
            ranks_checkpoints = train.checkpoint is not None and train.checkpoint.best > 0
            yield ValidationLosses(trainer, train.validate, ranks_checkpoints)

    def _policy(
        self, prompts: PromptSamples | None, tell_boundary: Callable[[str], None]
    ) -> Callable[[Trainer], RolloutSource] | None:
        """Return a function that makes the source of completions, in a run that learns from rewards."""
        if prompts is None:
            return None
        from runtime.rl.policy import policy_of

        return partial(policy_of, prompts=prompts, tell_boundary=tell_boundary)

    def _about(self) -> dict[str, Any]:
        """Return what checkpoints record about the run. For adapters this includes their base checkpoint."""
        about = origin(self.build, self.corpus, self.ranks.device)
        if not self.build.plan.adapter:
            return about
        weights = self.start.weights
        assert weights is not None, "adapters need the base weights of a checkpoint"
        return about | {BASE: base_entry(weights.path, weights.manifest, self.run / CHECKPOINTS)}

    def _places(self) -> Sequence[CopyPlace]:
        """Return the places that checkpoints are copied to."""
        saved = self.build.plan.train.checkpoint
        if saved is None or not self._leaves_checkpoints or self.places_from is None:
            return ()
        return places_of(saved.to, self.places_from, self.run)

    def _begin(self, trainer: Trainer, world: int, events: Events, say: Callable[[str], None]) -> None:
        """Copy the build's description into the run folder, and record the start."""
        try:
            run_copy.copy(self.build.files, self.run, self._phase.get("phase"))
        except OSError as error:
            say(f"{self.run} has no copy of the plan ({error.strerror}): dsc report and dsc inspect need one")
        machine = {"device": self.ranks.device, "transport": transport_in_use(trainer.links)}
        build = {"build": self.build.digest, "torch": torch.__version__, "ops": library.identity()}
        events.write("start", step=trainer.step, last_step=self.total, ranks=world, **machine, **build, **self._phase)
        if self.start.weights is not None:
            events.write("notice", rank=0, text=f"the weights begin with those of {self.start.weights.path}")
        if (saved := self.start.saved) is None:
            return
        for reason in saved.refused:
            events.write("refused", reason=reason)
        events.write("resume", step=saved.step, checkpoint=saved.path.name)

    @property
    def _phase(self) -> dict[str, int]:
        """The phase, as rows and events record it; empty in a run without phases."""
        within = self.build.plan.train.within
        return {"phase": within.number} if within else {}

    def _prompts(self) -> PromptSamples | None:
        if self.build.plan.data.prompts is None:
            return None
        from runtime.data.prompts import open_prompts  # with tokenizers

        return open_prompts(self.build.plan, self.corpus)

    def _samples(self, split: str) -> AnySamples:
        train, chat = self.build.plan.train, self.build.plan.data.chat
        order = self.start.position.order
        order = order if split == "train" or isinstance(order, Blend) else None
        return samples_of(self.corpus, split, train.sequence, EXTRA_TOKENS, seed=train.seed, chat=chat, order=order)

    def _validation(self) -> AnySamples | None:
        return self._samples("validation") if self.build.plan.train.validate else None
