"""The facts of every named schedule: what rules, plans, hints and `dsc explain` say of it before it is made.

A schedule is a row here, and a function in a file of `compiler/schedule`, which adds to each row what makes it. No
other file of `dsl`, `compiler` or `runtime` knows a schedule by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

# No row: it is searched for (compiler/schedule/solver), and its stages are placed as `dsl.closed_forms.stages` says.
AUTO = "auto"
DEFAULT = "dualpipe"  # of a run that names none and has several pipeline ranks
PLAIN = "1f1b"  # asks nothing of the sizes: the default on one rank, and what hints offer
PLAIN_CHUNKED = "interleaved"  # the same of several stages a rank
DEFAULT_CHUNKS = 2  # stages a rank, of a schedule that lets one choose

StageForm = Literal["loop(1)", "loop(chunks)", "v", "bidirectional"]  # compiler/ir/stage_placement.py says each


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """What is known of a schedule of any size."""

    summary: str  # what it does, and its source
    placement: StageForm = "loop(1)"
    even: bool = False  # whether ranks and micro-batches must be even numbers
    fewest: int = (
        0  # micro-batches that it needs for each rank; with fewer, in a ramp, a stand-in runs on its placement
    )
    overlaps: bool = False  # whether it pairs a forward with a backward, so that one hides the other's communication
    holds_all: bool = False  # whether ranks hold every micro-batch at once: it never saves memory
    roomier: str = PLAIN  # the schedule to offer where there are fewer micro-batches than it needs
    elsewhere: tuple[str, ...] = ()  # its names in other systems

    @property
    def is_chunked(self) -> bool:
        """Whether a run chooses how many stages a rank has."""
        return self.placement == "loop(chunks)"

    @property
    def is_folded(self) -> bool:
        """Whether a rank keeps stages r and 2P−1−r."""
        return self.placement == "v"

    @property
    def is_mirrored(self) -> bool:
        """Whether there are two copies of every stage, on ranks r and P−1−r."""
        return self.placement == "bidirectional"

    @property
    def multiple(self) -> int:
        """The number that divides ranks and micro-batches."""
        return 2 if self.even else 1

    def stages_per_rank(self, chunks: int | None = None) -> int:
        """Stages into which a pipeline rank's share of the layers is cut."""
        return (chunks or DEFAULT_CHUNKS) if self.is_chunked else 2 if self.is_folded else 1


FACTS: dict[str, ScheduleFacts] = {
    "dualpipe": ScheduleFacts(
        "micro-batches from both ends, forwards paired with backwards (arXiv 2412.19437, §3.2.1)",
        "bidirectional",
        even=True,
        fewest=2,
        overlaps=True,
    ),
    "1f1b": ScheduleFacts(
        "one forward, one backward, in turns (arXiv 2104.04473)",
        elsewhere=("one_f_one_b",),
    ),
    "dualpipev": ScheduleFacts(
        "DualPipe folded: two stages a rank in the form of a V, one copy of the weights",
        "v",
        fewest=2,
        overlaps=True,
        roomier="zbv",
    ),
    "zb1p": ScheduleFacts(
        "1f1b with the gradients of the weights deferred into the bubble (arXiv 2401.10241)",
        elsewhere=("zb_h1",),
    ),
    "zbh2": ScheduleFacts(
        "zb1p with no bubble behind its fill, for almost twice the activations (arXiv 2401.10241)",
        elsewhere=("zb_h2",),
    ),
    "vhalf": ScheduleFacts(
        "two stages a rank, in the form of a V, with half the activations of 1f1b (arXiv 2405.15362)",
        "v",
        elsewhere=("v_half",),
    ),
    "vmin": ScheduleFacts(
        "two stages a rank, in the form of a V, with a third of the activations of 1f1b (arXiv 2405.15362)",
        "v",
        elsewhere=("v_min",),
    ),
    "zbv": ScheduleFacts(
        "two stages a rank, in the form of a V, without a bubble (arXiv 2401.10241)",
        "v",
        elsewhere=("zb_v", "zbvzerobubble"),
    ),
    "interleaved": ScheduleFacts(
        "1f1b with several smaller stages a rank (arXiv 2104.04473)",
        "loop(chunks)",
        elsewhere=("interleaved1f1b",),
    ),
    "interleaved_pairs": ScheduleFacts(
        "interleaved with one forward more at first, then forwards paired with backwards (Megatron)",
        "loop(chunks)",
        overlaps=True,
    ),
    "interleaved_zb": ScheduleFacts(
        "interleaved with the gradients of the weights deferred into the bubble (torch)",
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
    "searched for: the shortest one found for the costs at hand, under `cap`; two copies of the stages if `pipeline` "
    "is even, else two stages a rank in the form of a V if there are layers for it, unless `placement` or `copies` are "
    "given",
    overlaps=True,
)
NAMES = (*FACTS, AUTO)
SUMMARIES = {name: facts.summary for name, facts in (FACTS | {AUTO: SEARCHED}).items()}
# A batch grows by a multiple of this for each data rank under every schedule, so that another one changes no step.
GROWTH = lcm(*(facts.multiple for facts in FACTS.values()))


def facts_of(name: object) -> ScheduleFacts:
    """The facts of a schedule's name; what is least for one that is searched for, or read from a file."""
    return FACTS.get(str(name), SEARCHED)


def default_of(num_ranks: object) -> str:
    """The name of the schedule of a run that names none."""
    return PLAIN if num_ranks == 1 else DEFAULT


def in_words(names: Sequence[str]) -> str:
    """Names as words of a sentence: `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else "".join(names)


CHUNKED = tuple(name for name, facts in FACTS.items() if facts.is_chunked)
EVEN = tuple(name for name, facts in FACTS.items() if facts.even)
NEEDED = {  # micro-batches for each rank → the schedules that need so many
    count: tuple(name for name, facts in FACTS.items() if facts.fewest == count)
    for count in sorted({facts.fewest for facts in FACTS.values()} - {0})
}
