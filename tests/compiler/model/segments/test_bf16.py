"""Emitted segments in BF16 against autograd over plain torch in float64, on the same numbers.

The tolerance is measured, not chosen: the same segment runs in float64, with random rounding wherever the BF16 segment
rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler import ir
from compiler.emit.segment_cache import emit
from compiler.model.segments.interpret import cut
from dsl.schema import Dense, Moe
from tests.compiler.model.segments.rounding import SAMPLES, assert_rounded, rounding
from tests.compiler.model.segments.running import TARGET, Result, by_autograd, by_segment, load
from tests.compiler.model.segments.specs import DENSE, compressed, gqa, mla, moe, softmax_moe, spec
from tests.compiler.model.segments.test_segments import arguments, segment_of

EVERYONE = moe(experts=4, top_k=4, groups=1, top_groups=1)  # no near tie is decided otherwise after a rounding

SEGMENTS: dict[str, tuple[str, Dense | Moe, dict[str, Any]]] = {
    "embed": ("embed", EVERYONE, {}),
    "mla": ("attention", EVERYONE, {}),
    "mla, full rank": ("attention", EVERYONE, {"attention": mla(query_rank=None)}),
    "gqa": ("attention", EVERYONE, {"attention": gqa()}),
    "window alone": ("attention", EVERYONE, {"attention": compressed(compress=None)}),
    "entries": ("attention", EVERYONE, {"attention": compressed()}),
    "dense": ("dense", DENSE, {}),
    "router": ("router", EVERYONE, {}),
    "softmax router": ("router", softmax_moe(experts=4, top_k=4, groups=1, top_groups=1), {}),
    "shared": ("shared", EVERYONE, {}),
    "experts": ("experts", moe(), {"expert": 2}),
    "join": ("join", EVERYONE, {}),
    "final_norm": ("final_norm", EVERYONE, {}),
    "head": ("head", EVERYONE, {}),
    "mtp_input": ("mtp_input", EVERYONE, {}),
}
ROWS = [19, 0, 16, 8]


@pytest.mark.parametrize("name", SEGMENTS)
def test_bf16_differs_from_float64_by_its_roundings(name: str) -> None:
    kind, ffn, changes = SEGMENTS[name]
    layers, sizes = (DENSE, ffn, ffn), {"hidden": 24, "sequence": 16} | changes
    narrow, wide = (segment_of(kind, spec(layers, precision=p, **sizes), ffn) for p in ("bf16", "fp64"))
    operands = rounded_arguments(narrow, arguments(wide, 31, ROWS))
    result = by_segment(narrow, load(narrow), operands)
    operands = {key: value.double() if value.is_floating_point() else value for key, value in operands.items()}
    exact = by_autograd(wide, operands)
    samples = [by_segment(wide, at_random(wide, seed), operands) for seed in range(SAMPLES)]
    for part in ("outputs", "gradients"):
        for key, tensor in values(result, part).items():
            compared = [values(sample, part)[key] for sample in samples]
            reference = values(exact, part)[key]
            if tensor.is_floating_point():
                before = operands[key] if key.startswith("g_") else torch.zeros(())
                changed = [sample_tensor.double() - before for sample_tensor in compared]
                assert_rounded(tensor.double() - before, reference - before, changed, f"{name}: {key}")
            elif key != "order":  # the order of a token's choices depends on scores that may be equal
                assert torch.equal(tensor, reference), key


def values(result: Result, part: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = getattr(result, part)
    return tensors


def rounded_arguments(segment: ir.Segment, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arguments in the dtypes that a BF16 segment takes; gradients are added to FP32 buffers."""
    dtypes = {argument.name: argument.dtype for argument in (*segment.params, *segment.inputs)}
    dtypes |= {f"d_{buffer.name}": buffer.dtype for buffer in cut(segment).outputs}
    dtypes |= {f"g_{param.name}": "float32" for param in segment.params}
    return {name: value.to(getattr(torch, dtypes[name])) for name, value in operands.items()}


def at_random(segment: ir.Segment, seed: int) -> dict[str, Any]:
    """F, I and W of a segment, with random rounding in its ops."""
    namespace: dict[str, Any] = {"__file__": "build/segments/segment.py"}
    apart = replace(segment, fused=())  # a fused op rounds inside as well; that it is the same is tested in test_fuse
    exec(compile(emit(apart, TARGET).source, segment.kind, "exec"), namespace)
    rounding(namespace, torch.Generator().manual_seed(seed))
    return {name: namespace[name] for name in "FIW"}
