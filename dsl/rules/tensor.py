"""Rules on tensor parallelism: which parts can be split, and into equal shards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import gcd

from dsl.rules.finding import Finding, nearest_divisor
from dsl.schema import Compressed, DeltaNet, Dense, Gqa, Mla, Moe, Spec
from dsl.schema.precision import is_split_over_ranks

TENSOR, EXPERT = "tensor", "expert_tensor"  # keys of `parallel` that split layers


def layers_are_split(spec: Spec) -> Iterator[Finding]:
    """All tensor ranks have equally many heads, with their keys, and equal parts of the width of a dense layer."""
    if spec.parallel.tensor > 1:
        yield from islice(_layer_findings(spec, "E0819"), 1)  # one message is enough for several layers


def _layer_findings(spec: Spec, code: str) -> Iterator[Finding]:
    tensor = spec.parallel.tensor
    for path, attention in spec.model.attentions:
        if isinstance(attention, Mla):
            if attention.heads % tensor:
                yield _uneven_split(code, TENSOR, spec, f"{attention.heads:,} heads", attention.heads, f"{path}.heads")
        elif isinstance(attention, Compressed):
            yield _must_be_one(code, TENSOR, spec, "compressed attention cannot be split over ranks yet", path)
        elif isinstance(attention, DeltaNet):
            if attention.key_heads % tensor or attention.heads % tensor:
                split = f"{attention.key_heads:,} key heads and {attention.heads:,} value heads"
                heads = gcd(attention.heads, attention.key_heads)
                yield _uneven_split(code, TENSOR, spec, split, heads, f"{path}.key_heads")
        elif not isinstance(attention, Gqa):
            yield _must_be_one(code, TENSOR, spec, "a custom module cannot be split over ranks yet", path)
        elif attention.kv_heads % tensor or attention.heads % tensor:
            split = f"{attention.kv_heads:,} heads of keys and values and {attention.heads:,} query heads"
            heads = gcd(attention.heads, attention.kv_heads)
            yield _uneven_split(code, TENSOR, spec, split, heads, f"{path}.kv_heads")
    for index, span in enumerate(spec.model.layers):
        path, ffn = f"model.layers.{index}.ffn", span.ffn
        if isinstance(ffn, Moe):
            yield from _expert_findings(spec, code, ffn, path)
        elif not isinstance(ffn, Dense):
            yield _must_be_one(code, TENSOR, spec, "a custom module cannot be split over ranks yet", path)
        elif ffn.inner % tensor:
            yield _uneven_split(code, TENSOR, spec, f"inner = {ffn.inner:,}", ffn.inner, f"{path}.inner")


def _expert_findings(spec: Spec, code: str, moe: Moe, path: str) -> Iterator[Finding]:
    """For experts and their router, tensor ranks are data ranks with fewer tokens; a sequence-wise loss needs whole
    sequences per rank, or several ranks per sequence."""
    tensor, size = spec.parallel.tensor, spec.train.micro_batch
    if moe.balance.sequence_loss and size % tensor and tensor % size:
        message = (
            f"tensor = {tensor} ranks hold neither whole sequences nor parts of one sequence, with micro_batch = {size}"
        )
        hint = f"write `tensor = {nearest_divisor(size, tensor)}`, or `sequence_loss = 0`"
        note = ("this loss is per sequence", f"{path}.balance.sequence_loss")
        yield Finding(code, message, "parallel.tensor", hint, (note,))


def rows_are_split(spec: Spec) -> Iterator[Finding]:
    """Between attention and dense parts, all tensor ranks have equally many tokens of a micro-batch."""
    tensor, context, train = spec.parallel.tensor, spec.parallel.context, spec.train
    rows, remainder = divmod(train.micro_batch * train.sequence, context)
    if rows % tensor and not remainder:
        of_context = f" / context {context:,}" if context > 1 else ""
        split = f"micro_batch · sequence{of_context} = {rows:,} tokens"
        yield _uneven_split("E0819", TENSOR, spec, split, rows, "train.sequence")


def experts_are_split(spec: Spec) -> Iterator[Finding]:
    """All ranks of an expert have equal parts of its width."""
    p = spec.parallel
    if p.expert_tensor == 1:
        return
    for index, span in enumerate(spec.model.layers):
        ffn, path = span.ffn, f"model.layers.{index}.ffn"
        if isinstance(ffn, Moe) and ffn.inner % p.expert_tensor:
            yield _uneven_split(
                "E0819", EXPERT, spec, f"inner = {ffn.inner:,}", gcd(ffn.inner, p.columns), f"{path}.inner"
            )
            return


def products_are_split(spec: Spec) -> Iterator[Finding]:
    """Low-precision products are split only in FP8 blocks, and those of experts not at all yet."""
    precision = spec.precision
    reason = f"products in {precision.linear} cannot be split over ranks yet"
    if not is_split_over_ranks(precision):
        yield from _split_findings("E1009", spec, f"{reason}, except in FP8 blocks", "precision")
    elif precision.linear != precision.compute and getattr(spec.parallel, EXPERT) > 1:
        yield _must_be_one("E1009", EXPERT, spec, reason, "precision")


def matrices_are_updated_whole(spec: Spec) -> Iterator[Finding]:
    """An optimizer that updates whole matrices excludes tensor ranks, which hold slices."""
    optimizer = spec.train.optimizer
    if optimizer.unit == "matrix":
        reason = f"{optimizer.kind} updates whole matrices, but {{}} ranks hold slices of them"
        yield from _split_findings("E0819", spec, reason, "train.optimizer")


def _split_findings(code: str, spec: Spec, reason: str, cause: str) -> Iterator[Finding]:
    """Yield a finding if `tensor` or `expert_tensor` splits; `{}` in `reason` stands for that key, `cause` is the path
    of what cannot be split."""
    for key in (TENSOR, EXPERT):
        if getattr(spec.parallel, key) > 1:
            yield _must_be_one(code, key, spec, reason.format(key), cause)
            return


def _must_be_one(code: str, key: str, spec: Spec, reason: str, cause: str) -> Finding:
    message = f"{key} = {getattr(spec.parallel, key)}: {reason}"
    return Finding(code, message, f"parallel.{key}", f"write `{key} = 1`", (("which is given here", cause),))


def _uneven_split(code: str, key: str, spec: Spec, split: str, extent: int, split_path: str) -> Finding:
    ranks = getattr(spec.parallel, key)
    message = f"{key} = {ranks} ranks cannot have equal parts of {split}"
    hint = f"write `{key} = {nearest_divisor(extent, ranks)}`"
    return Finding(code, message, f"parallel.{key}", hint, (("this is split", split_path),))
