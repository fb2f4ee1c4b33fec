"""Published runs with different meshes for experts and attention: each can be written, planned and proven."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path

import pytest

from compiler.pipeline import lower_spec
from compiler.predict.predict import predict
from dsl.load import load
from dsl.schema import Moe, Spec

SPECS = Path(__file__).parents[3] / "specs"
MIXTRAL = """
import "qwen3-30b-a3b.dsc"

# 8x7B: arXiv 2401.04088, table 1.
model mixtral {
  vocab = 32000, hidden = 4096, init_std = 0.02, norm_eps = 1e-5
  attention gqa { heads = 32, kv_heads = 8, head_dim = 128, rope { theta = 1_000_000 } }
  layers 0..31 { ffn moe { experts = 8, shared = 0, top_k = 2, inner = 14336, score = softmax, normalize = true } }
}
run mixtral extends pretrain { model = mixtral, schedule { name = 1f1b }, train { batch = 256 } }
"""
USUAL = ("schedule.name=1f1b", "train.batch=256")

# Model, nodes of 8, and the degrees as Megatron has them: TP, PP, EP, ETP.
FOLDED = [
    ("mixtral", 8, 2, 4, 8, 1),  # Megatron-LM's checkpoint of Mixtral 8x7B, TP2 PP4 EP8
    ("mixtral", 8, 4, 1, 8, 4),  # the experts over the ranks of four nodes
    ("qwen3-30b-a3b", 1, 4, 1, 8, 1),  # slime's run on 8 H800s: experts on all of them, two data ranks
    ("qwen3-30b-a3b", 8, 2, 1, 16, 4),
    ("deepseek-v2-lite", 8, 4, 2, 8, 2),  # AMD's benchmark on 8 nodes: tp4-pp2-ep8-etp2
]


def folded(path: Path, model: str, nodes: int, tp: int, pp: int, ep: int, etp: int) -> Spec:
    degrees = {"tensor": tp, "pipeline": pp, "expert": ep, "expert_tensor": etp}
    words = [f"parallel.{name}={degree}" for name, degree in degrees.items()]
    words += [f"cluster.nodes={nodes}", "precision=bf16", *USUAL]
    words += ["cluster.node.device.memory=640GB"]  # whether it fits is not tested here
    words += [f"train.micro_batch={tp}"]  # where balance is of whole sequences
    if model == "mixtral":
        path.write_text(MIXTRAL.replace("qwen3", f"{relpath(SPECS, path.parent)}/qwen3"), "utf-8")
        return load(path, run="mixtral", overrides=words)
    return load(SPECS / f"{model}.dsc", overrides=words)


@pytest.mark.parametrize(("model", "nodes", "tp", "pp", "ep", "etp"), FOLDED)
def test_a_published_folding_is_planned(
    tmp_path: Path, model: str, nodes: int, tp: int, pp: int, ep: int, etp: int
) -> None:
    spec = folded(tmp_path / "mixtral.dsc", model, nodes, tp, pp, ep, etp)
    plan = lower_spec(spec).plan
    assert plan.mesh.columns * pp == 8 * nodes and plan.mesh.expert_group == ep * etp
    for index, layers in enumerate(spec.model.layers):
        if isinstance(layers.ffn, Moe):
            ups = [
                row for row in plan.replicas if row.tensor == f"layers.{spec.model.layers[index].first}.ffn.experts.up"
            ]
            assert len(ups) == layers.ffn.experts * etp
            assert {len(row.holders) for row in ups} == {plan.mesh.columns // (ep * etp)}
            assert {row.held_shape[0] for row in ups} == {2 * layers.ffn.inner // etp}
    prediction = predict(spec)
    assert dict(prediction.degrees)["expert_tensor"] == etp and prediction.step.seconds > 0
