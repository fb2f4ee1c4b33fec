"""Attention with RoPE (latent, grouped-query and bounded): when the Triton kernels apply and how they launch.

Their text is attention.py.j2 and attention_dgrad.py.j2, which include attention_shared.j2. Comments on spills name the
Triton version, such as 3.9, and the architecture if they are not of sm_90.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from compiler.emit.kernels.kernel import (
    BYTES,
    FUSION,
    LEGS,
    KernelChoice,
    VariableName,
    identifier_part,
    places,
    power_of_two,
)
from compiler.ir import Buffer

_ONCE = "ld.global.L1::evict_first"  # for queries, or keys and values, that only one tile reads
STREAMS = {
    "_turn": (_ONCE,),
    "_forward": (_ONCE, "st.global.cs"),
    "_row_values": (_ONCE,),
    "_query_gradient": (_ONCE, "st.global.cs"),
    "_key_gradient": (_ONCE, "st.global.cs"),
    "_total_key_gradient": (_ONCE,),
}

L2_BYTES = 24 * 2**20  # for data that tiles share: half of L2 on sm_90, as queries and results pass through it, too


class Bounds(NamedTuple):
    """The bounds of bounded attention."""

    window: int  # keys that a query sees; S: all
    softcap: float  # 0: none
    sinks: bool

    def __str__(self) -> str:
        """The suffix of a kernel's name."""
        return f"_w{self.window}" + f"_c{identifier_part(self.softcap)}" * bool(self.softcap) + "_sinks" * self.sinks


class Shape(NamedTuple):
    """The sizes of attention. It is latent if nope > 0."""

    S: int  # tokens of a sequence
    H: int  # query heads
    group: int  # query heads that share a key head
    nope: int  # columns of a query or key head that are not rotated
    rope: int  # columns that are
    value: int  # columns of a value head


class AttentionOptions(NamedTuple):
    """Options of an attention kernel.

    has_e5m6_output: the output is E5M6, and the forward also returns it in E4M3. has_e4m3_gradients: gradients of keys
    and values are E4M3, by rows and by columns. For either, values must be a tile wide (further conditions:
    `compiler.model.segments.passes`).
    documents: sequences may hold several documents, which are masked from one another. queries: number of queries per
    sequence whose positions are loaded; 0 if the queries are all S tokens. With positions the first key that a query
    sees is loaded as well, so the text for documents handles them, and windows too. peaks: the forward also returns the
    largest logit of each head. It takes the maxima of rows, which are not available with a softcap or sinks.
    """

    documents: bool
    queries: int
    peaks: bool
    has_e5m6_output: bool = False
    has_e4m3_gradients: bool = False
    bounds: Bounds | None = None


def _choose(name: str, dtypes: set[str], sms: int, shape: Shape, options: AttentionOptions) -> KernelChoice | None:
    S, H, group, nope, rope, value = shape
    documents, queries, peaks, has_e5m6_output, has_e4m3_gradients, bounds = options
    template = "attention_dgrad" if "_dgrad" in name else "attention"
    dtype = next(iter(dtypes))
    blocks = {name: max(16, power_of_two(size)) for name, size in (("NOPE", nope), ("ROPE", rope), ("VALUE", value))}
    keys = blocks["ROPE"] + (blocks["NOPE"] if nope else 0)
    widest = 256 if dtype == "bfloat16" and not nope else 128
    if len(dtypes) > 1 or dtype not in BYTES or max(blocks.values()) > widest or keys > max(192, widest):
        return None
    if (has_e5m6_output or has_e4m3_gradients) and (dtype != "bfloat16" or value != 128):
        return None
    if peaks and bounds is not None and (bounds.softcap or bounds.sinks):
        return None
    if has_e4m3_gradients and (nope != 128 or rope % 8 or S % 128):
        return None
    sizes = {"S": S, "H": H, "GROUP": group, "SHARED": H if nope else group, "SCALE": (nope + rope) ** -0.5}
    sizes |= {"NOPE": nope, "ROPE": rope, "VALUE": value, **{f"BLOCK_{name}": size for name, size in blocks.items()}}
    window, softcap, sinks = bounds or Bounds(S, 0.0, False)
    positions, windowed, documents = queries > 0, window < S and not queries, documents or queries > 0
    mask = f"{bounds or ''}" + (f"_positions{queries}" if positions else "_documents" * documents)
    bend = sizes["SCALE"] / softcap if softcap else None
    sizes["SCALE"] = softcap or sizes["SCALE"]
    ragged = any(size * BYTES[dtype] % 16 for size in (nope, rope, value))
    if positions:
        sizes["Q"] = queries
    forward, by_queries, by_keys, by_values = _launches(
        S, keys, blocks["VALUE"], dtype, ragged, windowed, documents, positions
    )
    if has_e5m6_output and S % 128:  # row masks with two output formats: 128 rows spill 48 bytes on 3.9, 256 on 3.6
        forward["M"] = 64
    # With H not a power of two, dv with 64 queries spills 8 bytes on 3.6 for sm_100; with a partial block of queries at
    # loaded positions, 16.
    if by_values and (queries % 128 or (documents and H & (H - 1))):
        by_values["M"] = min(by_values["M"], 32)
    return KernelChoice(
        name=f"{name}_s{S}_h{H}_{'n' if nope else 'g'}{nope or H // group}_r{rope}_v{value}_{dtype}{mask}",
        template=template,
        values=(
            ("mla", nope > 0),
            ("has_e5m6_output", has_e5m6_output),
            ("peaks", peaks),
            ("has_e4m3_gradients", has_e4m3_gradients),
            ("bounded", bounds is not None),
            ("window", windowed),
            ("documents", documents),
            ("positions", positions),
            ("softcap", bool(softcap)),
            ("sinks", sinks),
            ("WINDOW", window),
            ("SOFTCAP", softcap),
            ("BEND", bend),
            ("LOW", VariableName("low") if windowed or documents else 0),  # first key of a block of queries
            ("STOP", VariableName("stop" if windowed or documents else "end")),  # end of the queries of a block of keys
            ("QUERIES_OF_SEQUENCE", queries),
            ("Q", VariableName("Q" if positions else "S")),  # number of queries of a sequence
            ("BEGIN", VariableName("begin" if positions else "start")),  # the first query
            ("PLACE", VariableName("place" if positions else "m")),  # the positions of a block of queries
            (
                "FRONT",
                VariableName("front" if positions else "first"),
            ),  # the first position of a block, or the first query
            ("ahead", dtype != "float32"),
            ("hoist", nope > 0 if dtype != "float32" else keys + blocks["VALUE"] > 160),
            ("S", S),
            ("H", H),
            ("GROUP", group),
            ("NOPE", nope),
            ("ROPE", rope),
            ("VALUE", value),
            ("SIZES", sizes),
            ("PROGRAMS", sms),
            ("LEGS", LEGS),
            ("BAND", _power_within(L2_BYTES // (S * (nope + rope + value) * BYTES[dtype]))),
            ("TURN_Q", _turn(H, blocks["ROPE"])),
            ("TURN_K", _turn(1 if nope else H // group, blocks["ROPE"])),
            ("TOTAL", _turn(min(H, 16), blocks["ROPE"])),
            ("ROWS", {"COUNT": 4096 // blocks["VALUE"], "num_warps": 4, **FUSION}),
            ("FORWARD", forward),
            ("QUERIES", by_queries),
            ("KEYS", by_keys),
            ("VALUES", by_values),
        ),
    )


Launch = dict[str, int | bool]


def _launches(
    S: int, width: int, value: int, dtype: str, ragged: bool, windowed: bool, documents: bool, positions: bool
) -> tuple[Launch, Launch, Launch, Launch | None]:
    """The launches of the forward, of dq, and of dk and dv, for keys and values of these widths. The last is None if dk
    and dv are computed together.

    Tiles are as large as possible without spills or too much shared memory. Three stages: with two, the next block is
    requested after the last product that reads this one, and its latency is not hidden. For V3's widths of 192 and 128,
    on Triton 3.9 and 3.6:

                  M    N   registers   shared bytes    alternatives
        forward  128   64   220  231        188416     N 128: 256 KiB, or two stages
        dq       128   64   217  214        204800     N 128: 120 bytes spilled, 32 on 3.6
        dk        64  128   240  255        205824     M 128: 160 bytes spilled, 192 on 3.6
        dv        64  128   157  189        172544     with dk: 112 bytes spilled, 144 on 3.6

    On sm_100 dq takes 188488 and dk 189512 bytes; with two buffers per accumulator 237648 and 238672 on 3.6.
    """
    together = width + value <= (144 if dtype == "float32" else 160)
    eight, four = 8, 4  # warps
    if dtype == "float32":  # products without tensor cores
        # On 3.6, 32 rows of wide heads spill 120 bytes in the forward for sm_100; with 160 columns they spill 8 there,
        # and for sm_90 16 in dk and dv together. dq spills 16 bytes with 160 columns and eight warps on 3.6, and 128
        # with 320 columns and four warps on 3.9; dk with 320 columns and 16 keys spills 16 on 3.6 for sm_100.
        rows = 32 if together else 16
        # Narrow heads spill 8 bytes with 16 keys on 3.9 for sm_90; at loaded positions, 80 columns 8 for sm_100.
        columns = 32 if width + value <= 64 or (positions and together) else 16
        forward, stages = (rows, columns, eight), 1
        queries = (32, 16, four if not together and width + value <= 192 else eight)
        # With 256 columns, documents and a window, dk with 16 keys spills 8 bytes on 3.6.
        by_keys = (32, 32, eight) if 256 - documents < width + value <= 320 else (16, rows, eight)
    elif ragged:  # rows are copied element by element
        # Narrow heads spill 8 bytes in the forward with eight warps on 3.6 for sm_100.
        forward, stages = (64, 32, four if width + value <= 64 else eight), 1
        queries, by_keys = (64, 32, eight), (32, 64, eight)
    elif width > 192:  # with 256 columns larger tiles spill: 128 × 64 in the forward 160 bytes, 64 × 64 in dq 112
        forward, queries, by_keys, stages = (128, 32, eight), (64, 32, eight), (32, 64, eight), 2
    else:
        columns = 128 if width + value <= 128 else 64
        # With a single block of queries, M 64 spills 16 bytes on 3.9. With 128 columns of scores and values of 32, the
        # forward compiles to a trap on 3.6 for sm_100.
        # With a window, heads of 128 spill 8 bytes in the forward for sm_100 on 3.6.
        forward = (128, 32 if windowed and width + value > 128 else 64, eight)
        # At loaded positions dq of heads of 128 spills 8 bytes with 64 keys on 3.6 for sm_100, also with two stages.
        queries, stages = (128, 32 if positions and 128 < width + value <= 256 else columns, eight), 3
        by_keys = (64 if S >= 128 else 32, 128, eight)

    def launch(rows: int, columns: int, warps: int) -> Launch:
        return {"M": rows, "N": columns, "num_warps": warps, "num_stages": stages, **FUSION}

    keys = {"DK": True, "DV": together, **launch(*by_keys)}
    # In FP32, 32 queries and keys spill 16 bytes on 3.6; with a window 16 spill 8 there, and 32 none. With documents 16
    # spill 8 on 3.9 for heads of 128, and 32 keys of wider heads 8 on 3.6.
    columns = 32 if windowed or (documents and width + value <= 256) else 16
    by_values = by_keys if dtype != "float32" else (32 if windowed else 16, columns, eight)
    values = None if together else {"DK": False, "DV": True, **launch(*by_values)}
    return launch(*forward), launch(*queries), keys, values


def _turn(heads: int, block: int) -> Launch:
    """The launch of programs with 2048 columns: several heads of several tokens."""
    num = min(power_of_two(heads), 2048 // block)
    return {"TOKENS": 2048 // (block * num), "HEADS": num, "num_warps": 4, **FUSION}


def _power_within(size: int) -> int:
    """The largest power of two up to `size`, at least 1. Numbers of heads are powers of two, and a short last band
    would leave programs idle."""
    return 1 << max(0, size.bit_length() - 1)


def _options(op: str, q: Buffer, k: Buffer, S: int, arguments: tuple[Any, ...]) -> AttentionOptions:
    """The options that follow from an op's name and arguments."""
    documents, positions = places(arguments)
    queries = int(q.shape[0]) * S // int(k.shape[0]) if positions else 0
    return AttentionOptions(documents, queries, "_peaks" in op, "e5m6" in op, "both" in op)


def _mla(sms: int, op: str, q: Buffer, kv: Buffer, k_rope: Buffer, *sizes: Any) -> KernelChoice | None:
    S, H, nope, rope, value, *_ = sizes
    dtypes, options = {q.dtype, kv.dtype, k_rope.dtype}, _options(op, q, kv, S, sizes)
    return _choose(op, dtypes, sms, Shape(S, H, 1, nope, rope, value), options)


def _gqa(sms: int, op: str, q: Buffer, k: Buffer, v: Buffer, *sizes: Any) -> KernelChoice | None:
    S, H, G, *_ = sizes
    width, options = int(q.shape[1]) // H, _options(op, q, k, S, sizes)
    return _choose(op, {q.dtype, k.dtype, v.dtype}, sms, Shape(S, H, H // G, 0, width, width), options)


def _choose_bounded(
    sms: int, op: str, q: Buffer, k: Buffer, v: Buffer, sinks: bool, *sizes: Any
) -> KernelChoice | None:
    S, H, G, _, window, softcap, *_ = sizes
    bounds, width = Bounds(min(window or S, S), softcap, sinks), int(q.shape[1]) // H
    options = _options(op, q, k, S, sizes)._replace(bounds=bounds)
    return _choose(op, {q.dtype, k.dtype, v.dtype}, sms, Shape(S, H, H // G, 0, width, width), options)


def _of_result(
    choose: Callable[..., KernelChoice | None], op: str, tensors: int = 1
) -> Callable[..., KernelChoice | None]:
    """The row for a gradient, whose arguments include the forward's output, in `tensors` tensors, and lse."""
    return lambda sms, do, q, k, v, *arguments: choose(sms, op, q, k, v, *arguments[tensors + 1 :])


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "mla_attention": lambda sms, *args: _mla(sms, "mla_attention", *args),
    "mla_attention_peaks": lambda sms, *args: _mla(sms, "mla_attention_peaks", *args),
    "mla_attention_quantise_kept_e5m6": lambda sms, *args: _mla(sms, "mla_attention_quantise_kept_e5m6", *args),
    "gqa_attention": lambda sms, *args: _gqa(sms, "gqa_attention", *args),
    "gqa_attention_peaks": lambda sms, *args: _gqa(sms, "gqa_attention_peaks", *args),
    "bounded_attention": lambda sms, q, k, v, sinks, *sizes: _choose_bounded(
        sms, "bounded_attention", q, k, v, sinks is not None, *sizes
    ),
    "bounded_attention_peaks": lambda sms, q, k, v, sinks, *sizes: _choose_bounded(
        sms, "bounded_attention_peaks", q, k, v, sinks is not None, *sizes
    ),
    "mla_attention_dgrad": _of_result(_mla, "mla_attention_dgrad"),
    "mla_attention_dgrad_quantise_both": _of_result(_mla, "mla_attention_dgrad_quantise_both"),
    "dequantise_mla_attention_dgrad_e5m6": _of_result(_mla, "dequantise_mla_attention_dgrad_e5m6", 3),
    "dequantise_mla_attention_dgrad_quantise_both_e5m6": _of_result(
        _mla, "dequantise_mla_attention_dgrad_quantise_both_e5m6", 3
    ),
    "gqa_attention_dgrad": _of_result(_gqa, "gqa_attention_dgrad"),
    "bounded_attention_dgrad": lambda sms, do, q, k, v, o, lse, *sizes: _choose_bounded(
        sms, "bounded_attention_dgrad", q, k, v, False, *sizes
    ),
}
