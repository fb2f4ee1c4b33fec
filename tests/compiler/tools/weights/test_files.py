"""Published files → checkpoint → published files: equal bytes in BF16; keys and losses as `transformers` has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BufferedWriter, RawIOBase, TextIOWrapper
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from compiler.tools.importers import huggingface
from compiler.tools.importers.families import FAMILIES as IMPORTED
from compiler.tools.importers.json_text import parse
from compiler.tools.weights.families import FAMILIES
from compiler.tools.weights.tensors import publish_tensors
from dsl.closed_forms.counts import parameters
from dsl.messages.diagnostics import Source
from runtime.state.huggingface import progress
from tests.compiler.tools.importers.test_huggingface import CONFIGS, NAMES
from tests.compiler.tools.weights.published import (
    EXPERTS,
    GQA,
    KEYS,
    MLA,
    SIZES,
    THETA,
    config_of,
    export,
    import_,
    loaded,
    random_model,
    weights,
)

ROOT = Path(__file__).parents[4]


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors of a folder."""
    saved: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        saved |= load_file(path)
    return saved


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two folders have the same names, dtypes and bytes."""
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


@torch.no_grad()
def loss(model: PreTrainedModel) -> float:
    tokens = torch.arange(40).view(2, 20) * 7 % 300
    value: float = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    return value


@pytest.mark.parametrize("model_type", KEYS)
def test_bf16_comes_back_byte_by_byte(model_type: str, tmp_path: Path) -> None:
    model = random_model(model_type, torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out") == 0
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert equal(after, before) and len(before) > 20
    assert config_of(tmp_path / "out")["model_type"] == model_type
    assert len(weights(tmp_path / "m.weights")) != len(before), "parts are one tensor there, stacked experts many"


@pytest.mark.parametrize("model_type", KEYS)
def test_transformers_has_the_same_loss(model_type: str, tmp_path: Path) -> None:
    model = random_model(model_type, torch.float32, seed=1)
    model.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out", "--dtype", "fp32") == 0
    assert loss(loaded(tmp_path / "out")) == pytest.approx(loss(model), rel=1e-5)
    assert equal(tensors(tmp_path / "out"), tensors(tmp_path / "hf"))


LAYERS = 61  # transformers expects V3's MTP at layer 61, and reports the MTP of a shorter model as unexpected


def with_mtp(folder: Path) -> dict[str, Tensor]:
    """Save a V3 with 61 layers and one MTP layer in BF16, in its published form. Returns its tensors."""
    keys = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, "first_k_dense_replace": 60}
    model = random_model("deepseek_v3", torch.bfloat16, **keys)
    model.save_pretrained(folder)
    main_tensors = tensors(folder)
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return (0.3 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    block, D = f"model.layers.{LAYERS}", 16
    last = {name: tensor for name, tensor in main_tensors.items() if name.startswith(f"model.layers.{LAYERS - 1}.")}
    mtp_tensors = {
        name.replace(str(LAYERS - 1), str(LAYERS), 1): noise(*tensor.shape).to(tensor.dtype)
        for name, tensor in last.items()
    }
    mtp_tensors |= {f"{block}.{name}.weight": 1 + noise(D) for name in ("enorm", "hnorm", "shared_head.norm")}
    mtp_tensors[f"{block}.eh_proj.weight"] = noise(D, 2 * D)
    mtp_tensors[f"{block}.embed_tokens.weight"] = main_tensors["model.embed_tokens.weight"].clone()
    mtp_tensors[f"{block}.shared_head.head.weight"] = main_tensors["lm_head.weight"].clone()
    save_file(main_tensors | mtp_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return main_tensors | mtp_tensors


def test_multi_token_prediction_is_the_layer_after_the_last(tmp_path: Path) -> None:
    before = with_mtp(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    ours = weights(tmp_path / "m.weights")
    assert torch.equal(ours["weight/mtp.0.projection"], before["model.layers.61.eh_proj.weight"])
    assert torch.equal(ours["bias/mtp.0.ffn.router.bias"], before["model.layers.61.mlp.gate.e_score_correction_bias"])
    assert export(tmp_path / "m.weights", tmp_path / "out") == 0
    assert equal(tensors(tmp_path / "out"), before)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    main = loaded(tmp_path / "out", torch.bfloat16)
    mtp = MtpModel.from_pretrained(main)  # raises where a tensor is missing
    for theirs, name in (("enorm", "enorm"), ("eh_proj", "eh_proj"), ("post_norm", "shared_head.norm")):
        loaded_weight = mtp.layers[0].get_submodule(theirs).weight
        assert torch.equal(loaded_weight, before[f"model.layers.61.{name}.weight"]), name


def test_weights_without_mtp_give_a_spec_without_mtp(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`save_pretrained` omits the MTP tensors, although its config still has an MTP layer."""
    random_model("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(tmp_path / "hf")
    assert config_of(tmp_path / "hf")["num_nextn_predict_layers"] == 1
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    message = "the configuration has multi-token prediction, but the weights do not"
    text = (tmp_path / "m.dsc").read_text("utf-8")
    assert (
        message in capfd.readouterr().err and message in " ".join(text.replace("#", "").split()) and "mtp {" not in text
    )


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    saved = with_mtp(tmp_path / "hf")
    saved["model.layers.61.embed_tokens.weight"][3, 2] += 1
    save_file(saved, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight is not equal to model\.embed_tokens\.weight"):
        import_(tmp_path / "hf", tmp_path / "m.dsc")
    assert not (tmp_path / "m.weights").exists() and not (tmp_path / "m.dsc").exists()


def test_rotated_halves_of_latent_attention(tmp_path: Path) -> None:
    """A V3 with `rope_interleave = false` rotates halves: it computes the same when its rows are put in pairs."""
    model = random_model("deepseek_v3", torch.float32, rope_interleave=False)
    model.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out", "--dtype", "fp32") == 0
    assert config_of(tmp_path / "out")["rope_interleave"] is True
    reloaded = loaded(tmp_path / "out")
    assert loss(reloaded) == pytest.approx(loss(model), rel=1e-5)
    reloaded.config.rope_interleave = False
    assert loss(reloaded) != pytest.approx(loss(model), rel=1e-3), "the order of rows does make a difference"


def test_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards on both sides: an index is written, and read."""
    monkeypatch.setattr("runtime.state.huggingface.exporting.FILE_BYTES", 5000)
    monkeypatch.setattr("runtime.state.huggingface.importing.SHARD_BYTES", 5000)
    model = random_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    shards = list((tmp_path / "m.weights").glob("step-*/shard.*"))
    assert len(shards) > 5 and all(shard.stat().st_size < 30_000 for shard in shards)
    assert export(tmp_path / "m.weights", tmp_path / "out") == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text("utf-8"))
    assert len(files) > 5 and {file.name for file in files} == {*index["weight_map"].values()}
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    before = tensors(tmp_path / "hf")
    assert equal(tensors(tmp_path / "out"), before)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    loaded(tmp_path / "out", torch.bfloat16)


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are not mapped from files."""
    status = Path("/proc/self/status").read_text("utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def test_memory_is_bounded_by_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many shards: the process's memory while its tensors are read and written."""
    shard = 4 << 20
    monkeypatch.setattr("runtime.state.huggingface.exporting.FILE_BYTES", shard)
    monkeypatch.setattr("runtime.state.huggingface.importing.SHARD_BYTES", shard)
    resident_bytes: list[int] = []
    remaining: list[int] = []

    def reporting(total: int) -> Callable[[int], None]:
        remaining.append(total)

        def report(count: int) -> None:
            resident_bytes.append(anonymous_bytes())
            remaining[-1] -= count

        return report

    monkeypatch.setattr("runtime.state.huggingface.exporting.make_reporter", reporting)
    monkeypatch.setattr("runtime.state.huggingface.importing.make_reporter", reporting)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24}
    model = random_model("llama", torch.bfloat16, **sizes)
    model.save_pretrained(tmp_path / "hf", max_shard_size="4MB")
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total > 16 * shard
    del model
    before = anonymous_bytes()
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out") == 0
    assert remaining == [0, 0], "all tensors are reported"
    assert len(resident_bytes) > 300 and max(resident_bytes) - before < 5 * shard, (max(resident_bytes) - before, total)


def test_progress_of_weights_is_flushed_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line comes out of the process that writes it, though stdout is a pipe."""
    lines: list[str] = []
    pipe = TextIOWrapper(BufferedWriter(Pipe(lines)), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setattr("runtime.state.huggingface.progress.EVERY_S", -1.0)
    report = progress.make_reporter(5)
    report(2)
    report(3)
    assert [json.loads(line) for line in lines] == [{"done": 2, "total": 5}, {"done": 5, "total": 5}]


class Pipe(RawIOBase):
    """A stream that keeps each write separately."""

    def __init__(self, came: list[str]) -> None:
        self.came = came

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.came.append(bytes(data).decode())
        return len(data)


UNKNOWN = {  # types that transformers has no class of
    "kimi_k2": MLA | EXPERTS | {"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6},
    "deepseek": GQA | EXPERTS | {"n_group": None, "topk_group": None, "scoring_func": "softmax"},
}


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_types_with_code_of_their_own_come_back(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    values = {"model_type": model_type, **SIZES, **UNKNOWN[model_type]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values), "utf-8")
    imported_config = huggingface.read(parse(Source("config.json", json.dumps(values))), "m")
    assert imported_config.model is not None, imported_config.diagnostics
    generator = torch.Generator().manual_seed(0)
    before = {
        entry.name: torch.randn(entry.shape, generator=generator).to(
            torch.float32 if entry.kind == "buffer" else torch.bfloat16
        )
        for entry in publish_tensors(imported_config.model, FAMILIES[model_type])
    }
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if f"model.layers.3.{copy}.weight" in before:
            before[f"model.layers.3.{copy}.weight"] = before[f"{name}.weight"].clone()
    save_file(before, tmp_path / "hf" / "model.safetensors")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out") == 0
    assert equal(tensors(tmp_path / "out"), before)
    assert config_of(tmp_path / "out")["model_type"] == model_type


# ---------------------------------------------------------------- published models, by their configurations


# The Hub's count for files that repeat tensors: embedding and head occur again in the MTP block.
IN_FILES = {"glm-4.5-air": 110_468_824_832}


@pytest.mark.parametrize("name", NAMES)
def test_published_counts(name: str) -> None:
    """The tensors that are read and written for a published model have as many numbers as the model."""
    text = next(path for path in CONFIGS if path.stem == name).read_text("utf-8")
    imported_config = huggingface.read(parse(Source("config.json", text)), "m")
    assert imported_config.model is not None
    count = parameters(imported_config.model)
    numbers = repeated = 0
    for entry in publish_tensors(imported_config.model, FAMILIES[imported_config.model_type]):
        if entry.optional:
            repeated += prod(entry.shape)
            continue
        rows = [piece.end - piece.start for piece in entry.pieces]
        assert {*rows} == {entry.shape[-1]} if entry.stacked else sum(rows) == entry.shape[0]
        assert not entry.stacked or len(rows) == entry.shape[0]
        numbers += prod(entry.shape)
    assert numbers == count.total + count.mtp
    assert numbers + repeated == IN_FILES.get(name, numbers + repeated)


def test_every_family_of_weights_can_be_imported() -> None:
    """A family of the importer without weights is refused: `find` of compiler/cli/commands/import_.py."""
    assert FAMILIES.keys() <= IMPORTED.keys() and len(FAMILIES) >= 9


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
VARIANTS = {
    "yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "yarn between pairs": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "biases of dense layers": ("llama", {"mlp_bias": True}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True}),
    "a window": ("qwen3", WINDOW),
    "a window in every layer": ("mistral", {"sliding_window": 5}),
    "a window of routed experts": ("mixtral", {"sliding_window": 5}),
    "a window that is switched on": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "a window in every other layer": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "listed windows": ("qwen2_moe", {**WINDOW, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    "two rotated columns": ("qwen3_next", {"rope_parameters": THETA | {"partial_rotary_factor": 0.25}}),
    "listed experts": ("deepseek_v32", {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "without query rank": ("deepseek_v2", {"q_lora_rank": None}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_come_back(name: str, tmp_path: Path) -> None:
    """Settings besides sizes survive the round trip: equal tensors and an equal loss."""
    model_type, keys = VARIANTS[name]
    model = random_model(model_type, torch.float32, **keys)
    model.save_pretrained(tmp_path / "hf")
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert export(tmp_path / "m.weights", tmp_path / "out", "--dtype", "fp32") == 0
    reloaded = loaded(tmp_path / "out")
    assert equal(tensors(tmp_path / "out"), tensors(tmp_path / "hf"))
    written = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert None not in written["rope_parameters"].values(), "a factor that is not given has its default"
    assert reloaded.config.model_type == model_type and loss(reloaded) == pytest.approx(loss(model), rel=1e-5)
    plain = random_model(model_type, torch.float32)
    if name not in ("biases", "biases of dense layers", "tied", "without query rank", "listed experts"):
        plain.load_state_dict(model.state_dict())
        assert loss(plain) != pytest.approx(loss(model), rel=1e-4), "the variant makes a difference"
