"""Words and units of the language that are no keys: what they mean, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dsl.facts import units
from dsl.facts.units import BINARY, COUNTS, DECIMAL, TIMES


@dataclass(frozen=True)
class Word:
    """A word of the language."""

    text: str
    meaning: str
    example: str
    see: tuple[str, ...] = ()


RATE, PHASES = ("train.rate",), ("mtp.weight", "balance.bias_rate")
WORDS: tuple[Word, ...] = (
    Word("import", "brings in what another file defines; the path is relative to this file", 'import "tiny.dsc"'),
    Word("let", "names a value, for use in arithmetic and references", "let width = 64"),
    Word("extends", "a block starts from the keys of another one of its kind", "run mine extends tiny { }"),
    Word(
        "phase",
        "a block of a run: what is otherwise from where the phase before has ended",
        "phase long { train { sequence = 64, batch = 2, steps = 4 } }",
        ("train.sequence", "train.batch", "train.rate"),
    ),
    Word("auto", "the value is found from others", "parallel { data = auto }", ("parallel.data",)),
    Word("none", "there is no such thing, where a key allows that", "optimizer adamw { clip = none }"),
    Word(
        "train(entries)",
        "a byte-level BPE tokenizer of so many entries, trained on the data",
        "tokenizer = train(4096)",
        ("data.tokenizer",),
    ),
    Word("python_stdlib", "the source files of the running Python", "source = python_stdlib", ("data.source",)),
    Word("warmup", "a phase of the learning rate: a line from 0 to a rate", "warmup 2000 steps to 2.2e-4", RATE),
    Word("linear", "a phase of the learning rate: a line", "linear to 0 over 1T tokens", RATE),
    Word("constant", "a phase of the learning rate: the same rate", "constant until 10T tokens", RATE),
    Word("cosine", "a phase of the learning rate: half a cosine", "cosine to 2.2e-5 over 4.3T tokens", RATE),
    Word("from", "the rate, or the batch, at the beginning", "linear from 1e-5 to 1e-3 over 100 steps", RATE),
    Word("to", "the rate, or the batch, at the end", "cosine to 2.2e-5", RATE),
    Word("at", "the rate of a constant phase", "constant at 7.3e-6", RATE),
    Word(
        "until",
        "where a phase ends, counted from the beginning of the run",
        "constant until 10T tokens",
        (*RATE, *PHASES),
    ),
    Word("over", "how long a phase lasts, counted from the one before", "cosine to 2.2e-5 over 4.3T tokens", RATE),
    Word("then", "what follows a phase of a value", "weight = 0.3 until 10T tokens then 0.1", PHASES),
    Word("tokens", "a number of tokens", "constant until 10T tokens", ("train.tokens",)),
    Word(
        "steps",
        "a number of optimizer steps; the batch makes tokens of them",
        "warmup 2000 steps to 2.2e-4",
        ("train.steps",),
    ),
)
# The keys of `batch { … }`, which the schema keeps under other names.
BATCH: tuple[Word, ...] = (
    Word("from", "sequences of the first steps", "from = 3072"),
    Word("to", "sequences of a step when the batch has grown", "to = 15360"),
    Word("over", "tokens over which it grows", "over = 469B tokens"),
)


@dataclass(frozen=True)
class Unit:
    """A unit: one of it is `value` of `base`."""

    text: str
    value: Fraction
    base: str

    @property
    def exactly(self) -> str:
        """`2^30 = 1,073,741,824 bytes`."""
        if self.value < 1:
            return f"{self.value.numerator}/{self.value.denominator:,} {self.base}".rstrip()
        power = self.value.numerator.bit_length() - 1
        binary = f"2^{power} = " if power >= 10 and self.value == 2**power else ""
        return f"{binary}{int(self.value):,} {self.base}".rstrip()


FAMILIES = ("counts", "bytes", "bits", "rates", "compute", "time", "money", "words of the language")


def unit(text: str) -> Unit | None:
    """What one of a unit is; None if there is no such unit."""
    found = units.unit(text) if text else None
    if found is None:
        return None
    base = "" if found.dimension == units.PLAIN else units.spoken(found.dimension)
    return Unit(text, found.value, base)


def family(name: str) -> tuple[Unit, ...]:
    """The units of a family, smallest first; of the rates, those per second."""
    small, large = list(DECIMAL), list(BINARY)
    found = {
        "counts": [*COUNTS],
        "bytes": ["bytes", *(f"{prefix}B" for prefix in (*small, *large) if prefix)],
        "bits": ["bit", *(f"{prefix}b" for prefix in (*small, *large) if prefix)],
        "rates": [
            f"{prefix}{each}/s" for each in ("B", "b") for prefix in ("k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti")
        ],
        "compute": [*(f"{prefix}FLOP" for prefix in small), *(f"{prefix}FLOPS" for prefix in small)],
        "time": [*TIMES],
        "money": ["USD", "USD/h"],
        "words of the language": ["tokens", "steps", "bytes"],
    }[name]
    units = [unit(text) for text in found]
    return tuple(sorted((each for each in units if each), key=lambda each: (each.base, each.value)))
