"""How often the patterns of fusion passes occur in a segment, from the segment alone
(compiler/model/segments/passes.py). No torch."""

from __future__ import annotations

from compiler.ir.dtypes import is_packed
from compiler.ir.segment import SUM, Segment
from runtime.contract.weights import is_adapter

TILE = 128  # elements in a tile of E4M3 or E5M6


def num_normed_sums(segment: Segment) -> int | None:
    """How often a segment norms the sum of the residual stream and attention's output. None if adapters, whose sums
    may be normed too, make the number unknown."""
    if any(is_adapter(param.name) for param in segment.params):
        return None
    begins = segment.kind in ("between", "dense", "router") and has_pre(segment)
    return begins * (1 + (SUM in segment.recompute))


def residual(segment: Segment) -> int:
    """1 if a segment norms the residual stream and passes it on, else 0. The gradient of the stream is then a sum with
    that of the norm."""
    return segment.kind in ("attention", "between", "dense", "enter", "project", "router") and has_pre(segment)


def has_pre(segment: Segment) -> bool:
    """Whether a segment begins with a norm."""
    return bool(dict(segment.constants).get("pre", True))


def adds_expert_rows(segment: Segment, shared: bool) -> int:
    """1 if a join adds the experts' rows to two values in turn, h and the shared experts' output (`shared`), or to one
    value (not `shared`); else 0."""
    has_shared = any(argument.name == "shared" for argument in segment.inputs)
    sum_constants = {"post", "factor", "mixed"} & {*dict(segment.constants)}
    # with these, the sum of the parts is normed or scaled before it is added to the residual stream
    has_pattern = has_shared and not shared if sum_constants else has_shared == shared
    return segment.kind == "join" and has_pattern


def reads_router_input(segment: Segment, shared: bool) -> int:
    """1 if the input of a router's product and permutation has a third reader (`shared`), or has none (not `shared`);
    else 0."""
    is_stream = not has_pre(segment) and "streams" not in dict(segment.constants)
    read_twice = any(output.name == "x" for output in segment.outputs) or is_stream
    return segment.kind == "router" and read_twice == shared


def logits(segment: Segment, trained: bool, part: bool) -> int:
    """Whether a head computes its logits block by block. `trained`: with the gradient of its weight; `part`: for one
    shard of the vocabulary."""
    constants = dict(segment.constants)
    in_blocks = segment.kind == "head" and "logits" in segment.recompute and "cap" not in constants
    return in_blocks and segment.params[0].grad == trained and ("ranks" in constants) == part


def routes_in_one_op(segment: Segment) -> bool:
    """Whether a router scores and chooses in one op, and permutes rows by its choice: without a table of tokens,
    replayed choices or padding."""
    plain = {"sqrt_softplus", "slices", "replays", "padded"}.isdisjoint(dict(segment.constants))
    return segment.kind == "router" and plain and all(argument.name != "tokens" for argument in segment.inputs)


def has_slots(segment: Segment) -> bool:
    """Whether a router sends rows to slots of experts that a placement decides."""
    return any(param.name == "slots" for param in segment.params)


def is_recomputed(segment: Segment, name: str) -> bool:
    """Whether the backward recomputes what `name` says, or the whole segment."""
    return name in segment.recompute or segment.recomputes_all


def norms(segment: Segment) -> int:
    """The number of norms whose result only products read: in attention those of rows, not those of heads."""
    is_attention = segment.kind in ("attention", "project", "attend")
    names = {param.name for param in segment.params} if is_attention else set()
    row_norms = {"norm"} if "k_norm" in names else {"norm", "q_norm"}
    return len(names & (row_norms | {"kv_norm"} if "kv_up" in names else row_norms))


def quantised_norms(segment: Segment) -> int:
    """The number of norms with a quantised result: those of F that are not fused with a sum, and those that the
    backward recomputes."""
    dense_norm = segment.kind == "dense" and has_pre(segment)
    forward = norms(segment) + (dense_norm and "residual_norm" not in segment.fused)
    with_sum = SUM in segment.recompute and "residual_norm" in segment.fused  # recomputed as one op with its sum
    recomputed = is_recomputed(segment, "rmsnorm") * (norms(segment) + (dense_norm and not with_sum))
    return forward + recomputed + (bool(segment.remade) and segment.kind == "shared" and not has_gate(segment))


def has_unknown_matches(segment: Segment) -> bool:
    """Whether a segment quantises values for which the number of matches is not known: results of an activation without
    a fused kernel, inputs without a norm, and values that a gate or a bias gradient also reads unquantised."""
    return "activation" in dict(segment.constants) or not has_pre(segment) or has_gate(segment) or has_biases(segment)


def has_biases(segment: Segment) -> bool:
    """Whether the products of a feed-forward part have biases, whose gradients sum unquantised values."""
    return segment.kind in ("dense", "experts", "shared") and "biased" in dict(segment.constants)


def has_gate(segment: Segment) -> bool:
    """Whether shared experts have a gate, which reads their input unquantised."""
    return segment.kind == "shared" and "gated" in dict(segment.constants)


def has_wide_norms(segment: Segment) -> bool:
    """Whether the result of a norm is read both quantised and unquantised."""
    return sends_packed(segment) or (has_gate(segment) and bool(segment.remade) and "operands" in dict(segment.stored))


def swiglus(segment: Segment, gated: bool) -> int:
    """The number of SwiGLUs whose result is an FP8 operand. `gated`: those with a gate weight for each row."""
    constants = dict(segment.constants)
    if "operands" not in dict(segment.stored) or "activation" in constants:
        return False
    by_rows = segment.kind == "experts" or ("gated" in constants and not has_biases(segment))
    return by_rows == gated and segment.kind in ("experts", "dense", "shared")


def recomputes_activation(segment: Segment) -> bool:
    """Whether the backward recomputes an activation and the product before it."""
    return segment.recomputes_all or {"up", "swiglu"} <= {*segment.recompute}


def saves_swiglu_input(segment: Segment) -> bool:
    """Whether the input of its SwiGLU is saved in FP8: the SwiGLU is recomputed and the product before it is not."""
    return "swiglu" in segment.recompute and not recomputes_activation(segment)


def requantises_attention(segment: Segment, from_copy: bool) -> bool:
    """Whether W quantises attention's output again: `from_copy` of lower precision, or from the output itself."""
    attends = segment.kind in ("attention", "attend") and not segment.recomputes_all
    attends &= not any(param.name == "group_out" for param in segment.params)  # it is rotated and multiplied first
    return attends and ("attention_output" in dict(segment.stored)) == from_copy


def latent(segment: Segment) -> dict[str, int | float | bool]:
    """The constants of BF16 latent attention with sizes that its fused kernels take; {} for any other segment."""
    sizes = {name: value for name, value in segment.constants if not isinstance(value, (str, tuple))}
    if segment.kind != "attention" or "nope" not in sizes or segment.inputs[0].dtype != "bfloat16":
        return {}
    if any(argument.name == "starts" for argument in segment.inputs):  # with several documents it is not fused
        return {}
    return sizes if sizes["value"] == TILE and sizes["nope"] <= TILE and 0 < sizes["rope"] <= TILE // 2 else {}


def can_quantise_latents(segment: Segment) -> bool:
    """Whether the kernel can return gradients of keys and values quantised by rows and by columns: those of a head are
    then two tiles wide, sequences begin at column tiles, and rope rows are multiples of 16 bytes (else the kernel takes
    fewer than 128 keys at a time)."""
    sizes = latent(segment)
    return bool(sizes) and sizes["nope"] == TILE and not sizes["sequence"] % TILE and not sizes["rope"] % 8


def sends_packed(segment: Segment) -> bool:
    """Whether a router sends rows to the experts in FP8."""
    return segment.kind == "router" and is_packed(dict(segment.stored).get("rows", ""))


def gets_packed(segment: Segment) -> bool:
    """Whether gradients of rows are sent to the experts in FP8."""
    return segment.kind == "join" and is_packed(dict(segment.stored).get("d_rows", ""))
