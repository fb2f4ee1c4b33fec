"""Attention over the keys that each query has chosen: when the Triton kernels apply and how they launch.

Their text is chosen_attention.py.j2 and chosen_attention_dgrad.py.j2, with pieces of attention's. Comments on spills
name the Triton version, such as 3.9, and the architecture if they are not of sm_90.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, VariableName, power_of_two
from compiler.ir import Buffer
from compiler.model.ops.kernel_shapes import takes_chosen_attention

_ONCE = "ld.global.L1::evict_first"  # for queries, or keys and values, that only one tile reads
STREAMS = {
    "_forward": (_ONCE, "st.global.cs"),
    "_row_values": (_ONCE,),
    "_query_gradient": (_ONCE, "st.global.cs"),
    "_key_gradient": (_ONCE, "st.global.cs"),
    "_total_key_gradient": (_ONCE,),
}
TILE = 2048  # choices, or columns of gradients of rope keys, that a program has at a time
Launch = dict[str, int | bool]


def _choose(
    name: str, sms: int, tensors: tuple[Buffer, ...], chosen: Buffer, sizes: tuple[int, ...]
) -> KernelChoice | None:
    """tensors: q, kv, k_rope; sizes: sequence, heads, nope, rope, value."""
    (q, kv, _), (S, H, nope, rope, value) = tensors, sizes
    dtypes = {tensor.dtype for tensor in tensors}
    dtype, top_k, K = q.dtype, power_of_two(int(chosen.shape[1])), int(chosen.shape[1])
    blocks = {name: max(16, power_of_two(size)) for name, size in (("NOPE", nope), ("ROPE", rope), ("VALUE", value))}
    if len(dtypes) > 1 or not kv.shape[0] or not takes_chosen_attention(nope, rope, value, dtype):
        return None
    keys = blocks["NOPE"] + blocks["ROPE"]
    Q = int(q.shape[0]) * S // int(kv.shape[0])
    words, query_words = (-(-rows // 128) * 4 for rows in (S, Q))  # whole blocks of each launch
    constants = {"S": S, "Q": Q, "H": H, "SCALE": (nope + rope) ** -0.5}
    constants |= {"NOPE": nope, "ROPE": rope, "VALUE": value}
    constants |= {f"BLOCK_{name}": size for name, size in blocks.items()}
    ragged = any(size * BYTES[dtype] % 16 for size in (nope, rope, value))
    forward, by_queries, by_keys, by_values = _launches((S, Q), keys, blocks["VALUE"], dtype, ragged)
    heads = min(power_of_two(H), 16, TILE // blocks["ROPE"])
    return KernelChoice(
        name=f"{name}_s{S}_q{Q}_k{K}_h{H}_n{nope}_r{rope}_v{value}_{dtype}",
        template=name,
        values=(
            *((option, False) for option in ("window", "softcap", "documents", "has_e5m6_output")),
            ("positions", True),  # keys are rotated before, and so stay what they are
            ("ahead", dtype != "float32"),
            ("hoist", dtype != "float32" or keys + blocks["VALUE"] > 160),
            ("S", S),
            ("QUERIES_OF_SEQUENCE", Q),
            ("Q", VariableName("Q")),
            ("H", H),
            ("CHOSEN", K),
            ("NOPE", nope),
            ("ROPE", rope),
            ("VALUE", value),
            ("WORDS", words),
            ("QUERY_WORDS", query_words),
            ("SIZES", constants),
            ("PROGRAMS", sms),
            (
                "MARK",
                {"ROWS": max(1, TILE // top_k), "BLOCK": min(top_k, TILE), "num_warps": 8, "num_stages": 1, **FUSION},
            ),
            ("TURN", {"ACROSS": 8, "COLUMNS": 16, "num_warps": 8, **FUSION}),
            ("LIST", {"ROWS": 32, "COLUMNS": 128, "num_warps": 8, **FUSION}),
            ("ROWS", {"COUNT": 4096 // blocks["VALUE"], "num_warps": 4, **FUSION}),
            ("TOTAL", {"TOKENS": TILE // (blocks["ROPE"] * heads), "HEADS": heads, "num_warps": 4, **FUSION}),
            ("FORWARD", forward),
            ("QUERIES", by_queries),
            ("KEYS", by_keys),
            ("VALUES", by_values),
        ),
    )


def _launches(
    rows: tuple[int, int], width: int, value: int, dtype: str, ragged: bool
) -> tuple[Launch, Launch, Launch, Launch | None]:
    """The launches of the forward, of dq, and of dk and dv, for keys and values of these widths; `rows`: keys and
    queries of a sequence. The last is None if dk and dv are computed together. Blocks of keys are whole words of marks,
    and so are those of queries for dk and dv: 32 or more.

    Where a block lies is loaded in the loop, so five stages keep two blocks on their way, as three do in attention. For
    V3.2's widths of 192 and 128 on Triton 3.9:

                  M    N   registers   shared bytes    alternatives
        forward  128   64      255        188424       three stages: one block on its way
        dq       128   64      242        206856
        dk        32  128      219        144904       M 64: 56 bytes spilled for sm_100
        dv        64  128      202        174600
    """
    (S, Q), together = rows, width + value <= (144 if dtype == "float32" else 160)
    if dtype == "float32":  # products without tensor cores
        # With eight warps narrow heads are read 4 or 8 bytes at a time, and wide ones spill 168 bytes in the forward
        # and 96 for dk on 3.6 for sm_100.
        each, warps, stages = 32 if together else 16, 4 if together else 8, 1
        forward, queries, by_keys = (each, 32, 4), (each, 32, warps), (32, each, 4)
    elif ragged:  # rows are copied element by element
        forward, queries, by_keys, stages = (64, 32, 8), (64, 32, 8), (32, 64, 8), 1
    else:
        # With partial blocks, 64 keys spill 104 bytes in the forward.
        forward = (128, 32 if S % 64 or Q % 128 else 64, 8)
        queries, by_keys, stages = (128, 64, 8), (32, 128, 8), 5
    by_values = by_keys if together or stages == 1 or Q < 128 else (64, 128, 8)

    def launch(rows: int, columns: int, warps: int) -> Launch:
        return {"M": rows, "N": columns, "num_warps": warps, "num_stages": stages, **FUSION}

    keys = {"DK": True, "DV": together, **launch(*by_keys)}
    values = None if together else {"DK": False, "DV": True, **launch(*by_values)}
    return launch(*forward), launch(*queries), keys, values


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "chosen_attention": lambda sms, q, kv, k_rope, chosen, *sizes: _choose(
        "chosen_attention", sms, (q, kv, k_rope), chosen, sizes
    ),
    "chosen_attention_dgrad": lambda sms, do, q, kv, k_rope, o, lse, chosen, *sizes: _choose(
        "chosen_attention_dgrad", sms, (q, kv, k_rope), chosen, sizes
    ),
}
