"""Values written `auto` that a planner chooses: which keys may be, and what is worth trying for each.

Everything else that a run leaves open follows from what it says (`dsl.resolve.derive`). Here there is a choice: every
combination that keeps the rules is a plan, and which is best is the compiler's to find out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import gcd
from typing import Any

from dsl.schema import Moe, Spec
from dsl.schema.paths import checked_paths

Choice = Mapping[str, Any]  # path → value

# What a key is until it is chosen: the least there can be.
OPEN: dict[str, Any] = {
    "parallel.pipeline": 1,
    "parallel.tensor": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "train.micro_batch": 1,
    "sm.communication": 0,
    "recompute": (),
}
checked_paths(*OPEN)
# Those that rules hold against each other.
JOINT = ("parallel.pipeline", "parallel.tensor", "parallel.context", "parallel.expert", "train.micro_batch")
MICRO_BATCHES = (1, 2, 4, 8, 16)
LEAST_CHUNK = 1024  # tokens: of shorter chunks, to send keys and values takes longer than to attend to them
# SMs that communicate; DeepSeek-V3 used 20 of 132 (arXiv 2412.19437, §3.2.2). 0: exchanges take what they need.
SMS = (20, 0, 8, 12, 16, 24, 32)


def structures(spec: Spec, opened: Collection[str]) -> Iterator[Choice]:
    """Combinations of the open degrees and micro-batch; of other open keys the first value. They may break rules."""
    firsts = {path: values(spec, path)[0] for path in opened if path not in JOINT}
    joint = [path for path in JOINT if path in opened]
    for combination in product(*(values(spec, path) for path in joint)):
        yield dict(zip(joint, combination, strict=True)) | firsts


def values(spec: Spec, path: str) -> tuple[Any, ...]:
    """What is worth trying for an open key, given all else that the spec says. AttributeError where that is missing."""
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
    """Divisors of the devices with a layer or more for each rank."""
    layers = max((span.last + 1 for span in spec.model.layers), default=1)
    return _divisors(spec.cluster.world, layers)


def _tensors(spec: Spec) -> tuple[int, ...]:
    """Divisors of the devices of a node: tensor ranks exchange rows in front of and behind every part of a layer."""
    devices = gcd(*(node.devices for _, node in spec.cluster.parts))
    return _divisors(devices, devices)


def _contexts(spec: Spec) -> tuple[int, ...]:
    """Divisors of the devices and of the halves of a sequence, of which each rank has two chunks."""
    half = spec.train.sequence // 2
    return _divisors(gcd(half, spec.cluster.world), max(1, half // LEAST_CHUNK))


def _experts(spec: Spec) -> tuple[int, ...]:
    """Divisors of the experts of every layer and of the devices; of a placement several, over which it spreads them."""
    experts = gcd(*(span.ffn.experts for span in spec.model.layers if isinstance(span.ffn, Moe)))
    degrees = _divisors(gcd(experts, spec.cluster.world), experts) if experts else (1,)
    return (degrees[1:] or degrees) if spec.parallel.placement is not None else degrees


def _micro_batches(spec: Spec) -> tuple[int, ...]:
    return tuple(each for each in MICRO_BATCHES if spec.train.batch.end % each == 0)


def _sms(spec: Spec) -> tuple[int, ...]:
    sms = spec.cluster.node.device.sms
    return tuple(each for each in SMS if each < sms) or (0,) if sms else (0,)


def _recomputes(spec: Spec) -> tuple[tuple[str, ...], ...]:
    """More and more, the cheap ops before the dear ones, and at last whole layers; the most first."""
    experts = any(isinstance(span.ffn, Moe) for span in spec.model.layers)
    ops: tuple[str, ...] = ("rmsnorm", "swiglu")
    ops += ("hyper",) if spec.model.hyper_connections else ()
    ops += ("mla_up",) if spec.model.has_latents else ()
    ops += ("experts",) if experts else ()
    ops += ("attention",)
    return ("layer",), *(ops[:count] for count in range(len(ops), -1, -1))


def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, min(number, most) + 1) if number % each == 0)
