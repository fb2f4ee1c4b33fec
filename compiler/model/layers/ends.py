"""The two ends of the model: embedding, and final norm, head and loss; and the input of the MTP block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place, index, segment, segment_of
from dsl.schema import Grpo

# --- Embedding, final norm, head and loss. T tokens of a micro-batch · D hidden
#
# With vocabulary parallelism each tensor rank has some rows of the embedding and of the head, and computes the tokens
# of all ranks. Its token ids are relative to its first row, and negative for rows of other ranks. The head then
# returns the rank's parts of the cross entropy, and `loss` combines those of all ranks: R is the number of ranks + 1.

EMBED_PARAMETERS = {"table": "embedding"}
FINAL_NORM_PARAMETERS = {"norm": "final_norm"} | hyper.paths("final")
HEAD_PARAMETERS = {"head": "head"}
SAMPLED = ("old", "advantage", "weight", "reference")  # per sampled token, for the policy loss; the last for its KL
LOGP = "logp"  # log-probabilities of targets; the trainer reads them after each micro-batch


def embed(ops: Any, p: Any, tokens_T: Any, *, factor: float = 1.0) -> tuple[Any, ...]:
    """The rows of the embedding, times a factor."""
    return (embed_tokens(ops, p, tokens_T, factor),)


def embed_tokens(ops: Any, p: Any, tokens_T: Any, factor: float) -> Any:
    """The embeddings of tokens as the model reads them."""
    y_TD = ops.embedding(tokens_T, p.table)
    return y_TD if factor == 1 else ops.scale(y_TD, factor)


def embedding_factor(place: Place) -> dict[str, Constant]:
    """The constant for the factor of embeddings; none if it is 1."""
    factor = place.model.embedding_scale
    return {} if factor == 1 else {"factor": factor}


def build_embed(place: Place) -> ir.Segment:
    """The segment of the embedding: T tokens -> T·D. On a tensor-parallel shard it reads a shard of the vocabulary."""
    params = vocabulary_rows(place, "table")
    return segment("embed", embed, params, (index("tokens", place.T),), ("y",), **embedding_factor(place))


def vocabulary_rows(place: Place, name: str) -> tuple[ir.Param, ...]:
    """The rows of the embedding or of the head on a rank."""
    rows = place.model.vocab // place.tensor_shards
    return place.rows((place.table(name, rows),), rows)


def final_norm(ops: Any, p: Any, h_TD: Any, *, eps: float, copies: int) -> tuple[Any, ...]:
    """The normed hidden state, once for each of its readers: the head, and the MTP block if there is one."""
    return (ops.rmsnorm(h_TD, p.norm, eps),) * copies


def final_collapse(ops: Any, p: Any, h_TN: Any, *, eps: float, copies: int, streams: hyper.Streams) -> tuple[Any, ...]:
    """The normed mix of several residual streams for the head, and the streams themselves for the MTP block, if there
    is one."""
    return ops.rmsnorm(hyper.collapse_streams(ops, p, h_TN, streams), p.norm, eps), *((h_TN,) * (copies - 1))


def build_final_norm(place: Place) -> ir.Segment:
    """The segment before the head: the residual stream (T·N) -> its normed state (T·D), and the input of the MTP block
    if there is one."""
    outputs = ("y", "y_mtp") if place.model.mtp and not place.is_mtp else ("y",)
    streams = hyper.streams_of(place)
    params, inputs = (*hyper.collapsers(place), place.gain("norm", place.D)), (place.input("h", place.T, place.N),)
    function = final_collapse if streams else final_norm
    return segment(
        "final_norm", function, params, inputs, outputs, eps=place.model.norm_eps, copies=len(outputs), **streams
    )


def head(ops: Any, p: Any, h_TD: Any, targets_T: Any, *, factor: float = 1.0, cap: float = 0.0) -> tuple[Any, ...]:
    """The cross entropy, summed over the valid targets."""
    return (ops.cross_entropy(_logits(ops, p, h_TD, factor, cap), targets_T),)


@dataclass(frozen=True)
class PolicyHead:
    """The policy loss, a weighted sum over the valid targets, and the log-probability of each target.

    low, high: how far the ratio of probabilities may be below and above 1. kl: the weight of the divergence from the
    reference; if it is not 0, the reference's log-probabilities are the last input. corrected: use the gradient of the
    divergence itself, see runtime/ops/policy_loss.py.
    """

    low: float
    high: float
    kl: float
    corrected: bool
    factor: float = 1.0
    cap: float = 0.0

    def __call__(self, ops: Any, p: Any, h_TD: Any, targets_T: Any, *sampled_T: Any) -> tuple[Any, ...]:
        old_T, advantage_T, weight_T, *reference_T = sampled_T
        sampled = old_T, advantage_T, weight_T, reference_T[0] if reference_T else None
        settings = self.low, self.high, self.kl, self.corrected
        return tuple(ops.policy_loss(_logits(ops, p, h_TD, self.factor, self.cap), targets_T, *sampled, *settings))


def _logits(ops: Any, p: Any, h_TD: Any, factor: float, cap: float) -> Any:
    """The logits. The factor is applied to the hidden state, which has fewer elements."""
    logits_TV = ops.linear(h_TD if factor == 1 else ops.scale(h_TD, factor), p.head)
    return ops.softcap(logits_TV, cap) if cap else logits_TV


def head_part(
    ops: Any, p: Any, h_TD: Any, targets_T: Any, rank: Any, *, ranks: int, factor: float = 1.0, cap: float = 0.0
) -> tuple[Any, ...]:
    """A rank's parts of the cross entropy of each row, from its shard of the vocabulary, in the rank's column."""
    lse_T, picked_T = ops.cross_entropy_part(_logits(ops, p, h_TD, factor, cap), targets_T)
    return (ops.place_parts(lse_T, picked_T, rank, ranks),)


def sample_inputs(grpo: Grpo | None) -> tuple[str, ...]:
    """The inputs of the head per sampled token besides its target; none in a run that learns from text."""
    return () if grpo is None else SAMPLED if grpo.kl else SAMPLED[:-1]


def build_head(place: Place) -> ir.Segment:
    """The segment of the head: h (T·D) and T targets -> the loss, summed over the valid targets. With GRPO it also
    returns the log-probability of each target; on a shard of the vocabulary it returns the parts for `build_loss`
    instead."""
    params = vocabulary_rows(place, "head")
    inputs: tuple[ir.Input, ...] = (place.input("h", place.T, place.D), index("targets", place.T))
    model, grpo = place.model, place.spec.train.grpo
    temperature = grpo.temperature if grpo else 1.0  # cap·tanh(x / cap) / t = (cap/t)·tanh((x/t) / (cap/t))
    constants = {
        **({"factor": model.logit_scale / temperature} if model.logit_scale != temperature else {}),
        **({"cap": model.logit_cap / temperature} if model.logit_cap is not None else {}),
    }
    if grpo:
        samples = (ir.Input(name, (place.T,), place.wide_dtype, grad=False) for name in sample_inputs(grpo))
        outputs, bounds = ("loss", ir.Output(LOGP, grad=False)), {"low": grpo.clip_low, "high": grpo.clip_high}
        corrected = grpo.kl_form == "corrected"
        policy = PolicyHead(grpo.clip_low, grpo.clip_high, grpo.kl, corrected, **constants)
        constants = {**bounds, "kl": grpo.kl, "corrected": corrected, **constants}
        return segment_of("head", policy, params, (*inputs, *samples), outputs, constants)
    if place.is_tensor_shard:
        inputs, ranks = (*inputs, index("rank", 1)), {"ranks": place.tensor_shards}
        return segment("head", head_part, params, inputs, ("parts",), **ranks, **constants)
    return segment("head", head, params, inputs, ("loss",), **constants)


def loss(ops: Any, p: Any, parts_TR: Any, targets_T: Any) -> tuple[Any, ...]:
    """The cross entropy, summed over the valid targets, from the parts of all shards of the vocabulary."""
    return (ops.cross_entropy_of_parts(parts_TR, targets_T),)


def build_loss(place: Place) -> ir.Segment:
    """The segment that joins the parts of all tensor ranks, T·(ranks + 1), to the summed cross entropy."""
    parts = ir.Input("parts", (place.T, place.spec.parallel.tensor + 1), place.wide_dtype)
    return segment("loss", loss, (), (parts, index("targets", place.T)), ("loss",))


# --- The input of the MTP block (multi-token prediction). Source: DeepSeek-V3, arXiv 2412.19437, §2.2
#
# T tokens of a micro-batch · D hidden · N = n·D numbers per token for n residual streams. With several streams each is
# normed and projected separately, and the embedding is added to each, as in DeepSeek-V4.

PARAMETERS = {
    "table": "embedding",  # the main model's
    "embedding_norm": "embedding_norm",
    "hidden_norm": "hidden_norm",
    "projection": "projection",
    "embedding_projection": "embedding_projection",
    "hidden_projection": "hidden_projection",
}


def mtp_input(ops: Any, p: Any, tokens_T: Any, h_TD: Any, *, eps: float, factor: float = 1.0) -> tuple[Any, ...]:
    """projection([rmsnorm(embedding of the next token) | rmsnorm(hidden state)])"""
    return _project_pair(ops, p, embed_tokens(ops, p, tokens_T, factor), h_TD, eps)


def mtp_input_of_embeddings(ops: Any, p: Any, e_TD: Any, h_TD: Any, *, eps: float) -> tuple[Any, ...]:
    """`mtp_input` on embeddings computed before it, where the vocabulary is split over tensor ranks."""
    return _project_pair(ops, p, e_TD, h_TD, eps)


def _project_pair(ops: Any, p: Any, e_TD: Any, h_TD: Any, eps: float) -> tuple[Any, ...]:
    next_TD, hidden_TD = ops.rmsnorm(e_TD, p.embedding_norm, eps), ops.rmsnorm(h_TD, p.hidden_norm, eps)
    return (ops.linear(ops.cat2(next_TD, hidden_TD), p.projection),)


def mtp_streams(
    ops: Any, p: Any, tokens_T: Any, h_TN: Any, *, eps: float, streams: int, factor: float = 1.0
) -> tuple[Any, ...]:
    """For each stream: the projection of the normed embedding of the next token plus that of the normed stream."""
    return _project_streams(ops, p, embed_tokens(ops, p, tokens_T, factor), h_TN, eps, streams)


def mtp_streams_of_embeddings(ops: Any, p: Any, e_TD: Any, h_TN: Any, *, eps: float, streams: int) -> tuple[Any, ...]:
    """`mtp_streams` on embeddings computed before it, where the vocabulary is split over tensor ranks."""
    return _project_streams(ops, p, e_TD, h_TN, eps, streams)


def _project_streams(ops: Any, p: Any, e_TD: Any, h_TN: Any, eps: float, streams: int) -> tuple[Any, ...]:
    e_TD = ops.linear(ops.rmsnorm(e_TD, p.embedding_norm, eps), p.embedding_projection)
    width = h_TN.shape[1] // streams
    joined: Any = None
    for remaining in range(streams, 0, -1):
        h_TD, h_TN = ops.split2(h_TN, width) if remaining > 1 else (h_TN, None)
        y_TD = ops.add(e_TD, ops.linear(ops.rmsnorm(h_TD, p.hidden_norm, eps), p.hidden_projection))
        joined = y_TD if joined is None else ops.cat2(joined, y_TD)
    return (joined,)


def build(place: Place) -> ir.Segment:
    """The segment of the MTP block's input: the next tokens (or their embeddings, if the vocabulary is sharded) and h
    (T·N) -> T·N."""
    D, hyper = place.D, place.model.hyper_connections
    norms = (place.gain("embedding_norm", D), place.gain("hidden_norm", D))
    projections = (place.weight(f"{name}_projection", D, D) for name in ("embedding", "hidden"))
    params = (*norms, *(projections if hyper else (place.weight("projection", D, 2 * D),)))
    streams: dict[str, Constant] = {"streams": hyper.streams} if hyper else {}
    h = place.input("h", place.T, place.N)
    if place.spec.splits_vocabulary:
        inputs = (place.input("e", place.T, D), h)
        function = mtp_streams_of_embeddings if hyper else mtp_input_of_embeddings
        return segment("mtp_input", function, params, inputs, ("y",), eps=place.model.norm_eps, **streams)
    return segment(
        "mtp_input",
        mtp_streams if hyper else mtp_input,
        (place.table("table", place.model.vocab), *params),
        (index("tokens", place.T), h),
        ("y",),
        eps=place.model.norm_eps,
        **streams,
        **embedding_factor(place),
    )
