"""What other trainers hold that a spec cannot say, in closed form from their code. Positive: more than the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiler.predict.device_memory import ALLOCATOR
from compiler.predict.prediction import RankMemory
from dsl.closed_forms.counts import parameters
from dsl.schema import Gqa, Spec


@dataclass(frozen=True)
class Difference:
    """A difference between a trainer and the plan of its run. `bytes`: on the device whose peak was published."""

    says: str
    bytes: Callable[[Spec, RankMemory], int]


def _logits(spec: Spec) -> int:
    """Elements of the logits of a micro-batch."""
    return spec.tokens_of_rank * spec.model.vocab


def _local(spec: Spec) -> int:
    """Parameters of a pipeline and tensor rank, if all have as many."""
    return parameters(spec.model).total // (spec.parallel.pipeline * spec.parallel.tensor)


def _shard(spec: Spec) -> int:
    """Parameters of a device, if FSDP divides those of a pipeline and tensor rank."""
    return _local(spec) // (spec.parallel.data * spec.parallel.context)


def _eager_loss(spec: Spec, memory: RankMemory) -> int:
    return (3 * 4 + 2 - 2 * 2) * _logits(spec)


def _eager_loss_in_bf16(spec: Spec, memory: RankMemory) -> int:
    return (4 * 2 - 2 * 2) * _logits(spec)


def _wide_logits(spec: Spec, memory: RankMemory) -> int:
    return (2 * 4 - 2 * 2) * _logits(spec)


def _kept_products(spec: Spec, memory: RankMemory) -> int:
    layers, attention = spec.model.layers[0], spec.model.attention
    assert isinstance(attention, Gqa) and layers.ffn.kind == "dense"
    keys = attention.kv_heads * attention.head_dim
    elements = layers.ffn.inner - keys - spec.model.hidden
    return 2 * elements * spec.tokens_of_rank * spec.model.num_layers


def _fp32_weights(spec: Spec, memory: RankMemory) -> int:
    return -2 * _shard(spec)


def _root_unit(spec: Spec, memory: RankMemory) -> int:
    return 2 * spec.model.vocab * spec.model.hidden


def _whole_gradients(spec: Spec, memory: RankMemory) -> int:
    return 4 * _local(spec) - memory.gradients


def _whole_weights(spec: Spec, memory: RankMemory) -> int:
    return 2 * (_local(spec) - _shard(spec))


def _gaps(spec: Spec, memory: RankMemory) -> int:
    return int(memory.peak_bytes * ALLOCATOR / 2)


def _attention_copy(spec: Spec, memory: RankMemory) -> int:
    outputs = sum(tensor.bytes for tensor in memory.held_tensors if tensor.name == "attention_gqa_attention_0")
    return outputs if spec.train.micro_batch > 1 else 0


DIFFERENCES: Mapping[str, Difference] = {
    "eager loss": Difference(
        "torch computes the loss in FP32: the log-softmax and two gradients, 12 bytes of each logit, where a plan has "
        "logits and gradient in BF16; BF16 logits are freed before, but stay reserved",
        _eager_loss,
    ),
    "eager loss in BF16": Difference(
        "the same in BF16, and the logits are still referenced: 8 bytes of each", _eager_loss_in_bf16
    ),
    "FP32 logits": Difference("logits and their softmax in FP32: 8 bytes of each", _wide_logits),
    "kept products": Difference(
        "selective recomputation keeps every second product, so also the gate; the spec's keeps keys and residuals",
        _kept_products,
    ),
    "FP32 weights": Difference("FSDP keeps FP32 weights alone, a plan BF16 weights beside them", _fp32_weights),
    "root unit": Difference("embedding and head are gathered together, a plan gathers one of them", _root_unit),
    "whole gradients": Difference(
        "micro-batches before the last one accumulate whole FP32 gradients, in place of shards", _whole_gradients
    ),
    "whole weights": Difference("with pipeline ranks, FSDP keeps gathered BF16 weights", _whole_weights),
    "gaps": Difference("gaps of the allocator, the middle of the interval of a plan", _gaps),
    "copied output": Difference("the output of attention is transposed, which copies it", _attention_copy),
}
