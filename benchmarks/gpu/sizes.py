"""The sizes at which kernels are checked and timed, and random tensors for their arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes on one rank. `rows`: those that an expert rank receives, expert after expert."""

    tokens: int
    sequence: int
    hidden: int
    vocab: int
    dense: int  # inner width of a dense layer
    inner: int  # of an expert
    rows: int
    local_experts: int
    experts: int  # that a token chooses from
    top_k: int
    groups: int
    top_groups: int
    heads: int
    kv_heads: int  # of grouped-query attention, with `head_dim`
    head_dim: int
    nope: int
    rope: int
    value: int
    query_rank: int
    parameters: int  # of one update


# One rank of DeepSeek-V3 with 64 expert ranks: 4096 tokens, and as many rows as its 4 experts get on average.
V3 = Sizes(
    tokens=4096,
    sequence=4096,
    hidden=7168,
    vocab=129280,
    dense=18432,
    inner=2048,
    rows=32768,
    local_experts=4,
    experts=256,
    top_k=8,
    groups=8,
    top_groups=4,
    heads=128,
    kv_heads=8,
    head_dim=128,
    nope=128,
    rope=64,
    value=128,
    query_rank=1536,
    parameters=1 << 28,
)
# No size divides another, and rows are not aligned to 16 bytes.
ODD = Sizes(
    tokens=3 * 67,
    sequence=67,
    hidden=193,
    vocab=1009,
    dense=331,
    inner=131,
    rows=517,
    local_experts=3,
    experts=40,
    top_k=3,
    groups=5,
    top_groups=2,
    heads=6,
    kv_heads=2,
    head_dim=32,
    nope=24,
    rope=8,
    value=20,
    query_rank=97,
    parameters=100_003,
)
# The quickstart's, with two blocks in every dimension.
EVEN = Sizes(
    tokens=512,
    sequence=256,
    hidden=256,
    vocab=4096,
    dense=512,
    inner=128,
    rows=1024,
    local_experts=4,
    experts=16,
    top_k=4,
    groups=4,
    top_groups=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    nope=128,
    rope=64,
    value=128,
    query_rank=128,
    parameters=1 << 16,
)
# For the interpreter, which is much slower than a GPU.
TINY = replace(
    ODD,
    tokens=2 * 7,
    sequence=7,
    hidden=33,
    vocab=50,
    dense=21,
    inner=19,
    rows=23,
    local_experts=2,
    experts=10,
    heads=4,
    head_dim=16,
    nope=8,
    rope=4,
    value=6,
    query_rank=17,
    parameters=300,
)
ALL = {"v3": V3, "odd": ODD, "even": EVEN, "tiny": TINY}


class Make:
    """Makes random tensors on a device, the same for the same seed. On the meta device they have no data."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """A tensor of normal numbers, generated in its own dtype, without a wider copy."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0.0, scale, generator=self.generator)

    def wide(self, *shape: int) -> Tensor:
        """An FP32 tensor: statistics, gate weights, gradients of weights."""
        return self(*shape, dtype=torch.float32)

    def integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self.generator, device=self.device)

    def permutation(self, extent: int) -> Tensor:
        return torch.randperm(extent, generator=self.generator, device=self.device)

    def offsets(self, sizes: Sizes) -> Tensor:
        """offsets_E (int32) of the local experts: uneven groups, some empty, that cover all rows."""
        share = torch.rand(sizes.local_experts, generator=self.generator, device=self.device)
        share = torch.where(share < 0.1, torch.zeros_like(share), share)
        share[-1] += 0.1  # at least one expert has rows
        ends = (share.cumsum(0) / share.sum() * sizes.rows).round().to(torch.int32)
        ends[-1] = sizes.rows
        return ends

    def aligned_offsets(self, sizes: Sizes, multiple: int) -> Tensor:
        """`offsets` with every end but the last rounded down to a multiple."""
        ends = self.offsets(sizes) // multiple * multiple
        ends[-1] = sizes.rows
        return ends
