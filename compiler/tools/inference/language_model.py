"""A model's layers with weights, as functions of tokens: hidden states, logits and losses, with or without a cache.

T tokens · B sequences of L tokens · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiler import ir
from compiler.ir import StageStep
from compiler.plan.blocks import StageBlock, model_blocks
from compiler.tools.inference.op_tables import CachedForward, Forward
from compiler.tools.inference.sources import InferenceError
from compiler.tools.inference.tape import Function, OpTables, Tapes
from dsl.schema import BUILT_IN, Parallel, Spec
from runtime.ops import OPS
from runtime.ops.cross_entropy import logits_at_targets
from runtime.ops.product import wide

LOGITS = 2**22  # computed at a time
DTYPES = ("fp64", "fp32", "bf16")  # supported compute dtypes


def spec_for_one_rank(spec: Spec, dtype: str = "") -> Spec:
    """A spec changed for inference on one rank: all experts local, and all matrix products in the dtype of activations.

    `dtype`: one of `DTYPES`, or "" for the run's dtype of activations.
    """
    parts = {"precision": BUILT_IN[dtype or spec.precision.compute], "parallel": Parallel(data=1)}
    parts |= {
        "train": spec.train.model_copy(update={"grpo": None})
    }  # with grpo the head computes a loss of sampled tokens
    data = spec.data.model_copy(
        update={"documents": "joined", "chat": None, "prompts": None}
    )  # a sequence is one document here
    return spec.model_copy(update=parts | {"data": data, "recompute": (), "unfused": (), "offload": ()})


class Cache:
    """The cache of some blocks for one sequence of `length` tokens. Decreasing `length` drops the last tokens."""

    def __init__(self, tables: Mapping[str, CachedForward]) -> None:
        self._tables = tables  # site → op table
        self._tapes = Tapes(tables)
        self.length = 0

    def run(self, function: Function, *inputs: Tensor) -> Tensor:
        """Run a function on inputs [T, ..] of the next T tokens, and append these tokens."""
        new = inputs[0].shape[0]
        output = self._tapes.run(function, self.length, *inputs)
        if output is None:
            output = function(lambda site: self._table(site, new), *inputs)
        self.length += new
        return output

    def _table(self, site: str, new: int) -> Forward:
        """The op table of a segment for the next `new` tokens."""
        table = self._tables.get(site)
        if table is None:
            return Forward(new)
        table.begin(self.length, new)
        return table


class LanguageModel:
    """A model and its weights. `tensors`: by the names that segments use, with all experts of a layer in one tensor.

    `spec` must be for one rank: see `spec_for_one_rank`.
    """

    def __init__(self, spec: Spec, tensors: Mapping[str, Tensor]) -> None:
        *blocks, end = model_blocks(spec)
        steps = end.steps
        head = next(index for index, step in enumerate(steps) if step.site == "head")
        self.spec = spec
        self._trunk, self._end = tuple(blocks), StageBlock(steps[:head], "final_h")
        self._head = _segment(steps[head])
        self._drafter: tuple[StageBlock, ir.Use] | None = None
        if spec.model.mtp:
            self._drafter = StageBlock(steps[head + 1 : -1], "M0_final_h"), _segment(steps[-1])
        uses = [use for block in blocks for use in block.uses] + [step for step in steps if isinstance(step, ir.Use)]
        self._weights = {use.site: {name: tensors[tensor] for name, tensor in use.params} for use in uses}
        self._tapes = Tapes({})
        self._params = {site: SimpleNamespace(**weights) for site, weights in self._weights.items()}

    @property
    def vocab(self) -> int:
        return self.spec.model.vocab

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for weights in self._weights.values() for tensor in weights.values())

    @property
    def sequence(self) -> int:
        """Tokens per training sequence."""
        return self.spec.train.sequence

    @property
    def can_draft(self) -> bool:
        """Whether it has an MTP block, which predicts the token after the next one."""
        return self._drafter is not None

    # ------------------------------------------------------------ whole sequences

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, length: int) -> Tensor:
        """Concatenated sequences of `length` tokens each -> h_TN, the residual stream after the last layer."""
        if not self.spec.model.customs:
            ops = Forward(length)
            return self._run(self._trunk, {"tokens": tokens_T}, lambda _: ops)
        if length > self.sequence:
            raise InferenceError(
                f"a sequence has {length:,} tokens, but the model's modules were traced for {self.sequence:,}",
                "give shorter sequences",
            )
        ops, padding = Forward(self.sequence), (0, self.sequence - length)  # tokens do not see later ones
        filled_BL = torch.nn.functional.pad(tokens_T.view(-1, length), padding)
        h_TN = self._run(self._trunk, {"tokens": filled_BL.flatten()}, lambda _: ops)
        return h_TN.unflatten(0, filled_BL.shape)[:, :length].flatten(0, 1)

    @torch.inference_mode()
    def logits(self, h_TN: Tensor) -> Tensor:
        """h_TN of the main model -> logits_TV."""
        output = self._tapes.run(self._logits_of, 0, h_TN)
        return self._logits_of(lambda _: Forward(len(h_TN)), h_TN) if output is None else output

    @torch.inference_mode()
    def score(self, tokens_BL: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets -> [B, L] the cross entropy of each target in nats, FP64, and whether it has the largest
        logit. A target below 0 is ignored: its cross entropy is 0."""
        h_TN, targets_T = self.hidden(tokens_BL.flatten(), tokens_BL.shape[1]), targets_BL.flatten()
        rows = max(1, LOGITS // self.vocab)
        nats, best = [], []
        for h_tN, targets_t in zip(h_TN.split(rows), targets_T.split(rows), strict=True):
            logits_tV = self.logits(h_tN)
            lse_t = OPS["cross_entropy"](logits_tV, targets_t)[1]
            nats.append((lse_t - logits_at_targets(wide(logits_tV), targets_t)).double().masked_fill_(targets_t < 0, 0))
            best.append(logits_tV.argmax(dim=1) == targets_t)
        return torch.cat(nats).view_as(targets_BL), torch.cat(best).view_as(targets_BL)

    # ------------------------------------------------------------ token by token

    def cache(self) -> Cache:
        """An empty cache for the main model."""
        return self._cache(self._trunk)

    def draft_cache(self) -> Cache:
        """An empty cache for the MTP block."""
        assert self._drafter, "the model has no MTP block"
        return self._cache(self._drafter[:1])

    @torch.inference_mode()
    def extend(self, tokens_T: Tensor, cache: Cache) -> Tensor:
        """Append tokens to the sequence of a cache -> h_TN for them, as from `hidden`."""
        return cache.run(self._extended, tokens_T)

    @torch.inference_mode()
    def draft(self, next_T: Tensor, h_TN: Tensor, cache: Cache) -> Tensor:
        """The residual stream of some tokens, and the token that follows each -> logits_V for the token after the last
        of `next_T`. `cache`: of the MTP block, with all earlier tokens."""
        return cache.run(self._drafted, next_T, h_TN)[0]

    # ------------------------------------------------------------ segments

    def _cache(self, blocks: Iterable[StageBlock]) -> Cache:
        sites = [use.site for block in blocks for use in block.uses]
        return Cache({site: CachedForward(w.values(), w.get("kv_up")) for site in sites for w in [self._weights[site]]})

    def _extended(self, ops: OpTables, tokens_T: Tensor) -> Tensor:
        return self._run(self._trunk, {"tokens": tokens_T}, ops)

    def _logits_of(self, ops: OpTables, h_TN: Tensor) -> Tensor:
        return self._logits(ops, self._head, self._apply_end(ops, h_TN, self._end.output))

    def _drafted(self, ops: OpTables, next_T: Tensor, h_TN: Tensor) -> Tensor:
        """logits [1, V] after the last token."""
        assert self._drafter, "the model has no MTP block"
        block, head = self._drafter
        values = {"mtp_tokens": next_T, "final_h_mtp": self._apply_end(ops, h_TN, "final_h_mtp")}
        return self._logits(ops, head, self._run([block], values, ops)[-1:])

    def _apply_end(self, ops: OpTables, h_TN: Tensor, output: str) -> Tensor:
        """Apply the end of the main model to the residual stream. `output`: the value to return, the input of the head
        or of the MTP block."""
        return self._run([StageBlock(self._end.steps, output)], {self._trunk[-1].output: h_TN}, ops)

    def _logits(self, ops: OpTables, head: ir.Use, h_TD: Tensor) -> Tensor:
        (logits_TV,) = head.segment.function(ops(head.site), self._params[head.site], h_TD, None)
        return logits_TV

    def _run(self, blocks: Iterable[StageBlock], data: Mapping[str, Tensor], ops: OpTables) -> Tensor:
        """Run blocks and return the last one's output. `ops`: site of a segment → its op table."""
        values: dict[str, Any] = dict(data)
        for block in blocks:
            for step in block.steps:
                inputs = [values[name] for name in step.inputs]
                if isinstance(step, ir.Use):
                    outputs = step.segment.function(ops(step.site), self._params[step.site], *inputs)
                    values |= zip(step.outputs, outputs, strict=True)
                else:
                    values |= zip(
                        (buffer.name for buffer in step.outputs),
                        _exchange_locally(ops(step.site), step, inputs),
                        strict=True,
                    )
            values = {**data, block.output: values[block.output]}  # drop values internal to the block
        return values[block.output]


def _exchange_locally(ops: Forward, step: ir.Communication, inputs: list[Tensor]) -> list[Tensor]:
    """The result of an exchange if all experts are local: the same rows, and the end offset of each expert's rows."""
    if step.kind != "dispatch":
        return inputs
    *rows, counts_E = inputs
    return [*rows, ops.ends(counts_E)]


def _segment(step: StageStep) -> ir.Use:
    assert isinstance(step, ir.Use), step.site
    return step
