"""What a segment has that passes of fusion look for, from the segment alone (compiler/model/segments/passes.py). No
torch."""

from __future__ import annotations

from compiler.ir.dtypes import is_packed
from compiler.ir.segment import SUM, Segment
from runtime.contract.weights import is_adapter

TILE = 128  # numbers of a tile of E4M3 or E5M6


def attended(segment: Segment) -> int | None:
    """Segments that begin with the sum of the residual stream and what attention gave; norms may be behind those of
    adapters, too."""
    if any(is_adapter(param.name) for param in segment.params):
        return None
    begins = segment.kind in ("between", "dense", "router") and has_pre(segment)
    return begins * (1 + (SUM in segment.recompute))


def residual(segment: Segment) -> int:
    """Segments whose input goes on in the residual stream: its gradient has a summand beside the norm's."""
    return segment.kind in ("attention", "between", "dense", "enter", "project", "router") and has_pre(segment)


def has_pre(segment: Segment) -> bool:
    """Whether a norm is in front of what a segment computes."""
    return bool(dict(segment.constants).get("pre", True))


def joined(segment: Segment, shared: bool) -> int:
    has_shared = any(each.name == "shared" for each in segment.inputs)
    apart = {"post", "factor", "mixed"} & {*dict(segment.constants)}
    wanted = has_shared and not shared if apart else has_shared == shared  # apart: the sum is normed or scaled alone
    return segment.kind == "join" and wanted


def routed(segment: Segment, shared: bool) -> int:
    """What is permuted goes to the router's product as well, and may to shared experts."""
    is_stream = not has_pre(segment) and "streams" not in dict(segment.constants)
    read_twice = any(output.name == "x" for output in segment.outputs) or is_stream
    return segment.kind == "router" and read_twice == shared


def logits(segment: Segment, trained: bool, part: bool) -> int:
    """Products of a head, or of a part of it, that are made block by block, with the gradient of its weight or
    without."""
    constants = dict(segment.constants)
    whole = segment.kind == "head" and "logits" in segment.recompute and "cap" not in constants
    return whole and segment.params[0].grad == trained and ("ranks" in constants) == part


def scored(segment: Segment) -> bool:
    """Whether a router scores and chooses in one op, and permutes rows by what it chose: without a table of tokens,
    replayed choices or padding."""
    plain = {"sqrt_softplus", "slices", "replays", "padded"}.isdisjoint(dict(segment.constants))
    return segment.kind == "router" and plain and all(each.name != "tokens" for each in segment.inputs)


def placed(segment: Segment) -> bool:
    return any(param.name == "slots" for param in segment.params)


def again(segment: Segment, name: str) -> bool:
    """Whether the backward computes again what `name` says, or the whole segment."""
    return name in segment.recompute or segment.repeats


def norms(segment: Segment) -> int:
    """Norms whose result is an operand of products alone: of attention those of rows, not those of each head."""
    of_attention = segment.kind in ("attention", "project", "attend")
    names = {param.name for param in segment.params} if of_attention else set()
    of_rows = {"norm"} if "k_norm" in names else {"norm", "q_norm"}
    return len(names & (of_rows | {"kv_norm"} if "kv_up" in names else of_rows))


def quantised_norms(segment: Segment) -> int:
    """Those of F that no sum goes before, and those that the backward makes again."""
    of_dense = segment.kind == "dense" and has_pre(segment)
    of_f = norms(segment) + (of_dense and "residual_norm" not in segment.fused)
    by_sum = SUM in segment.recompute and "residual_norm" in segment.fused  # that norm is one op with its sum again
    recomputed = again(segment, "rmsnorm") * (norms(segment) + (of_dense and not by_sum))
    return of_f + recomputed + (bool(segment.remade) and segment.kind == "shared" and not gated(segment))


def is_other(segment: Segment) -> bool:
    """Whether a segment quantises what an op without a kernel makes, what no norm is in front of, or what a gate or the
    sum of a bias's gradient reads as it is."""
    return "activation" in dict(segment.constants) or not has_pre(segment) or gated(segment) or biased(segment)


def biased(segment: Segment) -> bool:
    """Whether the products of a feed-forward part have biases, whose gradients are sums of what is not quantised."""
    return segment.kind in ("dense", "experts", "shared") and "biased" in dict(segment.constants)


def gated(segment: Segment) -> bool:
    """Whether shared experts have a gate, which reads their input as it is."""
    return segment.kind == "shared" and "gated" in dict(segment.constants)


def wide_norms(segment: Segment) -> bool:
    """Whether the result of a norm is read quantised and as it is."""
    return sends_packed(segment) or (gated(segment) and bool(segment.remade) and "operands" in dict(segment.stored))


def swiglus(segment: Segment, gated: bool) -> int:
    """Those whose result is an operand of eight bits; rows that come so alone are read as they are."""
    constants = dict(segment.constants)
    if "operands" not in dict(segment.stored) or "activation" in constants:
        return False
    by_rows = segment.kind == "experts" or ("gated" in constants and not biased(segment))
    return by_rows == gated and segment.kind in ("experts", "dense", "shared")


def activated_again(segment: Segment) -> bool:
    """Whether the backward computes an activation again, and the product in front of it."""
    return segment.repeats or {"up", "swiglu"} <= {*segment.recompute}


def kept(segment: Segment) -> bool:
    """Whether the input of its SwiGLU is kept in eight bits: it is computed again, and the product before it is not."""
    return "swiglu" in segment.recompute and not activated_again(segment)


def attention_again(segment: Segment, kept: bool) -> bool:
    """Whether W quantises again what attention returned, from what is `kept` for it, or from the value itself."""
    attends = segment.kind in ("attention", "attend") and not segment.repeats
    attends &= not any(param.name == "group_out" for param in segment.params)  # turned, and multiplied, before
    return attends and ("attention_output" in dict(segment.stored)) == kept


def latent(segment: Segment) -> dict[str, int | float | bool]:
    """The constants of latent attention in BF16 whose values are a tile wide, within what its kernels take; {} of
    any other."""
    sizes = {name: value for name, value in segment.constants if not isinstance(value, (str, tuple))}
    if segment.kind != "attention" or "nope" not in sizes or segment.inputs[0].dtype != "bfloat16":
        return {}
    if any(each.name == "starts" for each in segment.inputs):  # of several documents: apart from what is around it
        return {}
    return sizes if sizes["value"] == TILE and sizes["nope"] <= TILE and 0 < sizes["rope"] <= TILE // 2 else {}


def latent_tiles(segment: Segment) -> bool:
    """Whether gradients of keys and values come in tiles, of rows and of columns: a head's are two tiles wide then, and
    sequences begin where tiles of columns do. Rows of 16 bytes, or the kernel has fewer than 128 keys at a time."""
    sizes = latent(segment)
    return bool(sizes) and sizes["nope"] == TILE and not sizes["sequence"] % TILE and not sizes["rope"] % 8


def sends_packed(segment: Segment) -> bool:
    return segment.kind == "router" and is_packed(dict(segment.stored).get("rows", ""))


def gets_packed(segment: Segment) -> bool:
    """Whether the experts get the gradients of their rows in eight bits."""
    return segment.kind == "join" and is_packed(dict(segment.stored).get("d_rows", ""))
