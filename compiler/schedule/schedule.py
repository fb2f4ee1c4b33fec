"""A schedule as data: a tuple of steps per pipeline rank, with a text form, a JSON form and a legality check."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import MAX_RANKS
from dsl.messages.diagnostics import plural
from runtime.contract.actions import COPIES, Action, Step, actions_of, parse_step

_HEADER = re.compile(
    r"# (?P<name>\S+) ranks=(?P<ranks>\d+) micro_batches=(?P<micro>\d+) placement=(?P<place>\S+)", re.ASCII
)
_MOST_DIGITS = 6  # of ranks and micro-batches
_KINDS = ("F", "FB", "FI", "FIW", "FO", "FOR", "FORB", "FORI", "FORIW")  # legal orders for a stage and micro-batch
_COMPLETE = ("FB", "FIW", "FORB", "FORIW")  # the complete ones
_NAME = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_JSON_KEYS = {"schedule": str, "ranks": int, "micro_batches": int, "placement": str, "actions": list}


class ScheduleError(ValueError):
    """A malformed text of a schedule, or an illegal schedule. The message names the rank and the action."""


@dataclass(frozen=True)
class Schedule:
    """The steps of each pipeline rank, in order. `stage_placement` decides which rank runs a stage."""

    name: str
    num_ranks: int
    num_micro_batches: int
    stage_placement: StagePlacement
    actions: tuple[Sequence[Step], ...]

    @property
    def num_stages(self) -> int:
        """The stages of the whole pipeline. Raises ValueError if the ranks do not fit the placement."""
        return self.stage_placement.num_stages(self.num_ranks)

    @property
    def turn(self) -> int:
        """The first micro-batch of direction 1; larger than all micro-batches if there is none."""
        return self.stage_placement.turn(self.num_micro_batches)

    def direction(self, micro_batch: int) -> int:
        """The end at which a micro-batch enters the pipeline, 0 or 1."""
        return self.stage_placement.direction(self.num_micro_batches, micro_batch)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The pipeline rank that runs `stage` on `micro_batch`."""
        return self.stage_placement.rank_of(self.num_ranks, self.num_micro_batches, stage, micro_batch)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank runs, ascending."""
        return self.stage_placement.stages_of(self.num_ranks, rank)

    def deferring_at_most(self, max_deferred: int | None) -> Schedule:
        """The schedule in which at most `max_deferred` weight gradients wait while a rank runs something else.

        After an I that makes one wait too many, the W that has waited longest runs at once. None: as it is.
        """
        if max_deferred is None:
            return self
        return replace(self, actions=tuple(_deferring(steps, max_deferred) for steps in self.actions))

    def to_text(self) -> str:
        """A header line, then one line of steps per rank; `from_text` is its exact inverse."""
        sizes = f"ranks={self.num_ranks} micro_batches={self.num_micro_batches} placement={self.stage_placement}"
        lines = [f"# {self.name} {sizes}", *(" ".join(map(str, steps)) for steps in self.actions)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Inverse of `to_text`. Raises ScheduleError with the line that cannot be read. `check` tests legality."""
        header, *lines = text.removesuffix("\n").split("\n")
        match = _HEADER.fullmatch(header)
        if match is None:
            raise ScheduleError(
                f"line 1: {header[:80]!r} is not a header: write"
                " # <name> ranks=<P> micro_batches=<N> placement=<placement>"
            )
        for key, group, limit in (("ranks", "ranks", MAX_RANKS), ("micro_batches", "micro", 10**_MOST_DIGITS - 1)):
            if len(match[group]) > _MOST_DIGITS:
                raise ScheduleError(f"line 1: {key}={match[group][:20]} is too large: at most {limit}")
        num_ranks = int(match["ranks"])
        if len(lines) != num_ranks:
            raise ScheduleError(f"the header says ranks={num_ranks}, but {len(lines)} lines of actions follow it")
        actions = tuple(_parse_steps(line.split(), f"line {number}") for number, line in enumerate(lines, 2))
        return cls(match["name"], num_ranks, int(match["micro"]), _parse_placement(match["place"]), actions)

    def to_json(self) -> str:
        """One JSON object on one line; `from_json` is its exact inverse."""
        actions = [[str(step) for step in steps] for steps in self.actions]
        values = (self.name, self.num_ranks, self.num_micro_batches, str(self.stage_placement), actions)
        return json.dumps(dict(zip(_JSON_KEYS, values, strict=True)))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Inverse of `to_json`. Raises ScheduleError with the key or the rank's action that cannot be read."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ScheduleError(f"not JSON: {error}") from None
        except (ValueError, RecursionError):  # a number of thousands of digits
            raise ScheduleError("not JSON of a schedule") from None
        _check_json(value)
        actions = tuple(_parse_steps(row, f"rank {rank}") for rank, row in enumerate(value["actions"]))
        if len(actions) != value["ranks"]:
            raise ScheduleError(f'"ranks" is {value["ranks"]}, but "actions" has {len(actions)} rows')
        placement = _parse_placement(value["placement"])
        return cls(value["schedule"], value["ranks"], value["micro_batches"], placement, actions)

    def check(self) -> None:
        """Raise ScheduleError unless every rank runs the right actions, once and in order.

        Each (stage, micro-batch) runs F, and then B, or I and later W, on the placement's rank. A schedule without any
        backward (evaluation) runs only F. The two actions of a pair are independent. The values that an F saved may go
        to the host by an O and return by an R before the B or I. This does not find ranks that wait for each other in a
        circle: `simulate` does.
        """
        if not _NAME.fullmatch(self.name):
            printable = self.name[:40].encode("ascii", "backslashreplace").decode()
            raise ScheduleError(f"a schedule's name is up to 64 letters, digits and `._+-`, not {printable!r}")
        if self.num_micro_batches < 1 or len(self.actions) != self.num_ranks:
            raise ScheduleError(
                f"{self.num_ranks} ranks and {self.num_micro_batches} micro-batches do not fit the actions"
            )
        try:
            stages = self.num_stages
        except ValueError as error:
            raise ScheduleError(str(error)) from None
        done: dict[tuple[int, int], str] = {}  # (stage, micro-batch) -> kinds that ran so far
        owned: dict[tuple[int, bool], int] = {}  # (stage, whether in direction 1) -> the rank that runs it
        first_back = self.turn
        for rank, steps in enumerate(self.actions):
            for step in steps:
                actions = actions_of(step)
                if len(actions) == 2 and any(action.kind in COPIES for action in actions):
                    raise ScheduleError(f"rank {rank}, {step}: O and R run beside compute, so write each by itself")
                if len(actions) == 2 and (depends(*actions) or depends(*reversed(actions))):
                    fault = "its two actions are not independent, so they cannot overlap"
                    raise ScheduleError(f"rank {rank}, {step}: {fault}")
                for action in actions:
                    stage, micro_batch = key = action.stage, action.micro_batch
                    stage_and_direction = stage, micro_batch >= first_back
                    if micro_batch >= self.num_micro_batches or owned.get(stage_and_direction) != rank:
                        self._check_place(rank, action, stages)
                        owned[stage_and_direction] = rank
                    before = done.get(key, "")
                    done[key] = kinds = before + action.kind
                    if kinds not in _KINDS:
                        raise ScheduleError(f"rank {rank}, {action}: {_order_fault(action, before)}")
        self._check_complete(stages, done)

    def _check_place(self, rank: int, action: Action, stages: int) -> None:
        """Raise ScheduleError unless the placement runs an action of these sizes on this rank."""
        stage, micro_batch = action.stage, action.micro_batch
        if stage >= stages or micro_batch >= self.num_micro_batches:
            sizes = f"{plural(stages, 'stage')} and {plural(self.num_micro_batches, 'micro-batch')}"
            raise ScheduleError(f"rank {rank}, {action}: its schedule has {sizes}")
        owner = self.rank_of(stage, micro_batch)
        if owner != rank:
            raise ScheduleError(f"rank {rank}, {action}: placement {self.stage_placement} runs it on rank {owner}")

    def _check_complete(self, stages: int, done: dict[tuple[int, int], str]) -> None:
        run = {*done.values()}
        final = ("F",) if run <= {"F"} else _COMPLETE
        if run <= {*final} and len(done) == stages * self.num_micro_batches:
            return
        for stage in range(stages):
            for micro_batch in range(self.num_micro_batches):
                kinds = done.get((stage, micro_batch), "")
                if kinds not in final:
                    rank = self.rank_of(stage, micro_batch)
                    missing = {"": "F", "FO": "R", "FI": "W", "FORI": "W"}.get(kinds, "B")
                    raise ScheduleError(f"rank {rank}, {missing}{stage}.{micro_batch}: missing")


def depends(later: Action, earlier: Action) -> bool:
    """Whether `later` needs `earlier` to be finished, directly or through other stages; an action needs itself.

    A micro-batch goes forward through the stages, then backward, and each W follows the I or B of its stage.
    """
    if later.micro_batch != earlier.micro_batch:
        return False
    if later.kind == "W" or earlier.kind == "W":
        ends_in_w = later.kind == "W" and earlier.kind != "W"
        return later == earlier or (ends_in_w and (earlier.kind == "F" or earlier.stage >= later.stage))
    if (later.kind == "F") != (earlier.kind == "F"):
        return earlier.kind == "F"
    return earlier.stage <= later.stage if later.kind == "F" else earlier.stage >= later.stage


def _order_fault(action: Action, before: str) -> str:
    if action.kind in before or (action.kind in "BI" and ("B" in before or "I" in before)):
        return f"runs after {', '.join(before)} of the same stage and micro-batch, so twice"
    if action.kind in "BI" and before == "FO":
        return f"the values that its F saved are on the host: put R{action.stage}.{action.micro_batch} before it"
    needs = {"B": "F", "I": "F", "W": "I", "O": "F", "R": "O"}.get(action.kind)
    return f"comes before its {needs}" if needs and needs not in before else f"cannot follow {', '.join(before)}"


def _parse_placement(text: str) -> StagePlacement:
    try:
        return StagePlacement.parse(text)
    except ValueError as error:
        raise ScheduleError(str(error)) from None


def max_deferred_gradients(schedule: Schedule) -> int:
    """The most weight gradients that wait on a rank while it runs something else."""
    return max((_max_due_gradients(steps) for steps in schedule.actions), default=0)


def _max_due_gradients(steps: Sequence[Step]) -> int:
    due = peak = 0
    for step in steps:
        kinds = [action.kind for action in actions_of(step)]
        if kinds != ["W"]:
            peak = max(peak, due)
        due += kinds.count("I") - kinds.count("W")
    return peak


def _deferring(steps: Sequence[Step], max_deferred: int) -> tuple[Step, ...]:
    result: list[Step] = []
    due: dict[Action, None] = {}  # the W of each I, in the order of these
    early: set[Action] = set()
    for step in steps:
        actions = [action for action in actions_of(step) if action not in early]
        if not actions:
            continue
        result.append(step if len(actions) == len(actions_of(step)) else actions[0])
        for action in actions:
            if action.kind == "I":
                due[Action("W", action.stage, action.micro_batch)] = None
            due.pop(action, None)
        while len(due) > max_deferred:
            late = next(iter(due))
            del due[late]
            early.add(late)
            result.append(late)
    return tuple(result)


def _parse_steps(texts: list[Any], place: str) -> tuple[Step, ...]:
    try:
        return tuple(parse_step(text) for text in texts)
    except ValueError as error:
        raise ScheduleError(f"{place}: {error}") from None


def _check_json(value: Any) -> None:
    if not isinstance(value, dict) or set(value) != set(_JSON_KEYS):
        raise ScheduleError(f"expected one object with the keys {', '.join(_JSON_KEYS)}")
    for key, kind in _JSON_KEYS.items():
        if type(value[key]) is not kind:
            raise ScheduleError(f'"{key}" must be of type {kind.__name__}, got {type(value[key]).__name__}')
    for key, limit in (("ranks", MAX_RANKS), ("micro_batches", 10**_MOST_DIGITS - 1)):
        if abs(value[key]) >= 10**_MOST_DIGITS:
            raise ScheduleError(f'"{key}" is out of bounds: at most {limit}')
    for rank, row in enumerate(value["actions"]):
        if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
            raise ScheduleError(f"rank {rank}: expected a list of actions as strings")
