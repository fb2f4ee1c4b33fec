"""The gated delta rule: when the Triton kernels apply and how they launch.

Their text is delta_rule.py.j2 and delta_rule_dgrad.py.j2, with delta_rule_chunks.j2 of both.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer
from compiler.model.ops.kernel_shapes import takes_delta_rule

EPS = 1e-6  # as in runtime/ops/delta_rule.py


def choose(name: str, sms: int, tensors: tuple[Buffer, ...], sequence: int, key_heads: int) -> KernelChoice | None:
    """Choose the text for q [T, G·K], v [T, H·V], beta [T, H] and decay [T, H] or [T, H·K].

    Products of BF16 take 64 rows or more on tensor cores: of a chunk, and of a state, which has one for each column of
    a key. With more columns at a time, `_score` and `_key_gradients` spill. For the widths of Qwen3-Next
    (decays of heads) and Kimi Linear (of columns), 128 and 128, on Triton 3.9:

                          registers   shared bytes                  registers   shared bytes
        _score             247, 240   16384           _pass_gradients   158, 157         135168
        _solve             179, 181   32768           _value_gradients  217, 216          24576
        _pass_states       102, 110   81920           _key_gradients    134, 226          24576
        _outputs                114   73728           _sum_heads              44              0
    """
    (q, v, beta, decay), H = tensors, int(tensors[2].shape[1])
    dtype = q.dtype
    K, V = int(q.shape[1]) // key_heads, int(v.shape[1]) // H
    by_column, wide = decay.shape[1] != H, dtype == "float32"
    W, block_k, block_v = K if by_column else 1, max(16 if wide else 64, power_of_two(K)), max(16, power_of_two(V))
    if v.dtype != dtype or beta.dtype not in BYTES or decay.dtype != "float32" or not takes_delta_rule(K, dtype):
        return None
    C = 16 if wide else 64

    def launch(warps: int, stages: int = 1, **blocks: int) -> dict[str, int | bool]:
        return {**blocks, "num_warps": warps, "num_stages": stages, **FUSION}

    # One sequence should give every SM a program: states pass from chunk to chunk one after the other.
    states = min(block_v, 16 if wide else 32 if sms > H * -(-V // 64) else 64)
    return KernelChoice(
        name=f"{name}_s{sequence}_g{key_heads}_h{H}_k{K}_v{V}{'_by_column' * by_column}_{dtype}_{beta.dtype}",
        template=name,
        values=(
            ("by_column", by_column),
            ("S", sequence),
            ("KEY_HEADS", key_heads),
            ("H", H),
            ("K", K),
            ("V", V),
            ("C", C),
            ("W", W),
            ("EPS", EPS),
            ("LEVELS", C.bit_length() - 1),
            (
                "SIZES",
                {"S": sequence, "G": key_heads, "H": H, "K": K, "V": V, "C": C, "W": W, "BLOCK_K": block_k},
            ),
            ("SUMS", {"BLOCK": min(512, max(32, power_of_two(H * W))), "num_warps": 4, **FUSION}),
            ("SCORE", launch(4, N=16 if wide else 32 if by_column else 64)),
            ("SOLVE", launch(4, N=16 if wide else 64)),
            ("STATES", launch(4, 1 if wide else 2, BLOCK_V=states)),
            ("STATE_GRADIENTS", launch(*((8, 1) if block_k > 128 else (4, 1 if wide else 2)), BLOCK_V=states)),
            ("OUTPUTS", launch(4, BLOCK_V=min(block_v, 32 if wide else 128))),
            ("VALUES", launch(4, BLOCK_V=min(block_v, 32 if wide else 64))),
            ("KEYS", launch(4 if wide else 8, BLOCK_V=min(block_v, 32 if wide else 64), N=16 if wide else 32)),
            ("UNITS", {"ROWS": max(1, 2048 // block_k), "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "delta_rule": lambda sms, q, k, v, beta, decay, sequence, key_heads, starts=None: choose(
        "delta_rule", sms, (q, v, beta, decay), sequence, key_heads
    ),
    "delta_rule_dgrad": lambda sms, do, q, k, v, beta, decay, sequence, key_heads, starts=None: (
        choose("delta_rule_dgrad", sms, (q, v, beta, decay), sequence, key_heads) if do.dtype == q.dtype else None
    ),
}
