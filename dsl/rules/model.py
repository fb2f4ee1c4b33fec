"""Rules on the model."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from dsl.facts.devices import group_nodes, groups_fit_nodes, most_nodes_of_token
from dsl.rules.finding import Finding, nearest_divisor
from dsl.schema import (
    Compressed,
    Custom,
    CustomAttention,
    DeltaNet,
    Gqa,
    Llama3Scaling,
    Mla,
    Moe,
    Spec,
    TrainTokenizer,
    YarnScaling,
)

BYTES = 256  # a tokenizer has at least these and an end-of-text token


def moe_groups(spec: Spec) -> Iterator[Finding]:
    """Groups of experts are of equal size, and the groups of a token hold its `top_k` experts."""
    for index, span in enumerate(spec.model.layers):
        ffn, path = span.ffn, f"model.layers.{index}.ffn"
        if not isinstance(ffn, Moe):
            continue
        experts = ("the experts", f"{path}.experts")
        if ffn.experts % ffn.groups:
            message = f"{ffn.experts} experts do not divide into {ffn.groups} groups"
            hint = f"write `groups = {nearest_divisor(ffn.experts, ffn.groups)}`"
            yield Finding("E0901", message, f"{path}.groups", hint, (experts,))
        if ffn.top_groups > ffn.groups:
            message = f"top_groups = {ffn.top_groups} is more than the {ffn.groups} groups"
            hint = f"write `top_groups = {ffn.groups}`"
            yield Finding("E0905", message, f"{path}.top_groups", hint, (("the groups", f"{path}.groups"),))
        elif ffn.experts % ffn.groups == 0 and ffn.top_k > ffn.top_groups * ffn.experts // ffn.groups:
            size = ffn.top_groups * ffn.experts // ffn.groups
            message = (
                f"top_k = {ffn.top_k}, but {ffn.top_groups} of {ffn.groups} groups hold {size} of {ffn.experts} experts"
            )
            notes = (experts, ("the groups", f"{path}.groups"), ("the groups kept", f"{path}.top_groups"))
            yield Finding("E0902", message, f"{path}.top_k", f"write `top_k = {size}`", notes)


def parts_of_a_layer_go_together(spec: Spec) -> Iterator[Finding]:
    """`clamp` needs a SwiGLU, keys of shared experts need shared experts, and a table excludes score-based keys."""
    for index, span in enumerate(spec.model.layers):
        ffn, path = span.ffn, f"model.layers.{index}.ffn"
        if isinstance(ffn, Custom):
            continue
        if ffn.clamp is not None and ffn.activation != "swiglu":
            message = f"activation = {ffn.activation}, but clamp is for SwiGLU"
            note = ("the clamp", f"{path}.clamp")
            yield Finding("E0930", message, f"{path}.activation", "write `activation = swiglu`", (note,))
        if isinstance(ffn, Moe) and not ffn.shared:
            for key, is_set in (("shared_inner", ffn.shared_inner is not None), ("shared_gate", ffn.shared_gate)):
                if is_set:
                    message = f"{key} is for shared experts, but shared = 0"
                    note = ("their number", f"{path}.shared")
                    yield Finding("E0930", message, f"{path}.{key}", f"remove `{key}`", (note,))
        if isinstance(ffn, Moe) and ffn.choice == "table":
            yield from _steering_findings(ffn, path)


def _steering_findings(moe: Moe, path: str) -> Iterator[Finding]:
    """Keys that steer a choice by scores, in a layer whose experts a table chooses."""
    steering = {
        "groups": moe.groups > 1,
        "balance.bias_rate": moe.balance.bias_rate is not None,
        "balance.sequence_loss": moe.balance.sequence_loss > 0,
    }
    for key, is_set in steering.items():
        if is_set:
            word = key.rpartition(".")[2]
            message = f"a table chooses the experts of each token, but {word} is for a choice by scores"
            edits = {"groups": "groups = 1", "bias_rate": "bias_rate = none", "sequence_loss": "sequence_loss = 0"}
            note = ("the choice of experts", f"{path}.choice")
            yield Finding("E0930", message, f"{path}.{key}", f"write `{edits[word]}`", (note,))


def experts_keep_to_nodes(spec: Spec) -> Iterator[Finding]:
    """The groups from which a token chooses its experts are on at most `max_nodes` nodes of an expert group."""
    expert, nodes = spec.parallel.expert_group, spec.group_nodes
    for index, span in enumerate(spec.model.layers):
        ffn, path = span.ffn, f"model.layers.{index}.ffn"
        if not isinstance(ffn, Moe) or ffn.max_nodes is None or ffn.experts % ffn.groups:
            continue
        path, notes = f"{path}.max_nodes", (("the expert ranks", "parallel.expert"), ("the groups", f"{path}.groups"))
        if nodes is None:
            devices = min(node.devices for _, node in spec.cluster.parts if group_nodes(node.devices, expert) is None)
            message = f"expert groups of {expert} ranks do not fill whole nodes of {devices} devices"
            hint = f"write `expert = {devices // gcd(devices, spec.parallel.expert_tensor)}`"
            yield Finding("E0922", message, "parallel.expert", hint, (("the limit", path),))
        elif nodes <= ffn.max_nodes:
            continue
        elif spec.parallel.placement is not None:
            message = "max_nodes assumes experts in order of their numbers, but `placement` moves them"
            yield Finding("E0922", message, path, "remove `max_nodes`", (("the placement", "parallel.placement"),))
        elif not groups_fit_nodes(ffn.groups, nodes):
            message = (
                f"{ffn.groups} groups cannot be spread evenly over {_nodes_text(nodes)} with {expert} expert ranks"
            )
            hint = f"write `groups = {_nearest_groups(ffn, nodes)}`"
            yield Finding("E0922", message, f"model.layers.{index}.ffn.groups", hint, (("the limit", path), notes[0]))
        elif (reachable := most_nodes_of_token(ffn.groups, ffn.top_groups, nodes)) > ffn.max_nodes:
            chosen = f"in {ffn.top_groups} of {ffn.groups} groups" if ffn.groups > 1 else "any of the layer"
            message = (
                f"the experts of a token are {chosen}, on up to {_nodes_text(reachable)}, "
                f"but max_nodes = {ffn.max_nodes}"
            )
            fewer_groups = next(
                (k for k in range(ffn.top_groups, 0, -1) if most_nodes_of_token(ffn.groups, k, nodes) <= ffn.max_nodes),
                0,
            )
            if fewer_groups and ffn.top_k <= fewer_groups * ffn.experts // ffn.groups:
                hint = f"write `top_groups = {fewer_groups}`"
                yield Finding("E0922", message, f"model.layers.{index}.ffn.top_groups", hint, (("the limit", path),))
            else:
                hint = f"write `groups = {nodes}` and `top_groups = {ffn.max_nodes}`"
                yield Finding("E0922", message, path, hint, notes)


def _nodes_text(count: int) -> str:
    return f"{count} nodes" if count > 1 else "1 node"


def _nearest_groups(ffn: Moe, nodes: int) -> int:
    """The number of groups closest to that of a layer that divides its experts and spreads evenly over the nodes."""
    divisors = [
        divisor
        for divisor in range(1, ffn.experts + 1)
        if ffn.experts % divisor == 0 and groups_fit_nodes(divisor, nodes)
    ]
    return min(divisors, key=lambda divisor: (abs(divisor - ffn.groups), divisor))


def heads_share_keys(spec: Spec) -> Iterator[Finding]:
    """Every head of keys and values serves the same number of query heads."""
    attention = spec.model.attention
    if isinstance(attention, Gqa) and attention.heads % attention.kv_heads:
        message, hint = _message_and_hint(attention)
        note = ("the query heads", "model.attention.heads")
        yield Finding("E0908", message, "model.attention.kv_heads", hint, (note,))


def heads_of_ranges_share_keys(spec: Spec) -> Iterator[Finding]:
    """The rule of `heads_share_keys`, for ranges of layers and MTP blocks with attention of their own."""
    _, *ranges = spec.model.attentions
    for path, attention in ranges:
        if isinstance(attention, Gqa) and attention.heads % attention.kv_heads:
            message, hint = _message_and_hint(attention)
            yield Finding("E0908", message, f"{path}.kv_heads", hint, (("the query heads", f"{path}.heads"),))


def heads_of_values_share_keys(spec: Spec) -> Iterator[Finding]:
    """Every query and key head of a delta rule serves the same number of value heads."""
    for path, attention in spec.model.attentions:
        if isinstance(attention, DeltaNet) and attention.heads % attention.key_heads:
            message = f"{attention.heads} heads cannot share key_heads = {attention.key_heads} evenly"
            hint = f"write `key_heads = {nearest_divisor(attention.heads, attention.key_heads)}`"
            yield Finding("E0908", message, f"{path}.key_heads", hint, (("the value heads", f"{path}.heads"),))


def _message_and_hint(attention: Gqa) -> tuple[str, str]:
    """Message and hint for a number of key and value heads that does not divide the heads."""
    message = f"{attention.heads} heads cannot share kv_heads = {attention.kv_heads} evenly"
    return message, f"write `kv_heads = {nearest_divisor(attention.heads, attention.kv_heads)}`"


def groups_of_heads_are_equal(spec: Spec) -> Iterator[Finding]:
    """The output projections of all groups of heads have the same size."""
    for path, attention in spec.model.attentions:
        if isinstance(attention, Compressed) and attention.heads % attention.groups:
            message = f"{attention.heads} heads do not divide into {attention.groups} groups"
            hint = f"write `groups = {nearest_divisor(attention.heads, attention.groups)}`"
            yield Finding("E0935", message, f"{path}.groups", hint, (("the query heads", f"{path}.heads"),))


def sequences_have_entries(spec: Spec) -> Iterator[Finding]:
    """A sequence is long enough for an entry of compressed attention."""
    sequence = spec.train.sequence
    for path, attention in spec.model.attentions:
        entries = attention.compress if isinstance(attention, Compressed) else None
        if entries is not None and entries.rate > sequence:
            message = f"rate = {entries.rate:,} tokens make one entry, but a sequence has only {sequence:,}"
            hint = f"write `sequence = {entries.rate}`" + (f", or `rate = {sequence}`" if sequence > 1 else "")
            yield Finding("E0936", message, f"{path}.compress.rate", hint, (("the sequence", "train.sequence"),))


def even_rope(spec: Spec) -> Iterator[Finding]:
    """RoPE rotates pairs of columns, and only columns that a head has."""
    for path, attention in spec.model.attentions:
        if isinstance(attention, CustomAttention | DeltaNet):
            continue
        if isinstance(attention, Mla):
            key, width, key_path = "rope", attention.head_dim.rope, f"{path}.head_dim.rope"
        else:
            key, width, key_path = "head_dim", attention.head_dim, f"{path}.head_dim"
        if width % 2:
            hint = f"write `{key} = {width + 1}`"
            yield Finding("E0903", f"{key} = {width} is odd, but columns are rotated in pairs", key_path, hint)
        part, key_path = attention.rope.width if attention.rope else None, f"{path}.rope.width"
        if part is None:
            continue
        if isinstance(attention, Mla):
            message = "latent attention rotates the columns of `head_dim.rope` and takes no `width`"
            note = ("the rotated columns", f"{path}.head_dim.rope")
            yield Finding("E0925", message, key_path, "remove `width`", (note,))
        elif part > attention.head_dim:
            message = f"width = {part} columns are rotated, but a head has only {attention.head_dim}"
            note = ("the width of a head", f"{path}.head_dim")
            yield Finding("E0925", message, key_path, f"write `width = {attention.head_dim // 2 * 2}`", (note,))
        elif part % 2:
            yield Finding(
                "E0903",
                f"width = {part} is odd, but columns are rotated in pairs",
                key_path,
                f"write `width = {part - 1}`",
            )


def frequencies_rise(spec: Spec) -> Iterator[Finding]:
    """The lower bound of the turns between which frequencies are scaled is below the upper one."""
    for path, attention in spec.model.attentions:
        rope, rope_path = None if isinstance(attention, CustomAttention | DeltaNet) else attention.rope, f"{path}.rope"
        scaling = rope.scaling if rope else None
        if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
            low, high = f"{rope_path}.scaling.low_freq_factor", f"{rope_path}.scaling.high_freq_factor"
            message = f"low_freq_factor = {scaling.low_freq_factor:g} is not below high_freq_factor"
            hint = f"write `low_freq_factor = {scaling.high_freq_factor / 4:g}`"
            yield Finding("E0926", message, low, hint, (("high_freq_factor", high),))
        if not isinstance(scaling, YarnScaling):
            continue
        if scaling.beta_slow > scaling.beta_fast:
            slow, fast = f"{rope_path}.scaling.beta_slow", f"{rope_path}.scaling.beta_fast"
            message = f"beta_slow = {scaling.beta_slow:g} is above beta_fast"
            yield Finding(
                "E0926", message, slow, f"write `beta_slow = {scaling.beta_fast / 32:g}`", (("beta_fast", fast),)
            )
        if rope and rope.theta == 1:
            message = "theta = 1 gives all pairs the same frequency, but YaRN needs a range of frequencies"
            yield Finding(
                "E0926", message, f"{rope_path}.theta", "write `theta = 10_000`", (("YaRN", f"{rope_path}.scaling"),)
            )


def logits_are_clipped(spec: Spec) -> Iterator[Finding]:
    """QK-clip scales the query and key weights: they must be trained, and queries and keys not normed."""
    bound = spec.train.optimizer.qk_clip
    if bound is None:
        return
    reasons: list[tuple[str, str]] = []
    if spec.adapter is not None:
        reasons.append(("the weights of queries and keys are frozen beside adapters", "adapter"))
    for path, attention in spec.model.attentions:
        if isinstance(attention, CustomAttention):
            reasons.append(("a custom module does not report its logits", path))
        elif isinstance(attention, Mla) and attention.indexer is not None:
            reasons.append(("attention with an indexer does not report its logits yet", path))
        elif isinstance(attention, Compressed):
            reasons.append(("queries and keys are normed, which undoes a clip", path))
        elif isinstance(attention, Gqa) and attention.qk_norm is not None:
            reasons.append(("queries and keys are normed, which undoes a clip", f"{path}.qk_norm"))
    model = spec.model
    attentions = (*map(model.attention_of, range(model.num_layers)), model.attention_of_mtp)
    if not any(isinstance(attention, Mla | Gqa) for attention in attentions):
        reasons.append(("no layer has attention with a softmax", "model.attention"))
    for reason, path in reasons[:1]:
        message, notes = f"qk_clip = {bound:g}: {reason}", (("which is given here", path),)
        yield Finding("E0952", message, "train.optimizer.qk_clip", "write `qk_clip = none`", notes)


def one_mtp(spec: Spec) -> Iterator[Finding]:
    """MTP has one block, which predicts the token after the next."""
    if spec.model.mtp is not None and spec.model.mtp.depth > 1:
        message = f"mtp depth = {spec.model.mtp.depth}: only one block of multi-token prediction is supported so far"
        yield Finding("E0904", message, "model.mtp.depth", "write `depth = 1`")


def vocabulary_fits(spec: Spec) -> Iterator[Finding]:
    """Every token has a row of the embedding."""
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, TrainTokenizer) and tokenizer.vocab > spec.model.vocab:
        message = f"the tokenizer has {tokenizer.vocab:,} entries, but the model's vocab is {spec.model.vocab:,}"
        if spec.model.vocab > BYTES:
            hint = f"write `tokenizer = train({spec.model.vocab})`"
            yield Finding("E0906", message, "data.tokenizer", hint, (("the model's vocabulary", "model.vocab"),))
        else:
            hint = f"write `vocab = {tokenizer.vocab}`"
            yield Finding("E0906", message, "model.vocab", hint, (("the tokenizer", "data.tokenizer"),))


# --- Indexers: their inputs, and training only them


def indexers_fit_attention(spec: Spec) -> Iterator[Finding]:
    """An indexer projects its queries from the query latent, and rotates as many columns as attention does."""
    for path, attention in spec.model.attentions:
        if not isinstance(attention, Mla | Compressed) or attention.indexer is None:
            continue
        if isinstance(attention, Compressed):
            indexer_path, rope_path = f"{path}.compress.indexer", f"{path}.rope.width"
            rope = (attention.rope.width or attention.head_dim) if attention.rope else 0
        else:
            indexer_path, rope_path, rope = f"{path}.indexer", f"{path}.head_dim.rope", attention.head_dim.rope
        dim = attention.indexer.head_dim
        if attention.query_rank is None:
            message = "an indexer reads the query latent, but query_rank = none"
            note = ("queries without a latent", f"{path}.query_rank")
            yield Finding("E0950", message, indexer_path, "remove `indexer`", (note,))
        if dim < rope:
            message = f"head_dim = {dim:,} of the indexer is less than the {rope:,} columns that rope rotates"
            note = ("the rotated columns", rope_path)
            yield Finding("E0950", message, f"{indexer_path}.head_dim", f"write `head_dim = {rope}`", (note,))


def only_names_an_existing_part(spec: Spec) -> Iterator[Finding]:
    """`only = indexer` needs an indexer, and no other setting of what is trained."""
    if spec.train.only is None:
        return
    if not any(isinstance(attention, Mla | Compressed) and attention.indexer for _, attention in spec.model.attentions):
        message = f"only = indexer, but no attention of model {spec.model.name} has one"
        yield Finding("E0951", message, "train.only", "remove `only`", (("the model", "model"),))
    if spec.adapter is not None:
        message = "only = indexer, but the run trains only adapters"
        yield Finding("E0951", message, "train.only", "remove `only`", (("the adapters", "adapter"),))
    validate = spec.train.validate
    if validate is not None and validate.ema:
        message = "only = indexer: frozen weights have no moving average to validate"
        note = (("only the indexer is trained", "train.only"),)
        yield Finding("E0951", message, "train.validate.ema", "write `ema = false`", note)


def frozen_weights_are_whole(spec: Spec) -> Iterator[Finding]:
    """Frozen weights are not sharded: every rank that holds them holds all of them."""
    if spec.train.only is not None and spec.parallel.zero == 3 and spec.parallel.data > 1:
        message = "zero = 3 shards trained weights, but all except the indexers are frozen and whole on each rank"
        hint = "write `zero = 2`, and more pipeline or expert ranks"
        yield Finding("E0944", message, "parallel.zero", hint, (("only the indexer is trained", "train.only"),))
