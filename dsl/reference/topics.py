"""Topics of `dsc explain WORD`: lessons, blocks, keys, words, choices, precisions and units, as data and as text."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from dsl.canonical import INDENT, block_lines
from dsl.facts import units, vocabulary
from dsl.facts.units import BINARY, COUNTS, DECIMAL, TIMES
from dsl.reference.keys import BlockKey, BlockKeys, blocks, documented_path, keys, related_key_paths, without_kinds
from dsl.reference.lessons import COMMAND, Example, lesson
from dsl.rules.codes import CODES, RETIRED
from dsl.rules.precision import ALL_ROLES, ROLES
from dsl.schema import BUILT_IN, RECIPES

# --- Words and units of the language that are no keys


@dataclass(frozen=True)
class LanguageWord:
    text: str
    meaning: str
    example: str
    see: tuple[str, ...] = ()


RATE, PHASES = ("train.rate",), ("mtp.weight", "balance.bias_rate")
WORDS: tuple[LanguageWord, ...] = (
    LanguageWord(
        "import", "imports the definitions of another file; the path is relative to this file", 'import "tiny.dsc"'
    ),
    LanguageWord("let", "names a value, for use in arithmetic and references", "let width = 64"),
    LanguageWord("extends", "a block inherits the keys of another one of its kind", "run mine extends tiny { }"),
    LanguageWord(
        "phase",
        "a block of a run: the keys that change when the previous phase ends",
        "phase long { train { sequence = 64, batch = 2, steps = 4 } }",
        ("train.sequence", "train.batch", "train.rate"),
    ),
    LanguageWord(
        "auto",
        "the value is derived from others, or chosen by the planner",
        "parallel { data = auto }",
        ("parallel.data",),
    ),
    LanguageWord("none", "no value, for keys that allow it", "optimizer adamw { clip = none }"),
    LanguageWord(
        "train(entries)",
        "a byte-level BPE tokenizer with this many entries, trained on the data",
        "tokenizer = train(4096)",
        ("data.tokenizer",),
    ),
    LanguageWord(
        "python_stdlib",
        "the source files of the Python standard library in use",
        "source = python_stdlib",
        ("data.source",),
    ),
    LanguageWord(
        "warmup", "a phase of the learning rate: linear from 0 to a rate", "warmup 2000 steps to 2.2e-4", RATE
    ),
    LanguageWord("linear", "a phase of the learning rate: linear", "linear to 0 over 1T tokens", RATE),
    LanguageWord("constant", "a phase of the learning rate: constant", "constant until 10T tokens", RATE),
    LanguageWord(
        "cosine", "a phase of the learning rate: half a period of a cosine", "cosine to 2.2e-5 over 4.3T tokens", RATE
    ),
    LanguageWord("from", "rate or batch at the beginning", "linear from 1e-5 to 1e-3 over 100 steps", RATE),
    LanguageWord("to", "rate or batch at the end", "cosine to 2.2e-5", RATE),
    LanguageWord("at", "the rate of a constant phase", "constant at 7.3e-6", RATE),
    LanguageWord(
        "until",
        "end of a phase, counted from the beginning of the run",
        "constant until 10T tokens",
        (*RATE, *PHASES),
    ),
    LanguageWord(
        "over", "length of a phase, counted from the end of the previous one", "cosine to 2.2e-5 over 4.3T tokens", RATE
    ),
    LanguageWord("then", "the value after the end of a phase", "weight = 0.3 until 10T tokens then 0.1", PHASES),
    LanguageWord("tokens", "a number of tokens", "constant until 10T tokens", ("train.tokens",)),
    LanguageWord(
        "steps",
        "a number of optimizer steps, converted to tokens by the batch",
        "warmup 2000 steps to 2.2e-4",
        ("train.steps",),
    ),
)
# The keys of `batch { … }`, which have other names in the schema.
BATCH: tuple[LanguageWord, ...] = (
    LanguageWord("from", "sequences per step at the beginning", "from = 3072"),
    LanguageWord("to", "sequences per step when the batch has grown", "to = 15360"),
    LanguageWord("over", "tokens over which it grows", "over = 469B tokens"),
)


@dataclass(frozen=True)
class UnitTopic:
    """A unit, equal to `value` of `base`."""

    text: str
    value: Fraction
    base: str

    @property
    def exact_value(self) -> str:
        """The exact value: `2^30 = 1,073,741,824 bytes`."""
        if self.value < 1:
            return f"{self.value.numerator}/{self.value.denominator:,} {self.base}".rstrip()
        power = self.value.numerator.bit_length() - 1
        binary = f"2^{power} = " if power >= 10 and self.value == 2**power else ""
        return f"{binary}{int(self.value):,} {self.base}".rstrip()


FAMILIES = ("counts", "bytes", "bits", "rates", "compute", "time", "money", "words of the language")


def unit(text: str) -> UnitTopic | None:
    """The topic of a unit; None if there is no such unit."""
    quantity = units.unit(text) if text else None
    if quantity is None:
        return None
    base = "" if quantity.dimension == units.PLAIN else units.dimension_words(quantity.dimension)
    return UnitTopic(text, quantity.value, base)


def family(name: str) -> tuple[UnitTopic, ...]:
    """The units of a family, smallest first; of rates, only those per second."""
    small, large = list(DECIMAL), list(BINARY)
    names = {
        "counts": [*COUNTS],
        "bytes": ["bytes", *(f"{prefix}B" for prefix in (*small, *large) if prefix)],
        "bits": ["bit", *(f"{prefix}b" for prefix in (*small, *large) if prefix)],
        "rates": [
            f"{prefix}{suffix}/s" for suffix in ("B", "b") for prefix in ("k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti")
        ],
        "compute": [*(f"{prefix}FLOP" for prefix in small), *(f"{prefix}FLOPS" for prefix in small)],
        "time": [*TIMES],
        "money": ["USD", "USD/h"],
        "words of the language": ["tokens", "steps", "bytes"],
    }[name]
    topics = [unit(text) for text in names]
    return tuple(sorted((topic for topic in topics if topic), key=lambda topic: (topic.base, topic.value)))


# --- topics

WIDTH = 100
MAX_RELATED = 8
GROUPS = {  # first characters of codes → subject
    "E01": "text",
    "E02": "keys and blocks",
    "E03": "values",
    "E04": "names",
    "E05": "files and command line",
    "E07": "layers and phases",
    "E08": "parallelism",
    "E09": "model, precision, data and devices",
    "E10": "valid, but not supported yet",
}


@dataclass(frozen=True)
class Topic:
    """One result of `dsc explain`."""

    kind: str  # code, block, key, word, choice, precision or unit
    name: str
    summary: str
    text: str = ""  # paragraphs
    facts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (label, lines)
    examples: tuple[tuple[str, str], ...] = ()  # (label, text)
    see: tuple[str, ...] = ()  # related topics


def find(query: str) -> tuple[Topic, ...]:
    """Return all topics for a word, exact matches first; empty if there are none."""
    word = query.strip().strip("`")
    if word.upper() in CODES:
        return (_code_topic(word.upper()),)
    if word.upper() in RETIRED:
        return (Topic("code", word.upper(), f"retired: {RETIRED[word.upper()]}"),)
    topics = [*_block_and_key_topics(word)]
    topics += [_word_topic(entry) for entry in (*WORDS, *BATCH) if word in (entry.text, entry.text.partition("(")[0])]
    topics += [_precision_topic(word)] if word in BUILT_IN else []
    topics += [*_choice_topics(word)]
    unit_topic = unit(word)
    topics += [_unit_topic(unit_topic)] if unit_topic and not word[0].isdigit() else []
    return tuple(topics) or _foreign_topics(word)


def _foreign_topics(word: str) -> tuple[Topic, ...]:
    """Topics for a key or word of another system: what to use instead, followed by the topics of that key or block."""
    places = vocabulary.topics_of(word)
    if word.lower() in vocabulary.ABSENT:
        return (Topic("word", word, vocabulary.hint_of(word)),)
    if not places:
        synonym = vocabulary.SYNONYMS.get(word.lower(), "")
        topics = find(synonym) if synonym else ()
        topic = Topic("word", word, f"`{synonym}` is the word for it here", see=(synonym,) if topics else ())
        return (topic, *topics) if synonym else ()
    hint = vocabulary.hint_of(word)
    names = " or ".join(f"`{path}`" for path in places)
    topic = Topic("word", word, f"here it is {names}", f"{hint[:1].upper()}{hint[1:]}", see=places)
    return (topic, *(inner_topic for path in places for inner_topic in find(path)))


def suggestions(query: str) -> tuple[str, ...]:
    """Topics that may have been meant by an unknown word."""
    folded = {name.lower(): name for name in sorted(names_of_topics(), reverse=True)}  # GiB rather than Gib
    close_names = get_close_matches(query.lower(), folded, n=3, cutoff=0.6)
    close_last_parts = get_close_matches(query.lower().rpartition(".")[2], folded, n=3, cutoff=0.6)
    return tuple(folded[name] for name in close_names or close_last_parts)


def names_of_topics() -> frozenset[str]:
    """All words that `find` knows, including the last parts of paths; of units, only the usual ones."""
    paths = {
        path
        for key_path in (*keys(), *(block.path for block in blocks()))
        for path in (key_path, without_kinds(key_path))
    }
    words = {word.text.partition("(")[0] for word in (*WORDS, *BATCH)}
    choices = {word for key in keys().values() for word, _ in key.choices}
    measures = {topic.text for name in FAMILIES for topic in family(name)}
    return frozenset(
        {*CODES, *RETIRED, *paths, *(path.rpartition(".")[2] for path in paths), *words, *choices, *BUILT_IN, *measures}
    )


# ---------------------------------------------------------------- blocks and keys
def _block_and_key_topics(word: str) -> list[Topic]:
    """Blocks and keys whose path is, or ends in, a word; kinds and numbers may be left out."""
    wanted = [
        part for part in documented_path(word).removeprefix("run.").split(".") if part != "*" and not part.isdigit()
    ]
    exact, ending = [], []
    entries: list[tuple[str, BlockKeys | BlockKey]] = [(block.path, block) for block in blocks()]
    entries += [(key.path, key) for key in keys().values() if not key.is_block or key.choices]
    for path, entry in entries:
        parts = [path.split("."), without_kinds(path).split(".")]
        if wanted in parts:
            exact.append(entry)
        elif wanted and (
            any(split_path[-len(wanted) :] == wanted for split_path in parts) or _is_within(wanted, parts[0])
        ):
            ending.append(entry)
    see_also = tuple(entry.path for entry in ending) if exact else ()
    return [
        _key_topic(entry, see_also) if isinstance(entry, BlockKey) else _block_topic(entry, see_also)
        for entry in exact or ending
    ]


def _is_within(parts: list[str], path: list[str]) -> bool:
    """Whether a path has all `parts` in order, and the same last part: attention.rank."""
    remaining = iter(path)
    return len(parts) > 1 and path[-1] == parts[-1] and all(part in remaining for part in parts)


def _block_topic(block: BlockKeys, related_paths: tuple[str, ...]) -> Topic:
    key_lines = tuple(f"{key.name:<{max(len(k.name) for k in block.keys)}}  {key.meaning}" for key in block.keys)
    block_key = next(
        (key for key in keys().values() if key.is_block and without_kinds(key.path) == without_kinds(block.path)), None
    )
    facts: list[tuple[str, tuple[str, ...]]] = [("written", (f"{block.head} {{ … {block.closing}",))]
    facts += [("default", (_remove_backquotes(block_key.default),))] if block_key and block_key.default else []
    facts += [("keys", key_lines)]
    facts += [("built in", _aligned_lines(tuple(RECIPES.items())))] if block.path == "precision" else []
    facts += [("rules", _rule_lines(block_key.codes))] if block_key and block_key.codes else []
    inner = tuple(inner_block.path for inner_block in blocks() if inner_block.path.startswith(f"{block.path}."))
    return Topic(
        "block", block.path, block.meaning, "", tuple(facts), (("example", sample(block)),), (*related_paths, *inner)
    )


def sample(block: BlockKeys) -> str:
    """The text of a block with an example of each key."""
    example_lines = "\n".join(
        f"  {line}" for key in block.keys if key.name != "steps" for line in (first_example(key),)
    )
    heads = {"NAME": "mine", "FIRST..LAST": "0..2"}
    head = " ".join(heads.get(part, part) for part in block.head.split())
    return f"{head} {{\n{example_lines}\n{block.closing}"


def first_example(key: BlockKey) -> str:
    """The first example of a key."""
    assert key.examples, key.path
    return key.examples[0]


def _key_topic(key: BlockKey, related_paths: tuple[str, ...]) -> Topic:
    facts: list[tuple[str, tuple[str, ...]]] = [("takes", (_remove_backquotes(key.value),))]
    facts += [("unit", (_remove_backquotes(key.unit),))] if key.unit else []
    facts += [("choices", _aligned_lines(key.choices))] if key.choices else []
    facts += [("default", (_remove_backquotes(key.default) or "must be given",))]
    facts += [("override", (_override_text(key),))] if _override_text(key) else []
    facts += [("rules", _rule_lines(key.codes))] if key.codes else []
    examples = tuple(("example", text) for text in key.examples)
    phases = tuple(word.text for word in WORDS if key.path in word.see)
    see_also = (*related_paths, *related_key_paths(key)[:MAX_RELATED], *phases)
    return Topic("key", key.path, key.meaning, "", tuple(facts), examples, tuple(dict.fromkeys(see_also)))


NAMED_ENTRIES = {"data.sources": "web", "train.grpo.rewards": "correct"}  # path → name of an example entry


def _override_text(key: BlockKey) -> str:
    """The `-s` override of a key; empty for keys of layer ranges and for blocks, which `-s` does not set by this
    path."""
    name, equals, value = key.examples[0].partition(" = ")
    path = without_kinds(key.path)
    for entries, entry in NAMED_ENTRIES.items():
        path = path.replace(f"{entries}.", f"{entries}.{entry}.")
    return f"-s {shlex.quote(f'{path}={value}')}" if equals and name == key.name and "layers" not in key.path else ""


def _rule_lines(codes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{code}  {CODES[code]}" for code in codes)


def _aligned_lines(rows: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    width = max(len(word) for word, _ in rows)
    return tuple(f"{word:<{width}}  {meaning}" for word, meaning in rows)


def _remove_backquotes(text: str) -> str:
    """Text without Markdown backquotes."""
    return text.replace("`", "")


# ---------------------------------------------------------------- codes and words
def _code_topic(code: str) -> Topic:
    taught = lesson(code)
    special = {taught.wrong.command, taught.right.command} != {COMMAND}
    examples = tuple(
        (label, example_text(snippet, special)) for label, snippet in (("wrong", taught.wrong), ("right", taught.right))
    )
    about = tuple(key.path for key in keys().values() if code in key.codes)
    return Topic("code", code, taught.rule, taught.why, (), examples, about[:MAX_RELATED])


def example_text(lesson_example: Example, with_command: bool) -> str:
    """The printed text of an example."""
    return lesson_example.abridged.rstrip("\n") + (f"\n\n$ {lesson_example.command}" if with_command else "")


def _word_topic(word: LanguageWord) -> Topic:
    kind = "key" if word in BATCH else "word"
    name = f"train.batch.{word.text}" if word in BATCH else word.text
    return Topic(
        kind, name, word.meaning, "", (), (("example", word.example),), word.see or (("train.batch",) * (word in BATCH))
    )


def _choice_topics(word: str) -> Iterator[Topic]:
    """Yield a topic for each meaning of a word that keys take; kinds of blocks are topics of their own."""
    meanings: dict[str, list[BlockKey]] = {}
    for key in keys().values():
        for choice, meaning in key.choices:
            if choice == word and not key.is_block and _is_for(word, key):
                meanings.setdefault(meaning, []).append(key)
    for meaning, takers in meanings.items():
        examples = (
            (("example", f"{takers[0].name} = {word}"),)
            if "list" not in takers[0].takes
            else (("example", f"{takers[0].name} = [{word}]"),)
        )
        yield Topic(
            "choice",
            word,
            meaning,
            "",
            (("choice of", tuple(textwrap.wrap(", ".join(key.path for key in takers), WIDTH - 12))),),
            examples,
        )


def _is_for(word: str, key: BlockKey) -> bool:
    """Whether a key accepts a word: most roles of a precision reject low-precision dtypes."""
    role = key.path.removeprefix("precision.")
    return word not in ROLES or role not in ALL_ROLES or role in ROLES[word][2]


def _precision_topic(name: str) -> Topic:
    written = [line.text.removeprefix(INDENT) for line in block_lines("precision", BUILT_IN[name])][1:-1]
    return Topic(
        "precision",
        name,
        f"a built-in precision; {RECIPES[name]}",
        "",
        (("says", tuple(written)),),
        (("example", f"precision = {name}"),),
        ("precision",),
    )


def _unit_topic(topic: UnitTopic) -> Topic:
    kind = topic.base or "a count"
    meaning = (
        {"a count": "a count; after a prefix it is bytes, as in GB"}.get(kind, kind) if topic.text == "B" else kind
    )
    facts = (("is exactly", (topic.exact_value,)),)
    sample_text = (
        f"10 {topic.text}" if topic.text in ("tokens", "steps", "token", "step", "bytes", "byte") else f"10{topic.text}"
    )
    return Topic("unit", topic.text, f"a unit: {meaning}", "", facts, (("example", sample_text),))


# ---------------------------------------------------------------- text
def text_of(topic: Topic) -> str:
    """Return a topic as plain text, without a final newline."""
    lines = [f"{topic.name}: {topic.summary}"]
    for paragraph in filter(None, topic.text.split("\n\n")):
        lines += ["", _wrap_paragraph(" ".join(paragraph.split()))]
    width = max((len(label) for label, _ in topic.facts), default=0)
    for label, values in topic.facts:
        lines += [""] if label == topic.facts[0][0] else []
        lines += [f"  {label if not index else '':<{width}}  {value}" for index, value in enumerate(values)]
    for index, (label, text) in enumerate(topic.examples):
        heading = [] if index and label == topic.examples[index - 1][0] else ["", f"{label}:"]
        lines += [*heading, textwrap.indent(text, "    ")]
    if topic.see:
        lines += ["", _wrap_paragraph(f"see also: {', '.join(topic.see)}")]
    return "\n".join(re.sub(" +$", "", line) for line in lines)


def _wrap_paragraph(text: str) -> str:
    """Wrap a paragraph, without breaking text in backquotes."""
    unbroken = re.sub(r"`[^`]{1,60}`", lambda quoted: quoted[0].replace(" ", "\xa0"), text)
    return textwrap.fill(unbroken, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\xa0", " ")


def index() -> str:
    """Return the index that `dsc explain` prints: all codes by group, and the blocks with their keys."""
    lines = ["dsc explain CODE | KEY | WORD", ""]
    for group, title in GROUPS.items():
        lines += [title, *(f"  {code}  {rule}" for code, rule in CODES.items() if code.startswith(group)), ""]
    width = max(len(block.path) for block in blocks())
    lines += ["blocks and their keys"]
    for block in blocks():
        listed = textwrap.wrap(", ".join(key.name for key in block.keys), WIDTH - width)
        lines += [f"  {block.path if not i else '':<{width}}  {line}" for i, line in enumerate(listed)]
    return "\n".join(lines)
