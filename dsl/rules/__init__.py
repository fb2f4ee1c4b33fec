"""Rules across fields. A finding states the rule, the numbers, and an edit that fixes it.

A rule reads only the paths that its row names, and is skipped if one of them has no valid value, which has been
reported already. `train_refusals` covers valid specs that cannot be compiled and trained yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dsl.messages.diagnostics import Diagnostic, Note, Span
from dsl.rules import adapter, data, model, parallel, phases, places, precision, resources, rewards, tensor, training
from dsl.rules.finding import Finding, Rule
from dsl.schema import Kernels, Spec
from dsl.schema.paths import check_paths

WORLD = (
    *(f"parallel.{degree}" for degree in ("pipeline", "data", "tensor", "context")),
    "cluster.nodes",
    "cluster.node.devices",
    "cluster.more",
)
EXPERT = ("parallel.expert", "parallel.expert_tensor")
COLUMNS = tuple(f"parallel.{degree}" for degree in ("data", "tensor", "context"))
TENSOR = ("parallel.tensor", "parallel.expert_tensor")
FP8 = tuple(f"precision.{key}" for key in ("linear", "activation_tile", "weight_tile"))
LAYERS = "model.layers.*"
KERNELS = tuple(f"kernels.{key}" for key in Kernels.model_fields)
ATTENTIONS = ("model.attention", f"{LAYERS}.attention", "model.mtp.attention")
STATE = (
    *("model", "precision", "parallel", "schedule", "offload"),
    *(f"train.{key}" for key in ("micro_batch", "sequence", "optimizer", "ema", "validate")),
)
_OF_PARTS = ("activation", "clamp", "shared", "shared_inner", "shared_gate", "choice", "groups", "balance")
Row = tuple[tuple[str, ...], Rule]
# Rules on numbers of several lines that may contradict each other; `dsl.conflict` finds the smallest conflicting sets.
JOINT: tuple[Row, ...] = (
    (WORLD, parallel.world_is_used),
    ((*EXPERT, *COLUMNS), parallel.expert_divides_columns),
    ((*EXPERT, *COLUMNS, f"{LAYERS}.ffn.experts"), parallel.experts_are_spread),
    (("parallel.pipeline", "schedule"), parallel.even_pipeline),
    (("train.batch", "train.micro_batch", "parallel.data"), phases.batch_grows),
    (("train.micro_batch", "train.batch"), parallel.batch_is_a_multiple_of_micro_batches),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), parallel.batch_divides),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), parallel.enough_micro_batches),
    ((*WORLD, "train.micro_batch", "train.batch", "schedule"), parallel.schedules_are_bounded),
    (("parallel.pipeline", "schedule", f"{LAYERS}.last"), parallel.stages_have_layers),
    (("parallel.zero", "precision", "train.optimizer"), parallel.zero_runs),
    (tuple(f"{LAYERS}.ffn.{key}" for key in ("experts", "groups", "top_groups", "top_k")), model.moe_groups),
    (("model.attention.heads", "model.attention.kv_heads"), model.heads_share_keys),
    (("data.tokenizer", "model.vocab"), model.vocabulary_fits),
    (("cluster.node.device.sms", "cluster.node.device.name", "cluster.more", "sm"), resources.compute_keeps_sms),
    (
        (*STATE, "cluster.node.device", "cluster.more"),
        resources.state_fits,
    ),
)
# Codes of other rules that read a degree that may be `auto`: experts on nodes, splits over tensor ranks, and groups of
# data ranks.
CHOICE_CODES = frozenset({"E0818", "E0819", "E0821", "E0922"})
JOINT_CODES = frozenset(
    (
        "E0706",
        *(f"E08{n:02}" for n in range(1, 13) if n != 9),
        "E0901",
        "E0902",
        "E0905",
        "E0906",
        "E0907",
        "E0908",
        "E0914",
    )
)
RULES: tuple[Row, ...] = (
    (tuple(f"{LAYERS}.{key}" for key in ("first", "last", "by")), phases.layer_ranges),
    (("train.rate", "train.tokens", "train.within"), phases.rate_covers),
    (
        (
            *(f"train.{key}" for key in ("within", "sequence", "tokens", "batch", "micro_batch")),
            "parallel.data",
            "data.sources",
        ),
        phases.phases_meet,
    ),
    (("train.within", "train.sequence", "data.chat"), phases.phases_read_text),
    (
        (
            *("model.attention.head_dim", "model.attention.rope.width"),
            *(f"{path}.{key}" for path in ATTENTIONS[1:] for key in ("head_dim", "rope")),
        ),
        model.even_rope,
    ),
    (tuple(f"{path}.rope" for path in ATTENTIONS), model.frequencies_rise),
    (
        ("model.attention", *(f"{path}.{key}" for path in ATTENTIONS[1:] for key in ("heads", "kv_heads"))),
        model.heads_of_ranges_share_keys,
    ),
    (tuple(f"{path}.{key}" for path in ATTENTIONS for key in ("heads", "groups")), model.groups_of_heads_are_equal),
    ((*(f"{path}.compress.rate" for path in ATTENTIONS), "train.sequence"), model.sequences_have_entries),
    (
        tuple(f"{path}.{key}" for path in ATTENTIONS for key in ("heads", "key_heads")),
        model.heads_of_values_share_keys,
    ),
    (("model.mtp.depth",), model.one_mtp),
    (
        tuple(f"{LAYERS}.ffn.{key}" for key in _OF_PARTS),
        model.parts_of_a_layer_go_together,
    ),
    (tuple(f"precision.{role}" for role in precision.ALL_ROLES), precision.low_precision_has_a_role),
    (("precision.logits", "precision.compute"), precision.logits_have_a_valid_dtype),
    (
        (*FP8, *(f"precision.{key}" for key in ("scale", "tensor_scale", "dispatch", "combine"))),
        precision.tiles_are_given,
    ),
    (
        (*FP8, *ATTENTIONS, "model.hidden", f"{LAYERS}.ffn.inner", f"{LAYERS}.ffn.shared_inner", "parallel.tensor"),
        precision.operands_are_read_whole,
    ),
    ((*FP8, "precision.promote"), precision.sums_are_promoted),
    (("precision.linear", "precision.high", f"{LAYERS}.last"), precision.some_layers_are_not_high),
    (("precision",), precision.tiles_match_a_format),
    (
        ("recompute", "model.name", "model.logit_cap", "model.hyper_connections", *ATTENTIONS, f"{LAYERS}.ffn.shared"),
        training.recomputed_ops_exist,
    ),
    (("recompute", "recompute_layers", "model.mtp", "model.hyper_connections"), training.layers_are_named_once),
    (
        ("recompute_layers", "recompute", "model.mtp", "model.name", f"{LAYERS}.last"),
        training.counted_layers_are_recomputed,
    ),
    (
        (
            *("unfused", "recompute"),
            *(
                "model.name",
                "model.hidden",
                "model.norm",
                "model.residual_scale",
                "model.hyper_connections",
                *ATTENTIONS,
            ),
            *(f"{LAYERS}.ffn.{key}" for key in ("kind", "shared")),
            *(f"precision.{key}" for key in ("name", "linear", "scale", "dispatch")),
        ),
        precision.unfused_ops_exist,
    ),
    ((*KERNELS, "model.name", *ATTENTIONS, f"{LAYERS}.ffn.kind"), precision.kernels_exist),
    (
        (
            *(*KERNELS, *ATTENTIONS, "data.documents", "train.optimizer.qk_clip", "unfused"),
            *(f"precision.{key}" for key in ("name", "linear", "compute")),
        ),
        precision.libraries_compute_the_ops,
    ),
    (
        ("data.chat", "data.tokenizer", "data.source", "data.sources", "data.documents"),
        data.conversations_can_be_read,
    ),
    (("data.sources", "data.sources.weight"), data.weights_have_a_period),
    (
        ("data.fim", "data.sources", "data.sources.fim", "data.chat", "data.tokenizer", "data.end_id"),
        data.fim_has_documents_and_tokens,
    ),
    (("data.end_id", "data.tokenizer", "model.vocab"), data.end_is_a_token),
    (
        (
            "data.filters",
            "data.source",
            "data.sources",
            "data.sources.files",
            "data.sources.filters",
            "data.chat",
            "data.tokenizer",
            "data.end_id",
        ),
        data.filters_have_documents,
    ),
    (
        (
            "data.filters.shortest",
            "data.filters.longest",
            "data.sources",
            "data.sources.filters.shortest",
            "data.sources.filters.longest",
        ),
        data.lengths_leave_documents,
    ),
    (("data.chat", "data.documents", *ATTENTIONS), data.documents_reach_attention),
    (("adapter", "train.initial"), adapter.adapters_are_beside_weights),
    (("adapter", "parallel.zero", "parallel.data"), adapter.weights_are_whole),
    (("adapter.on", "model"), adapter.adapted_matrices_exist),
    (("adapter", "model"), adapter.rank_is_low),
    (("adapter.on", "precision.dispatch", "precision.compute"), adapter.adapters_read_their_dtype),
    (ATTENTIONS, model.indexers_fit_attention),
    (("train.only", "train.validate", "adapter", "model.name", *ATTENTIONS), model.only_names_an_existing_part),
    (("train.only", "parallel.zero", "parallel.data"), model.frozen_weights_are_whole),
    (("train.validate", "data.validation"), resources.validation_has_data),
    (("train.checkpoint.best", "train.checkpoint.every", "train.validate"), resources.best_is_measured),
    (("train.checkpoint.keep_every", "train.checkpoint.every"), resources.kept_checkpoints_are_saved),
    (("train.checkpoint.to", "name"), places.places_are_apart),
    (("train.health", "train.checkpoint.keep", "train.checkpoint.every"), resources.rollback_finds_a_checkpoint),
    (("train.validate", "train.ema"), resources.average_is_kept),
    (("offload", "precision.master", "precision.parameter"), resources.offloaded_state_exists),
    (("schedule.name", "schedule.file"), parallel.one_schedule),
    (
        ("parallel.layout", "parallel.pipeline", "schedule", f"{LAYERS}.first", f"{LAYERS}.last", "model.mtp.depth"),
        parallel.layout_fits_the_model,
    ),
    (
        tuple(f"schedule.{key}" for key in ("name", "file", "chunks", "cap", "host_copies", "placement", "copies")),
        parallel.options_of_schedules,
    ),
    (("schedule.cap", "schedule.name", "parallel.pipeline"), parallel.caps_match_ranks),
    (("schedule.placement", "schedule.copies", "schedule.name"), parallel.copies_are_placed),
    (("schedule.host_copies", "schedule.order", "schedule.name"), parallel.copied_activations_stay_in_order),
    (("schedule.order", "data.chat", "data.documents"), data.micro_batches_differ),
    (("parallel.placement", "parallel.expert", f"{LAYERS}.ffn.experts"), parallel.placement_has_experts),
    (
        (
            *(*EXPERT, "parallel.placement", *WORLD[-3:]),
            *(f"{LAYERS}.ffn.{key}" for key in ("experts", "groups", "top_groups", "top_k", "max_nodes")),
        ),
        model.experts_keep_to_nodes,
    ),
    (
        ("parallel.route", *EXPERT, *WORLD[-3:], "precision.combine", f"{LAYERS}.ffn.kind"),
        parallel.rows_go_through_nodes,
    ),
    (
        ("parallel.tensor", *ATTENTIONS, f"{LAYERS}.ffn", "train.micro_batch"),
        tensor.layers_are_split,
    ),
    (("parallel.context", "train.sequence"), parallel.sequences_are_split),
    (("parallel.context", *ATTENTIONS), parallel.attention_is_split),
    (("parallel.tensor", "parallel.context", "train.micro_batch", "train.sequence"), tensor.rows_are_split),
    (("parallel.expert_tensor", *COLUMNS, f"{LAYERS}.ffn"), tensor.experts_are_split),
    ((*TENSOR, "train.optimizer"), tensor.matrices_are_updated_whole),
    (("train.optimizer.qk_clip", "adapter", *ATTENTIONS), model.logits_are_clipped),
    (("train.grpo", "data.prompts"), rewards.completions_have_prompts),
    (
        (
            *("data.prompts", "data.source", "data.sources", "data.tokenizer", "data.chat", "data.documents"),
            *("data.column", "data.fim", "data.filters"),
        ),
        data.prompts_are_rows,
    ),
    (
        ("train.grpo.group", "train.grpo.iterations", "train.batch", "train.micro_batch", "parallel.data"),
        rewards.steps_have_whole_groups,
    ),
    (("train.grpo.prompt", "train.grpo.completion", "train.sequence"), rewards.completions_fit),
    (
        ("train.grpo.rewards", *(f"train.grpo.rewards.{key}" for key in ("check", "weight", *rewards.KEYS_OF_CHECKS))),
        rewards.rewards_have_what_they_check,
    ),
    (("train.grpo", "model.mtp", "model.hyper_connections", *ATTENTIONS, f"{LAYERS}.ffn"), rewards.models_generate),
    (
        (
            *("train.grpo", "parallel.tensor", "parallel.context", "parallel.route", *EXPERT, *WORLD[-3:]),
            *("precision.combine", f"{LAYERS}.ffn"),
        ),
        rewards.ranks_generate,
    ),
    (("train.grpo", "cluster.node.device", "cluster.more"), rewards.devices_generate),
    (
        (*(f"train.{key}" for key in ("grpo", "validate", "ema", "optimizer.qk_clip")), "recompute", "precision"),
        rewards.options_generate,
    ),
    (WORLD, parallel.data_ranks_are_of_one_kind),
    (("parallel.shard", "parallel.zero", *EXPERT, *COLUMNS), parallel.shards_divide_data),
    (("precision.linear", "cluster.node.device", "cluster.more"), resources.devices_have_the_precision),
    (("cluster.node.device", "cluster.more"), resources.devices_have_a_known_speed),
    (("kernels.graphs", "parallel.zero", "cluster.node.device", "cluster.more"), resources.graphs_can_be_captured),
    ((*STATE, *WORLD, "cluster.node.device"), resources.state_fits_each_kind),
    *JOINT,
)
check_paths(*(read for reads, _ in RULES for read in reads))

REFUSALS: tuple[Rule, ...] = (
    training.trains_in_a_built_in_precision,
    training.has_kernels_of_the_precision,
    tensor.products_are_split,
    training.runs_on_its_own_software,
)


def check(spec: Spec, origins: Mapping[str, Span], failed: Collection[str]) -> tuple[Diagnostic, ...]:
    """Return a message for every broken rule of a spec. The paths in `failed` may have no value."""
    return tuple(dict.fromkeys(diagnostic_of(finding, origins) for _, finding in broken_rules(spec, failed)))


def broken_rules(spec: Spec, failed: Collection[str]) -> tuple[tuple[Rule, Finding], ...]:
    """Return every broken rule with its findings."""
    return tuple(
        (rule, finding) for reads, rule in RULES if not has_failed_read(reads, failed) for finding in rule(spec)
    )


def train_refusals(spec: Spec, origins: Mapping[str, Span] | None = None) -> tuple[Diagnostic, ...]:
    """Return the reasons why `dsc train` cannot run a valid spec; empty if it can."""
    messages = (diagnostic_of(finding, origins or {}) for rule in REFUSALS for finding in rule(spec))
    return tuple(replace(item, severity="warning") for item in messages)


def are_joint(messages: Iterable[Diagnostic]) -> bool:
    """Whether a message is about a joint rule."""
    return any(message.code in JOINT_CODES for message in messages)


def depend_on_choices(messages: Iterable[Diagnostic]) -> bool:
    """Whether another value of a key that is `auto` may fix one of the messages."""
    return any(message.code in JOINT_CODES | CHOICE_CODES for message in messages)


def has_failed_read(reads: tuple[str, ...], failed: Collection[str]) -> bool:
    """Whether a path that a rule reads is among the failed ones."""
    return any(are_related(read, path) for read in reads for path in failed)


def are_related(read: str, path: str) -> bool:
    """Whether one path is a prefix of the other; `*` stands for any part."""
    return all(pattern in ("*", part) for pattern, part in zip(read.split("."), path.split("."), strict=False))


def diagnostic_of(finding: Finding, origins: Mapping[str, Span]) -> Diagnostic:
    """Make a message of a finding, with the source positions of its paths."""
    notes = tuple(Note(text, origins[path]) for text, path in finding.notes if path in origins)
    return Diagnostic(finding.code, finding.message, _origin(finding.path, origins), finding.hint, notes)


def _origin(path: str, origins: Mapping[str, Span]) -> Span | None:
    """The position of a value, or of the innermost written block around it."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, origins.get(""))
