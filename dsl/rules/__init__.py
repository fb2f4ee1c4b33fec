"""Rules across fields. Each says the rule, the numbers, and an edit that mends it.

A rule reads only the paths its row names, and is left out when one of them has no usable value: what is wrong there
has been told already. `train_refusals` are the rules of what passes check and plan, but does not run yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dsl.diagnostics import Diagnostic, Note
from dsl.rules import model, parallel, phases, training
from dsl.rules.finding import Finding, Rule
from dsl.schema import Spec
from dsl.source import Span

WORLD = (
    *(f"parallel.{degree}" for degree in ("pipeline", "data", "tensor", "context")),
    "cluster.nodes",
    "cluster.node.devices",
)
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model.layers.*.first", "model.layers.*.last"), phases.layer_ranges),
    (("train.rate", "train.tokens"), phases.rate_covers),
    (("train.batch", "train.micro_batch", "parallel.data"), phases.batch_grows),
    (WORLD, parallel.world_is_used),
    (("parallel.expert", "parallel.data"), parallel.expert_divides_data),
    (("parallel.expert", "parallel.data", "model.layers.*.ffn.experts"), parallel.experts_are_spread),
    (("parallel.pipeline", "schedule"), parallel.even_pipeline),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), parallel.batch_divides),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), parallel.enough_micro_batches),
    ((*WORLD, "train.micro_batch", "train.batch"), parallel.schedules_are_bounded),
    (("parallel.pipeline", "schedule", "model.layers.*.last"), parallel.stages_have_layers),
    (("parallel.tensor", "parallel.context"), parallel.one_tensor_and_context),
    (("parallel.zero",), parallel.zero_runs),
    (tuple(f"model.layers.*.ffn.{key}" for key in ("experts", "groups", "top_groups", "top_k")), model.moe_groups),
    (("model.attention.head_dim",), model.even_rope),
    (("model.mtp.depth",), model.one_mtp),
    (("data.tokenizer", "model.vocab"), model.vocabulary_fits),
    (("cluster.node.device.sms", "sm"), model.compute_keeps_sms),
)

REFUSALS: tuple[Rule, ...] = (
    training.trains_in_full_precision,
    training.trains_with_sigmoid,
    training.trains_without_recompute,
    training.trains_under,
)


def check(spec: Spec, origins: Mapping[str, Span], failed: Collection[str]) -> tuple[Diagnostic, ...]:
    """Every broken rule of a spec, of which the paths `failed` may be missing."""
    found = (finding for reads, rule in RULES if not _missing(reads, failed) for finding in rule(spec))
    return tuple(_located(finding, origins) for finding in found)


def train_refusals(spec: Spec, origins: Mapping[str, Span] | None = None) -> tuple[Diagnostic, ...]:
    """Why `dsc train` does not run a spec that is otherwise right; empty if it does."""
    found = (_located(finding, origins or {}) for rule in REFUSALS for finding in rule(spec))
    return tuple(replace(item, severity="warning") for item in found)


def _missing(reads: tuple[str, ...], failed: Collection[str]) -> bool:
    return any(_related(read.split("."), path.split(".")) for read in reads for path in failed)


def _related(read: list[str], path: list[str]) -> bool:
    """Whether one path leads to the other; `*` stands for any part."""
    return all(mine in ("*", other) for mine, other in zip(read, path, strict=False))


def _located(finding: Finding, origins: Mapping[str, Span]) -> Diagnostic:
    notes = tuple(Note(text, origins[path]) for text, path in finding.notes if path in origins)
    return Diagnostic(finding.code, finding.message, _origin(finding.at, origins), finding.hint, notes)


def _origin(path: str, origins: Mapping[str, Span]) -> Span | None:
    """Where a value, or the block that leaves it to its default, is written."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, origins.get(""))
