"""Layer ranges, learning rate and batch: what follows each other without holes."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from dsl import ramp
from dsl.rules.finding import Finding
from dsl.schema import Spec


def layer_ranges(spec: Spec) -> Iterator[Finding]:
    """Ranges follow each other from layer 0 on. Layers are never dropped or added silently.

    A range `by` has its layers in the place of the range around it; two of these share no layer.
    """
    expected, furthest = 0, -1
    taken = yield from _patterns(spec)
    for index, span in enumerate(spec.model.layers):
        if span.by > 1:
            continue
        at = f"model.layers.{index}"
        if taken and set(span.layers) <= taken.keys():
            note = ("this one has its layers", f"model.layers.{taken[span.first]}")
            yield Finding("E0702", "no layer is left for this range", at, "remove this range", (note,))
        while expected in taken and expected < span.first:
            expected += 1
        before = (("the range before ends here", f"model.layers.{furthest}"),) if index else ()
        if span.first > expected:
            missing = f"{expected}..{span.first - 1}" if span.first - 1 > expected else str(expected)
            word = "layers" if span.first - 1 > expected else "layer"
            message = f"no range holds {word} {missing}"
            yield Finding("E0701", message, at, f"write `layers {expected}..{span.last}`", before)
        elif span.first < expected:
            hint = f"write `layers {expected}..{span.last}`" if span.last >= expected else "remove this range"
            yield Finding("E0702", f"layer {span.first} is in two ranges", at, hint, before)
        if span.last >= expected:
            expected, furthest = span.last + 1, index
    end = spec.model.num_layers
    lacking = [layer for layer in range(expected, end) if layer not in taken]
    if lacking:
        holder = next(index for index, span in enumerate(spec.model.layers) if span.last == end - 1)
        more = f" and {len(lacking) - 1} more up to layer {lacking[-1]}" if len(lacking) > 1 else ""
        hint = f"add `layers {lacking[0]}..{lacking[-1]} {{ … }}`"
        yield Finding("E0701", f"no range holds layer {lacking[0]}{more}", f"model.layers.{holder}", hint)


def _patterns(spec: Spec) -> Generator[Finding, None, dict[int, int]]:
    """Complain of layers that two ranges `by` name; return the range of each layer that one of them names."""
    taken: dict[int, int] = {}
    for index, span in enumerate(spec.model.layers):
        twice = [layer for layer in span.layers if layer in taken] if span.by > 1 else []
        if twice:
            note = ("it is named here too", f"model.layers.{taken[twice[0]]}")
            message = f"layer {twice[0]} is in two ranges `by`"
            yield Finding("E0702", message, f"model.layers.{index}", "remove this range", (note,))
        elif span.by > 1:
            taken |= dict.fromkeys(span.layers, index)
    return taken


def rate_covers(spec: Spec) -> Iterator[Finding]:
    """The learning rate is known for every token of the run, and no phase lies beyond it."""
    train = spec.train
    end = train.rate[-1].end_tokens
    if end < train.tokens:
        message = f"the rate ends at token {end:,}, the run at token {train.tokens:,}"
        last = f"train.rate.{len(train.rate) - 1}"
        hint = f"add a phase over {train.tokens - end:,} tokens, or leave out the end of the last one"
        yield Finding("E0705", message, last, hint, (("the run's length", "train.tokens"),))
    for index, phase in enumerate(train.rate[:-1]):
        if phase.end_tokens >= train.tokens:
            message = f"this phase begins at token {phase.end_tokens:,}, the run ends at token {train.tokens:,}"
            hint = "remove the phase, or train longer; `dsc train --steps N` ends early and keeps the rate"
            yield Finding("E0705", message, f"train.rate.{index + 1}", hint, (("the run's length", "train.tokens"),))


def batch_grows(spec: Spec) -> Iterator[Finding]:
    """A ramp goes up, in a bounded number of sizes."""
    batch = spec.train.batch
    if batch.end < batch.start:
        message = f"the batch shrinks from {batch.start:,} to {batch.end:,}"
        yield Finding("E0706", message, "train.batch", f"write `from = {batch.end}, to = {batch.start}`")
        return
    quantum = ramp.quantum_of(spec.parallel, spec.train.micro_batch)
    if ramp.num_sizes(batch, quantum) > ramp.MAX_SIZES:
        growth = f"from {batch.start:,} to {batch.end:,} by {quantum:,}"
        message = f"the batch grows {growth}, in more than {ramp.MAX_SIZES:,} sizes"
        yield Finding("E0706", message, "train.batch", "grow it by less")
