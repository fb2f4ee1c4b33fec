"""`dsc eval` and `dsc generate` on a trained run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiler.cli.commands import eval_ranks
from compiler.cli.main import main
from compiler.emit.segment_cache import Segments
from compiler.tools.inference.evaluation import EvaluatedLoss, loss_of
from compiler.tools.inference.language_model import LanguageModel, spec_for_one_rank
from compiler.tools.inference.loaded import read_weights
from compiler.tools.inference.sources import InferenceError
from compiler.tools.inference.token_streams import tokenize_files
from dsl.load import load
from runtime.data import tokenizer
from runtime.data.shards import ShardReader
from tests.compiler.cli.forms import parsed
from tests.compiler.tools.inference.models import stacked
from tests.reference.config import Config
from tests.reference.huggingface import transformers_logits
from tests.reference.model import Reference
from tests.runtime.run.place import rows, saved

Captured = pytest.CaptureFixture[str]
SEQUENCE, BATCH, BATCHES = 16, 8, 2  # of the run, and of its validations


def document(capsys: Captured, form: str, *words: object) -> Any:
    """The output of a command with --format json."""
    assert main([form, *map(str, words), "--format", "json"]) == 0
    return parsed(capsys.readouterr().out, form)


def held_out(run: Path) -> np.ndarray[Any, Any]:
    (index,) = (run / "data").glob("*/validation.idx")
    reader = ShardReader(index.with_suffix(""))
    return reader.tokens(0, reader.num_tokens)


def logical(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """The weights and biases of a checkpoint by logical name."""
    checkpoint = saved(run, step)
    names = [name for name in checkpoint.shapes if name.startswith(("weight/", "bias/"))]
    return {name.partition("/")[2]: tensor for name, tensor in checkpoint.read(names).items()}


def config(run: Path) -> Config:
    spec = load(run / "spec.resolved")
    return Config.from_plan(spec.model.model_dump(mode="json") | {"sequence": SEQUENCE})


def cross_entropy(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits_BSV.double().flatten(0, 1), targets_BS.flatten()))


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize("step", [3, 6])
def test_eval_gives_the_validation_loss(trained: Path, step: int, tmp_path: Path, capsys: Captured) -> None:
    """The loss on the tokens that the run's four ranks validated on."""
    count = BATCHES * BATCH * SEQUENCE
    np.save(tmp_path / "ids.npy", held_out(trained)[: count + 1].astype(np.uint16))
    evaluation = document(capsys, "eval", f"{trained}@{step}", "--tokens", tmp_path / "ids.npy")
    row = next(row for row in rows(trained) if row["step"] == step)
    assert math.isclose(evaluation["loss"], row["validation_loss"], rel_tol=1e-6)
    assert (evaluation["tokens"], evaluation["step"], evaluation["dtype"]) == (count, step, "fp32")
    assert math.isclose(evaluation["perplexity"], math.exp(evaluation["loss"]))


def test_eval_equals_the_reference_and_transformers(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    tokens_BZ = torch.from_numpy(held_out(trained)[: 12 * (SEQUENCE + 1)]).view(12, SEQUENCE + 1)
    np.save(tmp_path / "ids.npy", tokens_BZ.numpy())
    loss = document(capsys, "eval", trained, "--tokens", tmp_path / "ids.npy")["loss"]
    weights, shape = logical(trained), config(trained)
    theirs_BSV, _ = transformers_logits(weights, shape, tokens_BZ[:, :-1])
    assert math.isclose(loss, cross_entropy(theirs_BSV, tokens_BZ[:, 1:]), rel_tol=1e-5)
    reference = Reference(shape)
    reference.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    with torch.no_grad():
        logits_BSV = reference(tokens_BZ[:, :-1], tokens_BZ[:, 1:]).logits_BSV
    expected = cross_entropy(logits_BSV, tokens_BZ[:, 1:])
    assert math.isclose(loss, expected, rel_tol=1e-5)
    wide = document(capsys, "eval", trained, "--tokens", tmp_path / "ids.npy", "--dtype", "fp64")
    assert math.isclose(wide["loss"], expected, rel_tol=1e-12) and wide["dtype"] == "fp64"


def test_evaluates_the_held_out_text(trained: Path, capsys: Captured) -> None:
    """Without an input it is the validation text, every token but the first, in bytes of that text."""
    evaluation, ids = document(capsys, "eval", trained), held_out(trained)
    (meta,) = (json.loads(path.read_text()) for path in (trained / "data").glob("*/meta.json"))
    (path,) = (trained / "data").glob("*/tokenizer.json")
    first = len(tokenizer.decode(tokenizer.parse(path.read_bytes()), ids[:1].tolist()).encode())
    assert evaluation["tokens"] == len(ids) - 1 == meta["splits"]["validation"]["tokens"] - 1
    assert evaluation["bytes"] == meta["splits"]["validation"]["bytes"] - first
    assert math.isclose(
        evaluation["bits_per_byte"], evaluation["loss"] / math.log(2) * evaluation["tokens"] / evaluation["bytes"]
    )


def test_text_is_encoded_as_the_run_encodes(trained: Path, tmp_path: Path, capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["def f():\n    return 1\n", "Größe = 'ß'\n"]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text, "utf-8")
    (path,) = (trained / "data").glob("*/tokenizer.json")
    bpe = tokenizer.parse(path.read_bytes())
    end = tokenizer.end_id(bpe)
    ids = [end, *(token for text in tokenizer.encode(bpe, texts) for token in (*text, end))]
    np.save("ids.npy", ids)
    from_text, from_ids = (
        document(capsys, "eval", trained, *words) for words in (["--text", "*.txt"], ["--tokens", "ids.npy"])
    )
    assert from_text == from_ids and from_text["bytes"] == sum(len(text.encode()) for text in texts)
    assert from_text["tokens"] == len(ids) - 1


def test_the_moving_average(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    """The averaged weights give a different loss, equal to the reference with these weights."""
    tokens_BZ = torch.from_numpy(held_out(trained)[: 4 * (SEQUENCE + 1)]).view(4, SEQUENCE + 1)
    np.save(tmp_path / "ids.npy", tokens_BZ.numpy())
    words = [trained, "--tokens", tmp_path / "ids.npy", "--dtype", "fp64"]
    of_average, plain = document(capsys, "eval", *words, "--average"), document(capsys, "eval", *words)
    checkpoint = saved(trained)
    averaged = checkpoint.read([name for name in checkpoint.shapes if name.startswith("ema/")])
    weights = logical(trained) | {name.partition("/")[2]: tensor for name, tensor in averaged.items()}
    reference = Reference(config(trained))
    reference.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    with torch.no_grad():
        logits_BSV = reference(tokens_BZ[:, :-1], tokens_BZ[:, 1:]).logits_BSV
    assert math.isclose(of_average["loss"], cross_entropy(logits_BSV, tokens_BZ[:, 1:]), rel_tol=1e-12)
    assert of_average["average"] and not plain["average"] and of_average["loss"] != plain["loss"]


def test_rows_are_streams_and_ids_below_0_are_filling(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    ids = held_out(trained)[:60]
    parts = [ids[:40], ids[40:]]
    filled = np.full((2, 45), -100)
    for row, part in zip(filled, parts, strict=True):
        row[: len(part)] = part
    sums = []
    for name, array in (("filled", filled), ("first", parts[0]), ("second", parts[1])):
        np.save(tmp_path / f"{name}.npy", array)
        evaluation = document(capsys, "eval", trained, "--tokens", tmp_path / f"{name}.npy")
        sums.append((evaluation["tokens"], evaluation["loss"] * evaluation["tokens"], evaluation["bytes"]))
    assert sums[0][0] == sums[1][0] + sums[2][0] == 58
    assert math.isclose(sums[0][1], sums[1][1] + sums[2][1], rel_tol=1e-6)
    assert sums[0][2] == sums[1][2] + sums[2][2]


def test_a_checkpoint_can_be_named_by_its_folder_and_moved(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    expected = document(capsys, "eval", trained)["loss"]
    folder = trained / "checkpoints" / "step-00000006"
    assert document(capsys, "eval", folder)["loss"] == expected
    shutil.copytree(folder, tmp_path / "moved")
    np.save(tmp_path / "ids.npy", held_out(trained))
    words = [tmp_path / "moved", "--tokens", tmp_path / "ids.npy"]
    assert main(["eval", *map(str, words)]) == 2
    assert "hint: name its spec: --spec SPEC" in capsys.readouterr().err
    evaluation = document(capsys, "eval", *words, "--spec", trained / "spec.resolved")
    assert evaluation["loss"] == expected and evaluation["bytes"] is None


def test_the_text_for_people(trained: Path, capsys: Captured) -> None:
    evaluation = document(capsys, "eval", trained)
    assert main(["eval", str(trained)]) == 0
    stdout = capsys.readouterr().out
    assert f"loss           {evaluation['loss']:.4f} nats per token" in stdout
    assert f"bits per byte  {evaluation['bits_per_byte']:.4f} ({evaluation['bytes']:,} bytes)" in stdout


# ---------------------------------------------------------------- what cannot be used


def mistakes(run: Path, folder: Path) -> dict[str, tuple[Sequence[object], str]]:
    """Command-line arguments, and the expected message."""
    arrays = {
        "large": np.array([1, 300, 2]),
        "numbers": np.array([0.5, 1.0]),
        "empty": np.zeros(0, np.int64),
        "one": np.array([7]),
        "cube": np.zeros((2, 2, 2), np.int64),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "several.npz", a=np.zeros(3, np.int64))
    (folder / "text.npy").write_text("1 2 3")
    (folder / "empty").mkdir()
    (folder / "empty.md").write_text("")
    (folder / "broken.json").write_text("{}")
    damaged = folder / "damaged"
    shutil.copytree(run / "checkpoints" / "step-00000006", damaged)
    shard = next(damaged.glob("shard.*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    spec = (run / "spec.resolved").read_text()
    (folder / "other.dsc").write_text(spec.replace("inner = 32", "inner = 48"))
    ids = ["--tokens", folder / "one.npy"]
    return {
        "id": ([run, "--tokens", folder / "large.npy"], "holds the id 300 at 1, but the model's ids are 0 to 299"),
        "dtype": ([run, "--tokens", folder / "numbers.npy"], "holds float64, not integers"),
        "empty": ([run, "--tokens", folder / "empty.npy"], "nothing to predict"),
        "one": ([run, "--tokens", folder / "one.npy"], "nothing to predict"),
        "cube": ([run, "--tokens", folder / "cube.npy"], "has 3 dimensions"),
        "npz": ([run, "--tokens", folder / "several.npz"], "several arrays"),
        "no npy": ([run, "--tokens", folder / "text.npy"], "is not a .npy file of numbers"),
        "no file": ([run, "--tokens", folder / "none.npy"], "cannot be read: No such file"),
        "no text": (
            [run, "--text", str(folder / "*.txt")],
            ".parquet, .arrow file found",
        ),
        "empty text": ([run, "--text", str(folder / "empty.md")], "no token to predict"),
        "no folder": ([folder / "none", *ids], "there is no folder"),
        "no run": ([folder / "empty", *ids], "holds no checkpoint"),
        "no step": ([f"{run}@4", *ids], "it has those of steps 3, 6"),
        "damaged": (
            [damaged, *ids, "--spec", run / "spec.resolved"],
            "its sha256 differs from the one in the manifest",
        ),
        "build": ([run.parents[1] / "build" / "tiny", *ids], "is a build, which has no weights"),
        "model": (
            [run / "checkpoints" / "step-00000006", "--spec", folder / "other.dsc"],
            "does not fit the spec's model: layers.0.ffn.up, layers.0.ffn.down are missing or have another shape",
        ),
        "tokenizer": ([run, "--tokenizer", folder / "broken.json"], "not a tokenizer.json"),
        "no tokenizer": ([run, "--tokenizer", folder / "none.json"], "no tokenizer can be read"),
    }


@pytest.mark.parametrize("how", ["text", "json"])
def test_invalid_inputs_are_reported(trained: Path, tmp_path: Path, capsys: Captured, how: str) -> None:
    for name, (words, expected) in mistakes(trained, tmp_path).items():
        assert main(["eval", *map(str, words), "--format", how]) == 2, name
        captured = capsys.readouterr()
        assert expected in captured.err and captured.err.startswith("error: "), (name, captured.err)
        if how == "json":
            assert parsed(captured.out, "failure")["error"], name


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(tokenizer.train([], tokenizer.MIN_VOCAB)))
    pattern = str(tmp_path / "*.txt")
    assert tokenize_files(pattern, path, tokenizer.MIN_VOCAB, lambda _: None).bytes == 4
    with pytest.raises(InferenceError, match=r"tokenizer\.json: 257 tokens, more than the model's 256"):
        tokenize_files(pattern, path, tokenizer.MIN_VOCAB - 1, lambda _: None)


# ---------------------------------------------------------------- text


def test_generated_tokens_equal_the_reference(trained: Path, capsys: Captured) -> None:
    """Greedy decoding with and without drafts, in float64 and in the dtype of the run."""
    words = [trained, "import os\n", "--tokens", 12]
    generated = document(capsys, "generate", *words)
    (path,) = (trained / "data").glob("*/tokenizer.json")
    bpe = tokenizer.parse(path.read_bytes())
    reference = Reference(config(trained))
    reference.load_state_dict({name: tensor.double() for name, tensor in logical(trained).items()})
    ids = [tokenizer.end_id(bpe), *tokenizer.encode(bpe, ["import os\n"])[0]]
    begin = len(ids)
    with torch.no_grad():
        while len(ids) < begin + 12:
            tokens = torch.tensor([ids])
            ids.append(int(reference(tokens, tokens).logits_BSV[0, -1].argmax()))
    assert generated["tokens"] == ids[begin:] and generated["prompt_tokens"] == begin
    assert generated["text"] == tokenizer.decode(bpe, generated["tokens"]) and not generated["ended"]
    assert generated["drafted"] > 0
    for options in (["--no-drafts"], ["--dtype", "fp64"]):
        variant = document(capsys, "generate", *words, *options)
        assert variant["tokens"] == generated["tokens"] and (variant["drafted"] == 0) == (options == ["--no-drafts"])


def test_sampled_text_depends_on_the_seed(trained: Path, capsys: Captured) -> None:
    words = [trained, "--tokens", 20, "--temperature", 1, "--top-p", 0.9]
    samples = [document(capsys, "generate", *words, "--seed", seed)["tokens"] for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_generated_text_goes_to_stdout_and_statistics_to_stderr(
    trained: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = document(capsys, "generate", trained, "import", "--tokens", 20)
    assert main(["generate", str(trained), "import", "--tokens", "20"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"import{expected['text']}\n"
    assert captured.err.startswith("20 tokens in ") and " drafts accepted (" in captured.err
    assert "longer than the sequences that the model was trained on (16 tokens)" in captured.err
    monkeypatch.setattr("sys.stdin", open_text("import"))
    assert main(["generate", str(trained), "-", "--tokens", "20"]) == 0
    assert capsys.readouterr().out == captured.out


def open_text(text: str) -> Any:
    import io

    return io.StringIO(text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--temperature", "-1"], "--temperature must be from 0 to 100"),
        (["--temperature", "nan"], "--temperature must be from 0 to 100"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
)
def test_invalid_numbers_are_refused(words: list[str], expected: str, capsys: Captured) -> None:
    assert main(["generate", "anything", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8(trained: Path, capsys: Captured) -> None:
    assert main(["generate", str(trained), "caf\udce9"]) == 2
    assert capsys.readouterr().err.startswith("error: the prompt is not UTF-8")


def test_weights_that_are_not_finite(trained: Path, tmp_path: Path) -> None:
    spec = spec_for_one_rank(load(trained / "spec.resolved"))
    tensors = stacked(spec, logical(trained))
    model = LanguageModel(spec, tensors | {"final_norm": tensors["final_norm"] * math.nan})
    with pytest.raises(InferenceError, match="the loss is nan"):
        loss_of(model, [held_out(trained)[:40]], lambda _: None)


def test_perplexity_is_none_if_it_overflows() -> None:
    assert EvaluatedLoss(1000.0 * 700, 1000).perplexity is None and EvaluatedLoss(0.0, 5).perplexity == 1


def test_stacked_tensors_equal_those_of_a_checkpoint(trained: Path) -> None:
    """The commands load the same tensors that these tests pass to a model."""
    spec = spec_for_one_rank(load(trained / "spec.resolved"))
    tensors, expected = read_weights(spec, saved(trained), lambda _: None, False), stacked(spec, logical(trained))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("average", [False, True])
def test_the_ranks_of_the_spec_give_the_loss_of_one(
    trained: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, average: bool, segments: Segments, tmp_path: Path
) -> None:
    """Four ranks, on text that does not fill a batch: with the run's build, and for the average with a new one."""
    monkeypatch.setattr(eval_ranks, "Segments", lambda _: segments)
    if not average:
        monkeypatch.chdir(trained.parents[1])
        monkeypatch.setattr(eval_ranks, "compile_spec", None)  # the build is there
    np.save(tmp_path / "ids.npy", held_out(trained)[:700])
    words = ["eval", str(trained), "--tokens", str(tmp_path / "ids.npy"), "--format", "json"]
    words += ["--average"] * average
    documents = []
    for ranks in ("one", "spec"):
        assert main([*words, "--ranks", ranks]) == 0
        documents.append(parsed(capfd.readouterr().out, "eval"))
    single, four = documents
    assert (single.pop("ranks"), four.pop("ranks")) == (1, 4)
    assert math.isclose(single["loss"], four["loss"], rel_tol=1e-6) and single["tokens"] == four["tokens"]
    assert single["tokens"] % (BATCH * SEQUENCE) != 0
    assert single.keys() == four.keys() and single["bytes"] == four["bytes"]


def test_ranks_compute_in_the_precision_of_the_run(trained: Path, capsys: Captured) -> None:
    assert main(["eval", str(trained), "--ranks", "spec", "--dtype", "fp64"]) == 2
    assert "hint: leave --dtype out" in capsys.readouterr().err


def test_samples_have_every_target_of_the_windows() -> None:
    """Also for a stream with a short last window."""
    streams = [np.arange(10, 21), np.arange(50, 54)]
    samples = eval_ranks.samples(streams, 4)
    assert samples.tolist() == [
        [10, 11, 12, 13, 14, -1],
        [14, 15, 16, 17, 18, -1],
        [18, 19, 20, -1, -1, -1],
        [50, 51, 52, 53, -1, -1],
    ]
