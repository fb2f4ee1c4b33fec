"""Tiny random models in published form: loss and greedy text equal `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from compiler.cli.main import main
from compiler.tools.inference.harness import DscModel
from compiler.tools.inference.sources import InferenceError
from runtime.data import tokenizer
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.weights.published import (
    KEYS,
    export,
    import_,
    in_this_process,
    loaded,
    random_model,
    with_eps,
)

Captured = pytest.CaptureFixture[str]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer of 300 entries beside weights, as in published folders."""
    bpe = tokenizer.train([f"def f{n}(x):\n    return x + {n}\n" for n in range(400)], 290)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(bpe))
    return bpe


def document(capsys: Captured, command: str, *words: object) -> Any:
    with in_this_process():
        assert main([command, *map(str, words), "--format", "json"]) == 0
    return parsed(capsys.readouterr().out, command)


@pytest.mark.parametrize("model_type", sorted(KEYS))
def test_the_loss_equals_transformers(model_type: str, tmp_path: Path, capsys: Captured) -> None:
    """The folder with weights, the imported spec, and the checkpoint beside it all give this loss."""
    theirs = with_eps(random_model(model_type, torch.float32))
    theirs.save_pretrained(tmp_path / "hf")
    tokens_BZ = torch.randint(300, (3, 21), generator=torch.Generator().manual_seed(1))
    np.save(tmp_path / "ids.npy", tokens_BZ.numpy())
    expected = cross_entropy(theirs, tokens_BZ)
    words = ["--tokens", tmp_path / "ids.npy", "--dtype", "fp32"]
    evaluation = document(capsys, "eval", tmp_path / "hf", *words)
    assert math.isclose(evaluation["loss"], expected, rel_tol=1e-5) and evaluation["tokens"] == 60
    assert evaluation["checkpoint"] == str(tmp_path / "hf") and evaluation["bytes"] is None
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    capsys.readouterr()
    assert document(capsys, "eval", tmp_path / "m.dsc", *words)["loss"] == evaluation["loss"]
    beside = document(capsys, "eval", tmp_path / "m.weights", "--spec", tmp_path / "m.dsc", *words)
    assert beside["loss"] == evaluation["loss"]


SLIDES = ["full_attention", "sliding_attention", "full_attention"]
READ_OTHERWISE = [  # keys that classes of other types read, or read in another way
    ("gemma3_text", {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"sliding_window": 4, "use_sliding_window": False}),
    ("deepseek_v2", {"rope_interleave": False}),
    ("deepseek_v3", {"sliding_window": 4, "mlp_layer_types": ["dense", "sparse", "dense"]}),
    ("glm4_moe", {"sliding_window": 4, "layer_types": SLIDES, "topk_method": "greedy", "scoring_func": "softmax"}),
    ("gpt_oss", {"hidden_act": "gelu"}),
    ("llama", {"sliding_window": 4, "hidden_activation": "gelu", "final_logit_softcapping": 3.0}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0}}),
    ("mistral", {"sliding_window": 4, "use_sliding_window": False, "attention_bias": True, "mlp_bias": True}),
    ("mixtral", {"sliding_window": 4, "layer_types": SLIDES, "attention_bias": True}),
    ("qwen2", {"sliding_window": 4, "attention_bias": True, "clip_qkv": 0.5}),
    ("qwen2_moe", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3_moe", {"sliding_window": 4, "use_sliding_window": True, "layer_types": SLIDES}),
]


@pytest.mark.parametrize(
    ("model_type", "keys"), READ_OTHERWISE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_key_is_read_as_the_class_reads_it(
    model_type: str, keys: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    """The imported model and its export compute what the class of `transformers` computes."""
    random_model(model_type, torch.float32).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | keys))
    tokens_BZ = torch.randint(300, (2, 25), generator=torch.Generator().manual_seed(1))
    np.save(tmp_path / "ids.npy", tokens_BZ.numpy())
    expected = cross_entropy(with_eps(loaded(tmp_path / "hf")), tokens_BZ)
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    capsys.readouterr()
    words = [tmp_path / "m.dsc", "--tokens", tmp_path / "ids.npy", "--dtype", "fp32"]
    assert math.isclose(document(capsys, "eval", *words)["loss"], expected, rel_tol=1e-5)
    assert export(tmp_path / "m.weights", tmp_path / "out", "--dtype", "fp32") == 0
    assert math.isclose(cross_entropy(with_eps(loaded(tmp_path / "out")), tokens_BZ), expected, rel_tol=1e-5)


@torch.no_grad()
def cross_entropy(model: PreTrainedModel, tokens_BZ: torch.Tensor) -> float:
    logits_BSV = model(input_ids=tokens_BZ[:, :-1], use_cache=False).logits.double()
    return float(torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BZ[:, 1:].flatten()))


def test_greedy_text_equals_transformers(tmp_path: Path, capsys: Captured) -> None:
    theirs = random_model("llama", torch.float32)
    theirs.save_pretrained(tmp_path)
    bpe = write_tokenizer(tmp_path)
    begin = [tokenizer.end_id(bpe), *tokenizer.encode(bpe, ["def f1"])[0]]
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([begin]), max_new_tokens=16, do_sample=False, eos_token_id=begin[0], pad_token_id=begin[0]
        )[0, len(begin) :].tolist()
    generated = document(capsys, "generate", tmp_path, "def f1", "--tokens", 16, "--dtype", "fp32")
    assert generated["tokens"] == [token for token in expected if token != begin[0]]
    assert len(generated["tokens"]) > 2


def test_text_ends_at_the_published_end_tokens(tmp_path: Path, capsys: Captured) -> None:
    """At eos_token of tokenizer_config.json, and at each id of generation_config.json."""
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    bpe = write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    words = ("generate", tmp_path, "def f1", "--tokens", 12, "--dtype", "fp32")
    tokens = document(capsys, *words)["tokens"]
    stop = tokens[3]
    ended = tokens[: tokens.index(stop)]
    assert len(tokens) == 12 and stop != tokenizer.end_id(bpe)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [500_000, stop]}))
    assert document(capsys, *words)["tokens"] == ended
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": bpe.id_to_token(stop)}))
    begun = document(capsys, *words)["tokens"]  # a text begins with that token, too
    assert stop not in begun


def test_token_ids_need_no_tokenizer(tmp_path: Path, capsys: Captured) -> None:
    """A missing tokenizer and an unusable one are both refused."""
    random_model("llama", torch.float32, vocab_size=200).save_pretrained(tmp_path / "hf")
    np.save(tmp_path / "ids.npy", np.arange(40))
    assert import_(tmp_path / "hf", tmp_path / "m.dsc") == 0
    assert 'tokenizer = "tokenizer.json"' in (tmp_path / "m.dsc").read_text("utf-8")
    words = [tmp_path / "m.dsc", "--tokens", tmp_path / "ids.npy"]
    expected = document(capsys, "eval", *words)
    assert expected["tokens"] == 39 and expected["bytes"] is None
    write_tokenizer(tmp_path)  # of more tokens than the model has
    assert document(capsys, "eval", *words) == expected
    assert main(["eval", *map(str, words)]) == 0
    assert "warning: bits per byte are unknown: " in capsys.readouterr().err
    assert main(["eval", *map(str, words), "--tokenizer", str(tmp_path / "tokenizer.json")]) == 2


def test_sources_without_trained_weights_are_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["eval", str(tmp_path), "--text", "x"]) == 2
    assert "cannot be imported" in capsys.readouterr().err
    with pytest.raises(InferenceError, match="is a published model") as raised:
        DscModel(str(tmp_path))
    assert raised.value.hint == f"import it: dsc import hf {tmp_path} -o model.dsc"
    root = Path(__file__).parents[4]
    assert main(["eval", str(root / "specs" / "tiny.dsc"), "--text", "x"]) == 2
    assert "has no initial weights" in capsys.readouterr().err
