"""`dsc show [SPEC[:RUN]] [KEY …] [-s key=value] [--origin]`: the resolved spec, and where each value comes from.

dsc show                           everything resolved: defaults, inherited and derived values
dsc show spec.dsc --origin         and where each value comes from
dsc show spec.dsc parallel.data    one value; the values of a block, as parallel or model.layers.0
dsc show spec.dsc > resolved.dsc   is a spec again, without imports

Exit codes: 0 done · 2 the spec or the command line is wrong
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, load_spec, wrong
from compiler.predict.choose import Chosen
from dsl.canonical import TextLine, text_lines
from dsl.leaves import Leaf, Origin, leaves, origin_of
from dsl.messages.diagnostics import visible
from dsl.resolve.chosen import split
from dsl.schema import Spec
from dsl.schema.base import fields_of
from dsl.text.as_json import span_value

JSON_VERSION = 1
BEFORE_COMMENT = "  # "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="print these values or blocks only: parallel.data")
    parser.add_argument("--origin", action="store_true", help="say where each value comes from, as a comment")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text or json (docs/json.md); default: text"
    )


def run(args: argparse.Namespace) -> int:
    """Print the spec, or some of its values."""
    spec, keys = args.spec, list(args.keys)
    if spec is not None and _is_key(spec):
        spec, keys = None, [spec, *keys]
    chosen = load_spec(spec, args.set, args.format)
    if chosen is None:
        return EXIT_SPEC
    found = leaves(chosen.spec)
    for key in keys:
        if not any(_is_under(leaf.path, key) for leaf in found):
            return wrong(f"{chosen.spec.name} has no value `{key[:80]}`", _meant(key, found), args.format)
    if args.format == "json":
        import json

        wanted = [leaf for leaf in found if not keys or any(_is_under(leaf.path, key) for key in keys)]
        print(json.dumps(document(chosen, wanted), indent=2, ensure_ascii=False))
    elif keys:
        for key in keys:
            _print_key(chosen, [leaf for leaf in found if _is_under(leaf.path, key)], key, args.origin)
    else:
        _print_spec(chosen, args.origin)
    return 0


def _is_key(word: str) -> bool:
    """Whether the first word is no spec but a key already, as in `dsc show parallel.data`."""
    head = word.partition(".")[0]
    return head in fields_of(Spec) and not word.endswith(".dsc") and not Path(split(word)[0]).exists()


def _meant(key: str, found: tuple[Leaf, ...]) -> str:
    """A hint for a key that is misspelt, or without the block it is in."""
    paths = {".".join(leaf.path.split(".")[:depth]) for leaf in found for depth in range(1, 9)}
    names = {path.rpartition(".")[2]: path for path in sorted(paths, reverse=True)} | {path: path for path in paths}
    from difflib import get_close_matches  # only where a word is unknown

    close = get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean `{names[close[0]]}`?" if close else ""


def _is_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _print_spec(chosen: Chosen, with_origin: bool) -> None:
    lines = text_lines(chosen.spec)
    if not with_origin:
        print("\n".join(line.text for line in lines))
        return
    comments = [_comment(chosen, line) for line in lines]
    print("\n".join(_aligned([line.text for line in lines], comments)))


def _print_key(chosen: Chosen, found: list[Leaf], key: str, with_origin: bool) -> None:
    """A value alone; of a block each with its key."""
    alone = len(found) == 1 and found[0].path == key
    texts = [leaf.text if alone else f"{leaf.path} = {leaf.text}" for leaf in found]
    comments = [
        visible(str(origin_of(leaf.path, chosen.spec, chosen.origins))) if with_origin else "" for leaf in found
    ]
    print("\n".join(_aligned(texts, comments)))


def _comment(chosen: Chosen, line: TextLine) -> str:
    """Where a line comes from. A block that nobody wrote as such has no place of its own."""
    if not line.text.strip(" }"):
        return ""
    origin = origin_of(line.path, chosen.spec, chosen.origins)
    return visible(str(origin)) if origin.kind == "written" or not line.text.endswith("{") else ""


def _aligned(texts: list[str], comments: list[str]) -> list[str]:
    """Lines with their comments in one column."""
    width = max((len(text) for text, comment in zip(texts, comments, strict=True) if comment), default=0)
    pairs = zip(texts, comments, strict=True)
    return [f"{text:<{width}}{BEFORE_COMMENT}{comment}" if comment else text for text, comment in pairs]


def document(chosen: Chosen, found: list[Leaf]) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    values = {
        leaf.path: {
            "value": leaf.value,
            "unit": leaf.unit,
            "text": leaf.text,
            "origin": _origin_value(origin_of(leaf.path, chosen.spec, chosen.origins)),
        }
        for leaf in found
    }
    return {"version": JSON_VERSION, "run": chosen.spec.name, "values": values}


def _origin_value(origin: Origin) -> dict[str, Any]:
    """`kind`, and for what is written its place, for what is derived the reason."""
    return {"kind": origin.kind, "reason": origin.reason or None, **span_value(origin.span)}
