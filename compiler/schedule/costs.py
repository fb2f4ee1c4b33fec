"""The costs of a schedule's actions, as exact rationals in a unit of the user's choice: a table in ms gives ms.

Costs are for one action of the given schedule: one stage, one micro-batch. There are three ways to write them: the text
`F=1,I=1,W=1,FB=1.8`, a JSON table (`costs_of_json`), and the tables that come with dsc (`shipped_costs`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from compiler.files.text import json_of, object_of
from compiler.schedule.memory import UNKNOWN, Bytes, bytes_of_json
from compiler.schedule.weights import (
    NO_PAIRS,
    ONE,
    StagePairs,
    StageWeight,
    Weight,
    as_weight,
    cut_anew,
    parse_stage_weights,
    parse_weights,
)
from runtime.contract.actions import COPIES, KINDS, Action, Step, actions_of

# --- Numbers in costs: exact, and bounded before they are converted, as 1e999999999 would take a gigabyte

_ANY = re.compile(r"(\d+)(?:\.(\d+))?(?:[eE]([+-]?)(\d+))?|\d+/0*[1-9]\d*", re.ASCII)
_NUMBER = re.compile(r"\d{1,20}(\.\d{1,20})?([eE][+-]?[0-3]?\d)?|\d{1,20}/0*[1-9]\d{0,19}", re.ASCII)
# Bounds of a time other than 0; in ns, 10**15 is about ten days.
MIN_TIME, MAX_TIME = Fraction(1, 10**20), Fraction(10**15)
TOO_LARGE, TOO_SMALL = "is too large: at most 1e15", "is too small: at least 1e-20, or 0"


def exact(text: str, name: str = "") -> Fraction:
    """Parse a number. Raises ValueError with the mistake, and with the `name` of the number if it is given."""
    if fault := _number_error(text):
        raise ValueError(f"{f'{name[:40]}: ' if name else ''}{text[:40]!r} {fault}")
    return Fraction(text)


def _number_error(text: str) -> str:
    """The mistake in a number, or ""."""
    match = _ANY.fullmatch(text)
    if match is None:
        return "is not a number of 0 or more, such as 1.8 or 9/5"
    if not _NUMBER.fullmatch(text):
        integer, decimals, sign, exponent = match.groups(default="")
        if not integer:
            return "has too many digits: at most 20 on each side"
        if len(decimals) > 20:
            return "has too many decimals: at most 20"
        return TOO_SMALL if exponent and sign == "-" and len(integer) <= 20 else TOO_LARGE
    value = Fraction(text)
    if value > MAX_TIME:
        return TOO_LARGE
    return TOO_SMALL if 0 < value < MIN_TIME else ""


# --- The largest schedules that are made, read or drawn, checked before any work

MAX_RANKS = 512  # the largest published pipelines have 16 to 64
MAX_CELLS = 2**20  # stages x micro-batches; each is a forward and a backward, and about 100,000 take a second


# --- Times of messages between two ranks, if they depend on the ranks: by node, or by a table


@dataclass(frozen=True)
class LinkTimes:
    """Times of messages that differ between ranks."""

    node: int = 0  # neighbouring ranks on one node; 0 if all ranks are on one
    between: Fraction = Fraction(0)  # time from one node to another
    table: tuple[tuple[Fraction, ...], ...] = ()  # by rank and rank, symmetric; replaces `node` and `between`

    def time(self, source: int, target: int, inside: Fraction) -> Fraction:
        """Time of a message from a rank to another. `inside`: its time inside a node."""
        if self.table:
            return self.table[source][target]
        return self.between if self.node and source // self.node != target // self.node else inside

    def least(self, num_ranks: int, inside: Fraction) -> Fraction:
        """The least time of a message between two ranks."""
        ranks = range(num_ranks)
        return min((self.time(a, b, inside) for a in ranks for b in ranks if a != b), default=Fraction(0))


ALIKE = LinkTimes()


# --- costs

PAIR_KINDS = tuple(sorted("".join(sorted(pair)) for pair in combinations_with_replacement(KINDS, 2)))  # BB, BF, …
TABLES = Path(__file__).parent / "tables"
UNIT_OF_SHIPPED = "ms"
MOST_PARTS = 1000  # of an activation, some of which are kept for W; memory is counted in whole parts
MOST_OVERLAP = 10  # a pair may take this many times its two actions apart; more is a wrong unit or a typo
MOST_BYTES = 1 << 20  # of a table


@dataclass(frozen=True)
class Costs:
    """Times of each kind of action, of overlapped pairs, and of messages; all exact, and 0 or more."""

    F: Fraction = Fraction(1)
    I: Fraction = Fraction(1)
    W: Fraction = Fraction(1)
    B: Fraction | None = None  # None: I + W
    # (kinds, time), with kinds in alphabetical order ("BF", "FF", "IW"). Other pairs take the sum of their two actions.
    pairs: tuple[tuple[str, Fraction], ...] = ()
    latency: Fraction = Fraction(0)  # of a message to the next stage on another rank
    # Factors of the actions of a stage (one, or one for each kind), of a rank and of a micro-batch; empty: all 1.
    stages: tuple[StageWeight, ...] = ()
    ranks: tuple[Fraction, ...] = ()
    micro_batches: tuple[Fraction, ...] = ()
    keeps: Fraction = Fraction(1)  # share of an activation that is held from the end of its I to the end of its W
    bytes: Bytes = UNKNOWN  # of an activation, and of what ranks hold besides activations
    links: LinkTimes = ALIKE  # where messages take another time than `latency`
    # Times of the copies of an activation to the host and back, equal for all; None if nothing can be copied.
    O: Fraction | None = None
    R: Fraction | None = None
    stage_pairs: StagePairs = NO_PAIRS  # shares of pairs of labelled stages, which replace `pairs`

    def __post_init__(self) -> None:
        assert all(kinds in PAIR_KINDS for kinds, _ in self.pairs), self.pairs
        assert len(dict(self.pairs)) == len(self.pairs), self.pairs

    def lone_time(self, kind: str) -> Fraction:
        """Time of a lone action of a kind on a stage and a rank of weight 1."""
        if kind == "B":
            return self.I + self.W if self.B is None else self.B
        time = {"F": self.F, "I": self.I, "W": self.W, "O": self.O, "R": self.R}[kind]
        if time is None:
            raise ValueError(f"the schedule has {kind}, but the costs have no time for it: use --offload TIME")
        return time

    @property
    def can_offload(self) -> bool:
        """Whether activations can be copied to the host and back."""
        return self.O is not None

    def without_offload(self) -> Costs:
        """The costs without copies to the host."""
        return replace(self, O=None, R=None)

    def pair_time(self, kinds: str) -> Fraction:
        """Time of a pair, with kinds in any order, on a stage and a rank of weight 1."""
        return dict(self.pairs).get("".join(sorted(kinds)), self.lone_time(kinds[0]) + self.lone_time(kinds[1]))

    def quickest(self, kind: str) -> Fraction:
        """The least time of a step with an action of a kind and weight 1, alone or in a pair."""
        least = min(self.lone_time(kind), *(self.pair_time(kind + partner) for partner in KINDS))
        return min(least, self.lone_time(kind) * self.stage_pairs.least(kind))

    def least_work(self, weight: Weight = ONE) -> Fraction:
        """Time of a stage of a weight on a micro-batch, if every action has the best share of its time in a pair."""
        least = self.least_shares(weight)
        return least["F"] + min(least["B"], least["I"] + least["W"])

    def least_shares(self, weight: Weight) -> dict[str, Fraction]:
        """By kind, the least time that an action of a weight adds to a step."""
        least: dict[str, Fraction] = {}
        for kind in KINDS:
            sums = {partner: self.lone_time(kind) + self.lone_time(partner) for partner in KINDS}
            shares = [self.pair_time(kind + partner) / total for partner, total in sums.items() if total]
            if weight.label:
                shares = [self.stage_pairs.least(kind, weight.label)]
            least[kind] = self.lone_time(kind) * weight.factor(kind) * min(Fraction(1), *shares)
        return least

    def weight(self, stage: int, rank: int) -> Weight:
        """The factors of a stage's actions on a rank, for a micro-batch of weight 1."""
        weight = as_weight(self.stages[stage]) if self.stages else ONE
        return weight.scale_by(self.ranks[rank]) if self.ranks else weight

    def step_time(self, step: Step, rank: int) -> Fraction:
        """Time of a step on a pipeline rank.

        A pair of unequal weights has the same relative gain as at weight 1. It takes at least as long as each of its
        actions alone. If the table's pair is shorter than that, as a lone action waits for its own communication, it
        takes at least the table's time, scaled by the weight of the action.
        """
        if isinstance(step, Action) and step.kind in COPIES:
            return self.lone_time(step.kind)
        parts, least = self.parts(step, rank)
        if self.micro_batches:
            factors = [self.micro_batches[action.micro_batch] for action in actions_of(step)]
            parts, least = ([time * m for time, m in zip(times, factors, strict=True)] for times in (parts, least))
        return max(sum(parts, Fraction(0)), *least)

    def parts(self, step: Step, rank: int) -> tuple[list[Fraction], list[Fraction]]:
        """For micro-batches of weight 1: the time that each action adds to a step, and the least time it implies."""
        actions = actions_of(step)
        weights = [self.weight(action.stage, rank) for action in actions]
        bases = [self.lone_time(action.kind) for action in actions]
        lone = [base * weight.factor(action.kind) for base, weight, action in zip(bases, weights, actions, strict=True)]
        if isinstance(step, Action):
            return lone, lone
        if any(weight.label for weight in weights):
            a, b = ((action.kind, weight.label) for action, weight in zip(actions, weights, strict=True))
            share = self.stage_pairs.share(a, b)
            return [share * time for time in lone], [min(time, share * sum(lone)) for time in lone]
        time = self.pair_time(actions[0].kind + actions[1].kind)
        share = time / sum(bases) if sum(bases) else Fraction(0)
        factors = [weight.factor(action.kind) for weight, action in zip(weights, actions, strict=True)]
        least = [min(base, time) * factor for base, factor in zip(bases, factors, strict=True)]
        return [share * time for time in lone], least

    def frees(self, kind: str) -> Fraction:
        """The share of an activation that is freed at the end of an action of a kind."""
        return {"F": Fraction(0), "B": Fraction(1), "I": 1 - self.keeps, "W": self.keeps}[kind]

    def round_cap(self, cap: Fraction) -> Fraction:
        """A cap rounded down to what can be held: whole activations, or parts if an I frees a part."""
        return Fraction(int(cap * self.keeps.denominator), self.keeps.denominator)

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another."""
        return self.links.time(source, target, self.latency)

    def is_mirrored(self, num_ranks: int) -> bool:
        """Whether ranks and links cost the same as their mirror images."""
        last, ranks = num_ranks - 1, range(num_ranks - 1)
        links = all(self.message(r, r + 1) == self.message(last - r, last - r - 1) for r in ranks)
        return links and self.ranks == self.ranks[::-1]

    def gains(self) -> frozenset[str]:
        """The kinds of pairs that take less than their two actions in turn, with kinds in alphabetical order."""
        gain = {kinds for kinds, time in self.pairs if time < self.lone_time(kinds[0]) + self.lone_time(kinds[1])}
        return self.stage_pairs.gains | gain

    def recut(self, old_stages: int, new_stages: int) -> Costs:
        """Costs of the same model cut into `new_stages` stages instead of `old_stages`.

        The weight of a new stage is the mean of the weights that it overlaps with. There may be more weights than old
        stages, of stages that are smaller by the same factor.
        """
        if old_stages == new_stages and len(self.stages) in (0, new_stages):
            return self
        factor = Fraction(old_stages, new_stages)
        stages = self.stages if len(self.stages) in (0, new_stages) else cut_anew(self.stages, new_stages)
        O, R = (None if time is None else time * factor for time in (self.O, self.R))
        return replace(self.scale_times(factor), stages=stages, bytes=self.bytes.scale_activation(factor), O=O, R=R)

    def scale_times(self, scale: Fraction) -> Costs:
        """Costs with the times of actions multiplied by a factor, but not those of messages."""
        pairs = tuple((kinds, time * scale) for kinds, time in self.pairs)
        B = None if self.B is None else self.B * scale
        return replace(self, F=self.F * scale, I=self.I * scale, W=self.W * scale, B=B, pairs=pairs)

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """Raise ValueError unless there are as many weights as stages, ranks and, if given, micro-batches."""
        for name, weights, count in (
            ("stages", self.stages, num_stages),
            ("ranks", self.ranks, num_ranks),
            ("micro-batches", self.micro_batches, num_micro_batches),
            ("ranks in the table of latency", self.links.table, num_ranks),
            ("ranks besides activations", self.bytes.beside[1:] and self.bytes.beside, num_ranks),
        ):
            if weights and count is not None and len(weights) != count:
                raise ValueError(f"the costs have weights of {len(weights)} {name}, but the schedule has {count}")

    def check_cut(self, num_ranks: int, num_stages: int) -> None:
        """Raise ValueError unless the weights fit the ranks, and the stages or equal parts of them."""
        finer = len(self.stages) % num_stages == 0
        self.check(num_ranks, len(self.stages) if finer else num_stages)


def with_every_pair_gaining(costs: Costs) -> Costs:
    """The costs with every pair of F, B and I gaining by the factor of F&B, FB / (F + B). Pairs with W gain nothing."""
    factor = costs.pair_time("FB") / (costs.lone_time("F") + costs.lone_time("B"))
    kinds = [pair for pair in PAIR_KINDS if "W" not in pair]
    return replace(
        costs, pairs=tuple((pair, factor * (costs.lone_time(pair[0]) + costs.lone_time(pair[1]))) for pair in kinds)
    )


# ---------------------------------------------------------------- reading
def parse_costs(text: str) -> Costs:
    """Parse `F=1,I=1,W=1,FB=1.8`: F, I and W default to 1, B to I + W, and a pair to its sum. Raises ValueError."""
    values: dict[str, Fraction] = {}
    for item in text.split(","):
        name, equals, number = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item[:40]!r} is not a cost: write it as F=1")
        key = name if name == "keeps" or name in COPIES else _key(name)
        if key in values:
            raise ValueError(f"{name[:40]} is given twice")
        values[key] = exact(number, name)
    keeps = _share(values.pop("keeps", Fraction(1)))
    O, R = _copies(values)
    return replace(_costs(values, {k: time for k, time in values.items() if len(k) == 2}), keeps=keeps, O=O, R=R)


def parse_time(text: str) -> Fraction:
    """Parse a time as in costs: `1.8` or `9/5`. Raises ValueError."""
    return exact(text)


def costs_of_json(text: str, display_name: str = "table") -> Costs:
    """Parse a table of costs: `{"F": 1, "I": 1, "W": 1, "B": 2, "pairs": {"FB": 1.8}, "stages": [1, …], "ranks": …}`.

    Instead of times, `lanes` may state what overlaps:
    `{"compute": {"F", "I", "W"}, "communication": {"F", "B"}, "overlap"}`. Then a lone action takes both lanes one
    after the other, where I communicates as B does, W does not communicate, and B = I + W. A pair takes the maximum of
    overlap x compute, of communication, and of the longer of its two actions. Measured `pairs` take precedence.
    Raises ValueError with the mistake, or TextFileError with the line of the file `display_name`.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"a table of costs has at most {MOST_BYTES} characters")
    value = json_of(text, display_name, exact)
    lanes = isinstance(value, dict) and "lanes" in value
    forms = {"lanes": dict} if lanes else dict.fromkeys("FIWB", Fraction)
    optional: dict[str, type] = {"pairs": dict, "stages": list, "ranks": list, "micro_batches": list}
    optional |= {"latency": object, "keeps": Fraction, "bytes": dict} | dict.fromkeys(COPIES, object)
    table = object_of(value, forms | optional, "the table")
    lone, pairs = _of_lanes(table["lanes"]) if lanes else ({kind: table[kind] for kind in "FIWB" if kind in table}, {})
    if missing := {"F", "I", "W"} - lone.keys():
        raise ValueError(f"the table has no {', '.join(sorted(missing))}")
    measured = _pairs(table.get("pairs", {}))
    latency, links = _latency(table.get("latency", Fraction(0)))
    O, R = _copies(table)
    return replace(
        _costs(lone, pairs | measured),
        latency=latency,
        links=links,
        stages=parse_stage_weights(table.get("stages", []), lone),
        ranks=parse_weights(table.get("ranks", []), "ranks"),
        micro_batches=parse_weights(table.get("micro_batches", []), "micro_batches"),
        keeps=_share(table.get("keeps", Fraction(1))),
        bytes=bytes_of_json(table.get("bytes", {})),
        O=O,
        R=R,
    )


def shipped_cost_names() -> tuple[str, ...]:
    """The names of the tables that come with dsc."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


def shipped_costs(name: str) -> Costs:
    """A table that comes with dsc: `deepseek-v3-low` and `deepseek-v3-high`, ms of 4 layers of V3 on H800."""
    return costs_of_json((TABLES / f"{name}.json").read_text("utf-8"))


def _pairs(values: Mapping[str, Any]) -> dict[str, Fraction]:
    measured: dict[str, Fraction] = {}
    for name, time in values.items():
        key = _key(name)
        if len(key) == 1:
            raise ValueError(f'"pairs" has {key}, which is not a pair')
        if key in measured:
            raise ValueError(f'"pairs" has {key} and {key[::-1]}, which are one pair: leave one of them out')
        measured[key] = _time(time, name)
    return measured


def _of_lanes(value: Any) -> tuple[dict[str, Fraction], dict[str, Fraction]]:
    lanes = object_of(value, {"compute": dict, "communication": dict, "overlap": Fraction}, '"lanes"')
    compute = object_of(lanes.get("compute"), dict.fromkeys("FIW", Fraction), '"compute"')
    comm = object_of(lanes.get("communication"), dict.fromkeys("FB", Fraction), '"communication"')
    if missing := {"F", "I", "W"} - compute.keys() or {"F", "B"} - comm.keys():
        raise ValueError(f'"lanes" has no {", ".join(sorted(missing))}')
    compute["B"] = compute["I"] + compute["W"]
    comm |= {"I": comm["B"], "W": Fraction(0)}
    chain = {kind: compute["I" if kind == "B" else kind] + comm[kind] for kind in "FBIW"}
    overlap = lanes.get("overlap", Fraction(1))
    if overlap > MOST_OVERLAP:
        raise ValueError(f'"overlap" is {float(overlap):g}: at most {MOST_OVERLAP}; 1 is no loss, 0.98 a little gain')
    pairs = {}
    for a, b in map(tuple, PAIR_KINDS):
        if comm[a] + comm[b]:  # W&W has nothing to hide
            pairs[a + b] = max(overlap * (compute[a] + compute[b]), comm[a] + comm[b], chain[a], chain[b])
    return {kind: compute[kind] + comm[kind] for kind in "FIW"}, pairs


def _costs(lone_times: Mapping[str, Fraction], pair_times: Mapping[str, Fraction]) -> Costs:
    F, I, W = (lone_times.get(kind, Fraction(1)) for kind in "FIW")
    costs = Costs(F, I, W, lone_times.get("B"), tuple(sorted(pair_times.items())))
    for kind in "FB":
        if not costs.lone_time(kind):
            raise ValueError(f"{kind} costs nothing: give it a time above 0")
    if empty := [
        kinds for kinds, time in costs.pairs if not time and costs.lone_time(kinds[0]) + costs.lone_time(kinds[1])
    ]:
        raise ValueError(f"the pair {empty[0]} costs nothing: give it a time above 0")
    for kinds, time in costs.pairs:
        apart = costs.lone_time(kinds[0]) + costs.lone_time(kinds[1])
        if time > MOST_OVERLAP * apart:
            raise ValueError(
                f"the pair {kinds} takes {float(time):g}, but its two actions one after the other {float(apart):g}: "
                f"give it at most {MOST_OVERLAP} times as much"
            )
    return costs


def _copies(times: Mapping[str, Any]) -> tuple[Fraction | None, Fraction | None]:
    """The times of O and R. If only one is given, it counts for both."""
    O, R = (None if times.get(kind) is None else _time(times[kind], kind) for kind in COPIES)
    return (R if O is None else O), (O if R is None else R)


def _key(name: str) -> str:
    key = "".join(sorted(name)) if len(name) == 2 else name
    if key not in PAIR_KINDS and key not in KINDS:
        raise ValueError(f"unknown cost {name[:40]!r}: use F, I, W, B, O, R, or a pair of the first four such as FB")
    return key


def _time(value: Any, name: str) -> Fraction:
    if not isinstance(value, Fraction):
        raise ValueError(f"{name[:40]!r} must be a number")
    return value


def _latency(value: Any) -> tuple[Fraction, LinkTimes]:
    """Parse a latency: a number, an object with `inside`, `node` (ranks) and `between`, or an object with a `table`."""
    if isinstance(value, Fraction):
        return value, ALIKE
    fields = object_of(value, {"inside": Fraction, "node": Fraction, "between": Fraction, "table": list}, '"latency"')
    inside, node, between = (fields.get(key, Fraction(0)) for key in ("inside", "node", "between"))
    table = fields.get("table", [])
    if table and (node or between):
        raise ValueError('"latency": "table" has the times of all links: leave "node" and "between" out')
    if not table and (not node or node.denominator != 1):
        raise ValueError(
            '"latency": "node" must be a whole number of ranks, 1 or more; or write one number for all links'
        )
    rows = tuple(tuple(row) for row in table if isinstance(row, list) and all(isinstance(t, Fraction) for t in row))
    square = all(len(row) == len(table) for row in rows) and len(rows) == len(table)
    if not square or rows != tuple(zip(*rows, strict=True)) or any(row[k] for k, row in enumerate(rows)):
        raise ValueError('"latency": "table" must have a time for each rank and rank, the same both ways, 0 to itself')
    links = LinkTimes(int(node), between, rows)
    return (links.least(len(rows), inside) if rows else inside), links


def _share(keeps: Fraction) -> Fraction:
    if keeps > 1 or keeps.denominator > MOST_PARTS:
        raise ValueError(f"keeps {float(keeps):g} is not a share: write a number from 0 to 1 with up to 3 decimals")
    return keeps
