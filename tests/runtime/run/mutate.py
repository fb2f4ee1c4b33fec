"""Damages a file of a run as crashes, disks and editors do."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, 10**400, 10**30, 1e-320, "", "1", [], {}, [[]], {"a": 1}),
    *("x\x1b[2J\x07", "<script>", "../../etc/passwd"),
)
WORDS = ("0", "-1", "7", "1000", "10_000_000", "1e30", '"x"', "auto", "foo", '"../x"', "")  # of a spec
KINDS = ("value", "value", "value", "key", "word", "bytes", "cut", "twice", "empty", "zeros", "nested", "shuffled")
PLACES = ("pipe", "folder", "link", "missing")  # what replaces the file


def mutate(path: Path, rng: random.Random) -> str:
    """Change the file. Returns a description of the change."""
    kind = rng.choice(KINDS + PLACES)
    data = path.read_bytes()
    if kind in PLACES:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("nowhere")
    elif kind in ("value", "key", "nested") and path.suffix in (".json", ".jsonl"):
        path.write_text(_with_value(data.decode(), path.suffix == ".jsonl", kind, rng), "utf-8")
    elif kind == "word" and path.name == "spec.resolved":
        text = data.decode()
        match = rng.choice(list(re.finditer(r'\b[0-9][0-9._e]*\b|"[^"]*"|(?<== )[a-z0-9_]+', text)))
        path.write_text(text[: match.start()] + rng.choice(WORDS) + text[match.end() :], "utf-8")
    else:
        path.write_bytes(_changed(data, kind, rng))
    return kind


def _with_value(text: str, lines: bool, kind: str, rng: random.Random) -> str:
    documents = text.splitlines() if lines else [text]
    index = rng.randrange(len(documents))
    document = json.loads(documents[index])
    holder, key = rng.choice(list(_places(document)))
    if kind == "key":
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    documents[index] = "[" * 5000 * (kind == "nested") + json.dumps(document)
    return "\n".join(documents) + "\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(list or object, key) of every nested value."""
    if isinstance(value, dict | list):
        for key, nested in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(nested)


def _changed(data: bytes, kind: str, rng: random.Random) -> bytes:
    match kind:
        case "cut":
            return data[: rng.randrange(len(data))]
        case "twice":
            return data + data
        case "empty":
            return b""
        case "zeros":
            return bytes(len(data))
        case "shuffled":
            lines = data.splitlines(keepends=True)
            rng.shuffle(lines)
            return b"".join(lines)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
