"""The trainer of a rank: its state, its channels, and the step (forward and backward, then the optimizer).

A step depends on (build, data, step, position in the data) alone, so a run can be resumed at any step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.comm.transport import WantedChannels, Work
from runtime.contract import EXTRA_TOKENS, Collective, RunProgram
from runtime.contract.names import ProgramKind, ProgramName, RecordName
from runtime.contract.rate import batch_at, learning_rate, value_at
from runtime.data.position import Position
from runtime.data.samples import BlendSamples
from runtime.observe.health.rerun import RerunRank, recompute_step
from runtime.observe.health.watch import HealthWatch
from runtime.ops.product import wide_dtype
from runtime.state import optimizer, qk_clip
from runtime.state.average import MovingAverage
from runtime.state.offload import Staging
from runtime.state.optimizers import update_of
from runtime.state.quantised import quantised_weights
from runtime.state.state import DTYPES, FlatBucket, State, build_state, largest_parts, shared_flats
from runtime.step import records
from runtime.step.executor import ActionBoard, StepBatch, executor_of
from runtime.step.ledger import Ledger
from runtime.step.micro_batches import (
    Feed,
    FilledHeldOut,
    HeldOutSource,
    Indices,
    MicroBatches,
    SampleSource,
    order_by_cost,
)
from runtime.step.start import Start
from runtime.step.step_time import StepTime

# --- The interface of the policy in a run that learns from rewards (runtime/rl/policy.py)


class RolloutSource(Protocol):
    """Completions and rewards for the sequences of a step, in place of samples of text."""

    @property
    def iterations(self) -> int:
        """Number of steps that train on the same completions."""

    def comes_again(self, step: int) -> bool:
        """Whether step `step` + 1 (steps count from 0) trains on the same completions."""

    def roll_out(self, step: int, drawn: Indices) -> None:
        """Make completions for the sequences `drawn`, unless they exist already, with the current weights."""

    def micro_batches(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of this column's micro-batches, by name: [micro-batch, token]."""

    def compare(self, reported: Mapping[int, Tensor], data: Mapping[str, Tensor]) -> None:
        """Compare the log-probabilities of the training forward, by micro-batch, with those of generation."""

    def row(self) -> dict[str, Any]:
        """Return the metrics of a step's rollouts."""

    def close(self) -> None:
        """Stop the processes that compute rewards."""


# --- trainer

ON_CPU = Endpoint()
AT_FIRST = Start()
Sums = dict[str, Tensor]  # sums and maxima of a step or an evaluation over the world; float64 except for counts


class Trainer:
    """State of one rank.

    train, validation: samples, None if they are not needed. endpoint: the device, and how to connect to other ranks.
    start: the initial state. policy: in a run that learns from rewards, makes the source of completions for a trainer
    that has its initial weights.
    """

    def __init__(
        self,
        build: Build,
        rank: int,
        train: SampleSource | None,
        validation: HeldOutSource | BlendSamples | None,
        board: ActionBoard,
        endpoint: Endpoint = ON_CPU,
        start: Start = AT_FIRST,
        policy: Callable[[Trainer], RolloutSource] | None = None,
    ) -> None:
        plan = build.plan
        mesh = plan.mesh
        self.build, self.plan, self.rank, self.board, self.device = build, plan, rank, board, endpoint.device
        self.train_source, self.validation_source = train, validation
        self.pp_rank, self.column = mesh.coordinates(rank)
        self.programs = build.programs
        self.bodies = build.bodies(self.pp_rank)
        wanted = WantedChannels(mesh, plan.openings, shared_flats(plan, rank), largest_parts(plan))
        self.links = endpoint.connect(rank, wanted, board.set_action)
        self.state: State = build_state(plan, rank, self.device, self.links.flat)
        self.buckets = {bucket.name: bucket for bucket in self.state.buckets}
        tensors = {entry.parameter.tensor for bucket in self.state.all_buckets for entry in bucket.entries}
        self.quantised = quantised_weights(build, plan, tensors)
        self.quantised_at = -1  # the step after which they were last quantised
        self.recipe, validate = plan.train.optimizer, plan.train.validate
        self.clip = self.recipe.qk_clip  # of logits
        self.staging = Staging(self.state, plan.host.part, plan.host.slots)
        self.average = (
            MovingAverage(self.state, plan.train.ema, plan.host.part, validate is not None and validate.ema)
            if plan.train.ema
            else None
        )
        self.layers = plan.moe_layers
        products = DTYPES[plan.precision.compute] if plan.optimizer.unit == "matrix" else None
        rest_kind = [(self.recipe.rest.kind, None)] if self.recipe.rest else []
        self.updates = [  # of most buckets, and of the buckets in `rest`
            update_of(kind, build.path(f"kernels/{kind}.py"), dtype)
            for kind, dtype in ((self.recipe.kind, products), *rest_kind)
        ]
        self.step, self.position, self.loads = start.step, start.position, start.loads(plan)
        self.feed = Feed()
        self.time = StepTime(rank, mesh.world, self.device)
        self.spent = torch.zeros(0)  # seconds of all ranks by parts, summed in the last step
        self.watch = HealthWatch(plan.train, start.recent)
        self.reducing: dict[str, Work] = {}  # reductions that were started, by bucket
        self.executor = executor_of(plan, rank, self.state, self.links, board, self.time)
        start.put_weights(self.state, board)
        self.policy = policy(self) if policy else None
        start.put_saved_state(self.state, board)

    def close(self) -> None:
        """Stop the processes that compute rewards."""
        if self.policy:
            self.policy.close()

    def ledger(self) -> Ledger:
        """Return a ledger that measures the memory of a step."""
        return Ledger(self.executor, max((layer.experts for layer in self.layers), default=0) * self.plan.mesh.etp)

    # ---- one step

    @property
    def sequence(self) -> int:
        return self.plan.train.sequence

    @property
    def batch(self) -> StepBatch:
        """The last computed batch, of a step or of an evaluation."""
        return self.executor.batch

    @property
    def is_between_rollouts(self) -> bool:
        """Whether the next step has other samples than the last one, so that a run can end and resume here."""
        return self.policy is None or not self.policy.comes_again(self.step - 1)

    @property
    def steps_of_rollout(self) -> range:
        """The steps that trained on the samples of the last step. Valid if `is_between_rollouts`."""
        return range(self.step + 1 - (self.policy.iterations if self.policy else 1), self.step + 1)

    def train_step(self) -> dict[str, Any]:
        """Train one step. Return its metrics, equal on every rank. BadStepError before any weight is changed."""
        start = time.perf_counter()
        with self.time.measure("compute"):
            sums = self.accumulate()
            if self.watch.reruns:
                sums = self._rerun_if_suspect(sums)
            metrics = self.apply(sums)
        seconds = time.perf_counter() - start
        return metrics | {"tokens_per_s": sums["sequences"].item() * self.sequence / seconds, "step_s": seconds}

    def _rerun_if_suspect(self, sums: Sums) -> Sums:
        """Return the sums of a step, computed a second time if they look wrong."""
        loss, norm = self._losses(sums)["loss"], math.sqrt(sums["norm"].item())
        if not self.watch.verdict(self.step + 1, loss, norm):
            return sums
        rerun = RerunRank(self.rank, self.plan.mesh.world, self.links.sums)
        return self.watch.record_rerun(
            recompute_step(self.step + 1, sums, self.accumulate, self.records, self.state, rerun)
        )

    def accumulate(self) -> Sums:
        """Run forward and backward of the global batch. Afterwards every holder has the summed gradients."""
        samples = self.roll_out()
        for bucket in self.state.buckets:
            bucket.gradients.zero_()
        return self._run("train", self.train_source, samples)

    def roll_out(self) -> Indices:
        """Draw the samples of the next step. If they are completions, make them unless they exist already."""
        drawn = self._draw(self.position)
        if self.policy:
            self.policy.roll_out(self.step, drawn)
        return drawn

    def _draw(self, position: Position) -> Indices:
        """Return the indices of the samples of the step that begins at `position`."""
        trained = position.tokens - self.plan.train.first_token
        return position.draw(batch_at(self.plan.batches, self.sequence, trained))

    def apply(self, sums: Sums) -> dict[str, Any]:
        """Clip gradients, update weights, clip logits and balance experts. Return the metrics of the step."""
        losses, (square, *spent) = self._losses(sums), torch.cat([sums["norm"].view(1), self.spent]).tolist()
        norm = math.sqrt(square)
        samples = self.batch.samples
        skipped = self.watch.check(self.step + 1, losses["loss"], norm, (int(samples[0]), int(samples[-1]) + 1))
        tokens_before = self.position.tokens
        comes_again = self.policy is not None and self.policy.comes_again(self.step)
        self.step += 1
        self.position = self.position.after(samples, self.sequence, comes_again=comes_again)
        rate = learning_rate(self.plan.train.rate, self.position.tokens)
        self.settle()
        factors = qk_clip.factors_of(self.plan.clipped, sums["logits"], self.clip) if self.clip else {}
        with self.time.count_uneven():  # matrices may have one owner each
            self._update(optimizer.Numbers(self.step, rate, norm, factors))
        if self.average:
            self.average.start()
        self._balance(sums, tokens_before)
        return {
            "step": self.step,
            **losses,
            "grad_norm": norm,
            "rate": rate,
            "tokens": self.position.tokens,
            **self.position.epochs,
            **(records.logits_row(sums["logits"], self.clip) if self.clip else {}),
            **records.imbalance(sums, self.layers),
            **(self.policy.row() if self.policy else {}),
            **self.time.row(spent),
            **({"left_out": skipped} if skipped else {}),
        }

    def leave_out(self) -> None:
        """Skip the last batch: the step will train on the samples that follow. Nothing else changes."""
        self.position = self.position.leaving_out(self.batch.samples, self.sequence)
        self.watch.leave_out(self.step + 1)

    def settle(self) -> None:
        """Wait for the work that the last step left in the background: the moving average of the weights."""
        if self.average:
            self.board.set_action("moving average")
            self.average.wait()

    def evaluate(self) -> dict[str, float]:
        """Return the losses on the first held-out samples, and of the moving average if the spec asks for that."""
        losses = {f"validation_{name}": loss for name, loss in self._validation_losses().items()}
        if self.average and self.average.weights:
            gathers = self._program.update
            with self.average.swap_into_weights(partial(self._collect, gathers, {})):
                self.quantised_at = -1
                losses |= {f"validation_ema_{name}": loss for name, loss in self._validation_losses().items()}
            self.quantised_at = -1
        return losses

    def _validation_losses(self) -> dict[str, float]:
        validation = self.plan.train.validate
        assert validation is not None and self.validation_source is not None
        source = self.validation_source
        if not isinstance(source, BlendSamples):
            return self.losses_on(source, validation.batches)
        return source.mean({name: self.losses_on(part, validation.batches) for name, part in source.parts.items()})

    def losses_on(self, source: HeldOutSource, batches: int) -> dict[str, float]:
        """Return the mean losses over the targets in the first batches of a source, with the validation program. Each
        sample counts once: the last batch is filled with samples that have no targets."""
        size = self.plan.batches[-1][1]
        samples = FilledHeldOut(source, self.sequence + EXTRA_TOKENS)
        total: Sums = {}
        for first in range(0, min(batches * size, source.num_windows), size):
            sums = self._run("evaluate", samples, np.arange(first, first + size))
            total = {name: total[name] + value if name in total else value for name, value in sums.items()}
        losses = self._losses(total)
        return {name: losses[name] for name in ("loss", "mtp_loss") if name in losses}

    def _run(self, kind: ProgramKind, source: SampleSource | None, samples: Indices) -> Sums:
        """Execute a program on the samples with these indices. Return the sums of its records over all ranks."""
        size = len(samples)
        name = self._program_of(kind, size)
        program = self.programs[name]
        data = self._data(kind, source, samples)
        count = partial(self._count_targets, data)
        targets, mtp_targets, *tokens = self._collect(program.prologue, {"targets": count})["targets"]
        counts = {"targets": targets, "mtp_targets": mtp_targets, "sequences": torch.tensor(size, device=self.device)}
        if self.plan.indexers:
            counts["tokens"] = tokens[0] if tokens else counts["sequences"] * self.sequence
        batch = StepBatch(data, self._tangents(counts), program=name, samples=samples)
        self._quantise()
        trains = kind == "train"
        if trains and self.feed.names is not None and not self.policy:
            self._read_ahead(samples)
        self.executor.execute(self.bodies, program.ranks[self.pp_rank], batch, self._reductions(program))
        if self.policy:
            self.policy.compare(batch.reported.get("logp", {}), data)
        elif trains and self.feed.names is None:  # the first step shows which names are read
            self.feed.names = tuple(data)
            self._read_ahead(samples)
        parts = {"records": self.records, "logits": self._logits, "norm": self._norm}
        summed = self._collect(program.epilogue, parts)
        if trains:
            summed["norm"], self.spent = summed["norm"][0], summed["norm"][1:]
        return records.split_by_name(summed.pop("records"), self.plan) | counts | summed

    def _norm(self) -> Tensor:
        """Return the sum of squares of the gradients that this rank owns, with the times of `StepTime.pack_numbers`."""
        with self.time.count_uneven():  # gradients that several ranks hold are measured by one of them
            square = optimizer.gradient_square(self.state, self.rank)
        return self.time.pack_numbers(square)

    def _collect(self, listed: Iterable[Collective], parts: Mapping[str, Callable[[], Tensor]]) -> Sums:
        """Run the listed collectives of a program. Return the sums and maxima over the world, by name.

        parts: for each sum, a function that returns this rank's term.
        """
        summed: Sums = {}
        for collective in listed:
            bucket = self.buckets.get(collective.name)
            if collective.kind in ("sum", "max"):
                summed[collective.name] = parts[collective.name]()
                self.board.set_action(collective.label)
                with self.time.measure("sum"):
                    self.links.sums.all_reduce(summed[collective.name], collective.kind == "max")
            elif bucket is not None:
                self.board.set_action(collective.label)
                with self.time.measure("sum"):
                    if collective.kind == "reduce":
                        self.reducing.pop(collective.name).wait()
                    else:
                        optimizer.gather_weights(bucket, self.links.sums)
        return summed

    def _reductions(self, program: RunProgram) -> dict[int, Callable[[], None]]:
        """Return the functions that start the reductions of a program, by the number of the call that they follow."""
        listed = program.reductions[self.pp_rank] if program.reductions else ()
        starts: dict[int, list[FlatBucket]] = {}
        for after, stages in listed:
            starts.setdefault(after, []).extend(
                bucket for bucket in self.state.buckets if bucket.stages == stages and bucket.is_reduced
            )
        return {after: partial(self._start_reduce, buckets) for after, buckets in starts.items()}

    def _start_reduce(self, buckets: Iterable[FlatBucket]) -> None:
        for bucket in buckets:
            self.reducing[bucket.name] = optimizer.start_reduce(bucket, self.links.sums)

    def _update(self, numbers: optimizer.Numbers) -> None:
        """Update the weights of each bucket, and gather the weights that other ranks updated."""
        program = self._program
        gathered = {collective.name for collective in program.update}
        self.board.set_action("optimizer")
        for bucket in self.state.buckets:
            if bucket.name not in gathered and not bucket.is_still:
                self._update_bucket(bucket, numbers)
        for collective in program.update:
            if collective.name in self.buckets:
                self.board.set_action("optimizer")
                self._update_bucket(self.buckets[collective.name], numbers)
                self._collect([collective], {})
        self.staging.finish()

    def _update_bucket(self, bucket: FlatBucket, numbers: optimizer.Numbers) -> None:
        optimizer.update(bucket, self.recipe, self.updates[bucket.is_of_rest], numbers, self.staging)

    def _quantise(self) -> None:
        """Quantise the weights that matrix products read in FP8: after each step, frozen weights once."""
        if self.quantised_at != self.step:
            self.board.set_action("quantise weights")
            are_frozen_ready = self.quantised_at >= 0 and bool(self.plan.frozen)
            for weight in self.quantised:
                if not are_frozen_ready or weight.is_keyed:
                    weight.make(self.state.parameters, self.plan.train.seed, self.step, self.executor.graphs.exist)
            self.quantised_at = self.step

    def _data(self, kind: ProgramKind, source: SampleSource | None, samples: Indices) -> dict[str, Tensor]:
        """Return the inputs of a step. Those of training were prefetched."""
        if self.policy:
            return self.policy.micro_batches(self.device)
        find = partial(self._load, kind, source, samples)
        if kind != "train":
            return find()
        self.board.set_action("read samples")
        with self.time.measure("data"):
            return self.feed.take(samples, find)

    @property
    def _program(self) -> RunProgram:
        """The program of the last batch."""
        return self.programs[self.batch.program]

    def _program_of(self, kind: ProgramKind, size: int) -> ProgramName:
        return ProgramName.of(kind, size // (self.plan.mesh.dp * self.plan.train.micro_batch))

    def _load(self, kind: ProgramKind, source: SampleSource | None, samples: Indices) -> MicroBatches:
        assert source is not None
        order = self.programs[self._program_of(kind, len(samples))].order
        ordered = order_by_cost(source, samples, order) if order else samples
        return MicroBatches(self.plan, source, ordered, self.sequence, self.column, self.device)

    def _read_ahead(self, samples: Indices) -> None:
        """Start to prefetch the samples of the step after the one with `samples`."""
        following = self._draw(self.position.after(samples, self.sequence))
        self.feed.read_ahead(following, partial(self._load, "train", self.train_source, following))

    def _count_targets(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return the valid targets of the head and of MTP in this rank's column, counted by its first pipeline rank.
        With a policy their sum over ranks is 1, because token weights average the loss. If rows may be padding, and
        indexers have a loss, the number of tokens follows."""
        if self.policy:
            return torch.tensor([self.rank == 0, 0], dtype=torch.int64, device=self.device)
        counts_tokens = self.plan.data.pads_rows and len(self.plan.indexers) > 0
        if self.pp_rank > 0:
            return torch.zeros(2 + counts_tokens, dtype=torch.int64, device=self.device)
        counts = [(data[name] >= 0).sum() for name in ("targets", "mtp_targets")]
        return torch.stack([*counts, *([data["real"].sum()] if counts_tokens else [])])

    def _tangents(self, counts: Sums) -> dict[str, Tensor]:
        """Return the gradients of the objective with respect to the losses: constants, known before any forward."""
        dtype = wide_dtype(DTYPES[self.plan.precision.compute])
        constants = {"loss": 1.0 / counts["targets"].clamp(min=1).item()}
        if self.plan.mtp_weight is not None:
            weight = value_at(self.plan.mtp_weight, self.position.tokens)
            constants["mtp"] = weight / counts["mtp_targets"].clamp(min=1).item()
        constants |= records.layer_tangents(self.plan, counts)
        return {name: torch.tensor(value, dtype=dtype, device=self.device) for name, value in constants.items()}

    def records(self) -> Tensor:
        """Return the records of this rank in one vector."""
        return records.flat(self.batch.records, self.plan, self.device)

    def _logits(self) -> Tensor:
        return records.largest_logits(self.batch.records, self.plan, self.column, self.device)

    def _losses(self, sums: Sums) -> dict[str, float]:
        return records.losses(sums, self.plan)

    def _balance(self, sums: Sums, tokens_seen: int) -> None:
        for layer in self.layers:
            load = sums[RecordName.of("load", layer.name)]
            self.loads[layer.name] += load.to("cpu", torch.int64)
            if layer.bias in self.state.biases and layer.bias_rate is not None:
                rate = value_at(layer.bias_rate, tokens_seen)
                optimizer.balance(self.state.biases[layer.bias], load, rate)
