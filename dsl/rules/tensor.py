"""What tensor ranks can split, and into equal parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import gcd

from dsl.facts.formats import FP8
from dsl.rules.finding import Finding, nearest_divisor
from dsl.schema import Compressed, DeltaNet, Dense, Gqa, Mla, Moe, Spec
from dsl.schema.precision import format_of

TENSOR, EXPERT = "tensor", "expert_tensor"  # keys of `parallel` that split layers


def layers_are_split(spec: Spec) -> Iterator[Finding]:
    """Each tensor rank has as many heads as any other, with their keys, and as much of the width of a dense layer."""
    if spec.parallel.tensor > 1:
        yield from islice(_layers(spec, "E0819"), 1)  # of several layers that cannot be split, the first says enough


def _layers(spec: Spec, code: str) -> Iterator[Finding]:
    tensor = spec.parallel.tensor
    for path, attention in spec.model.attentions:
        if isinstance(attention, Mla):
            if attention.heads % tensor:
                yield _uneven(code, TENSOR, spec, f"{attention.heads:,} heads", attention.heads, f"{path}.heads")
        elif isinstance(attention, Compressed):
            yield _whole(code, TENSOR, spec, "compressed attention is not split over ranks yet", path)
        elif isinstance(attention, DeltaNet):
            if attention.key_heads % tensor or attention.heads % tensor:
                what = f"{attention.key_heads:,} heads of keys, and {attention.heads:,} of values"
                heads = gcd(attention.heads, attention.key_heads)
                yield _uneven(code, TENSOR, spec, what, heads, f"{path}.key_heads")
        elif not isinstance(attention, Gqa):
            yield _whole(code, TENSOR, spec, "a module is not split over ranks yet", path)
        elif attention.kv_heads % tensor or attention.heads % tensor:
            what = f"{attention.kv_heads:,} heads of keys and values, and {attention.heads:,} of queries"
            heads = gcd(attention.heads, attention.kv_heads)
            yield _uneven(code, TENSOR, spec, what, heads, f"{path}.kv_heads")
    for index, span in enumerate(spec.model.layers):
        path, ffn = f"model.layers.{index}.ffn", span.ffn
        if isinstance(ffn, Moe):
            yield from _experts(spec, code, ffn, path)
        elif not isinstance(ffn, Dense):
            yield _whole(code, TENSOR, spec, "a module is not split over ranks yet", path)
        elif ffn.inner % tensor:
            yield _uneven(code, TENSOR, spec, f"inner = {ffn.inner:,}", ffn.inner, f"{path}.inner")


def _experts(spec: Spec, code: str, moe: Moe, path: str) -> Iterator[Finding]:
    """To experts, and to their router, tensor ranks are data ranks with fewer rows."""
    tensor, size = spec.parallel.tensor, spec.train.micro_batch
    if moe.balance.sequence_loss and size % tensor and tensor % size:
        message = f"tensor = {tensor} ranks have neither whole sequences nor parts of one, of micro_batch = {size}"
        hint = f"write `tensor = {nearest_divisor(size, tensor)}`, or `sequence_loss = 0`"
        note = ("whose balance has a loss of whole sequences", f"{path}.balance.sequence_loss")
        yield Finding(code, message, "parallel.tensor", hint, (note,))


def rows_are_split(spec: Spec) -> Iterator[Finding]:
    """Between attention and dense parts, each tensor rank has as many rows of a micro-batch as any other."""
    tensor, context, train = spec.parallel.tensor, spec.parallel.context, spec.train
    rows, rest = divmod(train.micro_batch * train.sequence, context)
    if rows % tensor and not rest:
        of_context = f" / context {context:,}" if context > 1 else ""
        what = f"micro_batch · sequence{of_context} = {rows:,} tokens"
        yield _uneven("E0819", TENSOR, spec, what, rows, "train.sequence")


def experts_are_split(spec: Spec) -> Iterator[Finding]:
    """Each rank of an expert has as much of its width as any other."""
    p = spec.parallel
    if p.expert_tensor == 1:
        return
    for index, span in enumerate(spec.model.layers):
        ffn, path = span.ffn, f"model.layers.{index}.ffn"
        if isinstance(ffn, Moe) and ffn.inner % p.expert_tensor:
            yield _uneven("E0819", EXPERT, spec, f"inner = {ffn.inner:,}", gcd(ffn.inner, p.columns), f"{path}.inner")
            return


def products_are_split(spec: Spec) -> Iterator[Finding]:
    """Products read rows that are quantised behind `gather`, in blocks of FP8. Other formats are not split yet, nor
    what is rotated or rounded at random (parts of a weight would have the same numbers), nor products of experts."""
    precision = spec.precision
    blocks = format_of(precision) is FP8 and not precision.hadamard and precision.gradient_rounding == "nearest"
    why = f"products in {precision.linear} are not split over ranks yet"
    if precision.linear == precision.compute:
        return
    if not blocks:
        yield from _refused("E0819", spec, f"{why}, but for blocks of FP8", "precision")
    elif getattr(spec.parallel, EXPERT) > 1:
        yield _whole("E0819", EXPERT, spec, why, "precision")


def matrices_are_updated_whole(spec: Spec) -> Iterator[Finding]:
    """An optimizer of matrices needs all of one; tensor ranks hold slices."""
    optimizer = spec.train.optimizer
    if optimizer.unit == "matrix":
        why = f"{optimizer.kind} updates whole matrices, and {{}} ranks hold slices of them"
        yield from _refused("E0819", spec, why, "train.optimizer")


def _refused(code: str, spec: Spec, why: str, of: str) -> Iterator[Finding]:
    """A finding where something is split that cannot be yet; `{}` in the reason is the key that splits it."""
    for key in (TENSOR, EXPERT):
        if getattr(spec.parallel, key) > 1:
            yield _whole(code, key, spec, why.format(key), of)
            return


def _whole(code: str, key: str, spec: Spec, why: str, of: str) -> Finding:
    message = f"{key} = {getattr(spec.parallel, key)}: {why}"
    return Finding(code, message, f"parallel.{key}", f"write `{key} = 1`", (("which is given here", of),))


def _uneven(code: str, key: str, spec: Spec, what: str, whole: int, of: str) -> Finding:
    ranks = getattr(spec.parallel, key)
    message = f"{key} = {ranks} ranks cannot have equal parts of {what}"
    hint = f"write `{key} = {nearest_divisor(whole, ranks)}`"
    return Finding(code, message, f"parallel.{key}", hint, (("this is split", of),))
