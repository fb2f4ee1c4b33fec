"""Facts of every named schedule, for rules, plans, hints and `dsc explain`.

A schedule is a row here and a function in a file of `compiler/schedule` that generates it. No other file of `dsl`,
`compiler` or `runtime` refers to a schedule by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

# Not a row: it is searched for (compiler/schedule/solver); `dsl.closed_forms.stages` decides the placement of stages.
AUTO = "auto"
DEFAULT = "dualpipe"  # the default with several pipeline ranks
PLAIN = "1f1b"  # runs with any sizes: the default on one rank, and the one that hints propose
PLAIN_CHUNKED = "interleaved"  # the same with several stages per rank
DEFAULT_CHUNKS = 2  # stages per rank, for schedules with a variable number

StageForm = Literal["loop(1)", "loop(chunks)", "v", "bidirectional"]  # described in compiler/ir/stage_placement.py


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """Facts of a schedule that hold for all sizes."""

    summary: str  # one line on the schedule, with its source
    placement: StageForm = "loop(1)"
    needs_even: bool = False  # whether it needs even numbers of ranks and micro-batches
    fewest_micro_batches: int = (
        0  # micro-batches that it needs per rank; with fewer, in a ramp, another schedule runs on its placement
    )
    overlaps: bool = False  # whether it pairs a forward with a backward, each hiding the other's communication
    holds_all: bool = False  # whether ranks hold the activations of all micro-batches at once
    roomier: str = PLAIN  # the schedule to propose if there are fewer micro-batches than it needs
    elsewhere: tuple[str, ...] = ()  # its names in other systems

    @property
    def is_chunked(self) -> bool:
        """Whether a run may choose the number of stages per rank."""
        return self.placement == "loop(chunks)"

    @property
    def is_folded(self) -> bool:
        """Whether a rank holds stages r and 2P−1−r."""
        return self.placement == "v"

    @property
    def is_mirrored(self) -> bool:
        """Whether there are two copies of every stage, on ranks r and P−1−r."""
        return self.placement == "bidirectional"

    @property
    def multiple(self) -> int:
        """The number that ranks and micro-batches must be a multiple of."""
        return 2 if self.needs_even else 1

    def stages_per_rank(self, chunks: int | None = None) -> int:
        """Stages of a pipeline rank, not counting second copies."""
        return (chunks or DEFAULT_CHUNKS) if self.is_chunked else 2 if self.is_folded else 1


FACTS: dict[str, ScheduleFacts] = {
    "dualpipe": ScheduleFacts(
        "micro-batches from both ends, forwards paired with backwards (arXiv 2412.19437, §3.2.1)",
        "bidirectional",
        needs_even=True,
        fewest_micro_batches=2,
        overlaps=True,
    ),
    "1f1b": ScheduleFacts(
        "one forward and one backward in turn (arXiv 2104.04473)",
        elsewhere=("one_f_one_b",),
    ),
    "dualpipev": ScheduleFacts(
        "DualPipe folded into a V: two stages per rank, one copy of the weights",
        "v",
        fewest_micro_batches=2,
        overlaps=True,
        roomier="zbv",
    ),
    "zb1p": ScheduleFacts(
        "1f1b with weight gradients deferred into the bubble (arXiv 2401.10241)",
        elsewhere=("zb_h1",),
    ),
    "zbh2": ScheduleFacts(
        "zb1p with no bubble after the fill phase, for almost twice the activations (arXiv 2401.10241)",
        elsewhere=("zb_h2",),
    ),
    "vhalf": ScheduleFacts(
        "two stages per rank in a V, with half the activations of 1f1b (arXiv 2405.15362)",
        "v",
        elsewhere=("v_half",),
    ),
    "vmin": ScheduleFacts(
        "two stages per rank in a V, with a third of the activations of 1f1b (arXiv 2405.15362)",
        "v",
        elsewhere=("v_min",),
    ),
    "zbv": ScheduleFacts(
        "two stages per rank in a V, without a bubble (arXiv 2401.10241)",
        "v",
        elsewhere=("zb_v", "zbvzerobubble"),
    ),
    "interleaved": ScheduleFacts(
        "1f1b with several smaller stages per rank (arXiv 2104.04473)",
        "loop(chunks)",
        elsewhere=("interleaved1f1b",),
    ),
    "interleaved_pairs": ScheduleFacts(
        "interleaved with one more forward at first, then forwards paired with backwards (Megatron)",
        "loop(chunks)",
        overlaps=True,
    ),
    "interleaved_zb": ScheduleFacts(
        "interleaved with weight gradients deferred into the bubble (torch)",
        "loop(chunks)",
        elsewhere=("interleavedzerobubble",),
    ),
    "gpipe": ScheduleFacts(
        "all forwards, then all backwards (arXiv 1811.06965)",
        holds_all=True,
        elsewhere=("afab",),
    ),
}
SEARCHED = ScheduleFacts(
    "the shortest schedule that a search finds for the predicted costs, within `cap`; two copies of the stages if "
    "`pipeline` is even, else two stages per rank in a V if there are enough layers, unless `placement` or `copies` is "
    "given",
    overlaps=True,
)
NAMES = (*FACTS, AUTO)
SUMMARIES = {name: facts.summary for name, facts in (FACTS | {AUTO: SEARCHED}).items()}
# A batch grows by a multiple of this per data rank for every schedule, so that steps do not depend on the schedule.
GROWTH = lcm(*(facts.multiple for facts in FACTS.values()))


def facts_of(name: object) -> ScheduleFacts:
    """The facts of a named schedule; for `auto` and for a schedule file, the facts of a search."""
    return FACTS.get(str(name), SEARCHED)


def default_of(num_ranks: object) -> str:
    """The name of the default schedule."""
    return PLAIN if num_ranks == 1 else DEFAULT


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else "".join(names)


CHUNKED = tuple(name for name, facts in FACTS.items() if facts.is_chunked)
EVEN = tuple(name for name, facts in FACTS.items() if facts.needs_even)
NEEDED = {  # micro-batches per rank → the schedules that need that many
    count: tuple(name for name, facts in FACTS.items() if facts.fewest_micro_batches == count)
    for count in sorted({facts.fewest_micro_batches for facts in FACTS.values()} - {0})
}
