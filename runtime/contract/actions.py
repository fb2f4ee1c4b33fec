"""The alphabet of a pipeline schedule: actions and overlapped pairs, with an exact text form.

`F3.0` is the forward of stage 3 on micro-batch 0, `B3.0` its full backward, `I3.0` the backward for inputs only, `W3.0`
the weight gradient that I deferred; B = I then W. `(F3.7|B4.2)` is a pair whose two actions overlap. `O3.0` offloads
the activations of F3.0 to the host, and `R3.0` copies them back for B3.0 or I3.0. No torch here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

ActionKind = Literal["F", "B", "I", "W", "O", "R"]

KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")  # compute actions
COPIES: tuple[ActionKind, ...] = ("O", "R")  # copies between a device and its host, parallel to compute
_NUMBER = "(0|[1-9][0-9]{0,8})"
_ACTION = re.compile(rf"([{''.join(KINDS + COPIES)}]){_NUMBER}\.{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward work on one micro-batch, or a copy of its saved activations."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS + COPIES:
            raise ValueError(f"unknown action kind {self.kind!r}: expected one of {', '.join(KINDS + COPIES)}")
        if self.stage < 0 or self.micro_batch < 0:
            raise ValueError(f"stage and micro-batch count from 0, got {self.kind}{self.stage}.{self.micro_batch}")

    @property
    def body(self) -> str:
        """The action without its micro-batch: `F3`."""
        return f"{self.kind}{self.stage}"

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two independent actions of one rank that overlap. `first` is the one written first; it implies no order."""

    first: Action
    second: Action

    @property
    def body(self) -> str:
        """Both actions without micro-batches: `F3_B4`."""
        return f"{self.first.body}_{self.second.body}"

    def __str__(self) -> str:
        return f"({self.first}|{self.second})"


Step: TypeAlias = Action | Pair


def actions_of(step: Step) -> tuple[Action, ...]:
    """Return the one or two actions of a step, in the order written."""
    return (step,) if isinstance(step, Action) else (step.first, step.second)


def is_copy(step: Step) -> bool:
    """Whether a step is an O or an R, which takes no compute time of its rank."""
    return isinstance(step, Action) and step.kind in COPIES


def parse_step(text: str) -> Step:
    """Parse the exact result of `str`: `F3.0` or `(F3.7|B4.2)`, without blanks or leading zeros; else ValueError."""
    if not text.startswith("("):
        return _parse_action(text)
    parts = text[1:-1].split("|")
    if not text.endswith(")") or len(parts) != 2:
        raise ValueError(f"{text!r} is not a pair: write two actions as (F3.7|B4.2)")
    return Pair(_parse_action(parts[0]), _parse_action(parts[1]))


def _parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text[:40]!r} is not an action: write F, B, I, W, O or R, a stage, a dot, a micro-batch, as F3.0"
        )
    kind, stage, micro_batch = match.groups()
    return Action(cast(ActionKind, kind), int(stage), int(micro_batch))
