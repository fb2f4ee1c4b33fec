"""Generates an input from a seed: from random bytes to specs with one word changed.

An input is a small set of files, the first of them the spec, and what the command line sets. The same seed always
gives the same input.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin

from dsl.schema import Node, Spec
from dsl.schema.base import FieldType, fields_of, keys_of
from dsl.schema.choices import OPEN
from dsl.text.syntax import NAMED
from dsl.text.table import tokens

ROOT = Path(__file__).parents[2]
LIB = ROOT / "tests" / "ui" / "lib"
BASE = (LIB / "base.dsc").read_text("utf-8")
REWARDED = (LIB / "rewards.dsc").read_text("utf-8").replace('import "base.dsc"\n', BASE)
SPECS = tuple(
    "\n".join((ROOT / "specs" / name).read_text("utf-8") for name in names)
    for names in (
        ("tiny.dsc",),
        ("quickstart.dsc",),
        ("precision/fp8.dsc", "clusters/h800.dsc", "models/deepseek-v3.dsc"),
    )
)
PUBLISHED = (
    "\n".join(
        line
        for line in (ROOT / "specs" / "deepseek-v3.dsc").read_text("utf-8").splitlines()
        if not line.startswith("import")
    )
    + f"\n{SPECS[2]}"
)
SEEDS = (BASE, BASE, REWARDED, SPECS[0], SPECS[0], SPECS[1], PUBLISHED)

TERMINALS = {
    "WORD": ("run", "model", "cluster", "precision", "extends", "let", "import", "layers", "until", "then", "tokens",
             "steps", "auto", "none",
             "base", "model.hidden", "a.1.b", "moe", "true", "warmup", "constant", "to", "over"),
    "NUMBER": ("0", "1", "128", "1e9", "0.5", "80GB", "79.1GiB", "80Gb", "1x128", "1f1b", "5%", "10T", "2USD/h", "1_0",
               "400Gb/s", "1979TFLOPS", "30min", "9" * 40, "1e-330", "1e330", "0.1e1_0", "3x", "1__", "00"),
    "STRING": ('"a.dsc"', '"corpus/*.txt"', '""', '"\\""', '"\\\\"', '"x" "y"', '"\u202e"'),
    "SIGN": (*"={}[](),+-*/", "..", "train(", "f(", "\n", "\n", "\n", "\r\n", "#", "# x\n", "\t", " "),
    "OTHER": ("'", ";", ":", "@", "\x00", "\x1b[31m", "\u00e9", "\u0660", "\ud7ff", "\U0001f600", '"', "\\", "$", "\r"),
}  # fmt: skip
LABELS = (  # what may follow the key of a block
    "", "", " a", " mla", " gqa", " compressed", " deltanet", " csa", " hca", " moe", " dense", " 0..2",
    " b extends base", " 3", ' "x"',
)  # fmt: skip
EXTREMES = (
    "0", "-1", "1e60", "1e99", "0.5", "9" * 40, "1e-99", "0%", "99999T", "1 / 3", "1 / 0", "2", "3", "7", "1000",
    "1048577", "4", "none", "auto", "true", "80GB", "1 tokens", "3 steps", "1x1", "hidden",
    "model.vocab", "1", "(1 + 2) * 4",
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """An input: `files` by name, the first one is the spec; texts, or bytes written as latin-1."""

    kind: str
    files: dict[str, str]
    overrides: tuple[str, ...] = ()
    is_binary: bool = False

    def content(self, name: str) -> bytes:
        return self.files[name].encode("latin-1" if self.is_binary else "utf-8", "surrogatepass")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def from_json(text: str) -> Input:
    data = json.loads(text)
    return Input(data["kind"], data["files"], tuple(data["overrides"]), data["is_binary"])


def generated(seed: int) -> Input:
    """The input of a seed."""
    chooser = random.Random(seed)
    kind = chooser.choice(tuple(KINDS))
    return KINDS[kind](chooser)


# ---------------------------------------------------------------- no specs


def _bytes(chooser: random.Random) -> Input:
    content = chooser.randbytes(chooser.randint(0, 200))
    if chooser.random() < 0.5:
        place = chooser.randint(0, len(BASE))
        content = BASE[:place].encode() + content + BASE[place + chooser.randint(0, 9) :].encode()
    return Input("bytes", {"spec.dsc": content.decode("latin-1")}, is_binary=True)


def _word(chooser: random.Random) -> str:
    kinds = chooser.choices(tuple(TERMINALS), weights=(6, 4, 1, 8, 1))
    return chooser.choice(TERMINALS[kinds[0]])


def _soup(chooser: random.Random) -> Input:
    gap = chooser.choice(["", " ", " "])
    return Input("soup", {"spec.dsc": gap.join(_word(chooser) for _ in range(chooser.randint(1, 80)))})


# ---------------------------------------------------------------- from the grammar and the schema


def _value(chooser: random.Random, depth: int = 0) -> str:
    """Any value that the grammar knows."""
    if depth > 3 or chooser.random() < 0.5:
        kind = chooser.choice(("NUMBER", "NUMBER", "WORD", "STRING"))
        return chooser.choice(TERMINALS[kind])
    inner = [_value(chooser, depth + 1) for _ in range(chooser.randint(0, 3))] or ["1"]
    form = chooser.randrange(6)
    if form == 0:
        return f"[{', '.join(inner)}]"
    if form == 1:
        return f"({inner[0]})"
    if form == 2:
        return f"train({', '.join(inner)})"
    if form == 3:
        return f"-{inner[0]}" if depth == 0 else inner[0]
    if form == 4:
        return f"{inner[0]}..{inner[-1]}"
    return f" {chooser.choice('+-*/')} ".join((*inner, "2"))


def _statement(chooser: random.Random, depth: int = 0) -> str:
    """Any statement that the grammar knows, in words of the schema where there are some."""
    key = chooser.choice(KEYS)
    form = chooser.randrange(8)
    if form < 3:
        return f"{key} = {' '.join(_value(chooser) for _ in range(chooser.choice((1, 1, 1, 2, 4))))}"
    if form == 3:
        return f"let {chooser.choice(KEYS)} = {_value(chooser)}"
    if form == 4:
        return f"{chooser.choice(('warmup', 'constant', 'cosine', key))} {_value(chooser, 2)} to {_value(chooser, 2)}"
    if form == 5 and depth == 0:
        return f'import "{chooser.choice(("lib.dsc", "spec.dsc", "../lib.dsc", "none.dsc", "/etc/passwd", "a/b.dsc"))}"'
    label = chooser.choice(LABELS)
    body = [_statement(chooser, depth + 1) for _ in range(chooser.randint(0, 4))] if depth < 4 else []
    return f"{key}{label} {{\n{chooser.choice(NEWLINES).join(body)}\n}}"


def _grammar(chooser: random.Random) -> Input:
    text = "\n".join(_statement(chooser) for _ in range(chooser.randint(1, 8)))
    lib = "\n".join(_statement(chooser) for _ in range(2))
    return Input("grammar", {"spec.dsc": text, "lib.dsc": lib})


def _wanted(chooser: random.Random, kind: FieldType) -> str:
    """A value that a field may well take."""
    if kind.form == "phases":
        return chooser.choice(
            ("0.1", "0.3 until 5 steps then 0", "0.3 until 1M tokens then 0.2 until 2M tokens then 0")
        )
    if kind.form == "places":
        return chooser.choice(
            ("[local]", '[local, "../slow"]', '[local, "/mnt/slow", "s3://bucket/x"]', '["a", local]')
        )
    if kind.form == "tokenizer":
        return chooser.choice(('"t.json"', "train(4096)", "train(model.vocab)"))
    if kind.optional and chooser.random() < 0.1:
        return "none"
    for type_ in kind.types:
        if get_origin(type_) is Literal:
            return chooser.choice(get_args(type_))
        if get_origin(type_) is tuple:
            words = get_args(get_args(type_)[0])
            return f"[{', '.join(chooser.sample(words, chooser.randint(0, len(words))))}]"
        if type_ is bool:
            return chooser.choice(("true", "false"))
        if type_ is Fraction:
            return chooser.choice(
                ("9", "8.5", "25 / 3", "1", "0.5", "2.123456", "1 / 7", "3 + 1 / 1_000_001", "[9, 25 / 3]", "[]")
            )
    if kind.unit is not None:
        units = {
            "byte": "GiB",
            "byte/s": "GB/s",
            "flop/s": "TFLOPS",
            "USD/h": "USD/h",
            "s": "min",
            "token": "K tokens",
            "step": " steps",
        }
        return f"{chooser.randint(1, 99)}{units[kind.unit.name]}"
    return chooser.choice(("1", "2", "4", "8", "16", "64", "128", "0.5", "1e-3", "true", "[rmsnorm]", '"x"', "1x128"))


def _block(chooser: random.Random, cls: type[Node], share: float) -> list[str]:
    """Most keys of a schema class, with values that fit."""
    lines = []
    for name, kind in fields_of(cls).items():
        if kind.form == "label" or chooser.random() > share:
            continue
        if kind.form == "rate":
            lines.append(
                "rate { " + chooser.choice(("constant at 1e-3", "warmup 5 steps to 1e-3, cosine to 1e-4")) + " }"
            )
        elif kind.form == "batch":
            lines.append(chooser.choice(("batch = 16", "batch { from = 16, to = 64, over = 10K tokens }")))
        elif kind.form == "layers" or name == "layers":
            ffn = chooser.choice([node for node in _classes(cls, "layers") if "kind" in node.model_fields])
            lines += [
                f"layers 0..3 {{ ffn {ffn.model_fields['kind'].default} {{",
                *_block(chooser, ffn, share),
                "} }",
            ]
        elif kind.form == "entries":
            names = chooser.sample(("a", "b", "long.name", "data"), chooser.randint(0, 3))
            inner = [line for entry in names for line in (f"{entry} {{", *_block(chooser, kind.entry, share), "}")]
            lines += [f"{name} {{", *inner, "}"]
        elif kind.nodes and name in ("model", "cluster", "precision"):
            lines.append(f"{name} = {chooser.choice(('fp32', 'bf16', 'a', 'a')) if name == 'precision' else 'a'}")
        elif kind.nodes and kind.form != "tokenizer" and kind.types[0].__name__ != "Tile":
            node = chooser.choice(kind.nodes)
            if node is cls and chooser.random() < 0.7:  # `more` within `more`, and so on
                continue
            label = node.model_fields["kind"].default if "kind" in node.model_fields else ""
            label = "cpu" if "name" in node.model_fields and fields_of(node)["name"].form == "label" else label
            lines += [f"{name} {label} {{", *_block(chooser, node, share), "}"]
        elif name == "tokens" and chooser.random() < 0.5:
            lines.append(f"steps = {chooser.randint(1, 99)}")
        else:
            opened = name in OPENED and chooser.random() < 0.2
            lines.append(f"{name} = {'auto' if opened else _wanted(chooser, kind)}")
    return lines


def _classes(cls: type[Node], name: str) -> tuple[type[Node], ...]:
    """The classes of the feed-forward part of a layer range."""
    from dsl.schema import LayerRange

    return fields_of(LayerRange)["ffn"].nodes if name == "layers" else fields_of(cls)[name].nodes


def _schema(chooser: random.Random) -> Input:
    share = chooser.choice((0.8, 0.95, 1.0))
    kinds = fields_of(Spec)
    text = "\n".join(
        "\n".join((f"{kind} a {{", *_block(chooser, cls, share), "}"))
        for kind, cls in (("run", Spec), *((kind, kinds[kind].nodes[0]) for kind in NAMED))
    )
    return Input("schema", {"spec.dsc": text})


# ---------------------------------------------------------------- changed specs


def _mutated(chooser: random.Random, text: str, times: int) -> str:
    """A spec with some words or lines dropped, doubled, swapped, replaced, or numbers at their extremes."""
    for _ in range(times):
        text = chooser.choice(CHANGES)(chooser, text)
    return text


def _change_word(chooser: random.Random, text: str) -> str:
    words = list(tokens(text))
    if not words:
        return text
    word, other_word = chooser.choice(words), chooser.choice(words)
    new = chooser.choice(("", f"{word.text} {word.text}", other_word.text, _word(chooser), other_word.text))
    return text[: word.start] + new + text[word.end :]


def _change_number(chooser: random.Random, text: str) -> str:
    numbers = [word for word in tokens(text) if word.type == "NUMBER"]
    if not numbers:
        return text
    word = chooser.choice(numbers)
    return text[: word.start] + chooser.choice(EXTREMES) + text[word.end :]


def _change_line(chooser: random.Random, text: str) -> str:
    lines = text.split("\n")
    first, second = chooser.randrange(len(lines)), chooser.randrange(len(lines))
    change = chooser.randrange(4)
    if change == 0:
        del lines[first]
    elif change == 1:
        lines.insert(second, lines[first])
    elif change == 2:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines.insert(first, _statement(chooser, 2))
    return "\n".join(lines)


def _change_letter(chooser: random.Random, text: str) -> str:
    place = chooser.randint(0, len(text))
    return (
        text[:place] + chooser.choice(("", "x", "_", "\u00e9", "\u0000", "{", "}", '"', ".", "0")) + text[place + 1 :]
    )


def _splice(chooser: random.Random, text: str) -> str:
    donor = chooser.choice(SEEDS)
    return text[: chooser.randint(0, len(text))] + donor[chooser.randint(0, len(donor)) :][:1500]


def _change(chooser: random.Random) -> Input:
    text = chooser.choice(SEEDS)
    return Input("mutated", {"spec.dsc": _mutated(chooser, text, chooser.choice((1, 1, 2, 3, 6)))})


def _numbers(chooser: random.Random) -> Input:
    text = chooser.choice(SEEDS)
    for _ in range(chooser.choice((1, 1, 2, 3))):
        text = _change_number(chooser, text)
    return Input("numbers", {"spec.dsc": text})


def _composed(chooser: random.Random) -> Input:
    """A spec over an imported one, both perhaps with mistakes."""
    lib = _mutated(chooser, BASE, chooser.choice((0, 0, 1, 2)))
    lines = [_statement(chooser, 2) for _ in range(chooser.randint(0, 2))]
    kind = chooser.choice(("run", "run", "model", "cluster"))
    body = "\n".join(lines)
    name = "four" if kind == "cluster" else "base"
    text = f'import "lib.dsc"\nrun new extends base {{ }}\n{kind} {name} {{\n{body}\n}}\n'
    return Input("composed", {"spec.dsc": text, "lib.dsc": lib})


def _overrides(chooser: random.Random) -> Input:
    overrides = []
    for _ in range(chooser.randint(1, 3)):
        parts = chooser.choice(PATHS).split(".")
        if chooser.random() < 0.2:
            parts[chooser.randrange(len(parts))] = chooser.choice(("0", "1", "99", "x", "", "layers", "\u00e9"))
        sign = chooser.choice(("=", "=", "=", " = ", " ", "==", " x {"))
        value = chooser.choice((_value(chooser), chooser.choice(EXTREMES), _word(chooser)))
        overrides.append(f"{'.'.join(parts)}{sign}{value}")
    return Input("overrides", {"spec.dsc": chooser.choice((BASE, SPECS[0]))}, tuple(overrides))


def _paths(cls: type[Node], prefix: str = "", depth: int = 0) -> list[str]:
    """The paths of a spec's keys."""
    paths = []
    for key in keys_of(cls):
        kind = fields_of(cls).get(key)
        form = kind.form if kind is not None else ""
        inner = f"{prefix}{key}" + (f".{depth % 2}" if form in ("layers", "rate") else "")
        paths.append(inner)
        inner += ".a" * (form == "entries")
        for node in (kind.entry,) if form == "entries" else kind.nodes if kind is not None and depth < 5 else ():
            paths += _paths(node, f"{inner}.", depth + 1)
    return paths


NEWLINES = ("\n", "\n", ", ", " , ", "\n\n", " ")
OPENED = {path.rpartition(".")[2] for path in OPEN} | {"data", "layout"}  # keys that may be `auto`
PATHS = tuple(dict.fromkeys(_paths(Spec)))
KEYS = tuple(dict.fromkeys((*(part for path in PATHS for part in path.split(".")), "run", "let", "a", "steps", "ffn")))
CHANGES = (_change_word, _change_word, _change_number, _change_line, _change_line, _change_letter, _splice)
KINDS: dict[str, Callable[[random.Random], Input]] = {
    "bytes": _bytes,
    "soup": _soup,
    "grammar": _grammar,
    "schema": _schema,
    "mutated": _change,
    "numbers": _numbers,
    "composed": _composed,
    "overrides": _overrides,
}
