"""Closed-form facts that pin the reference model."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from tests.reference.attention import rmsnorm
from tests.reference.cases import EXACT, close, config, moe, noise, routing_of, samples, trained_like
from tests.reference.config import Config, Dense, Phase, Rope, phase_value
from tests.reference.model import Reference, swiglu
from tests.reference.rotation import rotate

# ---------------------------------------------------------------- names, shapes, initial values


def test_logical_names_and_shapes() -> None:
    """hidden 24, 3 heads of 6 + 4 (value 5), ranks 10 and 8, dense inner 20, 8 experts of inner 12, 2 shared."""
    attention = {"norm": (24,), "q_down": (10, 24), "q_norm": (10,), "q_up": (30, 10), "kv_down": (12, 24)}
    attention |= {"kv_norm": (8,), "kv_up": (33, 8), "out": (24, 15)}
    routed = {"norm": (24,), "router.weight": (8, 24), "router.bias": (8,)}
    routed |= {"shared.up": (48, 24), "shared.down": (24, 24)}
    for e in range(8):
        routed |= {f"experts.{e}.up": (24, 24), f"experts.{e}.down": (24, 12)}
    dense = {"norm": (24,), "up": (40, 24), "down": (24, 20)}
    mtp_shapes = {"embedding_norm": (24,), "hidden_norm": (24,), "projection": (24, 48), "final_norm": (24,)}

    expected: dict[str, tuple[int, ...]] = {"embedding": (37, 24), "head": (37, 24), "final_norm": (24,)}
    for block, ffn in (("layers.0", dense), ("layers.1", routed), ("mtp.0", routed)):
        expected |= {f"{block}.attention.{name}": shape for name, shape in attention.items()}
        expected |= {f"{block}.ffn.{name}": shape for name, shape in ffn.items()}
    expected |= {f"mtp.0.{name}": shape for name, shape in mtp_shapes.items()}

    model = Reference(config(layers=(Dense(20), moe(shared=2))))
    assert {name: tuple(tensor.shape) for name, tensor in model.logical_parameters().items()} == expected
    assert expected.keys() - model.logical_gradients().keys() == {"layers.1.ffn.router.bias", "mtp.0.ffn.router.bias"}


def test_names_that_depend_on_the_configuration() -> None:
    names = Reference(config(query_rank=None, layers=(moe(shared=0),), mtp=None)).logical_parameters().keys()
    assert "layers.0.attention.q" in names
    assert not [name for name in names if "q_" in name or "shared" in name or "mtp" in name]


def test_initial_values() -> None:
    small = config(init_std=0.006)
    tensors = Reference(small, seed=3).logical_parameters()
    for name, tensor in tensors.items():
        if name.endswith("norm"):
            assert close(tensor, 1.0, 0.0)
        elif name.endswith("bias"):
            assert close(tensor, 0.0, 0.0)
        else:  # a standard error of the deviation is std/√2n; five of them
            assert abs(tensor.std().item() / 0.006 - 1) < 5 / math.sqrt(2 * tensor.numel()), name
    assert all(tensor.equal(tensors[name]) for name, tensor in Reference(small, seed=3).logical_parameters().items())
    assert not Reference(small, seed=4).embedding.equal(tensors["embedding"])


def test_load_logical_is_the_inverse_of_logical_parameters() -> None:
    source, target = trained_like(config(), 0), Reference(config(), 1)
    target.load_logical(source.logical_parameters())
    assert all(tensor.equal(target.state_dict()[name]) for name, tensor in source.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_logical({"embedding": source.embedding})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        target.load_logical({**source.logical_parameters(), "embeding": source.embedding})


def test_from_plan_reads_the_dump_of_a_model() -> None:
    """The dump is written by hand; `asdict` gives the blocks with the same layout."""
    bias_rate = (Phase(0.001, 1000), Phase(0.0))
    expected = config(layers=(Dense(20), moe(bias_rate=bias_rate), moe(bias_rate=bias_rate)))
    dump = asdict(expected)
    dump["name"] = "small"
    dump["attention"]["kind"] = "mla"
    dump["layers"] = [
        {"first": 0, "last": 0, "ffn": {"kind": "dense", **asdict(expected.layers[0])}},
        {"first": 1, "last": 2, "ffn": {"kind": "moe", "score": "sigmoid", **asdict(expected.layers[1])}},
    ]
    assert Config.from_plan(dump) == expected
    assert Config.from_plan({**dump, "mtp": None}) == replace(expected, mtp=None)


def test_phases() -> None:
    phases = (Phase(0.3, 100), Phase(0.1, 200), Phase(0.0))
    assert [phase_value(phases, tokens) for tokens in (0, 99, 100, 199, 200, 10**9)] == [0.3, 0.3, 0.1, 0.1, 0.0, 0.0]


# ---------------------------------------------------------------- single formulas


def test_rmsnorm_has_unit_rms_and_eps_inside_the_root() -> None:
    x = noise(5, 8)
    y = rmsnorm(x, torch.ones(8), eps=0.0)
    assert close(y.pow(2).mean(-1), 1.0)
    assert close(rmsnorm(torch.full((1, 4), 3.0).double(), torch.full((4,), 2.0), eps=7.0), 3 / 4 * 2)


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    assert close(swiglu(torch.tensor([2.0, 5.0], dtype=torch.float64)), 2 / (1 + math.exp(-2)) * 5)


def test_rotate_turns_each_pair_by_its_angle() -> None:
    """(1, 0) becomes (cos, sin) of position · theta^(−2i/R)."""
    x_BSHR = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]).double().expand(1, 9, 1, 6)
    turned = rotate(x_BSHR, Rope(100.0))
    for p in range(9):
        for i in range(3):
            angle = p * 100.0 ** (-2 * i / 6)
            assert close(turned[0, p, 0, 2 * i], math.cos(angle)) and close(turned[0, p, 0, 2 * i + 1], math.sin(angle))


def test_rotated_products_see_distances_only() -> None:
    q, k = noise(2, 4)
    score_SS = rotate(q.expand(1, 9, 1, 4), Rope(50.0))[0, :, 0] @ rotate(k.expand(1, 9, 1, 4), Rope(50.0))[0, :, 0].T
    assert close(score_SS[1:, 1:], score_SS[:-1, :-1])
    assert not close(score_SS[0, 1:], score_SS[0, :-1], 1e-3)


def test_the_first_token_attends_to_itself_alone() -> None:
    """Position 0 outputs `out` of its own values, for any queries and keys."""
    model = trained_like(config())
    attention = model.layers[0].attention
    h_BSD = noise(2, 12, 24)
    c_BC = (rmsnorm(h_BSD[:, 0], attention.norm, 1e-6) @ attention.kv_down.T)[:, :8]
    kv_BHX = (rmsnorm(c_BC, attention.kv_norm, 1e-6) @ attention.kv_up.T).view(2, 3, 6 + 5)
    assert close(attention(h_BSD)[:, 0], kv_BHX[:, :, 6:].flatten(1) @ attention.out.T)


def test_equal_keys_give_the_mean_of_the_past() -> None:
    """Queries of zero make every score 0, so attention is the running mean of the values."""
    attention = trained_like(config()).layers[0].attention
    h_BSD = noise(1, 12, 24)
    with torch.no_grad():
        attention.q_up.zero_()
    c_BSC = (rmsnorm(h_BSD, attention.norm, 1e-6) @ attention.kv_down.T)[..., :8]
    v_BSHU = (rmsnorm(c_BSC, attention.kv_norm, 1e-6) @ attention.kv_up.T).view(1, 12, 3, 11)[..., 6:]
    mean_BSHU = v_BSHU.cumsum(1) / torch.arange(1, 13).view(1, 12, 1, 1)
    assert close(attention(h_BSD), mean_BSHU.flatten(2) @ attention.out.T)


# ---------------------------------------------------------------- router and experts


@pytest.mark.parametrize("seed", range(3))
def test_choice_by_enumeration(seed: int) -> None:
    """The rule in words, token by token: rank the groups by the sum of their two best, then the experts in the kept."""
    model, x_BSD = routing_of(moe(), seed)
    router = model.layers[0].ffn.router
    routing = router(x_BSD)
    for token in range(24):
        biased = (torch.sigmoid(router.weight @ x_BSD.flatten(0, 1)[token]) + router.bias).tolist()
        groups = [(biased[2 * g] + biased[2 * g + 1], g) for g in range(4)]
        kept_groups = {g for _, g in sorted(groups, reverse=True)[:2]}
        best = sorted(((s, e) for e, s in enumerate(biased) if e // 2 in kept_groups), reverse=True)[:3]
        assert sorted(e for _, e in best) == sorted(routing.chosen_BSK.flatten(0, 1)[token].tolist())


def test_gates_are_the_unbiased_scores_normalised() -> None:
    model, x_BSD = routing_of(moe(scale=2.5))
    routing = model.layers[0].ffn.router(x_BSD)
    assert close(routing.gate_BSK.sum(-1), 2.5)
    score_BSK = routing.score_BSE.gather(-1, routing.chosen_BSK)
    assert close(routing.gate_BSK / routing.gate_BSK[..., :1], score_BSK / score_BSK[..., :1])

    model, x_BSD = routing_of(moe(normalize=False, scale=3.0))
    routing = model.layers[0].ffn.router(x_BSD)
    assert close(routing.gate_BSK, 3.0 * routing.score_BSE.gather(-1, routing.chosen_BSK))


def test_a_common_bias_changes_nothing_and_has_no_gradient() -> None:
    model, z_BZ = trained_like(config()), samples(config())
    before = model.losses(z_BZ)
    for bias in model.buffers():
        bias += 0.75
        assert not bias.requires_grad
    after = model.losses(z_BZ)
    assert close(before.total(0.3), after.total(0.3), 0.0)


def test_a_large_bias_makes_an_expert_everyones_choice() -> None:
    model, z_BZ = trained_like(config()), samples(config())
    model.layers[1].ffn.router.bias[5] = 10.0
    assert model.losses(z_BZ).loads["layers.1"][5] == 2 * 12


def test_no_token_is_dropped() -> None:
    loads = trained_like(config()).losses(samples(config())).loads
    assert list(loads) == ["layers.1", "layers.2", "mtp.0"]
    assert all(load_E.shape == (8,) and load_E.sum() == 2 * 12 * 3 for load_E in loads.values())


def test_moe_output_is_shared_plus_gated_experts() -> None:
    """Every expert on every token, weighted by a dense matrix of gates."""
    model, h_BSD = routing_of(moe())
    ffn = model.layers[0].ffn
    y_BSD, routing = ffn(h_BSD)
    x_BSD = rmsnorm(h_BSD, ffn.norm, 1e-6)
    gate_BSE = torch.zeros(2, 12, 8, dtype=torch.float64).scatter(-1, routing.chosen_BSK, routing.gate_BSK)
    experts = [swiglu(x_BSD @ expert.up.T) @ expert.down.T for expert in ffn.experts]
    routed_BSD = sum(gate_BSE[..., e : e + 1] * output for e, output in enumerate(experts))
    assert close(y_BSD, routed_BSD + swiglu(x_BSD @ ffn.shared.up.T) @ ffn.shared.down.T)


# ---------------------------------------------------------------- the whole model


def test_causality() -> None:
    """Changing token 7 changes main logits from position 7 on, and MTP logits from position 6 on (they see t + 1)."""
    model, z_BZ = trained_like(config()), samples(config())
    changed_BZ = z_BZ.clone()
    changed_BZ[:, 7] = (z_BZ[:, 7] + 1) % 37
    a, b = (model(z[:, :12], z[:, 1:13]) for z in (z_BZ, changed_BZ))
    main_S = (a.logits_BSV - b.logits_BSV).abs().amax(dim=(0, 2))
    mtp_S = (a.mtp_logits_BSV - b.mtp_logits_BSV).abs().amax(dim=(0, 2))
    assert main_S[:7].max() < EXACT and main_S[7:].min() > 1e-6
    assert mtp_S[:6].max() < EXACT and mtp_S[6:].min() > 1e-6


def test_sequences_do_not_see_each_other() -> None:
    model, z_BZ = trained_like(config()), samples(config(), batch=3)
    together = model(z_BZ[:, :12], z_BZ[:, 1:13])
    for i in range(3):
        alone = model(z_BZ[i : i + 1, :12], z_BZ[i : i + 1, 1:13])
        assert close(together.logits_BSV[i], alone.logits_BSV[0])
        assert close(together.mtp_logits_BSV[i], alone.mtp_logits_BSV[0])


def test_residual_stream_without_sublayers() -> None:
    """The logits are head · norm(embedding) if `out` and every `down` are zero."""
    model, z_BZ = trained_like(config()), samples(config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".out", ".down")):
                parameter.zero_()
    hidden_BSD = rmsnorm(model.embedding[z_BZ[:, :12]], model.final_norm, 1e-6)
    output = model(z_BZ[:, :12], z_BZ[:, 1:13])
    assert close(output.logits_BSV, hidden_BSD @ model.head.T)
    # MTP: projection of [next embedding | final-normed hidden], each normed again, then its own final norm.
    mtp = model.mtp[0]
    left_BSD = rmsnorm(model.embedding[z_BZ[:, 1:13]], mtp.embedding_norm, 1e-6) @ mtp.projection[:, :24].T
    right_BSD = rmsnorm(hidden_BSD, mtp.hidden_norm, 1e-6) @ mtp.projection[:, 24:].T
    assert close(output.mtp_logits_BSV, rmsnorm(left_BSD + right_BSD, mtp.final_norm, 1e-6) @ model.head.T)


def test_losses_of_a_fresh_model_are_log_vocab() -> None:
    losses = Reference(config(init_std=1e-4)).losses(samples(config(), batch=8))
    assert close(losses.main, math.log(37), 1e-3) and close(losses.mtp, math.log(37), 1e-3)


def test_losses_against_targets_one_by_one() -> None:
    """Target of position t: z[t + 1], of MTP z[t + 2]; each loss is −log of the softmax at the target, averaged."""
    model, z_BZ = trained_like(config()), samples(config())
    losses, output = model.losses(z_BZ), model(z_BZ[:, :12], z_BZ[:, 1:13])
    for loss, logits_BSV, ahead in ((losses.main, output.logits_BSV, 1), (losses.mtp, output.mtp_logits_BSV, 2)):
        share_BSV = logits_BSV.exp() / logits_BSV.exp().sum(-1, keepdim=True)
        nll = [-math.log(share_BSV[b, t, z_BZ[b, t + ahead]].item()) for b in range(2) for t in range(12)]
        assert close(loss, sum(nll) / 24)


def test_normalisation_is_over_the_valid_targets_of_the_whole_batch() -> None:
    """1 and 12 valid targets: the batch weighs them 1 : 12, not each sequence's mean equally."""
    model, z_BZ = trained_like(config()), samples(config())
    targets_BS, mtp_targets_BS = z_BZ[:, 1:13].clone(), z_BZ[:, 2:14].clone()
    targets_BS[0, 1:] = -1
    mtp_targets_BS[1, :5] = -1
    batch = model.losses(z_BZ, targets_BS, mtp_targets_BS)
    first, second = (model.losses(z_BZ[i], targets_BS[i], mtp_targets_BS[i]) for i in (slice(0, 1), slice(1, 2)))
    assert close(batch.main, (1 * first.main + 12 * second.main) / 13)
    assert close(batch.mtp, (12 * first.mtp + 7 * second.mtp) / 19)
    assert close(batch.sequence, (first.sequence + second.sequence) / 2)
    with pytest.raises(AssertionError, match="without a valid target"):
        model.losses(z_BZ, torch.full((2, 12), -1))


def test_sequence_loss_of_uniform_routing_is_alpha_per_main_moe_layer() -> None:
    """Equal scores: P_i = 1/E and Σ f_i = E, so each layer gives α·1, however the choice falls; MTP gives none."""
    uneven = config(layers=(Dense(20), moe(sequence_loss=0.25), moe(sequence_loss=0.5)))
    model = trained_like(uneven)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter.zero_()
    assert close(model.losses(samples(uneven)).sequence, 0.75)


def test_sequence_loss_by_counting() -> None:
    model, z_BZ = trained_like(config(layers=(moe(sequence_loss=0.5),))), samples(config())
    routing = model(z_BZ[:, :12]).routings["layers.0"]
    score, chosen = routing.score_BSE.tolist(), routing.chosen_BSK.tolist()
    expected = 0.0
    for b in range(2):
        for i in range(8):
            f = 8 / (3 * 12) * sum(i in chosen[b][t] for t in range(12))
            P = sum(score[b][t][i] / sum(score[b][t]) for t in range(12)) / 12
            expected += 0.5 * f * P / 2
    assert close(model.losses(z_BZ).sequence, expected)
