"""Training on conversations: losses and gradients against implementations with tokens and labels from `transformers`,
where the label of a token without loss is −100.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from compiler.emit.data_recipe import data_request
from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Chat, Data, Spec
from runtime.build.build import Build
from runtime.contract import EXTRA_TOKENS
from runtime.data.prepare import prepare
from runtime.data.samples import RowSamples, samples_of
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.reference.config import Config
from tests.reference.huggingface import to_transformers
from tests.reference.model import Reference
from tests.runtime.data.chats import CHATML, MESSAGES, TOKENS, TOOL, write_model, write_rows
from tests.runtime.step.samples import weight
from tests.runtime.step.specs import MICRO_BATCH, spec

SEQUENCE, VOCAB, IGNORED = 40, 400, -100
NAMES = [name for name in MESSAGES if name != "no assistant"]
SAMPLES = 8


def chat_spec(of: str, precision: str) -> Spec:
    """A spec that trains on conversations in the folder `chat`, with all rows in one step."""
    chosen = spec(1, 1, 1, SAMPLES // MICRO_BATCH, of=of, precision=precision)
    train = chosen.train.model_copy(update={"sequence": SEQUENCE, "validate": None})
    data = Data(source="chat/*.jsonl", tokenizer="model/tokenizer.json", chat=Chat())
    model = chosen.model.model_copy(update={"vocab": VOCAB})
    return chosen.model_copy(update={"train": train, "data": data, "model": model})


def samples_and_labels(folder: Path, chosen: Spec) -> tuple[RowSamples, Tensor, Tensor, list[int]]:
    """Our samples and, in the same order, tokens and labels [B, S] from `transformers`, cut at S, and the number of
    tokens of each row."""
    path = write_model(folder / "model", CHATML)
    rows = [{"messages": MESSAGES[name], "tools": [TOOL] if name == "tool" else None} for name in NAMES]
    write_rows(folder / "chat" / "rows.jsonl", [{"messages": MESSAGES["no assistant"]}, *rows])
    request = data_request(chosen)
    corpus = prepare(request, folder, folder / "data", lambda *_: None).folder
    samples = samples_of(corpus, "train", SEQUENCE, EXTRA_TOKENS, seed=chosen.train.seed, chat=request.data.chat)
    assert isinstance(samples, RowSamples)
    assert samples.num_windows == SAMPLES == len(rows) - 1 and samples.survey.facts["cut"] > 0, (
        "the tools fill a sequence"
    )
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=CHATML, **TOKENS)
    tokens_BS = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.int64)
    labels_BS, lengths_B = torch.full((SAMPLES, SEQUENCE), IGNORED), []
    for i in range(SAMPLES):
        row = rows[int(samples.rows(samples.window(i))[0]) - 1]
        encoded = theirs.apply_chat_template(**row_arguments(row), return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = (torch.tensor(encoded[name][:SEQUENCE]) for name in ("input_ids", "assistant_masks"))
        tokens_BS[i, : len(ids)], labels_BS[i, : len(ids)] = ids, torch.where(mask == 1, ids, IGNORED)
        lengths_B.append(len(ids))
    return samples, tokens_BS, labels_BS, lengths_B


def row_arguments(row: dict[str, object]) -> dict[str, object]:
    return {"conversation": row["messages"], "tools": row["tools"]}


def trainer_of(
    folder: Path, segments: Segments, chosen: Spec, samples: RowSamples
) -> tuple[Trainer, dict[str, Tensor]]:
    """A trainer, and its weights by logical name."""
    write_build(folder / "build", compile_spec(chosen, segments=segments).files)
    trainer = Trainer(Build.open(folder / "build"), 0, samples, None, Board(1).bind(0))
    weights = {}
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))
        weights[name] = bias.clone()
    weights |= {e.name: w.clone() for _, e, w in trainer.state.logical(lambda bucket: bucket.parameters)}
    return trainer, weights


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {entry.name: value for _, entry, value in trainer.state.logical(lambda bucket: bucket.gradients)}


def test_loss_and_gradients_equal_llama_with_labels(tmp_path: Path, segments: Segments) -> None:
    chosen = chat_spec("llama", "fp32")
    samples, tokens_BS, labels_BS, _ = samples_and_labels(tmp_path, chosen)
    trainer, weights = trainer_of(tmp_path, segments, chosen, samples)
    config = Config.from_plan(chosen.model.model_dump(mode="json") | {"sequence": SEQUENCE})
    theirs = to_transformers(weights, config)
    wanted = theirs(input_ids=tokens_BS, labels=labels_BS, use_cache=False).loss
    wanted.backward()
    losses = trainer._losses(trainer.accumulate())
    assert losses["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    ours, grad = gradients(trainer)["head"], theirs.lm_head.weight.grad
    assert (ours - grad).abs().max() <= 1e-6 * grad.abs().max()
    unmasked = theirs(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
    assert abs(unmasked.item() - wanted.item()) > 0.01, "labels that nothing masks would agree as well"


def test_gradients_with_mtp_and_experts_equal_autograd(tmp_path: Path, segments: Segments) -> None:
    """In float64, against a plain model. MTP predicts the token after the next if that one has a loss."""
    chosen = chat_spec("v3", "fp64")
    samples, tokens_BS, labels_BS, lengths_B = samples_and_labels(tmp_path, chosen)
    trainer, weights = trainer_of(tmp_path, segments, chosen, samples)
    model = Reference(Config.from_plan(chosen.model.model_dump(mode="json") | {"sequence": SEQUENCE}))
    model.load_logical(weights)
    inputs_BZ, labels_BZ = (
        torch.cat([values_BS, torch.full((SAMPLES, EXTRA_TOKENS), fill)], dim=1)
        for values_BS, fill in ((tokens_BS, 0), (labels_BS, IGNORED))
    )
    targets_BZ = torch.where(labels_BZ == IGNORED, -1, labels_BZ)
    targets = targets_BZ[:, 1 : SEQUENCE + 1], targets_BZ[:, 2 : SEQUENCE + 2]
    wanted = model.losses(inputs_BZ, *targets, lengths_B=lengths_B)
    wanted.total(0.3).backward()
    losses = trainer._losses(trainer.accumulate())
    assert losses["loss"] == pytest.approx(wanted.main.item(), rel=1e-12)
    assert losses["mtp_loss"] == pytest.approx(wanted.mtp.item(), rel=1e-12)
    expected = model.logical_gradients()
    for name, gradient in gradients(trainer).items():
        largest = expected[name].abs().max()
        assert largest > 0 or name.startswith("layers"), name
        assert (gradient - expected[name]).abs().max() <= 1e-10 * largest, name
