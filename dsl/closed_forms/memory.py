"""What a run needs at least on its fullest device, in closed form: before anything is planned, and never too much.

For comparison: ZeRO, arXiv 1910.02054, §3; DeepSeek-V3, arXiv 2412.19437, §3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dsl.closed_forms.counts import bias_parameters, hyper_parameters, mtp_parameters, parameters, routed_parameters
from dsl.closed_forms.stages import has_both_ends, is_mirrored
from dsl.schema import Dtype, Optimizer, Precision, Spec

# Bytes of an element; of those that no role counted here may have, whole ones.
HOST_PART = 2**22  # elements that an update or an average moves between host and device at a time: 16 MiB in FP32
HOST_SLOTS = 3  # parts that are on the device: one arrives, one is updated, one leaves
ITEMSIZE: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "e4m3": 1, "e2m1": 1, "e5m6": 2}


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes of one device."""

    weights: int  # as forward and backward read them
    gradients: int
    optimizer: int  # master weights, where they are not the weights themselves, and what else it keeps
    activations: int
    host: int = 0  # beside the device, in its share of the memory of its host

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class _HeldParameters:
    """Trained parameters on some pipeline ranks: `common` ones are on all their data ranks, `routed` experts are
    divided over expert ranks. A parameter that is on two of the ranks counts twice there, and once in `owned`."""

    common: int
    routed: int
    owned: Fraction
    ranks: int


def lower_bound(spec: Spec) -> DeviceBytes:
    """Bytes that the fullest device of a run holds at the same time, at least.

    Why it is a lower bound, whatever the split of the layers into stages:

    1. A parameter is on all data ranks of a stage, that of a routed expert on those of one expert rank; where stages
       are mirrored it is on two pipeline ranks. So what all devices hold together is known, and the fullest has no
       less than the mean. One device surely has the head and the MTP blocks, and the embedding where it reads that
       too; it has no less than these. The larger of the two counts.
    2. Weights and gradient accumulators are whole on each holder. Master weights count only where their dtype is not
       that of the weights, else they are the weights. ZeRO divides evenly over the holders: at 1 the optimizer's part,
       at 2 the gradients too, at 3 the weights. Expert groups divide routed experts; tensor ranks divide all else, if
       they could.
    3. Weights beside which adapters are trained have no gradients and no state of the optimizer.
    4. A device that runs a micro-batch has at some time its hidden state beside all this: the one activation counted.

    Not counted: all other activations, messages, gate biases, buffers of libraries. What fits this may still not fit.
    """
    return max((of_mean(spec), of_end(spec)), key=lambda memory: memory.total)


def of_mean(spec: Spec) -> DeviceBytes:
    """Bytes that devices hold at least in the mean over the pipeline ranks."""
    return _memory(spec, _everything(spec))


def of_end(spec: Spec) -> DeviceBytes:
    """Bytes that a device holds at least on the pipeline rank with the last stage."""
    return _memory(spec, _end(spec))


def _everything(spec: Spec) -> _HeldParameters:
    """What all pipeline ranks hold together."""
    model, counts, mtp_common, mtp_routed = spec.model, parameters(spec.model), *_mtp(spec)
    routed = sum(
        len(model.layers_of(index)) * routed_parameters(model, span.ffn) for index, span in enumerate(model.layers)
    )
    common = counts.total - counts.bias - routed + mtp_common
    routed += mtp_routed
    copies = 2 if is_mirrored(spec) else 1
    again = _again(spec, counts.embedding)
    return _HeldParameters(copies * common + again, copies * routed, Fraction(common + routed), spec.parallel.pipeline)


def _end(spec: Spec) -> _HeldParameters:
    """What the pipeline rank with the last stage has besides that stage's layers."""
    model, counts, mtp_common, mtp_routed = spec.model, parameters(spec.model), *_mtp(spec)
    again = _again(spec, counts.embedding)
    common = (
        counts.head
        + model.hidden
        + hyper_parameters(model, end=True)
        + mtp_common
        + (counts.embedding if has_both_ends(spec) else 0)
    )
    most_copies = 2 if is_mirrored(spec) or spec.schedule.file is not None else 1
    owned = Fraction(common + mtp_routed, most_copies) + Fraction(again, 2)
    return _HeldParameters(common + again, mtp_routed, owned, 1)


def _again(spec: Spec, embedding: int) -> int:
    """The embedding that MTP or a tied head reads on the last rank, where the first one has it too. A file may fold or
    mirror."""
    apart = not has_both_ends(spec) and spec.schedule.file is None
    return embedding if (spec.model.mtp is not None or spec.model.tied) and apart else 0


def _mtp(spec: Spec) -> tuple[int, int]:
    """Trained parameters of the MTP blocks' own: all but the routed experts, and these."""
    model = spec.model
    if model.mtp is None:
        return 0, 0
    ffn, depth = model.ffn(model.num_layers - 1), model.mtp.depth
    routed = depth * routed_parameters(model, ffn)
    return mtp_parameters(model) - depth * bias_parameters(ffn) - routed, routed


def _memory(spec: Spec, held: _HeldParameters) -> DeviceBytes:
    """Bytes of a device, if its pipeline ranks had even parts of what they hold together."""
    precision, p = spec.precision, spec.parallel
    whole = (Fraction(held.common, p.tensor) + Fraction(held.routed, p.expert_group)) / held.ranks
    owned = held.owned / (held.ranks * p.columns)
    kept = Fraction(held.common + held.routed) / (held.ranks * p.columns)

    rows = spec.train.optimizer.rows  # that which keeps least: which parameters each has is not counted here
    size = bytes_per_element(spec, min(rows, key=lambda row: state_bytes(precision, row)))

    def of(itemsize: int, zero: int, divided: Fraction) -> int:
        """Bytes of state that is divided from level `zero` on."""
        return int(itemsize * (divided if p.zero >= zero else whole))

    tokens = spec.train.micro_batch * spec.train.sequence // (p.tensor * p.context)
    return DeviceBytes(
        weights=of(size.weights, 3, kept),
        gradients=0 if spec.adapter else of(size.gradients, 2, kept),  # those of adapters alone, which are not counted
        optimizer=0 if spec.adapter else of(size.optimizer, 1, owned),
        activations=tokens * spec.model.stream_width * ITEMSIZE[precision.compute],
    )


def sent_bytes(dtype: Dtype, precision: Precision) -> float:
    """Bytes of an element on its way to experts or back, with its share of an FP32 scale if it is in FP8."""
    tile = precision.activation_tile
    return ITEMSIZE[dtype] + (ITEMSIZE["fp32"] / (tile.rows * tile.columns) if dtype == "e4m3" and tile else 0.0)


def bytes_per_element(spec: Spec, optimizer: Optimizer) -> DeviceBytes:
    """Bytes of one parameter; no activations. Master weights of the weights' own dtype are the weights.

    `optimizer`: the row that updates it.

    What is offloaded, and the moving average of the weights, is in the memory of hosts. A CPU has no other memory.
    """
    precision, train = spec.precision, spec.train
    master = 0 if precision.master == precision.parameter else ITEMSIZE[precision.master]
    kept, away = master + state_bytes(precision, optimizer), offloaded_bytes(spec, optimizer)
    average = ITEMSIZE[average_dtype(precision)] if train.ema else 0
    if train.validate and train.validate.ema:  # meanwhile the weights themselves are kept beside it
        average += ITEMSIZE[precision.parameter]
    on_host = (away or average) and spec.has_hosts
    return DeviceBytes(
        weights=ITEMSIZE[precision.parameter],
        gradients=ITEMSIZE[precision.gradients],
        optimizer=kept - away if on_host else kept + average,
        activations=0,
        host=away + average if on_host else 0,
    )


def offloaded_bytes(spec: Spec, optimizer: Optimizer) -> int:
    """Bytes of what a row of an optimizer keeps of one element in the memory of the host of an accelerator."""
    if not spec.offload or not spec.has_hosts:
        return 0
    precision = spec.precision
    moments = state_bytes(precision, optimizer) if "moments" in spec.offload else 0
    return moments + (ITEMSIZE[precision.master] if "master" in spec.offload else 0)


def average_dtype(precision: Precision) -> Dtype:
    """The dtype of the moving average of the weights: that of master weights, or FP32, for in BF16 it would stand
    still."""
    return "fp32" if precision.master == "bf16" else precision.master


def state_bytes(precision: Precision, optimizer: Optimizer) -> int:
    """Bytes of what an optimizer keeps of one element, beside its master weight."""
    return sum(ITEMSIZE[getattr(precision, tensor.role)] for tensor in optimizer.state)


def update_bytes(precision: Precision, optimizer: Optimizer) -> int:
    """Bytes that an update of one element reads and writes: its gradient is read, master weight and state are both.

    The weight is written too where it is another than its master weight.
    """
    apart = ITEMSIZE[precision.parameter] if precision.parameter != precision.master else 0
    kept = ITEMSIZE[precision.master] + state_bytes(precision, optimizer)
    return ITEMSIZE[precision.gradients] + 2 * kept + apart
