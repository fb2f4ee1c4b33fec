"""What the chain of an action has beside its segments where data ranks divide gradients, or weights too.

Weights are gathered one segment ahead: while a segment runs, those of the next one come. They are freed behind it. The
gradients of a micro-batch are made of zeros in front of a W and scattered behind it; the W after the next one waits for
that, so that those of two segments are there at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compiler.ir import Buffer, Instruction, Sharded
from compiler.ir.dtypes import ITEMSIZE
from compiler.machine.rates import Rates
from compiler.machine.topology.fabric import Reduction
from compiler.plan.actions.node import Node, nanoseconds


def with_sharded(chain: Sequence[Node], sharded: Mapping[str, Sharded], rates: Rates) -> list[Node]:
    """The chain with the gathers, zeros and scatters of its segments; `sharded`: by site."""
    taking = [node for node in chain if _reads_gathered(node.instruction, sharded)]
    gathers = [_gather(node, taking[max(0, at - 2) : max(0, at - 1)], sharded, rates) for at, node in enumerate(taking)]
    result, scattered = gathers[:1], list[Node]()
    del gathers[:1]
    for node in chain:
        i, here = node.instruction, sharded.get(node.instruction.site)
        if gathers and _reads_gathered(i, sharded):
            result.append(gathers.pop(0))
        if here is None or i.kind != "run":
            result.append(node)
            continue
        gives = i.phase == "W" and not here.tensors.isdisjoint(i.params)
        weights = weights_name(here.weights, i.phase) if here.weights else ""
        inside = replace(
            i,
            params_in=_places(i.params, here, here.gradients.name if i.phase == "W" else weights),
            weights_in=_places(i.weights, here, weights),
        )
        spaces = tuple(dict.fromkeys(name for name in (*inside.weights_in, *inside.params_in) if name))
        run = replace(node, instruction=replace(inside, reads=(*i.reads, *spaces)))
        if not gives:
            result.append(run)
            continue
        before = tuple(each.key for each in scattered[-2:-1])
        zeros = replace(i, kind="zeros", reads=(), writes=(here.gradients,), params=(), weights=())
        cleared_s = rates.optimizer_time_s(here.gradients.fixed_bytes)
        scattered.append(_scatter(run, here, rates))
        result += [
            Node(zeros, 0, (here.gradients,), before),
            replace(run, time_ns=run.time_ns + nanoseconds(cleared_s), after=before),
            scattered[-1],
        ]
    return result


def weights_name(weights: Buffer, phase: str) -> str:
    """The name of gathered weights in a phase: F and I of a micro-batch each gather their own."""
    return f"{weights.name}_{phase}"


def moved_s(sharded: Sharded, kind: Reduction, dtype: str, rates: Rates) -> float:
    """Seconds of a gather, or a scatter, of the tensors of a segment."""
    size = ITEMSIZE[dtype]
    return sum(rates.fabric.reduce_s(elements * size, holders, kind) for holders, elements in sharded.buckets)


def _reads_gathered(i: Instruction, sharded: Mapping[str, Sharded]) -> bool:
    """Whether a segment reads weights that are divided."""
    here = sharded.get(i.site)
    if i.kind != "run" or here is None or here.weights is None:
        return False
    return not here.tensors.isdisjoint(i.weights if i.phase == "W" else i.params)


def _places(tensors: tuple[str, ...], here: Sharded, value: str) -> tuple[str, ...]:
    found = tuple(value if tensor in here.tensors else "" for tensor in tensors)
    return found if any(found) else ()


def _gather(run: Node, behind: Sequence[Node], sharded: Mapping[str, Sharded], rates: Rates) -> Node:
    i, here = run.instruction, sharded[run.instruction.site]
    assert here.weights is not None
    weights = replace(here.weights, name=weights_name(here.weights, i.phase))
    start = Instruction("gather", 0, "", i.phase, i.site)
    time_s = moved_s(here, "all_gather", weights.dtype, rates)
    return Node(start, nanoseconds(time_s), (weights,), tuple(each.key for each in behind))


def _scatter(run: Node, here: Sharded, rates: Rates) -> Node:
    start = Instruction("scatter", 0, "", "W", run.instruction.site, reads=(here.gradients.name,))
    time_s = moved_s(here, "reduce_scatter", here.gradients.dtype, rates)
    return Node(start, nanoseconds(time_s), (), (run.key,))
