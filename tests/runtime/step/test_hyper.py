"""Models with several residual streams, in float64 and in real processes: against plain autograd and modules of
`transformers`, with recomputed layers, and the bytes of messages between stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from compiler.emit.segment_cache import Segments
from compiler.plan.plan import make_plan
from tests.reference import hyper
from tests.reference.config import Config
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check

# Model and schedule; pipeline, expert, data, tensor and context ranks, and ZeRO stage; sequence.
MESHES = [
    ("v3_streams", "dualpipe", 2, 2, 2, 1, 1, 1, 6),
    ("v3_streams", "zbv", 2, 1, 1, 2, 1, 0, 6),
    ("v3_streams", "1f1b", 1, 2, 1, 1, 2, 1, 8),
    ("pattern_streams", "1f1b", 2, 1, 2, 1, 1, 3, 6),
    ("everything_streams", "zb1p", 2, 2, 2, 1, 1, 0, 6),
    ("v4_streams", "dualpipe", 2, 2, 2, 1, 1, 1, 6),
    ("hybrid_streams", "1f1b", 2, 1, 1, 1, 1, 1, 6),
    ("v32_streams", "1f1b", 2, 2, 2, 1, 1, 0, 6),
    ("tables_streams", "1f1b", 1, 2, 2, 1, 1, 1, 6),
    ("split_streams", "1f1b", 2, 1, 1, 2, 1, 1, 6),
    ("split_streams", "zbv", 2, 1, 1, 2, 2, 1, 8),
]


@pytest.mark.parametrize(("of", "schedule", "pp", "ep", "dp", "tp", "cp", "zero", "sequence"), MESHES)
def test_training_equals_autograd(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    tp: int,
    cp: int,
    zero: int,
    sequence: int,
) -> None:
    degrees = {"tensor": tp, "context": cp, "sequence": sequence}
    chosen = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, **degrees)
    check(tmp_path, segments, {"only": chosen}, pp * dp * tp * cp)


def test_messages_are_as_wide_as_all_streams(tmp_path: Path, segments: Segments) -> None:
    """Messages between two ranks have the size of the plan's values between stages, multiplied by the number of
    streams."""
    specs = {model: spec(2, 1, 1, 4, STEPS, 0, model, "1f1b") for model in ("v3", "v3_streams")}
    check(tmp_path, segments, specs, 2)
    sizes = {}
    for model, chosen in specs.items():
        first, last = make_plan(chosen).stages
        assert first.output is not None and first.output == last.input
        for rank in range(2):
            results = load_file(tmp_path / "out" / model / f"rank_{rank}.safetensors")
            assert results["messages"].item() == 4 * first.output.fixed_bytes
        sizes[model] = first.output.fixed_bytes
    assert sizes["v3_streams"] == 3 * sizes["v3"] > 0


@pytest.mark.parametrize("names", [("hyper",), ("hyper", "rmsnorm", "swiglu"), ("layer",), ("layer", "hyper")])
def test_recomputation_is_bit_identical(tmp_path: Path, segments: Segments, names: tuple[str, ...]) -> None:
    plain = spec(2, 2, 2, 4, STEPS, 0, "v3_streams", "1f1b")
    again = plain.model_copy(update={"recompute": names})
    check(tmp_path, segments, {"plain": plain, "again": again}, 4)
    for rank in range(4):
        saved, recomputed = (
            load_file(tmp_path / "out" / run / f"rank_{rank}.safetensors") for run in ("plain", "again")
        )
        assert saved.keys() == recomputed.keys()
        assert {name for name in saved if not torch.equal(saved[name], recomputed[name])} <= {"exchanged"}


def published(config: Config) -> DeepseekV4Config:
    streams = config.hyper_connections
    assert streams is not None
    return DeepseekV4Config(
        hidden_size=config.hidden,
        rms_norm_eps=config.norm_eps,
        hc_mult=streams.streams,
        hc_sinkhorn_iters=streams.rounds,
        hc_eps=streams.eps,
    )


def by_transformers(module: Callable[[DeepseekV4Config], torch.nn.Module], prefix: str) -> Callable[..., Any]:
    """The results of a module of `transformers` with the parameters of a mixing of the reference."""

    def call(mixing: hyper.Mixing, h_BSnD: Tensor, config: Config) -> Any:
        tensors = {f"{prefix}{name}": value for name, value in mixing.named_parameters()}
        return torch.func.functional_call(module(published(config)), tensors, (h_BSnD,))

    return call


def test_training_equals_modules_of_transformers(
    tmp_path: Path, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference with `transformers`' hyper-connections, without their casts to FP32."""
    connect = by_transformers(DeepseekV4HyperConnection, "")

    def mixed(mixing: hyper.Mixing, h_BSnD: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
        post_BSn, comb_BSnn, x_BSD = connect(mixing, h_BSnD, config)
        return x_BSD, post_BSn, comb_BSnn

    def added(h_BSnD: Tensor, y_BSD: Tensor, post_BSn: Tensor, comb_BSnn: Tensor) -> Tensor:
        return post_BSn.unsqueeze(-1) * y_BSD.unsqueeze(-2) + torch.matmul(comb_BSnn.transpose(-1, -2), h_BSnD)

    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    monkeypatch.setattr(hyper, "mixed", mixed)
    monkeypatch.setattr(hyper, "added", added)
    monkeypatch.setattr(hyper, "collapsed", by_transformers(DeepseekV4HyperHead, "hc_"))
    names = (f"{name}_streams" for name in ("v3", "v4", "everything", "split"))
    specs = {name: spec(1, 1, 1, 3, STEPS, 0, name, "1f1b") for name in names}
    check(tmp_path, segments, specs, 1)
