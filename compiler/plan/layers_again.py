"""A layer whose backward first runs its forward again: which steps of it are run again.

Only its input is kept. What gives a value that a backward of the layer reads is run again, rows that go to experts
among it. A segment whose results no other one reads again is not: its backward computes again inside itself what it
reads (compiler/model/segments/recompute.py). So neither the last product of a feed-forward part nor the way of its
rows back is made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from compiler import ir
from compiler.ir.dtypes import SCALES
from compiler.model.segments.interpret import cut
from compiler.plan.actions.chains import Names

Step = ir.Use | ir.Communication
CutOf = Callable[[ir.Segment], ir.Cut]


class Cutter:
    """What cuts segments, each distinct one that is not there yet once."""

    def __init__(self, by_key: dict[Hashable, ir.Cut]) -> None:
        self._by_key = by_key

    def __call__(self, segment: ir.Segment) -> ir.Cut:
        key = segment.key
        if key not in self._by_key:
            self._by_key[key] = cut(segment)
        return self._by_key[key]


class Again:
    """What is run again of the layers at one place: the same steps of each, as they differ in names alone."""

    def __init__(self, cut_of: CutOf) -> None:
        self._cut_of = cut_of
        self._first: tuple[Step, ...] = ()

    def steps(self, plain: Sequence[Step], inside: Sequence[Step]) -> tuple[Step, ...]:
        """Those of a layer (`run_again`)."""
        if not self._first:
            self._first = run_again(plain, inside, self._cut_of)
        of_kind = zip(self._first, plain, inside, strict=True)
        return tuple(replace(step if first.again else whole, again=first.again) for first, step, whole in of_kind)


def run_again(plain: Sequence[Step], inside: Sequence[Step], cut_of: CutOf) -> tuple[Step, ...]:
    """The steps of a layer that is run again, from those with segments whose backward computes nothing again, and from
    those with segments whose backward computes all of them again."""
    read: set[str] = set()  # by what runs behind a step
    result: list[Step] = []
    for step, whole in zip(reversed(plain), reversed(inside), strict=True):
        if isinstance(step, ir.Communication):
            again = not read.isdisjoint(_moved(step))
            read |= _bases(step.inputs) if again else set()
        else:
            assert isinstance(whole, ir.Use), "both are lists of the same steps"
            again = not (read | _read_back(whole, cut_of)).isdisjoint(step.outputs if result else ())
            kept = step if again else whole
            read |= _read_back(kept, cut_of) | (set(step.inputs) if again else set())
            step = kept
        result.append(replace(step, again=again))
    return tuple(reversed(result))


def _moved(step: ir.Communication) -> set[str]:
    """What an exchange gives by its rows; offsets come with the counts, which are kept."""
    outputs = step.outputs[:-1] if step.kind == "dispatch" else step.outputs
    return _bases(buffer.name for buffer in outputs)


def _read_back(use: ir.Use, cut_of: CutOf) -> set[str]:
    """The values of the layer that a segment's backward reads."""
    cut = cut_of(use.segment)
    names = Names.of(use, cut).values
    return _bases(names[arg] for arg in (*cut.I.args, *cut.W.args) if arg in names)


def _bases(names: Iterable[str]) -> set[str]:
    """Names of values; of eight bits, of their data."""
    return {name.removesuffix(SCALES) for name in names}
