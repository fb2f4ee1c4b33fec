"""A cache of emitted segments, keyed by everything that they depend on: a compilation that finds all needs no torch.

An entry is a file `segments/<key>.json`. Its key is the digest of the segment, the number of SMs, the sources that
trace and print, and the versions of Python, torch and jinja2. It contains the emitted text and a digest of it. If an
entry is damaged, the segment is traced again and the entry is replaced. The digest detects damage; like the build next
to it, it does not protect against someone who may write to the folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, is_dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from compiler.emit.kernels import KernelFile, KernelTarget, emit_kernel, reason
from compiler.emit.kernels.calls import call_of, use_of
from compiler.files.cache import text_of
from compiler.ir import EmittedCall, Segment, SegmentCode
from compiler.ir.module import Module
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, OpNode
from compiler.model.segments.printer import module_name
from runtime.contract.launches import LaunchList
from runtime.system.strict_json import tree

# --- The module of a segment: its graph, checked against a torch trace and printed as plain Python, and its kernels


def emit(segment: Segment, target: KernelTarget) -> SegmentCode:
    """Emit the module of a segment from the graph that its plan uses.

    Asserts that the base graph equals a torch trace, and that the text parses back to the graph. On CUDA, ops run their
    emitted kernels, which are those of the target. Imports torch.
    """
    from compiler.model.segments import check, printer
    from compiler.model.segments.interpret import base_graph, rewritten
    from compiler.model.segments.node_costs import bytes_saved
    from compiler.model.segments.split import split
    from compiler.model.segments.torch_ops import ops
    from compiler.model.segments.trace import trace
    from compiler.model.segments.unpack import unpack_tensors

    base = base_graph(segment)
    check.base_graph(trace(segment, ops()), base)
    priced = rewritten(base)
    joint = unpack_tensors(priced)
    parts = split(joint)
    kernels = {node: kernel(joint, node, target) for nodes in parts.functions.values() for node in nodes}

    def kernel_of(node: OpNode) -> str | None:
        file = kernels[node]
        return file.name if file else None

    source = printer.module(joint, parts, kernel_of)
    check.text(source, joint, parts, kernel_of)
    files = {file.name: file.source for file in kernels.values() if file}
    saved = {node: saved for (node, _), saved in zip(joint.parts, bytes_saved(priced).values(), strict=True)}
    calls = tuple(
        _emitted_call(function, node, kernel_of(node), joint, saved, target.implementation_of(node.op))
        for function, nodes in parts.functions.items()
        for node in nodes
        if node.op != COLUMNS
    )
    uses = dict.fromkeys(
        use_of(file.name, call_of(joint, node))
        for node, file in kernels.items()
        if file and not file.library and not node.call
    )
    runtime_ops, texts = printer.runtime_ops(parts), tuple(sorted(files.items()))
    return SegmentCode(printer.module_name(segment), source, runtime_ops, texts, calls, tuple(uses))


def _emitted_call(
    function: str,
    node: OpNode,
    file: str | None,
    joint: Joint,
    saved: Mapping[OpNode, tuple[int, int]],
    implementation: str,
) -> EmittedCall:
    why = "" if file else reason(node.op, call_of(joint, node).arguments, implementation)
    call = EmittedCall(function, node.op, file or "", reason=why)
    for fused, parts in joint.parts:
        accumulates = node.op == f"{fused.op}_" and node.reads[1:] == fused.reads  # adds to a weight gradient
        if node == fused or accumulates:
            saved_bytes, saved_row = saved[fused]
            return replace(call, parts=tuple(part.op for part in parts), saved=saved_bytes, saved_row=saved_row)
    return call


def kernel(joint: Joint, node: OpNode, target: KernelTarget) -> KernelFile | None:
    """The kernel file of a node's op for its sizes, or None if the reference op runs on every device. `joint` must be
    unpacked.
    """
    if node.call or node.op == ADD_TO:
        return None
    call = call_of(joint, node)
    return emit_kernel(call.op, call.arguments, target.num_sms, target.implementation_of(call.op))


# --- segment cache

FOLDER = "segments"
# The sources that a segment's tracing, cutting, checking and printing depend on, relative to the root: all that
# compiler/model/segments imports, the families of ops and kernels, and the layers, whose functions are traced.
SOURCES = (
    "compiler/__init__.py",
    "compiler/emit/__init__.py",
    "compiler/emit/kernels",
    "compiler/emit/segment_cache.py",
    "compiler/files/__init__.py",
    "compiler/files/cache.py",
    "compiler/ir",
    "compiler/model/__init__.py",
    "compiler/model/layers",
    "compiler/model/ops",
    "compiler/model/segments",
    "dsl/__init__.py",
    "dsl/facts/__init__.py",
    "dsl/facts/formats.py",
    "runtime/__init__.py",
    "runtime/contract",
    "runtime/ops",
    "runtime/system/outcome.py",
    "runtime/system/strict_json.py",
)
PACKAGES = ("torch", "jinja2")  # full versions, with the local part: a GPU build of torch may trace another graph


class Segments:
    """Emitted segments, from a cache or traced. Each is emitted once for any number of builds.

    folder: that of the cache, which need not exist; None: no cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._codes: dict[tuple[object, KernelTarget], SegmentCode] = {}  # by key and target

    def code(self, segment: Segment, target: KernelTarget, progress: Callable[[str], None]) -> SegmentCode:
        """Return the emitted segment, with the kernels of the target. Calls `progress` before tracing, which imports
        torch."""
        key = segment.key, target
        if key not in self._codes:
            code = self._find(segment, target)
            if code is None:
                progress(f"trace {segment.kind}")
                code = emit(segment, target)
            self._codes[key] = code
        return self._codes[key]

    def entries(self, segments: Iterable[Segment], target: KernelTarget) -> dict[str, str]:
        """Path → text of the cache entries for these segments; {} without a cache."""
        if self._folder is None:
            return {}
        keyed = {segment.key: (key_of(segment, target, self._tools), segment) for segment in segments}
        return {
            f"{FOLDER}/{name}.json": entry(name, self._codes[segment.key, target]) for name, segment in keyed.values()
        }

    def _find(self, segment: Segment, target: KernelTarget) -> SegmentCode | None:
        return find(self._folder, key_of(segment, target, self._tools), segment) if self._folder else None

    @cached_property
    def _tools(self) -> str:
        return tools()


def find(folder: Path, key: str, segment: Segment) -> SegmentCode | None:
    """The entry for a key in a cache, or None."""
    text = text_of(folder / FOLDER, key)
    return read(text, key, segment) if text is not None else None


def sources_digest(root: Path) -> str:
    """The digest of the paths and contents of `SOURCES` below `root`."""
    digest = hashlib.sha256()
    for place in SOURCES:
        path = root / place
        for file in sorted([*path.rglob("*.py"), *path.rglob("*.j2")]) if path.is_dir() else [path]:
            data = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def tools() -> str:
    """The digest of the compiler's sources and the versions of packages, on which emitted text depends."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    python = ".".join(map(str, sys.version_info[:3]))
    return json.dumps([sources_digest(Path(__file__).parents[2]), python, versions])


def key_of(segment: Segment, target: KernelTarget, tools: str) -> str:
    """A digest that distinguishes any two emitted segments. `tools`: the result of `tools()`."""
    values = [
        segment.kind,
        _function(segment.function),
        [[p.name, p.shape, p.dtype, p.stack, p.grad] for p in segment.params],
        [[i.name, i.shape, i.dtype, i.grad] for i in segment.inputs],
        [[o.name, o.grad] for o in segment.outputs],
        segment.constants,
        segment.recompute,
        [[r.value, r.op, r.args] for r in segment.remade],
        segment.stored,
        segment.fused,
    ]
    return _digest(json.dumps([values, target, tools]))


def _function(function: Callable[..., Any]) -> list[object]:
    """A layer's function as its name, steps and constants. Its source is among `SOURCES`."""
    if is_dataclass(function):
        _check_is_of_a_layer(type(function))
        return [type(function).__module__, type(function).__qualname__, *map(_setting, vars(function).values())]
    bound = function if isinstance(function, partial) else partial(function)
    module, name = bound.func.__module__, bound.func.__qualname__
    _check_is_of_a_layer(bound.func)
    constants = sorted((key, _constant_key(value)) for key, value in bound.keywords.items())
    return [module, name, *map(_function, bound.args), constants]


def _check_is_of_a_layer(function: Any) -> None:
    """Assert that a function is defined in a layer module, whose source is among `SOURCES`."""
    module, name = function.__module__, function.__qualname__
    named = getattr(sys.modules[module], name, None)
    assert module.startswith("compiler.model.layers.") and named is function, f"{function} is not a layer's"


def _setting(value: Any) -> Any:
    """A field of a layer's function: a constant or a step."""
    is_part = callable(value) or (is_dataclass(value) and not isinstance(value, Module))
    return _function(value) if is_part else _constant_key(value)


def _constant_key(value: Any) -> Any:
    """A constant of a layer, or the digest of a traced module."""
    return value.digest if isinstance(value, Module) else value


def entry(key: str, code: SegmentCode) -> str:
    """Return the text of an entry. `read` is the inverse."""
    calls = [astuple(call) for call in code.calls]
    value = {"name": code.name, "source": code.source, "ops": code.ops, "kernels": code.kernels, "calls": calls}
    value["launches"] = tree(LaunchList(code.uses))
    return json.dumps({"key": key, "sha256": _digest(json.dumps(value)), "code": value}) + "\n"


def read(text: str, key: str, segment: Segment) -> SegmentCode | None:
    """Parse the text of an entry. None if it is damaged or belongs to another key."""
    try:
        value = json.loads(text)["code"]
        kernels = tuple((str(name), str(source)) for name, source in value["kernels"])
        calls = tuple(_call(*call) for call in value["calls"])
        uses = LaunchList.from_json(json.dumps(value["launches"])).calls
        name, ops = str(value["name"]), tuple(map(str, value["ops"]))
        code = SegmentCode(name, str(value["source"]), ops, kernels, calls, uses)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    valid = code.name == module_name(segment) and all(name.isidentifier() for name, _ in kernels)  # names become paths
    return code if valid and entry(key, code) == text else None


def _call(
    function: str, op: str, kernel: str, parts: list[str], saved: int, saved_row: int, reason: str
) -> EmittedCall:
    return EmittedCall(
        str(function), str(op), str(kernel), tuple(map(str, parts)), int(saved), int(saved_row), str(reason)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
