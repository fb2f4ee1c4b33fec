"""A run on other devices than its spec names: as much of its plan as they allow.

The batch stays, and with it the samples of each step. First the data ranks change alone, with as many of the expert
ranks as divide them; where that breaks a rule or does not fit, the degrees are left to the search; then the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from compiler.predict.predict import predict
from dsl.schema import Spec

Legal = Callable[[tuple[str, ...]], Spec | None]  # the spec with more overrides, or None where it breaks a rule
CanBe = Callable[[tuple[str, ...]], bool]  # whether any values of the keys that more overrides open keep the rules


class RefitError(Exception):
    """No plan of the run is for these devices."""


def refitted(spec: Spec, nodes: int, devices: int, legal: Legal, can_be: CanBe) -> tuple[str, ...]:
    """Overrides of the spec, as of `-s`, for `nodes` nodes of `devices` devices each. Raises RefitError.

    They may open degrees with `auto`: the fastest plan that fits is for the search to find.
    """
    if spec.cluster.more is not None:
        raise RefitError("the cluster has nodes of several kinds, and which of them are left is not known")
    there = (f"cluster.nodes={nodes}", f"cluster.node.devices={devices}")
    for kept in _kept(spec, nodes * devices):
        found = legal((*there, *kept))
        if found is not None and predict(found).fits:
            return (*there, *kept)
    opened = (*there, *(f"parallel.{name}=auto" for name in ("pipeline", "data", "expert")))
    for overrides in (opened, (*opened, *_searched_schedule(spec))):
        if can_be(overrides):
            return overrides
    raise RefitError(f"no degrees keep the rules there, with a batch of {spec.train.batch.end} sequences")


def _searched_schedule(spec: Spec) -> tuple[str, ...]:
    """Overrides that leave the order of forwards and backwards to the search."""
    schedule = spec.schedule
    dropped = [key for key in ("chunks", "file") if getattr(schedule, key) is not None]
    return ("schedule.name=auto", *(f"schedule.{key}=none" for key in dropped))


def _kept(spec: Spec, world: int) -> Iterator[tuple[str, ...]]:
    """Overrides that change the data ranks alone, and expert ranks as far as they must."""
    p = spec.parallel
    data, rest = divmod(world, prod((p.pipeline, p.tensor, p.context)))
    if rest or not data:
        return
    for expert in range(p.expert, 0, -1):
        if p.expert % expert == 0:
            yield f"parallel.data={data}", f"parallel.expert={expert}"
