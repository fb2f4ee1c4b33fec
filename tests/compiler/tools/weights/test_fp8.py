"""FP8 blocks: dequantised correctly, written in the published form, and refused if something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compiler.tools.weights.published import config_of, export, import_, random_model, weights

BLOCK = 128
SIZES = {"hidden_size": 136, "intermediate_size": 200, "num_hidden_layers": 1}  # neither is a multiple of 128
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
LINEAR = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
          "down_proj.weight")  # fmt: skip


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 data and FP32 scales of a matrix, block by block."""
    rows, columns = weight.shape
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(0, rows, BLOCK):
        for j in range(0, columns, BLOCK):
            part = weight[i : i + BLOCK, j : j + BLOCK].float()
            scale = part.abs().max() / 448
            scales[i // BLOCK, j // BLOCK] = scale
            data[i : i + BLOCK, j : j + BLOCK] = (part / scale).to(torch.float8_e4m3fn)
    return data, scales


def values(data: Tensor, scales: Tensor) -> Tensor:
    """The values of blocks, number by number."""
    rows = torch.arange(data.shape[0])[:, None] // BLOCK
    columns = torch.arange(data.shape[1])[None, :] // BLOCK
    return data.float() * scales[rows, columns]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in FP8 whose sizes are not multiples of a block."""
    random_model("llama", torch.float32, **SIZES).save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in [key for key in tensors if key.endswith(LINEAR)]:
        tensors[name], tensors[name + "_scale_inv"] = blocks(tensors[name])
    put(tmp_path / "hf", tensors)
    configure(tmp_path / "hf", FP8)
    return tmp_path / "hf"


def put(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, quantization: object) -> None:
    config = config_of(folder) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def test_blocks_are_multiplied_by_their_scales(folder: Path) -> None:
    before = load_file(folder / "model.safetensors")
    spec = folder.with_name("m.dsc")
    assert import_(folder, spec) == 0
    converted = weights(spec.with_suffix(".weights"))
    for local, name in (("ffn.down", "mlp.down_proj"), ("attention.out", "self_attn.o_proj")):
        name = f"model.layers.0.{name}.weight"
        assert torch.equal(converted[f"weight/layers.0.{local}"], values(before[name], before[name + "_scale_inv"]))
    gate, up = converted["weight/layers.0.ffn.up"].chunk(2)
    for ours, name in ((gate, "gate"), (up, "up")):
        name = f"model.layers.0.mlp.{name}_proj.weight"
        assert torch.equal(ours, values(before[name], before[name + "_scale_inv"]))


def test_blocks_round_trip(folder: Path, tmp_path: Path) -> None:
    """Written again, blocks have the same scales and data, to the last bit of a scale."""
    spec = folder.with_name("m.dsc")
    assert import_(folder, spec) == 0
    assert export(spec.with_suffix(".weights"), tmp_path / "out", "--dtype", "fp8") == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert after[name].shape == before[name].shape, name
        if name.endswith("_scale_inv"):
            assert torch.allclose(after[name], before[name], rtol=2e-7, atol=0), name
        elif before[name].dtype == torch.float8_e4m3fn:
            assert after[name].dtype == torch.float8_e4m3fn
            assert torch.equal(after[name].float(), before[name].float()), name
        else:
            assert after[name].dtype == torch.bfloat16
    config = config_of(tmp_path / "out")["quantization_config"]
    assert {key: config[key] for key in FP8} == FP8 and config["modules_to_not_convert"] == ["lm_head"]


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", f"{NAME} is F8_E4M3, but its scales are missing: {NAME}_scale_inv"),
        ("shape", f"{NAME}_scale_inv is F32 of 2 × 1; such blocks need F32 of 2 × 2"),
        ("dtype", f"{NAME}_scale_inv is BF16 of 2 × 2; such blocks need F32 of 2 × 2"),
        ("config", "has no `quantization_config` with a `weight_block_size`"),
        ("method", "`quantization_config` 'gptq' are not supported"),
        ("sizes", "no `weight_block_size` of two numbers"),
        ("wide", f"{NAME}_scale_inv is not a tensor of this model"),
    ],
)
def test_faults_of_blocks_are_refused(folder: Path, capfd: pytest.CaptureFixture[str], what: str, message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    scales = tensors[NAME + "_scale_inv"]
    match what:
        case "missing":
            del tensors[NAME + "_scale_inv"]
        case "shape":
            tensors[NAME + "_scale_inv"] = scales[:, :1].contiguous()
        case "dtype":
            tensors[NAME + "_scale_inv"] = scales.to(torch.bfloat16)
        case "wide":
            tensors[NAME] = values(tensors[NAME], scales)
        case "config":
            configure(folder, None)
        case "method":
            configure(folder, FP8 | {"quant_method": "gptq"})
        case "sizes":
            configure(folder, FP8 | {"weight_block_size": [0, -1, 10**30]})
    put(folder, tensors)
    assert import_(folder, folder.with_name("m.dsc")) == 2
    assert message in capfd.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["hf"], "nothing is left behind"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_invalid_scales_are_refused(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME + "_scale_inv"][1, 0] = value
    put(folder, tensors)
    with pytest.raises(RuntimeError, match=r"down_proj\.weight_scale_inv: a scale is negative or not finite"):
        import_(folder, folder.with_name("m.dsc"))
    assert [path.name for path in folder.parent.iterdir()] == ["hf"], "nothing is left behind"
