"""FLOPs of training on one token, by the definition that exactly reproduces DeepSeek-V3's published MFU.

The count is three forwards of the main model, as a backward is two, and two forwards of a product whose weight is not
trained. It sums over the ops of the model's segments, so that MFU is about the layers as they are computed. It does not
include all the work of a device:

- Products of activations with weights count, except for those of the gates (`linear_wide`). Of the other ops, only the
  attention core counts: norms, activations and the embedding lookup do not.
- The attention core is q·k and the weighted sum of values. `causal` counts the keys that the op computes, half of the
  sequence, and `full` counts twice as many, as if nothing were masked.
- A delta rule counts in full, as no part of its products is masked.
- The MTP block does not count. Recomputation does not count, and an FP8 product counts like any other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from compiler.ir import Communication, Segment, Use
from compiler.model.ops import kernel_class
from compiler.model.segments.interpret import interpret
from compiler.model.segments.node_costs import works_of
from compiler.predict.prediction import Flops

PRODUCTS, CORE, STATES, GATE = ("gemm", "grouped_gemm"), "attention", "delta_rule", "linear_wide"
CHOOSING = ("select_keys", "indexer_loss")  # ops of an indexer that do not count; its products with weights do
FORWARDS = 3  # a backward is two


def flops_per_token(steps: Iterable[Use | Communication], tokens: int) -> Flops:
    """FLOPs of one token. `steps`: the steps of a model whose micro-batch has `tokens` tokens."""
    products = core = rows = 0
    counted: dict[Hashable, tuple[tuple[int, int], int]] = {}  # by the key of a segment, as `_forward` returns it
    for step in steps:
        if isinstance(step, Communication):
            rows = int(step.sizes[0].shape[0]) if step.kind == "dispatch" else rows
        elif not step.site.predicts_ahead:
            key = step.segment.key
            if key not in counted:
                counted[key] = _forward(step.segment)
            (fixed, by_row), of_core = counted[key]
            products += fixed + by_row * rows
            core += of_core
    return Flops((products + FORWARDS * core) / tokens, (products + 2 * FORWARDS * core) / tokens)


def _forward(segment: Segment) -> tuple[tuple[int, int], int]:
    """FLOPs of a segment: of its products, forward and backward, fixed and per received row; and of its attention core.

    The core counts one forward. Fusion, storage and recompute do not change the count, so they are taken off first.
    """
    plain = replace(segment, recompute=(), remade=(), stored=(), fused=())
    fixed = by_row = core = 0
    frozen = {param.name for param in segment.params if not param.grad}
    for phase, node, works in works_of(interpret(plain)):
        for op, work in works if phase == "F" and node.op != GATE else ():
            if kernel_class(op) in PRODUCTS:
                times = FORWARDS - (node.reads[1] in frozen)
                fixed, by_row = fixed + times * work.flops, by_row + times * work.flops_row
            fixed += FORWARDS * work.flops if kernel_class(op) == STATES else 0
            core += work.flops if kernel_class(op) == CORE and op not in CHOOSING else 0
    return (fixed, by_row), core
