"""`dsc explain [CODE | KEY | WORD]`: what an error code, a key, a block, a word or a unit means. Alone: all of them.

dsc explain E0802                  the rule, why it is one, a wrong and a right example
dsc explain parallel.expert        what it takes, its bounds and default, the rules that read it
dsc explain train                  the keys of a block
dsc explain GiB                    a unit, exactly

Exit codes: 0 done · 2 the word means nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from compiler.cli.commands.common import wrong
from dsl.reference import Topic, find, index, keys, suggestions, text_of
from dsl.rules.codes import CODES, MORE
from dsl.rules.codes import FILE_CODES as FILE_CODES

VERSION = 1  # of the JSON, docs/json.md
SHOWN = 4  # topics that are printed whole; of more, one line each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "an error code, a key or block as it is nested, a word of the language, a unit; default: list them"
    parser.add_argument("topic", nargs="?", metavar="CODE|KEY", help=text)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Print what is known; 0, or 2 where the word means nothing."""
    if args.topic is None:
        listed = {"version": VERSION, "codes": CODES, "keys": {path: key.meaning for path, key in keys().items()}}
        print(json.dumps(listed, indent=2, ensure_ascii=False) if args.format == "json" else index())
        return 0
    topics = find(args.topic) or _of_files(args.topic)
    if not topics:
        close = " or ".join(f"`{name}`" for name in suggestions(args.topic))
        hint = f"did you mean {close}?" if close else "`dsc explain` lists codes and keys"
        return wrong(f"there is no code, key or word `{_shown(args.topic)}`", hint, args.format)
    if args.format == "json":
        print(
            json.dumps(
                {"version": VERSION, "topics": [_plain(topic) for topic in topics]}, indent=2, ensure_ascii=False
            )
        )
    elif len(topics) > SHOWN:
        print("\n".join(f"{topic.name}: {topic.summary}" for topic in topics))
    else:
        _print("\n\n".join(text_of(topic) for topic in topics))
    return 0


def _of_files(asked: str) -> tuple[Topic, ...]:
    """What is said of a code that is no spec's."""
    code = asked.strip().strip("`").upper()
    return (Topic("code", code, FILE_CODES[code], MORE[code]),) if code in FILE_CODES else ()


def _plain(topic: Topic) -> dict[str, object]:
    """A topic for machines: facts by their names, each a list of lines."""
    return asdict(topic) | {"facts": {label: list(values) for label, values in topic.facts}}


def _print(text: str) -> None:
    """The text; on a terminal with the titles bold and wrong and right examples told apart."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console  # only a terminal waits for it
    from rich.text import Text

    styled = Text(text)
    styled.highlight_regex(r"(?m)^\S+: .*(?=\n\n)", "bold")
    styled.highlight_regex(r"(?m)^wrong:\n(?:    .*\n|\n(?=    ))*", "red")
    styled.highlight_regex(r"(?m)^right:(?:\n    .*|\n(?=\n    ))*", "green")
    styled.highlight_regex(r"(?m)^(?:example|see also):", "bold")
    styled.highlight_regex(r"`[^`\n]+`", "cyan")
    styled.highlight_regex(
        r"(?m)^  (?:takes|unit|choices|default|override|rules|written|keys|roles|choice of|is exactly)(?=  )", "dim"
    )
    Console().print(styled, soft_wrap=True)


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:60])
