"""Holds plan.json against what the runtime reads of it, so that a forged plan is refused before any rank starts.

No torch. Keys that are not listed here are left alone: they are for people, or for one part of the runtime that reads
them with care of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

Check = Callable[[Any], bool]
Form = Any  # a check, a dict of forms by key, or a list of one form for all items

MAX_DEPTH = 32
MAX_INT = 1 << 62
MAX_RANKS = 1 << 20
MAX_LAYERS = 10_000
MAX_STEPS = 10**12


class PlanError(ValueError):
    """plan.json is none that a compilation writes; the message says where."""


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _number(low: float = -math.inf, high: float = math.inf) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _text(pattern: str) -> Check:
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _either(*forms: Form) -> Check:
    return lambda value: any(_fault(value, form, "") is None for form in forms)


def _nothing(value: Any) -> bool:
    return value is None


_COUNT = _whole(1, MAX_INT)
_RANK = _whole(0, MAX_RANKS - 1)
_NAME = _text(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_DTYPE = _text(r"[a-z][a-z0-9_]{0,30}")
_FLAG = _either(lambda value: type(value) is bool)
_PHASES = [{"value": _number(), "until_tokens": _either(_nothing, _whole(0, MAX_INT))}]
_SHAPE = [_COUNT]

FORM: Form = {
    "run": _text(r"[A-Za-z_][A-Za-z0-9_.-]{0,1100}"),  # it becomes the name of a folder
    "mesh": {"pp": _whole(1, MAX_RANKS), "dp": _whole(1, MAX_RANKS), "ep": _whole(1, MAX_RANKS)},
    "placement": _text(r"[a-z_]+\([0-9, ]*\)|[a-z_]+"),
    "zero": _whole(0, 3),
    "precision": {role: _DTYPE for role in ("parameter", "compute", "gradients", "master", "moments")},
    "model": {
        "vocab": _whole(1, 1 << 31),
        "layers": [{"first": _whole(0, MAX_LAYERS), "last": _whole(0, MAX_LAYERS), "ffn": {}}],
    },
    "train": {
        "sequence": _COUNT,
        "micro_batch": _COUNT,
        "seed": _whole(0, MAX_INT),
        "optimizer": {name: _number() for name in ("beta1", "beta2", "eps", "weight_decay")},
        "rate": [{"start": _number(), "end": _number(), "end_tokens": _COUNT}],
        "checkpoint": _either(_nothing, {}),
        "validate": _either(_nothing, {"every": _COUNT, "batches": _COUNT}),
    },
    "data": {
        "source": lambda value: isinstance(value, str) and 0 < len(value) <= 4096,
        "tokenizer": _either(lambda value: isinstance(value, str) and value, {"vocab": _whole(1, 1 << 31)}),
        "validation": _number(0, 1),
    },
    "steps": _whole(1, MAX_STEPS),
    "batches": [[_whole(0, MAX_STEPS)]],
    "mtp_weight": _either(_nothing, _PHASES),
    "message": _either(_nothing, {"shape": _SHAPE, "dtype": _DTYPE}),
    "edges": [[_RANK]],
    "records": [_text(r"[a-z_]+( [A-Za-z0-9_.]+)?")],
    "moe_layers": [
        {
            "site": _NAME,
            "name": _NAME,
            "experts": _COUNT,
            "sequence_loss": _number(),
            "bias": _either(_nothing, _NAME),
            "bias_rate": _either(_nothing, _PHASES),
        }
    ],
    "memory": [_whole(0, MAX_INT)],
    "buckets": [
        {
            "name": _NAME,
            "holders": [_RANK],
            "parameters": [
                {
                    "name": _NAME,
                    "tensor": _NAME,
                    "shape": _SHAPE,
                    "init": _either(_nothing, _number(0)),
                    "decay": _FLAG,
                }
            ],
        }
    ],
    "biases": [{"name": _NAME, "shape": _SHAPE, "holders": [_RANK]}],
}


def check_plan(plan: Any, programs: Mapping[str, Any]) -> None:
    """Raise PlanError unless the plan has the form that the runtime reads, and fits the programs.

    programs: contents of program/*.json by name; their rows are those of pipeline ranks. O(size of the plan).
    """
    _check_values(plan, "", 0)
    if (place := _fault(plan, FORM, "")) is not None:
        raise PlanError(f"{place} is not what a plan has there")
    mesh, layers, batches = plan["mesh"], plan["model"]["layers"], plan["batches"]
    world = mesh["pp"] * mesh["dp"]
    _demand(world <= MAX_RANKS and mesh["dp"] % mesh["ep"] == 0, "mesh")
    _demand(layers and layers[0]["first"] == 0, "model.layers")
    for span, after in zip(layers, [*layers[1:], None], strict=True):
        _demand(span["first"] <= span["last"], "model.layers")
        _demand(after is None or after["first"] == span["last"] + 1, "model.layers")
    _demand(len(plan["memory"]) == mesh["pp"], "memory")
    _demand(all(len(edge) == 2 and max(edge) < mesh["pp"] for edge in plan["edges"]), "edges")
    _demand(plan["train"]["rate"], "train.rate")
    _demand(plan["buckets"] and all(row["parameters"] for row in plan["buckets"]), "buckets")
    for part in ("buckets", "biases"):
        for row in plan[part]:
            holders = row["holders"]
            _demand(holders and holders == sorted(set(holders)) and holders[-1] < world, f"{part}: holders")
    _demand(batches and all(len(batch) == 2 for batch in batches) and batches[0][0] == 0, "batches")
    _demand(all(a[0] < b[0] for a, b in pairwise(batches)), "batches")
    sequences = mesh["dp"] * plan["train"]["micro_batch"]
    for _, size in batches:
        _demand(size > 0 and size % sequences == 0, "batches")
        _demand(f"train_{size // sequences}" in programs, f"batches: there is no program of {size} sequences")
    if plan["train"]["validate"]:
        _demand(f"evaluate_{batches[-1][1] // sequences}" in programs, "train.validate: there is no program for it")
    for name, program in programs.items():
        fits = len(program["ranks"]) == mesh["pp"] and name.endswith(f"_{program['micro_batches']}")
        _demand(fits and program["placement"] == plan["placement"], f"program/{name}.json: its sizes")


def _demand(condition: object, place: str) -> None:
    if not condition:
        raise PlanError(f"{place}: not what a plan has there")


def _check_values(value: Any, place: str, depth: int) -> None:
    """No number that is none or out of all bounds, and no nesting without end."""
    if depth > MAX_DEPTH or (type(value) is int and abs(value) > MAX_INT):
        raise PlanError(f"{place} is not what a plan has there")
    if type(value) is float and not math.isfinite(value):
        raise PlanError(f"{place} is no number")
    if isinstance(value, dict):
        for key, each in value.items():
            _check_values(each, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_values(each, place, depth + 1)


def _fault(value: Any, form: Form, place: str) -> str | None:
    """Where a value has not its form; None where it has."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return place or "plan.json"
        pairs = [(value.get(key, _MISSING), each, f"{place}.{key}" if place else key) for key, each in form.items()]
        return next((found for each in pairs if (found := _fault(*each)) is not None), None)
    if isinstance(form, list):
        if not isinstance(value, list):
            return place
        return next((found for each in value if (found := _fault(each, form[0], place)) is not None), None)
    return None if form(value) else place


class _Missing:
    """What stands for a key that is not there: no check accepts it."""


_MISSING = _Missing()
