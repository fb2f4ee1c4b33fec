"""Experts in MXFP4, as GPT-OSS is published: read as `transformers` does, and refused where something is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.state.huggingface.convert import from_mxfp4
from tests.compiler.tools.weights.published import export, import_, loaded, random_model, weights

BLOCK = 32
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_blocks(experts: int, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data and scales of as many matrices: any bytes, and powers of two around 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, columns // BLOCK)
    data = torch.randint(256, (*shape, BLOCK // 2), generator=generator, dtype=torch.uint8)
    return data, torch.randint(122, 127, shape, generator=generator, dtype=torch.uint8)


def values(data: Tensor, scales: Tensor) -> Tensor:
    """The values of blocks, number by number."""
    decoded = torch.empty(*data.shape[:2], data.shape[2] * BLOCK, dtype=torch.float64)
    for position in torch.cartesian_prod(*(torch.arange(size) for size in decoded.shape)).tolist():
        expert, row, column = position
        byte = int(data[expert, row, column // BLOCK, column % BLOCK // 2])
        bits = byte >> 4 if column % 2 else byte & 15
        sign = -1.0 if bits & 8 else 1.0
        decoded[expert, row, column] = (
            sign * NUMBERS[bits & 7] * 2.0 ** (int(scales[expert, row, column // BLOCK]) - 127)
        )
    return decoded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-OSS whose experts are in MXFP4."""
    model = random_model("gpt_oss", torch.bfloat16, **SIZES)
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for seed, name in enumerate((UP, DOWN)):
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_blocks(experts, rows, columns, seed)
    put(tmp_path / "hf", tensors)
    return tmp_path / "hf"


def put(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_numbers_equal_the_definition_of_the_format() -> None:
    data, scales = random_blocks(2, 3, 64, seed=9)
    scales[0, 0, 0], scales[1, 2, 1] = 0, 250  # far below 1, and far above
    exact = values(data, scales)
    ours = torch.stack([from_mxfp4(*pair) for pair in zip(data, scales, strict=True)])
    assert ours.dtype == torch.bfloat16 and torch.equal(ours.double(), exact)


def test_experts_are_read_as_transformers_reads_them(folder: Path) -> None:
    packed = load_file(folder / "model.safetensors")
    assert import_(folder, folder.parent / "m.dsc") == 0
    ours = weights(folder.parent / "m.weights")
    for name, matrix_name in ((UP, "up"), (DOWN, "down")):
        theirs = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.bfloat16)
        for expert, matrix in enumerate(theirs.transpose(1, 2)):
            wanted = torch.cat([matrix[0::2], matrix[1::2]]) if matrix_name == "up" else matrix
            our_matrix = ours[f"weight/layers.0.ffn.experts.{expert}.{matrix_name}"]
            assert our_matrix.dtype == torch.bfloat16 and torch.equal(our_matrix, wanted)


def test_they_are_published_in_bf16(folder: Path) -> None:
    packed = load_file(folder / "model.safetensors")
    assert import_(folder, folder.parent / "m.dsc") == 0
    assert export(folder.parent / "m.weights", folder.parent / "out") == 0
    reloaded = dict(loaded(folder.parent / "out", torch.bfloat16).named_parameters())
    for name in (UP, DOWN):
        theirs = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.bfloat16)
        assert torch.equal(reloaded[name], theirs)


def test_blocks_of_fp8_are_not_written(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert import_(folder, folder.parent / "m.dsc") == 0
    assert export(folder.parent / "m.weights", folder.parent / "out", "--dtype", "fp8") == 2
    assert "gpt_oss does not support FP8 blocks: choose --dtype bf16" in capfd.readouterr().err
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("end", ["_scales", "_blocks"])
def test_half_of_a_pair_is_refused(folder: Path, end: str, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[UP + end]
    put(folder, tensors)
    assert import_(folder, folder.parent / "m.dsc") != 0
    stderr = capfd.readouterr().err
    message = (
        f"{UP}_blocks is MXFP4, but its scales are missing: {UP}_scales" if end == "_scales" else f"{UP} is missing"
    )
    assert message in stderr and not (folder.parent / "m.dsc").exists()


def test_other_shapes_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}_scales"] = tensors[f"{DOWN}_scales"][:, :-1].contiguous()
    put(folder, tensors)
    assert import_(folder, folder.parent / "m.dsc") != 0
    assert re.search(
        rf"{re.escape(DOWN)}_scales is U8 of 6 × 63 × 1; MXFP4 needs U8 of 6 × 64 × 1", capfd.readouterr().err
    )


def test_a_nan_scale_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}_scales"][1, 2, 0] = 255
    put(folder, tensors)
    with pytest.raises(RuntimeError, match=r"gate_up_proj_scales: a scale is not a number"):
        import_(folder, folder.parent / "m.dsc")
    assert not (folder.parent / "m.dsc").exists()
