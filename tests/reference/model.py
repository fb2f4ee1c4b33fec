"""DeepSeek-V3 as a plain torch.nn model, the reference in tests of the compiled trainer (arXiv 2412.19437, section 2).

Also the gate of DeepSeek-V2 (arXiv 2405.04434) and grouped-query attention (arXiv 2305.13245).

It shares no code with the product. A parameter's path in the module tree *is* its logical name, so `state_dict` is the
dictionary of logical tensors. The whole global batch goes through in one call; autograd does the rest.

Shapes: B sequences of a batch · S tokens of a sequence · Z = S + 2 · D hidden · V vocab · H heads, G of keys and values
· N, R, U the nope, rope and value dims of a head, or W all of it · C a latent's rank · E routed experts · K top_k
· I inner · T any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference import hyper
from tests.reference.attention import (
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    by_document,
    norm,
    rmsnorm,
    weight,
)
from tests.reference.compressed_attention import CompressedAttention
from tests.reference.config import Attention, Compressed, Config, DeltaNet, Dense, Gqa, Moe
from tests.reference.delta import GatedDeltaNet
from tests.reference.indexer import LightningIndexer
from tests.reference.losses import Losses, cross_entropy


def swiglu(x: Tensor) -> Tensor:
    """silu(gate)·up, with the gate in the first half of the last dim."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def activated(x: Tensor, ffn: Dense | Moe) -> Tensor:
    """The activation between up and down."""
    if ffn.clamp is not None:
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=ffn.clamp.limit), up.clamp(-ffn.clamp.limit, ffn.clamp.limit)
        return gate * torch.sigmoid(ffn.clamp.alpha * gate) * (up + ffn.clamp.shift)
    if ffn.activation == "swiglu":
        return swiglu(x)
    if ffn.activation == "relu2":
        return functional.relu(x) ** 2
    approximate = "tanh" if ffn.activation.endswith("tanh") else "none"
    if not ffn.activation.startswith("geglu"):
        return functional.gelu(x, approximate=approximate)
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate=approximate) * up


def up_weight(hidden: int, inner: int, ffn: Dense | Moe) -> nn.Parameter:
    """The first matrix of a feed-forward part: [gate | up], or only up."""
    return weight(inner if ffn.activation in ("gelu", "gelu_tanh", "relu2") else 2 * inner, hidden)


class Network(nn.Module):
    """To the inner width and back, with an activation between, and biases if there are any."""

    def __init__(self, hidden: int, inner: int, ffn: Dense | Moe) -> None:
        super().__init__()
        self.of = ffn
        self.up = up_weight(hidden, inner, ffn)
        self.down = weight(hidden, inner)
        if ffn.bias:
            self.up_bias, self.down_bias = weight(self.up.shape[0]), weight(hidden)

    def forward(self, x_TD: Tensor) -> Tensor:
        up_bias, down_bias = (self.up_bias, self.down_bias) if self.of.bias else (None, None)
        return functional.linear(activated(functional.linear(x_TD, self.up, up_bias), self.of), self.down, down_bias)


class Expert(Network):
    """An expert, shared or routed: a network that uses the layer's norm, and a weight for its output per token."""

    def __init__(self, hidden: int, inner: int, moe: Moe, *, gated: bool = False) -> None:
        super().__init__(hidden, inner, moe)
        self.gated = gated
        if gated:
            self.gate = weight(1, hidden)

    def forward(self, x_TD: Tensor, gate_T1: Tensor | float = 1.0) -> Tensor:
        """x_TD: [T, D]; gate_T1: [T, 1] -> [T, D]."""
        if self.gated:
            gate_T1 = functional.linear(x_TD, self.gate).sigmoid()
        return gate_T1 * super().forward(x_TD)


class DenseLayer(Network):
    """The feed-forward half of a dense block."""

    def __init__(self, hidden: int, dense: Dense, norm_eps: float) -> None:
        super().__init__(hidden, dense.inner, dense)
        self.norm_eps = norm_eps
        self.norm = norm(hidden)

    def forward(self, h_BSD: Tensor, tokens_BS: Tensor | None = None) -> tuple[Tensor, None]:
        return super().forward(rmsnorm(h_BSD, self.norm, self.norm_eps)), None


@dataclass(frozen=True)
class Routing:
    """What the router decided. Score of every expert, indices of the chosen ones, their weights. `lengths_B`: tokens of
    each sequence, behind which there is padding; None: all rows are tokens."""

    score_BSE: Tensor
    chosen_BSK: Tensor
    gate_BSK: Tensor
    lengths_B: list[int] | None = None

    @property
    def load_E(self) -> Tensor:
        """Tokens each expert got over the whole batch: [E] int64."""
        chosen_SK = torch.cat([chosen_SK for _, chosen_SK in self._sequences()])
        return chosen_SK.flatten().bincount(minlength=self.score_BSE.shape[-1])

    @property
    def balance_loss(self) -> Tensor:
        """Σ_i f_i P_i of each sequence, averaged over the sequences (equations 17 to 20 without α); 1 when balanced."""
        losses = []
        for score_SE, chosen_SK in self._sequences():
            (S, K), E = chosen_SK.shape, score_SE.shape[1]
            f_E = E / (K * S) * functional.one_hot(chosen_SK, E).sum(dim=(0, 1)).to(score_SE.dtype)
            losses.append((f_E * (score_SE / score_SE.sum(-1, keepdim=True)).mean(dim=0)).sum())
        return torch.stack(losses).mean()

    def _sequences(self) -> list[tuple[Tensor, Tensor]]:
        """The scores and choices of each sequence, without padding."""
        lengths_B = self.lengths_B or [self.score_BSE.shape[1]] * len(self.score_BSE)
        rows = zip(self.score_BSE, self.chosen_BSK, lengths_B, strict=True)
        return [(score_SE[:length], chosen_SK[:length]) for score_SE, chosen_SK, length in rows]


class Router(nn.Module):
    """Sigmoid or softmax scores; the balancing bias, if there is one, and the groups act on the choice only. With a
    table each token of the vocabulary has its experts, as in Hash Layers (arXiv 2106.04426)."""

    def __init__(self, hidden: int, moe: Moe, vocab: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = weight(moe.experts, hidden)
        self.logit_bias = weight(moe.experts) if moe.router_bias else None
        if moe.balance.bias_rate is not None:
            self.register_buffer("bias", torch.zeros(moe.experts, dtype=torch.float64))
        if moe.choice == "table":
            self.register_buffer("table", torch.arange(moe.top_k, dtype=torch.int32).repeat(vocab, 1))

    def forward(self, x_BSD: Tensor, tokens_BS: Tensor | None = None) -> Routing:
        logits_BSE = functional.linear(x_BSD, self.weight, self.logit_bias)
        scores = {"softmax": lambda x: x.softmax(dim=-1), "sigmoid": torch.sigmoid}
        score_BSE = scores.get(self.moe.score, lambda x: functional.softplus(x).sqrt())(logits_BSE)
        if self.moe.choice == "table":
            chosen_BSK = self.get_buffer("table").long()[tokens_BS]
        else:
            chosen_BSK = self.choose(score_BSE.detach())
        gate_BSK = score_BSE.gather(-1, chosen_BSK)
        if self.moe.normalize:
            gate_BSK = gate_BSK / (gate_BSK.sum(-1, keepdim=True) + 1e-20)
        return Routing(score_BSE, chosen_BSK, gate_BSK * self.moe.scale)

    def choose(self, score_BSE: Tensor) -> Tensor:
        """The top_k experts by biased score, among the top_groups groups with the largest group scores: the largest of
        the biased scores with softmax, the sum of the two largest (of the one there is) with sigmoid."""
        biased_BSE = score_BSE if self.moe.balance.bias_rate is None else score_BSE + self.get_buffer("bias")
        biased_BSGX = biased_BSE.unflatten(-1, (self.moe.groups, -1))
        counted = 1 if self.moe.score == "softmax" else min(2, biased_BSGX.shape[-1])
        group_score_BSG = biased_BSGX.topk(counted, dim=-1).values.sum(-1)
        kept_BSG = torch.zeros_like(group_score_BSG, dtype=torch.bool)
        kept_BSG.scatter_(-1, group_score_BSG.topk(self.moe.top_groups, dim=-1).indices, True)
        allowed_BSE = biased_BSGX.masked_fill(~kept_BSG[..., None], float("-inf")).flatten(-2)
        return allowed_BSE.topk(self.moe.top_k, dim=-1).indices


class MoeLayer(nn.Module):
    """The feed-forward half of an MoE block: every chosen expert sees the token, none is dropped."""

    def __init__(self, hidden: int, moe: Moe, norm_eps: float, vocab: int) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.norm = norm(hidden)
        self.router = Router(hidden, moe, vocab)
        if moe.shared > 0:
            inner = moe.inner if moe.shared_inner is None else moe.shared_inner
            self.shared = Expert(hidden, inner * moe.shared, moe, gated=moe.shared_gate)
        self.experts = nn.ModuleList(Expert(hidden, moe.inner, moe) for _ in range(moe.experts))

    def forward(self, h_BSD: Tensor, tokens_BS: Tensor | None = None) -> tuple[Tensor, Routing]:
        x_BSD = rmsnorm(h_BSD, self.norm, self.norm_eps)
        routing = self.router(x_BSD, tokens_BS)
        x_TD, chosen_TK, gate_TK = x_BSD.flatten(0, 1), routing.chosen_BSK.flatten(0, 1), routing.gate_BSK.flatten(0, 1)
        y_TD = self.shared(x_TD) if self.router.moe.shared > 0 else torch.zeros_like(x_TD)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == e)
            y_TD = y_TD.index_add(0, token, expert(x_TD[token], gate_TK[token, slot][:, None]))
        return y_TD.view_as(h_BSD), routing


class Block(nn.Module):
    """Attention, then the feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, layer: int, attention: Attention | None = None) -> None:
        super().__init__()
        ffn, attention = config.layers[layer], attention or config.attention_of(layer)
        self.attention: MultiHeadLatentAttention | GroupedQueryAttention | CompressedAttention | GatedDeltaNet
        if isinstance(attention, DeltaNet):
            self.attention = GatedDeltaNet(config.hidden, attention, config.norm_eps)
        elif isinstance(attention, Gqa):
            self.attention = GroupedQueryAttention(config.hidden, attention, config.norm_eps)
        elif isinstance(attention, Compressed):
            self.attention = CompressedAttention(config.hidden, attention, config.norm_eps)
        else:
            self.attention = MultiHeadLatentAttention(config.hidden, attention, config.norm_eps)
        self.ffn: MoeLayer | DenseLayer
        if isinstance(ffn, Moe):
            self.ffn = MoeLayer(config.hidden, ffn, config.norm_eps, config.vocab)
        else:
            self.ffn = DenseLayer(config.hidden, ffn, config.norm_eps)

        self.config = config
        for part in (self.attention, self.ffn):
            if config.norm == "post":
                part.norm = None
            if config.norm != "pre":
                part.post_norm = norm(config.hidden)
        self.attention_hyper, self.ffn_hyper = hyper.mixings(config)

    def forward(
        self, h_BSD: Tensor, tokens_BS: Tensor, starts_BS: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        """The residual stream, or streams [B, S, n, D], of the block, and what its router decided."""
        x_BSD, add = hyper.read(self.attention_hyper, h_BSD, self.config)
        h_BSD = add(self.added(self.attention, by_document(self.attention, x_BSD, starts_BS)))
        x_BSD, add = hyper.read(self.ffn_hyper, h_BSD, self.config)
        y_BSD, routing = self.ffn(x_BSD, tokens_BS)
        return add(self.added(self.ffn, y_BSD)), routing

    def added(self, part: nn.Module, y_BSD: Tensor) -> Tensor:
        """The addend of the residual stream for the output of a part."""
        if self.config.norm != "pre":
            y_BSD = rmsnorm(y_BSD, part.post_norm, self.config.norm_eps)
        return self.config.residual_scale * y_BSD


class MtpModule(Block):
    """Multi-token prediction (section 2.2): one more block, on the next token's embedding and the main hidden state."""

    def __init__(self, config: Config) -> None:
        assert config.mtp is not None
        super().__init__(config, len(config.layers) - 1, config.mtp.attention)
        self.norm_eps = config.norm_eps
        self.embedding_norm = norm(config.hidden)
        self.hidden_norm = norm(config.hidden)
        if config.hyper_connections is None:
            self.projection = weight(config.hidden, 2 * config.hidden)
        else:
            self.embedding_projection, self.hidden_projection = (weight(config.hidden, config.hidden) for _ in "eh")
            self.final_hyper = hyper.Mixing(config, is_end=True)
        self.final_norm = norm(config.hidden)

    def predict(
        self, embedded_BSD: Tensor, hidden_BSD: Tensor, tokens_BS: Tensor, starts_BS: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Both [B, S, D], of the next tokens and of the token itself -> [B, S, D], ready for the shared head."""
        embedded_BSD = rmsnorm(embedded_BSD, self.embedding_norm, self.norm_eps)
        hidden_BSD = rmsnorm(hidden_BSD, self.hidden_norm, self.norm_eps)
        if self.config.hyper_connections is not None:  # `hidden_BSD` are streams
            embedded_BSD = functional.linear(embedded_BSD, self.embedding_projection)[:, :, None]
            both_BSD = embedded_BSD + functional.linear(hidden_BSD, self.hidden_projection)
            h_BSD, routing = self(both_BSD, tokens_BS, starts_BS)
            h_BSD = hyper.collapsed(self.final_hyper, h_BSD, self.config)
            return rmsnorm(h_BSD, self.final_norm, self.norm_eps), routing
        both_BSD = functional.linear(torch.cat([embedded_BSD, hidden_BSD], dim=-1), self.projection)
        h_BSD, routing = self(both_BSD, tokens_BS, starts_BS)
        return rmsnorm(h_BSD, self.final_norm, self.norm_eps), routing


@dataclass(frozen=True)
class Output:
    """logits_BSV, mtp_logits_BSV (None without MTP), and the routing of each MoE block: "layers.3", …, "mtp.0"."""

    logits_BSV: Tensor
    mtp_logits_BSV: Tensor | None
    routings: dict[str, Routing]


class Reference(nn.Module):
    """The whole model. Norms start at 1, biases at 0, everything else at N(0, init_std²)."""

    def __init__(self, config: Config, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = config
        self.embedding = weight(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(len(config.layers)))
        self.final_norm = norm(config.hidden)
        self.final_hyper = hyper.Mixing(config, is_end=True) if config.hyper_connections else None
        if not config.tied:
            self.head = weight(config.vocab, config.hidden)
        self.mtp = nn.ModuleList([] if config.mtp is None else [MtpModule(config)])
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif not name.endswith("norm"):
                nn.init.normal_(parameter, std=config.init_std, generator=generator)
        self.to(dtype)  # tables stay whole numbers

    def forward(
        self, tokens_BS: Tensor, mtp_tokens_BS: Tensor | None = None, starts_BS: Tensor | None = None
    ) -> Output:
        """tokens_BS: [B, S]; mtp_tokens_BS: [B, S], the next token of each (None: the main model only); starts_BS: the
        place where the document of each begins (None: a sequence is one)."""
        routings = {}
        h_BSD = hyper.copied(self.embedded(tokens_BS), self.config)
        for i, layer in enumerate(self.layers):
            h_BSD, routings[f"layers.{i}"] = layer(h_BSD, tokens_BS, starts_BS)
        all_BSD = hyper.collapsed(self.final_hyper, h_BSD, self.config) if self.final_hyper else h_BSD
        hidden_BSD = rmsnorm(all_BSD, self.final_norm, self.config.norm_eps)

        mtp_logits_BSV = None
        if mtp_tokens_BS is not None:
            given_BSD = (self.embedded(mtp_tokens_BS), h_BSD if self.final_hyper else hidden_BSD)
            h_BSD, routings["mtp.0"] = self.mtp[0].predict(*given_BSD, mtp_tokens_BS, starts_BS)
            mtp_logits_BSV = self.logits(h_BSD)
        routed = {block: routing for block, routing in routings.items() if routing is not None}
        return Output(self.logits(hidden_BSD), mtp_logits_BSV, routed)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """hidden_BSD: [B, S, D], after the final norm -> logits_BSV."""
        logits_BSV = functional.linear(hidden_BSD, self.embedding if self.config.tied else self.head)
        logits_BSV, cap = self.config.logit_scale * logits_BSV, self.config.logit_cap
        return logits_BSV if cap is None else cap * torch.tanh(logits_BSV / cap)

    def embedded(self, tokens_BS: Tensor) -> Tensor:
        """tokens_BS: [B, S] -> [B, S, D], as the first layer and MTP read them."""
        return self.config.embedding_scale * functional.embedding(tokens_BS, self.embedding)

    def losses(
        self,
        z_BZ: Tensor,
        targets_BS: Tensor | None = None,
        mtp_targets_BS: Tensor | None = None,
        starts_BS: Tensor | None = None,
        lengths_B: list[int] | None = None,
    ) -> Losses:
        """z_BZ: [B, S + 2] samples of a global batch. Targets are z[1:S+1] and z[2:S+2] unless given (−1: invalid).
        lengths_B: tokens of each sequence, followed by padding (None: no padding)."""
        S = self.config.sequence
        assert z_BZ.shape[1] == S + 2, f"a sample is sequence + 2 = {S + 2} tokens, not {z_BZ.shape[1]}"
        targets_BS = z_BZ[:, 1 : S + 1] if targets_BS is None else targets_BS
        mtp_targets_BS = z_BZ[:, 2 : S + 2] if mtp_targets_BS is None else mtp_targets_BS
        indexers = [module for module in self.modules() if isinstance(module, LightningIndexer)]
        for indexer in indexers:
            indexer.nats.clear()
        output = self(z_BZ[:, :S], z_BZ[:, 1 : S + 1] if self.mtp else None, starts_BS)

        if lengths_B is not None:  # MTP also reads the next token
            behind = {block: [length - (block == "mtp.0") for length in lengths_B] for block in output.routings}
            output.routings.update(
                {block: replace(routing, lengths_B=behind[block]) for block, routing in output.routings.items()}
            )
        main = cross_entropy(output.logits_BSV, targets_BS)
        mtp = torch.zeros_like(main)
        if output.mtp_logits_BSV is not None:
            mtp = cross_entropy(output.mtp_logits_BSV, mtp_targets_BS)
        nats = [indexer.sizes.loss * part for indexer in indexers for part in indexer.nats]
        index = sum(nats, torch.zeros_like(main)) / (z_BZ.shape[0] * S)
        loads = {block: routing.load_E for block, routing in output.routings.items()}
        return Losses(main, mtp, self.sequence_loss(output), loads, index)

    def sequence_loss(self, output: Output) -> Tensor:
        """The balance losses of all layers, each with its weight."""
        moes = [(f"layers.{i}", ffn) for i, ffn in enumerate(self.config.layers) if isinstance(ffn, Moe)]
        parts = [ffn.balance.sequence_loss * output.routings[block].balance_loss for block, ffn in moes]
        return sum(parts, output.logits_BSV.new_zeros(()))

    def load_logical(self, tensors: dict[str, Tensor]) -> None:
        """Takes copies of all parameters, router biases and tables, by logical name; refuses one that is missing or
        unknown."""
        self.load_state_dict(tensors, strict=True)

    def logical_parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, router biases and tables, by logical name."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}

    def logical_gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients by logical name (none for router biases and tables); zeros where no loss reached."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.named_parameters()
        }
