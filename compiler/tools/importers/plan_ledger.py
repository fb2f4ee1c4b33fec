"""The ledger of a plan import: the result for each key of the other system's configuration. No key is dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Literal

from compiler.tools.exporters.planned import to_printable_ascii
from compiler.tools.importers.first_run import DEVICES, NODE
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import ComputedValue
from compiler.tools.importers.write import comment, number
from dsl.canonical import quote
from dsl.messages.diagnostics import Diagnostic, Span

Kind = Literal["said", "approximated", "not expressible", "computed", "no effect", "unknown", "default", "assumed"]
ORDER: tuple[Kind, ...] = (
    *("not expressible", "approximated", "computed", "unknown", "assumed", "default", "no effect", "said"),
)
MAX_NUMBER = 1e15  # largest number accepted
CHANGES = ("not expressible", "approximated", "computed")


@dataclass(frozen=True)
class LedgerEntry:
    """The result for one key, or for the default of an absent key."""

    kind: Kind
    key: str
    value: str
    why: str  # the reason; for kind "said", the path in the spec
    place: Span | None = None

    def __str__(self) -> str:
        return to_printable_ascii(f"{self.kind}: {self.key} = {self.value}: {self.why}", 400)


class Keys:
    """The keys of a configuration, those not accounted for yet, and the ledger."""

    def __init__(self, members: Mapping[str, Sequence[JsonValue]]) -> None:
        self.members = members
        self._unread = dict(members)
        self.entries: list[LedgerEntry] = []
        self.mistakes: list[Diagnostic] = []

    def has(self, name: str) -> bool:
        """Whether the key is present, not null, and not accounted for yet."""
        return name in self._unread and self._unread[name][0].value is not None

    def peek(self, name: str, default: Any) -> Any:
        """The value of a key, or `default` if it is absent or computed. Leaves the ledger alone."""
        value = self.members[name][0].value if name in self.members else default
        return default if isinstance(value, ComputedValue) else value

    def size(self, name: str, path: str) -> int:
        """Take a size, which has no default here. Returns 1 and reports an error if it is missing, null or computed."""
        if self.peek(name, None) is None:
            text = f"`{name}` is {'missing' if name not in self.members else 'unknown'}"
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
        """Take the value of a key and record that it becomes `path` in the spec.

        `default`: the other system's default, returned if the key is absent or invalid. `kind`: the type it must have;
        None: the type of the default, where an int is accepted for a float. `least`: smallest number; None: 1 if the
        default is a positive int, else 0.
        """
        kinds = kind if kind is not None else (int, float) if type(default) is float else type(default)
        values = self._unread.pop(name, None)
        if values is None:
            if path:
                self.entries.append(LedgerEntry("default", name, value_text(default), path))
            return default
        first = values[0]
        for value in values[1:]:
            if value.value != first.value:
                text = f"`{name}` is {value_text(value.value)} here and {value_text(first.value)} elsewhere"
                self.mistakes.append(Diagnostic("I0203", text, value.span, "remove one of them"))
        if isinstance(first.value, ComputedValue):
            why = f"{path or 'not in the spec'}: replaced by {value_text(default)}"
            self._say("computed" if path else "no effect", name, first, why)
            return default
        if first.value is None and default is not None:
            self._say("default", name, JsonValue(default, first.span, first.key), path or "null: not in the spec")
            return default
        of_kind = isinstance(first.value, kinds) and (type(first.value) is not bool or kinds in (bool, object))
        if not of_kind and first.value is not None:
            names = {int: "a whole number", bool: "true or false", str: "a text", list: "a list"}
            noun = names.get(kinds, "a number") if isinstance(kinds, type) else "a number"
            self.mistakes.append(
                Diagnostic("I0203", f"`{name}` must be {noun}, not {value_text(first.value)}", first.span)
            )
            return default
        if type(first.value) in (int, float):
            least = int(type(default) is int and default >= 1) if least is None else least
            if not least <= first.value <= MAX_NUMBER:
                bounds = f"at least {least} and at most {MAX_NUMBER:.0e}"
                text = f"`{name}` is {value_text(first.value)}, out of bounds: {bounds}"
                self.mistakes.append(Diagnostic("I0203", text, first.span))
                return default
        self._say("said", name, first, path)
        return first.value

    def lose(self, name: str, why: str, harmless: Sequence[Any] = (), kind: Kind = "not expressible") -> None:
        """Record that the spec does not express a key. A value in `harmless` is recorded as having no effect."""
        for value in self._unread.pop(name, ()):
            is_off = any(value.value == neutral and type(value.value) is type(neutral) for neutral in (None, *harmless))
            self._say("no effect" if is_off else kind, name, value, "always so here" if is_off else why)

    def note(self, kind: Kind, key: str, value: Any, why: str) -> None:
        """Record an entry that does not stand for a single key."""
        self.entries.append(LedgerEntry(kind, key, value_text(value), why))

    def record_unknown(self) -> None:
        """Record all keys that are not accounted for yet as unknown."""
        for name, values in self._unread.items():
            for value in values:
                if value.value is None:
                    self._say("no effect", name, value, "null: as if it were absent")
                else:
                    self._say("unknown", name, value, "unknown, and left out of the spec")

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """All entries: those that change the computation first, those carried over exactly last."""
        return tuple(sorted(self.entries, key=lambda entry: ORDER.index(entry.kind)))

    def _say(self, kind: Kind, name: str, value: JsonValue, why: str) -> None:
        self.entries.append(LedgerEntry(kind, name, value_text(value.value), why, value.key or value.span))


def value_text(value: Any) -> str:
    """A value on one line of ASCII."""
    text = getattr(value, "text", None)
    return to_printable_ascii(text if isinstance(text, str) else str(value), 80)


# --- Shared by the plan importers: the text of a spec from the blocks of a run, its learning rate, its optimizer

Members = Mapping[str, Sequence[JsonValue]]
Precision = tuple[str, Sequence[str]]  # (name of a built-in precision, lines of a block that changes it)


@dataclass(frozen=True)
class ImportedPlan:
    """The unformatted text of a spec, the ledger, and the errors."""

    text: str
    ledger: tuple[LedgerEntry, ...]
    mistakes: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Degrees:
    """The parallel degrees of a plan, without data parallelism."""

    pipeline: int
    tensor: int
    context: int
    expert: int
    expert_tensor: int

    def block(self, zero: int, more_keys: str) -> str:
        """The block `parallel`. `more_keys`: further keys, each after a comma."""
        inner = (("tensor", self.tensor), ("context", self.context), ("expert_tensor", self.expert_tensor))
        text = f"parallel {{ pipeline = {self.pipeline}, expert = {self.expert}, data = auto, zero = {zero}"
        return f"{text}{''.join(f', {key} = {degree}' for key, degree in inner if degree > 1)}{more_keys} }}"

    def devices(self, keys: Keys, requested: int | None) -> int:
        """The number of devices: `requested`, or else the fewest that the degrees allow, which the ledger records."""
        if requested is not None:
            return requested
        inner, experts = self.tensor * self.context, self.expert * self.expert_tensor
        data = lcm(experts // gcd(experts, inner), DEVICES // gcd(DEVICES, self.pipeline * inner))
        fewest = self.pipeline * data * inner
        keys.note("assumed", "devices", fewest, "the fewest that the degrees allow; set it with --devices N")
        return fewest


def spec_of(
    system: str, name: str, keys: Keys, world: int, run: Sequence[str], model: Sequence[str], precision: Precision
) -> ImportedPlan:
    """A spec for `world` devices. `run`: lines of the run's blocks; `model`: lines of the model's block."""
    keys.record_unknown()
    nodes, per_node = (world // DEVICES, DEVICES) if world % DEVICES == 0 else (1, world)
    ledger, (built_in, changes) = keys.ledger(), precision
    lines = [
        *comment(f"Imported from a configuration of {system}. The result for each of its keys:"),
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
        f"cluster {name}_cluster {{ # change it to your nodes, devices and memory",
        f"nodes = {nodes}",
        f"node {{ devices = {per_node}",
        *NODE,
        "} }",
    ]
    return ImportedPlan("\n".join(lines) + "\n", ledger, tuple(keys.mistakes))


def string(text: str) -> str:
    """A text as a string literal of a spec. Unprintable characters, line ends among them, become `?`."""
    return quote("".join(character if character.isprintable() else "?" for character in text))


def adam(settings: Mapping[str, float], clip: float | None) -> str:
    """The block of AdamW."""
    written = ", ".join(f"{key} = {number(value)}" for key, value in settings.items())
    return f"optimizer adamw {{ {written}, clip = {number(clip) if clip else 'none'} }}"


def rate_lines(warmup: int, shape: str, peak: float, least: float, ends: tuple[int, int, int]) -> list[str]:
    """The block `rate`: a linear warm-up from 0, a plateau at `peak`, a decay of `shape` to `least`, then `least`.

    `ends`: the last steps of the plateau, of the decay and of the run. Empty phases are left out.
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
