"""A lower bound of the memory that a run needs on its fullest device, in closed form, before anything is planned.

For comparison: ZeRO, arXiv 1910.02054, §3; DeepSeek-V3, arXiv 2412.19437, §3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from dsl.closed_forms.counts import (
    bias_parameters,
    hyper_parameters,
    mtp_parameters,
    parameters,
    routed_expert_parameters,
)
from dsl.closed_forms.stages import has_both_ends, is_mirrored
from dsl.schema import Dtype, Optimizer, Precision, Spec

N = TypeVar("N", int, Fraction)  # elements; a mean over devices is a fraction

HOST_PART = 2**22  # elements that an update or average copies between host and device at a time: 16 MiB in FP32
HOST_SLOTS = 3  # parts on the device at once: one arrives, one is updated, one leaves
# Bytes of an element; e2m1 and e5m6, which no role counted here can have, are rounded up.
ITEMSIZE: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "e4m3": 1, "e2m1": 1, "e5m6": 2}


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes of one device."""

    weights: int  # that forward and backward read
    gradients: int
    optimizer: int  # master weights, if they are not the weights themselves, and optimizer state
    activations: int
    host: int = 0  # in the device's share of host memory

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class KeptElements(Generic[N]):
    """Elements of some parameters for which a device keeps weights, gradients and optimizer state."""

    weights: N
    gradients: N
    optimizer: N

    def bytes(self, size: DeviceBytes) -> DeviceBytes:
        """Their bytes, rounded down. `size`: bytes of one element (`bytes_per_element`)."""
        return DeviceBytes(
            weights=int(self.weights * size.weights),
            gradients=int(self.gradients * size.gradients),
            optimizer=int(self.optimizer * size.optimizer),
            activations=0,
            host=int(self.optimizer * size.host),
        )


def kept_under_zero(zero: int, unsharded: N, shard: N, owned: N) -> KeptElements[N]:
    """Return what a holder of some parameters keeps under ZeRO (arXiv 1910.02054, §5).

    Every holder has all weights, gradients and optimizer state, but from level 1 on only the optimizer state that it
    updates, from level 2 on only its shard of the gradients, and at level 3 only its shard of the weights.

    `unsharded`: elements of the parameters. `shard`: elements of a holder's shard. `owned`: elements that a holder
    updates; a second copy of a stage is another holder, but has the same shards.
    """
    return KeptElements(
        weights=shard if zero >= 3 else unsharded,
        gradients=shard if zero >= 2 else unsharded,
        optimizer=owned if zero >= 1 else unsharded,
    )


@dataclass(frozen=True, slots=True)
class _HeldParameters:
    """Trained parameters on some pipeline ranks: `common` ones are on all their data ranks, `routed` experts are
    sharded over expert ranks. A parameter on two pipeline ranks counts twice in these, and once in `owned`."""

    common: int
    routed: int
    owned: Fraction
    ranks: int


def lower_bound(spec: Spec) -> DeviceBytes:
    """Return the bytes that the fullest device of a run holds at once, at least.

    Why it is a lower bound, whatever the split of the layers into stages:

    1. A parameter is on all data ranks of a stage, a routed expert on those of one expert rank; mirrored stages are on
       two pipeline ranks. So the total over all devices is known, and the fullest device holds at least the mean. One
       device certainly holds the head and the MTP blocks, and the embedding if they read it; that is a second bound.
       The larger of the two is returned.
    2. Every holder has whole weights and gradient accumulators. Master weights count only if their dtype differs from
       that of the weights; otherwise they are the weights. ZeRO shards evenly over the holders: at 1 the optimizer
       state, at 2 the gradients too, at 3 the weights too. Expert groups shard routed experts; all else is assumed to
       be sharded over tensor ranks.
       With `shard`, each group of data ranks keeps all gradients or weights.
    3. Frozen weights beside adapters have no gradients and no optimizer state.
    4. A device that runs a micro-batch also holds its hidden state at some time: the only activation counted.

    Not counted: all other activations, messages, router biases, buffers of libraries. A run that passes may not fit.
    """
    return max((mean_bytes(spec), last_stage_bytes(spec)), key=lambda memory: memory.total)


def mean_bytes(spec: Spec) -> DeviceBytes:
    """Bytes that devices hold on average over the pipeline ranks, at least."""
    return _device_bytes(spec, _all_parameters(spec))


def last_stage_bytes(spec: Spec) -> DeviceBytes:
    """Bytes that a device of the pipeline rank with the last stage holds, at least."""
    return _device_bytes(spec, _last_stage_parameters(spec))


def _all_parameters(spec: Spec) -> _HeldParameters:
    """The parameters that all pipeline ranks hold together."""
    model, counts, mtp_common, mtp_routed = spec.model, parameters(spec.model), *_trained_mtp_parameters(spec)
    routed = sum(
        len(model.layers_of(index)) * routed_expert_parameters(model, span.ffn)
        for index, span in enumerate(model.layers)
    )
    common = counts.total - counts.bias - routed + mtp_common
    routed += mtp_routed
    copies = 2 if is_mirrored(spec) else 1
    second_embedding = _second_embedding(spec, counts.embedding)
    return _HeldParameters(
        copies * common + second_embedding, copies * routed, Fraction(common + routed), spec.parallel.pipeline
    )


def _last_stage_parameters(spec: Spec) -> _HeldParameters:
    """The parameters that the pipeline rank with the last stage holds besides that stage's layers."""
    model, counts, mtp_common, mtp_routed = spec.model, parameters(spec.model), *_trained_mtp_parameters(spec)
    second_embedding = _second_embedding(spec, counts.embedding)
    common = (
        counts.head
        + model.hidden
        + hyper_parameters(model, end=True)
        + mtp_common
        + (counts.embedding if has_both_ends(spec) else 0)
    )
    most_copies = 2 if is_mirrored(spec) or spec.schedule.file is not None else 1
    owned = Fraction(common + mtp_routed, most_copies) + Fraction(second_embedding, 2)
    return _HeldParameters(common + second_embedding, mtp_routed, owned, 1)


def _second_embedding(spec: Spec, embedding: int) -> int:
    """Parameters of a second copy of the embedding: the one that MTP or a tied head reads on the last rank, if the
    first stage is on another rank. 0 for a schedule file, whose stages may share a rank."""
    is_apart = not has_both_ends(spec) and spec.schedule.file is None
    return embedding if (spec.model.mtp is not None or spec.model.tied) and is_apart else 0


def _trained_mtp_parameters(spec: Spec) -> tuple[int, int]:
    """Trained parameters of the MTP blocks: (all except routed experts, routed experts)."""
    model = spec.model
    if model.mtp is None:
        return 0, 0
    ffn, depth = model.ffn(model.num_layers - 1), model.mtp.depth
    routed = depth * routed_expert_parameters(model, ffn)
    return mtp_parameters(model) - depth * bias_parameters(ffn) - routed, routed


def _device_bytes(spec: Spec, parameters_held: _HeldParameters) -> DeviceBytes:
    """Bytes of a device if the pipeline ranks share the parameters evenly."""
    precision, p = spec.precision, spec.parallel
    unsharded = (
        Fraction(parameters_held.common, p.tensor) + Fraction(parameters_held.routed, p.expert_group)
    ) / parameters_held.ranks
    owned = parameters_held.owned / (parameters_held.ranks * p.columns)
    sharded = Fraction((parameters_held.common + parameters_held.routed) * p.copies, parameters_held.ranks * p.columns)

    rows = spec.train.optimizer.rows  # the one with the least state, as the parameters of each are not counted here
    size = bytes_per_element(spec, min(rows, key=lambda row: state_bytes(precision, row)))
    if spec.adapter:  # gradients and state of adapters are not counted
        size = replace(size, gradients=0, optimizer=0)
    state = kept_under_zero(p.zero, unsharded, sharded, owned).bytes(size)
    tokens = spec.train.micro_batch * spec.train.sequence // (p.tensor * p.context)
    return replace(state, activations=tokens * spec.model.stream_width * ITEMSIZE[precision.compute], host=0)


def sent_bytes(dtype: Dtype, precision: Precision) -> float:
    """Bytes of an element sent to experts or back, including its share of an FP32 scale if it is FP8."""
    tile = precision.activation_tile
    return ITEMSIZE[dtype] + (ITEMSIZE["fp32"] / (tile.rows * tile.columns) if dtype == "e4m3" and tile else 0.0)


def bytes_per_element(spec: Spec, optimizer: Optimizer) -> DeviceBytes:
    """Bytes of one parameter, without activations. Master weights in the dtype of the weights are the weights
    themselves.

    `optimizer`: the row that updates the parameter.

    Offloaded state and the moving average of the weights are in host memory; a CPU device has no separate one.
    """
    precision, train = spec.precision, spec.train
    master = 0 if precision.master == precision.parameter else ITEMSIZE[precision.master]
    state, offloaded = master + state_bytes(precision, optimizer), offloaded_bytes(spec, optimizer)
    average = ITEMSIZE[average_dtype(precision)] if train.ema else 0
    if train.validate and train.validate.ema:  # meanwhile the weights themselves are kept too
        average += ITEMSIZE[precision.parameter]
    on_host = (offloaded or average) and spec.has_hosts
    return DeviceBytes(
        weights=ITEMSIZE[precision.parameter],
        gradients=ITEMSIZE[precision.gradients],
        optimizer=state - offloaded if on_host else state + average,
        activations=0,
        host=offloaded + average if on_host else 0,
    )


def offloaded_bytes(spec: Spec, optimizer: Optimizer) -> int:
    """Bytes of optimizer state and master weight per element that are offloaded to host memory; 0 on CPUs."""
    if not spec.offload or not spec.has_hosts:
        return 0
    precision = spec.precision
    moments = state_bytes(precision, optimizer) if "moments" in spec.offload else 0
    return moments + (ITEMSIZE[precision.master] if "master" in spec.offload else 0)


def average_dtype(precision: Precision) -> Dtype:
    """The dtype of the moving average of the weights: that of master weights, or FP32 instead of BF16, in which small
    changes would be rounded away."""
    return "fp32" if precision.master == "bf16" else precision.master


def state_bytes(precision: Precision, optimizer: Optimizer) -> int:
    """Bytes of optimizer state per element, without the master weight."""
    return sum(ITEMSIZE[getattr(precision, tensor.role)] for tensor in optimizer.state)


def update_bytes(precision: Precision, optimizer: Optimizer) -> int:
    """Bytes that an update of one element reads and writes: the gradient is read, master weight and state are read and
    written, and the weight is written if it is not the master weight.
    """
    weight = ITEMSIZE[precision.parameter] if precision.parameter != precision.master else 0
    state = ITEMSIZE[precision.master] + state_bytes(precision, optimizer)
    return ITEMSIZE[precision.gradients] + 2 * state + weight
