"""Recipes that can be planned but not trained: one scale for each tensor, and logits in FP32."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path
from textwrap import dedent

import pytest

from compiler import ir
from compiler.ir.dtypes import tensor_bytes
from compiler.model.segments.interpret import cut, interpret
from compiler.plan.blocks import model_steps
from compiler.predict.predict import predict
from dsl.load import load
from dsl.rules import train_refusals
from dsl.schema import Spec
from tests.specs.shipped import SPECS

ONE_SCALE = "linear = e4m3, tensor_scale = true"
BLOCKS = "linear = e4m3, activation_tile = 1x128, weight_tile = 128x128"


def planned(folder: Path, precision: str, file: str = "llama3-8b", run: str = "pretrain") -> Spec:
    """A shipped run with a custom recipe."""
    path = folder / "mine.dsc"
    path.write_text(
        dedent(f"""
            import "{relpath(SPECS / file, folder)}.dsc"
            precision mine {{ {precision} }}
            run mine extends {run} {{ precision = mine }}
        """),
        "utf-8",
    )
    return load(path, "mine")


def segment_of(spec: Spec, kind: str) -> ir.Segment:
    return next(step.segment for step in model_steps(spec) if isinstance(step, ir.Use) and step.segment.kind == kind)


def cast_bytes(segment: ir.Segment) -> int:
    """The bytes moved by the casts of F and of the backward."""
    return sum(
        work.bytes for _, cost in cut(segment).costs for op, work in cost.ops if op in ("quantise", "quantise_both")
    )


def test_a_tensor_has_one_scale(tmp_path: Path) -> None:
    spec = planned(tmp_path, ONE_SCALE)
    joint = interpret(segment_of(spec, "dense"))
    narrow = {name: tensor for name, tensor in joint.tensors.items() if tensor.dtype.startswith("float8")}
    assert {"up", "down"} <= narrow.keys()
    for tensor in narrow.values():
        rows, columns = tensor.shape
        assert tensor_bytes(tensor.shape, tensor.dtype) == int(rows) * int(columns) + 4
    assert planned(tmp_path, ONE_SCALE, "qwen3-30b-a3b").row_alignment == 16


def test_per_tensor_scales_need_another_pass(tmp_path: Path) -> None:
    """A cast reads two bytes of an element twice and writes one, or two where it writes rows and columns."""
    spec, blocks = planned(tmp_path, ONE_SCALE), planned(tmp_path, BLOCKS)
    ratio = cast_bytes(segment_of(spec, "dense")) / cast_bytes(segment_of(blocks, "dense"))
    assert (4 + 2) / (2 + 2 + 0.1) < ratio < (4 + 1) / (2 + 1)
    per_tensor, per_block = predict(spec), predict(blocks)
    casts = [prediction.use.classes["quantise"].seconds for prediction in (per_tensor, per_block)]
    assert casts[0] > casts[1]
    # With one scale for each tensor, a weight gradient is the same product as the others, and faster than by blocks.
    weights = [prediction.use.classes["wgrad"].seconds for prediction in (per_tensor, per_block)]
    assert weights[0] < weights[1]
    assert any(
        line.startswith("the scale of a tensor is that of its largest number") for line in per_tensor.assumptions
    )
    assert any(
        line.startswith("products in e4m3 with one scale per tensor are as fast") for line in per_tensor.assumptions
    )
    assert not any("one scale per tensor" in line for line in per_block.assumptions)


@pytest.mark.parametrize("tensor", [1, 2])
def test_logits_in_fp32_are_kept_and_cast(tensor: int, tmp_path: Path) -> None:
    """The head saves four bytes per logit instead of two; the casts of logits and of gradients move six bytes each."""
    heads = []
    for recipe in ("logits = fp32", ""):
        spec = planned(tmp_path, recipe)
        parallel = spec.parallel.model_copy(update={"tensor": tensor})
        heads.append(segment_of(spec.model_copy(update={"parallel": parallel}), "head"))
    wide, plain = map(cut, heads)
    logits = spec.tokens_of_rank * spec.model.vocab // tensor
    saved = [max(buffer.fixed_bytes for buffer in segment_cut.saved) for segment_cut in (wide, plain)]
    assert saved == [4 * logits, 2 * logits]
    moved = [sum(cost.bytes for _, cost in segment_cut.costs) for segment_cut in (wide, plain)]
    read_and_written = (
        2 + 4 + 4 + 2
    )  # by the two casts; the loss reads logits twice and writes their gradient: 3·2 more
    assert moved[0] - moved[1] == logits * (read_and_written + 3 * 2)


def test_logits_in_blocks_are_not_kept(tmp_path: Path) -> None:
    spec = planned(tmp_path, "logits = fp32").model_copy(update={"recompute": ("logits",)})
    plain = planned(tmp_path, "").model_copy(update={"recompute": ("logits",)})
    assert segment_of(spec, "head").key == segment_of(plain, "head").key


def test_logits_in_fp32_take_memory_and_time(tmp_path: Path) -> None:
    wide, plain = (predict(planned(tmp_path, recipe)) for recipe in ("logits = fp32", ""))
    computed = [sum(stage.compute_s for stage in prediction.stages) for prediction in (wide, plain)]
    assert computed[0] > computed[1]
    assert wide.ranks[-1].peak_bytes > plain.ranks[-1].peak_bytes


@pytest.mark.parametrize(
    ("recipe", "differing", "nearest"),
    [(ONE_SCALE, "one scale for each tensor", "fp8_block"), ("logits = fp32", "logits in fp32", "bf16")],
)
def test_recipes_that_can_only_be_planned_do_not_train(
    recipe: str, differing: str, nearest: str, tmp_path: Path
) -> None:
    refusals = train_refusals(planned(tmp_path, recipe))
    assert [(item.code, item.hint) for item in refusals] == [("E1001", f"write `precision = {nearest}`")]
    assert f"precision mine has {differing}; " in refusals[0].message


def test_only_differing_tiles_are_reported(tmp_path: Path) -> None:
    (refusal,) = train_refusals(planned(tmp_path, BLOCKS.replace("1x128", "1x64")))
    assert "precision mine has dispatch in bf16, activation_tile = 1x64; " in refusal.message
