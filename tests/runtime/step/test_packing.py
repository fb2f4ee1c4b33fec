"""Training on packed rows: losses and gradients against the same rows in separate sequences, and against Llama of
`transformers` with a block mask.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compiler.emit.data_recipe import data_request
from compiler.emit.segment_cache import Segments
from dsl.schema import Batch, Chat, Moe, Spec
from runtime.contract import EXTRA_TOKENS
from runtime.data.order import PADDING
from runtime.data.prepare import prepare
from runtime.data.samples import RowSamples, samples_of
from runtime.step.trainer import Trainer
from tests.reference.config import Config
from tests.reference.huggingface import to_transformers
from tests.runtime.data.chats import CHATML, MESSAGES, TOOL, write_model, write_rows
from tests.runtime.step.test_chat import NAMES, chat_spec, gradients, trainer_of

SEQUENCE = 96  # some two rows, and one that is cut


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_model(folder / "model", CHATML)
    rows = [{"messages": MESSAGES[name], "tools": [TOOL] if name == "tool" else None} for name in NAMES]
    write_rows(folder / "chat" / "rows.jsonl", rows)
    return prepare(data_request(chat_spec("llama", "fp32")), folder, folder / "data", lambda *_: None).folder


def trained(
    folder: Path, segments: Segments, corpus: Path, of: str, precision: str, pack: bool
) -> tuple[Trainer, Spec]:
    """A trainer whose step takes every row once, without balancing losses, which are per sequence."""
    chosen = chat_spec(of, precision)
    chat = Chat(pack=pack)
    samples = samples_of(
        corpus, "train", SEQUENCE, EXTRA_TOKENS, seed=chosen.train.seed, chat=data_request_of(chosen, chat)
    )
    assert isinstance(samples, RowSamples)
    size = samples.num_windows
    layers = tuple(
        span.model_copy(update={"ffn": span.ffn.model_copy(update={"balance": unbalanced(span.ffn)})})
        if isinstance(span.ffn, Moe)
        else span
        for span in chosen.model.layers
    )
    train = chosen.train.model_copy(
        update={"sequence": SEQUENCE, "micro_batch": 1, "batch": Batch(start=size, end=size), "tokens": size * SEQUENCE}
    )
    data = chosen.data.model_copy(update={"chat": chat})
    model = chosen.model.model_copy(update={"layers": layers})
    chosen = chosen.model_copy(update={"train": train, "data": data, "model": model})
    return trainer_of(folder / ("packed" if pack else "alone"), segments, chosen, samples)[0], chosen


def data_request_of(chosen: Spec, chat: Chat) -> object:
    return data_request(chosen.model_copy(update={"data": chosen.data.model_copy(update={"chat": chat})})).data.chat


def unbalanced(ffn: Moe) -> object:
    return ffn.balance.model_copy(update={"sequence_loss": 0.0})


@pytest.mark.parametrize("of", ["v3", "qwen", "everything", "yarn"])
def test_packed_rows_have_the_losses_and_gradients_of_separate_rows(
    tmp_path: Path, segments: Segments, corpus: Path, of: str
) -> None:
    """In float64: latent and grouped queries, experts, MTP, a window with sinks and a softcap, scaled rotation."""
    (packed, _), (alone, _) = (trained(tmp_path, segments, corpus, of, "fp64", pack) for pack in (True, False))
    assert packed.plan.train.batch.end < alone.plan.train.batch.end
    losses, wanted = (trainer._losses(trainer.accumulate()) for trainer in (packed, alone))
    assert losses.keys() == wanted.keys()
    for name in wanted:
        assert losses[name] == pytest.approx(wanted[name], rel=1e-12), name
    expected = gradients(alone)
    for name, gradient in gradients(packed).items():
        largest = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() <= 1e-10 * largest, name
    assert max(gradient.abs().max() for gradient in expected.values()) > 0


def test_loss_and_gradients_equal_llama_with_a_block_mask(tmp_path: Path, segments: Segments, corpus: Path) -> None:
    trainer, chosen = trained(tmp_path, segments, corpus, "llama", "fp32", pack=True)
    source = trainer.train_source
    assert isinstance(source, RowSamples)
    weights = {e.name: w.clone() for _, e, w in trainer.state.logical(lambda bucket: bucket.parameters)}
    theirs = to_transformers(weights, Config.from_plan(chosen.model.model_dump(mode="json") | {"sequence": SEQUENCE}))
    tokens, labels, positions, masks = [], [], [], []
    for index in range(source.num_windows):
        ids, starts = source.tokens(index)[:SEQUENCE], source.starts(index)[:SEQUENCE]
        row = np.searchsorted(np.unique(starts), starts, "right")
        tokens.append(np.where(ids == PADDING, 0, np.where(ids < 0, ~ids, ids)))
        labels.append(np.where((ids < 0) | (np.arange(SEQUENCE) == starts), -100, ids))
        positions.append(np.arange(SEQUENCE) - starts)
        masks.append((row[:, None] == row[None]) & np.tri(SEQUENCE, dtype=bool))
    tokens_BS, labels_BS, positions_BS = (torch.from_numpy(np.stack(rows)) for rows in (tokens, labels, positions))
    mask_B1SS = torch.where(torch.from_numpy(np.stack(masks)), 0.0, -torch.inf)[:, None]
    wanted = theirs(
        input_ids=tokens_BS, labels=labels_BS, position_ids=positions_BS, attention_mask=mask_B1SS, use_cache=False
    ).loss
    wanted.backward()
    losses = trainer._losses(trainer.accumulate())
    assert losses["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    ours, grad = gradients(trainer)["head"], theirs.lm_head.weight.grad
    assert (ours - grad).abs().max() <= 1e-6 * grad.abs().max()
    joined = theirs(input_ids=tokens_BS, labels=labels_BS, use_cache=False).loss
    assert abs(joined.item() - wanted.item()) > 1e-3, "without a mask it would agree as well"


def test_a_step_in_bf16_is_near_the_step_in_float64(tmp_path: Path, segments: Segments, corpus: Path) -> None:
    (low, _), (exact, _) = (
        trained(tmp_path / precision, segments, corpus, "v3", precision, pack=True) for precision in ("bf16", "fp64")
    )
    losses = [trainer.train_step() for trainer in (low, exact)]
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=3e-2), name
