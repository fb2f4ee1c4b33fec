"""Numbers and words of the files of a build, with their bounds."""

from __future__ import annotations

from typing import Annotated

from runtime.system.strict_json import MAX_INT, Pattern, Range

MAX_LAYERS = 10_000
MAX_STEPS = 10**12
MAX_VOCAB = 1 << 31

Count = Annotated[int, Range(1, MAX_INT)]
Amount = Annotated[int, Range(0, MAX_INT)]
Layer = Annotated[int, Range(0, MAX_LAYERS)]
Vocab = Annotated[int, Range(1, MAX_VOCAB)]
Step = Annotated[int, Range(0, MAX_STEPS)]
Share = Annotated[float, Range(0, 1)]
Name = Annotated[str, Pattern(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")]
Kind = Annotated[str, Pattern(r"[a-z][a-z0-9_]{0,30}")]
Dtype = Annotated[str, Pattern(r"[a-z][a-z0-9_]{0,30}")]
Shape = tuple[Count, ...]
Batches = tuple[tuple[Step, Step], ...]  # (first step, sequences of a step), ascending
Placement = Annotated[str, Pattern(r"[a-z_]+\([0-9, ]*\)|[a-z_]+")]  # of stages on pipeline ranks
