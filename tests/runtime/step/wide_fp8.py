"""The ops of FP8 programs in float64, with no rounding, rounding to nearest or random rounding where FP8 ops round.

An independent implementation of the recipe (arXiv 2412.19437, §3.3): FP8 values are float64 tensors with scales of one,
so that a graph that gives a product the wrong operand, or does not transpose it, gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from runtime.ops import OPS
from tests.compiler.model.segments.rounding import at_random, rounded_results
from tests.runtime.ops.cases import as_tuple

E4M3 = 448.0, -6, 3  # the largest number, and 3 bits of fraction from 2⁻⁶ on
E5M6 = 130048.0, -14, 6
Rounding = torch.Generator | bool  # random, or whether to round to nearest


@dataclass(frozen=True)
class Wide:
    """Ops by the names that emitted segments call, with one kind of rounding."""

    how: Rounding

    # ---------------------------------------------------------------- roundings

    def sixteen(self, x: Tensor) -> Tensor:
        """Round to BF16."""
        if isinstance(self.how, torch.Generator):
            return at_random(x, self.how)
        return x.to(torch.bfloat16).double() if self.how else x

    def eight(self, x: Tensor, pow2: bool, rows: int = 1, columns: int = 128) -> Tensor:
        """Round to E4M3 with a scale for each tile of `rows` × `columns`."""
        if self.how is False:
            return x
        result = torch.empty_like(x)
        for r in range(0, x.shape[0], rows):
            for c in range(0, x.shape[1], columns):
                tile = x[r : r + rows, c : c + columns]
                result[r : r + rows, c : c + columns] = self._tile(tile, tile.abs().max(), pow2)
        return result

    def by_rows(self, x: Tensor, pow2: bool, of: tuple[float, int, int] = E4M3) -> Tensor:
        """Round to E4M3 or E5M6 in tiles of 1 × 128, all rows at a time."""
        if self.how is False:
            return x
        parts = x.split(128, dim=1)
        return torch.cat([self._tile(part, part.abs().amax(1, keepdim=True), pow2, of) for part in parts], 1)

    def _tile(self, tile: Tensor, most: Tensor, pow2: bool, of: tuple[float, int, int] = E4M3) -> Tensor:
        largest, least, bits = of
        scale = (most.float() * torch.tensor(1 / largest)).double()
        if pow2:
            scale = 2.0 ** scale.log2().ceil()
        scale = torch.where(most > 0, scale, 1.0)
        x = tile / scale
        step = 2.0 ** (x.abs().clamp(min=2.0**least).log2().floor() - bits)
        if isinstance(self.how, torch.Generator):
            units = (x / step + torch.rand(x.shape, generator=self.how, dtype=x.dtype)).floor()
        else:
            units = (x / step).round()
        return (units * step).clamp(-largest, largest) * scale

    # ---------------------------------------------------------------- ops

    def quantise(self, x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
        return self.by_rows(x, pow2), _scales(x)

    def requantise(self, q: Tensor, _: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
        return self.quantise(q.t().contiguous(), pow2)

    def quantise_both(self, x: Tensor, pow2: bool) -> tuple[Tensor, ...]:
        return *self.quantise(x, pow2), *self.quantise(x.t().contiguous(), pow2)

    def quantise_e5m6(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.by_rows(x, True, E5M6), x.new_zeros(1), _scales(x)

    def dequantise_e5m6(self, high: Tensor, _: Tensor, __: Tensor) -> Tensor:
        return high

    def linear_fp8(self, x: Tensor, _: Tensor, w: Tensor, __: Tensor) -> Tensor:
        return self.sixteen(x @ w.t())

    linear_fp8_dgrad = linear_fp8  # of the transposed weight

    def linear_fp8_wgrad_(self, acc: Tensor, dy: Tensor, _: Tensor, x: Tensor, __: Tensor) -> None:
        acc.add_(dy @ x.t())

    def grouped_linear_fp8(self, x: Tensor, _: Tensor, w: Tensor, __: Tensor, offsets: Tensor) -> Tensor:
        return self.sixteen(OPS["grouped_linear"](x, w, offsets))

    grouped_linear_fp8_dgrad = grouped_linear_fp8

    def grouped_linear_fp8_wgrad_(
        self, acc: Tensor, dy: Tensor, _: Tensor, x: Tensor, __: Tensor, offsets: Tensor
    ) -> None:
        OPS["grouped_linear_wgrad_"](acc, dy.t().contiguous(), x.t().contiguous(), offsets)

    def permute_fp8(self, x: Tensor, _: Tensor, gate: Tensor, expert: Tensor, experts: int) -> tuple[Tensor, ...]:
        rows, *permutation = OPS["permute"](x, gate, expert, experts)
        return rows, _scales(rows), *permutation

    def unpermute_fp8_dgrad(self, dy: Tensor, _: Tensor, order: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        rows = OPS["unpermute_dgrad"](dy, order, top_k)
        return rows, _scales(rows)

    def swiglu_fp8(self, h: Tensor, _: Tensor) -> Tensor:
        return self.sixteen(OPS["swiglu"](h))

    def swiglu_fp8_dgrad(self, dy: Tensor, h: Tensor, _: Tensor) -> Tensor:
        return self.sixteen(OPS["swiglu_dgrad"](dy, h))

    def gated_swiglu_fp8(self, h: Tensor, _: Tensor, gate: Tensor) -> Tensor:
        return self.sixteen(OPS["gated_swiglu"](h, gate))

    def gated_swiglu_fp8_dgrad(self, dy: Tensor, h: Tensor, _: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        dh, dgate = OPS["gated_swiglu_dgrad"](dy, h, gate)
        return self.sixteen(dh), dgate

    def weights(self, name: str, w: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The operands made from a weight, or from several experts' weights, in blocks of 128 × 128."""
        quantised = [self.eight(expert, False, 128, 128) for expert in (w if w.dim() == 3 else w[None])]
        data = torch.stack(quantised) if w.dim() == 3 else quantised[0]
        yield from ((f"{name}_fp8", data), (f"{name}_scales", torch.ones(1)))
        yield from ((f"{name}_fp8_t", data.transpose(-1, -2).contiguous()), (f"{name}_scales_t", torch.ones(1)))

    # ---------------------------------------------------------------- in a program

    def put(self, namespace: MutableMapping[str, Any]) -> None:
        """Replace the ops of an emitted segment by these."""
        for name, value in list(namespace.items()):
            if value in OPS.values():
                namespace[name] = getattr(self, value.__name__, None) or self._plain(value.__name__, value)
        namespace["torch"] = SimpleNamespace(add=self._rounded(torch.add), cat=torch.cat)

    def _rounded(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: self.sixteen(function(*args))

    def _plain(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """An op of BF16 programs. Additions to FP32 gradients are not rounded."""
        assert "fp8" not in op and "quantise" not in op, op
        if op.endswith("_"):
            return function

        def rounded(*args: Any) -> Any:
            flags = rounded_results(op)
            results = tuple(
                self.sixteen(result) if flag else result
                for result, flag in zip(as_tuple(function(*args)), flags, strict=True)
            )
            return results if len(results) > 1 else results[0]

        return rounded


def _scales(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], -(-x.shape[1] // 128))
