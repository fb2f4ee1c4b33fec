"""How a run is trained, as plan.json has it: batch, rate, optimizer, checkpoints, and where a phase is in its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.system.strict_json import MAX_INT, NumberRange, Pattern

# --- Numbers and words of the files of a build, with their bounds

MAX_LAYERS = 10_000
MAX_STEPS = 10**12
MAX_VOCAB = 1 << 31
Count = Annotated[int, NumberRange(1, MAX_INT)]
Amount = Annotated[int, NumberRange(0, MAX_INT)]
Layer = Annotated[int, NumberRange(0, MAX_LAYERS)]
Vocab = Annotated[int, NumberRange(1, MAX_VOCAB)]
StepNumber = Annotated[int, NumberRange(0, MAX_STEPS)]
Share = Annotated[float, NumberRange(0, 1)]
Name = Annotated[str, Pattern(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")]
Kind = Annotated[str, Pattern(r"[a-z][a-z0-9_]{0,30}")]
Dtype = Annotated[str, Pattern(r"[a-z][a-z0-9_]{0,30}")]
Shape = tuple[Count, ...]
Batches = tuple[tuple[StepNumber, StepNumber], ...]  # (first step, sequences of a step), ascending
Placement = Annotated[str, Pattern(r"[a-z_]+\([0-9, ]*\)|[a-z_]+")]  # of stages on pipeline ranks


# --- recipe


@dataclass(frozen=True)
class BatchGrowth:
    """Sequences of a step: from `start` to `end` over the first `over_tokens` tokens."""

    start: Count
    end: Count
    over_tokens: Amount


@dataclass(frozen=True)
class UpdateOfRest:
    """The file of runtime/state/optimizers that updates what the optimizer itself does not, and what it takes, in
    order."""

    kind: Kind
    settings: Mapping[str, float]


@dataclass(frozen=True)
class OptimizerRecipe:
    """How weights are updated: the file of runtime/state/optimizers, and what it takes, in the order in which it takes
    it.

    `clip`: the largest global gradient norm, or None. `rest`: what updates the buckets of the rest. `qk_clip`: the
    largest logit that a head of attention is to have, or None.
    """

    kind: Kind
    settings: Mapping[str, float]
    weight_decay: float
    clip: float | None
    rest: UpdateOfRest | None = None
    qk_clip: Annotated[float, NumberRange(0)] | None = None


@dataclass(frozen=True)
class RecipeRatePhase:
    """The learning rate goes from `start` to `end`, where it is after `end_tokens` tokens."""

    shape: Literal["linear", "constant", "cosine"]
    start: float
    end: float
    end_tokens: Count


@dataclass(frozen=True)
class Checkpoints:
    """When the run is saved before its end, and which checkpoints stay."""

    every: Count
    keep: Count
    best: Amount
    keep_every: Count | None
    failure: Literal["continue", "stop"]
    background: bool = True  # whether they are written while the run trains on
    to: tuple[str, ...] = ("local",)  # the folder of the run, and folders or URLs that each is copied to


@dataclass(frozen=True)
class Validation:
    """When the held-out loss is measured, and over how many global batches. `ema`: with the moving average, too."""

    every: Count
    batches: Count
    ema: bool = False


@dataclass(frozen=True)
class EmaRecipe:
    """The moving average of the weights, of which a step leaves the share `decay`."""

    decay: Share
    dtype: Dtype


Action = Literal["stop", "skip", "rollback"]
Deviations = Annotated[float, NumberRange(0)] | None


@dataclass(frozen=True)
class SpikeRecipe:
    """How many standard deviations above the mean of a window the loss or gradient norm of a spike is, and what then
    follows."""

    loss: Deviations
    norm: Deviations
    action: Action


@dataclass(frozen=True)
class HealthRecipe:
    """What follows a step whose loss or gradient norm is not finite or a spike, of the mean of `window` steps.

    A rollback is of `back` steps; after `most` skips and rollbacks in a window the run ends. `rerun`: the step is first
    computed again. `hash`: steps between comparisons of replicas.
    """

    not_finite: Action
    spike: SpikeRecipe | None
    window: Count
    back: Count
    most: Count
    rerun: bool
    hash: Count | None


@dataclass(frozen=True)
class RewardRecipe:
    """What a completion is rewarded for. `pattern`: of "regex". `file`: of "python", where the build has it; its
    `function` may take so many `seconds` for those of a rank. `named`: what the spec calls the file, for messages."""

    name: Annotated[str, Pattern(r"[A-Za-z_]\w{0,63}")]
    check: Literal["exact", "format", "regex", "python"]
    weight: float
    pattern: Annotated[str, Pattern(".{1,4096}")] | None = None
    file: Annotated[str, Pattern(r"rewards/[A-Za-z_]\w{0,63}\.py")] | None = None
    function: Annotated[str, Pattern(r"[A-Za-z_]\w{0,254}")] = "reward"
    seconds: Annotated[float, NumberRange(0, 86_400)] = 5.0
    named: Annotated[str, Pattern(".{1,4096}")] | None = None


@dataclass(frozen=True)
class GrpoRecipe:
    """Training on completions that the model writes, by their rewards: `group` completions of a prompt.

    `prompt` and `completion`: tokens of the longest. `temperature` divides logits. A rollout is trained on `iterations`
    times. Ratios are clipped to 1 - clip_low .. 1 + clip_high. `kl`: weight of the divergence from the weights that
    the run began with, which `kl_form` estimates. `loss`: how tokens are averaged. `scale`: what advantages are divided
    by. `slots`: completions that a column writes at the same time; None: all of a step.
    """

    group: Annotated[int, NumberRange(2, 1024)]
    prompt: Count
    completion: Count
    temperature: Annotated[float, NumberRange(0, 100)]
    iterations: Count
    clip_low: Share
    clip_high: Annotated[float, NumberRange(0, 1000)]
    kl: Annotated[float, NumberRange(0, 1000)]
    loss: Literal["grpo", "dapo", "dr_grpo"]
    scale: Literal["group", "batch", "none"]
    rewards: tuple[RewardRecipe, ...]
    slots: Count | None = None
    kl_form: Literal["corrected", "k3"] = "corrected"


@dataclass(frozen=True)
class Initial:
    """The checkpoint that a run's weights begin with. `path` is relative to the folder of the spec, `sha256` is that of
    its manifest. `model_type` and `context` are those of the published model that it once was, if it was one."""

    path: Annotated[str, Pattern(".{1,4096}")]
    sha256: Annotated[str, Pattern("[0-9a-f]{64}")]
    model_type: Annotated[str, Pattern("[a-z0-9_]{0,60}")] = ""
    context: Amount = 0  # tokens of a sequence


@dataclass(frozen=True)
class Adapter:
    """What is trained beside frozen weights: W has `factor` · B · A added, A of `rank` rows, `on` these matrices."""

    kind: Literal["lora"]
    rank: Count
    factor: Annotated[float, NumberRange(0)]
    on: tuple[Kind, ...]


@dataclass(frozen=True)
class PhaseSteps:
    """Where a phase is in its run: its number from 1, how many there are, and the steps and tokens of those before it.

    `longest`: tokens of the longest sequence of the run. The phase reads whole pieces of so many tokens.
    """

    number: Count
    phases: Count
    first_step: Amount
    first_token: Amount
    longest: Count

    @property
    def is_last(self) -> bool:
        return self.number == self.phases


@dataclass(frozen=True)
class TrainRecipe:
    """Recipe of the run, or of a phase of it: then `tokens` are the phase's, and the rate is that of the whole run."""

    sequence: Count
    micro_batch: Count
    batch: BatchGrowth
    tokens: Count
    optimizer: OptimizerRecipe
    rate: tuple[RecipeRatePhase, ...]
    seed: Amount
    checkpoint: Checkpoints | None
    validate: Validation | None
    ema: EmaRecipe | None = None
    initial: Initial | None = None
    within: PhaseSteps | None = None
    health: HealthRecipe | None = None
    grpo: GrpoRecipe | None = None

    @property
    def first_step(self) -> int:
        """Steps of the phases before this one."""
        return self.within.first_step if self.within else 0

    @property
    def first_token(self) -> int:
        """Tokens of the phases before this one."""
        return self.within.first_token if self.within else 0
