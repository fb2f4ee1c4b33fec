"""Layer ranges, learning rate and batch: what follows each other without holes."""

from __future__ import annotations

from collections.abc import Iterator

from dsl import ramp
from dsl.rules.finding import Finding
from dsl.schema import Spec


def layer_ranges(spec: Spec) -> Iterator[Finding]:
    """Ranges follow each other from layer 0 on. Layers are never dropped or added silently."""
    expected, furthest = 0, -1
    for index, span in enumerate(spec.model.layers):
        at = f"model.layers.{index}"
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
