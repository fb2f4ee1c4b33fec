"""The goodput of a run under failures of its cluster, and the best interval of checkpoints.

Failures are random, with a mean time of `mtbf` between failures of the whole cluster. A failure loses the training
since the newest complete checkpoint, and the time of a restart, during which the next failure may come.
Let τ be the seconds of training between checkpoints, δ the copy that training waits for, w the write that follows under
the next steps, R the restart, and λ = 1 / mtbf. A run from a restart to the next failure lasts 1/λ on average and keeps

    τ · Σ P(k writes end before the failure) = τ · exp(-λw) / (exp(λ(τ + δ)) - 1)

of training. Divided by the time of the run and its restart, exp(λR) / λ, this is the goodput. Without w this is J. T.
Daly's model, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.plan import Plan, Replica
from compiler.plan.plan import WITH_STATE
from compiler.predict.memory_state import untrained_bytes
from dsl.closed_forms.memory import ITEMSIZE, average_dtype, state_bytes
from dsl.schema import Spec
from dsl.schema.cluster import MTBF_S, Failures


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of the time that is training which is not lost to failures."""

    mtbf_s: float  # of the whole cluster
    copy_s: float  # that training waits for when it saves
    write_s: float  # after the copy, under the next steps
    restart_s: float
    best_steps: int  # between checkpoints, for the largest goodput
    best: float  # goodput with that interval
    of_spec: float | None  # goodput with the interval of the spec; None if it saves none
    checkpoint_bytes: int

    @property
    def share(self) -> float:
        """Goodput with the checkpoints of the spec, or with the best interval if it saves none."""
        return self.best if self.of_spec is None else self.of_spec


def goodput_of(spec: Spec, plan: Plan, step_s: float, copy_s: float) -> Goodput | None:
    """The goodput of a run; None for CPUs whose cluster has no block `failures`.

    `copy_s`: seconds in which the slowest device copies its part of a checkpoint to the host.
    """
    failures = spec.cluster.failures or (Failures() if spec.has_hosts else None)
    if failures is None:
        return None
    size = checkpoint_bytes(spec, plan)
    mtbf_s = failures.mtbf / spec.cluster.world
    write_s = size / spec.cluster.num_nodes / failures.store
    if spec.train.checkpoint is not None and not spec.train.checkpoint.background:  # training waits for all of it
        copy_s, write_s = write_s, 0.0

    def every(steps: int) -> float:
        return goodput_share(steps * step_s, mtbf_s, copy_s, write_s, failures.restart)

    best = best_steps(step_s, mtbf_s, copy_s, write_s)
    interval = spec.train.checkpoint.every if spec.train.checkpoint else None
    of_spec = None if interval is None else every(interval)
    return Goodput(mtbf_s, copy_s, write_s, failures.restart, best, every(best), of_spec, size)


def checkpoint_bytes(spec: Spec, plan: Plan) -> int:
    """Bytes of a checkpoint's tensors.

    For each parameter with optimizer state these are its master weight, that state and the moving average. Balancing
    biases and tables are saved too.
    """
    average = ITEMSIZE[average_dtype(spec.precision)] if spec.train.ema else 0
    optimizer = spec.train.optimizer
    of_weight = ITEMSIZE[spec.precision.master] + average
    of_row = [of_weight + state_bytes(spec.precision, row) for row in optimizer.rows]

    def bytes_of(replica: Replica) -> int:
        if replica.role in WITH_STATE:
            return replica.num_elements * of_row[optimizer.is_rest(replica.matrices)]
        return 0 if spec.adapter else untrained_bytes(spec, replica)

    return sum(bytes_of(replica) * count for replica, count in plan.alike)


def goodput_share(interval_s: float, mtbf_s: float, copy_s: float, write_s: float, restart_s: float) -> float:
    """The goodput, 0 to 1, with a checkpoint after every `interval_s` of training.

    A save waits until the previous one is written.
    """
    first = interval_s + copy_s + write_s  # from a start until its first checkpoint is written
    cycle = max(interval_s, write_s) + copy_s  # from one written checkpoint to the next
    checkpoints = math.exp(-(first + restart_s) / mtbf_s) / -math.expm1(-cycle / mtbf_s)
    return interval_s / mtbf_s * checkpoints


def best_steps(step_s: float, mtbf_s: float, copy_s: float, write_s: float) -> int:
    """The interval with the largest goodput, in whole steps.

    The derivative of the goodput is 0 where 1 - exp(-λ(τ + δ)) = λτ. There the left side falls below the right one, and
    it stays below.
    """
    low, high = 0.0, 1.0  # of λτ
    for _ in range(60):
        middle = (low + high) / 2
        above = -math.expm1(-(middle + copy_s / mtbf_s)) > middle
        low, high = (middle, high) if above else (low, middle)
    optimum = max(low * mtbf_s, write_s) / step_s
    around = {max(1, math.floor(optimum)), max(1, math.ceil(optimum))}
    return max(sorted(around), key=lambda steps: goodput_share(steps * step_s, mtbf_s, copy_s, write_s, 0.0))


def failure_assumptions(spec: Spec, goodput: Goodput | None) -> Sequence[str]:
    """The assumptions of a prediction about failures, a sentence each."""
    if goodput is None:
        return ()
    hours, minutes = MTBF_S / 3600, goodput.restart_s / 60
    if spec.cluster.failures is not None:
        return ("failures are random and as frequent as the cluster states",)
    return (
        f"a device fails once in {hours:,.0f} hours, as measured on 16,384 H100 in arXiv 2407.21783; a restart takes"
        f" {minutes:g} min; a node writes checkpoints at {Failures().store / 1e9:g} GB/s; `failures` in the cluster"
        " changes these",
    )
