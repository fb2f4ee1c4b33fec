"""Documentation of keys and blocks as Markdown, from the language reference."""

from __future__ import annotations

from dsl.reference.keys import blocks, keys
from dsl.reference.topics import WORDS


def key(path: str) -> str:
    """The meaning, values and default of a key; "" if there is no such key."""
    entry = keys().get(path)
    if entry is None:
        return ""
    facts = [entry.takes, entry.unit, entry.bounds, f"default: {entry.default}" if entry.default else "required"]
    lines = [entry.meaning, " · ".join(fact for fact in facts if fact)]
    lines += ["\n".join(f"- `{word}`: {meaning}" for word, meaning in entry.choices)] if entry.choices else []
    lines += [_code("\n".join(entry.examples))] if entry.examples else []
    return "\n\n".join(line for line in lines if line)


def choice(path: str, word: str) -> str:
    """The meaning of a word as the value of a key; "" if it is unknown."""
    entry = keys().get(path)
    return dict(entry.choices).get(word, "") if entry is not None else ""


def block(path: str) -> str:
    """The meaning of a block; "" if there is none at that path."""
    return next((entry.meaning for entry in blocks() if entry.path == path), "")


def word(name: str) -> str:
    """The meaning of a word of the language, with an example."""
    entry = next(entry for entry in WORDS if entry.text == name)
    return f"{entry.meaning}\n\n{_code(entry.example)}"


def title(name: str, meaning: str) -> str:
    return f"**{name}**" + (f"\n\n{meaning}" if meaning else "")


def _code(text: str) -> str:
    return f"```dsc\n{text}\n```"
