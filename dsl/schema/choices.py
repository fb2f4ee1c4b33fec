"""Keys that may be `auto` for the planner to choose, and the values worth trying for each.

All other open values of a run follow from the values it gives (`dsl.resolve.derive`). Here there is a choice: every
combination that passes the rules is a valid plan, and the compiler searches for the best one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import gcd
from typing import Any

from dsl.schema import Moe, Spec
from dsl.schema.paths import check_paths
from dsl.schema.precision import is_split_over_ranks

Choice = Mapping[str, Any]  # path → value

# Value of an open key until one is chosen: the smallest possible.
OPEN: dict[str, Any] = {
    "parallel.pipeline": 1,
    "parallel.tensor": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "train.micro_batch": 1,
    "sm.communication": 0,
    "recompute": (),
}
check_paths(*OPEN)
# Open keys that rules check together.
JOINT = ("parallel.pipeline", "parallel.tensor", "parallel.context", "parallel.expert", "train.micro_batch")
MICRO_BATCHES = (1, 2, 4, 8, 16)
LEAST_CHUNK = 1024  # tokens; for shorter chunks, sending keys and values takes longer than attention
# SMs for communication; DeepSeek-V3 used 20 of 132 (arXiv 2412.19437, §3.2.2). 0: exchanges take what they need.
SMS = (20, 0, 8, 12, 16, 24, 32)


def structures(spec: Spec, opened: Collection[str]) -> Iterator[Choice]:
    """Combinations of the open degrees and micro-batch, with the first value of every other open key. They may break
    rules."""
    firsts = {path: values(spec, path)[0] for path in opened if path not in JOINT}
    joint = [path for path in JOINT if path in opened]
    for combination in product(*(values(spec, path) for path in joint)):
        yield dict(zip(joint, combination, strict=True)) | firsts


def values(spec: Spec, path: str) -> tuple[Any, ...]:
    """Values worth trying for an open key, given the rest of the spec. Raises AttributeError if the spec lacks a part
    that they depend on."""
    return {
        "parallel.pipeline": _pipelines,
        "parallel.tensor": _tensors,
        "parallel.context": _contexts,
        "parallel.expert": _experts,
        "train.micro_batch": _micro_batches,
        "sm.communication": _sms,
        "recompute": _recomputes,
    }[path](spec)


def _pipelines(spec: Spec) -> tuple[int, ...]:
    """Divisors of the number of devices, up to one rank per layer."""
    layers = max((span.last + 1 for span in spec.model.layers), default=1)
    return _divisors(spec.cluster.world, layers)


def _tensors(spec: Spec) -> tuple[int, ...]:
    """Divisors of the devices per node: tensor ranks communicate before and after every part of a layer. 1 if they
    could not be trained in the precision."""
    if not is_split_over_ranks(spec.precision):
        return (1,)
    devices = gcd(*(node.devices for _, node in spec.cluster.parts))
    return _divisors(devices, devices)


def _contexts(spec: Spec) -> tuple[int, ...]:
    """Common divisors of the number of devices and of half a sequence; each rank has two chunks."""
    half = spec.train.sequence // 2
    return _divisors(gcd(half, spec.cluster.world), max(1, half // LEAST_CHUNK))


def shards(spec: Spec) -> tuple[int, ...]:
    """Sizes of the groups of data ranks that share a copy: those on one node, on two, on four and so on, and all."""
    p, on_node = spec.parallel, max(1, spec.cluster.node.devices // (spec.parallel.tensor * spec.parallel.context))
    sizes = dict.fromkeys([*(gcd(p.data, on_node << doublings) for doublings in range(20)), p.data])
    return tuple(sorted(size for size in sizes if size * p.tensor * p.context % p.expert_group == 0))


def _experts(spec: Spec) -> tuple[int, ...]:
    """Common divisors of the experts of every layer and of the devices; above 1 if there is a placement."""
    experts = gcd(*(span.ffn.experts for span in spec.model.layers if isinstance(span.ffn, Moe)))
    degrees = _divisors(gcd(experts, spec.cluster.world), experts) if experts else (1,)
    return (degrees[1:] or degrees) if spec.parallel.placement is not None else degrees


def _micro_batches(spec: Spec) -> tuple[int, ...]:
    return tuple(size for size in MICRO_BATCHES if spec.train.batch.end % size == 0)


def _sms(spec: Spec) -> tuple[int, ...]:
    sms = spec.cluster.node.device.sms
    return tuple(count for count in SMS if count < sms) or (0,) if sms else (0,)


def _recomputes(spec: Spec) -> tuple[tuple[str, ...], ...]:
    """Whole layers first, then ever fewer ops; expensive ops are dropped before cheap ones."""
    experts = any(isinstance(span.ffn, Moe) for span in spec.model.layers)
    ops: tuple[str, ...] = ("rmsnorm", "swiglu")
    ops += ("hyper",) if spec.model.hyper_connections else ()
    ops += ("mla_up",) if spec.model.has_latents else ()
    ops += ("experts",) if experts else ()
    ops += ("attention",)
    return ("layer",), *(ops[:count] for count in range(len(ops), -1, -1))


def _divisors(number: int, limit: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
