"""The model."""

from __future__ import annotations

from collections.abc import Iterator

from dsl.rules.finding import Finding, nearest_divisor
from dsl.schema import Gqa, Mla, Moe, Spec, TrainTokenizer

BYTES = 256  # a tokenizer has these and the end of a text at least


def moe_groups(spec: Spec) -> Iterator[Finding]:
    """Groups are equal, and a token finds its experts in those it may choose from."""
    for index, span in enumerate(spec.model.layers):
        ffn, at = span.ffn, f"model.layers.{index}.ffn"
        if not isinstance(ffn, Moe):
            continue
        experts = ("the experts", f"{at}.experts")
        if ffn.experts % ffn.groups:
            message = f"{ffn.experts} experts do not divide into {ffn.groups} groups"
            hint = f"write `groups = {nearest_divisor(ffn.experts, ffn.groups)}`"
            yield Finding("E0901", message, f"{at}.groups", hint, (experts,))
        if ffn.top_groups > ffn.groups:
            message = f"top_groups = {ffn.top_groups} of {ffn.groups} groups"
            hint = f"write `top_groups = {ffn.groups}`"
            yield Finding("E0905", message, f"{at}.top_groups", hint, (("the groups", f"{at}.groups"),))
        elif ffn.experts % ffn.groups == 0 and ffn.top_k > ffn.top_groups * ffn.experts // ffn.groups:
            most = ffn.top_groups * ffn.experts // ffn.groups
            message = (
                f"top_k = {ffn.top_k}, but {ffn.top_groups} of {ffn.groups} groups hold {most} of {ffn.experts} experts"
            )
            notes = (experts, ("the groups", f"{at}.groups"), ("the groups kept", f"{at}.top_groups"))
            yield Finding("E0902", message, f"{at}.top_k", f"write `top_k = {most}`", notes)


def heads_share_keys(spec: Spec) -> Iterator[Finding]:
    """Every head of keys and values serves the same number of query heads."""
    attention = spec.model.attention
    if isinstance(attention, Gqa) and attention.heads % attention.kv_heads:
        message = f"{attention.heads} heads cannot share kv_heads = {attention.kv_heads} evenly"
        hint = f"write `kv_heads = {nearest_divisor(attention.heads, attention.kv_heads)}`"
        note = ("the query heads", "model.attention.heads")
        yield Finding("E0908", message, "model.attention.kv_heads", hint, (note,))


def even_rope(spec: Spec) -> Iterator[Finding]:
    """Rotary embedding turns pairs of elements."""
    attention = spec.model.attention
    if isinstance(attention, Mla):
        key, width, at = "rope", attention.head_dim.rope, "model.attention.head_dim.rope"
    else:
        key, width, at = "head_dim", attention.head_dim, "model.attention.head_dim"
    if width % 2:
        yield Finding("E0903", f"{key} = {width} is odd, it is rotated in pairs", at, f"write `{key} = {width + 1}`")


def one_mtp(spec: Spec) -> Iterator[Finding]:
    """MTP predicts one token beyond the next."""
    if spec.model.mtp is not None and spec.model.mtp.depth > 1:
        message = f"mtp depth = {spec.model.mtp.depth}: one block of multi-token prediction runs so far"
        yield Finding("E0904", message, "model.mtp.depth", "write `depth = 1`")


def vocabulary_fits(spec: Spec) -> Iterator[Finding]:
    """Every token has a row of the embedding."""
    tokenizer = spec.data.tokenizer
    if isinstance(tokenizer, TrainTokenizer) and tokenizer.vocab > spec.model.vocab:
        message = f"the tokenizer has {tokenizer.vocab:,} entries, the model's vocab {spec.model.vocab:,}"
        if spec.model.vocab > BYTES:
            hint = f"write `tokenizer = train({spec.model.vocab})`"
            yield Finding("E0906", message, "data.tokenizer", hint, (("the model's vocabulary", "model.vocab"),))
        else:
            hint = f"write `vocab = {tokenizer.vocab}`"
            yield Finding("E0906", message, "model.vocab", hint, (("the tokenizer", "data.tokenizer"),))
