"""What other training systems call the keys and words of the language, for hints and `dsc explain`.

No spec may use these names: one thing has one name. A word is looked up as it is written, without regard to case.
"""

from __future__ import annotations

from dsl.facts.vocabulary.keys_of_others import KEYS
from dsl.facts.vocabulary.words_of_others import ABSENT, OTHERS, SAME, WORDS, Other
from dsl.messages.diagnostics import listed

__all__ = ["ABSENT", "KEYS", "OTHERS", "SAME", "WORDS", "Other"]


def places(word: str) -> tuple[str, ...]:
    """The paths of the keys here that a key of others stands for."""
    name = word.lower()
    return KEYS.get(name) or ((OTHERS[name].path,) if name in OTHERS else ())


def topics(word: str) -> tuple[str, ...]:
    """What to explain for a key or word of others."""
    found = (table.get(word.lower()) for table in (OTHERS, WORDS))
    others = dict.fromkeys(each.topic or each.path for each in found if each is not None)
    return KEYS.get(word.lower()) or tuple(others)


def hint_of(word: str) -> str:
    """What to write for a key or word of others that is said in another way here; "" for the rest."""
    found = OTHERS.get(word.lower()) or WORDS.get(word.lower())
    return found.hint.replace("{}", "…") if found is not None else ABSENT.get(word.lower(), "")


def key_in(word: str, block: str) -> str:
    """The key of the block at a path that takes what a key of others does; "" if there is none."""
    paths = (path.rpartition(".") for path in KEYS.get(word.lower(), ()))
    return next((key for parent, _, key in paths if parent == block), "")


def said_in(word: str, block: str, value: str) -> str:
    """What to write in the block at a path for a key of others, with the value it was given; "" if that is unknown."""
    other = OTHERS.get(word.lower())
    is_here = other is not None and block == other.path.rpartition(".")[0]
    return other.hint.replace("{}", value) if other is not None and is_here else ""


def said_elsewhere(word: str, value: str) -> str:
    """What to say of a key of others that stands in a block where nothing takes what it says; "" if that is unknown."""
    other = OTHERS.get(word.lower())
    if other is not None:
        hint = other.hint.replace("{}", value)
        return hint if other.is_derived else f"in `{other.path.rpartition('.')[0]}`, {hint}"
    paths = KEYS.get(word.lower(), ())
    return f"here it is {listed(paths, 'or')}" if paths else ABSENT.get(word.lower(), "")


def word_at(word: str, path: str) -> str:
    """What to write for a word of others that stands at a path; "" if that is unknown."""
    other = WORDS.get(word.lower())
    return other.hint if other is not None and other.path == path else ""
