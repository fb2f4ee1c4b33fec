"""Storage: in which dtype values are kept and sent, where that is not the dtype they are computed in. No torch.

A segment says it in `stored`, as its run's precision has it: the operands of its products, and the rows it exchanges.
With operands of eight bits (arXiv 2412.19437, §3.3) every product reads quantised values:

- what F keeps for a weight gradient is the quantised input, once, and not the input;
- an input that is computed again is quantised again, and one that the backward reads anyway is kept as it is;
- the input of a SwiGLU that is computed again is kept in eight bits; kernels that read it widen it as they go;
- a gradient is quantised once, by rows for the input's gradient and by columns for the weight's: W gets the latter, if
  the weight is trained;
- products of adapters read values as they are;
- what F quantised by rows, or came so from other ranks, W quantises again by columns;
- what attention returns has scales that are powers of two, as rows on their way to experts have: in tiles of columns
  their numbers are the same then, but for those that become too small for eight bits.

E4M3 in FP32 scales has ops and kernels of its own. In other formats (dsl/facts/formats.py) columns are not made of
what F quantised by rows but of the values themselves, as NVIDIA's recipes have it (arXiv 2506.08027, 2509.25149): by
F, where the backward does not have the value anyway; and the input of a SwiGLU is kept as it is. `columns` in `stored`
says how.

What attention returns may be kept in twelve bits: both its own backward and the weight gradient behind it read that.
Logits may be kept in FP32: the loss reads them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.ir.dtypes import Packed, is_packed, packed_of, turned
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import phases
from runtime.contract.weights import is_adapter

PRODUCTS = ("linear", "grouped_linear")
GATES = ("swiglu", "gated_swiglu")
ATTENTION = (
    *(f"{op}_attention{form}" for op in ("mla", "gqa", "bounded") for form in ("", "_peaks")),
    *("chosen_attention", "compressed_attention"),
)
# The ops of the loss, and which value that each reads is the logits.
LOSSES = {
    **{"cross_entropy": 0, "cross_entropy_dgrad": 1, "cross_entropy_part": 0, "cross_entropy_part_dgrad": 2},
    **{"policy_loss": 0, "policy_loss_dgrad": 1},
}
# An op that only moves rows, and which of its arguments has them.
MOVES = {"permute": 0, "permute_placed": 0, "unpermute_dgrad": 0}


def operand_weights(joint: Joint) -> tuple[str, ...]:
    """The parameters that products read in eight bits: a device holds each once more, quantised."""
    if "weights" not in dict(joint.segment.stored):
        return ()
    read = {node.args[1] for node in joint.nodes if node.op in PRODUCTS and not is_wide(joint, node)}
    return tuple(param.name for param in joint.segment.params if param.name in read)


def is_wide(joint: Joint, node: OpNode) -> bool:
    """Whether a product stays in the dtype of activations: those of adapters do, and weight gradients of products that
    are not in few bits in the forward, as those of an indexer."""
    if node.is_weight_gradient:
        narrow = {each.args[1] for each in joint.nodes if each.op in PRODUCTS}
        found = [name for name, value in joint.weights if value in node.outputs]
        return any(is_adapter(name) or name not in narrow for name in found)
    return is_adapter(node.reads[1])


def in_storage(joint: Joint) -> Joint:
    """The joint graph with values as its segment stores them."""
    stored = dict(joint.segment.stored)
    joint = _sent(joint, {name: dtype for name, dtype in stored.items() if name in joint.tensors})
    if "attention_output" in stored:
        joint = _kept_in(joint, stored["attention_output"])
    if "logits" in stored:
        joint = _wide_logits(joint, stored["logits"])
    if "operands" not in stored:
        return joint
    how = tuple(word for role, word in joint.segment.stored if role == "columns")
    return _Products(joint, stored["operands"], stored["weights"], how).rewritten()


def _kept_in(joint: Joint, dtype: str) -> Joint:
    """The joint graph whose backward reads what attention returns from a copy in `dtype`; I and W widen it apart."""
    where = phases(joint)
    value = next(
        node.outputs[0] for index, node in enumerate(joint.nodes) if node.op in ATTENTION and where[index] == "F"
    )
    kept, tensors, nodes = f"{value}_kept", dict(joint.tensors), list[OpNode]()
    for index, node in enumerate(joint.nodes):
        if where.get(index, "F") != "F" and value in node.reads:
            again = f"{value}_{where[index]}"
            if again not in tensors:
                nodes.append(OpNode("dequantise", (kept,), (again,)))
                tensors[again] = tensors[value]
            node = replace(node, args=tuple(again if arg == value else arg for arg in node.args))
        nodes.append(node)
        if value in node.outputs:
            nodes.append(OpNode("quantise", (value,), (kept,)))
    if len(nodes) == len(joint.nodes) + 1:  # the backward computes it again
        return joint
    tensors[kept] = replace(tensors[value], dtype=dtype)
    return replace(joint, nodes=tuple(nodes), tensors=tensors, early=(*joint.early, kept))


def _wide_logits(joint: Joint, dtype: str) -> Joint:
    """The joint graph whose loss reads logits in a wider dtype and gives their gradient in it: a cast for each."""
    tensors, nodes = dict(joint.tensors), list[OpNode]()
    for node in joint.nodes:
        if node.op not in LOSSES:
            nodes.append(node)
            continue
        value = node.reads[LOSSES[node.op]]
        wide, gives = f"{value}_wide", node.outputs
        if wide not in tensors:
            nodes.append(OpNode("dequantise", (value,), (wide,)))
            tensors[wide] = replace(tensors[value], dtype=dtype)
        if is_gradient := node.is_input_gradient:
            gives = (f"{gives[0]}_wide",)
            tensors[gives[0]] = replace(tensors[node.outputs[0]], dtype=dtype)
        nodes.append(OpNode(node.op, tuple(wide if arg == value else arg for arg in node.args), gives))
        if is_gradient:
            nodes.append(OpNode("dequantise", gives, node.outputs))
    return replace(joint, nodes=tuple(nodes), tensors=tensors)


def _sent(joint: Joint, dtypes: dict[str, str]) -> Joint:
    """The joint graph with values that come or go in another dtype: their maker narrows them, before rows are moved."""
    tensors, nodes = dict(joint.tensors), []
    for node in joint.nodes:
        for value in dtypes.keys() & set(node.outputs):
            if node.op in MOVES:
                wide, narrow = node.reads[MOVES[node.op]], f"{node.reads[MOVES[node.op]]}_sent"
                nodes.append(OpNode("quantise", (wide,), (narrow,)))
                node = replace(node, args=tuple(narrow if arg == wide else arg for arg in node.args))
                tensors[narrow] = replace(tensors[wide], dtype=dtypes[value])
            else:
                wide = f"{value}_wide"
                nodes.append(replace(node, outputs=tuple(wide if each == value else each for each in node.outputs)))
                node = OpNode("quantise", (wide,), (value,))
                tensors[wide] = tensors[value]
        nodes.append(node)
    tensors |= {value: replace(tensors[value], dtype=dtype) for value, dtype in dtypes.items()}
    return replace(joint, nodes=tuple(nodes), tensors=tensors)


class _Products:
    """A joint graph on its way to products of few bits."""

    def __init__(self, joint: Joint, dtype: str, weights: str, how: tuple[str, ...]) -> None:
        self.joint, self.dtype, self.how = joint, dtype, how
        self.form = packed_of(dtype).form
        where = phases(joint)
        backward = [joint.nodes[index] for index, phase in where.items() if phase != "F"]
        self.forward = {index for index, phase in where.items() if phase == "F"}
        self.late = {value for node in backward for value in node.outputs}
        self.narrow = {node for node in joint.nodes if node.forward_op in PRODUCTS and not is_wide(joint, node)}
        self.wide = {value for node in backward for value in node.reads[self._operands(node) :]}
        weighs = [node for node in self.narrow if node.is_weight_gradient]
        self.by_columns = {node.reads[0] for node in weighs}
        self.gates = _kept_gates(backward) - self.late if self.form is None else set()
        self.exact = {value for node in joint.nodes if node.op in (*ATTENTION, "dequantise") for value in node.outputs}
        self.tensors = dict(joint.tensors)
        self.tensors |= {name: replace(self.tensors[name], dtype=weights) for name in operand_weights(joint)}
        self.nodes: list[OpNode] = []
        self.again, self.early = list(joint.again), list(joint.early)

    def _operands(self, node: OpNode) -> int:
        """How many of the values that a node reads first are in few bits."""
        return (2 if node.is_weight_gradient else 1) if node in self.narrow else 0

    def rewritten(self) -> Joint:
        for index, node in enumerate(self.joint.nodes):
            args = list(node.args)
            if node in self.narrow:
                first, second = node.reads[:2]
                weighs = node.is_weight_gradient
                args[0] = self._operand(first) if node.op in PRODUCTS else self._gradient(first, weighs)
                args[1] = self._kept(second) if weighs else second
            elif index not in self.forward:
                args = [f"{arg}_fp8" if arg in self.gates else arg for arg in args]
            self.nodes.append(replace(node, args=tuple(args)))
            for value in self.gates & set(node.outputs):
                self._make("quantise", value, f"{value}_fp8")
        early = (*self.early, *(f"{value}_fp8" for value in sorted(self.gates)))
        return replace(self.joint, nodes=tuple(self.nodes), tensors=self.tensors, again=tuple(self.again), early=early)

    def _make(self, op: str, value: str, result: str) -> str:
        """`result`, made here if it is not made yet."""
        if result not in self.tensors:
            columns = f"{value}_columns"
            results: Sequence[str] = (result, columns) if op == "quantise_both" else (result,)
            self.nodes.append(OpNode(op, (value,), tuple(results)))
            for name in results:
                by_columns = name == columns or op in ("requantise", "quantise_columns")
                dtype = self._dtype(value, op == "quantise_both", by_columns)
                self.tensors[name] = replace(self.tensors[value], dtype=turned(dtype) if by_columns else dtype)
        return result

    def _dtype(self, value: str, gradient: bool, by_columns: bool) -> str:
        """The dtype of a value in tiles of rows: the one it came in, or else that of operands."""
        if is_packed(self.tensors[value].dtype):
            return self.tensors[value].dtype
        of = packed_of(self.dtype)
        if self.form is None:
            return str(Packed(of.element, of.rows, of.columns, ("pow2",) * (value in self.exact)))
        wanted = {"columns": by_columns, "hadamard": by_columns, "stochastic": gradient}
        how = tuple(word for word in ("columns", *self.how) if wanted[word])
        return str(Packed(of.element, of.rows, of.columns, how))

    def _operand(self, value: str) -> str:
        """The value as a product of the forward, or one that is computed again, reads it."""
        if is_packed(self.tensors[value].dtype):
            return value
        result = self._make("quantise", value, f"{value}_fp8")
        if value in self.again and result not in self.again:
            self.again.append(result)
        return result

    def _kept(self, value: str) -> str:
        """The value as a weight gradient reads it."""
        if self.form is not None:
            columns = self._make("quantise_columns", value, f"{value}_columns")
            if value not in self.wide and value not in self.late and columns not in self.early:
                self.early.append(columns)
            return columns
        if value in self.wide and value not in self.late and not is_packed(self.tensors[value].dtype):
            rows = self._make("quantise", value, f"{value}_fp8_again")
        else:
            rows = self._operand(value)
        return self._make("requantise", rows, f"{rows}_columns")

    def _gradient(self, value: str, by_columns: bool) -> str:
        if is_packed(self.tensors[value].dtype):  # it came so
            return self._make("requantise", value, f"{value}_columns") if by_columns else value
        both = self.form is not None or value in self.by_columns
        rows = self._make("quantise_both" if both else "quantise", value, f"{value}_fp8")
        return f"{value}_columns" if by_columns else rows


def _kept_gates(backward: Sequence[OpNode]) -> set[str]:
    """Inputs of a SwiGLU that is computed again, of which the backward needs nothing else."""
    repeated = {node.reads[0] for node in backward if node.op in GATES}
    return repeated - {value for node in backward if node.forward_op not in GATES for value in node.reads}
