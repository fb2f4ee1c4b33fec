"""What an import of a plan says of each key of the other system's configuration: nothing is dropped without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Literal

from compiler.tools.exporters.planned import plain
from compiler.tools.importers.first_run import DEVICES, NODE
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import ComputedValue
from compiler.tools.importers.write import comment, number
from dsl.canonical import quoted
from dsl.messages.diagnostics import Diagnostic, Span

Kind = Literal["said", "approximated", "not expressible", "computed", "no effect", "unknown", "default", "assumed"]
ORDER: tuple[Kind, ...] = (
    *("not expressible", "approximated", "computed", "unknown", "assumed", "default", "no effect", "said"),
)
MOST = 1e15  # of a number
CHANGES = ("not expressible", "approximated", "computed")


@dataclass(frozen=True)
class LedgerEntry:
    """A key, or what stands in for one that is not there."""

    kind: Kind
    key: str
    value: str
    why: str  # of what is said: the path of the spec
    place: Span | None = None

    def __str__(self) -> str:
        return plain(f"{self.kind}: {self.key} = {self.value}: {self.why}", 400)


class Keys:
    """The keys of a configuration that nothing has been said of yet, and the ledger."""

    def __init__(self, members: Mapping[str, Sequence[JsonValue]]) -> None:
        self.members = members
        self._left = dict(members)
        self.entries: list[LedgerEntry] = []
        self.mistakes: list[Diagnostic] = []

    def has(self, name: str) -> bool:
        """Whether the key is written, is not null, and nothing has been said of it."""
        return name in self._left and self._left[name][0].value is not None

    def peek(self, name: str, default: Any) -> Any:
        """The value of a key that is written and known, without a word in the ledger."""
        value = self.members[name][0].value if name in self.members else default
        return default if isinstance(value, ComputedValue) else value

    def size(self, name: str, path: str) -> int:
        """A size, which has no default here: 1 where it is missing, null or not known, which is a mistake."""
        if self.peek(name, None) is None:
            text = f"`{name}` is {'missing' if name not in self.members else 'not known'}"
            place = self.members[name][0].span if name in self.members else None
            self.mistakes.append(Diagnostic("I0202", text, place, "sizes have no default here"))
            path = ""
        return int(self.take(name, path, 1))

    def take(
        self,
        name: str,
        path: str,
        default: Any,
        kind: type | tuple[type, ...] | None = None,
        least: int | None = None,
    ) -> Any:
        """The value of a key, which the spec says at `path`; the default of the other system where it is not written.

        `kind`: what it has to be; None: as the default is, where an int is a float too. `least`: of a number; None: 1
        where the default is a size, else 0.
        """
        kinds = kind if kind is not None else (int, float) if type(default) is float else type(default)
        found = self._left.pop(name, None)
        if found is None:
            if path:
                self.entries.append(LedgerEntry("default", name, shown(default), path))
            return default
        first = found[0]
        for other in found[1:]:
            if other.value != first.value:
                text = f"`{name}` is {shown(other.value)} here and {shown(first.value)} elsewhere"
                self.mistakes.append(Diagnostic("I0203", text, other.span, "remove one of them"))
        if isinstance(first.value, ComputedValue):
            why = f"{path or 'not in the spec'}: {shown(default)} stands for it"
            self._say("computed" if path else "no effect", name, first, why)
            return default
        if first.value is None and default is not None:
            self._say("default", name, JsonValue(default, first.span, first.key), path or "null: not in the spec")
            return default
        of_kind = isinstance(first.value, kinds) and (type(first.value) is not bool or kinds in (bool, object))
        if not of_kind and first.value is not None:
            names = {int: "a whole number", bool: "true or false", str: "a text", list: "a list"}
            what = names.get(kinds, "a number") if isinstance(kinds, type) else "a number"
            self.mistakes.append(Diagnostic("I0203", f"`{name}` is {what}, {shown(first.value)} is not", first.span))
            return default
        if type(first.value) in (int, float):
            least = int(type(default) is int and default >= 1) if least is None else least
            if not least <= first.value <= MOST:
                text = f"`{name}` is {shown(first.value)}, out of bounds: at least {least} and at most {MOST:.0e}"
                self.mistakes.append(Diagnostic("I0203", text, first.span))
                return default
        self._say("said", name, first, path)
        return first.value

    def lose(self, name: str, why: str, harmless: Sequence[Any] = (), kind: Kind = "not expressible") -> None:
        """Take note that a spec does not say a key; with a harmless value that has no effect."""
        for each in self._left.pop(name, ()):
            is_off = any(each.value == value and type(each.value) is type(value) for value in (None, *harmless))
            self._say("no effect" if is_off else kind, name, each, "this is how it is here" if is_off else why)

    def note(self, kind: Kind, key: str, value: Any, why: str) -> None:
        """Take note of what no single key says."""
        self.entries.append(LedgerEntry(kind, key, shown(value), why))

    def rest(self) -> None:
        """Take note of all keys that nothing was said of."""
        for name, found in self._left.items():
            for each in found:
                if each.value is None:
                    self._say("no effect", name, each, "null: as if it were not written")
                else:
                    self._say("unknown", name, each, "not known, and not in the spec")

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """All entries: what changes the computation first, what is said last."""
        return tuple(sorted(self.entries, key=lambda entry: ORDER.index(entry.kind)))

    def _say(self, kind: Kind, name: str, found: JsonValue, why: str) -> None:
        self.entries.append(LedgerEntry(kind, name, shown(found.value), why, found.key or found.span))


def shown(value: Any) -> str:
    """A value on one line of ASCII."""
    text = getattr(value, "text", None)
    return plain(text if isinstance(text, str) else str(value), 80)


# --- What imports of plans share: the text of a spec from the blocks of a run, its learning rate, its optimizer

Members = Mapping[str, Sequence[JsonValue]]
Precision = tuple[str, Sequence[str]]  # one that is built in, and the lines of a block that changes it


@dataclass(frozen=True)
class ImportedPlan:
    """The text of a spec, not formatted yet, what was said of each key, and what is wrong."""

    text: str
    ledger: tuple[LedgerEntry, ...]
    mistakes: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Degrees:
    """How many ranks a plan has along each axis but data."""

    pipeline: int
    tensor: int
    context: int
    expert: int
    expert_tensor: int

    def block(self, zero: int, more: str) -> str:
        """The block `parallel`. `more`: further keys, each behind a comma."""
        inner = (("tensor", self.tensor), ("context", self.context), ("expert_tensor", self.expert_tensor))
        text = f"parallel {{ pipeline = {self.pipeline}, expert = {self.expert}, data = auto, zero = {zero}"
        return f"{text}{''.join(f', {key} = {n}' for key, n in inner if n > 1)}{more} }}"

    def devices(self, keys: Keys, said: int | None) -> int:
        """`said`, or the fewest that the degrees allow, which is noted."""
        if said is not None:
            return said
        inner, experts = self.tensor * self.context, self.expert * self.expert_tensor
        data = lcm(experts // gcd(experts, inner), DEVICES // gcd(DEVICES, self.pipeline * inner))
        fewest = self.pipeline * data * inner
        keys.note("assumed", "devices", fewest, "the fewest that the degrees allow; --devices N says how many")
        return fewest


def spec_of(
    system: str, name: str, keys: Keys, world: int, run: Sequence[str], model: Sequence[str], precision: Precision
) -> ImportedPlan:
    """A spec of `world` devices. `run`: the blocks of the run; `model`: that of the model."""
    keys.rest()
    nodes, per_node = (world // DEVICES, DEVICES) if world % DEVICES == 0 else (1, world)
    ledger, (built_in, changes) = keys.ledger(), precision
    lines = [
        *comment(f"Imported from a configuration of {system}. What was said of each of its keys:"),
        *(line for entry in ledger for line in comment(str(entry))),
        f"run {name} {{",
        f"model = {name}_model",
        f"cluster = {name}_cluster",
        "precision = " + (f"{name}_precision" if changes else built_in),
        *run,
        'data { source = "corpus/*.jsonl", tokenizer = "tokenizer.json", validation = 0.1% }',
        "}",
        *model,
        *([f"precision {name}_precision {{", *changes, "}"] if changes else []),
        f"cluster {name}_cluster {{ # yours: nodes, devices, their memory",
        f"nodes = {nodes}",
        f"node {{ devices = {per_node}",
        *NODE,
        "} }",
    ]
    return ImportedPlan("\n".join(lines) + "\n", ledger, tuple(keys.mistakes))


def string(text: str) -> str:
    """A text as a string of a spec. A string has no line ends, and what cannot be seen is `?`."""
    return quoted("".join(each if each.isprintable() else "?" for each in text))


def adam(settings: Mapping[str, float], clip: float | None) -> str:
    """The block of AdamW."""
    written = ", ".join(f"{key} = {number(value)}" for key, value in settings.items())
    return f"optimizer adamw {{ {written}, clip = {number(clip) if clip else 'none'} }}"


def rate_lines(warmup: int, shape: str, peak: float, least: float, ends: tuple[int, int, int]) -> list[str]:
    """The block `rate`: a warm-up from 0, a plateau, a decay of a shape, and what it ended at.

    `ends`: the steps until which there is a plateau, a decay, and the run. What ends with the warm-up, or begins with
    the end of the run, is left out.
    """
    plateau, decay, run = ends
    lines = [f"linear from 0 to {number(peak)} until {warmup} steps"] if warmup else []
    if shape == "constant":
        lines += [f"constant at {number(peak)} until {run} steps"] * (run > warmup)
        return ["rate {", *lines, "}"]
    lines += [f"constant at {number(peak)} until {plateau} steps"] * (plateau > warmup)
    lines += [f"{shape} from {number(peak)} to {number(least)} until {decay} steps"] * (plateau < min(decay, run))
    lines += [f"constant at {number(least)} until {run} steps"] * (decay < run)
    return ["rate {", *lines, "}"]
