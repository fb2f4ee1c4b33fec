"""`dsc show [SPEC[:RUN]] [KEY …] [-s key=value] [--origin]`: print the resolved spec, and where each value comes from.

dsc show                           the resolved spec: with defaults, inherited and derived values
dsc show spec.dsc --origin         also where each value comes from
dsc show spec.dsc parallel.data    one value; or a block, such as parallel or model.layers.0
dsc show spec.dsc > resolved.dsc   the output is a spec, without imports

Exit codes: 0 done · 2 the spec or the command line is wrong
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, load_spec, report_error
from compiler.predict.choose import ChosenSpec
from dsl.canonical import TextLine, text_lines
from dsl.leaves import Leaf, Origin, leaves, origin_of
from dsl.messages.diagnostics import make_visible
from dsl.resolve.chosen import split
from dsl.schema import Spec
from dsl.schema.base import fields_of
from dsl.text.as_json import span_value

JSON_VERSION = 1
BEFORE_COMMENT = "  # "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_spec_arguments(parser)
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="print only these values or blocks, such as parallel.data"
    )
    parser.add_argument("--origin", action="store_true", help="add where each value comes from, as a comment")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text or json (docs/json.md); default: text"
    )


def run(args: argparse.Namespace) -> int:
    """Print the spec, or some of its values. Returns the exit code."""
    spec, keys = args.spec, list(args.keys)
    if spec is not None and _is_key(spec):
        spec, keys = None, [spec, *keys]
    chosen = load_spec(spec, args.set, args.format)
    if chosen is None:
        return EXIT_SPEC
    all_leaves = leaves(chosen.spec)
    for key in keys:
        if not any(_is_under(leaf.path, key) for leaf in all_leaves):
            return report_error(
                f"{chosen.spec.name} has no value `{key[:80]}`", _suggestion(key, all_leaves), args.format
            )
    if args.format == "json":
        import json

        wanted = [leaf for leaf in all_leaves if not keys or any(_is_under(leaf.path, key) for key in keys)]
        print(json.dumps(document(chosen, wanted), indent=2, ensure_ascii=False))
    elif keys:
        for key in keys:
            _print_key(chosen, [leaf for leaf in all_leaves if _is_under(leaf.path, key)], key, args.origin)
    else:
        _print_spec(chosen, args.origin)
    return 0


def _is_key(word: str) -> bool:
    """Whether the first word is a key and not a spec, as in `dsc show parallel.data`."""
    head = word.partition(".")[0]
    return head in fields_of(Spec) and not word.endswith(".dsc") and not Path(split(word)[0]).exists()


def _suggestion(key: str, all_leaves: tuple[Leaf, ...]) -> str:
    """A hint for a misspelt key, or a key without its block."""
    paths = {".".join(leaf.path.split(".")[:depth]) for leaf in all_leaves for depth in range(1, 9)}
    names = {path.rpartition(".")[2]: path for path in sorted(paths, reverse=True)} | {path: path for path in paths}
    from difflib import get_close_matches  # imported only for unknown words

    close = get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean `{names[close[0]]}`?" if close else ""


def _is_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _print_spec(chosen: ChosenSpec, with_origin: bool) -> None:
    lines = text_lines(chosen.spec)
    if not with_origin:
        print("\n".join(line.text for line in lines))
        return
    comments = [_comment(chosen, line) for line in lines]
    print("\n".join(_align_comments([line.text for line in lines], comments)))


def _print_key(chosen: ChosenSpec, selected: list[Leaf], key: str, with_origin: bool) -> None:
    """Print a single value, or the values of a block with their keys."""
    alone = len(selected) == 1 and selected[0].path == key
    texts = [leaf.text if alone else f"{leaf.path} = {leaf.text}" for leaf in selected]
    comments = [
        make_visible(str(origin_of(leaf.path, chosen.spec, chosen.origins))) if with_origin else "" for leaf in selected
    ]
    print("\n".join(_align_comments(texts, comments)))


def _comment(chosen: ChosenSpec, line: TextLine) -> str:
    """Where a line comes from. "" for a block that no file spells out."""
    if not line.text.strip(" }"):
        return ""
    origin = origin_of(line.path, chosen.spec, chosen.origins)
    return make_visible(str(origin)) if origin.kind == "written" or not line.text.endswith("{") else ""


def _align_comments(texts: list[str], comments: list[str]) -> list[str]:
    """Lines with their comments aligned."""
    width = max((len(text) for text, comment in zip(texts, comments, strict=True) if comment), default=0)
    pairs = zip(texts, comments, strict=True)
    return [f"{text:<{width}}{BEFORE_COMMENT}{comment}" if comment else text for text, comment in pairs]


def document(chosen: ChosenSpec, selected: list[Leaf]) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    values = {
        leaf.path: {
            "value": leaf.value,
            "unit": leaf.unit,
            "text": leaf.text,
            "origin": _origin_value(origin_of(leaf.path, chosen.spec, chosen.origins)),
        }
        for leaf in selected
    }
    return {"version": JSON_VERSION, "run": chosen.spec.name, "values": values}


def _origin_value(origin: Origin) -> dict[str, Any]:
    """The kind of an origin, with its place if written, or its reason if derived."""
    return {"kind": origin.kind, "reason": origin.reason or None, **span_value(origin.span)}
