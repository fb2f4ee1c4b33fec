"""Kernel choices, and the rendering of their templates to source text. No torch, no triton."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from compiler.ir import Buffer

BYTES = {"float32": 4, "bfloat16": 2}  # dtypes that kernels take; others run on the reference ops
_HEADER = "# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.\n"
# The number of batches in which a program of a persistent kernel takes tiles from a queue: half of them, half of the
# rest, … With 4, a launch that gets fewer SMs takes at most 11% longer than with single tiles, with 3 up to 23%
# (tests/compiler/emit/kernels/test_queue.py). A batch costs one or two microseconds.
LEGS = 4
FUSION = {"enable_fp_fusion": True}  # a·b + c rounds once; Triton 3.10 is to change the default


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A template and its values. `name` is unique among the choices of a build."""

    name: str
    template: str  # rmsnorm: the file rmsnorm.py.j2 in this folder
    values: tuple[tuple[str, Any], ...]
    is_library: bool = False  # whether the text calls a library; its template is in the folder libraries


Family = Mapping[str, Callable[..., KernelChoice | None]]  # op → the choice, from the number of SMs and the arguments


class VariableName(str):
    """The name of a variable. Other values are rendered as literals."""


@dataclass(frozen=True, slots=True)
class KernelFile:
    """An emitted module: Triton kernels, and functions that call them, with the names and arguments of the ops that
    they replace."""

    name: str  # kernels/<name>.py in the build folder
    source: str
    library: str = ""  # that it calls; "" for a text of Triton kernels


class Places(NamedTuple):
    """Whether an op has the arguments `starts` (where the documents of rows start) and `positions`."""

    documents: bool
    positions: bool

    def __str__(self) -> str:
        """The suffix of a kernel's name."""
        return "_documents" * self.documents + "_positions" * self.positions


def places(arguments: Sequence[Any]) -> Places:
    """Find `starts` and `positions` among the last arguments of an op. Positions come after starts or None."""
    are_int32 = [isinstance(argument, Buffer) and argument.dtype == "int32" for argument in arguments[-2:]]
    if not are_int32 or not are_int32[-1]:
        return Places(documents=False, positions=False)
    positions = len(are_int32) > 1 and (are_int32[0] or arguments[-2] is None)
    return Places(documents=are_int32[0] if positions else True, positions=positions)


def power_of_two(size: int) -> int:
    """The smallest power of two ≥ `size`, as `tl.arange` needs. `size` ≥ 1."""
    return 1 << (size - 1).bit_length()


def identifier_part(number: float) -> str:
    """A number as part of an identifier, distinct for distinct numbers: 1.5 -> 1p5, 1e-07 -> 1em07."""
    return repr(number).replace(".", "p").replace("-", "m").replace("+", "")


def render(choice: KernelChoice) -> KernelFile:
    """Render a choice to source text. Values enter it only as Python literals or as variable names."""
    assert choice.name.isidentifier(), choice.name
    folder = "libraries/" if choice.is_library else ""
    text = _environment().get_template(f"{folder}{choice.template}.py.j2").render(dict(choice.values))
    source = f"{'' if choice.is_library else _HEADER}{text.rstrip()}\n"
    ast.parse(source)
    return KernelFile(choice.name, source, choice.template if choice.is_library else "")


@cache
def _environment() -> jinja2.Environment:
    """The template environment for this folder, shared by all kernels."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        line_statement_prefix="#%",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,  # of included templates
        finalize=_literal,
        autoescape=False,
    )


def _literal(value: Any) -> str:
    assert not isinstance(value, jinja2.Undefined), f"no value for {value._undefined_name}"
    if isinstance(value, VariableName):
        assert value.isidentifier(), value
        return str(value)
    text = repr(value)
    if isinstance(value, dict) and len(text) > 100:  # one line per item
        text = "\n".join(["{", *(f"    {key!r}: {item!r}," for key, item in value.items()), "}"])
    assert ast.literal_eval(text) == value, text
    return text
