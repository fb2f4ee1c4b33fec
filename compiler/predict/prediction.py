"""The predicted time, memory and cost of a plan. Names with `_s` hold seconds; bytes are whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from compiler.ir.stage_placement import StagePlacement
from compiler.plan.actions.chains import Axis
from compiler.predict.failures import Goodput

CALIBRATE = "dsc calibrate SPEC -o rates.json"  # measures the rates of a CPU


@dataclass(frozen=True, slots=True)
class RankTime:
    """The step of one pipeline rank. Its parts are the rows of arXiv 2505.09343, table 4, and sum to the step."""

    pp_rank: int
    forward_s: float  # 1F: forwards that run alone
    backward_s: float  # 1B: backwards that run alone, whole or for the inputs
    weight_s: float  # 1W: deferred weight gradients that run alone
    overlapped_s: float  # 1F1B: pairs
    bubble_s: float  # in which it runs nothing
    optimizer_s: float  # after the last action: gradient reduction, norm, update

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank runs actions."""
        return self.forward_s + self.backward_s + self.weight_s + self.overlapped_s

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.busy_s + self.bubble_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of an interval's width."""

    what: str
    remedy: str  # what to measure
    narrows: float  # the share of the width (of logarithms) that the remedy removes


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval in which a time lies with a confidence between 0 and 1. `causes`: of its width, largest first."""

    low_s: float
    high_s: float
    confidence: float
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class Tail:
    """The part of a step after its last action, as far as it does not overlap with the backward."""

    reduction_s: float  # reducing gradients to their owners
    gather_s: float  # gathering updated weights from their owners; 0 without ZeRO
    norm_s: float  # the norm of all gradients, to clip them; 0 without clipping
    update_s: float  # updating master weights and moments
    host_s: float = 0.0  # waiting for state in host memory; 0 without offload

    @property
    def parts(self) -> tuple[float, ...]:
        """The parts, in order."""
        return self.reduction_s, self.gather_s, self.norm_s, self.update_s, self.host_s

    @property
    def seconds(self) -> float:
        """Seconds of the whole tail."""
        return sum(self.parts)

    def longer(self, factor: float) -> Tail:
        """The tail with all parts multiplied by a factor."""
        return Tail(*(factor * part for part in self.parts))


@dataclass(frozen=True, slots=True)
class AxisTime:
    """Exchanges among the ranks of an axis, and messages between pipeline ranks, in a step."""

    axis: Axis
    kind: str  # the class of links that prices them (docs/rates.md)
    busy_s: float  # for which they occupy the communication lane
    exposed_s: float  # for which compute has nothing to do meanwhile
    slope_s: float  # how much longer the rank would take if they took twice as long


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The kernels of a class on a rank in a step."""

    seconds: float
    guessed: float  # root of the sum of squares of the shares of shapes without a row; 1: one shape, which has none


@dataclass(frozen=True, slots=True)
class RankUse:
    """The lanes of the busiest pipeline rank in a step. Classes of kernels are those of rate tables (docs/rates.md)."""

    pp_rank: int
    classes: Mapping[str, KernelTime]  # compute by class of kernel, the longest first
    axes: tuple[AxisTime, ...]  # those with exchanges
    seconds: float  # of the rank's actions, and of the reductions and gathers after them


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step of the largest batch."""

    seconds: float
    tokens: int
    schedule: str
    num_micro_batches: int
    mean: RankTime  # over the pipeline ranks, row by row; its pp_rank is -1
    ranks: tuple[RankTime, ...]
    tail: Tail  # of the rank with the longest tail
    bound_s: float  # lower bound for any schedule of these actions on this placement, with the tail
    interval: Interval | None = None  # None if the rates' errors are unknown

    @property
    def first_rank(self) -> RankTime:
        """Pipeline rank 0, whose rows stand for the step in prints. It has the embedding, and with mirrored stages the
        head."""
        return self.ranks[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TorchShare:
    """The ops of a key of `kernels` that torch computes on the GPUs of a run."""

    key: str
    ops: tuple[str, ...]
    share: float  # of the compute of all pipeline ranks
    temporary_bytes: int  # of the op that needs the most
    is_accepted: bool  # the share is small, or the spec names an implementation

    @property
    def names(self) -> str:
        """The ops, as part of a sentence."""
        *others, last = self.ops
        return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor or group of tensors that a rank holds at its peak."""

    name: str
    bytes: int
    kind: str = ""  # kept, saved, deferred, gradient, buffer, message, inside: compiler/predict/memory.py


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The most bytes on one device of a pipeline rank with evenly loaded experts, and those that a plan may use."""

    pp_rank: int
    capacity_bytes: int
    peak_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak fits the device."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the peak leaves, negative if it does not fit."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True)
class RankMemory(RankPeak):
    """The peak of a device with its parts."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # saved and deferred values, and temporaries of the action
    buffers: int  # of dispatch and combine, and of pipeline messages
    peak_action: str  # such as F3.0 or (F3.7|B12.4)
    timeline: tuple[tuple[float, int], ...] = ()  # (second of the step, all bytes that are held)
    worst_bytes: int | None = None  # the peak if every routed row of the expert group came to this device
    worst_action: str | None = None
    held_tensors: tuple[HeldTensor, ...] = ()  # tensors at the peak, the largest first
    host_bytes: int = 0  # in host memory: offloaded state, the average of the weights, the copy for a checkpoint


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Bytes that a device holds besides the planned tensors: a range in which nine of ten runs should lie."""

    name: str
    low: int
    high: int


Verdict = Literal["fits", "may not fit", "does not fit"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All bytes that a device of a pipeline rank holds at the peak, as an interval in which nine of ten runs should
    lie: the planned tensors, and terms that are independent of each other."""

    pp_rank: int
    memory_bytes: int  # of the device
    peak_bytes: int  # of the planned tensors
    terms: tuple[MemoryTerm, ...]

    @property
    def expected_bytes(self) -> int:
        """The middle of the interval."""
        return self.peak_bytes + sum((term.low + term.high) // 2 for term in self.terms)

    @property
    def error_bytes(self) -> int:
        """Half the width of the interval: the root of the sum of the squares of the terms' half-widths."""
        return round(hypot(*((term.high - term.low) / 2 for term in self.terms)))

    @property
    def low_bytes(self) -> int:
        """The lower end of the interval."""
        return self.expected_bytes - self.error_bytes

    @property
    def high_bytes(self) -> int:
        """The upper end of the interval."""
        return self.expected_bytes + self.error_bytes


def fullest(devices: Iterable[DeviceMemory]) -> DeviceMemory | None:
    """The device that is expected to have least memory left; None if there are none."""
    return max(devices, key=lambda device: device.expected_bytes - device.memory_bytes, default=None)


@dataclass(frozen=True, slots=True)
class StageRow:
    """The layers of a stage, and the pipeline ranks that hold it."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]  # of the main model
    other_blocks: tuple[str, ...] = ()  # embedding, head, mtp.0
    compute_s: float = 0.0  # of a micro-batch on the compute lane, forward and backward
    exchange_s: float = 0.0  # the same on the communication lane
    parameters: int = 0  # on one of its devices


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of training on one token, forward and backward, without recomputation."""

    causal: float  # attention sees only earlier tokens
    full: float  # as if attention saw the whole sequence


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Bytes that one token moves in one MoE layer, in one direction."""

    dispatch_bytes: float  # of one copy of the token
    combine_bytes: float
    copies: int  # over the links between nodes, at most


@dataclass(frozen=True, slots=True)
class Money:
    """The cost of the devices; None if the cluster states no price."""

    usd_per_device_hour: float | None
    usd_per_trillion_tokens: float | None
    usd: float | None  # of the whole run


@dataclass(frozen=True, slots=True)
class Energy:
    """The power of the devices; None if it is unknown."""

    watts: float | None  # of one device
    kwh_per_trillion_tokens: float | None


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The run from its first to its last token, with its batch-size ramp."""

    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OrderGain:
    """The mean time of some steps, without their tails, with micro-batches as drawn and ordered by cost."""

    drawn_s: float
    ordered_s: float
    steps: int
    data: str  # the folder of the prepared text

    @property
    def saved_share(self) -> float:
        """The share of the time as drawn that the order saves."""
        return 1 - self.ordered_s / self.drawn_s


@dataclass(frozen=True, slots=True)
class LoadEffect:
    """A step in which the fullest expert rank of each layer receives `load` times the mean."""

    load: float
    seconds: float
    quantile: float | None = None  # of the load if tokens choose evenly and independently; None: of no such quantile


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of a key, with which everything fits, and its step."""

    settings: tuple[tuple[str, str], ...]  # keys and values as `-s` takes them
    seconds: float
    free_bytes: int  # on the fullest device
    is_exact: bool  # whether values keep their precision


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a lead asks of a plan that fits: the cost of uneven loads of experts, and the next changes."""

    loads: tuple[LoadEffect, ...]  # ascending; empty without expert ranks
    changes: tuple[Change, ...]  # the shortest step first


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """The generation of completions for a step, with prompts and completions of the maximum length."""

    seconds: float  # per step: of a rollout, divided by the steps that train on it
    rounds: int  # of a rollout; each adds one token per slot
    round_s: float
    slots: int  # sequences that a column generates at once
    tokens: int  # of all completions
    cache_bytes: int  # of the KV caches, on the device with the most
    fits: bool  # whether the caches fit each device beside weights, gradients and optimizer state


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of a run, as `dsc plan` shows it."""

    run: str
    model: str
    cluster: str
    num_devices: int
    device: str
    degrees: tuple[tuple[str, int], ...]  # pipeline, expert, data, tensor, context, expert_tensor
    stage_placement: StagePlacement
    rates: str  # names of the rate tables
    parameters: int
    active_parameters: int
    mtp_parameters: int  # only of the MTP blocks; not counted in the two above
    adapter_parameters: int  # of adapters; 0 if the model itself is trained
    flops: Flops
    step: StepPrediction
    use: RankUse
    mfu: Flops | None  # the share of the BF16 peak, 0 to 1; None if a device states none
    device_hours_per_trillion_tokens: float
    money: Money
    energy: Energy
    whole_run: WholeRun
    ranks: tuple[RankMemory, ...]
    stages: tuple[StageRow, ...]
    exchange: TokenExchange | None  # None without experts
    assumptions: tuple[str, ...]
    torch: tuple[TorchShare, ...] = ()  # ops without a kernel, the largest share first
    goodput: Goodput | None = None  # with failures; None if nothing is known about them
    devices_of_node: int = 1
    generation: GenerationTime | None = None  # in a run that learns from rewards
    calibrated: bool = True  # False if a core of another CPU stands in: times may be several times too short or long
    order_gain: OrderGain | None = None  # of `order = cost`; None without it, or if its data is not prepared
    devices_memory: tuple[DeviceMemory, ...] = ()  # of each pipeline rank; () on CPUs

    @property
    def fullest_device(self) -> DeviceMemory | None:
        """The device that is expected to have least memory left; None on CPUs."""
        return fullest(self.devices_memory)

    @property
    def verdict(self) -> Verdict:
        """Whether every device has enough memory: "fits" if the reserve stays free and the range ends below the memory,
        "does not fit" if the reserve is used and the range starts above it."""
        devices = self.devices_memory
        if self.fits and all(device.high_bytes <= device.memory_bytes for device in devices):
            return "fits"
        generates = self.generation is None or self.generation.fits
        may_fit = devices and generates and all(device.low_bytes <= device.memory_bytes for device in devices)
        return "may not fit" if self.fits or may_fit else "does not fit"

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory on a node that its devices use."""
        return self.devices_of_node * max(rank.host_bytes for rank in self.ranks)

    @property
    def device_hours(self) -> float:
        """Hours of all devices over the whole run."""
        return self.num_devices * self.whole_run.seconds / 3600

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return all(rank.fits for rank in self.ranks) and (self.generation is None or self.generation.fits)

    @property
    def generation_share(self) -> float:
        """The share of a step's time that is generation."""
        generation_s = self.generation.seconds if self.generation else 0.0
        return generation_s / (generation_s + self.step.seconds)


# --- Device hours → money and energy. Unknown values are None, never 0

# Maximum power by name of the device: thermal design power of the SXM modules, from the makers' data sheets.
WATTS = {
    **{"a100": 400.0, "h100": 700.0, "h200": 700.0, "h800": 700.0, "mi300x": 750.0},
    **{"b200": 1000.0, "b300": 1100.0, "gb200": 1200.0, "gb300": 1400.0},
}


def money_of(price: float | None, hours_per_trillion: float, whole_run: WholeRun, num_devices: int) -> Money:
    """The cost of a run at `price`, in USD per device hour."""
    if price is None:
        return Money(None, None, None)
    return Money(price, price * hours_per_trillion, price * num_devices * whole_run.seconds / 3600)


def energy_of(devices: Sequence[tuple[int, str]], hours_per_trillion: float) -> Energy:
    """Energy of (count, name) devices that always draw their design power, without hosts, network or cooling."""
    if any(name.lower() not in WATTS for _, name in devices):
        return Energy(None, None)
    watts = sum(count * WATTS[name.lower()] for count, name in devices) / sum(count for count, _ in devices)
    return Energy(watts, watts * hours_per_trillion / 1000)


# --- Numbers of a prediction as text, for a terminal and for a page

GIB = 2**30


def seconds(value: float) -> str:
    """A time with four digits: 19.93 s, 137.0 ms, 12.34 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale or (unit == "s" and not value):
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-6)} us"


def interval_words(interval: Interval) -> str:
    """17.6 s to 21.2 s, 80% sure."""
    return f"{seconds(interval.low_s)} to {seconds(interval.high_s)}, {interval.confidence:.0%} sure"


def span(value: float) -> str:
    """A long time: 53.2 days, 4.12 hours, 3.10 minutes."""
    for scale, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if value >= scale:
            return f"{_digits(value / scale, 3)} {unit}"
    return seconds(value)


def count(value: float) -> str:
    """A count: 671.0B, 180.2K, 512."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{_digits(value / scale)}{suffix}"
    return f"{value:.4g}"


def watt_hours(value: float) -> str:
    """Energy: 126.6 MWh, 4.388 GWh."""
    for scale, unit in ((1e12, "TWh"), (1e9, "GWh"), (1e6, "MWh"), (1e3, "kWh")):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value)} Wh"


def size(value: int) -> str:
    """Bytes: 66.5 GiB, 12.0 MiB."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} bytes"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0–3, 7, 12–15."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def _digits(value: float, digits: int = 4) -> str:
    whole_digits = len(str(int(value)))
    return f"{value:.{max(0, digits - whole_digits)}f}"
