"""Checks of the attention kernels in Triton's interpreter, against their ops in FP64, within the bounds of near.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tests.compiler.emit.kernels.interpreted as interpreted
from compiler.emit.kernels.kernel import LEGS
from runtime import ops
from runtime.ops.causal import angles, columns, inverse_angles, of_heads, split_heads, turns
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, same
from tests.compiler.emit.kernels.checks_quantise_e5m6 import unsigned
from tests.compiler.emit.kernels.interpreted import NUM_SMS, double, random, run
from tests.compiler.emit.kernels.near import (
    FREE,
    Bounds,
    Near,
    attend,
    attend_dgrad,
    cat,
    close,
    gives_peaks,
    peaks,
    turned,
)

CHECKED = (
    "mla_attention", "mla_attention_dgrad", "gqa_attention", "gqa_attention_dgrad",
    "bounded_attention", "bounded_attention_dgrad",
    "mla_attention_peaks", "gqa_attention_peaks", "bounded_attention_peaks",
    "mla_attention_quantise_kept_e5m6", "mla_attention_dgrad_quantise_both",
    "dequantise_mla_attention_dgrad_e5m6", "dequantise_mla_attention_dgrad_quantise_both_e5m6",
)  # fmt: skip
THETA = 100.0  # so that even in short sequences all columns rotate by large angles
Lengths = tuple[int, ...]  # lengths of a sequence's documents; (): one document, not passed to the kernel
# For queries at some rows of each sequence, [B·Q]: (start of the query's document or None, positions).
Some = tuple[Tensor | None, Tensor]


def starts_of(B: int, S: int, lengths: Lengths) -> tuple[Tensor, ...]:
    """Where documents of these lengths begin, [B·S]; the last one goes on to the end of its sequence. Every other
    sequence has them in reverse order."""
    if not lengths:
        return ()
    starts = torch.empty(B, S, dtype=torch.int32)
    for b in range(B):
        begins = torch.tensor([0, *lengths[:: -1 if b % 2 else 1]]).cumsum(0)
        starts[b] = begins[torch.searchsorted(begins, torch.arange(S), right=True) - 1]
    return (starts.flatten(),)


def angles_of(B: int, S: int, width: int, theta: float, starts: tuple[Tensor | None, ...]) -> Tensor:
    """The angles of each position in its document, BSr; angles of 0 if theta is 0."""
    starts = starts if theta and starts else (None,)
    return turns(angles(S, width, theta, torch.float64, torch.device("cpu")), *starts).expand(B, S, -1)


def heads_of(places: tuple[Tensor | None, ...], queries: int, heads: int) -> tuple[Tensor | None, ...]:
    """Where documents begin, and positions, for the heads of all sequences, PQ."""
    return tuple(of_heads(place, queries, heads) for place in places)


def some_rows(x: Tensor, B: int, S: int, some: Some | None) -> Tensor:
    """The rows of x [B·S, …] that are queries."""
    if some is None:
        return x
    return x[(some[1].view(B, -1) + S * torch.arange(B)[:, None]).flatten()]


# ---------------------------------------------------------------- latent


Sizes = tuple[int, int, int, int, int, int]  # B, S, H, nope, rope, value


def mla_operands(dtype: torch.dtype, sizes: Sizes) -> tuple[Any, ...]:
    B, S, H, nope, rope, value = sizes
    q, kv = (
        random(B * S, H * (nope + rope), dtype=dtype, seed=1),
        random(B * S, H * (nope + value), dtype=dtype, seed=2),
    )
    k_rope = random(B * S, rope + 7, dtype=dtype, seed=3)[:, 3 : rope + 3]
    return q, kv, k_rope, S, H, nope, rope, value, THETA


def mla(dtype: torch.dtype, sizes: Sizes, lengths: Lengths = (), some: Some | None = None) -> None:
    B, S, H, nope, rope, value = sizes
    q, kv, k_rope, *options, theta = mla_operands(dtype, sizes)
    theta, places = (0.0, some) if some else (theta, starts_of(B, S, lengths))
    options = [*options, theta, *places]
    q, do = (some_rows(x, B, S, some) for x in (q, random(B * S, H * value, dtype=dtype, seed=4)))
    o, lse = run("mla_attention", q, kv, k_rope, *options)
    q64, kv64, k_rope64, do64, o64, lse64 = double(q, kv, k_rope, do, o, lse)
    o_exact, lse_exact = ops.mla_attention(q64, kv64, k_rope64, *options)

    Q, bounds = len(q) // B, Bounds(0, 0.0, None, *heads_of(places, len(q) // B, H))
    angles_BSr = angles_of(B, S, rope, theta, places)
    angles_PQr = angles_BSr[:, :Q].repeat_interleave(H, dim=0)
    by_head = split_heads(q64, Q, H).flatten(0, 1)
    kv_by_head = split_heads(kv64, S, H).flatten(0, 1)
    moved = turned(Near.of(split_heads(k_rope64, S, 1)), angles_BSr[:, None]).rounded(dtype)
    moved = moved.map(lambda x: x.expand(B, H, S, rope).flatten(0, 1))
    queries = cat(Near.of(by_head[..., :nope]), turned(Near.of(by_head[..., nope:]), angles_PQr).rounded(dtype))
    keys, values = cat(Near.of(kv_by_head[..., :nope]), moved), Near.of(kv_by_head[..., nope:])
    near_o, near_lse = attend(queries, keys, values, dtype, bounds)
    close(o, near_o.map(lambda x: columns(x, H)), dtype, o_exact)
    close(lse, near_lse, torch.float32, lse_exact)
    largest = gives_peaks("mla_attention", (q, kv, k_rope, *options), (o, lse))
    exact = ops.mla_attention_peaks(q64, kv64, k_rope64, *options)[1]
    close(largest, peaks(queries, keys, bounds, H), torch.float32, exact)

    gradients = run("mla_attention_dgrad", do, q, kv, k_rope, o, lse, *options)
    expected = ops.mla_attention_dgrad(do64, q64, kv64, k_rope64, o64, lse64, *options)
    do_by_head, o_by_head = (split_heads(x, Q, H).flatten(0, 1) for x in (do64, o64))
    lse_by_head = lse64.view(B * H, Q, 1)
    dq, dk, dv = attend_dgrad(do_by_head, o_by_head, lse_by_head, queries, keys, values, dtype, bounds=bounds)
    dq = cat(dq.map(lambda x: x[..., :nope]), turned(dq.map(lambda x: x[..., nope:]), inverse_angles(angles_PQr)))
    dkv = cat(dk.map(lambda x: x[..., :nope]), dv)
    dk_rope = dk.map(lambda x: x[..., nope:].unflatten(0, (B, H))).sum(1)
    close(gradients[0], dq.map(lambda x: columns(x, H)), dtype, expected[0])
    close(gradients[1], dkv.map(lambda x: columns(x, H)), dtype, expected[1])
    close(gradients[2], turned(dk_rope, inverse_angles(angles_BSr)), dtype, expected[2])


def in_tiles(sizes: Sizes, pow2: bool, special: bool) -> None:
    """Latent attention fused with quantisation to 8 or 12 bits: bit-identical to the separate kernels.

    `special`: zeros in one head, NaN and an infinity in others.
    """
    B, S, H, nope, _, value = sizes
    q, kv, k_rope, *options = mla_operands(torch.bfloat16, sizes)
    do = random(B * S, H * value, dtype=torch.bfloat16, seed=4)
    if special:
        kv[:, nope : nope + value] = 0
        kv[S // 2, -1], kv[S // 2 + 1, -2] = torch.nan, torch.inf
        do[: S // 2] *= 1e-30
    o, lse = run("mla_attention", q, kv, k_rope, *options)
    wide = ops.OPS["quantise_kept_e5m6"](o, pow2)
    *data, high, low, s, lse_beside = run("mla_attention_quantise_kept_e5m6", q, kv, k_rope, *options, pow2)
    same((*data, lse_beside), (*wide[:2], lse))
    same(unsigned((high, low, s)), unsigned(wide[2:]))

    planes = wide[2:]
    narrow = ops.OPS["dequantise_e5m6"](*planes)
    assert special or not torch.equal(narrow, o)
    dq, dkv, dk_rope = run("mla_attention_dgrad", do, q, kv, k_rope, narrow, lse, *options)
    same(run("dequantise_mla_attention_dgrad_e5m6", do, q, kv, k_rope, *planes, lse, *options), (dq, dkv, dk_rope))
    if nope == value and not S % 128:
        expected = dq, *ops.quantise_both(dkv, pow2), dk_rope
        same(run("mla_attention_dgrad_quantise_both", do, q, kv, k_rope, narrow, lse, *options, pow2), expected)
        op = "dequantise_mla_attention_dgrad_quantise_both_e5m6"
        same(run(op, do, q, kv, k_rope, *planes, lse, *options, pow2), expected)


def moves_tiles_once() -> None:
    """Quantised output is written once, and kept values are read once, instead of the wide numbers."""
    sizes = 1, 256, 1, 128, 16, 128
    q, kv, k_rope, *options = mla_operands(torch.bfloat16, sizes)
    do = random(256, 128, dtype=torch.bfloat16, seed=4)

    def bytes_moved(op: str, *arguments: Any) -> tuple[int, tuple[Tensor, ...]]:
        with moved() as count:
            outputs = run(op, *arguments)
        return count[0], outputs

    plain, (o, lse) = bytes_moved("mla_attention", q, kv, k_rope, *options)
    fused, (*o_tiles, _) = bytes_moved("mla_attention_quantise_kept_e5m6", q, kv, k_rope, *options)
    assert fused == plain - bytes_of(o) + bytes_of(*o_tiles)
    plain, (_, dkv, _) = bytes_moved("mla_attention_dgrad", do, q, kv, k_rope, o, lse, *options)
    op = "dequantise_mla_attention_dgrad_quantise_both_e5m6"
    fused, (_, *dkv_tiles, _) = bytes_moved(op, do, q, kv, k_rope, *o_tiles[2:], lse, *options)
    assert fused == plain - bytes_of(o, dkv) + bytes_of(*o_tiles[2:], *dkv_tiles)


# ---------------------------------------------------------------- grouped

Grouped = tuple[int, int, int, int, int]  # B, S, G, heads of a group, columns


def gqa_operands(dtype: torch.dtype, sizes: Grouped) -> tuple[Any, ...]:
    B, S, G, group, C = sizes
    widths = G * group * C, G * C, G * C
    q, k, v = random(B * S, sum(widths), dtype=dtype, seed=1).split(widths, dim=1)
    return q, k, v, S, G * group, G, THETA


def gqa(dtype: torch.dtype, sizes: Grouped, lengths: Lengths = (), some: Some | None = None) -> None:
    grouped("gqa_attention", dtype, sizes, (), (), FREE, lengths, some)


def bounded(
    dtype: torch.dtype,
    sizes: Grouped,
    window: int,
    softcap: float,
    sinks: bool,
    lengths: Lengths = (),
    some: Some | None = None,
) -> None:
    """Check each bound separately, and all together."""
    B, H = sizes[0], sizes[2] * sizes[3]
    of_heads = random(H, dtype=dtype, seed=5) if sinks else None
    bounds = Bounds(window, softcap, of_heads.double().repeat(B) if of_heads is not None else None)
    grouped("bounded_attention", dtype, sizes, (of_heads,), (window, softcap), bounds, lengths, some)


def sinks_of_nothing(sizes: Grouped, window: int) -> None:
    """A sink of −∞ gives the same bits as no sink, and a sink of NaN makes only its head's results NaN."""
    q, k, v, *options = gqa_operands(torch.bfloat16, sizes)
    H, constants = sizes[2] * sizes[3], (window, 0.0)
    without = run("bounded_attention", q, k, v, None, *options, *constants)
    sinks = torch.full((H,), -torch.inf)
    for output, expected in zip(run("bounded_attention", q, k, v, sinks, *options, *constants), without, strict=True):
        assert torch.equal(output, expected)
    sinks[0] = torch.nan
    o, lse = run("bounded_attention", q, k, v, sinks, *options, *constants)
    by_head = o.view(len(o), H, -1)
    assert by_head[:, 0].isnan().all() and torch.equal(by_head[:, 1:], without[0].view(by_head.shape)[:, 1:])
    assert lse[:, 0, :, 0].isnan().all()


def random_bounds(seed: int) -> None:
    """Windows of any size with or without the others, over up to three blocks of keys."""
    generator = torch.Generator().manual_seed(seed)
    bounds = (3, 300, 3, 4, 17, 2, 2)
    B, S, G, heads, half, capped, sinks = (int(torch.randint(1, end + 1, (), generator=generator)) for end in bounds)
    window = int(torch.randint(1, S + 10, (), generator=generator))
    bounded(torch.bfloat16, (B, S, G, heads, 2 * half), window, (capped - 1) * 6.0, sinks > 1)


def moves_what_windows_need() -> None:
    """Keys and values of the blocks that a window reaches: their number does not grow with the sequence's square."""
    window, C, M, N = 128, 64, 128, 64

    def forward(S: int) -> tuple[int, int]:
        args = gqa_operands(torch.bfloat16, (1, S, 1, 1, C))
        with moved() as count:
            o, lse = run("bounded_attention", *args[:3], None, *args[3:], window, 0.0)
        turn = 2 * 2 * 2 * S * C + 2 * 4 * S * C  # queries and keys, read and written; angles of both
        queue = 4 * (2 * LEGS * NUM_SMS + S // M + 1)
        return count[0] - turn - queue - bytes_of(args[0], o, lse), S // M

    for S in (256, 512):
        bytes_moved, blocks = forward(S)
        reached = 4 * blocks - 2  # blocks of keys: two of its own and two before it, except for the first
        assert bytes_moved == 2 * C * N * (reached + reached + blocks), S  # keys, values, the last keys again


def grouped(
    op: str,
    dtype: torch.dtype,
    sizes: Grouped,
    sinks: tuple[Tensor | None, ...],
    constants: tuple[float, ...],
    bounds: Bounds,
    lengths: Lengths,
    some: Some | None,
) -> None:
    """The op with more arguments: sinks after the values, constants at the end, and the places of rows."""
    B, S, G, group, C = sizes
    q, k, v, *shape, theta = gqa_operands(dtype, sizes)
    H = G * group
    theta, places = (0.0, some) if some else (theta, starts_of(B, S, lengths))
    options = (*shape, theta, *constants, *places)
    q, do = (some_rows(x, B, S, some) for x in (q, random(B * S, H * C, dtype=dtype, seed=4)))
    Q = len(q) // B
    o, lse = run(op, q, k, v, *sinks, *options)
    q64, k64, v64, do64, o64, lse64 = double(q, k, v, do, o, lse)
    wide_sinks = tuple(sink if sink is None else sink.double() for sink in sinks)
    o_exact, lse_exact = ops.OPS[op](q64, k64, v64, *wide_sinks, *options)

    def shared(x: Tensor) -> Tensor:
        return x.unflatten(0, (B, G)).repeat_interleave(group, dim=1).flatten(0, 1)

    bounds = Bounds(*bounds[:3], *heads_of(places, Q, H))
    of_queries, of_keys = (angles_of(B, S, C, theta, places).repeat_interleave(heads, dim=0) for heads in (H, G))
    of_queries = of_queries[:, :Q]
    q_by_head, k_by_head, v_by_head = (
        split_heads(x.contiguous(), rows, h).flatten(0, 1) for x, rows, h in ((q64, Q, H), (k64, S, G), (v64, S, G))
    )
    queries = turned(Near.of(q_by_head), of_queries).rounded(dtype)
    keys, values = turned(Near.of(k_by_head), of_keys).rounded(dtype).map(shared), Near.of(shared(v_by_head))
    near_o, near_lse = attend(queries, keys, values, dtype, bounds)
    close(o, near_o.map(lambda x: columns(x, H)), dtype, o_exact)
    close(lse, near_lse.map(lambda x: x.view(B, G, group, Q).mT), torch.float32, lse_exact)
    if not bounds.softcap and bounds.sinks_P is None:  # with a softcap or sinks, torch computes the largest logits
        largest = gives_peaks(op, (q, k, v, *sinks, *options), (o, lse))
        exact = ops.OPS[f"{op}_peaks"](q64, k64, v64, *wide_sinks, *options)[1]
        close(largest, peaks(queries, keys, bounds, H), torch.float32, exact)

    gradients = run(f"{op}_dgrad", do, q, k, v, o, lse, *options)
    expected = ops.OPS[f"{op}_dgrad"](do64, q64, k64, v64, o64, lse64, *options)
    do_by_head, o_by_head = (split_heads(x, Q, H).flatten(0, 1) for x in (do64, o64))
    lse_by_head = lse64.mT.reshape(B * H, Q, 1)
    dq, dk, dv = attend_dgrad(do_by_head, o_by_head, lse_by_head, queries, keys, values, dtype, group, bounds)
    dk, dv = (d.map(lambda x: x.unflatten(0, (B * G, group)).sum(1)) for d in (dk, dv))
    close(gradients[0], turned(dq, inverse_angles(of_queries)).map(lambda x: columns(x, H)), dtype, expected[0])
    close(gradients[1], turned(dk, inverse_angles(of_keys)).map(lambda x: columns(x, G)), dtype, expected[1])
    close(gradients[2], dv.map(lambda x: columns(x, G)), dtype, expected[2])


# ---------------------------------------------------------------- all


OPERANDS: dict[str, Callable[..., tuple[Any, ...]]] = {"mla": mla_operands, "gqa": gqa_operands}


def results(op: str, dtype: torch.dtype, sizes: Any, lengths: Lengths = ()) -> list[Tensor]:
    """Results of the forward, then of the backward."""
    operands = *OPERANDS[op](dtype, sizes), *starts_of(*sizes[:2], lengths)
    o, lse = run(f"{op}_attention", *operands)
    do = random(*o.shape, dtype=dtype, seed=4)
    return [o, lse, *run(f"{op}_attention_dgrad", do, *operands[:3], o, lse, *operands[3:])]


def random_sizes(seed: int) -> None:
    """Widths of any kind, up to three blocks of keys and several sequences."""
    generator = torch.Generator().manual_seed(seed)

    bounds = (3, 150, 3, 4, 13, 25, 25)
    B, S, G, heads, half, nope, value = (int(torch.randint(1, end, (), generator=generator)) for end in bounds)
    mla(torch.bfloat16, (B, S, heads, nope, 2 * half, value))
    gqa(torch.bfloat16, (B, S, G, heads, 2 * half))


def random_documents(seed: int) -> None:
    """Documents of any lengths, with and without a window, a softcap and sinks."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(end: int) -> int:
        return int(torch.randint(1, end + 1, (), generator=generator))

    B, S, longest = drawn(2), drawn(300), drawn(200)
    lengths = tuple(drawn(longest) for _ in range(drawn(9)))
    mla(torch.bfloat16, (B, S, drawn(2), drawn(24), 2 * drawn(12), drawn(24)), lengths)
    grouped_sizes = B, S, drawn(2), drawn(3), 2 * drawn(16)
    bounded(torch.bfloat16, grouped_sizes, drawn(S + 10), 6.0 * (drawn(2) - 1), drawn(2) > 1, lengths)


def one_document_is_none(op: str, dtype: torch.dtype, sizes: Any) -> None:
    """With one document per sequence, kernels give the same bits as without document starts."""
    for output, expected in zip(results(op, dtype, sizes, (sizes[1],)), results(op, dtype, sizes), strict=True):
        assert torch.equal(output, expected)


def nothing(op: str, sizes: Any, lengths: Lengths) -> None:
    """No tokens give empty results."""
    assert all(result.numel() == 0 for result in results(op, torch.bfloat16, sizes, lengths))


def bits_are_equal(op: str, dtype: torch.dtype, sizes: Any, lengths: Lengths = ()) -> None:
    """Bits are equal from run to run, and for any number of programs that share the tiles."""
    first, before = results(op, dtype, sizes, lengths), interpreted.NUM_SMS
    try:
        for interpreted.NUM_SMS in (before, 1, 7):
            for again, expected in zip(results(op, dtype, sizes, lengths), first, strict=True):
                assert torch.equal(again, expected)
    finally:
        interpreted.NUM_SMS = before


def sequences_are_apart(op: str, dtype: torch.dtype, sizes: Any) -> None:
    """No value reaches another sequence, not even NaN, even if blocks extend past the end of a sequence."""
    B, S = sizes[:2]

    def found(value: float) -> list[Tensor]:
        q, k, v, *options = OPERANDS[op](dtype, sizes)
        for x in (q, k, v):
            x[S : 2 * S] = value
        o, lse = run(f"{op}_attention", q, k, v, *options)
        do = random(*o.shape, dtype=dtype, seed=4)
        return [o, lse, *run(f"{op}_attention_dgrad", do, q, k, v, o, lse, *options)]

    for with_nan, without in zip(found(torch.nan), found(1.0), strict=True):
        with_nan, without = (x.reshape(B, -1) for x in (with_nan, without))
        assert with_nan[1].isnan().all() and torch.equal(with_nan[[0, 2]], without[[0, 2]])


def moves_what_tiles_need() -> None:
    """Whole blocks move: in the forward queries and results once, keys and values once per block of 128 queries; in the
    backward also queries and their gradients once per block of 128 keys.
    """
    B, S, H, nope, rope, value = sizes = 2, 256, 2, 32, 16, 32
    T, blocks = B * S, B * H * (S // 128)
    q, kv, k_rope, *options = mla_operands(torch.bfloat16, sizes)
    turn = 2 * 2 * T * (H + 1) * rope + 2 * 4 * T * rope  # what turns, read and written; angles of q, of k_rope
    queues = 4 * (
        2 * LEGS * NUM_SMS + blocks + 1
    )  # offsets of the tiles of each ticket, the tiles, and the 0 at the end
    with moved() as count:
        o, lse = run("mla_attention", q, kv, k_rope, *options)
    earlier = B * H * sum(range(128, S + 1, 128))  # keys up to the last query of each block
    keys, values = earlier + 64 * blocks, earlier  # 64 of the last keys again
    once = bytes_of(q, o, lse)
    assert count[0] == turn + queues + once + 2 * (keys * (nope + rope) + values * value)

    do = random(*o.shape, dtype=torch.bfloat16, seed=4)
    with moved() as count:
        dq, dkv, dk_rope = run("mla_attention_dgrad", do, q, kv, k_rope, o, lse, *options)
    rows = bytes_of(do, o) + 3 * bytes_of(lse)  # delta and lse in base 2
    angles_read = 4 * T * (H + 1) * rope
    by_queries = bytes_of(q, do, dq) + 2 * bytes_of(lse) + 2 * earlier * (nope + rope + value)
    by_keys = bytes_of(kv, dkv) + 2 * T * H * rope + earlier * (2 * (nope + rope + value) + 8)
    shared = 2 * 4 * T * H * rope + bytes_of(dk_rope)  # FP32, per head, written and read
    assert count[0] == turn + rows + angles_read + 2 * queues + by_queries + by_keys + shared
