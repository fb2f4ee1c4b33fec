"""Why a plan does not fit: which rank holds too much, at which action, by how many bytes, and what that is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log10

from compiler.ir import Plan
from compiler.predict.memory import worst_rows
from compiler.predict.memory_state import device_of, quantised_weights
from compiler.predict.prediction import HeldTensor, RankMemory
from dsl.schema import Moe, Spec

GIB = 2**30
WORDS = {
    "kept": "inputs kept for the backward",
    "saved": "saved by forwards",
    "deferred": "kept for weight gradients that are put off",
    "gradient": "gradients of activations",
    "buffer": "buffers of exchanges",
    "message": "pipeline messages",
    "inside": "inside of one segment",
}


@dataclass(frozen=True, slots=True)
class Overflow:
    """A device that holds more than it has. `parts`: all that it holds at its peak, by kind, the largest first."""

    pp_rank: int
    action: str
    peak_bytes: int
    capacity_bytes: int
    parts: tuple[HeldTensor, ...]
    largest: tuple[HeldTensor, ...]  # values of one name in any layer and micro-batch together

    @property
    def over_bytes(self) -> int:
        """By how much."""
        return self.peak_bytes - self.capacity_bytes


def overflows(memories: Sequence[RankMemory]) -> tuple[Overflow, ...]:
    """The pipeline ranks whose devices hold too much, the fullest first; of equally full ones the first."""
    full = [_overflow(memory) for memory in memories if not memory.fits]
    return tuple(sorted(full, key=lambda each: (-each.over_bytes, each.pp_rank)))


def _overflow(memory: RankMemory) -> Overflow:
    kinds = Counter[str]()
    for held in memory.held:
        kinds[WORDS[held.kind]] += held.bytes
    parts = [("weights", memory.weights), ("optimizer", memory.optimizer)]
    parts.append(("gradients of weights", memory.gradients))
    rows = sorted((*parts, *kinds.items()), key=lambda row: (-row[1], row[0]))
    return Overflow(
        pp_rank=memory.pp_rank,
        action=memory.peak_action,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=memory.capacity_bytes,
        parts=tuple(HeldTensor(name, size) for name, size in rows if size),
        largest=memory.held,
    )


def explain_memory(spec: Spec, plan: Plan, memories: Sequence[RankMemory], most: int = 5) -> tuple[str, ...]:
    """Lines: what is too full and by how much, then what it is made of; none where everything fits."""
    found = overflows(memories)
    if not found:
        return ()
    worst = found[0]
    device = device_of(spec, plan, worst.pp_rank)
    lines = [
        f"pipeline rank {worst.pp_rank} holds {gib(worst.peak_bytes)} at {worst.action}, {gib(worst.over_bytes)} more "
        f"than the {gib(worst.capacity_bytes)} of device {device.name}"
    ]
    if len(found) > 1:
        ranks = ", ".join(str(rank) for rank in sorted(each.pp_rank for each in found[1:]))
        lines.append(f"so do pipeline ranks {ranks}" if len(found) > 2 else f"so does pipeline rank {ranks}")
    lines += [f"  {gib(part.bytes):>10}  {part.name}" for part in worst.parts]
    lines.append("the largest values, of all layers and micro-batches together:")
    lines += [f"  {gib(held.bytes):>10}  {held.name}, {WORDS[held.kind]}" for held in worst.largest[:most]]
    return tuple(lines)


def gib(num_bytes: int) -> str:
    """`84.1 GiB`, and smaller numbers in the unit that suits them."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


# ---------------------------------------------------------------- what is assumed


def memory_assumptions(spec: Spec, plan: Plan, memories: Sequence[RankMemory]) -> tuple[str, ...]:
    """What the memory of a plan takes for granted, for people."""
    mixed = any(isinstance(layers.ffn, Moe) for layers in spec.model.layers) and spec.parallel.expert_group > 1
    rows = "every expert rank receives as many rows as it sends; " if mixed else ""
    lines = [
        f"memory: {rows}allocators lose nothing to fragments; contexts and libraries take none",
        *_of_eight_bits(spec, plan),
        *_of_rows(spec, memories),
    ]
    return tuple(lines)


def _of_eight_bits(spec: Spec, plan: Plan) -> list[str]:
    copies = max(quantised_weights(plan))
    if not copies:
        return []
    kept = spec.precision.attention_output or spec.precision.compute
    return [
        f"memory: beside its weights a device holds those of products in {spec.precision.linear} twice, one transposed "
        f"for input gradients: {gib(copies)} at most",
        f"memory: what attention returns is kept in {kept}, as its backward reads it, and quantised again for the "
        "weight gradient behind it",
    ]


def _of_rows(spec: Spec, memories: Sequence[RankMemory]) -> list[str]:
    """The worst case, and how likely it is if every token chose its experts evenly and by itself."""
    mixtures = [layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)]
    ranks, group = spec.parallel.expert, spec.parallel.expert_group
    worst = max((memory.worst_bytes or 0 for memory in memories), default=0)
    if not mixtures or ranks == 1 or worst == 0:
        return []
    moe = max(mixtures, key=lambda each: min(each.top_k, each.experts // ranks))
    local, tokens = moe.experts // ranks, group * spec.tokens_of_rank
    ways = comb(moe.experts - local, moe.top_k - local) if moe.top_k >= local else comb(local, moe.top_k)
    chance = tokens * (log10(ways) - log10(comb(moe.experts, moe.top_k))) + log10(ranks)
    return [
        f"memory: if all {tokens:,} tokens of an expert group went to one rank in each layer ({worst_rows(spec):,} "
        f"rows), it would hold {gib(worst)}; with even and independent choices of experts, this happens in a layer "
        f"with probability 10^{chance:,.0f}"
    ]
