"""Quantities that change while a run goes on: the learning rate, phased values, the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def learning_rate(phases: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """The rate of the step after which `tokens` tokens have been trained on; past the last phase its end."""
    begin = 0
    for phase in phases:
        start, end, end_tokens = phase["start"], phase["end"], phase["end_tokens"]
        if tokens <= end_tokens:
            done = (tokens - begin) / (end_tokens - begin)
            if phase["shape"] == "cosine":
                return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))
            return start + (end - start) * done if phase["shape"] == "linear" else start
        begin = end_tokens
    return phases[-1]["end"]


def value_at(phases: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """The value of a phased quantity when `tokens` tokens have been trained on."""
    return next(p["value"] for p in phases if p["until_tokens"] is None or tokens < p["until_tokens"])


def position(batches: Sequence[Sequence[int]], step: int) -> tuple[int, int]:
    """(sequences of step `step`, sequences before it). `batches`: [first step, sequences a step], ascending."""
    before = 0
    for (first, size), after in zip(batches, [*(b[0] for b in batches[1:]), None], strict=True):
        if after is None or step < after:
            return size, before + (step - first) * size
        before += (after - first) * size
    raise AssertionError("batches are empty")
