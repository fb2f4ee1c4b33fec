"""Shared by the exporters: the ledger of lost values, Python literals as text, and a recipe in other systems' terms."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from compiler.schedule.schedule import Schedule
from dsl.canonical import rate_text
from dsl.closed_forms import ramp
from dsl.leaves import leaves
from dsl.schema import AdamW, Dense, Mla, Moe, RatePhase, Spec
from runtime.contract.rate import learning_rate

# --- The ledger of an export: every value of the spec is either exported or recorded as lost

OFF = ("0", "false", "none", "[]")  # losing a feature that is off is no loss
# Blocks whose values determine what is computed. Other blocks say where it runs, how fast, and what is stored.
COMPUTED = ("model", "precision", "train", "adapter", "recompute", "schedule", "parallel", "data")


@dataclass(frozen=True)
class LostValue:
    """A value of a spec that the export drops or changes."""

    path: str
    value: str
    why: str
    changes: bool  # whether the loss changes the computation or the plan


class SpecLedger:
    """The values of a spec that are not accounted for yet, and those that are lost."""

    def __init__(self, spec: Spec) -> None:
        self._unrecorded = {leaf.path: leaf.text for leaf in leaves(spec)}
        self._losses: list[LostValue] = []

    def say(self, *patterns: str) -> None:
        """Record that the export carries the values at these paths; `*` matches any part of a path."""
        for pattern in patterns:
            for path in self._matching(pattern):
                del self._unrecorded[path]

    def lose(self, pattern: str, why: str, *, changes: bool = True) -> None:
        """Record that the export drops the values at these paths. Absent values and values in `OFF` are no loss."""
        for path in self._matching(pattern):
            value = self._unrecorded.pop(path)
            if value not in OFF:
                self._losses.append(LostValue(path, value, why, changes))

    def record(self, path: str, value: str, why: str, *, changes: bool = True) -> None:
        """Record a loss with `value` as its text. The value at `path` stays unaccounted for until `say` or `lose`."""
        self._losses.append(LostValue(path, value, why, changes))

    def losses(self, system: str) -> tuple[LostValue, ...]:
        """All losses, those that change the computation first. Values not accounted for count as lost."""
        unsaid = [
            LostValue(path, text, f"this export to {system} cannot express it", path.partition(".")[0] in COMPUTED)
            for path, text in self._unrecorded.items()
        ]
        return tuple(sorted([*self._losses, *unsaid], key=lambda loss: not loss.changes))

    def _matching(self, pattern: str) -> list[str]:
        return [path for path in self._unrecorded if path == pattern or fnmatchcase(path, pattern)]


def comments(losses: Iterable[LostValue]) -> list[str]:
    """One line of printable ASCII for each loss."""
    return [
        to_printable_ascii(f"{'CHANGED' if loss.changes else 'note'}: {loss.path} = {loss.value}: {loss.why}")
        for loss in losses
    ]


def to_printable_ascii(text: str, limit: int = 2000) -> str:
    """A text as one line of printable ASCII, cut to `limit` characters."""
    line = text.encode("ascii", "backslashreplace").decode("ascii")
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


# --- Python as text: calls whose arguments are values. No value of a spec becomes code: each is written as a literal

INDENT, WIDTH = "    ", 88


@dataclass(frozen=True)
class Code:
    """A Python expression written by the exporter itself, such as the name of a class."""

    text: str


@dataclass(frozen=True)
class PythonCall:
    """A call of a named function with keyword arguments."""

    function: str
    arguments: Mapping[str, Any]


def render_python(value: Any, indent: str = "") -> str:
    """The Python text of a value. Raises TypeError unless it is plain data, a `PythonCall` or a `Code`."""
    if isinstance(value, Code):
        return value.text
    if isinstance(value, PythonCall):
        return _wrap_items(f"{value.function}(", [(f"{k}=", v) for k, v in value.arguments.items()], ")", indent)
    if isinstance(value, Mapping):
        return _wrap_items("{", [(f"{render_python(key)}: ", item) for key, item in value.items()], "}", indent)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        ends = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        return _wrap_items(ends[0], [("", item) for item in value], ends[1], indent)
    if type(value) is float and not math.isfinite(value):
        raise TypeError(f"{value} has no Python literal")
    if value is None or type(value) in (bool, int, float, str):
        return ascii(value)
    raise TypeError(f"{type(value).__name__} is not a value of a configuration")


def _wrap_items(head: str, items: Sequence[tuple[str, Any]], tail: str, indent: str) -> str:
    """The items on one line if they fit, else one per line."""
    line = head + ", ".join(prefix + render_python(value) for prefix, value in items) + tail
    if "\n" not in line and len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + INDENT
    lines = "".join(f"{inner}{prefix}{render_python(value, inner)},\n" for prefix, value in items)
    return f"{head}\n{lines}{indent}{tail.lstrip(',')}"


def free_name(name: str, template: str) -> str:
    """A function name for a run, with `_` appended if the template, builtins or keywords use it already.

    Raises ValueError if the name is not an identifier.
    """
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is not a function name")
    reserved = {*re.findall(r"\w+", template), *dir(builtins), *keyword.kwlist, *keyword.softkwlist}
    while name in reserved:
        name += "_"
    return name


# --- A planned spec in other systems' terms

SAMPLES = 1000  # steps at which the exported learning rate is compared with the spec's
NEAR = 1e-9  # relative tolerance for rounding of learning rates


@dataclass(frozen=True)
class PlannedSpec:
    """A spec with the schedule and stages of its plan."""

    spec: Spec
    schedule: Schedule
    stages: tuple[tuple[int, int], ...]  # (begin, end) of each stage's layers
    layout: str  # the stages in Megatron's layout syntax
    replaced: str = ""  # the spec's schedule, if the other system lacks it and `schedule` replaces it

    @property
    def steps(self) -> int:
        """Steps of the run, batch ramp included."""
        return ramp.ramp_of_spec(self.spec).steps_for(self.spec.train.tokens)


@dataclass(frozen=True)
class ExportedFiles:
    """The exported files by name, and the losses."""

    files: Mapping[str, bytes]
    losses: tuple[LostValue, ...] = field(default=())


class ExportError(ValueError):
    """A spec cannot be exported at all. The message says why, `hint` what to change."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def optimizer_to_export(spec: Spec, ledger: SpecLedger, system: str) -> AdamW:
    """The AdamW settings to export. If matrices have another optimizer, AdamW of the other parameters is used for all.

    Raises ExportError if there is no AdamW.
    """
    optimizer, *rest = spec.train.optimizer.rows
    if rest:
        why = f"{system} gets AdamW for all parameters, with the settings of the others"
        for name in ("kind", *optimizer.settings()):
            ledger.lose(f"train.optimizer.{name}", why)
    ledger.lose("train.optimizer.qk_clip", f"this export to {system} has no bound on attention logits")
    ledger.say("train.optimizer.*")
    exported = [optimizer, *rest][-1]
    if not isinstance(exported, AdamW):
        raise ExportError(f"the optimizer {exported.kind} cannot be exported to {system}", "use adamw")
    return exported


# ---------------------------------------------------------------- the learning rate
@dataclass(frozen=True)
class ExportedRate:
    """A learning rate with a linear warm-up from 0, a plateau and one decay to the end of the run. Lengths in steps."""

    peak: float
    warmup: int
    stable: int
    decay: int
    shape: Literal["cosine", "linear"] = "cosine"
    least: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.warmup + self.stable + self.decay


def approximate_rate(planned: PlannedSpec, ledger: SpecLedger, system: str) -> ExportedRate:
    """The learning rate as a warm-up, a plateau and a decay. Another shape is approximated and recorded as lost.

    torchtitan and Megatron count steps, and a warm-up reaches its peak at its last step, as here.
    """
    spec, steps = planned.spec, planned.steps
    phases = list(spec.train.rate)
    tokens = spec.train.sequence * spec.train.batch.end

    def end_of(phase: RatePhase) -> int:
        return min(steps, -(-phase.end_tokens // tokens))

    warmup = end_of(phases[0]) if phases[0].shape == "linear" and phases[0].start == 0 and len(phases) > 1 else 0
    if len(phases) == 1 and phases[0].shape == "linear" and phases[0].start == 0:
        warmup = steps
    later = phases[1 if warmup else 0 :]
    peak = max(max(phase.start, phase.end) for phase in phases)
    plateau = warmup
    if later and later[0].shape == "constant":
        plateau = steps if len(later) == 1 else end_of(later[0])
        later = later[1:]
    decays = [phase for phase in later if phase.shape != "constant"]
    shape: Literal["cosine", "linear"] = "cosine" if not decays or decays[0].shape == "cosine" else "linear"
    least = phases[-1].end if decays else peak
    rate = ExportedRate(peak, warmup, plateau - warmup, steps - plateau if decays else 0, shape, least)
    if not decays and rate.steps != steps:
        rate = ExportedRate(peak, warmup, steps - warmup, 0, shape, peak)
    ledger.say("train.rate.*")
    written = ", ".join(rate_text(phase) for phase in phases)
    shift = _steps_off(spec, rate, tokens)
    if shift is None:
        decay = f", {rate.decay} of {shape} to {least:g}" if rate.decay else ""
        exported = f"{rate.warmup} steps of warm-up to {peak:g}, {rate.stable} at it{decay}"
        ledger.record("train.rate", written, f"{system} has a warm-up, a plateau and one decay: it gets {exported}")
    elif shift:
        ledger.record("train.rate", written, f"its phases end within a step: {system} has whole steps", changes=False)
    return rate


def _steps_off(spec: Spec, exported_rate: ExportedRate, tokens: int) -> int | None:
    """The largest shift in steps between the spec's and the exported rate: 0, 1, or None for more. Compares steps over
    the whole run, corners included."""
    if spec.train.batch.start != spec.train.batch.end:
        return None
    steps, rate = exported_rate.steps, spec.train.rate
    corners = [exported_rate.warmup, exported_rate.warmup + exported_rate.stable, steps]
    samples = {1 + (steps - 1) * k // SAMPLES for k in range(SAMPLES + 1)}
    samples |= {step + offset for step in corners for offset in (-1, 0, 1)}
    shift = 0
    for step in sorted(step for step in samples if 1 <= step <= steps):
        rates = [learning_rate(rate, max(1, near * tokens)) for near in (step - 1, step, step + 1)]  # type: ignore[arg-type]
        exported, slack = rate_at(exported_rate, step), NEAR * exported_rate.peak
        if not min(rates) - slack <= exported <= max(rates) + slack:
            return None
        shift |= abs(exported - rates[1]) > slack
    return shift


def rate_at(exported_rate: ExportedRate, step: int) -> float:
    """The exported learning rate at a step, counted from 1."""
    if step <= exported_rate.warmup:
        return exported_rate.peak * step / exported_rate.warmup
    progress = (
        (step - exported_rate.warmup - exported_rate.stable) / exported_rate.decay if exported_rate.decay else 0.0
    )
    if progress <= 0:
        return exported_rate.peak
    fraction = 0.5 * (1 + math.cos(math.pi * progress)) if exported_rate.shape == "cosine" else 1 - progress
    return exported_rate.least + (exported_rate.peak - exported_rate.least) * fraction


# ---------------------------------------------------------------- the model
@dataclass(frozen=True)
class ExportedLayers:
    """The layers of a model: `dense` identical dense layers, then identical MoE layers, `total` in all."""

    dense: int
    total: int
    dense_ffn: Dense | None
    moe: Moe | None


def layers_of(spec: Spec, system: str) -> ExportedLayers:
    """The layers of a model, dense ones first. Raises ExportError if they have another order or more kinds."""
    model = spec.model
    ffns = [model.ffn(index) for index in range(model.num_layers)]
    dense = next((index for index, ffn in enumerate(ffns) if not isinstance(ffn, Dense)), len(ffns))
    alike = len(dict.fromkeys(ffns[:dense])) <= 1 and len(dict.fromkeys(ffns[dense:])) <= 1
    hint = "export a model of identical dense layers followed by identical MoE layers"
    if not alike or any(span.attention is not None for span in model.layers):
        raise ExportError(f"{system} has one kind of dense layer, followed by one kind of MoE layer", hint)
    first, last = ffns[0], ffns[-1]
    if not isinstance(first, (Dense, Moe)) or not isinstance(last, (Dense, Moe)):
        raise ExportError("a user-defined torch module cannot be exported", hint)
    return ExportedLayers(
        dense, len(ffns), first if isinstance(first, Dense) else None, last if isinstance(last, Moe) else None
    )


def latent_attention(spec: Spec, system: str) -> Mla:
    """The attention of the model. Raises ExportError if it is not MLA, or has an indexer."""
    attention = spec.model.attention
    if not isinstance(attention, Mla):
        raise ExportError(
            f"this export to {system} supports only latent attention, {spec.model.name} has {attention.kind}",
            "`dsc export hf` writes its weights and configuration, which that system imports",
        )
    if any(isinstance(block, Mla) and block.indexer for _, block in spec.model.attentions):
        raise ExportError(
            f"this export to {system} supports only attention to all tokens, {spec.model.name} has an indexer",
            "`dsc export hf` writes its weights and configuration",
        )
    return attention


def say_run(ledger: SpecLedger) -> None:
    """Record as exported what matters only to a run of dsc: names, and where it runs."""
    ledger.say(
        "name",
        "model",
        "model.name",
        "precision",
        "precision.name",
        "unfused",
        "cluster",
        "cluster.*",
        "sm",
        "sm.*",
        "offload",
        "train.checkpoint.failure",
    )


def say_sizes(ledger: SpecLedger) -> None:
    """Record as exported the sizes of a model with latent attention, which every system has."""
    ledger.say("model.vocab", "model.hidden", "model.init_std", "model.norm_eps", "model.layers.?", "model.layers.??")
    ledger.say(
        "model.attention.kind",
        "model.attention.heads",
        "model.attention.query_rank",
        "model.attention.kv_rank",
        "model.attention.head_dim.*",
    )
