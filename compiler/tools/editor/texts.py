"""Documentation of keys and blocks as Markdown, from the language reference."""

from __future__ import annotations

from dsl.reference.keys import blocks, keys
from dsl.reference.topics import WORDS


def key(path: str) -> str:
    """The meaning, values and default of a key; "" if there is no such key."""
    found = keys().get(path)
    if found is None:
        return ""
    facts = [found.takes, found.unit, found.bounds, f"default: {found.default}" if found.default else "required"]
    lines = [found.meaning, " · ".join(fact for fact in facts if fact)]
    lines += ["\n".join(f"- `{word}`: {meaning}" for word, meaning in found.choices)] if found.choices else []
    lines += [_code("\n".join(found.examples))] if found.examples else []
    return "\n\n".join(line for line in lines if line)


def choice(path: str, word: str) -> str:
    """The meaning of a word as the value of a key; "" if it is unknown."""
    found = keys().get(path)
    return dict(found.choices).get(word, "") if found is not None else ""


def block(path: str) -> str:
    """The meaning of a block; "" if there is none at that path."""
    return next((each.meaning for each in blocks() if each.path == path), "")


def word(name: str) -> str:
    """The meaning of a word of the language, with an example."""
    found = next(each for each in WORDS if each.text == name)
    return f"{found.meaning}\n\n{_code(found.example)}"


def title(name: str, meaning: str) -> str:
    return f"**{name}**" + (f"\n\n{meaning}" if meaning else "")


def _code(text: str) -> str:
    return f"```dsc\n{text}\n```"
