"""Attention's output, kept in E5M6: a step against one whose backward reads it rounded, and its bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compiler import ir
from compiler.emit.segment_cache import Segments
from compiler.model.segments.interpret import cut
from compiler.plan.blocks import model_steps
from dsl.schema import BUILT_IN, Precision
from runtime.build.build import Build
from runtime.ops import OPS
from runtime.ops.elements import E5M6
from tests.runtime.ops.test_elements import nearest, numbers
from tests.runtime.step.specs import spec
from tests.runtime.step.test_formats import chosen, gradients, trainer_of
from tests.runtime.step.test_memory import measured_peaks

KEPT = BUILT_IN["bf16"].model_copy(update={"name": "kept", "attention_output": "e5m6"})


def rounded(o: Tensor) -> Tensor:
    """Round to E5M6, with the smallest power-of-two scale without saturation for each row of at most 128."""
    assert o.shape[1] <= 128
    table = numbers(E5M6)
    rows = []
    for row in o.double():
        scale = 2.0 ** np.ceil(np.log2(max(row.abs().max().item(), 1e-30) / table[-1].item()))
        rows.append(table[nearest(row / scale, E5M6) % E5M6.sign].copysign(row) * scale)
    return torch.stack(rows).to(o.dtype)


def test_a_step_equals_one_whose_backward_reads_it_rounded(
    tmp_path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = gradients(trainer_of(tmp_path / "found", segments, KEPT))
    trainer = trainer_of(tmp_path / "plain", segments, BUILT_IN["bf16"])
    addresses = {
        value.data_ptr() for name, value in vars(trainer.state.gradients).items() if name.endswith("attention_out")
    }

    def dgrad(d: Tensor, q: Tensor, kv: Tensor, k: Tensor, o: Tensor, *more: object) -> tuple[Tensor, ...]:
        return OPS["mla_attention_dgrad"](d, q, kv, k, rounded(o), *more)

    def wgrad_(acc: Tensor, dy: Tensor, x: Tensor) -> None:
        OPS["linear_wgrad_"](acc, dy, rounded(x) if acc.data_ptr() in addresses else x)

    package = f"dsc_build_{Build.open(tmp_path / 'plain').digest[:16]}.segments.attention"
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for alias, op in list(vars(module).items()):
                if op in (OPS["mla_attention_dgrad"], OPS["linear_wgrad_"]):
                    monkeypatch.setattr(module, alias, dgrad if op is OPS["mla_attention_dgrad"] else wgrad_)
    expected = gradients(trainer)
    assert all(torch.equal(results[name], wanted) for name, wanted in expected.items())
    monkeypatch.undo()
    in_bf16 = gradients(trainer_of(tmp_path / "plain", segments, BUILT_IN["bf16"]))
    assert not torch.equal(results["layers.0.attention.q_up"], in_bf16["layers.0.attention.q_up"])
    assert torch.equal(results["losses"], in_bf16["losses"])


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp8"])
def test_the_backward_keeps_twelve_bits_of_the_output(name: str) -> None:
    """1.5 bytes per element and one byte for each 128 of a row, instead of two bytes per element."""

    def kept(precision: Precision) -> dict[str, int]:
        uses = model_steps(chosen(precision))
        use = next(step for step in uses if isinstance(step, ir.Use) and step.segment.kind == "attention")
        return {buffer.name: buffer.fixed_bytes for buffer in cut(use.segment).saved}

    wide = kept(BUILT_IN[name])
    short = kept(BUILT_IN[name].model_copy(update={"attention_output": "e5m6"}))
    (value,) = (buffer for buffer in wide if "attention" in buffer and not buffer.endswith("_lse"))
    parts = {buffer: size for buffer, size in short.items() if buffer.startswith(f"{value}_kept")}
    rows, columns = chosen(BUILT_IN[name]).train.micro_batch * chosen(BUILT_IN[name]).train.sequence, 10
    assert wide[value] == rows * columns * 2
    assert [*parts.values()] == [rows * columns, rows * columns // 2, rows]
    assert {buffer: size for buffer, size in wide.items() if buffer != value} == {
        buffer: size for buffer, size in short.items() if buffer not in parts
    }


@pytest.mark.parametrize(
    ("name", "pp", "ep", "dp"), [("mxfp8", 1, 1, 1), ("nvfp4", 1, 1, 1), ("mxfp8", 2, 2, 2), ("nvfp4", 2, 2, 2)]
)
def test_proven_peak_is_the_measured_one(
    tmp_path: Path, segments: Segments, name: str, pp: int, ep: int, dp: int
) -> None:
    precision = BUILT_IN[name].model_copy(update={"attention_output": "e5m6"})
    measured_peaks(tmp_path, segments, spec(pp, ep, dp, 4).model_copy(update={"precision": precision}))
