"""Rules on sequences without gaps: layer ranges, learning rate, batch, and phases of a run."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from dsl.closed_forms import ramp
from dsl.rules.finding import Finding
from dsl.schema import Spec


def layer_ranges(spec: Spec) -> Iterator[Finding]:
    """Ranges follow each other from layer 0 on. Layers are never dropped or added silently.

    A range with `by` takes its layers out of the range around it; two such ranges share no layer.
    """
    expected, furthest = 0, -1
    owners = yield from _owners_of_strides(spec)
    for index, span in enumerate(spec.model.layers):
        if span.by > 1:
            continue
        path = f"model.layers.{index}"
        if owners and set(span.layers) <= owners.keys():
            note = ("this range has its layers", f"model.layers.{owners[span.first]}")
            yield Finding("E0702", "no layer is left for this range", path, "remove this range", (note,))
        while expected in owners and expected < span.first:
            expected += 1
        notes = (("the previous range ends here", f"model.layers.{furthest}"),) if index else ()
        if span.first > expected:
            missing = f"{expected}..{span.first - 1}" if span.first - 1 > expected else str(expected)
            word = "layers" if span.first - 1 > expected else "layer"
            message = f"no range holds {word} {missing}"
            yield Finding("E0701", message, path, f"write `layers {expected}..{span.last}`", notes)
        elif span.first < expected:
            hint = f"write `layers {expected}..{span.last}`" if span.last >= expected else "remove this range"
            yield Finding("E0702", f"layer {span.first} is in two ranges", path, hint, notes)
        if span.last >= expected:
            expected, furthest = span.last + 1, index
    end = spec.model.num_layers
    lacking = [layer for layer in range(expected, end) if layer not in owners]
    if lacking:
        holder = next(index for index, span in enumerate(spec.model.layers) if span.last == end - 1)
        more_layers = f" and {len(lacking) - 1} more up to layer {lacking[-1]}" if len(lacking) > 1 else ""
        hint = f"add `layers {lacking[0]}..{lacking[-1]} {{ … }}`"
        yield Finding("E0701", f"no range holds layer {lacking[0]}{more_layers}", f"model.layers.{holder}", hint)


def _owners_of_strides(spec: Spec) -> Generator[Finding, None, dict[int, int]]:
    """Yield a finding for each layer in two ranges with `by`; return (layer → range) for the layers of such ranges."""
    owners: dict[int, int] = {}
    for index, span in enumerate(spec.model.layers):
        repeated = [layer for layer in span.layers if layer in owners] if span.by > 1 else []
        if repeated:
            note = ("this range has it too", f"model.layers.{owners[repeated[0]]}")
            message = f"layer {repeated[0]} is in two ranges with `by`"
            yield Finding("E0702", message, f"model.layers.{index}", "remove this range", (note,))
        elif span.by > 1:
            owners |= dict.fromkeys(span.layers, index)
    return owners


def rate_covers(spec: Spec) -> Iterator[Finding]:
    """The learning rate is defined for every token of the run, and every phase begins before its end."""
    train = spec.train
    end, until = train.rate[-1].end_tokens, train.first_token + train.tokens
    if end < until:
        message = f"the rate ends at token {end:,}, but the run at token {until:,}"
        last = f"train.rate.{len(train.rate) - 1}"
        hint = f"add a phase over {until - end:,} tokens, or leave out the end of the last one"
        yield Finding("E0705", message, last, hint, (("the run's length", "train.tokens"),))
    if train.within is not None and not train.within.is_last:
        return  # a later phase of the run may reach them
    for index, phase in enumerate(train.rate[:-1]):
        if phase.end_tokens >= until:
            message = f"this phase begins at token {phase.end_tokens:,}, but the run ends at token {until:,}"
            hint = "remove the phase, or train longer; `dsc train --steps N` ends early and keeps the rate"
            yield Finding("E0705", message, f"train.rate.{index + 1}", hint, (("the run's length", "train.tokens"),))


def batch_grows(spec: Spec) -> Iterator[Finding]:
    """A batch ramp goes up, in a bounded number of sizes."""
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


def phases_meet(spec: Spec) -> Iterator[Finding]:
    """The sequence of a phase divides the longest of the run, and a phase ends at a multiple of the longest."""
    train, place_in_run = spec.train, spec.train.within
    if place_in_run is None:
        return
    longest, sequence = place_in_run.longest, train.sequence
    if longest % sequence:
        message = f"the sequence of {sequence:,} tokens does not divide {longest:,}, the longest sequence of the run"
        nearest_sequence = max(divisor for divisor in range(1, sequence) if longest % divisor == 0)
        yield Finding("E0707", message, "train.sequence", f"write `sequence = {nearest_sequence}`")
        return
    # a blend begins at whole pieces
    if place_in_run.is_last or train.batch.end < train.batch.start or spec.data.sources:
        return
    growth = ramp.ramp_of_spec(spec)
    steps = growth.steps_for(train.tokens)
    ends = (
        (step, place_in_run.first_token + growth.tokens_at(step))
        for step in range(steps, steps + longest // sequence + 1)
    )
    end = place_in_run.first_token + growth.tokens_at(steps)
    if end % longest:
        message = (
            f"this phase ends after token {end:,}, inside a piece of {longest:,} tokens (the longest sequence of the "
            "run): no later phase could read the rest of the piece"
        )
        aligned = next((step for step, token in ends if token % longest == 0), None)
        hint = f"write `steps = {aligned}`" if aligned else f"train the phase on a multiple of {longest:,} tokens"
        yield Finding("E0707", message, "train.tokens", hint)


def phases_read_text(spec: Spec) -> Iterator[Finding]:
    """Conversations are cut or packed by the sequence, so all phases must have the same sequence."""
    place_in_run, chat = spec.train.within, spec.data.chat
    if place_in_run is not None and chat is not None and spec.train.sequence != place_in_run.longest:
        message = (
            f"conversations are put into sequences of {spec.train.sequence:,} tokens here, but of "
            f"{place_in_run.longest:,} in another phase"
        )
        note = (("phases with different sequences are for text only", "data.chat"),)
        yield Finding("E0707", message, "train.sequence", f"write `sequence = {place_in_run.longest}`", note)
