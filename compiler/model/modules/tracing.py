"""Traces a user's torch module into a graph: constructs and runs it on fake tensors; autograd derives the backward.

This runs the user's file. `compiler/model/modules/source.py` decides when.
"""

from __future__ import annotations

import builtins
import operator
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.ir import Segment
from compiler.ir.dtypes import ITEMSIZE
from compiler.ir.module import INPUT, TANGENT, Module, ModuleParameter, WantedModule
from compiler.model.modules.named import ModuleError
from compiler.model.ops.torch_calls import is_torch_view
from compiler.model.segments.convert import IDENTITIES, PARTS, Conversion, ancestors_of, producer_of
from compiler.model.segments.joint import Draft

# --- Checks while a user's module runs on fake tensors, and the initial values of its parameters

FILLED = {"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0}
FILLED_BY_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1}
COPIED = {"clone": 0, "_to_copy": 0, "copy_": 1}  # which argument is copied
BY_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


class FirstValues(TorchDispatchMode):
    """Records the constant that each tensor is filled with while a module is constructed, or None."""

    def __init__(self) -> None:
        super().__init__()
        self._filled: dict[int, float | None] = {}  # by storage

    def constant(self, tensor: Tensor) -> float | None:
        """The constant that fills a tensor, or None if its values differ or are unknown."""
        return self._filled.get(_storage(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, created = func._schema.name.partition("::")[2], result if isinstance(result, Tensor) else None
        if created is None or (isinstance(args, tuple) and _is_view(func)):
            return result
        number: float | None = FILLED.get(name)
        if name in FILLED_BY_ARGUMENT and isinstance(args[FILLED_BY_ARGUMENT[name]], int | float):
            number = args[FILLED_BY_ARGUMENT[name]]
        if name in COPIED:
            number = self.constant(args[COPIED[name]])
        self._filled[_storage(created)] = number
        return result


class ForwardWatch(TorchDispatchMode):
    """Refuses random numbers and writes into the arguments of forward. `arguments`: tensors by description."""

    def __init__(self, arguments: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._descriptions = {_storage(tensor): description for description, tensor in arguments.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            hint = "remove it: no training step draws random numbers"
            raise ModuleError(f"forward draws random numbers: {func}", hint)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
            if written and (description := self._descriptions.get(_storage(value))):
                raise ModuleError(f"forward writes into {description}: {func}", "compute a new tensor instead")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    return any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class UserCode:
    """Turns an exception in a user's code into a ModuleError that names the line of the file."""

    def __init__(self, path: Path, doing: str) -> None:
        self._path, self._doing = path, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or not isinstance(error, (Exception, SystemExit)):
            return
        place = _line(traceback.extract_tb(tb), self._path)
        if isinstance(error, ModuleError):
            raise ModuleError(f"{place}{error}", error.hint) from None
        if isinstance(error, BY_NUMBERS):
            message = f"{place}a shape or a branch of forward depends on values in tensors: {error.func}"
            raise ModuleError(message, "use ops whose shapes are fixed: torch.where, masks, sums") from None
        reason = str(error).strip().split("\n")[0][:300]
        raise ModuleError(f"{place}{self._doing} fails: {type(error).__name__}: {reason}", "correct the file") from None


def _line(frames: Iterable[traceback.FrameSummary], path: Path) -> str:
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path.name}:{lines[-1]}: " if lines else ""


# --- tracing

FORWARD, MAKING, READING = "forward", "the constructor", "running the file"
OF_ONE_DEVICE = ("_for_cpu", "mkldnn", "cudnn", "miopen", "_flash_attention", "_efficient_attention")
RESHAPED = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_PLAIN = Segment("module", lambda: (), (), (), ())


def trace(path: Path, name: str, source: str, wanted: WantedModule) -> Module:
    """Return the graph of class `name` of a file at the sizes of a run. Raises ModuleError if it cannot be traced."""
    cls = _class(path, name, source)
    fake, values = FakeTensorMode(), FirstValues()
    with fake:
        with UserCode(path, MAKING), values:
            module = cls(wanted.hidden)
        _refuse_state(module, name)
        parameters = tuple(_parameter(values, key, parameter) for key, parameter in module.named_parameters())
        dtype = getattr(torch, wanted.parameter)
        weights: dict[str, Tensor] = {
            parameter.name: nn.Parameter(torch.empty(parameter.shape, dtype=dtype)) for parameter in parameters
        }
        x_TD = torch.empty(wanted.tokens, wanted.hidden, dtype=getattr(torch, wanted.dtype))
        arguments = {f"the parameter {key}": weight for key, weight in weights.items()} | {"its input": x_TD}
        with UserCode(path, FORWARD), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), ForwardWatch(arguments):
            _refuse_output(torch.func.functional_call(module, weights, (_to_module_shape(x_TD, wanted),)), wanted)

        def forward(x_TD: Tensor, *traced: Tensor) -> tuple[Tensor]:
            """Return a contiguous copy of y_TD. `_copied_node` removes the copy where it is not needed."""
            x_TD = x_TD.view_as(x_TD)
            x_TD.register_hook(lambda d_x_TD: d_x_TD.contiguous())  # our ops take contiguous rows
            x = _to_module_shape(x_TD, wanted)
            y = torch.func.functional_call(module, dict(zip(weights, traced, strict=True)), (x,))
            return (y.reshape(wanted.tokens, wanted.hidden).clone(memory_format=torch.contiguous_format),)

        with UserCode(path, FORWARD), sdpa_kernel(SDPBackend.MATH):
            joint = aot_export_joint_simple(forward, (x_TD.requires_grad_(), *weights.values()), trace_joint=True)
    assert isinstance(joint, fx.GraphModule)
    return _module(joint.graph, parameters)


def _class(path: Path, name: str, source: str) -> type[nn.Module]:
    """Run the file in a new module and return the class."""
    namespace = ModuleType(path.stem)
    namespace.__file__ = str(path)
    with UserCode(path, READING):
        exec(builtins.compile(source, str(path), "exec"), vars(namespace))
    cls = getattr(namespace, name, None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise ModuleError(f"{path.name}: {name} is not a torch.nn.Module", f"write `class {name}(torch.nn.Module): …`")
    return cls


def _refuse_state(module: nn.Module, name: str) -> None:
    """Raise ModuleError if a module has buffers or frozen parameters."""
    if buffers := [key for key, _ in module.named_buffers()]:
        message = f"{name} has a buffer, {buffers[0]}; a layer may only have parameters"
        raise ModuleError(message, "compute it in forward, with torch.arange, torch.tril and the like")
    if frozen := [key for key, parameter in module.named_parameters() if not parameter.requires_grad]:
        message = f"{name}.{frozen[0]} is frozen; all parameters of a layer are trained"
        raise ModuleError(message, "remove requires_grad=False")


def _parameter(values: FirstValues, key: str, parameter: nn.Parameter) -> ModuleParameter:
    constant = values.constant(parameter)
    if constant is not None and not isfinite(constant):
        raise ModuleError(f"parameter {key} is initialized to {constant}", "initialize it to a finite number")
    return ModuleParameter(key, tuple(parameter.shape), constant)


def _to_module_shape(x_TD: Tensor, wanted: WantedModule) -> Tensor:
    """x as the module takes it: [tokens, hidden] for feed-forward, [sequences, sequence, hidden] for attention."""
    return x_TD.view(wanted.sequences, wanted.sequence, -1) if wanted.role == "attention" else x_TD


def _refuse_output(y: object, wanted: WantedModule) -> None:
    shape = (wanted.sequences, wanted.sequence) if wanted.role == "attention" else (wanted.tokens,)
    expected = f"{wanted.dtype} {[*shape, wanted.hidden]}"
    returned = f"{str(y.dtype).removeprefix('torch.')} {[*y.shape]}" if isinstance(y, Tensor) else type(y).__name__
    if returned != expected:
        raise ModuleError(f"forward returns {returned}, not {expected}, the shape of its input", "return that shape")


# ---------------------------------------------------------------- the graph
def _module(graph: fx.Graph, parameters: tuple[ModuleParameter, ...]) -> Module:
    """Convert a joint graph of forward and backward, whose results are y and the gradients of x and of the weights."""
    *body, output = graph.nodes
    copy, *results = [result and producer_of(result) for result in output.args[0]]
    results = [_copied_node(copy), *results]
    unused = [parameter.name for parameter, result in zip(parameters, results[2:], strict=True) if result is None]
    if unused or results[1] is None:
        source = f"parameter {unused[0]}" if unused else "its input"
        raise ModuleError(f"the result of forward does not depend on {source}", "use it or remove it")
    roots = [result for result in results if result is not None]
    conversion = Conversion(ancestors_of(roots), Draft(_PLAIN))
    outline = Module(parameters, (), (), (), "", "", ())
    placeholders = (node for node in body if node.op == "placeholder")
    for name, node in zip((INPUT, *outline.locals, TANGENT), placeholders, strict=True):
        conversion.argument(name, node)
    for node in body:
        if node in conversion.live and node.op != "placeholder":
            _refuse_op(node)
            conversion.add(node)
    y, *gradients = [conversion.values[root] for root in roots]
    nodes, tensors = conversion.draft.nodes, conversion.draft.tensors
    names = {value: f"v{index}" for index, value in enumerate(value for node in nodes for value in node.outputs)}

    def final(value: str) -> str:
        return names.get(value, value)

    ancestors, todo = set[str](), [y]
    while todo:
        maker = next((node for node in nodes if todo[-1] in node.outputs), None)
        value = todo.pop()
        if maker is not None and value not in ancestors:
            ancestors.update(maker.outputs)
            todo += maker.reads
    renamed = [
        replace(
            node,
            args=tuple(final(arg) if isinstance(arg, str) else arg for arg in node.args),
            outputs=tuple(map(final, node.outputs)),
        )
        for node in nodes
    ]
    forward = {final(value) for value in ancestors}
    d_x, *weights = map(final, gradients)
    return replace(
        outline,
        forward=tuple(node for node in renamed if forward.intersection(node.outputs)),
        backward=tuple(node for node in renamed if not forward.intersection(node.outputs)),
        tensors=tuple((final(value), tensor.shape, tensor.dtype) for value, tensor in tensors.items()),
        y=final(y),
        d_x=d_x,
        weights=tuple(weights),
    )


def _copied_node(copy: fx.Node) -> fx.Node:
    """The node that the result of forward copies, if it owns a contiguous tensor of the same shape; else the copy."""
    node = copy.args[0]
    while isinstance(node, fx.Node) and (node.target in RESHAPED or node.target in IDENTITIES):
        node = node.args[0]
    assert isinstance(node, fx.Node)
    tensor = node.meta["val"]
    owns = node.op == "call_function" and node.target is not operator.getitem and not is_torch_view(str(node.target))
    same_shape = owns and isinstance(tensor, Tensor) and tensor.shape == copy.meta["val"].shape
    return node if same_shape and tensor.is_contiguous() else copy


def _refuse_op(node: fx.Node) -> None:
    """Raise ModuleError for ops that a segment cannot have: device-specific ones, other libraries', other dtypes."""
    if node.op == "get_attr":
        message = "forward creates a tensor from Python numbers, or reads a tensor that is not a parameter"
        raise ModuleError(message, "use torch.full or torch.arange in forward, or a parameter")
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return  # getitem: one of several results
    hint = "compute it with other torch ops"
    if target.namespace != "aten" or any(part in str(target) for part in OF_ONE_DEVICE):
        raise ModuleError(f"forward calls {target}, which not every device supports", hint)
    returned = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    for tensor in returned:
        dtype = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else ""
        if dtype and dtype not in ITEMSIZE:
            raise ModuleError(
                f"forward has a tensor of {dtype}: {target}", f"use {', '.join(list(ITEMSIZE)[:5])} or bool"
            )
    view = any(item.alias_info is not None for item in target._schema.returns)
    if view and not is_torch_view(str(target)) and target not in (*IDENTITIES, *PARTS):
        raise ModuleError(f"forward calls {target}, a view op that dsc does not support", hint)
