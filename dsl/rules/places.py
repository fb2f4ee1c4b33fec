"""Rules on the folders and stores that checkpoints are copied to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from dsl.rules.finding import Finding
from dsl.schema import Spec
from dsl.schema.train import LOCAL

PATH = "train.checkpoint.to"
MAX_PLACES = 8
MAX_LENGTH = 4096
URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII)
SECRET = re.compile(r"[^/]*:[^/]*@.*")


def places_are_apart(spec: Spec) -> Iterator[Finding]:
    """Checkpoints are written to the folder of the run and copied to other places, none of which contains another."""
    if spec.train.checkpoint is None or spec.train.checkpoint.to == (LOCAL,):
        return
    places, run = spec.train.checkpoint.to, os.path.normpath(f"runs/{spec.name}")
    if LOCAL not in places:
        hint = f"write `to = [{', '.join((LOCAL, *(f'{chr(34)}{place}{chr(34)}' for place in places)))}]`"
        yield Finding("E0928", f"checkpoints are first written to `{LOCAL}`, but `to` does not name it", PATH, hint)
    if len(places) > MAX_PLACES:
        message = f"`to` names {len(places)} places, at most {MAX_PLACES} are allowed"
        yield Finding("E0928", message, f"{PATH}.{MAX_PLACES}", "remove some")
    positions: dict[str, int] = {}
    for index, place in enumerate(places):
        if problem := _problem(place):
            yield Finding("E0928", *_finding_fields(problem, index))
            continue
        path = f"<{LOCAL}>" if place == LOCAL else _normalise_place(place)
        rival = next(
            ((position, other_path) for other_path, position in positions.items() if _overlaps(path, other_path)), None
        )
        if rival is not None:
            clash = "is named twice" if path == rival[1] else "is inside another place, or contains it"
            note = ("the other one", f"{PATH}.{rival[0]}")
            yield Finding("E0928", f"`{place}` {clash}", f"{PATH}.{index}", "name another folder", (note,))
        elif place != LOCAL and _overlaps(path, run):
            message = f"`{place}` is inside the run folder {run}, or contains it: both would be lost together"
            yield Finding("E0928", message, f"{PATH}.{index}", "name a folder on another disk")
        positions.setdefault(path, index)


def _finding_fields(problem: tuple[str, str], index: int) -> tuple[str, str, str]:
    message, hint = problem
    return message, f"{PATH}.{index}", hint


def _problem(place: str) -> tuple[str, str] | None:
    """Message and hint for an invalid place; None if it is valid."""
    example = 'write a folder, as in `"/mnt/slow/mine"`'
    if not place.strip():
        return "a place for checkpoints is empty", example
    if len(place) > MAX_LENGTH or not place.isprintable():
        return f"a place has at most {MAX_LENGTH:,} characters, all of them printable", example
    if url := URL.fullmatch(place):
        if not url[2].strip("/"):
            return f"`{place}` names no bucket or folder", f"write `{url[1]}://bucket/mine`"
        if SECRET.match(url[2]):
            hint = f"write `{url[1]}://{url[2].rpartition('@')[2]}`, and give credentials in the environment"
            return "this URL has credentials, which builds and checkpoints would store", hint
        if ".." in url[2].split("/"):
            return f"`{place}` has `..`, which stores do not resolve", f"write `{url[1]}://bucket/mine`"
    elif "://" in place:
        return f"`{place}` is not a URL", 'write it as in `"s3://bucket/mine"`'
    return None


def _normalise_place(place: str) -> str:
    url = URL.fullmatch(place)
    if url is None:
        return os.path.normpath(place)
    path = "/".join(part for part in url[2].split("/") if part)
    return os.path.normpath(f"/{path}") if url[1] in ("file", "local") else f"{url[1]}://{path}"


def _overlaps(path: str, other_path: str) -> bool:
    return f"{path}/".startswith(f"{other_path.rstrip('/')}/") or f"{other_path}/".startswith(f"{path.rstrip('/')}/")
