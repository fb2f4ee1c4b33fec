"""Layers per stage in Megatron's layout syntax: `--pipeline-model-parallel-layout "Et*3|(tt|)*29|tmL"`.

E is the embedding, t a layer, m an MTP block, L the head with its loss, `|` ends a stage; `x*3` and `(…)*3` repeat;
commas and blanks are ignored. Stages are in the order of the model (Megatron-Core, Custom Pipeline Model Parallel
Layout).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

MAX_LENGTH = 10_000  # letters and bars of a layout, after expanding repeats
MAX_DEPTH = 16
_COUNT = re.compile(r"\*(\d{1,5})")


class LayoutError(ValueError):
    """A layout cannot be read, or does not fit the model. The message says what to change."""


def stages_of_layout(text: str, num_layers: int, mtp: int) -> tuple[tuple[int, int], ...]:
    """Return (begin, end) of the layers of each stage. The first stage also has the embedding, the last MTP and the
    head.

    `mtp`: number of MTP blocks. Raises LayoutError if the layout does not fit the model.
    """
    stages = expand_layout(text).split("|")
    letters = "".join(stages)
    expected = f"E{'t' * num_layers}{'m' * mtp}L"
    if letters != expected:
        raise LayoutError(_difference(letters, num_layers, mtp))
    if not stages[-1]:
        raise LayoutError("a layout must end with L, not with `|`")
    if not stages[-1].endswith(f"{'m' * mtp}L"):
        raise LayoutError("MTP reads the head: put m and L on the last stage together, as in `…|tmL`")
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        raise LayoutError(f"stage {empty} of {len(stages)} is empty: give it a layer")
    ends = [0]
    for stage in stages:
        ends.append(ends[-1] + stage.count("t"))
    return tuple(itertools.pairwise(ends))


def layout_of(runs: Sequence[tuple[int, int]], mtp: int) -> str:
    """Return the layout of stages with these (begin, end) layers, in its short form: the inverse of
    `stages_of_layout`."""
    stages = ["t" * (end - begin) for begin, end in runs]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    parts: list[tuple[str, int]] = []
    for stage in stages[:-1]:
        word = _shorten_stage(stage) + "|"
        if parts and parts[-1][0] == word:
            parts[-1] = (word, parts[-1][1] + 1)
        else:
            parts.append((word, 1))
    return "".join(word if count == 1 else f"({word})*{count}" for word, count in parts) + _shorten_stage(stages[-1])


def expand_layout(text: str) -> str:
    """Return the letters and bars of a layout with repeats expanded. Raises LayoutError if it cannot be read."""
    letters, end = _expand_group(text, 0, 0)
    if end < len(text):
        raise LayoutError(f"`)` at character {end + 1} closes nothing")
    return letters


def _expand_group(text: str, position: int, depth: int) -> tuple[str, int]:
    """Expand the text from `position` up to an unmatched `)` or the end. Returns the letters and the position after
    them."""
    if depth > MAX_DEPTH:
        raise LayoutError(f"parentheses are nested more than {MAX_DEPTH} deep")
    parts: list[str] = []
    length = 0
    while position < len(text) and text[position] != ")":
        letter = text[position]
        if letter in ", ":
            position += 1
            continue
        if letter == "(":
            item, end = _expand_group(text, position + 1, depth + 1)
            if end == len(text):
                raise LayoutError(f"`(` at character {position + 1} is never closed")
            position = end + 1
        elif letter in "EtmL|":
            item, position = letter, position + 1
        else:
            raise LayoutError(f"`{letter}` at character {position + 1} is not one of E t m L | ( ) *")
        while count := _COUNT.match(text, position):
            item, position = _repeat(item, int(count[1])), count.end()
        length += len(item)
        if length > MAX_LENGTH:
            raise LayoutError(f"a layout has at most {MAX_LENGTH:,} letters")
        parts.append(item)
    return "".join(parts), position


def _repeat(item: str, count: int) -> str:
    if len(item) * count > MAX_LENGTH:
        raise LayoutError(f"a layout has at most {MAX_LENGTH:,} letters")
    return item * count


def _shorten_stage(stage: str) -> str:
    """`tttt` as `t*4`."""
    return re.sub("t{3,}", lambda run: f"t*{len(run[0])}", stage)


def _difference(letters: str, num_layers: int, mtp: int) -> str:
    if not letters.startswith("E") or letters.count("E") != 1:
        return "a layout must begin with E, the embedding, and have it once"
    if not letters.endswith("L") or letters.count("L") != 1:
        return "a layout must end with L, the head, and have it once"
    if letters.count("t") != num_layers:
        return f"the layout has {letters.count('t')} layers (t), but the model has {num_layers}"
    if letters.count("m") != mtp:
        return f"the layout has {letters.count('m')} MTP blocks (m), but the model has {mtp}"
    return "layers (t) must come before MTP blocks (m)"
