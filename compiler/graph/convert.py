"""What was recorded of a traced segment → the plain joint graph. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler import ir
from compiler.graph.joint import COLUMNS, Constant, Joint, Node, named
from compiler.oprules import RULES, Tensor

SAME = ("aten.detach.default", "aten.alias.default")  # calls whose result is their argument
SPLITS = ("aten.split_with_sizes.default", "aten.split.Tensor")  # calls whose results are views
OURS = "dsc."


@dataclass(frozen=True, slots=True)
class Label:
    """What a value is: an output, the gradient of an input or of a weight, by name; or a value in between or its
    gradient, by (op, occurrence, output index)."""

    role: str
    name: str = ""
    key: tuple[str, int, int] = ("", 0, 0)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a recording, by its number there."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """What passed torch's dispatcher: `dsc.linear.default`. In `args` a tensor is a Value, other things are themselves;
    `options` names what was given by name."""

    target: str
    args: tuple[Any, ...]
    outputs: tuple[Value, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """Calls in order; shape and dtype of every value; the values that arguments are, by name, and what labels mean."""

    calls: tuple[Call, ...]
    tensors: tuple[Tensor, ...]
    arguments: Mapping[str, Value]
    labels: Mapping[Label, Value | None]


def convert(segment: ir.Segment, recording: Recording) -> Joint:
    same = {call.outputs[0]: call.args[0] for call in recording.calls if call.target in SAME}

    def base(value: Value) -> Value:
        while value in same:
            value = same[value]
        return value

    found = {label: None if value is None else base(value) for label, value in recording.labels.items()}
    roots = [value for label, value in found.items() if label.role in ("output", "gradient", "weight") and value]
    conversion = Conversion(recording.tensors, needed(recording.calls, roots))
    for name, argument in recording.arguments.items():
        conversion.argument(name, argument)
    for call in recording.calls:
        conversion.add(call)
    names: dict[str, str] = {}
    made = [(label, value) for label, value in found.items() if value and value in conversion.names]
    for label, value in made:
        if label.role == "between":
            names |= conversion.forward_names(value, label.key)
    for label, value in made:
        if label.role == "between gradient":
            op, occurrence, index = label.key
            name = conversion.names[value]
            if name.startswith("%"):
                names.setdefault(name, f"d_{RULES[op].value_names(op, occurrence)[index]}")

    def chosen(role: str) -> list[tuple[str, str]]:
        missing = [label.name for label, value in found.items() if label.role == role and value is None]
        assert not missing, f"no {role} of {missing} in {segment.kind}"
        return [(label.name, conversion.names[value]) for label, value in found.items() if label.role == role and value]

    gradients = chosen("gradient")
    for leaf, name in gradients:
        if name.startswith("%"):
            names.setdefault(name, f"d_{leaf}")
    outputs = [name for _, name in chosen("output")]
    return named(segment, conversion.nodes, conversion.named_tensors, names, outputs, gradients, chosen("weight"))


def values_in(args: Sequence[Any]) -> list[Value]:
    """The tensors among arguments, also of a list."""
    found = []
    for arg in args:
        found += [arg] if isinstance(arg, Value) else values_in(arg) if isinstance(arg, tuple) else []
    return found


def needed(calls: Sequence[Call], roots: Sequence[Value]) -> set[Value]:
    """Every value the roots need, themselves included."""
    seen = set(roots)
    for call in reversed(calls):
        if not seen.isdisjoint(call.outputs):
            seen.update(values_in(call.args))
    return seen


@dataclass
class Conversion:
    """The joint nodes so far. Values that are no arguments have provisional names beginning with %."""

    tensors: Sequence[Tensor]
    live: set[Value]
    nodes: list[Node] = field(default_factory=list)
    named_tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[Value, str] = field(default_factory=dict)

    def argument(self, name: str, value: Value) -> None:
        self.names[value] = name
        self.named_tensors[name] = self.tensors[value.number]

    def add(self, call: Call) -> None:
        """Converts a call, unless nothing that is wanted needs it; of the views of a split those that are needed."""
        live = [value for value in call.outputs if value in self.live]
        if not live:
            return
        target, args = call.target, call.args
        assert not call.options, call
        if target in SAME:
            self.names[call.outputs[0]] = self.names[args[0]]
        elif target in SPLITS:
            assert args[2] in (1, -1), call
            low = 0
            for value in call.outputs:
                high = low + self._width(value)
                if value in self.live:
                    self._columns(value, args[0], low, high)
                low = high
        elif target == "aten.slice.Tensor":
            x, dim, low, high = args
            assert dim == 1, call
            self._columns(call.outputs[0], x, low, min(high, self._width(x)))
        elif target == "aten.add.Tensor":
            self._emit("add", args, call.outputs)
        elif target == "aten.cat.default":
            parts, dim = args
            assert dim in (1, -1), call
            self._emit("cat2", parts, call.outputs)
        else:
            assert target.startswith(OURS) and target.endswith(".default"), call
            self._emit(target.removeprefix(OURS).removesuffix(".default"), args, call.outputs)

    def forward_names(self, value: Value, key: tuple[str, int, int]) -> dict[str, str]:
        """Final names of the outputs, hidden ones included, of the op that made `value` as its `index`-th."""
        op, occurrence, index = key
        final = RULES[op].value_names(op, occurrence)
        name = self.names[value]
        for made in self.nodes:
            if name in made.outputs and made.op == op:
                return dict(zip(made.outputs, final, strict=True))
        return {name: final[index]}  # a view

    def _emit(self, op: str, args: Sequence[Any], outputs: Sequence[Value]) -> None:
        arguments = tuple(self._argument(arg) for arg in args)
        self.nodes.append(Node(op, arguments, tuple(self._new(value) for value in outputs)))

    def _columns(self, value: Value, x: Value, low: int, high: int) -> None:
        self.nodes.append(Node(COLUMNS, (self.names[x], low, high), (self._new(value),)))

    def _new(self, value: Value) -> str:
        name = f"%{value.number}"
        self.argument(name, value)
        return name

    def _width(self, value: Value) -> int:
        width = self.tensors[value.number].shape[1]
        assert isinstance(width, int), width
        return width

    def _argument(self, arg: Any) -> str | Constant:
        if isinstance(arg, Value):
            return self.names[arg]
        assert arg is None or isinstance(arg, int | float | bool), arg
        return arg
