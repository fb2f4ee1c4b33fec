"""`dsc explain [CODE | KEY | WORD]`: explain an error code, a key, a block, a word or a unit; without an argument,
list all.

dsc explain E0802                  the rule, its reason, a wrong and a right example
dsc explain parallel.expert        its type, bounds and default, and the rules that read it
dsc explain train                  the keys of a block
dsc explain GiB                    the exact size of a unit

Exit codes: 0 done · 2 unknown word
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from compiler.cli.commands.common import report_error
from dsl.reference import Topic, find, index, keys, suggestions, text_of
from dsl.rules.codes import CODES, DETAILS, FILE_CODES

VERSION = 1  # of the JSON, docs/json.md
MAX_FULL_TOPICS = 4  # if more topics match, each is printed as one line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "an error code, the path of a key or block, a word of the language, a unit; default: list all"
    parser.add_argument("topic", nargs="?", metavar="CODE|KEY", help=text)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Print the topics. Returns the exit code."""
    if args.topic is None:
        listed = {"version": VERSION, "codes": CODES, "keys": {path: key.meaning for path, key in keys().items()}}
        print(json.dumps(listed, indent=2, ensure_ascii=False) if args.format == "json" else index())
        return 0
    topics = find(args.topic) or _topics_of_file_code(args.topic)
    if not topics:
        close = " or ".join(f"`{name}`" for name in suggestions(args.topic))
        hint = f"did you mean {close}?" if close else "`dsc explain` lists codes and keys"
        return report_error(f"there is no code, key or word `{_printable_prefix(args.topic)}`", hint, args.format)
    if args.format == "json":
        print(
            json.dumps(
                {"version": VERSION, "topics": [_topic_as_json(topic) for topic in topics]},
                indent=2,
                ensure_ascii=False,
            )
        )
    elif len(topics) > MAX_FULL_TOPICS:
        print("\n".join(f"{topic.name}: {topic.summary}" for topic in topics))
    else:
        _print_styled("\n\n".join(text_of(topic) for topic in topics))
    return 0


def _topics_of_file_code(word: str) -> tuple[Topic, ...]:
    """Return the topic of an error code about files that are not specs, or () if `word` is no such code."""
    code = word.strip().strip("`").upper()
    return (Topic("code", code, FILE_CODES[code], DETAILS[code]),) if code in FILE_CODES else ()


def _topic_as_json(topic: Topic) -> dict[str, object]:
    """A topic as JSON: facts by name, each a list of lines."""
    return asdict(topic) | {"facts": {label: list(values) for label, values in topic.facts}}


def _print_styled(text: str) -> None:
    """Print a text. On a terminal, titles are bold, wrong examples red and right ones green."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console  # imported only for a terminal
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


def _printable_prefix(text: str) -> str:
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:60])
