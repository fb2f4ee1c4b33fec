"""Failures of a cluster → the share of the time that a run trains, and the interval of checkpoints that is best.

Failures come at random, one in `mtbf` of the whole cluster in the mean. One loses what was trained behind the newest
checkpoint that was written to its end, and a restart, in which the next failure may come. So with an interval of τ
seconds of training, a copy of δ that training waits for, a write of w behind it under the next steps, a restart of R
and λ = 1 / mtbf, a run from one restart to the next failure lasts 1/λ in the mean and keeps

    τ · Σ P(k writes end before the failure) = τ · exp(-λw) / (exp(λ(τ + δ)) - 1)

which over what it and its restart take, exp(λR) / λ, is the goodput. Without w this is J. T. Daly's model, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.plan import Replica
from compiler.plan.plan import WITH_STATE
from compiler.predict.memory_state import untrained_bytes
from dsl.closed_forms.memory import ITEMSIZE, average_dtype, state_bytes
from dsl.schema import Spec
from dsl.schema.cluster import MTBF_S, Failures


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of the time in which a run trains what stays, and what it is made of."""

    mtbf_s: float  # of the whole cluster
    copy_s: float  # that training waits for in a save
    write_s: float  # behind the copy, under the next steps
    restart_s: float
    best_steps: int  # from one checkpoint to the next
    best: float  # the share with it
    of_spec: float | None  # the share with those of the spec; None where it asks for none
    checkpoint_bytes: int

    @property
    def share(self) -> float:
        """With the checkpoints of the spec; with the best ones where it asks for none."""
        return self.best if self.of_spec is None else self.of_spec


def goodput_of(spec: Spec, replicas: Sequence[Replica], step_s: float, copy_s: float) -> Goodput | None:
    """What failures take from a run; None on CPUs whose cluster has no block `failures`.

    `copy_s`: in which the slowest device copies to its host what it saves.
    """
    failures = spec.cluster.failures or (Failures() if spec.has_hosts else None)
    if failures is None:
        return None
    size = checkpoint_bytes(spec, replicas)
    mtbf_s = failures.mtbf / spec.cluster.world
    write_s = size / spec.cluster.num_nodes / failures.store
    if spec.train.checkpoint is not None and not spec.train.checkpoint.background:  # training waits for all of it
        copy_s, write_s = write_s, 0.0

    def every(steps: int) -> float:
        return share(steps * step_s, mtbf_s, copy_s, write_s, failures.restart)

    best = best_steps(step_s, mtbf_s, copy_s, write_s)
    asked = spec.train.checkpoint.every if spec.train.checkpoint else None
    of_spec = None if asked is None else every(asked)
    return Goodput(mtbf_s, copy_s, write_s, failures.restart, best, every(best), of_spec, size)


def checkpoint_bytes(spec: Spec, replicas: Sequence[Replica]) -> int:
    """Bytes of the tensors of a checkpoint: of each parameter that has state its master weight, that state and the
    moving average; and balancing biases and tables."""
    average = ITEMSIZE[average_dtype(spec.precision)] if spec.train.ema else 0
    optimizer = spec.train.optimizer
    of_weight = ITEMSIZE[spec.precision.master] + average
    of = [of_weight + state_bytes(spec.precision, row) for row in optimizer.rows]

    def bytes_of(each: Replica) -> int:
        if each.role in WITH_STATE:
            return each.num_elements * of[optimizer.is_rest(each.matrices)]
        return 0 if spec.adapter else untrained_bytes(spec, each)

    return sum(map(bytes_of, replicas))


def share(interval_s: float, mtbf_s: float, copy_s: float, write_s: float, restart_s: float) -> float:
    """The goodput with a checkpoint behind every `interval_s` of training, 0 to 1.

    A save waits until the one before is written.
    """
    first = interval_s + copy_s + write_s  # until the first write of a start has ended
    cycle = max(interval_s, write_s) + copy_s  # and from one end to the next
    kept = math.exp(-(first + restart_s) / mtbf_s) / -math.expm1(-cycle / mtbf_s)
    return interval_s / mtbf_s * kept


def best_steps(step_s: float, mtbf_s: float, copy_s: float, write_s: float) -> int:
    """The interval of the largest goodput, in whole steps.

    Its derivative is 0 where 1 - exp(-λ(τ + δ)) = λτ. The left side falls below the right one there and stays there.
    """
    low, high = 0.0, 1.0  # of λτ
    for _ in range(60):
        middle = (low + high) / 2
        above = -math.expm1(-(middle + copy_s / mtbf_s)) > middle
        low, high = (middle, high) if above else (low, middle)
    at = max(low * mtbf_s, write_s) / step_s
    around = {max(1, math.floor(at)), max(1, math.ceil(at))}
    return max(sorted(around), key=lambda steps: share(steps * step_s, mtbf_s, copy_s, write_s, 0.0))


def assumed(spec: Spec, found: Goodput | None) -> Sequence[str]:
    """What a prediction takes for granted of failures."""
    if found is None:
        return ()
    hours, minutes = MTBF_S / 3600, found.restart_s / 60
    if spec.cluster.failures is not None:
        return ("failures come at random, as often as the cluster says",)
    return (
        f"one device brings a failure in {hours:,.0f} hours, as of 16,384 H100 in arXiv 2407.21783; a restart takes"
        f" {minutes:g} min; a node writes {Failures().store / 1e9:g} GB/s of a checkpoint: `failures` in the cluster",
    )
