"""Where the graphs of modules come from: the files that a spec names, or what a build has of them.

Only what plans, compiles or trains asks here, and so runs a user's file. A build has the graphs: nothing of the file
runs from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.ir.module import Call, Module, ModuleParameter, Node, Wanted
from compiler.modules.named import ModuleError, source_of

FILE = "modules.json"  # of a build


@dataclass(frozen=True)
class ModuleFiles:
    """The modules of the specs of a folder, each traced once for each of its sizes. ModuleError where one cannot be."""

    folder: Path
    traced: dict[Wanted, Module] = field(default_factory=dict)

    def module(self, wanted: Wanted) -> Module:
        """The traced module. Imports torch, and runs the file."""
        if wanted not in self.traced:
            from compiler.modules.tracing import trace

            self.traced[wanted] = trace(*source_of(wanted.text, self.folder), wanted)
        return self.traced[wanted]


@dataclass(frozen=True)
class RecordedModules:
    """The modules of a build, at the sizes that it has them for."""

    traced: Mapping[Wanted, Module]

    def module(self, wanted: Wanted) -> Module:
        """The traced module. ModuleError for other sizes than those of the build."""
        if wanted not in self.traced:
            sizes = [each for each in self.traced if each.text == wanted.text]
            have = f"{sizes[0].dtype}, {sizes[0].tokens} tokens" if sizes else "nothing"
            message = (
                f"module {wanted.text} is needed in {wanted.dtype}, for {wanted.tokens} tokens; the build has {have}"
            )
            raise ModuleError(message, "compile the spec again with these sizes")
        return self.traced[wanted]


def to_json(modules: Iterable[tuple[Wanted, Module]]) -> str:
    """The text of `modules.json`; `from_json` is its inverse."""
    rows = [{"wanted": _tree(wanted), "module": _tree(module)} for wanted, module in modules]
    return json.dumps({"modules": rows}, separators=(",", ":")) + "\n"


def from_json(text: str) -> RecordedModules:
    """The modules of a build. ModuleError for a text that is not of this form."""
    try:
        rows = json.loads(text)["modules"]
        return RecordedModules({Wanted(**row["wanted"]): _module(row["module"]) for row in rows})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModuleError(f"{FILE} cannot be read: {error}", "compile the spec again") from None


def _tree(value: Any) -> Any:
    """A value as JSON: a dataclass by its fields, a tuple as a list."""
    if isinstance(value, tuple):
        return [_tree(each) for each in value]
    fields = getattr(type(value), "__dataclass_fields__", None)
    return {name: _tree(getattr(value, name)) for name in fields} if fields else value


def _module(tree: Mapping[str, Any]) -> Module:
    return Module(
        parameters=tuple(ModuleParameter(e["name"], tuple(e["shape"]), e["constant"]) for e in tree["parameters"]),
        forward=tuple(map(_node, tree["forward"])),
        backward=tuple(map(_node, tree["backward"])),
        tensors=tuple((name, tuple(shape), dtype) for name, shape, dtype in tree["tensors"]),
        y=tree["y"],
        d_x=tree["d_x"],
        weights=tuple(tree["weights"]),
    )


def _node(tree: Mapping[str, Any]) -> Node:
    call = tree["call"] and Call(_atoms(tree["call"]["args"]), _atoms(tree["call"]["options"]))
    return Node(tree["op"], tuple(tree["args"]), tuple(tree["outputs"]), call)


def _atoms(value: Any) -> Any:
    return tuple(map(_atoms, value)) if isinstance(value, list) else value
