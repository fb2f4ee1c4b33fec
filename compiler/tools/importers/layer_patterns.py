"""Attention that differs by layer, as a model's attention and ranges of layers with one of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from dsl.schema import Compressed, DeltaNet, Gqa, LayerRange, Mla

Attention = Mla | Gqa | Compressed | DeltaNet


def with_attention(
    spans: Sequence[LayerRange], by_layer: Sequence[Attention]
) -> tuple[Attention, tuple[LayerRange, ...]]:
    """The attention of most layers, and the ranges with that of the others, in the order of a spec.

    `spans` are without attention and without holes; `by_layer` has one for each layer.
    """
    count = Counter(map(repr, by_layer))
    most = max(by_layer, key=lambda each: count[repr(each)])
    found = [each for span in spans for each in _divided(span, by_layer, most)]
    return most, tuple(sorted(found, key=lambda span: (span.first, span.last, span.by)))


def _divided(span: LayerRange, by_layer: Sequence[Attention], most: Attention) -> Iterator[LayerRange]:
    """A range whose layers have several kinds of attention: itself and every N-th layer of it, or one range a run."""
    others = [layer for layer in span.layers if by_layer[layer] != most]
    step = others[1] - others[0] if len(others) > 1 else 0
    alike = all(by_layer[layer] == by_layer[others[0]] for layer in others)
    if not others:
        yield span
    elif step > 1 and alike and others == [*range(others[0], others[-1] + 1, step)]:
        yield span
        changes = {"first": others[0], "last": others[-1], "by": step, "attention": by_layer[others[0]]}
        yield span.model_copy(update=changes)
    else:
        for _, group in groupby(span.layers, key=lambda layer: repr(by_layer[layer])):
            run = [*group]
            attention = None if by_layer[run[0]] == most else by_layer[run[0]]
            yield span.model_copy(update={"first": run[0], "last": run[-1], "attention": attention})
