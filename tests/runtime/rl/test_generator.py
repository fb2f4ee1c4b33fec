"""Generation on ranks: bit-identical to the training forward, and the same completions with any plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from dsl.schema import Spec
from tests.runtime.rl.ranks import END
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec
from tests.traced import SharedSegments as Segments

SEQUENCE, NUM = 24, 16
MODELS = ("v3", "llama", "qwen", "plain")
# pipeline, expert and data ranks, zero, slots of a column (0: one for each sequence), precision
PLANS = [
    (1, 1, 1, 0, 0, "fp32"),
    (2, 1, 2, 0, 3, "fp32"),
    (2, 2, 2, 1, 0, "fp32"),
    (1, 4, 4, 3, 1, "fp32"),
    (1, 1, 2, 0, 1, "bf16"),
]


def chosen(of: str, pp: int, ep: int, dp: int, zero: int, precision: str) -> Spec:
    """A spec without MTP whose step has `NUM` sequences for any plan."""
    base = spec(pp, ep, dp, NUM // (2 * dp), 5, zero, of, precision=precision, sequence=SEQUENCE)
    return base.model_copy(update={"model": base.model.model_copy(update={"mtp": None})})


@cache
def alone(segments: Segments) -> dict[str, dict[str, Tensor]]:
    """The completions of one rank, in FP32."""
    with TemporaryDirectory() as folder:
        return generated(Path(folder), segments, *PLANS[0])


def generated(
    folder: Path, segments: Segments, pp: int, ep: int, dp: int, zero: int, slots: int, precision: str
) -> dict[str, dict[str, Tensor]]:
    """The completions of a plan's ranks by model, equal on all ranks. `whole` combines all ranks."""
    for model in MODELS:
        write_build(
            folder / "builds" / model, compile_spec(chosen(model, pp, ep, dp, zero, precision), segments=segments).files
        )
    run_module("tests.runtime.rl.ranks", folder, pp * dp, str(slots))
    by_model = {}
    for model in MODELS:
        first, *rest = (load_file(folder / "out" / model / f"rank_{rank}.safetensors") for rank in range(pp * dp))
        for tensors in rest:
            assert all(torch.equal(first[name], tensors[name]) for name in ("tokens", "logp", "entropy"))
            first["whole"] += tensors["whole"]
        by_model[model] = first
    return by_model


@pytest.mark.parametrize(("pp", "ep", "dp", "zero", "slots", "precision"), PLANS)
def test_log_probabilities_are_bit_identical_to_training(
    tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, zero: int, slots: int, precision: str
) -> None:
    """They are bit-identical and below 0; completions are bit-identical with any plan."""
    for model, tensors in generated(tmp_path, segments, pp, ep, dp, zero, slots, precision).items():
        valid = tensors["tokens"] >= 0
        assert torch.equal(tensors["logp"], tensors["whole"]), model
        assert bool((tensors["logp"][valid] < 0).all()) and bool((tensors["logp"][~valid] == 0).all())
        assert bool((tensors["entropy"][valid] > 0).all())
        if precision == "fp32":
            expected = alone(segments)[model]
            assert all(torch.equal(tensors[name], expected[name]) for name in ("tokens", "logp", "entropy")), model


def test_completions_end(segments: Segments) -> None:
    """Completions end at the end token or at the maximum length; nothing follows the end."""
    ended = 0
    for tensors in alone(segments).values():
        for tokens_C in tensors["tokens"].tolist():
            length = tokens_C.index(-1) if -1 in tokens_C else len(tokens_C)
            assert length >= 1 and all(token >= 0 for token in tokens_C[:length])
            assert END not in tokens_C[: length - 1] and set(tokens_C[length:]) <= {-1}
            assert tokens_C[length - 1] == END or length == SEQUENCE // 2
            ended += tokens_C[length - 1] == END
    assert ended > 0


def test_slots_are_filled_again(tmp_path: Path, segments: Segments) -> None:
    """One slot takes one round for each token; with one slot per sequence, those that begin later end later."""
    rounds = {slots: generated(tmp_path / str(slots), segments, 1, 1, 1, 0, slots, "fp32") for slots in (0, 1, 5)}
    for model in MODELS:
        tokens = (rounds[1][model]["tokens"] >= 0).sum(dim=1)
        assert rounds[1][model]["rounds"] == tokens.sum()
        assert tokens.max() < rounds[0][model]["rounds"] < 2 * tokens.max(), "not all prompts fit into one round"
        assert tokens.sum() / 5 <= rounds[5][model]["rounds"] < rounds[1][model]["rounds"] / 3
