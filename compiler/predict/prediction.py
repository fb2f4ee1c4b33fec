"""What a plan is predicted to take: time, memory, money. Frozen; seconds in `_s`, bytes as whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.stage_placement import StagePlacement
from compiler.predict.failures import Goodput

CALIBRATE = "dsc calibrate SPEC -o rates.json"  # measures what a CPU achieves


@dataclass(frozen=True, slots=True)
class RankTime:
    """The step of one pipeline rank. The parts are its rows in arXiv 2505.09343, table 4; they sum to the step."""

    pp_rank: int
    forward_s: float  # 1F: forwards that run alone
    backward_s: float  # 1B: backwards that run alone, whole or for the inputs
    weight_s: float  # 1W: deferred weight gradients that run alone
    overlapped_s: float  # 1F1B: pairs
    bubble_s: float  # it runs nothing
    optimizer_s: float  # what is behind the last action: gradient reduction, norm, update

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank runs actions."""
        return self.forward_s + self.backward_s + self.weight_s + self.overlapped_s

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.busy_s + self.bubble_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Interval:
    """Between which two values a time lies, if every rate is off by as much as its class is known to be."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the last action of a step, and is not overlapped with it."""

    reduction_s: float  # of gradients, to who owns them
    gather_s: float  # of updated weights, from who owns them; 0 without ZeRO
    norm_s: float  # of all gradients, to clip them; 0 without clipping
    update_s: float  # of master weights and moments
    host_s: float = 0.0  # that the update waits for state in the memory of the host; 0 without offload

    @property
    def parts(self) -> tuple[float, ...]:
        """Its parts, in their order."""
        return self.reduction_s, self.gather_s, self.norm_s, self.update_s, self.host_s

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts)

    def longer(self, factor: float) -> Tail:
        """All of it by a factor."""
        return Tail(*(factor * part for part in self.parts))


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step of the largest batch. `mean` is that of the pipeline ranks, row by row."""

    seconds: float
    tokens: int
    schedule: str
    num_micro_batches: int
    mean: RankTime  # its pp_rank is -1
    ranks: tuple[RankTime, ...]
    tail: Tail  # of the rank whose tail is longest
    bound_s: float  # no schedule of these actions on this placement takes less, the tail included
    interval: Interval | None = None  # None where nothing is known of the rates' errors

    @property
    def first(self) -> RankTime:
        """Pipeline rank 0, which has the embedding and where stages are mirrored the head: what is shown of a step."""
        return self.ranks[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor or group of tensors that a rank holds at its peak."""

    name: str
    bytes: int
    kind: str = ""  # kept, saved, deferred, gradient, buffer, message, inside: compiler/predict/memory.py


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one device of a pipeline rank, where the experts' load is even; its parts are those at the peak."""

    pp_rank: int
    capacity_bytes: int
    peak_bytes: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # saved and deferred, and the temporaries of the action
    buffers: int  # of dispatch and combine, and of pipeline messages
    peak_action: str  # F3.0, (F3.7|B12.4)
    timeline: tuple[tuple[float, int], ...] = ()  # (second of the step, bytes), all that is held
    worst_bytes: int | None = None  # the peak if every routed row of the expert group came to this device
    worst_action: str | None = None
    held: tuple[HeldTensor, ...] = ()  # the most of it at the peak, largest first
    host_bytes: int = 0  # in the memory of its host: offloaded state, the average of the weights, the copy for a save

    @property
    def fits(self) -> bool:
        """Whether its device has as much."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class StageRow:
    """Which layers a stage runs, and which pipeline ranks hold it."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]  # of the main model
    others: tuple[str, ...] = ()  # embedding, head, mtp.0
    compute_s: float = 0.0  # of a micro-batch, forward and backward, on one lane and on the other
    exchange_s: float = 0.0
    parameters: int = 0  # on one of its devices


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of training on one token, forward and backward, nothing computed twice."""

    causal: float  # attention looks at what came before alone
    full: float  # as if it looked at the whole sequence


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Bytes that one token costs in one MoE layer, one way."""

    dispatch_bytes: float  # of a copy of the token
    combine_bytes: float
    copies: int  # at most, over the links between nodes


@dataclass(frozen=True, slots=True)
class Money:
    """What is paid for devices; None where the cluster names no price."""

    usd_per_device_hour: float | None
    usd_per_trillion_tokens: float | None
    usd: float | None  # of the whole run


@dataclass(frozen=True, slots=True)
class Energy:
    """What the devices draw; None where their power is not known."""

    watts: float | None  # of one device
    kwh_per_trillion_tokens: float | None


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The run from its first to its last token, the batch growing as it does."""

    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OrderGain:
    """The mean time from the first to the last action of some steps, with micro-batches as drawn and by cost."""

    drawn_s: float
    ordered_s: float
    steps: int
    data: str  # the folder of the prepared text

    @property
    def saved(self) -> float:
        """The share of the time as drawn that the order saves."""
        return 1 - self.ordered_s / self.drawn_s


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """What the completions of a step take, if each prompt and completion is as long as it may be."""

    seconds: float  # of a step: those of a rollout, over the steps that train on it
    rounds: int  # of a rollout; each gives every slot a token
    round_s: float
    slots: int  # sequences that a column writes at the same time
    tokens: int  # of all completions
    cache_bytes: int  # of keys and values, on the device that has most
    fits: bool  # whether each device has room for them beside weights, gradients and state


@dataclass(frozen=True, slots=True)
class Prediction:
    """What `dsc plan` says of a run."""

    run: str
    model: str
    cluster: str
    num_devices: int
    device: str
    degrees: tuple[tuple[str, int], ...]  # pipeline, expert, data, tensor, context, expert_tensor
    stage_placement: StagePlacement
    rates: str  # which table they are from
    parameters: int
    active_parameters: int
    mtp_parameters: int  # of the MTP blocks' own, which the two before do not count
    adapter_parameters: int  # all that is trained beside the others; 0 where these are trained
    flops: Flops
    step: StepPrediction
    mfu: Flops | None  # the share of the BF16 peak, 0 to 1; None where a device has none
    device_hours_per_trillion_tokens: float
    money: Money
    energy: Energy
    whole: WholeRun
    ranks: tuple[RankMemory, ...]
    stages: tuple[StageRow, ...]
    exchange: TokenExchange | None  # None without experts
    assumptions: tuple[str, ...]
    goodput: Goodput | None = None  # beside failures; None where nothing is known of them
    devices_of_node: int = 1
    generation: GenerationTime | None = None  # in a run that learns from rewards
    calibrated: bool = True  # False where a core of another CPU stands in: times may be off several times over
    order_gain: OrderGain | None = None  # of `order = cost`; None without it, and where its data is not prepared

    @property
    def host_bytes(self) -> int:
        """Bytes of the memory of a node that its devices take, at most."""
        return self.devices_of_node * max(rank.host_bytes for rank in self.ranks)

    @property
    def device_hours(self) -> float:
        """Hours of all devices together, over the whole run."""
        return self.num_devices * self.whole.seconds / 3600

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return all(rank.fits for rank in self.ranks) and (self.generation is None or self.generation.fits)

    @property
    def generation_share(self) -> float:
        """The share of a step that generates."""
        generation_s = self.generation.seconds if self.generation else 0.0
        return generation_s / (generation_s + self.step.seconds)


# --- Hours of devices → money and energy. What is not known is None, never 0

# The most that a device draws, by its name: thermal design power of the SXM modules, data sheets of the maker.
WATTS = {"a100": 400.0, "h100": 700.0, "h200": 700.0, "h800": 700.0, "b200": 1000.0, "gb200": 1200.0, "mi300x": 750.0}


def money_of(price: float | None, hours_per_trillion: float, whole: WholeRun, num_devices: int) -> Money:
    """Costs of a run at `price`, in USD an hour of one device."""
    if price is None:
        return Money(None, None, None)
    return Money(price, price * hours_per_trillion, price * num_devices * whole.seconds / 3600)


def energy_of(devices: Sequence[tuple[int, str]], hours_per_trillion: float) -> Energy:
    """Energy of (count, name) devices that always draw their design power, without hosts, network and cooling."""
    if any(name.lower() not in WATTS for _, name in devices):
        return Energy(None, None)
    watts = sum(count * WATTS[name.lower()] for count, name in devices) / sum(count for count, _ in devices)
    return Energy(watts, watts * hours_per_trillion / 1000)


# --- Numbers of a prediction in words, for a terminal and for a page

GIB = 2**30


def seconds(value: float) -> str:
    """Four digits: 19.93 s, 137.0 ms, 12.34 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale or (unit == "s" and not value):
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-6)} us"


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


def size(value: int) -> str:
    """Bytes: 66.5 GiB, 12.0 MiB."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} bytes"


def ranges(numbers: Sequence[int]) -> str:
    """0–3, 7, 12–15."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def _digits(value: float, digits: int = 4) -> str:
    whole = len(str(int(value)))
    return f"{value:.{max(0, digits - whole)}f}"
