"""The graphs of user modules: traced from the files that a spec names, or read from a build.

Only planning, compiling and training use this module, so only they run a user's file. A build stores the graphs, so
running a build never runs the file.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.ir.module import DEVICE, TENSOR, Atom, Module, ModuleParameter, OpNode, TorchCall, WantedModule
from compiler.model.modules.named import ModuleError, source_of

FILE = "modules.json"  # in a build
MAX_BYTES = 64 << 20  # of FILE
# The only forms of text that may be printed into a segment: names of values and parameters, ops, and torch constants.
NAME, OP, WORD = re.compile(r"[A-Za-z_]\w*(\.\w+)*"), re.compile(r"aten\.\w+\.\w+|[a-z]\w*"), re.compile(r"torch\.\w+")


@dataclass(frozen=True)
class ModuleFiles:
    """The modules of the specs in a folder, each traced once per size. Raises ModuleError if one cannot be traced."""

    folder: Path
    traced: dict[WantedModule, Module] = field(default_factory=dict)

    def module(self, wanted: WantedModule) -> Module:
        """Return the traced module. Imports torch and runs the file."""
        if wanted not in self.traced:
            from compiler.model.modules.tracing import trace

            self.traced[wanted] = trace(*source_of(wanted.text, self.folder), wanted)
        return self.traced[wanted]


@dataclass(frozen=True)
class RecordedModules:
    """The modules stored in a build, at the sizes it was compiled for."""

    traced: Mapping[WantedModule, Module]

    def module(self, wanted: WantedModule) -> Module:
        """Return the traced module. Raises ModuleError for sizes that the build does not have."""
        if wanted not in self.traced:
            stored = [key for key in self.traced if key.text == wanted.text]
            sizes = f"{stored[0].dtype}, {stored[0].tokens} tokens" if stored else "nothing"
            message = (
                f"module {wanted.text} is needed in {wanted.dtype}, for {wanted.tokens} tokens; the build has {sizes}"
            )
            raise ModuleError(message, "compile the spec again with these sizes")
        return self.traced[wanted]


def to_json(modules: Iterable[tuple[WantedModule, Module]]) -> str:
    """Return the text of `modules.json`. `from_json` is the inverse."""
    rows = [{"wanted": _tree(wanted), "module": _tree(module)} for wanted, module in modules]
    return json.dumps({"modules": rows}, separators=(",", ":")) + "\n"


def from_json(text: str) -> RecordedModules:
    """Parse the text of `modules.json`. Raises ModuleError if it is malformed."""
    try:
        rows = json.loads(text)["modules"]
        return RecordedModules({WantedModule(**row["wanted"]): _module(row["module"]) for row in rows})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError, MemoryError) as error:
        raise ModuleError(
            f"{FILE} cannot be read: {str(error) or type(error).__name__}", "compile the spec again"
        ) from None


def _tree(value: Any) -> Any:
    """A value as JSON: a dataclass as an object of its fields, a tuple as a list."""
    if isinstance(value, tuple):
        return [_tree(item) for item in value]
    fields = getattr(type(value), "__dataclass_fields__", None)
    return {name: _tree(getattr(value, name)) for name in fields} if fields else value


def _module(tree: Mapping[str, Any]) -> Module:
    return Module(
        parameters=tuple(
            ModuleParameter(_like(NAME, e["name"]), tuple(e["shape"]), _number(e["constant"]))
            for e in tree["parameters"]
        ),
        forward=tuple(map(_node, tree["forward"])),
        backward=tuple(map(_node, tree["backward"])),
        tensors=tuple((name, tuple(shape), dtype) for name, shape, dtype in tree["tensors"]),
        y=tree["y"],
        d_x=tree["d_x"],
        weights=tuple(tree["weights"]),
    )


def _number(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"{value!r:.50} is not a number")
    return value


def _node(tree: Mapping[str, Any]) -> OpNode:
    call = tree["call"] and TorchCall(
        tuple(map(_atom, tree["call"]["args"])),
        tuple((_like(NAME, name), _atom(value)) for name, value in tree["call"]["options"]),
    )
    args = tuple(_like(NAME, arg) if isinstance(arg, str) else arg for arg in tree["args"])
    return OpNode(_like(OP, tree["op"]), args, tuple(_like(NAME, output) for output in tree["outputs"]), call)


def _atom(value: Any) -> Atom:
    if isinstance(value, list):
        return tuple(map(_atom, value))
    if not isinstance(value, str) or value in (TENSOR, DEVICE) or WORD.fullmatch(value):
        return value
    if repr(ast.literal_eval(value)) != value:
        raise ValueError(f"{value[:50]!r} is not a quoted string")
    return value


def _like(form: re.Pattern[str], text: str) -> str:
    """Return `text` if it has this form, so that no other text is printed into a segment; else raise ValueError."""
    if not form.fullmatch(text):
        raise ValueError(f"{text[:50]!r} is not a name")
    return text
