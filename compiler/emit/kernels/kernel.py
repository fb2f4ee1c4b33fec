"""What a kernel file is made of, and how its template becomes source text. No torch, no triton."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from compiler.ir import Buffer

BYTES = {"float32": 4, "bfloat16": 2}  # what the kernels take; other dtypes run on the reference ops
_HEADER = "# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.\n"
# In how many parts a program of a persistent kernel draws its tiles from a queue: half of them, half of the rest, …
# With 4, a launch that lacks SMs takes at most 11% longer than by single tiles, with 3 up to 23%
# (tests/compiler/emit/kernels/test_queue.py); a part costs a microsecond or two.
LEGS = 4
FUSION = {"enable_fp_fusion": True}  # a·b + c rounds once; Triton 3.10 is to change the default


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A template with everything it leaves open. `name` tells any two choices of one build apart."""

    name: str
    template: str  # rmsnorm: the file rmsnorm.py.j2 in this folder
    values: tuple[tuple[str, Any], ...]


class VariableName(str):
    """The name of a variable: the one value that enters a text as it stands, not as a literal."""


@dataclass(frozen=True, slots=True)
class KernelFile:
    """An emitted module: Triton kernels, and around them functions named and called like the ops they stand for."""

    name: str  # of kernels/<name>.py in the build folder
    source: str


class Places(NamedTuple):
    """What an op is told of where its rows stand: where their documents begin, and their positions."""

    documents: bool
    positions: bool

    def __str__(self) -> str:
        """The end of a kernel's name."""
        return "_documents" * self.documents + "_positions" * self.positions


def places(arguments: Sequence[Any]) -> Places:
    """Which of the two the last arguments of an op are; positions come behind starts, or behind None."""
    told = [isinstance(each, Buffer) and each.dtype == "int32" for each in arguments[-2:]]
    if not told or not told[-1]:
        return Places(documents=False, positions=False)
    positions = len(told) > 1 and (told[0] or arguments[-2] is None)
    return Places(documents=told[0] if positions else True, positions=positions)


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size` ≥ 1 things, as `tl.arange` wants."""
    return 1 << (size - 1).bit_length()


def in_name(number: float) -> str:
    """A number as a part of an identifier; other numbers give others: 1.5 -> 1p5, 1e-07 -> 1em07."""
    return repr(number).replace(".", "p").replace("-", "m").replace("+", "")


def render(choice: KernelChoice) -> KernelFile:
    """The source text of a choice. Values enter it as Python literals, or as names, and in no other way."""
    assert choice.name.isidentifier(), choice.name
    text = _environment().get_template(f"{choice.template}.py.j2").render(dict(choice.values))
    source = f"{_HEADER}{text.rstrip()}\n"
    ast.parse(source)
    return KernelFile(choice.name, source)


@cache
def _environment() -> jinja2.Environment:
    """The templates of this folder; what is read of them serves all kernels."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        line_statement_prefix="#%",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,  # of what is included
        finalize=_literal,
        autoescape=False,
    )


def _literal(value: Any) -> str:
    assert not isinstance(value, jinja2.Undefined), f"no value for {value._undefined_name}"
    if isinstance(value, VariableName):
        assert value.isidentifier(), value
        return str(value)
    text = repr(value)
    if isinstance(value, dict) and len(text) > 100:  # a line each
        text = "\n".join(["{", *(f"    {key!r}: {each!r}," for key, each in value.items()), "}"])
    assert ast.literal_eval(text) == value, text
    return text
