"""Storage pass: stores and sends values in another dtype than they are computed in. No torch.

A segment's `stored` has these dtypes, from the run's precision: of the operands of its products and of the rows that it
exchanges. With FP8 operands (arXiv 2412.19437, §3.3) every product reads quantised values:

- for a weight gradient F saves the quantised input, once, instead of the input;
- an input that is recomputed is quantised again; one that the backward reads anyway is saved unquantised;
- the input of a SwiGLU that is recomputed is saved in FP8; kernels that read it dequantise it on the fly;
- a gradient is quantised once, by rows for the input's gradient and by columns for the weight's. W gets the latter if
  the weight is trained;
- products of adapters read unquantised values;
- values that F quantised by rows, or that arrived quantised from other ranks, are quantised again by columns in W;
- the output of attention and rows on their way to experts have scales that are powers of two. Quantising them again by
  columns then changes only numbers that become too small for FP8.

E4M3 with FP32 scales has its own ops and kernels. For other formats (dsl/facts/formats.py) columns are quantised from
the original values, not from those quantised by rows, as in NVIDIA's recipes (arXiv 2506.08027, 2509.25149). F does so
unless the backward has the original value anyway, and the input of a SwiGLU is saved unquantised. `columns` in `stored`
lists the transformations.

The output of attention may be saved in 12 bits: both its own backward and the weight gradient after it read that.
Logits may be saved in FP32: the loss reads them in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.ir.dtypes import PackedDtype, is_packed, parse_packed, transpose_tiles
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import phases
from runtime.contract.weights import is_adapter

PRODUCTS = ("linear", "grouped_linear")
GATES = ("swiglu", "gated_swiglu")
ATTENTION = (
    *(f"{op}_attention{form}" for op in ("mla", "gqa", "bounded") for form in ("", "_peaks")),
    *("chosen_attention", "compressed_attention"),
)
# The ops of the loss → the index, among the tensors that they read, of the logits.
LOSSES = {
    **{"cross_entropy": 0, "cross_entropy_dgrad": 1, "cross_entropy_part": 0, "cross_entropy_part_dgrad": 2},
    **{"policy_loss": 0, "policy_loss_dgrad": 1},
}
# Ops that only move rows → the index of the argument that has the rows.
MOVES = {"permute": 0, "permute_placed": 0, "unpermute_dgrad": 0}


def operand_weights(joint: Joint) -> tuple[str, ...]:
    """The parameters that products read quantised. A device holds a quantised copy of each."""
    if "weights" not in dict(joint.segment.stored):
        return ()
    read = {node.args[1] for node in joint.nodes if node.op in PRODUCTS and not is_wide(joint, node)}
    return tuple(param.name for param in joint.segment.params if param.name in read)


def is_wide(joint: Joint, node: OpNode) -> bool:
    """Whether a product stays in the dtype of activations: products of adapters, and weight gradients of products that
    the forward does not quantise, such as those of an indexer."""
    if node.is_weight_gradient:
        narrow = {product.args[1] for product in joint.nodes if product.op in PRODUCTS}
        weights = [name for name, value in joint.weights if value in node.outputs]
        return any(is_adapter(name) or name not in narrow for name in weights)
    return is_adapter(node.reads[1])


def apply_storage_dtypes(joint: Joint) -> Joint:
    """Apply the segment's storage dtypes to its joint graph."""
    stored = dict(joint.segment.stored)
    joint = _quantise_sent_values(joint, {name: dtype for name, dtype in stored.items() if name in joint.tensors})
    if "attention_output" in stored:
        joint = _copy_attention_output(joint, stored["attention_output"])
    if "logits" in stored:
        joint = _wide_logits(joint, stored["logits"])
    if "operands" not in stored:
        return joint
    flags = tuple(word for role, word in joint.segment.stored if role == "columns")
    return _Products(joint, stored["operands"], stored["weights"], flags).rewritten()


def _copy_attention_output(joint: Joint, dtype: str) -> Joint:
    """The joint graph whose backward reads the output of attention from a copy in `dtype`. I and W each dequantise
    it."""
    phase_of = phases(joint)
    value = next(
        node.outputs[0] for index, node in enumerate(joint.nodes) if node.op in ATTENTION and phase_of[index] == "F"
    )
    copy_name, tensors, nodes = f"{value}_kept", dict(joint.tensors), list[OpNode]()
    for index, node in enumerate(joint.nodes):
        if phase_of.get(index, "F") != "F" and value in node.reads:
            dequantised = f"{value}_{phase_of[index]}"
            if dequantised not in tensors:
                nodes.append(OpNode("dequantise", (copy_name,), (dequantised,)))
                tensors[dequantised] = tensors[value]
            node = replace(node, args=tuple(dequantised if arg == value else arg for arg in node.args))
        nodes.append(node)
        if value in node.outputs:
            nodes.append(OpNode("quantise", (value,), (copy_name,)))
    if len(nodes) == len(joint.nodes) + 1:  # the backward recomputes it
        return joint
    tensors[copy_name] = replace(tensors[value], dtype=dtype)
    return replace(joint, nodes=tuple(nodes), tensors=tensors, early=(*joint.early, copy_name))


def _wide_logits(joint: Joint, dtype: str) -> Joint:
    """The joint graph whose loss reads logits, and returns their gradient, in a wider dtype. A cast is inserted for
    each."""
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


def _quantise_sent_values(joint: Joint, dtypes: dict[str, str]) -> Joint:
    """The joint graph with values that are sent or received in another dtype. They are quantised by their producer,
    before it moves rows."""
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
                nodes.append(replace(node, outputs=tuple(wide if name == value else name for name in node.outputs)))
                node = OpNode("quantise", (wide,), (value,))
                tensors[wide] = tensors[value]
        nodes.append(node)
    tensors |= {value: replace(tensors[value], dtype=dtype) for value, dtype in dtypes.items()}
    return replace(joint, nodes=tuple(nodes), tensors=tensors)


class _Products:
    """Rewrites a joint graph to quantised products."""

    def __init__(self, joint: Joint, dtype: str, weights: str, flags: tuple[str, ...]) -> None:
        self.joint, self.dtype, self.flags = joint, dtype, flags
        self.form = parse_packed(dtype).form
        phase_of = phases(joint)
        backward = [joint.nodes[index] for index, phase in phase_of.items() if phase != "F"]
        self.forward = {index for index, phase in phase_of.items() if phase == "F"}
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
        self.recomputed, self.early = list(joint.recomputed), list(joint.early)

    def _operands(self, node: OpNode) -> int:
        """How many of the values that a node reads, from the first on, are quantised."""
        return (2 if node.is_weight_gradient else 1) if node in self.narrow else 0

    def rewritten(self) -> Joint:
        for index, node in enumerate(self.joint.nodes):
            args = list(node.args)
            if node in self.narrow:
                first, second = node.reads[:2]
                weighs = node.is_weight_gradient
                args[0] = self._operand(first) if node.op in PRODUCTS else self._gradient(first, weighs)
                args[1] = self._saved_operand(second) if weighs else second
            elif index not in self.forward:
                args = [f"{arg}_fp8" if arg in self.gates else arg for arg in args]
            self.nodes.append(replace(node, args=tuple(args)))
            for value in self.gates & set(node.outputs):
                self._make("quantise", value, f"{value}_fp8")
        early = (*self.early, *(f"{value}_fp8" for value in sorted(self.gates)))
        return replace(
            self.joint, nodes=tuple(self.nodes), tensors=self.tensors, recomputed=tuple(self.recomputed), early=early
        )

    def _make(self, op: str, value: str, result: str) -> str:
        """Return `result`, after adding the node that makes it if there is none yet."""
        if result not in self.tensors:
            columns = f"{value}_columns"
            results: Sequence[str] = (result, columns) if op == "quantise_both" else (result,)
            self.nodes.append(OpNode(op, (value,), tuple(results)))
            for name in results:
                by_columns = name == columns or op in ("requantise", "quantise_columns")
                dtype = self._dtype(value, op == "quantise_both", by_columns)
                self.tensors[name] = replace(self.tensors[value], dtype=transpose_tiles(dtype) if by_columns else dtype)
        return result

    def _dtype(self, value: str, gradient: bool, by_columns: bool) -> str:
        """The dtype of a value once it is quantised: the one it arrived in, else that of operands."""
        if is_packed(self.tensors[value].dtype):
            return self.tensors[value].dtype
        packed = parse_packed(self.dtype)
        if self.form is None:
            return str(PackedDtype(packed.element, packed.rows, packed.columns, ("pow2",) * (value in self.exact)))
        wanted = {"columns": by_columns, "hadamard": by_columns, "stochastic": gradient}
        flags = tuple(word for word in ("columns", *self.flags) if wanted[word])
        return str(PackedDtype(packed.element, packed.rows, packed.columns, flags))

    def _operand(self, value: str) -> str:
        """The name of the value as a product of the forward, or a recomputed one, reads it."""
        if is_packed(self.tensors[value].dtype):
            return value
        result = self._make("quantise", value, f"{value}_fp8")
        if value in self.recomputed and result not in self.recomputed:
            self.recomputed.append(result)
        return result

    def _saved_operand(self, value: str) -> str:
        """The name of the value as a weight gradient reads it."""
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
        if is_packed(self.tensors[value].dtype):  # it arrived quantised
            return self._make("requantise", value, f"{value}_columns") if by_columns else value
        both_ways = self.form is not None or value in self.by_columns
        rows = self._make("quantise_both" if both_ways else "quantise", value, f"{value}_fp8")
        return f"{value}_columns" if by_columns else rows


def _kept_gates(backward: Sequence[OpNode]) -> set[str]:
    """Inputs of recomputed SwiGLUs that no other op of the backward reads."""
    repeated = {node.reads[0] for node in backward if node.op in GATES}
    return repeated - {value for node in backward if node.forward_op not in GATES for value in node.reads}
