"""What imports of plans share: the text of a spec from the blocks of a run, its learning rate, its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from compiler.tools.importers.first_run import DEVICES, NODE
from compiler.tools.importers.json_text import Json
from compiler.tools.importers.plan_ledger import Entry, Keys
from compiler.tools.importers.write import comment, number
from dsl.canonical import quoted
from dsl.messages.diagnostics import Diagnostic

Members = Mapping[str, Sequence[Json]]
Precision = tuple[str, Sequence[str]]  # one that is built in, and the lines of a block that changes it


@dataclass(frozen=True)
class Imported:
    """The text of a spec, not formatted yet, what was said of each key, and what is wrong."""

    text: str
    ledger: tuple[Entry, ...]
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
) -> Imported:
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
    return Imported("\n".join(lines) + "\n", ledger, tuple(keys.mistakes))


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
