"""Training in MXFP8 and NVFP4: a step against an independent one, the loss of a few steps, and high-precision layers.

The independent step is the BF16 program with its products replaced: operands are rounded by comparison with all numbers
of a format, tile by tile, with independently implemented random numbers. Sums use `runtime.ops.product`, so that
activations and their gradients are bit-identical.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from compiler import ir
from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.model.layers.value_dtypes import PRODUCTS
from compiler.pipeline import compile_spec
from compiler.plan.blocks import model_steps
from dsl.schema import BUILT_IN, HighPrecisionLayers, Precision, Spec
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.ops import OPS
from runtime.ops.elements import E2M1, E4M3, Element
from runtime.ops.product import product
from runtime.step.trainer import Trainer
from tests.runtime.ops.test_elements import nearest, numbers
from tests.runtime.step.samples import RandomSamples, weight
from tests.runtime.step.specs import spec
from tests.runtime.step.test_bf16 import MODEL

UNIT, HIGH_BITS = 16, np.uint64(40)
LOW_LAYERS = BUILT_IN["nvfp4"].model_copy(update={"high": None})
RECIPES = {
    "mxfp8": BUILT_IN["mxfp8"],
    "nvfp4": LOW_LAYERS,
    "nvfp4, to nearest": LOW_LAYERS.model_copy(update={"gradient_rounding": "nearest", "hadamard": False}),
    "128x128": BUILT_IN["fp8_block"].model_copy(
        update={"activation_tile": BUILT_IN["fp8_block"].weight_tile, "dispatch": "bf16"}
    ),
}


class Few(RandomSamples):
    """Eight repeated samples, to be memorized."""

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        return super().tokens(index % 8)


def chosen(precision: Precision, steps: int = 2) -> Spec:
    """Every token goes to every expert, since rounding would decide near ties differently."""
    return spec(1, 1, 1, 4, steps).model_copy(update={"precision": precision, "model": MODEL})


def trainer_of(folder: Path, segments: Segments, precision: Precision, steps: int = 2) -> Trainer:
    write_build(folder, compile_spec(chosen(precision, steps), segments=segments).files)
    build = Build.open(folder)
    samples = Few(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)).to(torch.bfloat16))
    return trainer


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients of a step, and its losses."""
    sums = trainer.accumulate()
    tensors = {e.name: value.clone() for _, e, value in trainer.state.logical(lambda bucket: bucket.gradients)}
    return tensors | {"losses": torch.stack([sums["loss"], sums["mtp_loss"]])}


# ---------------------------------------------------------------- the independent products


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_numbers(x: Tensor, seeds: tuple[int, ...], salt: int) -> Tensor:
    """Random numbers in [0, 1) for a tensor's elements, from the bits of their rows."""
    golden, mask = np.uint64(0x9E3779B97F4A7C15), 2**64 - 1
    seed, step, number = (np.array([value & mask], np.uint64) for value in seeds)
    with np.errstate(over="ignore"):
        start = mixed(mixed(mixed(seed * golden + np.uint64(salt)) + step) + number)
        columns = mixed(np.arange(1, x.shape[1] + 1, dtype=np.uint64) * golden)
        bits = x.float().contiguous().view(torch.int32).numpy().astype(np.int64).astype(np.uint64)
        rows = mixed((bits * (columns | np.uint64(1))).sum(1, dtype=np.uint64) ^ start)
        return torch.from_numpy((mixed(rows[:, None] + columns) >> HIGH_BITS).astype(np.float64) * 2.0**-24)


def transformed(x: Tensor) -> Tensor:
    """Multiply each whole block of 16 rows by the Hadamard matrix with the signs of 0x243F, divided by 4."""
    signs = torch.tensor([-1.0 if 0x243F >> bit & 1 else 1.0 for bit in range(UNIT)])
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(UNIT)] for i in range(UNIT)]) * signs / 4
    y = x.float().clone()
    for start in range(0, len(x) - UNIT + 1, UNIT):
        y[start : start + UNIT] = (h.double() @ x[start : start + UNIT].double()).float()
    return y


Rounded = tuple[Tensor, float]  # (numbers without the tensor's scale, in FP32; the scale)


def rounded(x: Tensor, precision: Precision, tile: tuple[int, int], u: Tensor | None = None) -> Rounded:
    """Round x to a format, tile by tile."""
    element = E2M1 if precision.linear == "e2m1" else E4M3
    largest, result = float(numbers(element)[-1]), torch.zeros(x.shape)
    x_scale = np.float32(x.abs().max().item()) / np.float32(largest * 448) if precision.tensor_scale else np.float32(1)
    for r in range(0, x.shape[0], tile[0]):
        for c in range(0, x.shape[1], tile[1]):
            block = slice(r, r + tile[0]), slice(c, c + tile[1])
            scale = scale_of(np.float32(x[block].abs().max().item()), precision.scale, largest, x_scale)
            if scale:
                inverse = torch.tensor(np.float32(1) / (scale * x_scale))  # numbers are multiplied by this, in FP32
                ratio = (x[block].float() * inverse).double().clamp(-largest, largest)
                result[block] = at_codes(ratio, element, None if u is None else u[block]) * torch.tensor(scale)
    return result, float(x_scale)


def scale_of(most: np.float32, dtype: str, largest: float, whole: np.float32) -> np.float32:
    """The scale of a tile whose largest magnitude is `most`."""
    if most == 0:
        return np.float32(0)
    if dtype == "e8m0":
        return np.float32(2.0 ** np.ceil(np.log2(np.float64(most) / largest)))
    if dtype == "fp32":
        return np.float32(most * np.float32(1 / largest))
    ratio = torch.tensor([most / np.float32(largest) / whole], dtype=torch.float64)
    return np.float32(numbers(E4M3)[nearest(ratio, E4M3)].item())


def at_codes(ratio: Tensor, element: Element, u: Tensor | None) -> Tensor:
    """The nearest numbers or, with random numbers, a neighbour on either side."""
    table, size = numbers(element), ratio.abs().contiguous()
    if u is None:
        codes = nearest(ratio, element) % element.sign
    else:
        low = (torch.searchsorted(table, size, right=True) - 1).clamp(max=len(table) - 2)
        codes = low + ((size - table[low]) / (table[low + 1] - table[low]) > u)
    return table[codes].copysign(ratio).float()


class Products:
    """The ops of linears and their gradients, for BF16 tensors."""

    def __init__(self, trainer: Trainer, precision: Precision) -> None:
        self.precision, self.trainer = precision, trainer
        tiles = [(p.rows, p.columns) for p in (precision.activation_tile, precision.weight_tile) if p]
        self.tile, self.weight_tile = tiles
        tensors = {p.tensor.replace(".", "_"): p.tensor for p in trainer.plan.parameters}
        spaces = (trainer.state.parameters, trainer.state.gradients)
        self.names = {
            value.data_ptr(): tensors[name]
            for space in spaces
            for name, value in vars(space).items()
            if name in tensors and isinstance(value, Tensor)
        }

    def ops(self) -> dict[str, Callable[..., Any]]:
        single = {"linear": self.linear, "linear_dgrad": self.dgrad, "linear_wgrad_": self.wgrad_}
        grouped = {"grouped_linear": self.grouped, "grouped_linear_dgrad": self.grouped_dgrad}
        return single | grouped | {"grouped_linear_wgrad_": self.grouped_wgrad_}

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        return self._multiplied(rounded(x, self.precision, self.tile), w[None], None)

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        return self._multiplied(self._gradient(dy, w), w.t()[None], None)

    def wgrad_(self, acc: Tensor, dy: Tensor, x: Tensor) -> None:
        self._weigh(acc[None], dy, x, None)

    def grouped(self, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return self._multiplied(rounded(x, self.precision, self.tile), w, offsets)

    def grouped_dgrad(self, dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        return self._multiplied(self._gradient(dy, w), w.transpose(1, 2), offsets)

    def grouped_wgrad_(self, acc: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
        self._weigh(acc, dy, x, offsets)

    def _key(self, held: Tensor) -> tuple[int, ...]:
        digest = hashlib.sha256(self.names[held.data_ptr()].encode()).digest()
        return self.trainer.plan.train.seed, self.trainer.step, int.from_bytes(digest[:8], "big", signed=True)

    def _gradient(self, dy: Tensor, w: Tensor) -> Rounded:
        stochastic = self.precision.gradient_rounding == "stochastic"
        return rounded(dy, self.precision, self.tile, random_numbers(dy, self._key(w), 0) if stochastic else None)

    def _multiplied(self, of: Rounded, w: Tensor, offsets: Tensor | None) -> Tensor:
        """Multiply rows by the rounded weight of their group's expert."""
        (x, scale), start = of, 0
        y = x.new_zeros(len(x), w.shape[1])
        for group, end in enumerate([len(x)] if offsets is None else offsets.tolist()):
            w_rounded, w_scale = rounded(w[group % len(w)], self.precision, self.weight_tile)
            y[start:end] = (
                product(x[start:end], w_rounded.t()) * (torch.tensor(scale) * torch.tensor(w_scale))
                if start < end
                else 0
            )
            start = end
        return y.to(torch.bfloat16)

    def _weigh(self, acc: Tensor, dy: Tensor, x: Tensor, offsets: Tensor | None) -> None:
        turned, stochastic = (self.tile[1], self.tile[0]), self.precision.gradient_rounding == "stochastic"
        u = random_numbers(dy, self._key(acc), 1) if stochastic else None
        if self.precision.hadamard:
            dy, x = transformed(dy), transformed(x)
        dy_rounded, dy_scale = rounded(dy, self.precision, turned, u)
        (x_rounded, x_scale), start = rounded(x, self.precision, turned), 0
        for group, end in enumerate([len(x)] if offsets is None else offsets.tolist()):
            sums = product(dy_rounded[start:end].t().contiguous(), x_rounded[start:end])
            acc[group % len(acc)] += sums * (torch.tensor(dy_scale) * torch.tensor(x_scale))
            start = end


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_equals_an_independent_one(
    tmp_path: Path, segments: Segments, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = RECIPES[recipe]
    results = gradients(trainer_of(tmp_path / "found", segments, precision))
    monkeypatch.setattr(Precision, "row_alignment", precision.row_alignment)  # so that the same rows share a scale
    trainer = trainer_of(tmp_path / "plain", segments, BUILT_IN["bf16"])
    in_bf16, replacements = (
        gradients(trainer_of(tmp_path / "plain", segments, BUILT_IN["bf16"])),
        Products(trainer, precision).ops(),
    )
    package, replaced = f"dsc_build_{Build.open(tmp_path / 'plain').digest[:16]}.segments.", 0
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and name.removeprefix(package).startswith(PRODUCTS):
            for alias, op in list(vars(module).items()):
                if op in OPS.values() and op.__name__ in replacements:
                    monkeypatch.setattr(module, alias, replacements[op.__name__])
                    replaced += 1
    assert replaced >= 15, "three ops each of five kinds of segments"
    expected = gradients(trainer)
    for name, wanted in expected.items():
        assert not torch.equal(wanted, in_bf16[name]), f"{name} is as in BF16"
        # a product is added to a buffer term by term, or as a whole, and FP32 rounds there
        assert (results[name] - wanted).norm() <= 1e-6 * wanted.norm(), name
    assert torch.equal(results["losses"], expected["losses"])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_the_loss_falls_as_in_bf16(tmp_path: Path, segments: Segments, name: str) -> None:
    losses = {}
    for precision in (BUILT_IN[name], BUILT_IN["bf16"]):
        trainer = trainer_of(tmp_path / precision.name, segments, precision, steps=12)
        losses[precision.name] = [trainer.train_step()["loss"] for _ in range(12)]
    low, wide = losses.values()
    assert low[-1] < 0.4 * low[0] and wide[-1] < 0.4 * wide[0]
    assert abs(low[0] - wide[0]) < 0.05 * wide[0] and low[-1] < 1.5 * wide[-1]


def test_layers_kept_high_have_segments_of_their_own() -> None:
    """The first and last of four layers, and the MTP block, are as in BF16."""
    precision = BUILT_IN["nvfp4"].model_copy(update={"high": HighPrecisionLayers(first=1, last=1)})
    stored = {
        step.site: dict(step.segment.stored)
        for step in model_steps(chosen(precision))
        if hasattr(step, "segment") and step.segment.kind in PRODUCTS
    }
    low = {site for site, layout in stored.items() if layout.get("operands") == "nvfp4[1x16]"}
    assert low == {site for site in stored if site.startswith(("L1.", "L2."))} and len(low) == 6
    assert not any(layout for site, layout in stored.items() if site not in low)


def test_experts_kept_high_take_rows_as_in_bf16(tmp_path: Path, segments: Segments) -> None:
    """In `fp8_block` other experts take rows in E4M3; only the padding of rows is the same in all layers."""
    precision = BUILT_IN["fp8_block"].model_copy(update={"high": HighPrecisionLayers(first=0, last=2)})
    steps, wide = (
        {step.site: step for step in model_steps(chosen(recipe))} for recipe in (precision, BUILT_IN["bf16"])
    )
    high = [site for site in steps if site.startswith(("L2", "L3", "M0"))]
    assert {"L2", "L3", "M0", "L2.experts"} <= {*high}
    for site in high:
        step, plain = steps[site], wide[site]
        if isinstance(step, ir.Communication):
            assert isinstance(plain, ir.Communication)
            shapes = (
                [(b.shape, b.dtype) for b in (*communication.sizes, *communication.outputs, *communication.arriving)]
                for communication in (step, plain)
            )
            assert next(shapes) == next(shapes), site
        else:
            assert isinstance(plain, ir.Use) and step.segment.key == plain.segment.key, site
    assert dict(steps["L1.experts"].segment.stored)["rows"] == "float8_e4m3fn[1x128 pow2]"
    trainer = trainer_of(tmp_path, segments, precision)
    assert all(bool(value.isfinite().all()) and bool(value.any()) for value in gradients(trainer).values())
