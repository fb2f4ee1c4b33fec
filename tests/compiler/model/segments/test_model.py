"""All segments of a model, composed, against the plain torch.nn model: losses, loads and every gradient in float64."""

from __future__ import annotations

import pytest
import torch

from dsl.schema import Balance, Moe, Phase, Rope, Spec, YarnScaling
from tests.compiler.model.segments.model import run
from tests.compiler.model.segments.specs import DENSE, gqa, mla, moe, softmax_moe, spec
from tests.reference.cases import trained_like
from tests.reference.config import Config

MTP_WEIGHT = 0.3
YARN = YarnScaling(factor=40.0, original=16, mscale=0.7, mscale_all_dim=1.0)
EVERYTHING = gqa(
    head_dim=8,
    bias="all",
    qk_norm="width",
    scale=0.3,
    window=3,
    sinks=True,
    softcap=1.5,
    rope=Rope(theta=100.0, width=6, scaling=YARN),
)
HEAVY = Balance(bias_rate=(Phase(value=0.001),), sequence_loss=0.5)


@pytest.mark.parametrize(
    "model_spec",
    [
        spec(layers=(DENSE,), mtp=False),
        spec(layers=(DENSE, moe(), moe(shared=2, balance=HEAVY)), sequence=6),
        spec(layers=(moe(), moe(shared=0)), expert=2),
        spec(layers=(DENSE, moe()), expert=4, attention=mla(query_rank=None), mtp=False, micro_batch=1),
        spec(layers=(DENSE, DENSE), attention=gqa(qk_norm=None), mtp=False),
        spec(layers=(DENSE, softmax_moe(shared=0, normalize=True)), attention=gqa(), expert=2),
        spec(layers=(DENSE, softmax_moe(), softmax_moe(groups=8, top_groups=3)), sequence=6),
        spec(layers=(moe(groups=8, top_groups=5, balance=Balance(sequence_loss=0.5)),), mtp=False),
        spec(layers=(softmax_moe(balance=HEAVY),)),
        spec(layers=(DENSE, softmax_moe(shared=0)), attention=EVERYTHING, expert=2),
        spec(layers=(DENSE, DENSE), attention=gqa(bias="qkv", rope=None, window=3), mtp=False),
        spec(layers=(DENSE, moe()), attention=mla(scale=0.4, rope=Rope(theta=100.0, scaling=YARN))),
    ],
    ids=[
        "dense",
        "dense and MoE",
        "two expert ranks",
        "four expert ranks",
        "grouped queries",
        "grouped queries and softmax",
        "softmax",
        "no bias, groups of one expert",
        "softmax with a bias",
        "all that grouped queries may have",
        "biases, a window, no position",
        "latent attention with YaRN",
    ],
)
def test_equals_the_plain_model(model_spec: Spec) -> None:
    sequence, per_rank = model_spec.train.sequence, model_spec.train.micro_batch
    reference = trained_like(Config.from_plan(model_spec.model.model_dump() | {"sequence": sequence}))
    generator = torch.Generator().manual_seed(3)
    num_ranks = model_spec.parallel.expert
    samples = torch.randint(model_spec.model.vocab, (num_ranks * per_rank, sequence + 2), generator=generator)
    ignored = torch.rand(samples.shape, generator=generator) < 0.2
    targets = samples.masked_fill(ignored, -1)
    main, further = targets[:, 1 : sequence + 1], targets[:, 2 : sequence + 2]

    losses = reference.losses(samples, main, further)
    losses.total(MTP_WEIGHT).backward()

    data = [
        {
            "tokens": samples[rank][:, :sequence].flatten(),
            "targets": main[rank].flatten(),
            "mtp_tokens": samples[rank][:, 1 : sequence + 1].flatten(),
            "mtp_targets": further[rank].flatten(),
        }
        for rank in torch.arange(len(samples)).split(per_rank)
    ]
    constants = {
        "loss": 1 / int((main >= 0).sum()),
        "mtp": MTP_WEIGHT / int((further >= 0).sum()),
    }
    for i in range(model_spec.model.num_layers):
        ffn = model_spec.model.ffn(i)
        if isinstance(ffn, Moe):
            constants[f"sequence_loss L{i}"] = ffn.balance.sequence_loss / len(samples)
    values, gradients = run(model_spec, reference.logical_parameters(), data, constants)

    def total(value: str) -> torch.Tensor:
        return sum(rank[value] for rank in values)  # type: ignore[return-value]

    torch.testing.assert_close(total("loss") * constants["loss"], losses.main.detach(), rtol=0, atol=1e-12)
    if model_spec.model.mtp:
        mtp = total("mtp_loss") * constants["mtp"] / MTP_WEIGHT
        torch.testing.assert_close(mtp, losses.mtp.detach(), rtol=0, atol=1e-12)
    for block, load_E in losses.loads.items():
        name = block.replace("layers.", "L").replace("mtp.", "M")
        assert torch.equal(total(f"{name}_counts"), load_E)
    expected = reference.logical_gradients()
    assert gradients.keys() == {name for name in expected if not name.endswith("router.bias")}
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).abs().max()
        assert difference <= 1e-12 * max(1.0, float(expected[name].abs().max())), (name, float(difference))
        assert expected[name].any() or "experts" in name, f"{name} has no gradient to compare"
