"""Generate the pages of docs/reference about the language, as Markdown: keys, units, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsl.reference.keys import BlockKey, BlockKeys, blocks, documented_path
from dsl.reference.lessons import COMMAND, Example, lesson
from dsl.reference.topics import BATCH, FAMILIES, GROUPS, WORDS, LanguageWord, UnitTopic, family, sample
from dsl.rules.codes import CODES
from dsl.schema import BUILT_IN

GENERATED = "<!-- Written by `make docs`; do not edit. -->\n\n"


def keys_page() -> str:
    """The page of all blocks and keys, in the order of the schema."""
    named = ", ".join(f"`{name}`" for name in BUILT_IN)
    parts = [
        f"{GENERATED}# Blocks and keys\n",
        "All blocks and keys of a spec. A key without a default must be given. `dsc explain KEY` prints the same for "
        "one",
        "key; [units.md](units.md) lists the units, [errors.md](errors.md) explains the codes.\n",
        *(f"- [{block.path}](#{slug(block.path)}): {_first_sentence(block.meaning)}" for block in blocks()),
        "- [words](#words): phases, and the other words of the language\n",
        *(_block_section(block) for block in blocks()),
        f"{named} are built-in precisions and need no block.\n",
        "## words\n",
        _table_text(("word", "means", "example"), (_word_cells(word) for word in WORDS)),
        *(f"[{code}]: errors.md#{slug(code)}" for code in CODES),
    ]
    return "\n".join(parts) + "\n"


def units_page() -> str:
    """The page of all units with their exact values."""
    parts = [
        f"{GENERATED}# Units\n",
        "A unit follows its number without a space (`80GB`, `2USD/h`); only `tokens`, `steps` and `bytes` may follow a",
        "space. Values are exact: no decimal is rounded before it reaches its key. `B` after a number is a count of "
        "10⁹,",
        "after a prefix a byte; `b` is a bit. K, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024. A rate is a unit",
        "over a time, without spaces (`3.35TB/s`, `60GB/min`); with spaces, `/` divides.\n",
    ]
    for name in FAMILIES:
        parts += [f"## {name}\n", _table_text(("unit", "exact value"), (_unit_cells(topic) for topic in family(name)))]
    return "\n".join(parts)


def errors_page(messages: Mapping[str, str]) -> str:
    """The page of all codes, each with its rule, its lesson, and the message about its wrong example in `messages`."""
    parts = [
        f"{GENERATED}# Errors\n",
        "Every message of `dsc check` has a code, which is never reused for another rule. `dsc explain CODE` explains",
        "it. The examples are files `mine.dsc` in the folder of the shipped [specs](../../specs).\n",
        *(
            f"- [{title}](#{slug(title)}): {', '.join(f'[{code}]' for code in _codes_in(group))}"
            for group, title in GROUPS.items()
        ),
    ]
    for group, title in GROUPS.items():
        parts += [f"\n## {title}", *(_lesson_section(code, messages[code]) for code in _codes_in(group))]
    parts += ["", *(f"[{code}]: #{slug(code)}" for code in CODES)]
    return "\n".join(parts)


def _codes_in(group: str) -> list[str]:
    return [code for code in CODES if code.startswith(group)]


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ---------------------------------------------------------------- keys


def _block_section(block: BlockKeys) -> str:
    rows = ((f"`{key.name}`", _takes_text(key), key.default or "", key.meaning) for key in block.keys)
    parts = [f"## {block.path}\n", f"`{block.head} {{ … {block.closing}`: {block.meaning}\n"]
    parts += [_table_text(("key", "takes", "default", "meaning"), rows)]
    if block.path == "train":
        parts += [
            "`batch { … }` has the keys\n",
            _table_text(("key", "meaning", "example"), (_word_cells(word) for word in BATCH)),
        ]
    parts += [*_choices_text(block), *_rules_text(block)]
    parts += [f"```dsc\n{sample(block)}\n```\n"]
    return "\n".join(parts)


def _takes_text(key: BlockKey) -> str:
    # the block itself, or those of its kinds; inner blocks have other heads
    key_path = documented_path(key.path)
    inner = [block for block in blocks() if f"{block.path}.".startswith(f"{key_path}.")]
    paths = [
        block.path
        for block in inner
        if block.head.split()[0] == key.name and block.path.count(".") < key_path.count(".") + 2
    ]
    if key.takes.startswith("block") and paths:
        kinds = [path.removeprefix(key_path).lstrip(".") or key.takes for path in paths]
        links = (f"[{kind}](#{slug(path)})" for kind, path in zip(kinds, paths, strict=True))
        return ("block " * (len(paths) > 1)) + " or ".join(links)
    return key.value + (f"; {key.unit}" if key.unit else "")


def _choices_text(block: BlockKeys) -> Iterator[str]:
    """Yield the choices with their meanings, once for all keys that share them."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for key in block.keys:
        if key.choices and not key.takes.startswith("block"):
            groups.setdefault(key.choices, []).append(f"`{key.name}`")
    for choices, names in groups.items():
        yield f"{', '.join(names)}: one of\n"
        yield "".join(f"- `{word}`: {meaning}\n" for word, meaning in choices)


def _rules_text(block: BlockKeys) -> Iterator[str]:
    ruled_keys = [key for key in block.keys if key.codes]
    if ruled_keys:
        yield "Rules:\n"
        yield "".join(f"- `{key.name}`: {', '.join(f'[{code}]' for code in key.codes)}\n" for key in ruled_keys)


# ---------------------------------------------------------------- errors


def _lesson_section(code: str, message: str) -> str:
    taught = lesson(code)
    special = {taught.wrong.command, taught.right.command} != {COMMAND}
    parts = [f"### {code}", f"**{taught.rule}**", taught.why, "Wrong:", _example_text(taught.wrong, special)]
    parts += [f"```text\n{message}\n```", "Right:", _example_text(taught.right, special)]
    return "\n" + "\n\n".join(parts)


def _example_text(lesson_example: Example, with_command: bool) -> str:
    command = f"\n\n```sh\n{lesson_example.command}\n```" if with_command else ""
    return f"```dsc\n{lesson_example.abridged}```{command}"


# ---------------------------------------------------------------- tables


def _unit_cells(topic: UnitTopic) -> tuple[str, str]:
    return f"`{topic.text}`", topic.exact_value


def _word_cells(word: LanguageWord) -> tuple[str, ...]:
    return f"`{word.text}`", word.meaning, f"`{word.example}`"


def _table_text(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _first_sentence(text: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[^A-Z0-9])[.:;] ", text, maxsplit=1)[0].rstrip(".")
