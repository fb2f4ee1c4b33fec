"""The training recipe in plan.json: batch, rate, optimizer, checkpoints, and the phase of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.system.strict_json import MAX_INT, NumberRange, Pattern

# --- Numbers and words in the files of a build, with their bounds

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
Placement = Annotated[str, Pattern(r"[a-z_]+\([0-9, ]*\)|[a-z_]+")]  # stages on pipeline ranks


# --- recipe


@dataclass(frozen=True)
class BatchGrowth:
    """Sequences of a step: from `start` to `end` over the first `over_tokens` tokens."""

    start: Count
    end: Count
    over_tokens: Amount


@dataclass(frozen=True)
class UpdateOfRest:
    """The optimizer of the buckets in `rest`: a file of runtime/state/optimizers, and its settings in order."""

    kind: Kind
    settings: Mapping[str, float]


@dataclass(frozen=True)
class OptimizerRecipe:
    """The optimizer: a file of runtime/state/optimizers, and its settings in the order of its arguments.

    `clip`: the largest global gradient norm, or None. `rest`: the optimizer of the buckets of the rest. `qk_clip`: the
    bound for logits of attention heads, or None.
    """

    kind: Kind
    settings: Mapping[str, float]
    weight_decay: float
    clip: float | None
    rest: UpdateOfRest | None = None
    qk_clip: Annotated[float, NumberRange(0)] | None = None


@dataclass(frozen=True)
class RecipeRatePhase:
    """The learning rate changes from `start` to `end`, which it reaches at `end_tokens` tokens."""

    shape: Literal["linear", "constant", "cosine"]
    start: float
    end: float
    end_tokens: Count


@dataclass(frozen=True)
class Checkpoints:
    """When the run saves checkpoints before its end, and which are kept."""

    every: Count
    keep: Count
    best: Amount
    keep_every: Count | None
    failure: Literal["continue", "stop"]
    background: bool = True  # whether they are written while training continues
    to: tuple[str, ...] = ("local",)  # the run folder, and folders or URLs for copies


@dataclass(frozen=True)
class Validation:
    """When the validation loss is measured, and over how many global batches. `ema`: also for the moving average."""

    every: Count
    batches: Count
    ema: bool = False


@dataclass(frozen=True)
class EmaRecipe:
    """The moving average of the weights. `decay`: the share that a step keeps."""

    decay: Share
    dtype: Dtype


Action = Literal["stop", "skip", "rollback"]
Deviations = Annotated[float, NumberRange(0)] | None


@dataclass(frozen=True)
class SpikeRecipe:
    """A spike: a loss or gradient norm this number of standard deviations above the mean of a window; and the
    action."""

    loss: Deviations
    norm: Deviations
    action: Action


@dataclass(frozen=True)
class HealthRecipe:
    """The action after a step whose loss or gradient norm is not finite, or a spike over `window` steps.

    A rollback goes back `back` steps; after `most` skips and rollbacks in a window the run ends. `rerun`: first
    recompute the step. `hash`: steps between comparisons of replicas. `straggler`: the action about a slow rank.
    """

    not_finite: Action
    spike: SpikeRecipe | None
    window: Count
    back: Count
    most: Count
    rerun: bool
    hash: Count | None
    straggler: Literal["warn", "exclude"] | None = None


@dataclass(frozen=True)
class RewardRecipe:
    """A reward of completions. `pattern`: for "regex". `file`: for "python", its path in the build; its `function` may
    take `seconds` for the completions of a rank. `named`: path of the file in the spec, for messages."""

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
    """GRPO: training on completions of the model by their rewards, with `group` completions per prompt.

    `prompt`, `completion`: most tokens of each. `temperature` divides logits. A rollout is trained on `iterations`
    times. Ratios are clipped to 1 - clip_low .. 1 + clip_high. `kl`: weight of the KL divergence from the initial
    weights; `kl_form`: its estimator. `loss`: how tokens are averaged. `scale`: the divisor of advantages. `slots`:
    completions that a column generates concurrently; None for all of a step.
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
    """The checkpoint of a run's initial weights. `path` is relative to the folder of the spec; `sha256`: digest of its
    manifest. `model_type`, `context`: of the published model that it was imported from, if any."""

    path: Annotated[str, Pattern(".{1,4096}")]
    sha256: Annotated[str, Pattern("[0-9a-f]{64}")]
    model_type: Annotated[str, Pattern("[a-z0-9_]{0,60}")] = ""
    context: Amount = 0  # tokens of a sequence


@dataclass(frozen=True)
class Adapter:
    """An adapter of frozen weights: W + `factor` · B · A, where A has `rank` rows, `on` these matrices."""

    kind: Literal["lora"]
    rank: Count
    factor: Annotated[float, NumberRange(0)]
    on: tuple[Kind, ...]


@dataclass(frozen=True)
class PhaseSteps:
    """The place of a phase in its run: its number from 1, the number of phases, and the steps and tokens before it.

    `longest`: tokens of the longest sequence of the run. The phase reads whole pieces of this length.
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
    """The recipe of a run or a phase. In a phase, `tokens` are the phase's, and `rate` is that of the whole run."""

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
