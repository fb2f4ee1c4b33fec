"""FLOPs of training on a token, by the definition that DeepSeek-V3's published MFU comes out exactly with.

Three forwards of the main model, since a backward is two, and two forwards of a product whose weight is not trained;
counted from the ops of its segments, so that what a layer computes is what MFU is of. The definition is not all the
work that a device does:

- Products of activations with weights count, those of the gates (`linear_wide`) do not. No other op of a forward does
  but the attention core: norms, activations and the embedding, which is looked up, are left out.
- The attention core is q·k and the weights' sum of values: over the keys that an op computes for (`causal`, half of
  the sequence), and over twice as many (`full`), as if nothing were masked.
- A delta rule counts in full: no part of its products is masked.
- The MTP block is left out, and what a backward computes again counts once, as do products in eight bits.
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
CHOOSING = ("select_keys", "indexer_loss")  # work of an indexer, of which the definition knows the products of weights
FORWARDS = 3  # a backward is two


def flops_per_token(steps: Iterable[Use | Communication], tokens: int) -> Flops:
    """FLOPs of one token. `steps`: those of a model whose micro-batch has so many tokens."""
    products = core = rows = 0
    found: dict[Hashable, tuple[tuple[int, int], int]] = {}  # by the key of a segment; core: of a forward
    for step in steps:
        if isinstance(step, Communication):
            rows = int(step.sizes[0].shape[0]) if step.kind == "dispatch" else rows
        elif not step.site.predicts_ahead:
            key = step.segment.key
            if key not in found:
                found[key] = _forward(step.segment)
            (fixed, by_row), of_core = found[key]
            products += fixed + by_row * rows
            core += of_core
    return Flops((products + FORWARDS * core) / tokens, (products + 2 * FORWARDS * core) / tokens)


def _forward(segment: Segment) -> tuple[tuple[int, int], int]:
    """The FLOPs of the products of a segment, forward and backward, with those of a received row; and of a forward of
    its attention core.

    Fusion, storage and recompute change no forward of this definition, so the segment is taken without them.
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
