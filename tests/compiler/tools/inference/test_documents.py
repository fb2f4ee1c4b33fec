"""Evaluation of runs with separate documents: each document is a stream, and the model gets no masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.plan.blocks import model_steps
from compiler.tools.inference.language_model import spec_for_one_rank
from compiler.tools.inference.token_streams import held_out
from runtime.data.shards import ShardWriter
from tests.runtime.step.specs import spec

DOCUMENTS = [[4, 5, 6], [7, 8], [9, 10, 11, 12], [13]]


@pytest.mark.parametrize("documents", ["joined", "masked"])
def test_separated_documents_are_separate_streams(tmp_path: Path, documents: str) -> None:
    with ShardWriter(tmp_path / "validation", 61) as writer:
        for ids in DOCUMENTS:
            writer.add(ids)
    chosen = spec(1, 1, 1, 2, documents=documents)  # type: ignore[arg-type]
    streams = [stream.tolist() for stream in held_out(tmp_path, None, chosen).ids]
    assert streams == (DOCUMENTS if documents == "masked" else [[id for ids in DOCUMENTS for id in ids]])
    read = {value for step in model_steps(spec_for_one_rank(chosen)) for value in step.inputs}
    trained = {value for step in model_steps(chosen) for value in step.inputs}
    assert trained - read == ({"starts"} if documents == "masked" else set())
